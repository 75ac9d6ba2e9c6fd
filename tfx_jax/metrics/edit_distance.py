"""Character and word error rates of transcripts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RecognitionScores(NamedTuple):
    """Scores of transcripts in percent.

    Attributes:
      cer: character error rate: edits from predictions to references per character of the references.
      exact_match: share of the predictions that equal their reference.
      wer: word error rate: edits of words per word of the references; words are separated by white space.
    """

    cer: float
    exact_match: float
    wer: float


def recognition_scores(predictions: Sequence[str], references: Sequence[str]) -> RecognitionScores:
    """Computes error rates over all transcripts; white space at their ends does not count.

    Raises:
      ValueError: if the numbers of predictions and references differ, or the references have no characters.

    >>> recognition_scores(["abd", "x"], ["abcd", "x"])
    RecognitionScores(cer=20.0, exact_match=50.0, wer=50.0)
    """
    predictions, references = ([text.strip() for text in texts] for texts in (predictions, references))
    num_characters = sum(map(len, references))
    if len(predictions) != len(references) or not num_characters:
        raise ValueError(
            f"{len(predictions)} predictions cannot be scored by {len(references)} references of {num_characters} "
            "characters: as many references are required, and at least one character"
        )
    num_edits = sum(map(edit_distance, predictions, references))
    num_exact = sum(map(str.__eq__, predictions, references))
    predicted_words = [text.split() for text in predictions]
    reference_words = [text.split() for text in references]
    num_word_edits = sum(map(edit_distance, predicted_words, reference_words))
    num_words = sum(map(len, reference_words))
    return RecognitionScores(
        cer=100 * num_edits / num_characters,
        exact_match=100 * num_exact / len(predictions),
        wer=100 * num_word_edits / max(1, num_words),
    )


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the least number of insertions, deletions and replacements from `first` to `second` (Levenshtein, 1966).

    The items are characters or words.

    >>> edit_distance("kitten", "sitting")
    3
    """
    targets = np.array(list(second), dtype=object)
    columns = np.arange(len(targets) + 1)
    row = columns  # row[j]: distance from the items of `first` read so far to the first j of `second`
    for item in first:
        replaced_or_deleted = np.minimum(row[:-1] + (targets != item), row[1:] + 1)
        # Insertions: min over i <= j of row[i] + (j - i), as a cumulative minimum.
        row = np.minimum.accumulate(np.concatenate([row[:1] + 1, replaced_or_deleted]) - columns) + columns
    return int(row[-1])
