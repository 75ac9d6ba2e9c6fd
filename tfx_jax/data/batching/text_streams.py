"""A text read in parallel streams that go on from batch to batch, for models with a memory."""

import grain
import numpy as np

from tfx_jax.data.batching.batches import WHOLE, Batch, PrefetchedIterator, ProcessShard
from tfx_jax.errors import UserError

_PREFETCH = 8  # batches that a thread prepares ahead


class TextStreams:
    """A text cut into as many equal parts as a batch has rows, one behind the other.

    Row b reads part b, and in the next epoch part b + 1, which goes on where part b ended: only behind the last part a
    row comes to the begin of the text. What does not fill a segment of every part is left out, at the end.

    A batch is {"inputs", "targets", "weights"}, each [rows, length]: tokens and those that follow them, int32, and 1,
    float32; and "begins" [rows] bool: whether a row begins the text, so that nothing is before its first token.

    >>> streams = TextStreams(np.arange(9), rows=2, length=2)
    >>> [streams[number]["inputs"].tolist() for number in range(3)]
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[4, 5], [0, 1]]]
    >>> streams[2]["begins"].tolist()
    [False, True]
    """

    def __init__(self, tokens: np.ndarray, rows: int, length: int):
        """Cuts a text up.

        Args:
          tokens: [number of tokens] int.
          rows: of a batch, over all processes.
          length: of a segment.

        Raises:
          UserError: if there is not one segment for each row.
        """
        self.tokens, self._rows, self._length = np.asarray(tokens, np.int32), rows, length
        self._num_segments = (len(tokens) - 1) // (rows * length)
        if self._num_segments < 1:
            raise UserError(
                f"a text of {len(tokens):,} tokens does not fill {rows} rows of {length:,}: take fewer or shorter rows"
            )

    def __getitem__(self, number: int) -> Batch:
        """The batch with this number, of all epochs."""
        epoch, segment = divmod(number, self._num_segments)
        part = (np.arange(self._rows) + epoch) % self._rows
        places = ((part * self._num_segments + segment) * self._length)[:, None] + np.arange(self._length)
        return {
            "inputs": self.tokens[places],
            "targets": self.tokens[places + 1],
            "weights": np.ones(places.shape, np.float32),
            "begins": (part == 0) & (segment == 0),
        }


class StreamDataset(grain.IterDataset[Batch]):
    """The batches of `TextStreams` without end, of each the rows that belong to this process."""

    def __init__(self, streams: TextStreams, shard: ProcessShard = WHOLE):
        """Reads nothing yet; the state of its iterators is the number of the next batch."""
        super().__init__()
        self.streams, self.shard = streams, shard

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return PrefetchedIterator(_StreamIterator(self), _PREFETCH)


class _StreamIterator(grain.DatasetIterator[Batch]):
    def __init__(self, dataset: StreamDataset):
        super().__init__()
        self._dataset, self._number = dataset, 0

    def __next__(self) -> Batch:
        self._assert_not_closed()
        batch = self._dataset.streams[self._number]
        self._number += 1
        mine = self._dataset.shard.block(len(batch["begins"]))
        return {name: rows[mine] for name, rows in batch.items()}

    def get_state(self) -> dict[str, int]:
        """The number of the next batch, and how long the text is."""
        return {"batch": self._number, "num_tokens": len(self._dataset.streams.tokens)}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues with the batch that would have come next when `get_state` gave `state`."""
        if state["num_tokens"] != len(self._dataset.streams.tokens):
            raise UserError(
                f"the checkpoint belongs to a text of {state['num_tokens']:,} tokens, but there are "
                f"{len(self._dataset.streams.tokens):,}: bring the old data back or train in a new working directory"
            )
        self._number = state["batch"]
