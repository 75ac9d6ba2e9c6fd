"""Sentences of the built-in grammar with their entities as BIO tags."""

from tfx_jax.data.sources.conll import TaggedSentence
from tfx_jax.synthetic.grammar import sentences
from tfx_jax.synthetic.grammar.derivation import Derivation, Named
from tfx_jax.synthetic.grammar.inflection import Tense
from tfx_jax.synthetic.grammar.lexicon import Noun, Pair

ENTITIES = ("person", "animal", "place", "thing", "time")
_OPEN, _CLOSE = "<", ">"  # <person the girl > saw <animal a dog > : no word of the grammar has them
_NOT_ENTITIES = {"sport", "subject", "event"}
_CONSTRUCTIONS = [  # without schedules and birthdays, which consist of little else than events and times
    construct for construct in sentences.CONSTRUCTIONS if construct not in (sentences.schedule, sentences.birthday)
]


class MarkedDerivation(Derivation):
    """A derivation that puts marks around the entities of the English sentence."""

    def mention(self, noun: Noun, phrase: Named) -> Named:
        """Returns the phrase, between marks if the noun is an entity."""
        kind = _kind(noun)
        return phrase._replace(english=_mark(kind, phrase.english)) if kind else phrase

    def place(self, noun: Noun) -> Pair:
        """Returns the phrase for the place of an action, between marks; an event may be a place, such as a party."""
        place = super().place(noun)
        return place._replace(english=_mark_after_preposition("place", place.english))

    def time(self, tense: Tense) -> Pair:
        """Returns a random time that fits the tense, between marks."""
        time = super().time(tense)
        return time._replace(english=_mark_after_preposition("time", time.english)) if time.english else time


def _kind(noun: Noun) -> str:
    """Returns the kind of entity that a noun is; empty if it is none."""
    for kind, tags in (("person", {"people", "job"}), ("animal", {"animal"}), ("place", {"place"})):
        if noun.tags & tags:
            return kind
    is_entity = noun.form in ("count", "mass", "pair") and not noun.tags & _NOT_ENTITIES
    return "thing" if is_entity else ""


def _mark(kind: str, english: str) -> str:
    """Returns a phrase between the marks of an entity of this kind."""
    return f"{_OPEN}{kind} {english} {_CLOSE}"


def _mark_after_preposition(kind: str, english: str) -> str:
    """Puts marks around a phrase but not around its preposition: in <the park>, on <monday>, but <last week>."""
    preposition, _, rest = english.partition(" ")
    return f"{preposition} {_mark(kind, rest)}" if preposition in ("in", "at", "on") else _mark(kind, english)


def tagged(draw: MarkedDerivation) -> TaggedSentence:
    """Returns a sentence of any construction with its BIO tags."""
    construct = draw.dice.choose(_CONSTRUCTIONS)
    words: list[str] = []
    tags: list[str] = []
    prefix, kind = "", ""  # of the current entity; an empty kind means none
    for word in construct(draw).english.split():
        if word.startswith(_OPEN):
            prefix, kind = "B-", word.removeprefix(_OPEN)
        elif word == _CLOSE:
            kind = ""
        else:
            words.append(word)
            tags.append(prefix + kind if kind else "O")
            prefix = "I-"
    return TaggedSentence(words, tags)
