"""The constructions of the built-in grammar: every kind of sentence it makes.

A construction draws facts, puts them into phrases and hands these to a synchronous rule. Compare the two sides of the
rules below to see what becomes of the word order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from tfx_jax.data.grammar.facts import Action
from tfx_jax.data.grammar.inflection import (
    be,
    english_number,
    inflect,
    japanese_number,
    verb_group,
    with_article,
)
from tfx_jax.data.grammar.lexicon import (
    ADJECTIVES,
    AGES,
    EXCUSES,
    NOUNS,
    REASONS,
    SCHEDULED_DAYS,
    SCHEDULED_VERBS,
    WEATHER,
    Noun,
    Pair,
    Verb,
    select,
)
from tfx_jax.data.grammar.phrases import CLAUSE, NOTHING, Derivation, NounPhrase, Rule, Slots, plural, possessive, the

Drawn = TypeVar("Drawn", bound=tuple)

STATEMENT = Rule("CLAUSE .", "CLAUSE 。")
WHO = Rule("CLAUSE ?", "CLAUSE か 。")
QUESTION = Rule(
    "ASKED AUXILIARY SUBJECT FREQUENCY VERB OBJECT RECIPIENT PLACE COMPANION MEANS TIME ?",
    "SUBJECT TIME FREQUENCY COMPANION MEANS PLACE RECIPIENT OBJECT VERB か 。",
)
REQUEST = Rule("please VERB OBJECT RECIPIENT .", "RECIPIENT OBJECT VERB 。")
AND = Rule("CLAUSE and OTHER .", "CLAUSE 、 OTHER 。")
BUT = Rule("CLAUSE , but OTHER .", "CLAUSE が 、 OTHER 。")
BECAUSE = Rule("CLAUSE because REASON .", "REASON ので 、 CLAUSE 。")
WHEN = Rule("CLAUSE when OTHER .", "OTHER とき 、 CLAUSE 。")
THINK = Rule("SUBJECT THINK that CLAUSE .", "SUBJECT CLAUSE と THINK 。")
BE = Rule("SUBJECT BE DEGREE COMPLEMENT", "SUBJECT DEGREE COMPLEMENT BE")
IS_IT = Rule("BE SUBJECT COMPLEMENT ?", "SUBJECT COMPLEMENT BE か 。")
COMPARED = Rule("SUBJECT BE ADJECTIVE than OTHER .", "SUBJECT OTHER より ADJECTIVE 。")
LOCATED = Rule("SUBJECT BE PLACE .", "SUBJECT PLACE BE 。")
THERE_IS = Rule("there BE THING PLACE .", "PLACE THING BE 。")
IS_THERE = Rule("ASKED BE there THING PLACE ?", "PLACE THING BE か 。")
COST = Rule("SUBJECT COST AMOUNT yen .", "SUBJECT AMOUNT 円 です 。")
AGE = Rule("SUBJECT BE AGE years old .", "SUBJECT AGE 歳 です 。")
BIRTHDAY = Rule("OWNER birthday is DATE .", "OWNER 誕生日 は DATE です 。")

_SPEAKERS = select("i we")  # who need not ask what they do

# What somebody does --------------------------------------------------------------------------------------------------


def statement(d: Derivation) -> Pair:
    """The girl saw a dog in the park yesterday."""
    return STATEMENT(CLAUSE=_statement(d, d.fact(d.world.actions)))


def _statement(d: Derivation, action: Action) -> Pair:
    negative = d.dice.chance(15)
    tense = d.tense(action, negative=negative)
    subject = d.noun_phrase(action.subject, is_new=not negative and tense in ("past", "past progressive"))
    return _clause(d, action, tense, subject, d.circumstances(action, tense), negative=negative)


def _clause(
    d: Derivation,
    action: Action,
    tense: Any,
    subject: NounPhrase,
    adverbials: Slots | None = None,
    *,
    negative: bool = False,
) -> Pair:
    predicate = d.predicate(action, tense, subject.agreement, negative=negative)
    return CLAUSE(
        SUBJECT=subject.topic(), OBJECT=d.object(action, is_new=not negative), **predicate, **(adverbials or {})
    )


def with_relative_subject(d: Derivation) -> Pair:
    """The girl who bought the book went to the park yesterday."""
    action = d.fact(d.world.actions)
    subject = d.relative(action.subject)
    if subject is None:
        return STATEMENT(CLAUSE=_statement(d, action))
    tense = d.tense(action)
    return STATEMENT(CLAUSE=_clause(d, action, tense, subject, d.circumstances(action, tense)))


def with_relative_object(d: Derivation) -> Pair:
    """The teacher read the letter that the girl wrote."""
    action = d.fact(d.world.actions)
    thing = (
        None if action.object is None or action.verb.is_generic else d.relative(action.object, stranger=action.subject)
    )
    if thing is None:
        return STATEMENT(CLAUSE=_statement(d, action))
    negative = d.dice.chance(15)
    tense = d.tense(action, negative=negative)
    subject = d.noun_phrase(action.subject)
    predicate = d.predicate(action, tense, subject.agreement, negative=negative)
    clause = CLAUSE(SUBJECT=subject.topic(), OBJECT=thing.marked(action.verb.particle), **predicate)
    return STATEMENT(CLAUSE=clause)


def question(d: Derivation) -> Pair:
    """Did the girl see a dog in the park yesterday?"""
    action = d.fact(d.world.actions, without=_SPEAKERS)
    tense = d.tense(action, is_question=True)
    return _question(d, action, tense, OBJECT=d.object(action), **d.circumstances(action, tense))


def _question(d: Derivation, action: Action, tense: Any, **slots: Pair) -> Pair:
    subject = d.noun_phrase(action.subject)
    predicate = d.predicate(action, tense, subject.agreement, inverted=True)
    return QUESTION(SUBJECT=subject.topic(), **predicate, **slots)


def who(d: Derivation) -> Pair:
    """Who saw a dog in the park yesterday?"""
    action = d.fact(d.world.inquiries_about_subject)
    tense = d.tense(action, is_question=True)
    somebody = NounPhrase("who", NOUNS["who"].japanese, is_known=False)
    return WHO(CLAUSE=_clause(d, action, tense, somebody, d.circumstances(action, tense)))


def what(d: Derivation) -> Pair:
    """What did the girl see? Where did she go?"""
    action = d.fact(d.world.inquiries_about_object, without=_SPEAKERS)
    asked, verb = action.object, action.verb
    assert asked is not None
    tense = d.tense(action, is_question=True)
    if asked is NOUNS["where"]:  # not "where did she go to"
        action = action._replace(verb=dataclasses.replace(verb, english=verb.english.split()[0]))
    unknown = Pair("", f"{asked.japanese} {verb.particle}")
    return _question(d, action, tense, ASKED=Pair(asked.english, ""), OBJECT=unknown)


def where_or_when(d: Derivation) -> Pair:
    """Where did the girl see the dog? When did she see it?"""
    action = d.fact(d.world.events, without=_SPEAKERS)
    tense = "past" if action.verb.aspect in ("accident", "reaction") or d.dice.chance(60) else "future"
    thing = d.object(action, is_new=False)
    if action.verb.places and d.dice.chance(60):
        return _question(d, action, tense, OBJECT=thing, ASKED=Pair("where", ""), PLACE=Pair("", "どこ で"))
    return _question(d, action, tense, OBJECT=thing, ASKED=Pair("when", ""), TIME=Pair("", "いつ"))


def how_many(d: Derivation) -> Pair:
    """How many dogs did the girl see? How many cups of tea did she drink?"""
    action = d.fact(d.world.countable, without=_SPEAKERS)
    noun = action.object
    assert noun is not None
    asked = Pair(f"how many {plural(noun)}", "")
    counted = Pair("", f"{noun.japanese} {action.verb.particle} 何 {noun.counter}")
    return _question(d, action, d.tense(action, is_question=True), ASKED=asked, OBJECT=counted)


def request(d: Derivation) -> Pair:
    """Please open the window. Please do not open the window."""
    action = d.fact(d.world.requested)
    negative = d.dice.chance(30)
    slots = d.predicate(action, "present", "plural")
    english = slots.pop("VERB").english
    verb = Pair(
        f"do not {english}" if negative else english, inflect(action.verb.japanese, "request", negative=negative)
    )
    return REQUEST(VERB=verb, OBJECT=d.object(action, is_new=not negative), **slots)


# Two clauses ---------------------------------------------------------------------------------------------------------


def and_(d: Derivation) -> Pair:
    """The girl went to the park and ate an apple."""
    trip = d.fact(d.world.trips)
    subject = d.noun_phrase(trip.subject)
    predicate = d.predicate(trip, "past", subject.agreement)
    predicate["VERB"] = predicate["VERB"]._replace(japanese=inflect(trip.verb.japanese, "and"))
    action = d.tell(d.dice.choose(d.world.errands_of[trip.subject]))
    other = CLAUSE(OBJECT=d.object(action), **d.predicate(action, "past", subject.agreement))
    return AND(CLAUSE=CLAUSE(SUBJECT=subject.topic(), OBJECT=d.object(trip), **predicate), OTHER=other)


def but(d: Derivation) -> Pair:
    """The girl ate an apple, but the boy ate a cake."""
    action = d.fact(d.world.actions)
    other = d.dice.choose(d.world.actions[action.verb])
    if action.object is None or other.subject is action.subject or other.object is action.object:
        return STATEMENT(CLAUSE=_statement(d, action))  # no contrast
    d.tell(other)
    return BUT(
        CLAUSE=_clause(d, action, "past", d.noun_phrase(action.subject)),
        OTHER=_clause(d, other, "past", d.noun_phrase(other.subject)),
    )


def when(d: Derivation) -> Pair:
    """The girl was reading a book when the boy opened the door."""
    action = d.fact(d.world.activities)
    event = d.fact(d.world.incidents, without=[action.subject])
    subject, other = d.noun_phrase(action.subject), d.noun_phrase(event.subject)
    predicate = d.predicate(event, "past", other.agreement, style="plain")
    return WHEN(
        CLAUSE=_clause(d, action, "past progressive", subject),
        OTHER=CLAUSE(SUBJECT=other.marked("が"), OBJECT=d.object(event), **predicate),
    )


def because(d: Derivation) -> Pair:
    """The girl slept because she was tired. The boy did not go to school because it was snowing."""
    action = d.fact(d.world.motivated)
    negative = action.verb.english in EXCUSES
    reason = d.dice.choose((EXCUSES if negative else REASONS)[action.verb.english].split())
    subject = d.noun_phrase(action.subject)
    if reason in WEATHER:
        cause = WEATHER[reason]
    else:
        pronoun = _pronoun(action.subject, subject)
        feeling = next(adjective for adjective in ADJECTIVES if adjective.english == reason)
        english = f"{pronoun} {be('past', subject.agreement)} {reason}"
        cause = Pair(english, inflect(feeling.japanese, "past", style="plain"))
    return BECAUSE(CLAUSE=_clause(d, action, "past", subject, negative=negative), REASON=cause)


def _pronoun(noun: Noun, phrase: NounPhrase) -> str:
    if noun.form == "pronoun":
        return noun.english
    if phrase.agreement == "plural":
        return "they"
    return next(pronoun for pronoun in ("he", "she", "it") if pronoun in noun.tags or pronoun == "it")


def think(d: Derivation) -> Pair:
    """My mother thinks that the dog is big."""
    quality = d.fact(d.world.qualities)
    thinkers = select("he she kin name" if quality.noun.english in ("i", "we") else "i kin name")
    thinker = d.noun_phrase(d.dice.choose([noun for noun in thinkers if noun is not quality.noun]))
    thinks = Pair("think", "思い ます") if thinker.agreement == "i" else Pair("thinks", "思っ て い ます")
    subject = d.noun_phrase(quality.noun, is_plain=True)
    thought = BE(
        SUBJECT=subject.marked("が"),
        BE=Pair(be("present", subject.agreement), ""),
        COMPLEMENT=Pair(quality.adjective.english, inflect(quality.adjective.japanese, "present", style="plain")),
    )
    return THINK(SUBJECT=thinker.topic(), THINK=thinks, CLAUSE=thought)


# What something is ---------------------------------------------------------------------------------------------------


def quality(d: Derivation) -> Pair:
    """The dog is very big. The book that the girl bought was not interesting. Is the dog big?"""
    fact = d.fact(d.world.qualities)
    subject = d.relative(fact.noun) if d.dice.chance(25) else None
    subject = subject or d.noun_phrase(fact.noun, is_plain=True)
    adjective = fact.adjective
    is_gradable = bool(adjective.comparative)
    return _being(d, subject, adjective.english, adjective.japanese, is_gradable=is_gradable)


def profession(d: Derivation) -> Pair:
    """My mother is a doctor. We were not teachers. Is your father a pilot?"""
    fact = d.fact(d.world.professions)
    subject = d.noun_phrase(fact.noun, is_plain=True)
    is_plural = subject.agreement == "plural" and fact.noun.english != "you"
    english = plural(fact.job) if is_plural else with_article(fact.job.english)
    return _being(d, subject, english, f"{fact.job.japanese} な")


def _being(d: Derivation, subject: NounPhrase, english: str, japanese: str, *, is_gradable: bool = False) -> Pair:
    """Says or asks what the subject is; `japanese` is the dictionary form of a predicate."""
    tense = "past" if d.dice.chance(30) else "present"
    verb = be(tense, subject.agreement)
    if d.dice.chance(20):
        return IS_IT(BE=Pair(verb, ""), SUBJECT=subject.topic(), COMPLEMENT=Pair(english, inflect(japanese, tense)))
    negative = d.dice.chance(20)
    is_very = is_gradable and not negative and d.dice.chance(25)
    return STATEMENT(
        CLAUSE=BE(
            SUBJECT=subject.topic(),
            BE=Pair(f"{verb} not" if negative else verb, ""),
            DEGREE=Pair("very", "とても") if is_very else NOTHING,
            COMPLEMENT=Pair(english, inflect(japanese, tense, negative=negative)),
        )
    )


def comparison(d: Derivation) -> Pair:
    """The dog is bigger than the cat."""
    fact = d.fact(d.world.comparisons)
    subject, other = d.noun_phrase(fact.noun, is_plain=True), d.noun_phrase(fact.other, is_object=True, is_plain=True)
    adjective = Pair(fact.adjective.comparative, inflect(fact.adjective.japanese, "present"))
    verb = Pair(be("present", subject.agreement), "")
    return COMPARED(SUBJECT=subject.topic(), BE=verb, OTHER=Pair(other.english, other.japanese), ADJECTIVE=adjective)


# Where something is --------------------------------------------------------------------------------------------------


def there_is(d: Derivation) -> Pair:
    """There are three books on the table. How many dogs are there in the garden? My bag is under the desk."""
    fact = d.fact(d.world.positions)
    noun = fact.noun
    landmark = the(fact.landmark)
    place = Pair(
        f"{fact.preposition.english} {landmark.english}",
        " ".join(filter(None, (landmark.japanese, fact.preposition.japanese, "に"))),
    )
    tense = "past" if d.dice.chance(30) else "present"
    exists = "い-る" if noun.tags & {"people", "animal"} else "ある"

    def being(agreement: str, *, negative: bool = False) -> Pair:
        return Pair(be(tense, agreement), inflect(exists, tense, negative=negative))

    kind = d.dice.below(10)
    if kind < 3:
        subject = d.noun_phrase(noun)
        return LOCATED(SUBJECT=subject.topic(), BE=being(subject.agreement), PLACE=place)
    if kind == 3 and noun.form == "count":
        thing = Pair(f"no {noun.english}", f"{noun.japanese} は")
        return THERE_IS(THING=thing, BE=being("singular", negative=True), PLACE=place)
    if kind == 4 and noun.counter:
        thing = Pair("", f"{noun.japanese} が 何 {noun.counter}")
        return IS_THERE(ASKED=Pair(f"how many {plural(noun)}", ""), BE=being("plural"), THING=thing, PLACE=place)
    news = d.new(noun)
    thing = Pair(news.english, f"{news.japanese} が {news.count}".rstrip())
    return (IS_THERE if kind == 5 else THERE_IS)(THING=thing, BE=being(news.agreement), PLACE=place)


# Numbers -------------------------------------------------------------------------------------------------------------


def price(d: Derivation) -> Pair:
    """These shoes cost three thousand two hundred yen."""
    noun, _, amount = _owned(d, lambda: (d.dice.choose(select("goods sweet")), "cost", 1 + d.dice.below(9999)))
    subject = d.noun_phrase(noun)
    _, costs = verb_group("cost", "cost", "present", subject.agreement)
    return COST(SUBJECT=subject.topic(), COST=Pair(costs, ""), AMOUNT=_number(amount))


def age(d: Derivation) -> Pair:
    """My grandfather is seventy two years old."""

    def draw() -> tuple[Noun, str, int]:
        nouns, youngest, oldest = d.dice.choose(AGES)
        return d.dice.choose(select(nouns)), "age", youngest + d.dice.below(oldest - youngest + 1)

    noun, _, years = _owned(d, draw)
    subject = d.noun_phrase(noun, is_plain=True)
    return AGE(SUBJECT=subject.topic(), BE=Pair(be("present", subject.agreement), ""), AGE=_number(years))


def birthday(d: Derivation) -> Pair:
    """My father's birthday is may 3."""
    owner, _, date = _owned(d, lambda: (d.dice.choose(select("pronoun name kin")), "birthday", d.date()))
    return BIRTHDAY(OWNER=possessive(owner), DATE=date)


def schedule(d: Derivation) -> Pair:
    """The meeting starts at nine thirty."""

    def draw() -> tuple[Noun, Verb, Pair]:
        verb = d.dice.choose(SCHEDULED_VERBS)
        return d.dice.choose(select(verb.subjects)), verb, d.clock()

    noun, verb, clock = _owned(d, draw)
    action = Action(noun, verb, None)
    tense, day = d.dice.choose(SCHEDULED_DAYS)
    time = Pair(f"at {clock.english} {day.english}".rstrip(), f"{day.japanese} {clock.japanese} に".lstrip())
    return STATEMENT(CLAUSE=_clause(d, action, tense, the(noun), {"TIME": time}))


def _number(number: int) -> Pair:
    return Pair(english_number(number), japanese_number(number))


def _owned(d: Derivation, draw: Callable[[], Drawn]) -> Drawn:
    """Draws until the split owns the fact: too many have a number to list them all."""
    while not d.world.owns(fact := draw()):
        pass
    return d.tell(fact)


CONSTRUCTIONS: tuple[Callable[[Derivation], Pair], ...] = (  # each as often as it is listed
    *(statement,) * 22,
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
    *(quality,) * 8,
    *(profession,) * 2,
    *(comparison,) * 3,
    *(there_is,) * 6,
    *(price, age, birthday, schedule) * 1,
)
