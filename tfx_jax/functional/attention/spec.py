"""`AttentionSpec`: what the rest of the library knows of an attention, stated beside the function.

Configurations and their help, checks, decoding, meshes, `bench`, `plan`, the contract test and the documentation derive
from it. A new attention is a function, its spec and its oracle.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Int

Visibility = Callable[[Int[Array, "..."], Int[Array, "..."]], Bool[Array, "..."]]
"""From the positions of a query and of a key at or before it to whether the query sees the key.

Visibilities that are equal have equal hashes, since they are static parts of a model that decodes.
"""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option that configurations set: `--config.model.attention.options.<name>`."""

    help: str
    kind: type = int
    required: bool = False
    at_least: float | None = None
    at_most: float | None = None


class CachedDecoding(NamedTuple):
    """Decoding from a cache of keys and values, for attentions that score each pair of query and key by itself."""

    attention_fn: Callable[..., Any] | None = None
    """Attends from one query to the keys that the mask shows; None means the attention itself."""
    is_visible: Visibility | None = None
    """Which keys at or before a query it sees; None means all."""


class RecurrentDecoding(NamedTuple):
    """Decoding from a state of constant size, whatever the number of tokens before.

    Both functions take gates and parameters by name, as the attention itself does.
    """

    read: Callable[..., Any]
    """`read(key, value, mask, **gates)`: from keys [B, S, K, H], values [B, S, K, U] and a padding mask to the state.

    S may be 0. The state is any pytree of arrays with a leading axis B.
    """
    step: Callable[..., tuple[Array, Any]]
    """`step(state, query, key, value, **gates)`: from a token of each row to its output [B, 1, N, U] and the state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention by name: how it is called, what it supports, what it learns and how it decodes.

    Attributes:
      name: its name in configurations.
      function: called as `function(query, key, value, bias, mask, **options)` with the options of
        `dot_product_attention` and its own.
      reference: the paper.
      options: its own options by name.
      example: from a sequence length to reasonable options: what `bench` measures and tests train with.
      causal: whether it has a causal form.
      causal_only: whether it has no other form.
      bias: whether it takes a bias, and a mask, for each pair of query and key; otherwise a mask hides keys only.
      segments: whether `segment_ids` keep packed texts apart.
      cross: whether queries and keys may differ in number.
      grouped_queries: whether there may be fewer heads of keys and values than of queries.
      dropout: whether training may drop weights.
      bfloat16_only: whether it needs half precision.
      platform: the only kind of device that computes it, "tpu" or "gpu"; None means any.
      is_exact: whether it computes the values of `dot_product_attention`.
      gates: called as `gates(num_heads=N, num_kv_heads=K, d_k=H, **options)`, returns a feature shape for each gate.
        `MultiHeadAttention` projects the inputs of the keys to arrays [B, S, *shape], before any nonlinearity, which
        `function` takes as options.
      parameters: from a PRNG key, num_heads, d_k, a dtype and the options to learned arrays by name, which `function`
        takes as options. Weight decay spares those whose names end in "bias" or "scale".
      state: likewise to arrays that no gradient changes.
      update_state: from the state, query, key, mask and options to the state after a training step.
      decoding: from the options bound to `function` to its `CachedDecoding` or `RecurrentDecoding`; None where it reads
        all tokens again for each one.
    """

    name: str
    function: Callable[..., Any]
    reference: str
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    example: Callable[[int], dict[str, Any]] = lambda length: {}
    causal: bool = True
    causal_only: bool = False
    bias: bool = True
    segments: bool = True
    cross: bool = True
    grouped_queries: bool = True
    dropout: bool = True
    bfloat16_only: bool = False
    platform: str | None = None
    is_exact: bool = False
    gates: Callable[..., dict[str, tuple[int, ...]]] | None = None
    parameters: Callable[..., dict[str, Array]] | None = None
    state: Callable[..., dict[str, Array]] | None = None
    update_state: Callable[..., dict[str, Array]] | None = None
    decoding: Callable[..., CachedDecoding | RecurrentDecoding | None] | None = None


def unbound(attention_fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Takes apart what `functools.partial` bound: the function and its options.

    Raises:
      ValueError: if positional arguments are bound.

    >>> unbound(functools.partial(max, key=len))
    (<built-in function max>, {'key': <built-in function len>})
    """
    options: dict[str, Any] = {}
    while isinstance(attention_fn, functools.partial):
        if attention_fn.args:
            raise ValueError("an attention_fn binds options by name only")
        attention_fn, options = attention_fn.func, attention_fn.keywords | options
    return attention_fn, options


@dataclasses.dataclass(frozen=True)
class SeesBack:
    """A query sees the `distance` positions before it."""

    distance: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return query - key <= self.distance


@dataclasses.dataclass(frozen=True)
class SeesBlock:
    """A query sees the block of `size` positions that it is in."""

    size: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return query // self.size == key // self.size
