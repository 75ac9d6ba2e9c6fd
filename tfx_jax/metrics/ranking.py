"""AUROC and average precision: how well scores rank the examples of class 1 above those of class 0."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Scorer = Callable[[Float[np.ndarray, " B"], Int[np.ndarray, " B"]], float]
"""Returns a score from scores and labels, such as `auroc`."""
_RESAMPLES = 1_000


class Interval(NamedTuple):
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


def auroc(scores: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]) -> float:
    """Returns the area under the ROC curve: how often class 1 scores above class 0, where a tie counts half.

    The value is that of scikit-learn's `roc_auc_score`.

    Args:
      scores: any numbers, [B]; the result is NaN if one is.
      labels: 0 or 1, [B].

    Raises:
      ValueError: if the numbers of scores and labels differ, or a class has no example.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
    0.875
    """
    scores, is_positive = _check_inputs(scores, labels)
    if np.isnan(scores).any():  # sorted, they would be the highest
        return math.nan
    negatives = np.sort(scores[~is_positive])
    positives = scores[is_positive]
    # For each positive: number of negatives below it, plus number of negatives below or equal. Ties thus count once,
    # others twice.
    double_wins = np.searchsorted(negatives, positives, "left") + np.searchsorted(negatives, positives, "right")
    return float(double_wins.mean() / (2 * len(negatives)))


def average_precision(scores: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]) -> float:
    """Returns the mean of the precision at each threshold, weighted by the gain in recall; ties share a threshold.

    The value is that of scikit-learn's `average_precision_score`, which does not interpolate.

    Args:
      scores: any numbers, [B]; the result is NaN if one is.
      labels: 0 or 1, [B].

    Raises:
      ValueError: if the numbers of scores and labels differ, or a class has no example.

    >>> round(average_precision([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1]), 4)
    0.8333
    """
    scores, is_positive = _check_inputs(scores, labels)
    if np.isnan(scores).any():
        return math.nan
    _, groups = np.unique(-scores, return_inverse=True)  # group of equal scores of each example, highest score first
    num_positive = np.bincount(groups, weights=is_positive)  # of each group
    precision = num_positive.cumsum() / np.bincount(groups).cumsum()  # of all examples down to each threshold
    return float(precision @ num_positive / is_positive.sum())  # a threshold gains num_positive / total in recall


def with_interval(
    scorer: Scorer, scores: Sequence[float] | np.ndarray, labels: Sequence[int] | np.ndarray, *, seed: int = 0
) -> Interval:
    """Returns a score with its interval by Efron's percentile bootstrap, from 1,000 resamples.

    Resampling keeps the number of examples of each class, so that no class is missing.

    Args:
      scorer: `auroc` or `average_precision`.
      scores: any numbers, [B].
      labels: 0 or 1, [B].
      seed: seed of the resampling.

    Raises:
      ValueError: if the numbers of scores and labels differ, or a class has no example.
    """
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels, np.int64)
    value = scorer(scores, labels)
    rng = np.random.default_rng(seed)
    indices_by_class = [np.flatnonzero(labels == label) for label in (0, 1)]
    resampled_values = []
    for _ in range(_RESAMPLES):
        resample = np.concatenate([rng.choice(indices, len(indices)) for indices in indices_by_class])
        resampled_values.append(scorer(scores[resample], labels[resample]))
    low, high = np.quantile(resampled_values, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def _check_inputs(
    scores: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]
) -> tuple[Float[np.ndarray, " B"], np.ndarray]:
    """Returns (scores, whether the label is 1), both [B]; raises ValueError if lengths differ or a class is missing."""
    scores, is_positive = np.asarray(scores, np.float64), np.asarray(labels) == 1
    if len(scores) != len(is_positive) or not 0 < is_positive.sum() < len(is_positive):
        raise ValueError(
            f"{len(scores)} scores cannot be ranked by {len(is_positive)} labels, of which {is_positive.sum()} are 1: "
            "each score needs a label, and labels 0 and 1 must both occur"
        )
    return scores, is_positive
