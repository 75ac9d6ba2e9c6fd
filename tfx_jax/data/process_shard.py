"""Which examples a process reads, of those that several processes share."""

from typing import NamedTuple


class ProcessShard(NamedTuple):
    """Shard `index` of `count` equal ones. Processes whose devices hold the same examples have the same shard."""

    index: int
    count: int

    def block(self, rows: int) -> slice:
        """Returns which of the rows of a batch belong to this shard: one block, as every other shard has."""
        size = rows // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = ProcessShard(0, 1)
"""All examples: what a process reads that shares them with no other."""
