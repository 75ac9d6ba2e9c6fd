"""Decoding of CTC outputs: from the scores of labels at each step to labels (Graves et al., 2006)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

BLANK = 0
"""Id of the blank label; characters are 1, 2, ..."""


def collapse(path: Sequence[int]) -> list[int]:
    """Merges repeated labels of a path and then removes blanks (Graves et al., 2006, section 3.1).

    >>> collapse([0, 3, 3, 0, 3, 1])
    [3, 3, 1]
    """
    labels = np.asarray(path, np.int64)
    differs_from_previous = np.diff(labels, prepend=BLANK) != 0
    return labels[(labels != BLANK) & differs_from_previous].tolist()


def prefix_beam_search(log_probs: Float[np.ndarray, "S V"], beam_size: int) -> list[int]:
    """Searches the labels with the highest probability, summed over alignments (Graves et al., 2006, section 3.2).

    These need not be the labels of the most probable path. Paths that collapse to the same labels are one hypothesis.
    A hypothesis has two probabilities, of its paths that end in a blank and of those that end in the last label,
    because a repeated label needs a blank in between (Hannun et al., 2014, https://arxiv.org/abs/1408.2873, algorithm
    1, without a language model).

    Args:
      log_probs: log-probabilities of the V labels, `BLANK` included, at each of the S steps.
      beam_size: number of hypotheses kept after each step; the search is exact if none is dropped.

    Returns:
      The labels of the best hypothesis, without blanks.

    >>> prefix_beam_search(np.log([[0.6, 0.4], [0.6, 0.4]]), 1), prefix_beam_search(np.log([[0.6, 0.4], [0.6, 0.4]]), 2)
    ([], [1])
    """
    impossible = -np.inf
    # Log-probabilities of each hypothesis: (paths that end in a blank, paths that end in its last label).
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, impossible)}
    for scores in log_probs.tolist():
        extended: dict[tuple[int, ...], tuple[float, float]] = {}
        for labels, (blank, nonblank) in beams.items():
            either = float(np.logaddexp(blank, nonblank))
            # The labels stay the same: a blank follows, or the last label is repeated.
            old_blank, old_nonblank = extended.get(labels, (impossible, impossible))
            repeated = nonblank + scores[labels[-1]] if labels else impossible
            extended[labels] = (
                float(np.logaddexp(old_blank, either + scores[BLANK])),
                float(np.logaddexp(old_nonblank, repeated)),
            )
            # One more label follows. If it equals the last label, a blank must precede it.
            for label, score in enumerate(scores):
                if label != BLANK:
                    before = blank if labels and labels[-1] == label else either
                    old_blank, old_nonblank = extended.get((*labels, label), (impossible, impossible))
                    extended[*labels, label] = old_blank, float(np.logaddexp(old_nonblank, before + score))
        # Highest total probability first; of equal ones, the first in the order of the labels.
        best = sorted(extended, key=lambda labels: (-np.logaddexp(*extended[labels]), labels))[:beam_size]
        beams = {labels: extended[labels] for labels in best}
    return list(max(beams, key=lambda labels: np.logaddexp(*beams[labels])))
