"""Span corruption, T5's pretraining objective (Raffel et al., 2020, https://arxiv.org/abs/1910.10683, section 3.1.4).

Spans of tokens are dropped from a text. The inputs have a sentinel in place of each span; the targets are the dropped
spans, each after its sentinel. With `whole_text` the targets are the text itself, as in BART's infilling (Lewis et al.,
2019, https://arxiv.org/abs/1910.13461, section 2.2).
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.errors import UserError

Token = TypeVar("Token")  # ids, or words in examples
Span = tuple[int, int]  # (begin, end), end exclusive

NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3.0  # the paper's values, section 3.3.4
NUM_SENTINELS = 100  # in T5's tokenizers


class Noise(TypedDict):
    """What is dropped: the fraction of the tokens, and the mean length of the spans in tokens."""

    noise_density: float
    mean_span_length: float


def sentinel_ids(vocab_size: int, count: int = NUM_SENTINELS) -> list[int]:
    """Returns T5's sentinels: the last ids of the vocabulary in descending order.

    >>> sentinel_ids(32_100, count=3)
    [32099, 32098, 32097]
    """
    if not 0 < count <= vocab_size:
        raise ValueError(f"the number of sentinels must be in 1 .. vocab_size={vocab_size}, got {count}")
    return list(range(vocab_size - 1, vocab_size - 1 - count, -1))


def corrupt_spans(
    tokens: Sequence[Token], spans: Sequence[Span], sentinels: Sequence[Token], *, final_sentinel: bool = True
) -> tuple[list[Token], list[Token]]:
    """Replaces spans of a text by sentinels (figure 2 of the paper).

    Args:
      tokens: the text.
      spans: spans to drop, in order and with at least one token between two spans.
      sentinels: at least as many sentinels as spans, plus one with `final_sentinel`.
      final_sentinel: whether one more sentinel ends the targets, as in the paper. The authors' program omits it,
        because there all texts end with a span.

    Returns:
      Inputs and targets, without EOS.

    Raises:
      ValueError: if spans are empty, out of order, adjacent or outside the text, or there are too few sentinels.

    >>> text = "Thank you for inviting me to your party last week".split()
    >>> inputs, targets = corrupt_spans(text, [(2, 4), (8, 9)], ["<X>", "<Y>", "<Z>"])
    >>> " ".join(inputs)
    'Thank you <X> me to your party <Y> week'
    >>> " ".join(targets)
    '<X> for inviting <Y> last <Z>'
    """
    needed = len(spans) + final_sentinel
    if len(sentinels) < needed:
        raise ValueError(f"{len(spans)} spans need at least {needed} sentinels, got {len(sentinels)}")
    inputs: list[Token] = []
    targets: list[Token] = []
    position = 0
    for number, (begin, end) in enumerate(spans):
        # Every span but the first must leave a token after the previous span, which ended at `position`.
        if not (position + (number > 0) <= begin < end <= len(tokens)):
            raise ValueError(
                f"span {(begin, end)} must not be empty, must be inside the {len(tokens)} tokens, and must leave a "
                "token after the previous span"
            )
        inputs += [*tokens[position:begin], sentinels[number]]
        targets += [sentinels[number], *tokens[begin:end]]
        position = end
    inputs += tokens[position:]
    if final_sentinel:
        targets.append(sentinels[len(spans)])
    return inputs, targets


def random_spans(
    num_tokens: int,
    rng: np.random.Generator,
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
) -> list[Span]:
    """Samples the spans to drop, by the rule of the authors' program.

    The number of dropped tokens is round(noise_density * num_tokens), and the number of spans is round(dropped /
    mean_span_length), each at least 1. Dropped and kept tokens are each split uniformly at random into that number of
    runs. Kept and dropped runs alternate, beginning with a kept run, so the last token is always dropped.

    Args:
      num_tokens: length of the text; below 2, nothing is dropped.
      rng: random number generator.
      noise_density: fraction of the tokens to drop.
      mean_span_length: mean length of the spans in tokens.

    Returns:
      (begin, end) of each span, end exclusive, in order.

    Raises:
      ValueError: if `noise_density` is not in (0, 1), or `mean_span_length` is below 1.
    """
    num_dropped, num_spans = _counts(num_tokens, noise_density, mean_span_length)
    kept_lengths = _segment(num_tokens - num_dropped, num_spans, rng)
    dropped_lengths = _segment(num_dropped, num_spans, rng)
    ends = np.cumsum(kept_lengths + dropped_lengths)  # of the dropped runs
    return list(zip((ends - dropped_lengths).tolist(), ends.tolist(), strict=True))


def span_corruption_lengths(
    num_tokens: int,
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    final_sentinel: bool = True,
    whole_text: bool = False,
) -> tuple[int, int]:
    """Returns (length of the inputs, length of the targets), EOS included, which do not depend on the random spans.

    >>> span_corruption_lengths(568, final_sentinel=False)
    (512, 114)
    >>> span_corruption_lengths(568, whole_text=True)
    (512, 569)
    """
    num_dropped, num_spans = _counts(num_tokens, noise_density, mean_span_length)
    targets_length = num_tokens if whole_text else num_dropped + num_spans + final_sentinel
    return num_tokens - num_dropped + num_spans + 1, targets_length + 1


def num_sentinels(
    num_tokens: int, *, noise_density: float = NOISE_DENSITY, mean_span_length: float = MEAN_SPAN_LENGTH
) -> int:
    """Returns the number of sentinels that a text of `num_tokens` tokens needs, including the final sentinel.

    >>> num_sentinels(568)
    29
    """
    _, num_spans = _counts(num_tokens, noise_density, mean_span_length)
    return num_spans + 1


def longest_text(
    inputs_length: int, *, noise_density: float = NOISE_DENSITY, mean_span_length: float = MEAN_SPAN_LENGTH
) -> int:
    """Returns the largest number of tokens of a text whose corrupted inputs fit into `inputs_length`, EOS included.

    T5 cuts its texts to this length.

    Raises:
      ValueError: if `inputs_length` is below 1, which is EOS alone.

    >>> longest_text(512)
    568
    """

    def length_of(num_tokens: int) -> int:
        noise = Noise(noise_density=noise_density, mean_span_length=mean_span_length)
        return span_corruption_lengths(num_tokens, **noise)[0]

    if inputs_length < length_of(0):
        raise ValueError(f"inputs_length={inputs_length} has no room for the end of sentence: it must be at least 1")
    end = next(size for size in (2**power for power in itertools.count()) if length_of(size) > inputs_length)
    return bisect.bisect_right(range(end), inputs_length, key=length_of) - 1


def corrupt_rows(
    ids: np.ndarray,
    rng: np.random.Generator,
    *,
    sentinels: Sequence[int],
    eos_id: int,
    pad_id: int,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    final_sentinel: bool = True,
    whole_text: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Drops random spans of each text of a batch.

    Args:
      ids: texts, [B, T] int, without EOS; shorter texts are padded at the end.
      rng: random number generator.
      sentinels: ids of `sentinel_ids`; one for each span of T tokens, and one more with `final_sentinel`.
      eos_id: token appended to inputs and targets.
      pad_id: padding of `ids` and of the results.
      noise_density: fraction of the tokens to drop.
      mean_span_length: mean length of the spans in tokens.
      final_sentinel: whether one more sentinel ends the targets.
      whole_text: whether the targets are the texts, instead of the dropped spans.

    Returns:
      Inputs [B, S] and targets [B, T'], int32, where (S, T') are the `span_corruption_lengths` of T tokens. Texts of T
      tokens fill them without padding.
    """
    ids = np.asarray(ids)
    options = {"noise_density": noise_density, "mean_span_length": mean_span_length}
    lengths = span_corruption_lengths(ids.shape[1], **options, final_sentinel=final_sentinel, whole_text=whole_text)
    inputs, targets = (np.full((len(ids), length), pad_id, np.int32) for length in lengths)
    for row, text in enumerate(ids):
        tokens = text[text != pad_id].tolist()
        spans = random_spans(len(tokens), rng, **options)
        source, dropped = corrupt_spans(tokens, spans, sentinels, final_sentinel=final_sentinel)
        for array, sequence in ((inputs, source), (targets, tokens if whole_text else dropped)):
            array[row, : len(sequence) + 1] = [*sequence, eos_id]
    return inputs, targets


class CorruptedTexts:
    """`ExampleSource` of a stream of tokens that is cut into texts with random spans dropped.

    An example is {"source" [S], "target" [T]}, int32, where (S, T) are the `span_corruption_lengths` of `text_length`.
    The first and the last text of the stream may be shorter; they are padded. Every token of the stream is in one text.
    """

    def __init__(
        self,
        stream: np.ndarray,
        text_length: int,
        seed: Sequence[int],
        *,
        start: int = 0,
        sentinels: Sequence[int],
        eos_id: int,
        pad_id: int,
        noise_density: float = NOISE_DENSITY,
        mean_span_length: float = MEAN_SPAN_LENGTH,
        whole_text: bool = False,
    ):
        """Cuts a stream.

        Args:
          stream: tokens without padding, [number of tokens] int.
          text_length: number of tokens of a text, see `longest_text`.
          seed: seed of the spans, combined with the index of a text.
          start: position of the first cut, below `text_length`; the tokens before it are a shorter text.
          sentinels: ids of `sentinel_ids`.
          eos_id: token appended to source and target.
          pad_id: id of padding.
          noise_density: fraction of the tokens to drop.
          mean_span_length: mean length of the spans in tokens.
          whole_text: whether the targets are the texts, instead of the dropped spans.

        Raises:
          UserError: if the stream is shorter than `text_length`.
        """
        if len(stream) < text_length:
            raise UserError(f"the text must have at least {text_length:,} tokens, for one row, got {len(stream):,}")
        self._stream, self._text_length, self._seed = stream, text_length, tuple(seed)
        self._edges = np.unique([0, *range(start, len(stream), text_length), len(stream)])
        self._noise = Noise(noise_density=noise_density, mean_span_length=mean_span_length)
        self._whole_text = whole_text
        self._ids: dict[str, Any] = {"sentinels": sentinels, "eos_id": eos_id, "pad_id": pad_id}

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the sources, all equal, [number of examples] int."""
        source_length, _ = span_corruption_lengths(self._text_length, **self._noise)
        return np.full(len(self), source_length)

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> Example:
        """Returns text `index` with spans dropped: {"source": [S], "target": [T]} int32."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no example {index}: examples are numbered from 0 to {len(self) - 1}")
        text = np.full((1, self._text_length), self._ids["pad_id"], np.int32)
        tokens = self._stream[self._edges[index] : self._edges[index + 1]]
        text[0, : len(tokens)] = tokens
        rng = np.random.default_rng((*self._seed, index))
        sources, targets = corrupt_rows(text, rng, **self._ids, **self._noise, whole_text=self._whole_text)
        return {"source": sources[0], "target": targets[0]}


def _counts(num_tokens: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """Returns (number of dropped tokens, number of spans) for a text of `num_tokens` tokens.

    Raises:
      ValueError: if `noise_density` is not in (0, 1), or `mean_span_length` is below 1.
    """
    if not 0 < noise_density < 1 or mean_span_length < 1:
        raise ValueError(
            f"noise_density={noise_density} must be between 0 and 1, and mean_span_length={mean_span_length} at least 1"
        )
    if num_tokens < 2:
        return 0, 0
    num_dropped = min(max(1, round(num_tokens * noise_density)), num_tokens - 1)
    # No more spans than kept tokens, because a kept token precedes each span.
    num_spans = min(max(1, round(num_dropped / mean_span_length)), num_tokens - num_dropped)
    return num_dropped, num_spans


def _segment(num_items: int, num_segments: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random positive lengths that sum to `num_items`, [num_segments] int.

    All such sequences of lengths are equally probable.
    """
    # There are num_items - 1 places between neighboring items; num_segments - 1 distinct ones of them are cuts.
    cuts = np.sort(rng.permutation(max(0, num_items - 1))[: max(0, num_segments - 1)]) + 1
    edges = np.concatenate([[0], cuts, [num_items]]) if num_segments else np.zeros(1, int)
    return np.diff(edges)
