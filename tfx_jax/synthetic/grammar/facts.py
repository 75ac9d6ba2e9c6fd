"""Facts, the content of the sentences of the built-in grammar; each fact belongs to one split.

A fact is a tuple of words, independent of how it is expressed: "the dog is big" and "the big dog slept" tell the same
fact about dog and big. The docstring of a class of facts shows an example.
"""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from tfx_jax.data.sources.splits import Split
from tfx_jax.synthetic.grammar.lexicon import (
    ADJECTIVES,
    ERRANDS,
    EXCUSES,
    NOUNS,
    POSITIONS,
    REASONS,
    REQUESTED,
    VERBS,
    Adjective,
    Noun,
    Pair,
    Verb,
    select,
)

Fact = TypeVar("Fact", bound=tuple[Any, ...])

_SHARES: tuple[Split, ...] = ("validation", "test") + ("train",) * 18  # split by a fact's hash modulo 20
_COMPARABLE = {  # tags of nouns that may be compared with each other
    *("people", "animal", "food", "drink", "text", "machine", "garment", "instrument", "container"),
    *("furniture", "vehicle", "building", "city", "event", "subject"),
}


class Action(NamedTuple):
    """A girl sees a dog; a boy runs."""

    subject: Noun
    verb: Verb
    object: Noun | None


class Quality(NamedTuple):
    """A dog is big."""

    noun: Noun
    adjective: Adjective


class Comparison(NamedTuple):
    """A dog is bigger than a cat."""

    noun: Noun
    adjective: Adjective
    other: Noun


class Position(NamedTuple):
    """A book is on a table."""

    noun: Noun
    preposition: Pair
    landmark: Noun


class Profession(NamedTuple):
    """A mother is a doctor."""

    noun: Noun
    job: Noun


def spell(fact: Iterable[Any]) -> str:
    """Returns the English content words of a fact.

    >>> spell(Quality(NOUNS["dog"], ADJECTIVES[0]))
    'dog big'
    """
    return " ".join(str(getattr(part, "english", part)) for part in fact if part is not None)


def owner(fact: Iterable[Any]) -> Split:
    """Returns the split to which a fact belongs: nine tenths of all to training, the rest to validation and test."""
    digest = hashlib.blake2b(spell(fact).encode(), digest_size=4).digest()
    return _SHARES[int.from_bytes(digest, "little") % len(_SHARES)]


def _is_reflexive(subject: Noun, other: Noun | None) -> bool:
    """Returns whether subject and object are the same, which would need a reflexive pronoun."""
    return subject is other or (other is not None and {subject.english, other.english} == {"i", "we"})


def _actions() -> Iterator[Action]:
    """Yields all actions that the lexicon allows."""
    for verb in VERBS:
        for subject in select(verb.subjects):
            for thing in select(verb.objects) or (None,):
                if not _is_reflexive(subject, thing):
                    yield Action(subject, verb, thing)


def _inquiries_about_subject() -> Iterator[Action]:
    """Yields actions whose subject is "who"."""
    for verb in VERBS:
        yield from (Action(NOUNS["who"], verb, thing) for thing in select(verb.objects) or (None,))


def _inquiries_about_object() -> Iterator[Action]:
    """Yields actions whose object is the verb's question word, such as "what"."""
    for verb in VERBS:
        if verb.objects and verb.asks:
            yield from (Action(subject, verb, NOUNS[verb.asks]) for subject in select(verb.subjects))


def _comparisons() -> Iterator[Comparison]:
    """Yields all comparisons of two nouns of one kind that an adjective with a comparative can describe."""
    for adjective in ADJECTIVES:
        nouns = select(adjective.nouns) if adjective.comparative else ()
        for noun in nouns:
            for other in nouns:
                if noun.tags & other.tags & _COMPARABLE and not _is_reflexive(noun, other):
                    yield Comparison(noun, adjective, other)


def _positions() -> Iterator[Position]:
    """Yields all positions of a thing at a landmark that the lexicon allows."""
    for preposition, things, landmarks in POSITIONS:
        for landmark in select(landmarks):
            yield from (Position(thing, preposition, landmark) for thing in select(things) if thing is not landmark)


def _qualities() -> Iterator[Quality]:
    """Yields each adjective with each noun that it can describe."""
    for adjective in ADJECTIVES:
        yield from (Quality(noun, adjective) for noun in select(adjective.nouns))


def _professions() -> Iterator[Profession]:
    """Yields each job with each pronoun, name, relative, man or woman who may have it."""
    for job in select("job"):
        yield from (Profession(noun, job) for noun in select("pronoun name kin man woman"))


def _has_motive(action: Action) -> bool:
    """Returns whether the lexicon has a reason for the action and a pronoun for its subject."""
    has_pronoun = action.subject.form in ("pronoun", "name") or action.subject.tags & {"male", "female", "animal"}
    return bool(has_pronoun) and action.verb.english in (REASONS | EXCUSES)


def _is_handling(action: Action) -> bool:
    """Returns whether the object is an individual thing about which more can be said."""
    return action.object is not None and not (action.verb.is_generic or action.verb.takes_recipient)


def _is_countable(action: Action) -> bool:
    """Returns whether "how many" can be asked about the object."""
    return _is_handling(action) and bool(action.object and action.object.counter) and action.verb.particle == "を"


def _is_trip(action: Action) -> bool:
    """Returns whether the subject goes to a place, which Japanese marks with へ."""
    return action.object is not None and action.verb.particle == "へ"


def _is_requested(action: Action) -> bool:
    """Returns whether the action can be asked of "you": please open the window."""
    return action.subject is NOUNS["you"] and action.verb.english in REQUESTED


def _grouped(facts: Iterable[Fact], attribute: str) -> dict[Any, list[Fact]]:
    """Returns the facts by one of their words: the value of an attribute such as "verb"."""
    groups = defaultdict(list)
    for fact in facts:
        groups[getattr(fact, attribute)].append(fact)
    return dict(groups)


class World:
    """The facts of one split, grouped by verb, adjective, preposition or noun for sampling."""

    def __init__(self, split: Split):
        self._split = split
        actions = list(filter(self.owns, _actions()))
        events = [action for action in actions if action.verb.aspect != "state"]
        qualities = list(filter(self.owns, _qualities()))
        self.actions = _grouped(actions, "verb")
        self.events = _grouped(events, "verb")
        self.activities = _grouped((action for action in events if action.verb.aspect == "activity"), "verb")
        self.incidents = _grouped((action for action in events if action.verb.aspect != "activity"), "verb")
        self.trips = _grouped((action for action in events if _is_trip(action)), "verb")
        self.motivated = _grouped((action for action in events if _has_motive(action)), "verb")
        self.handlings = _grouped((action for action in actions if _is_handling(action)), "verb")
        self.countable = _grouped((action for action in actions if _is_countable(action)), "verb")
        self.requested = _grouped((action for action in events if _is_requested(action)), "verb")
        self.inquiries_about_subject = _grouped(filter(self.owns, _inquiries_about_subject()), "verb")
        self.inquiries_about_object = _grouped(filter(self.owns, _inquiries_about_object()), "verb")
        self.qualities = _grouped(qualities, "adjective")
        self.comparisons = _grouped(filter(self.owns, _comparisons()), "adjective")
        self.positions = _grouped(filter(self.owns, _positions()), "preposition")
        self.professions = _grouped(filter(self.owns, _professions()), "job")
        # Facts by noun, for additional phrases about the nouns of a sentence.
        self.done_by = _grouped(actions, "subject")
        self.done_to = _grouped(actions, "object")
        self.errands_of = _grouped((action for action in events if action.verb.english in ERRANDS), "subject")
        self.qualities_of = _grouped((fact for fact in qualities if not fact.adjective.is_predicate), "noun")

    def owns(self, fact: Iterable[Any]) -> bool:
        """Returns whether a fact belongs to the split."""
        return owner(fact) == self._split


@functools.cache
def world(split: Split) -> World:
    """Returns the facts of a split, computed once per process.

    >>> sum(map(len, world("test").actions.values())) < sum(map(len, world("train").actions.values()))
    True
    """
    return World(split)
