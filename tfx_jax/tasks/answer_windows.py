"""Windows of a long context, in which the answer to a question is looked for (Devlin et al., 2019, section 4.2).

Windows overlap. The answer is the span whose first and last token score highest together, in whatever window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from tfx_jax.data.next_sentence import NUM_PAIR_SPECIALS, pair_inputs

NO_ANSWER = 0  # the position of [CLS], the target of a window without the answer


class Windows(NamedTuple):
    """A question with W stretches of its context, each laid out as [CLS] question [SEP] context [SEP].

    Attributes:
      ids: tokens, [W, L] int32.
      token_types: 0 for the question, 1 for the context and 0 for padding, [W, L] int32.
      context_mask: where tokens of the context stand, [W, L] bool.
      starts: which token of the context is the first of each window, [W] int32.
      offset: at which position of a window its first token of the context stands.
    """

    ids: np.ndarray
    token_types: np.ndarray
    context_mask: np.ndarray
    starts: np.ndarray
    offset: int


class Spans(NamedTuple):
    """The best span of each row.

    Attributes:
      first: position of its first token, [B] int32.
      last: position of its last token, not before `first`, [B] int32.
      score: sum of both logits, [B] float32; -inf if the row has no context, and `first` and `last` mean nothing then.
    """

    first: Int[Array, "B"]
    last: Int[Array, "B"]
    score: Float[Array, "B"]


def context_windows(
    question: Sequence[int],
    context: Sequence[int],
    *,
    max_length: int,
    stride: int,
    cls_id: int,
    sep_id: int,
    pad_id: int,
    max_question_length: int = 64,
) -> Windows:
    """Lays a question out with as many windows of its context as it takes to show every token.

    Args:
      question: tokens; those beyond `max_question_length` are cut off.
      context: tokens.
      max_length: L, of a window; BERT takes 384.
      stride: how many tokens of the context a window begins after the one before; BERT takes 128. If fewer fit into a
        window, it is as many as fit.
      cls_id: of [CLS].
      sep_id: of [SEP].
      pad_id: of padding.
      max_question_length: in tokens.

    Raises:
      ValueError: if no token of the context fits beside the question, or the stride is not positive.
    """
    question = question[:max_question_length]
    room = max_length - len(question) - NUM_PAIR_SPECIALS
    if room < 1 or stride < 1:
        raise ValueError(f"max_length={max_length} leaves {room} tokens for the context, with a stride of {stride}")
    step = min(stride, room)
    starts = range(0, max(1, len(context) - room + step), step)
    rows = [
        pair_inputs(
            question, context[start : start + room], max_length=max_length, cls_id=cls_id, sep_id=sep_id, pad_id=pad_id
        )
        for start in starts
    ]
    ids, token_types = (np.stack(side) for side in zip(*rows, strict=True))
    offset = len(question) + 2
    shown = np.array([[min(len(context) - start, room)] for start in starts])
    positions = np.arange(max_length) - offset
    context_mask = (positions >= 0) & (positions < shown)
    return Windows(ids, token_types, context_mask, np.array(starts, np.int32), offset)


def answer_positions(windows: Windows, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Where an answer stands in each window.

    Args:
      windows: of its context.
      first: token of the context with which the answer begins.
      last: token with which it ends.

    Returns:
      Positions of both tokens, each [W] int32; NO_ANSWER for both where the window does not show the whole answer.
    """
    shown = windows.context_mask.sum(axis=1)
    inside = (first >= windows.starts) & (last < windows.starts + shown)
    begin, end = (np.where(inside, token - windows.starts + windows.offset, NO_ANSWER) for token in (first, last))
    return begin.astype(np.int32), end.astype(np.int32)


def best_answer(windows: Windows, spans: Spans) -> tuple[int, int] | None:
    """The highest scoring span of all windows of a question, in tokens of its context.

    Args:
      windows: W of them.
      spans: the best span of each, from `best_spans`.

    Returns:
      Its first and its last token, or None if no window shows any token of the context.
    """
    scores = np.asarray(spans.score)
    window = int(scores.argmax())
    if scores[window] == -np.inf:
        return None
    shift = int(windows.starts[window]) - windows.offset
    return int(spans.first[window]) + shift, int(spans.last[window]) + shift


def token_span(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """The tokens that cover some characters.

    Args:
      offsets: the first character of each token and the one behind its last, [T, 2] int, in order.
      begin: first of the characters.
      end: the one behind the last.

    Returns:
      The first and the last token that share a character with them.

    Raises:
      ValueError: if none does.

    >>> token_span(np.array([[0, 3], [3, 8], [9, 12]]), 4, 10)
    (1, 2)
    """
    shared = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
    if not shared.size:
        raise ValueError(f"no token covers characters {begin} to {end}")
    return int(shared[0]), int(shared[-1])


def text_of_span(context: str, offsets: np.ndarray, first: int, last: int) -> str:
    """The characters that some tokens cover, without white space at the ends; `offsets` as for `token_span`.

    >>> text_of_span("ein rotes Haus", np.array([[0, 3], [3, 9], [9, 14]]), 1, 2)
    'rotes Haus'
    """
    return context[offsets[first, 0] : offsets[last, 1]].strip()
