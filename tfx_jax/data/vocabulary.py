"""How many subwords a text should be cut into."""

import math
from collections.abc import Sequence

_NUM_SPECIALS = 4  # padding, beginning, end and unknown


def vocabulary_size(lines: Sequence[str]) -> int:
    """Chooses the size of a joint vocabulary: every character, and 32 subwords for the root of each pair of lines.

    A small text wants a small vocabulary (Sennrich and Zhang, 2019, https://arxiv.org/abs/1905.11901), or most of its
    subwords occur too seldom to be learnt. A text grows with the square of its vocabulary, roughly (Heaps' law), hence
    the root; 32 of them are 32,000 subwords, as many as published systems have, for a million pairs.

    Args:
      lines: of both languages, so that two of them are a pair.

    >>> vocabulary_size(["ein haus", "a house"] * 10_000)  # 8 letters, the space and 4 special tokens besides
    3213
    """
    return _NUM_SPECIALS + len(set().union(*lines)) + round(32 * math.sqrt(len(lines) / 2))
