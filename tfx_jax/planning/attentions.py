"""Every attention with the options it is measured with: the published ones where there are any."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfx_jax import functional


class Measured(NamedTuple):
    """An attention that can be measured."""

    make: Callable[[int, int, int], Callable[..., Any]]
    """`make(length, num_heads, head_size)` binds the function's own options and parameters."""
    is_exact: bool = False
    """Whether its values are those of `dot_product_attention`, and so its model FLOPs."""


def _plain(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *_: functools.partial(function, **options)


def _implementation(name: str) -> Measured:
    return Measured(_plain(functional.dot_product_attention, implementation=name), is_exact=True)


def _lsh(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    num_buckets = functional.lsh_num_buckets(length, chunk_size=64)
    return functools.partial(functional.lsh_attention, rng=jax.random.key(0), num_buckets=num_buckets)


def _routing(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    num_clusters = math.isqrt(length)
    centroids = functional.layer_norm(jax.random.normal(jax.random.key(0), (num_heads, num_clusters, head_size)))
    return functools.partial(functional.routing_attention, centroids=centroids, window=-(-length // num_clusters))


def _favor(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    num_features = 4 * head_size  # about H log H, as the paper advises
    projection = functional.orthogonal_features(jax.random.key(0), num_features, head_size)
    return functools.partial(functional.favor_attention, projection=projection)


def _relative(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    biases = {name: jnp.zeros((num_heads, head_size)) for name in ("content_bias", "position_bias")}
    relative_key = jax.random.normal(jax.random.key(0), (2 * length - 1, num_heads, head_size))
    return functools.partial(functional.relative_attention, relative_key=relative_key, **biases)


def _square(head_size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (head_size, head_size)) / head_size


def _general(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    return functools.partial(functional.general_attention, w=_square(head_size))


def _additive(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    w, v = _square(head_size), jnp.ones(head_size)
    return functools.partial(functional.additive_attention, w_query=w, w_key=w, v=v)


def _aligned(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    position = jnp.arange(length, dtype=jnp.float32)[None, None]
    return functools.partial(functional.aligned_attention, position=position, window=10, sigma=5.0)


_BIGBIRD = {"block_size": 64, "num_global_blocks": 2, "num_window_blocks": 3, "num_random_blocks": 3}

# Ring attention is not here: what it takes depends on the devices that share the sequence.
ATTENTIONS = {
    "dense": Measured(_plain(functional.dot_product_attention), is_exact=True),
    "xla": _implementation("xla"),
    "chunked": _implementation("chunked"),
    "cudnn": _implementation("cudnn"),
    "splash": _implementation("splash"),
    "flash": _implementation("flash"),
    "local": Measured(_plain(functional.local_attention, block_size=128)),
    "window": Measured(_plain(functional.sliding_window_attention, window=128)),
    "bigbird": Measured(_plain(functional.bigbird_attention, **_BIGBIRD)),
    "lsh": Measured(_lsh),
    "routing": Measured(_routing),
    "favor": Measured(_favor),
    "linear": Measured(_plain(functional.linear_attention)),
    "nystrom": Measured(_plain(functional.nystrom_attention)),
    "relative": Measured(_relative),
    "general": Measured(_general),
    "additive": Measured(_additive),
    "aligned": Measured(_aligned),
    "hard": Measured(_plain(functional.hard_attention)),
}
