"""From the scores of labels at each step to what is said (CTC: Graves et al., 2006)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

BLANK = 0
"""The label that says nothing; the characters are 1, 2, ..."""


def collapse(path: Sequence[int]) -> list[int]:
    """Returns the labels of a path: of equal ones side by side, one, and no blanks (Graves et al., 2006, section 3.1).

    >>> collapse([0, 3, 3, 0, 3, 1])
    [3, 3, 1]
    """
    labels = np.asarray(path, np.int64)
    return labels[(labels != BLANK) & (np.diff(labels, prepend=BLANK) != 0)].tolist()


def prefix_beam_search(log_probs: Float[np.ndarray, "S V"], beam_size: int) -> list[int]:
    """Searches the labels that all alignments together make likeliest (Graves et al., 2006, section 3.2).

    The likeliest path need not belong to them. Here paths with the same labels so far are one hypothesis, whose
    probability is kept in two parts: of those that end in a blank, and of those that do not, since a label that is said
    twice needs a blank between (Hannun et al., 2014, https://arxiv.org/abs/1408.2873, algorithm 1, without a language
    model).

    Args:
      log_probs: of the labels at each step, of which `BLANK` is one.
      beam_size: hypotheses that are kept after a step; with as many as there are, the search is exact.

    >>> prefix_beam_search(np.log([[0.6, 0.4], [0.6, 0.4]]), 1), prefix_beam_search(np.log([[0.6, 0.4], [0.6, 0.4]]), 2)
    ([], [1])
    """
    never = -np.inf
    beams: dict[tuple[int, ...], tuple[float, float]] = {
        (): (0.0, never)
    }  # of each hypothesis the log-probabilities: ends in a blank, ends in its last label
    for row in log_probs.tolist():
        found: dict[tuple[int, ...], tuple[float, float]] = {}
        for labels, (blank, spoken) in beams.items():
            kept = found.get(labels, (never, never))
            either = float(np.logaddexp(blank, spoken))
            again = spoken + row[labels[-1]] if labels else never
            found[labels] = float(np.logaddexp(kept[0], either + row[BLANK])), float(np.logaddexp(kept[1], again))
            for label, score in enumerate(row):
                if label != BLANK:
                    before = blank if labels and labels[-1] == label else either
                    longer = found.get((*labels, label), (never, never))
                    found[*labels, label] = longer[0], float(np.logaddexp(longer[1], before + score))
        best = sorted(found, key=lambda labels: (-np.logaddexp(*found[labels]), labels))[:beam_size]
        beams = {labels: found[labels] for labels in best}
    return list(max(beams, key=lambda labels: np.logaddexp(*beams[labels])))
