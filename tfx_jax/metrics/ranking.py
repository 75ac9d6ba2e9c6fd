"""How well scores put the rows of one class before those of the other: AUROC and average precision."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Scorer = Callable[[Float[np.ndarray, " B"], Int[np.ndarray, " B"]], float]
_RESAMPLES = 1_000


class Interval(NamedTuple):
    """A value and what 95 % of the resampled data give."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


def auroc(scores: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]) -> float:
    """The area under the ROC curve: how often a row of class 1 scores above one of class 0, a tie counting half.

    The value is that of scikit-learn's `roc_auc_score`.

    Args:
      scores: any numbers, [B].
      labels: 0 or 1, [B].

    Raises:
      ValueError: if the sides differ in length, or a class has no row.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
    0.875
    """
    scores, is_positive = _sides(scores, labels)
    below = np.sort(scores[~is_positive])
    positives = scores[is_positive]
    wins = np.searchsorted(below, positives, "left") + np.searchsorted(below, positives, "right")
    return float(wins.mean() / (2 * len(below)))


def average_precision(scores: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]) -> float:
    """The precision at each threshold, weighted by how much of class 1 it adds; rows with equal scores come together.

    The value is that of scikit-learn's `average_precision_score`, which does not interpolate.

    Args:
      scores: any numbers, [B].
      labels: 0 or 1, [B].

    Raises:
      ValueError: if the sides differ in length, or a class has no row.

    >>> round(average_precision([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1]), 4)
    0.8333
    """
    scores, is_positive = _sides(scores, labels)
    _, group = np.unique(-scores, return_inverse=True)
    found = np.bincount(group, weights=is_positive)
    precision = found.cumsum() / np.bincount(group).cumsum()
    return float(precision @ found / is_positive.sum())


def with_interval(
    scorer: Scorer, scores: Sequence[float] | np.ndarray, labels: Sequence[int] | np.ndarray, *, seed: int = 0
) -> Interval:
    """Scores rows, and again 1,000 times rows drawn from them with replacement: the percentile bootstrap of Efron.

    Each class keeps its number of rows, so that no resampled data lack one.

    Args:
      scorer: `auroc` or `average_precision`.
      scores: [B].
      labels: 0 or 1, [B].
      seed: of what is drawn; the same, the same interval.

    Raises:
      ValueError: as the scorer.
    """
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels, np.int64)
    value, rng = scorer(scores, labels), np.random.default_rng(seed)
    classes = [np.flatnonzero(labels == label) for label in (0, 1)]
    draws = (np.concatenate([rng.choice(rows, len(rows)) for rows in classes]) for _ in range(_RESAMPLES))
    low, high = np.quantile([scorer(scores[drawn], labels[drawn]) for drawn in draws], (0.025, 0.975))
    return Interval(value, float(low), float(high))


def _sides(
    scores: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]
) -> tuple[Float[np.ndarray, " B"], np.ndarray]:
    scores, is_positive = np.asarray(scores, np.float64), np.asarray(labels) == 1
    if len(scores) != len(is_positive) or not 0 < is_positive.sum() < len(is_positive):
        raise ValueError(
            f"{len(scores)} scores cannot be ranked by {len(is_positive)} labels, of which {is_positive.sum()} are 1"
        )
    return scores, is_positive
