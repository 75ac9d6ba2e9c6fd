"""BPE-dropout: splits words by merges of byte pairs, each of which may be left out at random.

Provilkov et al., 2020, https://arxiv.org/abs/1910.13267. SentencePiece 0.2.3 has it too, but its draws differ between
processes even if they have the same seed.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

_NO_MERGE = np.iinfo(np.int64).max


class Merges:
    """The merges of a vocabulary of byte pairs: two neighbors become a piece, those of the best score first.

    Symbols are numbered: first the pieces, in their order, and then characters that only occur within pieces.

    Attributes:
      num_pieces: number of pieces.
      symbols: the symbol of each number.
    """

    def __init__(self, scores: Mapping[str, float]):
        """Finds all pairs of symbols that make a piece.

        Args:
          scores: score of each piece; the merge of the highest score comes first.
        """
        self.num_pieces = len(scores)
        self.symbols = list(dict.fromkeys([*scores, *(character for piece in scores for character in piece)]))
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        ranks = {piece: rank for rank, piece in enumerate(sorted(scores, key=scores.__getitem__, reverse=True))}
        pairs = sorted(
            (numbers[piece[:cut]] * len(numbers) + numbers[piece[cut:]], ranks[piece], numbers[piece])
            for piece in scores
            for cut in range(1, len(piece))
            if piece[:cut] in numbers and piece[cut:] in numbers
        )
        # Columns: the pair as one number, its rank, and what it becomes. The last pair does not occur, so that a search
        # always ends at a pair.
        self._pairs, self._ranks, self._merged = np.array([*pairs, (2**62, _NO_MERGE, -1)], np.int64).T
        self._characters = {ord(symbol): number for symbol, number in numbers.items() if len(symbol) == 1}

    def split(self, words: Sequence[str], *, dropout: float, rng: np.random.Generator) -> list[list[int]]:
        """Returns the symbols of each word; a character without symbol is -1 - its code point.

        In each word the best merge is made wherever its two symbols are neighbors, but at each place it is left out
        with the probability `dropout`. What was left out is not tried again unless a neighbor changes.

        Args:
          words: the words, without white space.
          dropout: between 0 and 1; 0 gives the pieces of BPE.
          rng: random number generator.
        """
        codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)  # code points of all words
        distinct, places = np.unique(codes, return_inverse=True)
        known = np.array([self._characters.get(code, -1 - code) for code in distinct.tolist()], np.int64)
        symbols = known[places]
        word = np.repeat(np.arange(len(words)), [len(word) for word in words])  # the word of each symbol
        is_left_out = np.zeros(len(symbols), bool)  # of the merge of a symbol with the next one
        done: list[tuple[np.ndarray, np.ndarray]] = []
        while symbols.size:
            ranks, merged = self._look_up(symbols, word)
            ranks[is_left_out] = _NO_MERGE
            starts = np.flatnonzero(np.diff(word, prepend=-1))
            best = np.repeat(np.minimum.reduceat(ranks, starts), np.diff(starts, append=len(word)))
            is_active = best < _NO_MERGE
            if not is_active.all():
                done.append((word[~is_active], symbols[~is_active]))
                symbols, word, is_left_out = symbols[is_active], word[is_active], is_left_out[is_active]
                ranks, merged, best = ranks[is_active], merged[is_active], best[is_active]
            is_next = ranks == best
            is_left_out |= is_next & (rng.random(len(symbols)) < dropout)
            is_merged = _without_overlap(is_next & ~is_left_out)
            symbols = np.where(is_merged, merged, symbols)
            is_left_out &= ~(is_merged | np.roll(is_merged, -1))  # pairs of a new symbol with its neighbors are new
            is_kept = ~np.roll(is_merged, 1)  # not the second one of a pair
            symbols, word, is_left_out = symbols[is_kept], word[is_kept], is_left_out[is_kept]
        return _by_word(done, len(words))

    def _look_up(self, symbols: np.ndarray, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rank of the merge of each symbol with the next one of its word, and what they become."""
        following = np.roll(symbols, -1)
        is_pair = (np.roll(word, -1) == word) & (symbols >= 0) & (following >= 0)
        is_pair[-1:] = False
        pairs = np.where(is_pair, symbols * len(self.symbols) + following, -1)
        places = np.searchsorted(self._pairs, pairs)
        ranks = np.where(self._pairs[places] == pairs, self._ranks[places], _NO_MERGE)
        return ranks, self._merged[places]


def _without_overlap(is_chosen: np.ndarray) -> np.ndarray:
    """Keeps every other one of adjacent choices, beginning with the first: two adjacent merges share a symbol."""
    places = np.arange(len(is_chosen))
    last_other = np.maximum.accumulate(np.where(is_chosen, -1, places))  # -1: none before
    return is_chosen & ((places - last_other) % 2 == 1)


def _by_word(done: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> list[list[int]]:
    """Returns the symbols of each of `count` words from pairs of arrays: the word of each symbol, and the symbols."""
    if not done:
        return [[] for _ in range(count)]
    word, symbols = map(np.concatenate, zip(*done, strict=True))
    order = np.argsort(word, kind="stable")
    edges = np.searchsorted(word[order], np.arange(count + 1))
    ordered = symbols[order].tolist()
    return [ordered[begin:end] for begin, end in itertools.pairwise(edges.tolist())]
