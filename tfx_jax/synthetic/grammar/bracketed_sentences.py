"""Sentences of the built-in grammar with their constituents as trees."""

from tfx_jax.data.sources.trees import WORD, Tree, is_bracket
from tfx_jax.synthetic.grammar import sentences
from tfx_jax.synthetic.grammar.derivation import Derivation, Named
from tfx_jax.synthetic.grammar.inflection import Tense
from tfx_jax.synthetic.grammar.lexicon import Noun, Pair
from tfx_jax.synthetic.grammar.phrases import NounPhrase

_TAGS = {".": ".", "?": ".", ",": ","}


class BracketedDerivation(Derivation):
    """A derivation that puts brackets around noun phrases, and places and times, of the English sentence."""

    def mention(self, noun: Noun, phrase: Named) -> Named:
        """The phrase as a constituent."""
        del noun
        return _as_constituent("NP", phrase)

    def relative(self, noun: Noun, *, without: Noun | None = None) -> NounPhrase | None:
        """The noun and its relative clause as one constituent around that of the noun."""
        phrase = super().relative(noun, without=without)
        return _as_constituent("NP", phrase) if phrase else None

    def place(self, noun: Noun) -> Pair:
        """Where something is done, as a constituent."""
        return _as_constituent("PP", super().place(noun))

    def time(self, tense: Tense) -> Pair:
        """When, as a constituent: on monday, or last week."""
        time = super().time(tense)
        is_phrase = time.english.startswith(("in ", "at ", "on "))
        return _as_constituent("PP" if is_phrase else "NP", time) if time.english else time


def _as_constituent(label: str, phrase: Named) -> Named:
    return phrase._replace(english=f"({label} {phrase.english} ){label}")


def bracketed(draw: BracketedDerivation) -> Tree:
    """The tree of a sentence of any construction: a statement is S, a question SQ."""
    marked = draw.dice.choose(sentences.CONSTRUCTIONS)(draw).english.split()
    label = "SQ" if marked[-1] == "?" else "S"
    marked = ["(TOP", f"({label}", *marked, f"){label}", ")TOP"]
    return Tree(
        [part for part in marked if not is_bracket(part)],
        [part if is_bracket(part) else _TAGS.get(part, WORD) for part in marked],
    )
