"""`AttentionSpec`: the description of an attention that the rest of the library uses, defined next to the function.

Configurations and their help, checks, decoding, meshes, `bench`, `plan`, the contract test and the documentation are
derived from it. A new attention consists of a function, its spec and its oracle in the tests.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Int

Visibility = Callable[[Int[Array, "..."], Int[Array, "..."]], Bool[Array, "..."]]
"""`is_visible(query_position, key_position)` returns whether the query sees the key, which is at or before the query.

It must be hashable, with equal hashes for equal functions, because it is a static part of a decoding model.
"""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option that configurations set: `--config.model.attention.options.<name>`."""

    help: str
    kind: type = int
    required: bool = False
    at_least: float | None = None
    at_most: float | None = None
    is_passed: bool = True
    """Whether the attention function takes it; otherwise it only sizes learned arrays or gates."""


class CachedDecoding(NamedTuple):
    """Decoding from a cache of keys and values, for attentions whose score of a pair depends on this pair only."""

    attention_fn: Callable[..., Any] | None = None
    """Attends from one query to the keys that a mask shows; None means the attention itself."""
    is_visible: Visibility | None = None
    """Which keys at or before a query the query sees; None means all."""


class RecurrentDecoding(NamedTuple):
    """Decoding from a state whose size does not depend on the number of tokens.

    Both functions take gates and parameters by name, as the attention does.
    """

    read: Callable[..., Any]
    """`read(key, value, mask, **gates)` returns the state after keys [B, S, K, H] and values [B, S, K, U].

    `mask` is a padding mask or None; S may be 0. The state is any pytree of arrays with a leading axis B.
    """
    step: Callable[..., tuple[Array, Any]]
    """`step(state, query, key, value, **gates)` processes one token per row.

    Returns the output, [B, 1, N, U], and the new state.
    """


class HeadSizes(NamedTuple):
    """Numbers of features that a head has in keys, values and outputs."""

    key: int
    value: int
    output: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Description of one attention: name, function, supported features, learned arrays and decoding.

    Attributes:
      name: name in configurations.
      function: called as `function(query, key, value, bias, mask, **options)` with the options of
        `dot_product_attention` and those of `options`.
      reference: the paper.
      options: the attention's additional options by name.
      example: function of a sequence length that returns reasonable options, for `bench` and for tests.
      causal: whether it has a causal form.
      causal_only: whether it has only a causal form.
      bias: whether it supports a bias and a mask for each pair of query and key; otherwise a mask hides keys only.
      segments: whether it supports `segment_ids`.
      cross: whether the numbers of queries and keys may differ.
      grouped_queries: whether there may be fewer key and value heads than query heads.
      dropout: whether it supports dropout of weights.
      bfloat16_only: whether it needs half precision.
      platform: the only kind of device that supports it, "tpu" or "gpu"; None means any.
      is_exact: whether it computes the same values as `dot_product_attention`.
      head_sizes: called as `head_sizes(d_k=H, **options)`; returns the sizes of a key, a value and an output, for an
        attention whose keys differ from its queries of size H, or outputs from values. None means that they do not.
      gates: called as `gates(num_heads=N, num_kv_heads=K, d_k=H, **options)`; returns a feature shape for each gate.
        `MultiHeadAttention` projects the inputs of the keys to arrays [B, S, *shape], without a nonlinearity, and
        passes them to `function` as options.
      parameters: called as `parameters(rng, num_heads=N, num_kv_heads=K, d_k=H, dtype=dtype, **options)`; returns
        learned arrays by name, which are passed to `function` as options. Names that end in "bias" or "scale" are
        exempt from weight decay. It names the arguments that it needs and ends in `**_`.
      state: like `parameters`, for arrays that are not trained by gradients.
      update_state: called as `update_state(state, query, key, mask, **options)` in training; returns the new state.
      decoding: called with the options bound to `function`; returns `CachedDecoding` or `RecurrentDecoding`. None, as
        attribute or result, means that decoding has to process all tokens again for each new token.
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
    head_sizes: Callable[..., HeadSizes] | None = None
    gates: Callable[..., dict[str, tuple[int, ...]]] | None = None
    parameters: Callable[..., dict[str, Array]] | None = None
    state: Callable[..., dict[str, Array]] | None = None
    update_state: Callable[..., dict[str, Array]] | None = None
    decoding: Callable[..., CachedDecoding | RecurrentDecoding | None] | None = None

    def passed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that `function` takes: all but those that only size learned arrays or gates."""
        not_passed = {name for name, option in self.options.items() if not option.is_passed}
        return {name: option for name, option in options.items() if name not in not_passed}


def unbound(attention_fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function inside a `functools.partial` (or nested ones) and the bound options.

    Raises:
      ValueError: if positional arguments are bound.

    >>> unbound(functools.partial(max, key=len))
    (<built-in function max>, {'key': <built-in function len>})
    """
    options: dict[str, Any] = {}
    while isinstance(attention_fn, functools.partial):
        if attention_fn.args:
            raise ValueError(
                "a functools.partial used as attention_fn must bind keyword arguments only, got positional arguments"
            )
        attention_fn, options = attention_fn.func, attention_fn.keywords | options
    return attention_fn, options


@dataclasses.dataclass(frozen=True)
class SeesBack:
    """A query sees itself and the `distance` positions before it."""

    distance: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return query - key <= self.distance


@dataclasses.dataclass(frozen=True)
class SeesBlock:
    """A query sees the block of `size` positions that it is in."""

    size: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return query // self.size == key // self.size
