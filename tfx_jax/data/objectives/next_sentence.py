"""Pairs of segments for BERT, and its next sentence prediction (Devlin et al., 2019, section 3.1 and appendix A.2)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NUM_PAIR_SPECIALS = 3  # [CLS] A [SEP] B [SEP]

Sentence = Sequence[int]


class SegmentPair(NamedTuple):
    """Two segments of a corpus, each of one sentence or more.

    Attributes:
      first: tokens of segment A.
      second: tokens of segment B.
      is_next: whether B is what follows A in its document, rather than from another one.
    """

    first: list[int]
    second: list[int]
    is_next: bool


def next_sentence_pairs(
    documents: Sequence[Sequence[Sentence]],
    rng: np.random.Generator,
    *,
    max_length: int,
    short_rate: float = 0.1,
) -> Iterator[SegmentPair]:
    """Goes once through a corpus, in pairs of which 50 % are neighbors and 50 % have a B from another document.

    As in the authors' program, a segment is as many sentences as fill the input; one time in ten a shorter length is
    filled, so that the model sees such inputs too; and the sentences that a random B displaced begin the next pair.
    Other than there, the coin is fair: a last sentence with nothing behind it begins no pair, where the program always
    gives it a random B and so gives the answer away. Pairs may be too long for the input by a part of a sentence;
    `pair_inputs` cuts them.

    Args:
      documents: tokens of the sentences (or lines, or paragraphs) of each document.
      rng: drawn from; the same state gives the same pairs. The order of the documents is theirs: shuffle the pairs.
      max_length: of the input, [CLS] and both [SEP] included.
      short_rate: how often an input is to be shorter, of a length drawn from 2 to `max_length` - 3 tokens.

    Raises:
      ValueError: if fewer than two documents have text, or none has two sentences.
    """
    texts = [[sentence for sentence in document if len(sentence)] for document in documents]
    texts = [text for text in texts if text]
    if len(texts) < 2 or max(map(len, texts)) < 2:
        raise ValueError("next sentence prediction needs two documents, and one of them with two sentences or more")
    if max_length < NUM_PAIR_SPECIALS + 2:
        raise ValueError(f"max_length={max_length} leaves no room for two segments beside [CLS] and two [SEP]")
    return _walk(texts, rng, max_length - NUM_PAIR_SPECIALS, short_rate)


def _walk(
    texts: list[list[Sentence]], rng: np.random.Generator, max_tokens: int, short_rate: float
) -> Iterator[SegmentPair]:
    for number, text in enumerate(texts):
        begin = 0
        while begin < len(text) - 1:
            short = rng.random() < short_rate
            wanted = int(rng.integers(2, max_tokens + 1)) if short else max_tokens
            end = _reach(text, begin, wanted, at_least=2)
            middle = int(rng.integers(begin + 1, end))
            first = _join(text[begin:middle])
            is_next = bool(rng.random() < 0.5)
            if is_next:
                second, begin = _join(text[middle:end]), end
            else:
                second, begin = _elsewhere(texts, number, rng, wanted - len(first)), middle
            yield SegmentPair(first, second, is_next)


def _elsewhere(texts: list[list[Sentence]], number: int, rng: np.random.Generator, wanted: int) -> list[int]:
    """Sentences from a random place of a document other than `number`, about `wanted` tokens of them."""
    other = int(rng.integers(len(texts) - 1))
    text = texts[other + (other >= number)]
    begin = int(rng.integers(len(text)))
    return _join(text[begin : _reach(text, begin, wanted, at_least=1)])


def _reach(text: list[Sentence], begin: int, wanted: int, *, at_least: int) -> int:
    """The end of the sentences from `begin` on that have `wanted` tokens together, if the text goes on for so long."""
    end, num_tokens = begin, 0
    while end < len(text) and (end < begin + at_least or num_tokens < wanted):
        num_tokens += len(text[end])
        end += 1
    return end


def _join(sentences: list[Sentence]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def truncate_pair(
    first: Sequence[int], second: Sequence[int], max_tokens: int, rng: np.random.Generator | None = None
) -> tuple[list[int], list[int]]:
    """Takes one token after another from the longer side, the second where they are equal, until both fit.

    Args:
      first: tokens.
      second: tokens.
      max_tokens: of both together.
      rng: decides for each token whether it goes from the front or the back, as in BERT's pretraining; None cuts at the
        back only, as in its fine-tuning.

    >>> truncate_pair([1, 2, 3, 4], [5, 6], 4)
    ([1, 2], [5, 6])
    """
    excess = max(0, len(first) + len(second) - max_tokens)
    # Token by token without the loop: level the longer side down first, then take turns.
    level = min(excess, abs(len(first) - len(second)))
    turns = excess - level
    if len(first) > len(second):
        cuts = level + turns // 2, turns - turns // 2
    else:
        cuts = turns // 2, level + turns - turns // 2
    return _cut(first, cuts[0], rng), _cut(second, cuts[1], rng)


def _cut(tokens: Sequence[int], count: int, rng: np.random.Generator | None) -> list[int]:
    front = 0 if rng is None else int(rng.binomial(count, 0.5))
    return list(tokens[front : len(tokens) - count + front])


def pair_inputs(
    first: Sequence[int],
    second: Sequence[int],
    *,
    max_length: int,
    cls_id: int,
    sep_id: int,
    pad_id: int,
    rng: np.random.Generator | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Lays two segments out as BERT reads them: [CLS] A [SEP] B [SEP], and padding; figure 2 of the paper.

    Args:
      first: tokens of A.
      second: tokens of B; none gives [CLS] A [SEP], the input for a single text.
      max_length: length of the result; the longer segment is cut to it, see `truncate_pair`.
      cls_id: of [CLS].
      sep_id: of [SEP].
      pad_id: of padding.
      rng: see `truncate_pair`.

    Returns:
      The tokens and their types, both [max_length] int32. The type, "segment" in the paper, is 0 up to the first
      [SEP], 1 from there to the second, and 0 on padding.

    Raises:
      ValueError: if there is no room for a token.

    >>> pair_inputs([7, 8], [9], max_length=8, cls_id=1, sep_id=2, pad_id=0)
    (array([1, 7, 8, 2, 9, 2, 0, 0], dtype=int32), array([0, 0, 0, 0, 1, 1, 0, 0], dtype=int32))
    """
    num_segments = 2 if len(second) else 1
    num_specials = num_segments + 1
    if max_length < num_specials + bool(len(first)) + bool(len(second)):  # of a text without tokens there is nothing
        raise ValueError(f"max_length={max_length} leaves no room for tokens beside the {num_specials} special ones")
    first, second = truncate_pair(first, second, max_length - num_specials, rng)
    row = [cls_id, *first, sep_id]
    types = np.zeros(max_length, np.int32)
    if num_segments == 2:
        types[len(row) : len(row) + len(second) + 1] = 1
        row += [*second, sep_id]
    tokens = np.full(max_length, pad_id, np.int32)
    tokens[: len(row)] = row
    return tokens, types
