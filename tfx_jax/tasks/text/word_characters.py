"""Words as inputs of an ELMo: a row of bytes per word, without a vocabulary (Peters et al., 2018, section 3.2)."""

from collections.abc import Sequence

import numpy as np

_BEGIN, _END, _BOUNDARY = 257, 258, 259  # after the bytes, 1 to 256; 0 is padding


def word_rows(words: Sequence[str], word_length: int) -> np.ndarray:
    """Encodes each word as a row: begin mark, UTF-8 bytes plus 1, end mark, and zeros.

    Args:
      words: any words. Bytes that do not fit between the marks are cut off.
      word_length: W, length of a row.

    Returns:
      [number of words, W] int32.

    >>> word_rows(["b", "abc"], 4).tolist()
    [[257, 99, 258, 0], [257, 98, 99, 258]]
    """
    rows = np.zeros((len(words), word_length), np.int32)
    for row, word in zip(rows, words, strict=True):
        codes = np.frombuffer(word.encode(), np.uint8)[: word_length - 2]
        row[: len(codes) + 2] = [_BEGIN, *(codes.astype(np.int32) + 1), _END]
    return rows


def boundary_row(word_length: int) -> np.ndarray:
    """Returns the row before the first and after the last word of a sentence, [W] int32.

    >>> boundary_row(4).tolist()
    [257, 259, 258, 0]
    """
    return np.array([_BEGIN, _BOUNDARY, _END, *[0] * (word_length - 3)], np.int32)
