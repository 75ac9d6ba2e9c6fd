"""How attention cores decode: one query at a time, from cached keys and values."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Int

from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.hard import hard_attention
from tfx_jax.functional.attention.local import local_attention, sliding_window_attention
from tfx_jax.nn.cores import AttentionFn


class StepAttention(NamedTuple):
    """How one query attends to a cache of keys and values."""

    attention_fn: AttentionFn
    """Attends as the core does, given which keys it may see: for cores that score each pair by itself."""
    sees: Callable[[Int[Array, "..."], Int[Array, "..."]], Bool[Array, "..."]] | None = None
    """Which of the keys at or before a query the core lets it see, from both positions; None means all.

    Equal ones are hashed alike, since they become static parts of a model that decodes.
    """


@dataclasses.dataclass(frozen=True)
class _SeesBack:
    """Sees the `distance` positions before a query."""

    distance: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return query - key <= self.distance


@dataclasses.dataclass(frozen=True)
class _SeesBlock:
    """Sees the block of `size` positions that a query is in."""

    size: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return query // self.size == key // self.size


def step_attention(core: AttentionFn) -> StepAttention | None:
    """Finds how a core decodes one token at a time from cached keys and values.

    Returns:
      None for a core that looks at more than a pair of query and key, or of which nothing is known: such a model has to
      read everything again for each token.
    """
    function, options = core, {}
    while isinstance(function, functools.partial):
        if function.args:
            return None
        function, options = function.func, function.keywords | options
    scale = {"scale": options["scale"]} if "scale" in options else {}
    dense = functools.partial(dot_product_attention, **scale) if scale else dot_product_attention
    if getattr(function, "scores_pairs", False):
        return StepAttention(core)
    if function in (dot_product_attention, chunked_attention):
        return StepAttention(dense)
    if function is hard_attention and not options.keys() - {"scale"}:
        return StepAttention(core)
    if function is sliding_window_attention:
        window = options["window"]
        return StepAttention(dense, _SeesBack(window[0] if isinstance(window, tuple) else window))
    if function is local_attention:
        return StepAttention(dense, _SeesBlock(options["block_size"]))
    return None
