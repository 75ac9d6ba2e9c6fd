"""How many constituents a parser finds, counted as EVALB counts them (Sekine and Collins, 1997).

The rules are those of its parameter file COLLINS.prm, by which results on the Penn treebank are given.
"""

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

from tfx_jax.data.sources.trees import Tree, is_bracket

_DELETED = frozenset({"TOP", "-NONE-", ",", ":", "``", "''", "."})
_EQUAL = {"PRT": "ADVP"}

Bracket = tuple[str, int, int]
"""Label of a constituent, its first word, and the first word behind it."""


class BracketScores(NamedTuple):
    """Labeled brackets of all sentences together, in percent.

    Attributes:
      f1: harmonic mean of precision and recall.
      precision: how many of the brackets found are right.
      recall: how many of the right ones were found.
      exact_match: how many of the sentences counted have all brackets right and no others.
      num_errors: how many sentences have other words than their references; as in EVALB, they count in nothing else.
    """

    f1: float
    precision: float
    recall: float
    exact_match: float
    num_errors: int


def bracket_scores(predictions: Sequence[Tree], references: Sequence[Tree]) -> BracketScores:
    """Scores trees.

    The tags of the reference decide which words are punctuation and do not count. EVALB looks at those of each side and
    takes a sentence for an error if they disagree, as they would with a parser that writes no tags. A sentence of
    nothing but punctuation has no brackets, and is right.

    Args:
      predictions: the trees that a parser gives to the words of each sentence.
      references: the trees that they should have.

    Raises:
      ValueError: if there is not one prediction for each reference.

    >>> from tfx_jax.data.sources.trees import parse_tree
    >>> right = parse_tree("(TOP (S (NP (DT a) (NN dog)) (VP (VBZ barks)) (. .)))")
    >>> found = parse_tree("(TOP (S (NP (XX a)) (NP (XX dog)) (VP (XX barks) (XX .))))")
    >>> scores = bracket_scores([found], [right])  # S and VP are right, no full stop counting
    >>> f"{scores.precision:.1f}, {scores.recall:.1f}"
    '50.0, 66.7'
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} trees predicted, but {len(references)} references")
    num_right = num_found = num_wanted = num_exact = num_errors = 0
    for prediction, reference in zip(predictions, references, strict=True):
        if prediction.words != reference.words:
            num_errors += 1
            continue
        is_counted = [tag not in _DELETED for tag in reference.tags]
        found, wanted = (collections.Counter(brackets(tree, is_counted)) for tree in (prediction, reference))
        num_right += (found & wanted).total()
        num_found += found.total()
        num_wanted += wanted.total()
        num_exact += found == wanted
    return BracketScores(
        f1=_percent(2 * num_right, num_found + num_wanted),
        precision=_percent(num_right, num_found),
        recall=_percent(num_right, num_wanted),
        exact_match=_percent(num_exact, len(references) - num_errors),
        num_errors=num_errors,
    )


def brackets(tree: Tree, is_counted: Sequence[bool]) -> list[Bracket]:
    """Returns the brackets that count, in the order in which they end; one that is there twice counts twice.

    Words that do not count are not there: places are numbered without them, and a constituent of no other words is no
    bracket. Of a label, what follows "-" or "=" does not count, and PRT is ADVP.

    Args:
      tree: with the words that `is_counted` tells of.
      is_counted: of each word.
    """
    found: list[Bracket] = []
    starts: list[int] = []
    counted, place = iter(is_counted), 0
    for symbol in tree.symbols:
        if not is_bracket(symbol):
            place += next(counted)
        elif symbol.startswith("("):
            starts.append(place)
        else:
            label, start = re.split("[-=]", symbol[1:])[0], starts.pop()
            if label not in _DELETED and start < place:
                found.append((_EQUAL.get(label, label), start, place))
    return found


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
