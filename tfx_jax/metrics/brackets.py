"""Bracket scores of constituency parsing, computed like EVALB (Sekine and Collins, 1997).

The rules are those of EVALB's parameter file COLLINS.prm, the standard for results on the Penn treebank.
"""

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

from tfx_jax.data.sources.trees import Tree, is_bracket

# Labels and tags that do not count; "" is the root of a tree in the Penn treebank's files, which EVALB reads as TOP.
_DELETED = frozenset({"", "TOP", "-NONE-", ",", ":", "``", "''", "."})
_EQUAL = {"PRT": "ADVP"}  # labels that count as another label

Bracket = tuple[str, int, int]
"""Label of a constituent, index of its first word, and index after its last word."""


class BracketScores(NamedTuple):
    """Labeled bracket scores over all sentences, in percent, and the number of errors.

    Attributes:
      f1: harmonic mean of precision and recall.
      precision: share of the predicted brackets that are in the reference.
      recall: share of the reference's brackets that were predicted.
      exact_match: share of the sentences, without errors, whose brackets equal those of the reference.
      num_errors: number of sentences whose words differ from the reference; as in EVALB, all other scores ignore them.
    """

    f1: float
    precision: float
    recall: float
    exact_match: float
    num_errors: int


def bracket_scores(predictions: Sequence[Tree], references: Sequence[Tree]) -> BracketScores:
    """Computes the bracket scores of predicted trees.

    Words whose tag in the reference is punctuation do not count. EVALB uses the tags of each side and counts a sentence
    as an error if they disagree, which would fail for parsers that predict no tags. A sentence that is all
    punctuation has no brackets and is an exact match.

    Args:
      predictions: predicted trees.
      references: reference trees of the same sentences.

    Raises:
      ValueError: if the numbers of predictions and references differ.

    >>> from tfx_jax.data.sources.trees import parse_tree
    >>> right = parse_tree("(TOP (S (NP (DT a) (NN dog)) (VP (VBZ barks)) (. .)))")
    >>> predicted = parse_tree("(TOP (S (NP (XX a)) (NP (XX dog)) (VP (XX barks) (XX .))))")
    >>> scores = bracket_scores([predicted], [right])  # S and VP are right; the full stop does not count
    >>> f"{scores.precision:.1f}, {scores.recall:.1f}"
    '50.0, 66.7'
    """
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} trees predicted, but {len(references)} references: pass one prediction for "
            "each reference"
        )
    num_correct = num_predicted = num_expected = num_exact = num_errors = 0
    for prediction, reference in zip(predictions, references, strict=True):
        if prediction.words != reference.words:
            num_errors += 1
            continue
        is_counted = [tag not in _DELETED for tag in reference.tags]
        predicted = collections.Counter(brackets(prediction, is_counted))
        expected = collections.Counter(brackets(reference, is_counted))
        num_correct += (predicted & expected).total()  # of equal brackets, as many as both trees have
        num_predicted += predicted.total()
        num_expected += expected.total()
        num_exact += predicted == expected
    return BracketScores(
        f1=_percent(2 * num_correct, num_predicted + num_expected),
        precision=_percent(num_correct, num_predicted),
        recall=_percent(num_correct, num_expected),
        exact_match=_percent(num_exact, len(references) - num_errors),
        num_errors=num_errors,
    )


def brackets(tree: Tree, is_counted: Sequence[bool]) -> list[Bracket]:
    """Returns the brackets of a tree in the order in which they end; equal brackets are repeated.

    Words that are not counted are ignored: they get no index, and a constituent without counted words is no bracket.
    Labels are cut at "-" or "=", and PRT is replaced by ADVP.

    Args:
      tree: the tree.
      is_counted: whether each word of the tree counts.
    """
    result: list[Bracket] = []
    starts: list[int] = []  # first word of each open constituent
    flags = iter(is_counted)
    position = 0  # number of counted words so far
    for symbol in tree.symbols:
        if not is_bracket(symbol):
            position += next(flags)
        elif symbol.startswith("("):
            starts.append(position)
        else:
            label = re.split("[-=]", symbol[1:])[0]
            start = starts.pop()
            if label not in _DELETED and start < position:
                result.append((_EQUAL.get(label, label), start, position))
    return result


def _percent(part: int, whole: int) -> float:
    """Returns part / whole in percent, 0 if `whole` is 0."""
    return 100 * part / whole if whole else 0.0
