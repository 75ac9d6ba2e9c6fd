"""Sentences of the built-in grammar with their constituents as trees."""

from tfx_jax.data.sources.trees import WORD, Tree, is_bracket
from tfx_jax.synthetic.grammar import sentences
from tfx_jax.synthetic.grammar.derivation import Derivation, Named
from tfx_jax.synthetic.grammar.inflection import Tense
from tfx_jax.synthetic.grammar.lexicon import Noun, Pair
from tfx_jax.synthetic.grammar.phrases import NounPhrase

_TAGS = {".": ".", "?": ".", ",": ","}  # tags of punctuation marks


class BracketedDerivation(Derivation):
    """A derivation that puts brackets around noun phrases, and places and times, of the English sentence."""

    def mention(self, noun: Noun, phrase: Named) -> Named:
        """Returns the phrase as a constituent NP."""
        del noun
        return _as_constituent("NP", phrase)

    def relative(self, noun: Noun, *, without: Noun | None = None) -> NounPhrase | None:
        """Returns the noun and its relative clause as one NP, inside which the noun is an NP too."""
        phrase = super().relative(noun, without=without)
        return _as_constituent("NP", phrase) if phrase else None

    def place(self, noun: Noun) -> Pair:
        """Returns the phrase for the place of an action as a constituent PP."""
        return _as_constituent("PP", super().place(noun))

    def time(self, tense: Tense) -> Pair:
        """Returns a time as a constituent: on monday (PP), last week (NP)."""
        time = super().time(tense)
        is_phrase = time.english.startswith(("in ", "at ", "on "))
        return _as_constituent("PP" if is_phrase else "NP", time) if time.english else time


def _as_constituent(label: str, phrase: Named) -> Named:
    """Puts the brackets of `tfx_jax.data.sources.trees.Tree.symbols` around the English phrase."""
    return phrase._replace(english=f"({label} {phrase.english} ){label}")


def bracketed(draw: BracketedDerivation) -> Tree:
    """Returns the tree of a sentence of any construction: a statement is S, a question SQ."""
    construct = draw.dice.choose(sentences.CONSTRUCTIONS)
    parts = construct(draw).english.split()  # words and brackets
    label = "SQ" if parts[-1] == "?" else "S"
    parts = ["(TOP", f"({label}", *parts, f"){label}", ")TOP"]
    return Tree(
        words=[part for part in parts if not is_bracket(part)],
        symbols=[part if is_bracket(part) else _TAGS.get(part, WORD) for part in parts],
    )
