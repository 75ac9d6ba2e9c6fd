"""How well transcripts are written: edits of characters and of words."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RecognitionScores(NamedTuple):
    """How well transcripts are written, in percent.

    Attributes:
      cer: edits that turn the predictions into the references, over the characters of all references.
      exact_match: share of the predictions that are their references.
      wer: edits of words, over the words of all references; a word is what stands between spaces.
    """

    cer: float
    exact_match: float
    wer: float


def recognition_scores(predictions: Sequence[str], references: Sequence[str]) -> RecognitionScores:
    """Scores transcripts.

    Raises:
      ValueError: if the sides differ in length, or the references have no character.

    >>> recognition_scores(["abd", "x"], ["abcd", "x"])
    RecognitionScores(cer=20.0, exact_match=50.0, wer=50.0)
    """
    num_characters = sum(map(len, references))
    if len(predictions) != len(references) or not num_characters:
        raise ValueError(f"{len(predictions)} predictions cannot be scored by {len(references)} references")
    edits, exact = sum(map(edit_distance, predictions, references)), sum(map(str.__eq__, predictions, references))
    words = [[text.split() for text in texts] for texts in (predictions, references)]
    word_edits, num_words = sum(map(edit_distance, *words)), sum(map(len, words[1]))
    return RecognitionScores(
        100 * edits / num_characters, 100 * exact / len(predictions), 100 * word_edits / max(1, num_words)
    )


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Counts the characters, or words, to insert, delete or replace (Levenshtein, 1966).

    >>> edit_distance("kitten", "sitting")
    3
    """
    others = np.array(list(second), dtype=object)
    places = np.arange(len(others) + 1)
    row = places
    for one in first:
        replaced = np.minimum(row[:-1] + (others != one), row[1:] + 1)
        # Insertions last: the least of all places before, each one dearer with the distance.
        row = np.minimum.accumulate(np.concatenate([row[:1] + 1, replaced]) - places) + places
    return int(row[-1])
