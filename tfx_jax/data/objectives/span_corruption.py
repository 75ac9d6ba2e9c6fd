"""Span corruption, T5's pretraining objective (Raffel et al., 2020, https://arxiv.org/abs/1910.10683, section 3.1.4).

Spans of tokens are dropped from a text. In the inputs, one sentinel stands for each; the targets are the dropped
spans, each behind its sentinel.
"""

import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.errors import UserError

Token = TypeVar("Token")  # ids, or words for an example to look at
Span = tuple[int, int]  # from, up to but not including

NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3.0  # the paper's choice, section 3.3.4
NUM_SENTINELS = 100  # of T5's tokenizers


def sentinel_ids(vocab_size: int, count: int = NUM_SENTINELS) -> list[int]:
    """T5's sentinels, the last ids of the vocabulary counted down.

    >>> sentinel_ids(32_100, count=3)
    [32099, 32098, 32097]
    """
    if not 0 < count <= vocab_size:
        raise ValueError(f"{count} sentinels of {vocab_size} ids")
    return list(range(vocab_size - 1, vocab_size - 1 - count, -1))


def corrupt_spans(
    tokens: Sequence[Token], spans: Sequence[Span], sentinels: Sequence[Token], *, final_sentinel: bool = True
) -> tuple[list[Token], list[Token]]:
    """Takes given spans out of a text (figure 2 of the paper).

    Args:
      tokens: the text.
      spans: (begin, end) of what to drop, end exclusive, from left to right, with a token at least between two: a run
        of dropped tokens has one sentinel.
      sentinels: as many as there are spans, one more with a final one, or more.
      final_sentinel: whether the next sentinel closes the targets, as the paper has it. The authors' program writes
        none, as there all texts end in a span.

    Returns:
      Inputs and targets, without an end of sentence.

    Raises:
      ValueError: if the spans are not in order and apart, or the sentinels too few.

    >>> text = "Thank you for inviting me to your party last week".split()
    >>> inputs, targets = corrupt_spans(text, [(2, 4), (8, 9)], ["<X>", "<Y>", "<Z>"])
    >>> " ".join(inputs)
    'Thank you <X> me to your party <Y> week'
    >>> " ".join(targets)
    '<X> for inviting <Y> last <Z>'
    """
    needed = len(spans) + final_sentinel
    if len(sentinels) < needed:
        raise ValueError(f"{len(spans)} spans need {needed} sentinels, not {len(sentinels)}")
    inputs: list[Token] = []
    targets: list[Token] = []
    position = 0
    for number, (begin, end) in enumerate(spans):
        if not (position + (number > 0) <= begin < end <= len(tokens)):
            raise ValueError(f"span {(begin, end)} is empty, outside the {len(tokens)} tokens or not behind the others")
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
    """Draws the spans to drop, by the rule of the authors' program.

    The number of dropped tokens is round(noise_density * num_tokens), and that of spans round(dropped /
    mean_span_length), at least one of each. Both the dropped and the kept tokens are cut into so many runs, every way
    as likely, which take turns; a kept run comes first, so the last token is always dropped.

    Args:
      num_tokens: length of the text; of one or no token, nothing is dropped.
      rng: drawn from.
      noise_density: share of the tokens to drop.
      mean_span_length: of the spans, in tokens.

    Returns:
      (begin, end) of each span, end exclusive, in order.

    Raises:
      ValueError: if the density is not between 0 and 1, or the mean length below 1.
    """
    num_dropped, num_spans = _counts(num_tokens, noise_density, mean_span_length)
    kept = _segment(num_tokens - num_dropped, num_spans, rng)
    dropped = _segment(num_dropped, num_spans, rng)
    ends = np.cumsum(kept + dropped)
    return list(zip((ends - dropped).tolist(), ends.tolist(), strict=True))


def span_corruption_lengths(
    num_tokens: int,
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    final_sentinel: bool = True,
) -> tuple[int, int]:
    """The lengths of inputs and targets, ends of sentence included: those of a text do not depend on chance.

    >>> span_corruption_lengths(568, final_sentinel=False)
    (512, 114)
    """
    num_dropped, num_spans = _counts(num_tokens, noise_density, mean_span_length)
    return num_tokens - num_dropped + num_spans + 1, num_dropped + num_spans + final_sentinel + 1


def num_sentinels(
    num_tokens: int, *, noise_density: float = NOISE_DENSITY, mean_span_length: float = MEAN_SPAN_LENGTH
) -> int:
    """How many sentinels a text of so many tokens needs, with a final one.

    >>> num_sentinels(568)
    29
    """
    return _counts(num_tokens, noise_density, mean_span_length)[1] + 1


def longest_text(
    inputs_length: int, *, noise_density: float = NOISE_DENSITY, mean_span_length: float = MEAN_SPAN_LENGTH
) -> int:
    """How many tokens of text fill inputs of this length, end of sentence included: what T5 cuts its texts into.

    Raises:
      ValueError: if the inputs have no room for the end of sentence.

    >>> longest_text(512)
    568
    """

    def fits(num_tokens: int) -> bool:
        length, _ = span_corruption_lengths(num_tokens, noise_density=noise_density, mean_span_length=mean_span_length)
        return length <= inputs_length

    if not fits(0):
        raise ValueError(f"inputs_length={inputs_length} has no room for the end of sentence")
    return next(num_tokens for num_tokens in itertools.count() if not fits(num_tokens + 1))


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
) -> tuple[np.ndarray, np.ndarray]:
    """Drops random spans of each row of a batch.

    Args:
      ids: texts, [B, T] int, without an end of sentence; shorter ones have padding behind them.
      rng: drawn from; the same state gives the same spans.
      sentinels: see `sentinel_ids`; one for each span of T tokens, and one more with a final one.
      eos_id: ends inputs and targets.
      pad_id: of padding, in and out.
      noise_density: see `random_spans`.
      mean_span_length: see `random_spans`.
      final_sentinel: see `corrupt_spans`.

    Returns:
      Inputs [B, S] and targets [B, T'], int32, where (S, T') are the `span_corruption_lengths` of T tokens: rows
      without padding fill them.
    """
    ids = np.asarray(ids)
    options = {"noise_density": noise_density, "mean_span_length": mean_span_length}
    widths = span_corruption_lengths(ids.shape[1], **options, final_sentinel=final_sentinel)
    inputs, targets = (np.full((len(ids), width), pad_id, np.int32) for width in widths)
    for row, text in enumerate(ids):
        tokens = text[text != pad_id].tolist()
        spans = random_spans(len(tokens), rng, **options)
        sides = corrupt_spans(tokens, spans, sentinels, final_sentinel=final_sentinel)
        for side, found in zip((inputs, targets), sides, strict=True):
            side[row, : len(found) + 1] = [*found, eos_id]
    return inputs, targets


class CorruptedTexts:
    """An `ExampleSource`: a stream of tokens cut into texts, of each of which spans are dropped.

    An example is {"source" [S], "target" [T]}, int32, where (S, T) are the `span_corruption_lengths` of `text_length`;
    texts at the ends of the stream may be shorter, with padding behind them. Every token of the stream is in one.
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
    ):
        """Cuts a stream.

        Args:
          stream: tokens without padding, [number of tokens] int.
          text_length: how many of them make a text, see `longest_text`.
          seed: decides the spans, together with the place of a text.
          start: where the stream is cut first, below `text_length`: what stands before it is a text of its own.
          sentinels: see `corrupt_rows`.
          eos_id: see `corrupt_rows`.
          pad_id: see `corrupt_rows`.

        Raises:
          UserError: if the stream is shorter than a text.
        """
        if len(stream) < text_length:
            raise UserError(f"a text of {len(stream):,} tokens is less than the {text_length:,} of one row")
        self._stream, self._text_length, self._seed = stream, text_length, tuple(seed)
        self._edges = np.unique([0, *range(start, len(stream), text_length), len(stream)])
        self._ids = {"sentinels": sentinels, "eos_id": eos_id, "pad_id": pad_id}

    @property
    def lengths(self) -> np.ndarray:
        """All sources are equally wide, [number of examples] int."""
        return np.full(len(self), span_corruption_lengths(self._text_length)[0])

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        text = np.full((1, self._text_length), self._ids["pad_id"], np.int32)
        found = self._stream[self._edges[index] : self._edges[index + 1]]
        text[0, : len(found)] = found
        rng = np.random.default_rng((*self._seed, index))
        sources, targets = corrupt_rows(text, rng, **self._ids)
        return {"source": sources[0], "target": targets[0]}


def _counts(num_tokens: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """How many tokens are dropped and in how many spans."""
    if not 0 < noise_density < 1 or mean_span_length < 1:
        raise ValueError(
            f"noise_density={noise_density} must be between 0 and 1, and mean_span_length={mean_span_length} at least 1"
        )
    if num_tokens < 2:
        return 0, 0
    num_dropped = min(max(1, round(num_tokens * noise_density)), num_tokens - 1)
    num_spans = min(max(1, round(num_dropped / mean_span_length)), num_tokens - num_dropped)
    return num_dropped, num_spans


def _segment(num_items: int, num_segments: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of non-empty runs that add up to `num_items`, every way as likely, [num_segments] int."""
    cuts = np.sort(rng.permutation(max(0, num_items - 1))[: max(0, num_segments - 1)]) + 1
    edges = np.concatenate([[0], cuts, [num_items]]) if num_segments else np.zeros(1, int)
    return np.diff(edges)
