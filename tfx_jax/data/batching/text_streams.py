"""A text read in parallel streams that continue from batch to batch, for models with a memory of previous segments."""

import grain
import numpy as np

from tfx_jax.data.batching.batches import WHOLE, Batch, PrefetchedIterator, ProcessShard
from tfx_jax.errors import UserError

_PREFETCH = 8  # batches that a thread prepares ahead


class TextStreams:
    """A text split into consecutive parts of equal size, one for each row of a batch.

    In the first epoch row b reads part b, segment by segment, and in the next epoch part b + 1, which continues where
    part b ended. After the last part, a row continues with the beginning of the text. Tokens at the end that do not
    fill one more segment of every part are left out.

    A batch is {"inputs", "targets", "weights"}, each [rows, length]: tokens, next tokens, both int32, and ones,
    float32; and "begins", [rows] bool: True for a row whose first token is the beginning of the text.

    >>> streams = TextStreams(np.arange(9), rows=2, length=2)
    >>> [streams[number]["inputs"].tolist() for number in range(3)]
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[4, 5], [0, 1]]]
    >>> streams[2]["begins"].tolist()
    [False, True]
    """

    def __init__(self, tokens: np.ndarray, rows: int, length: int):
        """Splits a text.

        Args:
          tokens: tokens of the text, [number of tokens] int.
          rows: rows of a batch, over all processes.
          length: tokens of a segment.

        Raises:
          UserError: if the text has fewer than rows * length + 1 tokens.
        """
        self.tokens, self._rows, self._length = np.asarray(tokens, np.int32), rows, length
        self._num_segments = (len(tokens) - 1) // (rows * length)
        if self._num_segments < 1:
            raise UserError(
                f"a text of {len(tokens):,} tokens does not fill {rows} rows of {length:,}: use fewer or shorter rows"
            )

    def __getitem__(self, number: int) -> Batch:
        """Returns the batch with this number, counted over all epochs."""
        epoch, segment = divmod(number, self._num_segments)
        part = (np.arange(self._rows) + epoch) % self._rows  # part that each row reads, [rows]
        # Positions in the text, [rows, length]: beginning of each row's segment plus 0 .. length - 1.
        indices = ((part * self._num_segments + segment) * self._length)[:, None] + np.arange(self._length)
        return {
            "inputs": self.tokens[indices],
            "targets": self.tokens[indices + 1],
            "weights": np.ones(indices.shape, np.float32),
            "begins": (part == 0) & (segment == 0),
        }


class StreamDataset(grain.IterDataset[Batch]):
    """Endless batches of `TextStreams`, with the rows of this process; the iterators' state is a batch number."""

    def __init__(self, streams: TextStreams, shard: ProcessShard = WHOLE):
        super().__init__()
        self.streams, self.shard = streams, shard

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return PrefetchedIterator(_StreamIterator(self), _PREFETCH)


class _StreamIterator(grain.DatasetIterator[Batch]):
    """Iterator whose state is the number of the next batch."""

    def __init__(self, dataset: StreamDataset):
        super().__init__()
        self._dataset, self._number = dataset, 0

    def __next__(self) -> Batch:
        """Returns the rows of this process in the next batch."""
        self._assert_not_closed()
        batch = self._dataset.streams[self._number]
        self._number += 1
        shard_rows = self._dataset.shard.block(len(batch["begins"]))
        return {name: rows[shard_rows] for name, rows in batch.items()}

    def get_state(self) -> dict[str, int]:
        """Returns the number of the next batch and the number of tokens of the text."""
        return {"batch": self._number, "num_tokens": len(self._dataset.streams.tokens)}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues with the batch that followed when `get_state` returned `state`.

        Raises:
          UserError: if the state belongs to a text with another number of tokens.
        """
        if state["num_tokens"] != len(self._dataset.streams.tokens):
            raise UserError(
                f"the checkpoint belongs to a text of {state['num_tokens']:,} tokens, but there are "
                f"{len(self._dataset.streams.tokens):,}: bring the old data back or train in a new working directory"
            )
        self._number = state["batch"]
