"""Attention inside learned clusters (Routing Transformer), and the online k-means that updates the clusters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.lsh import visible_tokens
from tfx_jax.functional.attention.signature import (
    check_integers,
    check_shapes,
    refuse_segment_ids,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.layers import layer_norm


@weights_on_request
@shard_like_query
@zeros_where_empty
def routing_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #T"] | None = None,
    *,
    centroids: Float[Array, "N C H"],
    window: int,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Computes self-attention inside clusters of queries and keys (Routing Transformer): O(T^1.5) for C = sqrt(T).

    Algorithm 1 of "Efficient Content-Based Sparse Attention with Routing Transformers" (Roy et al., 2020,
    https://arxiv.org/abs/2003.05997). Queries and keys are layer-normalized without scale and bias. Each centroid
    selects the `window` queries and the `window` keys that have the largest products with it. Inside a cluster,
    attention is dense, on the *normalized* vectors:

        q = LayerNorm(query), k = LayerNorm(key),  out = softmax(scale * q k^T) value  within each cluster.

    A query in several clusters gets the mean of their outputs, over the clusters in which it sees a key, as in the
    authors' code. A query in no cluster gets zeros. The centroids are state, not parameters: they get no gradient, and
    `update_centroids` moves them.

    **Padding and packing.** Hidden tokens are in no cluster, neither as queries nor as keys, so padding and other
    sequences of a batch do not change the output of a sequence. Packed sequences would compete for the `window` tokens
    of a cluster, so `segment_ids` is rejected.

    **Causality.** With `is_causal` no weight goes to a later token. But *which* tokens a cluster selects depends on the
    whole sequence, so a later token may displace an earlier one and change its output. This leak is part of the
    published method: the output for a prefix differs, and generation differs from training, so models that generate
    reject this attention. `lsh_attention` does not leak. The paper shares queries and keys in decoders: pass the
    queries as `key`, so that every query sees itself.

    Args:
      query: queries, [B, T, N, H].
      key: keys of the same tokens, [B, T, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, T, K, U].
      bias: must be None, because logits are computed for the pairs of one cluster only.
      mask: True for visible tokens, [B or 1, 1, 1, T]. A hidden token gets a zero output.
      centroids: C centroids for every query head, [N, C, H]; start with layer-normalized Gaussian vectors.
      window: number of queries, and of keys, in a cluster; at most T are used. Usual is T / C for the typical length T.
        It must not depend on the padded length, or padding would change the output.
      is_causal: query t sees keys 0 .. t only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: must be None.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights, before dropout, as a dense array with zeros outside the clusters.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      [B, N, T, T], float32 (float64 for float64 inputs) as all logits and statistics are.

    Raises:
      ValueError: if shapes do not match, `mask` is not a padding mask, `bias` or `segment_ids` is given, or `window` is
        below 1.

    >>> @jax.jit
    ... def attend(x, rng):
    ...     centroids = layer_norm(jax.random.normal(rng, (2, 8, 8)))
    ...     return routing_attention(x, x, x, centroids=centroids, window=8)
    >>> attend(jnp.ones((1, 64, 2, 8)), jax.random.key(0)).shape
    (1, 64, 2, 8)
    """
    _check_tokens(query, key, value, mask, centroids)
    refuse_segment_ids(segment_ids, "routing attention")
    check_integers(1, window=window)
    (b, t, n, _), num_clusters = query.shape, centroids.shape[1]
    window = min(window, t)
    visible = visible_tokens(bias, mask, b, t)

    key, value = (jnp.repeat(x, n // x.shape[2], axis=2) for x in (key, value))
    routed_query, routed_key = _normalized(query), _normalized(key)
    # Positions of the queries and of the keys of each cluster, [B, N, C, window].
    query_at, key_at = (_nearest(x, centroids, visible, window) for x in (routed_query, routed_key))
    # [B, N, C, I, J]: which of the J keys of its cluster each of the I queries may see.
    may_see = _gather_rows(visible, query_at)[..., :, None] & _gather_rows(visible, key_at)[..., None, :]
    if is_causal:
        may_see = may_see & (key_at[..., None, :] <= query_at[..., :, None])

    out, weights = dot_product_attention(  # dense attention inside the clusters, which become heads
        _gather_tokens(routed_query.astype(query.dtype), query_at),
        _gather_tokens(routed_key.astype(key.dtype), key_at),
        _gather_tokens(value, key_at),
        mask=may_see.reshape(b, n * num_clusters, window, window),
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=True,
    )
    out = out.swapaxes(1, 2).reshape(*query_at.shape, -1)  # [B, N, C, window, U]
    share = _shares(query_at, may_see.any(axis=-1), t, weights.dtype)  # of each cluster in the mean over clusters
    out = _scatter_add(out.astype(share.dtype), query_at, t) * share[..., None]
    out = out.swapaxes(1, 2).astype(query.dtype)
    if not return_weights:
        return out

    def pairs(weights: Array, query_at: Array, key_at: Array) -> Array:
        """Sums the weights of all clusters, [C, I, J], at the pairs of their tokens, [T, T]."""
        return jnp.zeros((t, t), weights.dtype).at[query_at[..., :, None], key_at[..., None, :]].add(weights)

    dense = _for_each_head(pairs)(weights.reshape(may_see.shape), query_at, key_at)
    return out, dense * share[..., None]


def update_centroids(
    centroids: Float[Array, "N C H"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    mask: Bool[Array, "#B 1 1 #T"] | None = None,
    *,
    decay: float = 0.999,
) -> Float[Array, "N C H"]:
    """Takes one step of online spherical k-means: moves each centroid towards the mean of the tokens nearest to it.

    The last lines of Algorithm 1 of Roy et al. (2020, https://arxiv.org/abs/2003.05997): every layer-normalized query
    and key is assigned to the centroid with the largest product, and

        centroid <- decay * centroid + (1 - decay) * mean of its queries and keys.

    The paper has sums instead of means; this follows the authors' code. A centroid without tokens does not move.

    Args:
      centroids: [N, C, H].
      query: the queries that `routing_attention` got, [B, T, N, H].
      key: its keys, [B, T, K, H].
      mask: True for visible tokens, [B or 1, 1, 1, T]; hidden tokens are ignored.
      decay: share of the old centroid that is kept, in [0, 1]; the paper uses 0.999.

    Returns:
      The new centroids, [N, C, H], in the dtype of the old ones, with no gradient to queries and keys.

    Raises:
      ValueError: if shapes do not match or `decay` is outside [0, 1].

    >>> centroids = jnp.array([[[1.0, -1.0], [-1.0, 1.0]]])
    >>> x = jnp.array([[3.0, 0.0], [7.0, 2.0]])[None, :, None]
    >>> update = jax.jit(lambda centroids, x: update_centroids(centroids, x, x, decay=0.5))
    >>> update(centroids, x).round(3).tolist()  # normalized, both tokens equal the first centroid
    [[[1.0, -1.0], [-1.0, 1.0]]]
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    _check_tokens(query, key, key, mask, centroids)
    b, t, n, _ = query.shape
    visible = jnp.tile(visible_tokens(None, mask, b, t), (1, 2))  # [B, 2T]: queries, then keys
    tokens = jnp.concatenate([_normalized(query), _normalized(jnp.repeat(key, n // key.shape[2], axis=2))], axis=1)
    tokens = jax.lax.stop_gradient(tokens)
    old = centroids.astype(tokens.dtype)
    nearest = jnp.einsum("BTNH,NCH->BNTC", tokens, old).argmax(axis=-1)
    member = jax.nn.one_hot(nearest, old.shape[1], dtype=tokens.dtype) * visible[:, None, :, None].astype(tokens.dtype)
    size = member.sum(axis=(0, 2))[..., None]
    mean = jnp.einsum("BNTC,BTNH->NCH", member, tokens) / jnp.maximum(size, 1)
    return jnp.where(size > 0, decay * old + (1 - decay) * mean, old).astype(centroids.dtype)


def _check_tokens(query: Array, key: Array, value: Array, mask: Array | None, centroids: Array) -> None:
    """Raises ValueError if shapes do not match, or there are not as many keys as queries."""
    check_shapes(query, key, value, None, mask)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            "routing attention is self-attention and needs as many keys as queries, got "
            f"{query.shape[1]} queries and {key.shape[1]} keys"
        )
    if centroids.ndim != 3 or (centroids.shape[0], centroids.shape[2]) != query.shape[2:]:
        raise ValueError(f"centroids must have shape [N, C, H] with N, H = {query.shape[2:]}, got {centroids.shape}")


def _normalized(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Layer-normalizes queries or keys, in float32 at least."""
    return layer_norm(x.astype(statistics_dtype(x)))


def _nearest(
    x: Float[Array, "B T N H"], centroids: Float[Array, "N C H"], visible: Bool[Array, "B T"], window: int
) -> Int[Array, "B N C I"]:
    """Returns the sorted positions of the `window` tokens nearest to each centroid; visible tokens are preferred."""
    products = jnp.einsum("BTNH,NCH->BNCT", jax.lax.stop_gradient(x), jax.lax.stop_gradient(centroids).astype(x.dtype))
    # On several CPU devices, each gathers the products of all: XLA cannot divide the CPU's TopK. A sort would take
    # more than ten times as long. TPUs gather nothing.
    _, positions = jax.lax.top_k(jnp.where(visible[:, None, None], products, -jnp.inf), window)
    return jnp.sort(positions, axis=-1)


def _gather_rows(x: Array, positions: Int[Array, "B N C I"]) -> Array:
    """Gathers x [B, T] at the positions, [B, N, C, I]."""
    return jnp.take_along_axis(x[:, None, None], positions, axis=-1)


def _gather_tokens(x: Float[Array, "B T N H"], positions: Int[Array, "B N C I"]) -> Float[Array, "B I N*C H"]:
    """Gathers the tokens at the positions; each cluster of a head becomes a head."""
    b, n, c, i = positions.shape
    tokens = jnp.take_along_axis(x.swapaxes(1, 2), positions.reshape(b, n, c * i, 1), axis=2)
    return tokens.reshape(b, n * c, i, -1).swapaxes(1, 2)


def _for_each_head(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Maps a function over the axes B and N of its arguments.

    A scatter with indices of rows and heads does the same, but compilers would sum its results over all devices.
    """
    return jax.vmap(jax.vmap(fn))


def _scatter_add(
    x: Float[Array, "B N C I U"], positions: Int[Array, "B N C I"], length: int
) -> Float[Array, "B N T U"]:
    """Sums the results of all clusters at the positions of their tokens."""

    def add(x: Array, positions: Array) -> Array:
        """Sums [C, I, U] at the positions, [C, I], of one head."""
        return jnp.zeros((length, x.shape[-1]), x.dtype).at[positions].add(x)

    return _for_each_head(add)(x, positions)


def _shares(
    positions: Int[Array, "B N C I"], sees: Bool[Array, "B N C I"], length: int, dtype: DTypeLike
) -> Float[Array, "B N T"]:
    """Returns 1 / the number of clusters in which a token sees a key; 1 if there is none."""
    num_clusters = _scatter_add(sees[..., None].astype(dtype), positions, length)[..., 0]
    return 1 / jnp.maximum(num_clusters, 1)


def _route(
    *arguments: Any, window: int = 1, num_clusters: int | None = None, decay: float | None = None, **options: Any
) -> Any:
    """Calls `routing_attention`; ignores the options of the state and of `update_centroids`."""
    del num_clusters, decay
    return routing_attention(*arguments, window=window, **options)


def _init_state(rng: Array, *, num_heads: int, d_k: int, num_clusters: int = 1, **_: Any) -> dict[str, Array]:
    """Initializes the centroids, [N, C, H], float32 whatever the dtype of the parameters."""
    return {"centroids": layer_norm(jax.random.normal(rng, (num_heads, num_clusters, d_k)))}


def _update_state(
    state: dict[str, Array], query: Array, key: Array, mask: Array | None, *, decay: float = 0.999, **_: Any
) -> dict[str, Array]:
    """Moves the centroids by `update_centroids`, as the spec's `update_state`."""
    return {"centroids": update_centroids(state["centroids"], query, key, mask, decay=decay)}


# Tokens compete for places in a cluster, so later tokens change earlier outputs (hence causal=False), and packed
# sequences change each other (segments=False).
ROUTING = AttentionSpec(
    name="routing",
    function=_route,
    reference="Routing Transformer: Roy et al. (2020), algorithm 1",
    options={
        "num_clusters": Option("clusters per head", required=True, at_least=1),
        "window": Option("tokens in a cluster, usually about length / num_clusters", required=True),
        "decay": Option(
            "share of a centroid that a training step keeps; None means 0.999", kind=float, at_least=0, at_most=1
        ),
    },
    example=lambda length: {"num_clusters": math.isqrt(length), "window": -(-length // math.isqrt(length))},
    causal=False,
    bias=False,
    segments=False,
    cross=False,
    state=_init_state,
    update_state=_update_state,
)
