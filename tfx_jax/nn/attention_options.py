"""The options of the attentions that a configuration names."""

import dataclasses
from collections.abc import Collection
from typing import Any

from tfx_jax.fields import at_least, documented, within


@documented
@dataclasses.dataclass(unsafe_hash=True)  # part of a model's configuration, which is a static part of the model
class AttentionOptions:
    """Options of attention cores; None leaves what the function itself has, and most belong to some cores only."""

    window: int | None = (
        None  # window: tokens seen on each side; routing: tokens of a cluster, about length / num_clusters
    )
    block_size: int | None = None  # local, bigbird, window, favor, linear: tokens that are computed together
    chunk_size: int | None = None  # lsh, chunked: likewise
    num_hashes: int | None = None  # lsh: rounds of hashing
    num_buckets: int | None = None  # lsh: of each round, even; 2 x length / chunk_size fill half a chunk each
    num_global_blocks: int | None = None  # bigbird: that see and are seen by all
    num_window_blocks: int | None = None  # bigbird: around each block
    num_random_blocks: int | None = None  # bigbird: for each block
    num_last_global_blocks: int | None = None  # bigbird: global ones at the end
    first_block_times: int | None = None  # bigbird: how often its keys count, as transformers has it in evaluation
    dense_length: int | None = None  # bigbird: tokens up to which all see all
    num_clusters: int | None = at_least(1, None)  # routing: of each head
    decay: float | None = within(0, 1, None)  # routing: how much of its centroids a step leaves; None: 0.999
    num_features: int | None = at_least(1, None)  # favor: random features; None: four for each number of a head
    num_landmarks: int | None = None  # nystrom: means of segments that stand for all tokens
    num_iterations: int | None = within(0, 100, None)  # nystrom: rounds of the pseudo-inverse
    d_hidden: int | None = at_least(1, None)  # additive: units of the hidden layer; None: the size of a head
    seed: int | None = within(
        0, 2**32 - 1, None
    )  # lsh, favor: of the rotations or features, the same ones at every step; None: 0

    @property
    def given(self) -> dict[str, Any]:
        """The options that are said."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def only(self, names: Collection[str]) -> "AttentionOptions":
        """Leaves out all others."""
        return AttentionOptions(**{name: value for name, value in self.given.items() if name in names})
