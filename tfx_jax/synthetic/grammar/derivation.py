"""Random derivation of a sentence: samples its facts and how they are expressed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tfx_jax.synthetic.grammar.facts import Action, World
from tfx_jax.synthetic.grammar.inflection import (
    Agreement,
    Style,
    Tense,
    english_number,
    inflect,
    japanese_number,
    verb_group,
    with_article,
    with_s,
)
from tfx_jax.synthetic.grammar.lexicon import (
    DEMONSTRATIVES,
    FREQUENCIES,
    MEANS,
    MONTHS,
    PRONOUNS,
    TIMES,
    WEEKDAYS,
    Noun,
    Pair,
    select,
)
from tfx_jax.synthetic.grammar.phrases import THE, NounPhrase, at, described, kind_of, possessive, the
from tfx_jax.synthetic.grammar.rules import CLAUSE, NOTHING, RELATIVE, Rule, Slots

Item = TypeVar("Item")
Fact = TypeVar("Fact", bound=tuple[Any, ...])
Named = TypeVar("Named", Pair, NounPhrase)

_TENSES: dict[str, tuple[Tense, ...]] = {  # tenses by a verb's aspect; repetitions make a tense more likely
    "activity": (
        *("past", "past", "past", "past", "present", "present", "future", "future", "can", "must", "want"),
        *("progressive", "progressive", "past progressive"),
    ),
    "event": ("past", "past", "past", "past", "present", "future", "future", "can", "must", "want"),
    "state": ("past", "present", "present", "present"),
    "accident": ("past",),
    "reaction": ("past", "past", "past", "present", "progressive", "past progressive"),
}


class Dice:
    """Small random integers, a pure function of a name that is the same on every machine and Python version.

    They are the digits of a hash in the requested bases, which is much cheaper than seeding `random.Random`.
    """

    def __init__(self, name: str):
        self._name = name
        self._refills = 0  # number of hashes so far
        self._digits = 0  # rest of the current hash, a large integer

    def below(self, sides: int) -> int:
        """Returns an integer from 0 to sides - 1; `sides` must be well below 2**32."""
        if self._digits < 1 << 64:
            digest = hashlib.blake2b(f"{self._name}/{self._refills}".encode()).digest()
            self._digits = int.from_bytes(digest, "little")
            self._refills += 1
        self._digits, face = divmod(self._digits, sides)  # take the last digit in base `sides`
        return face

    def choose(self, options: Sequence[Item]) -> Item:
        """Returns one of the options, all equally likely."""
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        """Returns True with a probability of `percent` %."""
        return self.below(100) < percent


def _is_shared(action: Action) -> bool:
    """Returns whether people may do this together, as in "with taro"."""
    verb = action.verb
    if "people" not in action.subject.tags or verb.takes_recipient or verb.aspect in ("accident", "reaction"):
        return False
    has_animate_object = action.object is not None and action.object.tags & {"people", "animal"}
    return bool(verb.places or verb.particle == "へ") and not has_animate_object


class Derivation:
    """Samples facts and their phrases for one sentence.

    Attributes:
      dice: source of randomness.
      world: facts of the split.
      facts: facts that the sentence tells so far.
    """

    def __init__(self, dice: Dice, world: World):
        self.dice = dice
        self.world = world
        self.facts: list[tuple[Any, ...]] = []

    def fact(self, groups: Mapping[object, Sequence[Fact]], *, without: Sequence[object] = ()) -> Fact:
        """Samples a fact that contains none of the words `without`; groups are equally likely whatever their size."""
        while True:
            fact = self.dice.choose(self.dice.choose(tuple(groups.values())))
            if not any(word in fact for word in without):
                return self.tell(fact)

    def tell(self, fact: Fact) -> Fact:
        """Appends a fact that the generated text states to `facts`, and returns it."""
        self.facts.append(fact)
        return fact

    # Noun phrases

    def noun_phrase(
        self, noun: Noun, *, is_object: bool = False, is_new: bool = False, is_plain: bool = False
    ) -> NounPhrase:
        """Returns a noun with a determiner, and perhaps an adjective or a numeral.

        Args:
          noun: the noun.
          is_object: whether a pronoun has the English object form.
          is_new: whether the phrase may be indefinite: "a dog", "three dogs".
          is_plain: whether to use no adjective.
        """
        if noun.form == "pronoun":
            objective, _, agreement = PRONOUNS[noun.english]
            return NounPhrase(objective if is_object else noun.english, noun.japanese, agreement)
        return self.mention(noun, self._phrase(noun, is_new=is_new, is_plain=is_plain))

    def mention(self, noun: Noun, phrase: Named) -> Named:
        """Returns the phrase unchanged; subclasses override it to mark phrases, such as entities."""
        del noun
        return phrase

    def _phrase(self, noun: Noun, *, is_new: bool, is_plain: bool) -> NounPhrase:
        """Returns the phrase of a noun that is no pronoun, as `noun_phrase` describes."""
        if noun.form == "kin":
            return self._kin(noun)
        if noun.form in ("bare", "name", "question"):
            return NounPhrase(noun.english, noun.japanese)
        adjective = NOTHING if is_plain else self._adjective(noun)
        if noun.form == "mass":
            return self._portion(noun, adjective) if is_new else the(noun, adjective)
        if "place" in noun.tags:
            return the(noun, adjective)
        return self._new(noun, adjective) if is_new and self.dice.chance(60) else self._known(noun, adjective)

    def new(self, noun: Noun) -> NounPhrase:
        """Returns an indefinite phrase."""
        return self.mention(noun, self._new(noun, self._adjective(noun)))

    def _adjective(self, noun: Noun) -> Pair:
        """Returns a quality of the noun as an adjective before it; usually nothing."""
        qualities = self.world.qualities_of.get(noun)
        if not qualities or self.dice.chance(80):
            return NOTHING
        adjective = self.tell(self.dice.choose(qualities)).adjective
        return Pair(adjective.english, inflect(adjective.japanese, "present", style="attributive"))

    def _kin(self, noun: Noun) -> NounPhrase:
        """Returns a member of a family with an owner: my father (父), your father (お父さん)."""
        humble, honorific = noun.japanese.split("/")
        owners = "you he she name man woman job" if "offspring" in noun.tags else "you he she name person"
        possessor = None if self.dice.chance(60) else self._possessor(owners)
        if possessor is None:
            return NounPhrase(f"my {noun.english}", humble)
        return NounPhrase(f"{possessor.english} {noun.english}", f"{possessor.japanese} {honorific}")

    def _known(self, noun: Noun, adjective: Pair) -> NounPhrase:
        """Returns a definite phrase: the dog, this dog, the girl's dogs."""
        is_plural = noun.form == "pair" or self.dice.chance(20)
        determiner = THE
        if self.dice.chance(20):
            singular, plural, japanese = self.dice.choose(DEMONSTRATIVES)
            determiner = Pair(plural if is_plural else singular, japanese)
        elif "own" in noun.tags and self.dice.chance(30):
            determiner = self._possessor("pronoun name person father mother") or THE
        return described(noun, determiner, adjective, is_plural=is_plural, is_group=is_plural)

    def _possessor(self, owners: str) -> Pair | None:
        """Returns the possessive of a random owner among these names or tags of nouns; None if it is mentioned already.

        Nobody uses his own name for himself: "ken saw ken's dog" would mean two persons.
        """
        owner = self.dice.choose(select(owners))
        is_mentioned = owner.form != "pronoun" and any(owner in fact for fact in self.facts)
        return None if is_mentioned else possessive(owner)

    def _new(self, noun: Noun, adjective: Pair) -> NounPhrase:
        """Returns an indefinite phrase: a dog, three dogs; shoes."""
        if noun.form == "pair":
            return described(noun, NOTHING, adjective, is_plural=True)
        if not noun.counter or self.dice.chance(60):
            phrase = described(noun, NOTHING, adjective)
            return phrase._replace(english=with_article(phrase.english), is_known=False)
        number = self._number()
        phrase = described(noun, Pair(english_number(number), ""), adjective, is_plural=number > 1)
        return phrase._replace(is_known=False, count=f"{japanese_number(number)} {noun.counter}")

    def _portion(self, noun: Noun, adjective: Pair) -> NounPhrase:
        """Returns a mass noun, with or without a quantity: coffee, two cups of coffee."""
        phrase = described(noun, NOTHING, adjective)
        if not noun.counter or self.dice.chance(60):
            return phrase
        number = self._number()
        vessel = "cup" if "cup" in noun.tags else "glass"
        english = f"{english_number(number)} {with_s(vessel) if number > 1 else vessel} of {phrase.english}"
        return phrase._replace(english=english, count=f"{japanese_number(number)} {noun.counter}")

    def _number(self) -> int:
        """Returns a random quantity: 1 to 9, rarely up to 30."""
        return 1 + self.dice.below(9 if self.dice.chance(90) else 30)

    def relative(self, noun: Noun, *, without: Noun | None = None) -> NounPhrase | None:
        """Returns the noun with a relative clause: the girl who saw a dog, the dog that the girl saw.

        Args:
          noun: the noun that the clause describes.
          without: a noun that must not be in the clause.

        Returns:
          The phrase, or None if there is no such fact about the noun.
        """
        is_agent = bool(noun.tags & {"people", "animal"}) and self.dice.chance(60)
        actions = (self.world.done_by if is_agent else self.world.done_to).get(noun)
        if not actions or noun.form not in ("count", "mass"):
            return None
        action = self.dice.choose(actions)
        if without is not None and without in action:
            return None
        self.tell(action)
        is_plural = noun.form == "count" and "place" not in noun.tags and self.dice.chance(20)
        head = described(noun, NOTHING, NOTHING, is_plural=is_plural, is_group=is_plural)
        clause = self._clause_about_agent(action, head.agreement) if is_agent else self._clause_about_object(action)
        pronoun = Pair("who" if "people" in noun.tags else "that", "")
        noun_pair = self.mention(noun, Pair(f"the {head.english}", head.japanese))
        return NounPhrase(*RELATIVE(NOUN=noun_pair, PRONOUN=pronoun, CLAUSE=clause), head.agreement)

    def _clause_about_agent(self, action: Action, agreement: Agreement) -> Pair:
        """Returns a relative clause without its subject: (the girl who) saw a dog."""
        tense, negative = self._relative_tense(action)
        predicate = self.predicate(action, tense, agreement, negative=negative, style="attributive")
        return CLAUSE(OBJECT=self.object(action, is_new=not negative), **predicate)

    def _clause_about_object(self, action: Action) -> Pair:
        """Returns a relative clause without its object: (the dog that) the girl saw."""
        tense, negative = self._relative_tense(action)
        subject = self.noun_phrase(action.subject, is_plain=True)
        predicate = self.predicate(action, tense, subject.agreement, negative=negative, style="attributive")
        time = self.time(tense) if tense == "past" and self.dice.chance(30) else NOTHING
        return CLAUSE(SUBJECT=subject.marked("が"), TIME=time, **predicate)

    def _relative_tense(self, action: Action) -> tuple[Tense, bool]:
        """Samples (tense, whether the verb is negated) of a relative clause."""
        if action.verb.aspect == "state":
            return "present", False
        if action.verb.aspect == "activity" and self.dice.chance(20):
            return "progressive", False
        return "past", self.dice.chance(15)

    # Clauses

    def clause(
        self,
        action: Action,
        tense: Tense,
        subject: NounPhrase,
        extra_slots: Slots | None = None,
        *,
        negative: bool = False,
        rule: Rule = CLAUSE,
    ) -> Pair:
        """Returns a clause in English and Japanese, such as "the girl saw a dog".

        Args:
          action: the fact; its verb, and its object unless `extra_slots` has one, are part of the clause.
          tense: tense of the verb.
          subject: phrase of the subject.
          extra_slots: further slots of the rule, such as TIME, or replacements of slots that are made here. Without an
            OBJECT, the object's phrase is sampled.
          negative: whether the verb is negated.
          rule: orders the slots in both languages.
        """
        predicate = self.predicate(action, tense, subject.agreement, negative=negative)
        slots = {"SUBJECT": subject.topic(), **predicate, **(extra_slots or {})}
        if "OBJECT" not in slots:
            slots["OBJECT"] = self.object(action, is_new=not negative)
        return rule(**slots)

    # Parts of a clause

    def tense(self, action: Action, *, negative: bool = False, is_question: bool = False) -> Tense:
        """Samples a tense that is natural for the action, and whose English form is unambiguous."""
        tense = self.dice.choose(_TENSES[action.verb.aspect])
        verb, subject = action.verb, action.subject
        is_animal = "animal" in subject.tags
        is_unnatural = {
            "must": is_question or is_animal,
            "want": is_animal or (subject.english == "you" and not is_question),  # no one tells you what you want
            "present": verb.aspect != "state" and (negative or verb.english == verb.past),  # when do "they read"?
        }
        return "past" if is_unnatural.get(tense) else tense

    def predicate(
        self,
        action: Action,
        tense: Tense,
        agreement: Agreement,
        *,
        negative: bool = False,
        style: Style = "polite",
        inverted: bool = False,
    ) -> Slots:
        """Returns the slots of the verb: VERB, AUXILIARY (if `inverted`, before the subject) and RECIPIENT."""
        verb = action.verb
        auxiliary, rest = verb_group(verb.english, verb.past, tense, agreement, negative=negative, inverted=inverted)
        # Japanese does not state the wish of a third person as a fact.
        speaks_for_others = tense == "want" and action.subject.english not in ("i", "we", "you")
        japanese = inflect(
            verb.japanese, "seem to want" if speaks_for_others else tense, negative=negative, style=style
        )
        slots = {"VERB": Pair(rest if inverted or not auxiliary else f"{auxiliary} {rest}", japanese)}
        if inverted:
            slots["AUXILIARY"] = Pair(auxiliary, "")
        if verb.takes_recipient:
            slots["RECIPIENT"] = self._recipient(action.subject)
        return slots

    def _recipient(self, giver: Noun) -> Pair:
        """Returns a random recipient other than the giver: to the girl."""
        recipients = [noun for noun in select("name person") if noun is not giver]
        recipient = self.noun_phrase(self.dice.choose(recipients), is_plain=True)
        return Pair(f"to {recipient.english}", f"{recipient.japanese} に")

    def object(self, action: Action, *, is_new: bool = True) -> Pair:
        """Returns the object's phrase with its particle; nothing for an intransitive verb."""
        if action.object is None:
            return NOTHING
        if action.verb.is_generic:
            return self.mention(action.object, kind_of(action.object)).marked(action.verb.particle)
        return self.noun_phrase(action.object, is_object=True, is_new=is_new).marked(action.verb.particle)

    def circumstances(self, action: Action, tense: Tense) -> Slots:
        """Returns random slots for time, frequency, place, means and companion; each may be missing."""
        dice, verb, slots = self.dice, action.verb, {}
        if verb.aspect == "state":
            return slots
        if tense == "present" and dice.chance(50):
            slots["FREQUENCY"] = dice.choose(FREQUENCIES)
        elif tense == "present" or dice.chance(50):
            slots["TIME"] = self.time(tense)
        if verb.places and dice.chance(40):
            slots["PLACE"] = self.place(dice.choose(select(verb.places)))
        if action.object and verb.particle == "へ" and dice.chance(40):
            ways = next((ways for tag, ways in MEANS.items() if tag in action.object.tags), (NOTHING,))
            slots["MEANS"] = dice.choose(ways)
        elif _is_shared(action) and dice.chance(10):
            slots["COMPANION"] = self._companion(action)
        return slots

    def _companion(self, action: Action) -> Pair:
        """Returns a random companion: with my father; nothing if the action already mentions that person."""
        companion = self.dice.choose(select("name kin"))
        if companion in action:
            return NOTHING
        phrase = self.noun_phrase(companion)
        return Pair(f"with {phrase.english}", f"{phrase.japanese} と")

    def place(self, noun: Noun) -> Pair:
        """Returns the phrase for the place of an action: in the park."""
        return at(noun)

    def time(self, tense: Tense) -> Pair:
        """Returns a random time that fits the tense: yesterday, on monday, on may 3, at seven thirty."""
        kind = 0  # 0 to 2: one of `TIMES`, 3: weekday, 4: date, 5: time of day
        if tense in ("past", "future"):
            kind = self.dice.below(6)
        elif tense == "past progressive":
            kind = 5
        if kind == 3:
            english, kanji = self.dice.choose(WEEKDAYS).split()
            return Pair(f"on {english}", f"{kanji}曜日 に")
        if kind == 4:
            date = self.date()
            return Pair(f"on {date.english}", f"{date.japanese} に")
        if kind == 5:
            clock = self.clock()
            return Pair(f"at {clock.english}", f"{clock.japanese} に")
        return self.dice.choose(TIMES.get(tense, (NOTHING,)))

    def date(self) -> Pair:
        """Returns a random day of the year: may 3, 五 月 三 日."""
        month = self.dice.below(12)
        day = 1 + self.dice.below(28 if MONTHS[month] == "february" else 30)
        return Pair(f"{MONTHS[month]} {day}", f"{japanese_number(month + 1)} 月 {japanese_number(day)} 日")

    def clock(self) -> Pair:
        """Returns a random time of day, a multiple of five minutes: at seven thirty without "at"."""
        hour, minute = 1 + self.dice.below(12), 5 * self.dice.below(12)
        english, japanese = english_number(hour), f"{japanese_number(hour)} 時"
        if minute in (0, 5):  # 5 becomes the full hour too, because "seven five" is not English
            return Pair(f"{english} o'clock", japanese)
        minutes = "半" if minute == 30 else f"{japanese_number(minute)} 分"
        return Pair(f"{english} {english_number(minute)}", f"{japanese} {minutes}")
