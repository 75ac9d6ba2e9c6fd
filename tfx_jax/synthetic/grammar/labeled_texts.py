"""Sentences of the built-in grammar, labeled by their kind; docstrings of constructions show examples."""

from collections.abc import Callable, Sequence

from tfx_jax.data.sources.labeled import LabeledText
from tfx_jax.synthetic.grammar import sentences
from tfx_jax.synthetic.grammar.derivation import Derivation
from tfx_jax.synthetic.grammar.lexicon import Pair
from tfx_jax.synthetic.grammar.rules import CLAUSE_OF_LONG_SUBJECT, STATEMENT


def action(draw: Derivation) -> Pair:
    """Returns an affirmative sentence such as: The girl who did not sleep saw a dog."""
    return _deed(draw, negative=False)


def denial(draw: Derivation) -> Pair:
    """Returns a negative sentence such as: The girl who saw a dog did not sleep."""
    return _deed(draw, negative=True)


def _deed(draw: Derivation, *, negative: bool) -> Pair:
    """Returns a sentence about an action, often with a relative clause that describes its subject."""
    fact = draw.fact(draw.world.actions)
    tense = draw.tense(fact, negative=negative)
    subject = draw.relative(fact.subject, without=fact.object) if draw.dice.chance(50) else None
    subject = subject or draw.noun_phrase(fact.subject)
    circumstances = draw.circumstances(fact, tense)
    clause = draw.clause(fact, tense, subject, circumstances, negative=negative, rule=CLAUSE_OF_LONG_SUBJECT)
    return STATEMENT(CLAUSE=clause)


KINDS: dict[str, Sequence[Callable[[Derivation], Pair]]] = {  # label: constructions that can make such sentences
    "action": (action,),
    "denial": (denial,),
    "description": (sentences.quality, sentences.quality, sentences.profession),
    "comparison": (sentences.comparison,),
    "position": (sentences.there_is,),
    "thought": (sentences.think,),
    "reason": (sentences.because,),
    "moment": (sentences.when,),
    "compound": (sentences.and_, sentences.but),
    "request": (sentences.request,),
    "yes-no question": (sentences.question, sentences.question, sentences.quality, sentences.profession),
    "open question": (sentences.who, sentences.what, sentences.where_or_when, sentences.how_many),
}
_LABELS = tuple(KINDS)


def labeled(draw: Derivation) -> LabeledText | None:
    """Returns a sentence with its label; None if 20 attempts made no sentence of that kind."""
    label = draw.dice.choose(_LABELS)
    for _ in range(20):
        attempt = Derivation(draw.dice, draw.world)
        construct = attempt.dice.choose(KINDS[label])
        english = construct(attempt).english
        is_right = english.endswith("?") == label.endswith("question")
        if construct is sentences.but:  # without a contrast, `but` returns a plain statement
            is_right = " , but " in english
        if is_right:
            return LabeledText(english, label)
    return None
