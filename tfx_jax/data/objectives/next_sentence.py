"""Pairs of segments for BERT's next sentence prediction (Devlin et al., 2019, section 3.1 and appendix A.2)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NUM_PAIR_SPECIALS = 3  # [CLS] A [SEP] B [SEP]

Sentence = Sequence[int]


class SegmentPair(NamedTuple):
    """Two segments of a corpus, each of one or more sentences.

    Attributes:
      first: tokens of segment A.
      second: tokens of segment B.
      is_next: whether B follows A in its document; otherwise B is from another document.
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
    """Yields pairs in one pass over a corpus: in 50 % segment B follows A, in 50 % it is from another document.

    As in the authors' program, the sentences of a pair fill the input. With probability `short_rate` they fill a
    shorter random length, so that the model also sees short inputs. Sentences that a random B replaced begin the next
    pair. Unlike the program, the last sentence of a document begins no pair: the program always gives it a random B, so
    that it reveals the label. Pairs may exceed the input by a part of a sentence; `pair_inputs` truncates them.

    Args:
      documents: tokens of the sentences (or lines, or paragraphs) of each document.
      rng: random number generator. Pairs come in the order of the documents; shuffle them afterwards.
      max_length: length of the input, [CLS] and both [SEP] included.
      short_rate: probability of a shorter input, of uniformly 2 to `max_length` - 3 tokens without special ones.

    Raises:
      ValueError: if fewer than two documents have text, none has two sentences, or `max_length` is below 5.
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
    """Yields the pairs of `next_sentence_pairs`, of about `max_tokens` tokens without special ones."""
    for text_index, text in enumerate(texts):
        begin = 0
        while begin < len(text) - 1:
            is_short = rng.random() < short_rate
            num_tokens = int(rng.integers(2, max_tokens + 1)) if is_short else max_tokens
            # Sentences begin .. end - 1 fill an input; the first segment ends at a random sentence `middle` of them.
            end = _end_of_sentences(text, begin, num_tokens, min_sentences=2)
            middle = int(rng.integers(begin + 1, end))
            first = _join(text[begin:middle])
            is_next = bool(rng.random() < 0.5)
            if is_next:
                second = _join(text[middle:end])
                begin = end  # of the next pair
            else:
                second = _random_sentences(texts, text_index, rng, num_tokens - len(first))
                begin = middle  # the sentences from `middle` on were not used
            yield SegmentPair(first, second, is_next)


def _random_sentences(
    texts: list[list[Sentence]], excluded: int, rng: np.random.Generator, num_tokens: int
) -> list[int]:
    """Returns about `num_tokens` tokens of sentences from a random position of a document other than `excluded`."""
    other = int(rng.integers(len(texts) - 1))
    text = texts[other + (other >= excluded)]  # indices from `excluded` on are shifted by one to skip it
    begin = int(rng.integers(len(text)))
    return _join(text[begin : _end_of_sentences(text, begin, num_tokens, min_sentences=1)])


def _end_of_sentences(text: list[Sentence], begin: int, num_tokens: int, *, min_sentences: int) -> int:
    """Returns the exclusive end of the sentences from `begin` on that reach `num_tokens`, or the end of the text."""
    end, total = begin, 0
    while end < len(text) and (end < begin + min_sentences or total < num_tokens):
        total += len(text[end])
        end += 1
    return end


def _join(sentences: list[Sentence]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def truncate_pair(
    first: Sequence[int], second: Sequence[int], max_tokens: int, rng: np.random.Generator | None = None
) -> tuple[list[int], list[int]]:
    """Removes tokens one by one from the longer sequence (the second if equal) until both fit together.

    Args:
      first: tokens.
      second: tokens.
      max_tokens: maximum number of tokens of both together.
      rng: chooses for each token whether it is removed at the front or the end, as in BERT's pretraining; None removes
        at the end only, as in its fine-tuning.

    >>> truncate_pair([1, 2, 3, 4], [5, 6], 4)
    ([1, 2], [5, 6])
    """
    excess = max(0, len(first) + len(second) - max_tokens)
    # Without a loop over tokens: first shorten the longer one to the length of the other, then alternate.
    num_leveling = min(excess, abs(len(first) - len(second)))
    num_alternating = excess - num_leveling
    num_removed_first = num_alternating // 2
    num_removed_second = num_alternating - num_alternating // 2
    if len(first) > len(second):
        num_removed_first += num_leveling
    else:
        num_removed_second += num_leveling
    return _remove(first, num_removed_first, rng), _remove(second, num_removed_second, rng)


def _remove(tokens: Sequence[int], count: int, rng: np.random.Generator | None) -> list[int]:
    """Removes `count` tokens at the end or, with `rng`, each at the front or the end with equal probability."""
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
    """Returns the input of BERT for two segments: [CLS] A [SEP] B [SEP] and padding (figure 2 of the paper).

    Args:
      first: tokens of A.
      second: tokens of B; if empty, the input is that of a single text, [CLS] A [SEP].
      max_length: length of the result; segments are truncated by `truncate_pair` to fit.
      cls_id: id of [CLS].
      sep_id: id of [SEP].
      pad_id: id of padding.
      rng: truncates at a random end if given, otherwise at the end, see `truncate_pair`.

    Returns:
      Tokens and token types, both [max_length] int32. The type ("segment" in the paper) is 0 up to the first [SEP], 1
      after it up to the second, and 0 at padding.

    Raises:
      ValueError: if `max_length` has no room for a token of each non-empty segment.

    >>> pair_inputs([7, 8], [9], max_length=8, cls_id=1, sep_id=2, pad_id=0)
    (array([1, 7, 8, 2, 9, 2, 0, 0], dtype=int32), array([0, 0, 0, 0, 1, 1, 0, 0], dtype=int32))
    """
    num_segments = 2 if len(second) else 1
    num_specials = num_segments + 1
    if max_length < num_specials + bool(len(first)) + bool(len(second)):
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
