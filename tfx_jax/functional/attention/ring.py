"""Ring attention: exact dense attention over a sequence that is sharded over devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.attention.chunked import (
    Extras,
    Keys,
    Options,
    Queries,
    Residuals,
    add_gradients,
    as_cotangents,
    attend,
    before_any_key,
    finish,
    join_queries,
    no_gradients,
    sink_gradients,
    split_inputs,
    vary_alike,
)
from tfx_jax.functional.attention.dense import check_sinks, dot_product_weights
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    Window,
    causal_mask,
    check_shapes,
    check_soft_cap,
    check_window,
    pair_of_segment_ids,
    weights_on_request,
    window_mask,
)


@weights_on_request
def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    axis_name: str,
    is_causal: bool = False,
    scale: float | None = None,
    chunk_size: int = 512,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    local_window_size: Window | None = None,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T _"]]:
    r"""Computes softmax(scale * Q K^T + bias) V of a sequence that is sharded over the devices of a mesh axis.

    Each device keeps its queries. Blocks of keys and values are passed around the ring until every device has processed
    all of them, one at a time: "Ring Attention with Blockwise Transformers" (Liu et al., 2023, algorithm 1 of
    https://arxiv.org/abs/2310.01889). In the backward pass the blocks are passed around once more, together with their
    gradients. Each block is processed as in `chunked_attention`, with the same memory, dropout and custom gradient.

    Call it inside `jax.shard_map`. T and S below are the lengths on one device, the same on all devices, and the
    devices of the axis hold the sequence in order:

        attend = jax.shard_map(
            functools.partial(ring_attention, axis_name="sequence", is_causal=True),
            mesh=mesh,
            in_specs=jax.P("data", "sequence"),
            out_specs=jax.P("data", "sequence"),
        )

    With `is_causal` the first device needs one block only, but the last device needs all: the time is that of the last.

    Args:
      query: queries of this device, [B, T, N, H].
      key: keys of this device, [B, S, K, H]; K divides N.
      value: values of this device, [B, S, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, S], for this device's keys;
        it is passed around with them.
      mask: True for visible keys of this device, broadcastable to [B, N, 1, S]; passed around with the keys.
      axis_name: the mesh axis that shards the sequence.
      is_causal: in the whole sequence, query t sees keys 0 .. t + (number of keys) - (number of queries).
      scale: multiplies the logits, a Python number; None means 1 / sqrt(H).
      chunk_size: upper limit for the queries and for the keys in a chunk, as in `chunked_attention`.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]), of this device; segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key, the same on all devices of the axis; None disables dropout.
      return_weights: also return the weights before dropout. For inspection: this gathers all keys on each device.
      logits_soft_cap: as in `dot_product_attention`.
      sinks: as in `dot_product_attention`, [N], the same on all devices of the axis.
      local_window_size: as in `dot_product_attention`, in positions of the whole sequence. Blocks outside the window
        are still passed around.

    Returns:
      Weighted values of this device's queries, [B, T, N, U], in the dtype of `query`, zero for a query without keys;
      with `return_weights` a pair of output and weights over the keys of all devices, [B, N, T, S * devices].

    Raises:
      ValueError: if shapes do not match, or a mask or a bias differs between queries.

    >>> mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> whole = jax.P(None, "sequence")
    >>> attend = functools.partial(ring_attention, axis_name="sequence", is_causal=True)
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(whole, whole, whole), out_specs=whole))
    >>> attend(x, x, x).shape
    (1, 3, 2, 4)
    """
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None and array.ndim == 4 and array.shape[2] > 1:
            raise ValueError(
                f"{name} must have shape [B or 1, N or 1, 1, S], got {array.shape}: it is passed around with the keys "
                f"and cannot differ between {query.shape[1]} queries; use is_causal for causality and segment_ids for "
                "packing"
            )
    check_shapes(query, key, value, bias, mask)
    check_sinks(sinks, query.shape[2])
    check_soft_cap(logits_soft_cap)
    window, is_causal = check_window(local_window_size, is_causal)
    (b, t, n, h), (s, k) = query.shape, key.shape[1:3]
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, b, t, s)
    extras = Extras()
    if sinks is not None:
        query, key, value, bias, varying = vary_alike((query, key, value, bias, sinks), (mask, ids, dropout_rng))
        extras = Extras(varying.reshape(k, n // k))
    queries, keys = split_inputs(query, key, value, bias, mask, ids, dropout_rng, chunk_size)
    options = Options(
        scale=h**-0.5 if scale is None else scale,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        num_queries=t,
        num_keys=s,
        window=window,
        logits_soft_cap=logits_soft_cap,
    )
    out = join_queries(_ring(options, axis_name, queries, keys, extras, dropout_rng), t)
    if not return_weights:
        return out
    shaping = {"scale": scale, "logits_soft_cap": logits_soft_cap, "sinks": sinks}
    return out, _weights_over_all_keys(query, key, bias, mask, ids, axis_name, is_causal, window, **shaping)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    options: Options, axis_name: str, queries: Queries, keys: Keys, extras: Extras, rng: Array | None
) -> Float[Array, "I B K G T U"]:
    """Computes the output of all chunks of this device's queries, with the custom gradient of `_backward`."""
    return _forward(options, axis_name, queries, keys, extras, rng)[0]


def _forward(
    options: Options, axis_name: str, queries: Queries, keys: Keys, extras: Extras, rng: Array | None
) -> tuple[Float[Array, "I B K G T U"], Residuals]:
    """Computes the output of `_ring` and the residuals for the backward pass."""

    def hop(state: Any, hop_index: Array) -> tuple[Any, None]:
        """Attends to the block of keys that is on this device, then passes the block on."""
        running, block = state
        shift, block_rng = _shift_and_rng(options, axis_name, hop_index, rng)
        running = attend(options, queries, block, running, shift, block_rng, extras)
        return (running, _pass_on(block, axis_name)), None

    state = before_any_key(queries, keys, extras.sinks), keys
    (running, _), _ = jax.lax.scan(hop, state, jnp.arange(jax.lax.axis_size(axis_name)))
    saved = finish(running, queries.query.dtype)
    return saved.out, Residuals(queries, keys, rng, saved, extras)


def _backward(
    options: Options, axis_name: str, residuals: Residuals, cotangent: Array
) -> tuple[Queries, Keys, Extras, None]:
    """Computes the gradients of the inputs of `_ring` from the gradient of its output."""
    queries, keys, rng, saved, extras = residuals

    def hop(state: Any, hop_index: Array) -> tuple[Any, None]:
        """Adds the gradients of the block of keys that is on this device, then passes block and gradients on."""
        gradients, block = state
        shift, block_rng = _shift_and_rng(options, axis_name, hop_index, rng)
        query_gradients, block_gradients = add_gradients(
            options, queries, block, saved, cotangent, gradients, shift, block_rng, extras
        )
        # After as many hops as there are devices, both are back on the device that owns them.
        block_gradients, block = _pass_on((block_gradients, block), axis_name)
        return ((query_gradients, block_gradients), block), None

    state = no_gradients(queries, keys), keys
    (gradients, _), _ = jax.lax.scan(hop, state, jnp.arange(jax.lax.axis_size(axis_name)))
    return *as_cotangents(gradients, queries, keys), Extras(sink_gradients(extras, saved, cotangent)), None


_ring.defvjp(_forward, _backward)


def _shift_and_rng(options: Options, axis_name: str, hop_index: Array, rng: Array | None) -> tuple[Array, Array | None]:
    """Returns the causal shift and the dropout key for this device's queries and the block of keys of a hop.

    This device's query t is at the position of key t + shift of the block.
    """
    num_devices, this_device = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    owner = (this_device - hop_index) % num_devices  # the device that the block started from
    queries_before, keys_before = this_device * options.num_queries, owner * options.num_keys
    aligned_at_end = num_devices * (options.num_keys - options.num_queries)  # the last query is at the last key
    shift = queries_before - keys_before + aligned_at_end
    return shift, None if rng is None else jax.random.fold_in(rng, this_device * num_devices + owner)


def _weights_over_all_keys(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Bias | None,
    mask: Mask | None,
    ids: tuple[Array, Array] | None,
    axis_name: str,
    is_causal: bool,
    window: tuple[int, int] | None,
    **shaping: Any,
) -> Float[Array, "B N T _"]:
    """Gathers the keys of all devices and returns the weights of this device's queries, [B, N, T, S * devices].

    `shaping` are further options of `dot_product_weights`.
    """
    t, s = query.shape[1], key.shape[1]
    num_devices, this_device = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def gather(x: Array, axis: int) -> Array:
        """Concatenates the arrays of all devices along the axis of keys."""
        x = jnp.broadcast_to(x, (*x.shape[:axis], s, *x.shape[axis + 1 :]))  # a bias or mask may have size 1 there
        return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)

    key = gather(key, 1)
    bias, mask = (None if x is None else gather(x, 3) for x in (bias, mask))
    offset = this_device * t + num_devices * (s - t)  # position of this device's first query among all keys
    position_masks = [causal_mask(t, s * num_devices, offset=offset)] if is_causal else []
    if window is not None:
        position_masks.append(window_mask(t, s * num_devices, window, offset=offset))
    for position_mask in position_masks:
        mask = position_mask if mask is None else mask & position_mask
    ids = None if ids is None else (ids[0], gather(ids[1], 1))
    return dot_product_weights(query, key, bias, mask, segment_ids=ids, **shaping)


def _pass_on(block: Any, axis_name: str) -> Any:
    """Sends the block of this device, a pytree, to the next device of the ring and returns the previous one's block."""
    num_devices = jax.lax.axis_size(axis_name)
    to_next_device = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return jax.lax.ppermute(block, axis_name, to_next_device)
