"""The constructions of the built-in grammar: all kinds of sentences that it generates.

A construction samples facts, expresses them by phrases and fills the slots of a synchronous rule with these.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from tfx_jax.synthetic.grammar import lexicon, rules
from tfx_jax.synthetic.grammar.derivation import Derivation
from tfx_jax.synthetic.grammar.facts import Action
from tfx_jax.synthetic.grammar.inflection import (
    Tense,
    be,
    english_number,
    inflect,
    japanese_number,
    verb_group,
    with_article,
)
from tfx_jax.synthetic.grammar.lexicon import NOUNS, Noun, Pair, Verb, select
from tfx_jax.synthetic.grammar.phrases import NounPhrase, plural, possessive, the
from tfx_jax.synthetic.grammar.rules import CLAUSE, NOTHING, STATEMENT

Drawn = TypeVar("Drawn", bound=tuple[Any, ...])

_SPEAKERS = select("i we")  # not used as subjects of questions
# Adjectives whose Japanese contains が, such as 背 が 高い; they are not used in clauses whose subject has が.
_TOPICAL = [adjective for adjective in lexicon.ADJECTIVES if " が " in adjective.japanese]
_THIRD_PERSONS = select("he she they")  # ambiguous in a second clause: they could refer to the subject of the first

# Actions -------------------------------------------------------------------------------------------------------------


def statement(draw: Derivation) -> Pair:
    """Returns a sentence such as: The girl saw a dog in the park yesterday."""
    return STATEMENT(CLAUSE=_statement(draw, draw.fact(draw.world.actions)))


def _statement(draw: Derivation, action: Action) -> Pair:
    """Returns the clause of a statement about an action, with random tense, negation and circumstances."""
    negative = draw.dice.chance(15)
    tense = draw.tense(action, negative=negative)
    is_new = not negative and tense in ("past", "past progressive") and action.verb.aspect != "state"
    subject = draw.noun_phrase(action.subject, is_new=is_new)
    return draw.clause(action, tense, subject, draw.circumstances(action, tense), negative=negative)


def with_relative_subject(draw: Derivation) -> Pair:
    """Returns a sentence such as: The girl who bought the book went to the park yesterday."""
    action = draw.fact(draw.world.actions)
    subject = draw.relative(action.subject, without=action.object)
    if subject is None:
        return STATEMENT(CLAUSE=_statement(draw, action))
    tense = draw.tense(action)
    circumstances = draw.circumstances(action, tense)
    return STATEMENT(CLAUSE=draw.clause(action, tense, subject, circumstances, rule=rules.CLAUSE_OF_LONG_SUBJECT))


def with_relative_object(draw: Derivation) -> Pair:
    """Returns a sentence such as: The teacher read the letter that the girl wrote."""
    action = draw.fact(draw.world.handlings)
    assert action.object is not None
    thing = draw.relative(action.object, without=action.subject)
    if thing is None:
        return STATEMENT(CLAUSE=_statement(draw, action))
    negative = draw.dice.chance(15)
    tense = draw.tense(action, negative=negative)
    subject = draw.noun_phrase(action.subject)
    extra_slots = {"OBJECT": thing.marked(action.verb.particle)}
    return STATEMENT(CLAUSE=draw.clause(action, tense, subject, extra_slots, negative=negative))


def question(draw: Derivation) -> Pair:
    """Returns a sentence such as: Did the girl see a dog in the park yesterday?"""
    action = draw.fact(draw.world.actions, without=_SPEAKERS)
    tense = draw.tense(action, is_question=True)
    return _question(draw, action, tense, OBJECT=draw.object(action), **draw.circumstances(action, tense))


def _question(draw: Derivation, action: Action, tense: Tense, **slots: Pair) -> Pair:
    """Returns a question with an auxiliary before the subject; `slots` are further slots of `rules.QUESTION`."""
    subject = draw.noun_phrase(action.subject)
    predicate = draw.predicate(action, tense, subject.agreement, inverted=True)
    return rules.QUESTION(SUBJECT=subject.topic(), **predicate, **slots)


def who(draw: Derivation) -> Pair:
    """Returns a sentence such as: Who saw a dog in the park yesterday?"""
    action = draw.fact(draw.world.inquiries_about_subject)
    tense = draw.tense(action, is_question=True)
    somebody = NounPhrase("who", NOUNS["who"].japanese, is_known=False)
    return rules.WHO(CLAUSE=draw.clause(action, tense, somebody, draw.circumstances(action, tense)))


def what(draw: Derivation) -> Pair:
    """Returns a sentence such as: What did the girl see? Where did she go?"""
    action = draw.fact(draw.world.inquiries_about_object, without=_SPEAKERS)
    asked, verb = action.object, action.verb
    assert asked is not None
    tense = draw.tense(action, is_question=True)
    if asked is NOUNS["where"]:  # not "where did she go to"
        action = action._replace(verb=dataclasses.replace(verb, english=verb.english.split()[0]))
    unknown = Pair("", f"{asked.japanese} {verb.particle}")
    return _question(draw, action, tense, ASKED=Pair(asked.english, ""), OBJECT=unknown)


def where_or_when(draw: Derivation) -> Pair:
    """Returns a sentence such as: Where did the girl see the dog? When did she see it?"""
    action = draw.fact(draw.world.events, without=_SPEAKERS)
    tense = "past" if action.verb.aspect in ("accident", "reaction") or draw.dice.chance(60) else "future"
    thing = draw.object(action, is_new=False)
    if action.verb.places and draw.dice.chance(60):
        return _question(draw, action, tense, OBJECT=thing, ASKED=Pair("where", ""), PLACE=Pair("", "どこ で"))
    return _question(draw, action, tense, OBJECT=thing, ASKED=Pair("when", ""), TIME=Pair("", "いつ"))


def how_many(draw: Derivation) -> Pair:
    """Returns a sentence such as: How many dogs did the girl see? How many cups of tea did she drink?"""
    action = draw.fact(draw.world.countable, without=_SPEAKERS)
    noun = action.object
    assert noun is not None
    asked = Pair(f"how many {draw.mention(noun, Pair(plural(noun), '')).english}", "")
    counted = Pair("", f"{noun.japanese} {action.verb.particle} 何 {noun.counter}")
    return _question(draw, action, draw.tense(action, is_question=True), ASKED=asked, OBJECT=counted)


def request(draw: Derivation) -> Pair:
    """Returns a sentence such as: Please open the window. Please do not open the window."""
    action = draw.fact(draw.world.requested)
    negative = draw.dice.chance(30)
    slots = draw.predicate(action, "present", "plural")
    slots["VERB"] = slots["VERB"]._replace(japanese=inflect(action.verb.japanese, "request", negative=negative))
    negation = Pair("do not", "") if negative else NOTHING
    return rules.REQUEST(NEGATION=negation, OBJECT=draw.object(action, is_new=not negative), **slots)


# Two clauses ---------------------------------------------------------------------------------------------------------


def and_(draw: Derivation) -> Pair:
    """Returns a sentence such as: The girl went to the park and ate an apple."""
    trip = draw.fact(draw.world.trips)
    subject = draw.noun_phrase(trip.subject)
    predicate = draw.predicate(trip, "past", subject.agreement)
    predicate["VERB"] = predicate["VERB"]._replace(japanese=inflect(trip.verb.japanese, "and"))
    action = draw.tell(draw.dice.choose(draw.world.errands_of[trip.subject]))
    other = CLAUSE(OBJECT=draw.object(action), **draw.predicate(action, "past", subject.agreement))
    return rules.AND(CLAUSE=CLAUSE(SUBJECT=subject.topic(), OBJECT=draw.object(trip), **predicate), OTHER=other)


def but(draw: Derivation) -> Pair:
    """Returns a sentence such as: The girl ate an apple, but the boy ate a cake."""
    action = draw.fact(draw.world.actions)
    other = draw.dice.choose(draw.world.actions[action.verb])
    is_contrast = other.subject is not action.subject and other.object is not action.object
    if not is_contrast or other.subject in _THIRD_PERSONS:
        return STATEMENT(CLAUSE=_statement(draw, action))
    draw.tell(other)
    return rules.BUT(
        CLAUSE=draw.clause(action, "past", draw.noun_phrase(action.subject)),
        OTHER=draw.clause(other, "past", draw.noun_phrase(other.subject)),
    )


def when(draw: Derivation) -> Pair:
    """Returns a sentence such as: The girl was reading a book when the boy opened the door."""
    action = draw.fact(draw.world.activities)
    event = draw.fact(draw.world.incidents, without=[action.subject, *_THIRD_PERSONS])
    subject, other = draw.noun_phrase(action.subject), draw.noun_phrase(event.subject)
    predicate = draw.predicate(event, "past", other.agreement, style="plain")
    return rules.WHEN(
        CLAUSE=draw.clause(action, "past progressive", subject),
        OTHER=CLAUSE(SUBJECT=other.marked("が"), OBJECT=draw.object(event), **predicate),
    )


def because(draw: Derivation) -> Pair:
    """Returns a sentence such as: The girl slept because she was tired.

    Also: The boy did not go to school because it was snowing.
    """
    action = draw.fact(draw.world.motivated)
    negative = action.verb.english in lexicon.EXCUSES
    reasons = lexicon.EXCUSES if negative else lexicon.REASONS
    reason = draw.dice.choose(reasons[action.verb.english].split())
    subject = draw.noun_phrase(action.subject)
    if reason in lexicon.WEATHER:
        cause = lexicon.WEATHER[reason]
    else:
        pronoun = _pronoun(action.subject, subject)
        feeling = next(adjective for adjective in lexicon.ADJECTIVES if adjective.english == reason)
        english = f"{pronoun} {be('past', subject.agreement)} {reason}"
        cause = Pair(english, inflect(feeling.japanese, "past", style="plain"))
    return rules.BECAUSE(CLAUSE=draw.clause(action, "past", subject, negative=negative), REASON=cause)


def _pronoun(noun: Noun, phrase: NounPhrase) -> str:
    """Returns the English pronoun that refers to a noun phrase."""
    if noun.form == "pronoun":
        return noun.english
    if phrase.agreement == "plural":
        return "they"
    if "male" in noun.tags:
        return "he"
    return "she" if "female" in noun.tags else "it"


def think(draw: Derivation) -> Pair:
    """Returns a sentence such as: My mother thinks that the dog is big."""
    quality = draw.fact(draw.world.qualities, without=_TOPICAL)
    thinkers = select("he she kin name" if quality.noun.english in ("i", "we") else "i kin name")
    thinker = draw.noun_phrase(draw.dice.choose([noun for noun in thinkers if noun is not quality.noun]))
    thinks = Pair("think", "思い ます") if thinker.agreement == "i" else Pair("thinks", "思っ て い ます")
    subject = draw.noun_phrase(quality.noun, is_plain=True)
    thought = rules.BE(
        SUBJECT=subject.marked("が"),
        BE=Pair(be("present", subject.agreement), ""),
        COMPLEMENT=Pair(quality.adjective.english, inflect(quality.adjective.japanese, "present", style="plain")),
    )
    return rules.THINK(SUBJECT=thinker.topic(), THINK=thinks, CLAUSE=thought)


# Qualities, professions, comparisons ---------------------------------------------------------------------------------


def quality(draw: Derivation) -> Pair:
    """Returns a sentence such as: The dog is very big. The book that the girl bought was not interesting.

    Also: Is the dog big?
    """
    noun, adjective = draw.fact(draw.world.qualities)
    subject = (draw.relative(noun) if draw.dice.chance(25) else None) or draw.noun_phrase(noun, is_plain=True)
    return _being(draw, subject, adjective.english, adjective.japanese, is_gradable=bool(adjective.comparative))


def profession(draw: Derivation) -> Pair:
    """Returns a sentence such as: My mother is a doctor. We were not teachers. Is your father a pilot?"""
    fact = draw.fact(draw.world.professions)
    subject = draw.noun_phrase(fact.noun, is_plain=True)
    is_plural = subject.agreement == "plural" and fact.noun.english != "you"
    english = plural(fact.job) if is_plural else with_article(fact.job.english)
    return _being(draw, subject, english, f"{fact.job.japanese} な")


def _being(draw: Derivation, subject: NounPhrase, english: str, japanese: str, *, is_gradable: bool = False) -> Pair:
    """Returns a statement or question with "be", such as "the dog is very big".

    Args:
      draw: the derivation.
      subject: phrase of the subject.
      english: English complement.
      japanese: dictionary form of the Japanese predicate.
      is_gradable: whether "very" may precede the complement.
    """
    tense = "past" if draw.dice.chance(30) else "present"
    verb = be(tense, subject.agreement)
    if draw.dice.chance(20) and subject.english not in ("i", "we"):
        return rules.IS_IT(
            BE=Pair(verb, ""), SUBJECT=subject.topic(), COMPLEMENT=Pair(english, inflect(japanese, tense))
        )
    negative = draw.dice.chance(30)
    is_very = is_gradable and not negative and draw.dice.chance(25)
    return STATEMENT(
        CLAUSE=rules.BE(
            SUBJECT=subject.topic(),
            BE=Pair(f"{verb} not" if negative else verb, ""),
            DEGREE=Pair("very", "とても") if is_very else NOTHING,
            COMPLEMENT=Pair(english, inflect(japanese, tense, negative=negative)),
        )
    )


def comparison(draw: Derivation) -> Pair:
    """Returns a sentence such as: The dog is bigger than the cat."""
    fact = draw.fact(draw.world.comparisons)
    subject = draw.noun_phrase(fact.noun, is_plain=True)
    other = draw.noun_phrase(fact.other, is_object=True, is_plain=True)
    adjective = Pair(fact.adjective.comparative, inflect(fact.adjective.japanese, "present"))
    verb = Pair(be("present", subject.agreement), "")
    return rules.COMPARED(
        SUBJECT=subject.topic(), BE=verb, OTHER=Pair(other.english, other.japanese), ADJECTIVE=adjective
    )


# Positions -----------------------------------------------------------------------------------------------------------


def there_is(draw: Derivation) -> Pair:
    """Returns a sentence such as: There are three books on the table. How many dogs are there in the garden?

    Also: My bag is under the desk.
    """
    fact = draw.fact(draw.world.positions)
    noun = fact.noun
    landmark = draw.mention(fact.landmark, the(fact.landmark))
    place = Pair(
        f"{fact.preposition.english} {landmark.english}",
        " ".join(filter(None, (landmark.japanese, fact.preposition.japanese, "に"))),
    )
    tense = "past" if draw.dice.chance(30) else "present"
    exists = "い-る" if noun.tags & {"people", "animal"} else "ある"

    def being(agreement: str, *, negative: bool = False) -> Pair:
        """Returns "to be" in the sentence's tense, and in Japanese the verb for existence."""
        return Pair(be(tense, agreement), inflect(exists, tense, negative=negative))

    kind = draw.dice.below(10)  # 0 to 2: located, 3: "no", 4: "how many", 5: question, otherwise "there is"
    if kind < 3:
        subject = draw.noun_phrase(noun)
        return rules.LOCATED(SUBJECT=subject.topic(), BE=being(subject.agreement), PLACE=place)
    if kind == 3 and noun.form == "count":
        thing = draw.mention(noun, Pair(f"no {noun.english}", f"{noun.japanese} は"))
        return rules.THERE_IS(THING=thing, BE=being("singular", negative=True), PLACE=place)
    if kind == 4 and noun.counter:
        asked = Pair(f"how many {draw.mention(noun, Pair(plural(noun), '')).english}", "")
        thing = Pair("", f"{noun.japanese} が 何 {noun.counter}")
        return rules.IS_THERE(ASKED=asked, BE=being("plural"), THING=thing, PLACE=place)
    news = draw.new(noun)
    thing = Pair(news.english, f"{news.japanese} が {news.count}".rstrip())
    rule = rules.IS_THERE if kind == 5 else rules.THERE_IS
    return rule(THING=thing, BE=being(news.agreement), PLACE=place)


# Numbers -------------------------------------------------------------------------------------------------------------


def price(draw: Derivation) -> Pair:
    """Returns a sentence such as: These shoes cost three thousand two hundred yen."""
    goods = select("garment text plate pen umbrella knife flower ticket watch bag cake")
    noun, _, amount = _sample_owned(draw, lambda: (draw.dice.choose(goods), "cost", 100 + draw.dice.below(9900)))
    subject = draw.noun_phrase(noun)
    _, costs = verb_group("cost", "cost", "present", subject.agreement)
    return rules.COST(SUBJECT=subject.topic(), COST=Pair(costs, ""), AMOUNT=_number(amount))


def age(draw: Derivation) -> Pair:
    """Returns a sentence such as: My grandfather is seventy two years old."""

    def propose() -> tuple[Noun, str, int]:
        """Returns (person, "age", years)."""
        nouns, youngest, oldest = draw.dice.choose(lexicon.AGES)
        return draw.dice.choose(select(nouns)), "age", youngest + draw.dice.below(oldest - youngest + 1)

    noun, _, years = _sample_owned(draw, propose)
    subject = draw.noun_phrase(noun, is_plain=True)
    return rules.AGE(SUBJECT=subject.topic(), BE=Pair(be("present", subject.agreement), ""), AGE=_number(years))


def birthday(draw: Derivation) -> Pair:
    """Returns a sentence such as: My father's birthday is may 3."""
    owner, _, date = _sample_owned(
        draw, lambda: (draw.dice.choose(select("pronoun name kin")), "birthday", draw.date())
    )
    return rules.BIRTHDAY(OWNER=possessive(owner), DATE=date)


def schedule(draw: Derivation) -> Pair:
    """Returns a sentence such as: The meeting starts at nine thirty."""

    def propose() -> tuple[Noun, Verb, Pair]:
        """Returns (subject, verb, time of day)."""
        verb = draw.dice.choose(lexicon.SCHEDULED_VERBS)
        return draw.dice.choose(select(verb.subjects)), verb, draw.clock()

    noun, verb, clock = _sample_owned(draw, propose)
    action = Action(noun, verb, None)
    tense, day = draw.dice.choose(lexicon.SCHEDULED_DAYS)
    time = Pair(f"at {clock.english} {day.english}".rstrip(), f"{day.japanese} {clock.japanese} に".lstrip())
    return STATEMENT(CLAUSE=draw.clause(action, tense, the(noun), {"TIME": time}))


def _number(number: int) -> Pair:
    """Returns a number from 1 to 9999 in the words of both languages."""
    return Pair(english_number(number), japanese_number(number))


def _sample_owned(draw: Derivation, propose: Callable[[], Drawn]) -> Drawn:
    """Returns a fact that belongs to the split: calls `propose`, which returns random facts, until one does.

    For facts with a number, date or time, which are too many to list.
    """
    while not draw.world.owns(fact := propose()):
        pass
    return draw.tell(fact)


CONSTRUCTIONS: tuple[Callable[[Derivation], Pair], ...] = (  # repetitions make a construction more likely
    *(statement,) * 21,
    *(with_relative_subject,) * 7,
    *(with_relative_object,) * 8,
    *(question,) * 7,
    *(who,) * 2,
    *(what,) * 3,
    *(where_or_when,) * 4,
    *(how_many,) * 3,
    *(request,) * 3,
    *(and_,) * 4,
    *(but,) * 4,
    *(when,) * 4,
    *(because,) * 4,
    *(think,) * 3,
    *(quality,) * 9,
    *(profession,) * 2,
    *(comparison,) * 3,
    *(there_is,) * 6,
    *(price, age, birthday, schedule),
)
