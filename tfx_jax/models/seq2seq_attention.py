"""What the decoder of `tfx_jax.models.seq2seq` remembers, and how it looks at a source, whatever scores its tokens."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.additive import additive_attention, general_attention
from tfx_jax.functional.aligned import aligned_attention, aligned_position
from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.functional.recurrent import State
from tfx_jax.nn.attention import AttentionFn


class Memory(NamedTuple):
    """What a decoder has of a source."""

    output: Float[Array, "B S D"]
    keys: Float[Array, "B S 1 D"] | None  # of the score "concat": multiplied once, not at every step
    mask: Bool[Array, "B 1 1 S"]
    last: Float[Array, "B D"]  # the last output of either direction, float32
    kept: Float[Array, "L B D"] | None  # of training: what is dropped of the states of each layer, at all steps alike


class DecoderState(NamedTuple):
    """What a decoder hands on: the state of each layer, what it is told beside the next word, and how many it wrote."""

    layers: tuple[State, ...]
    fed: Float[Array, "R D"]
    position: Int[Array, ""]
    coverage: Float[Array, "R S"] | None  # the sum of the weights so far, of each token of the source; None: not kept


class Window(NamedTuple):
    """How far "local-m" and "local-p" look, and of "local-p" the parameters that predict around which place."""

    size: int
    w: Float[Array, "D D"] | None
    v: Float[Array, " D"] | None


def scored_attention(w: Float[Array, "D D"] | None, v: Float[Array, " D"] | None, *, scale: float) -> AttentionFn:
    """Chooses by its parameters: "concat" has w and v, "general" w alone, "dot" neither; `scale` is of the last two."""
    if v is not None:
        return functools.partial(additive_attention, w_query=w, w_key=None, v=v)
    if w is not None:
        return functools.partial(general_attention, w=w, scale=scale)
    return functools.partial(dot_product_attention, scale=scale)


def attend_to_source(
    query: Float[Array, "R D"],
    state: DecoderState,
    memory: Memory,
    *,
    attention_fn: AttentionFn,
    window: Window | None,
    w_coverage: Float[Array, " D"] | None,
    return_weights: bool,
) -> tuple[Float[Array, "R D"], Float[Array, "B 1 W S"] | None]:
    """Returns contexts and weights; the W beams of a source are so many queries, which share its keys."""
    b, s, d = memory.output.shape
    queries = query.astype(memory.output.dtype).reshape(b, -1, 1, d)
    values = memory.output[:, :, None]
    keys = values if memory.keys is None else memory.keys
    if state.coverage is not None:
        of_beams = {"coverage": state.coverage.reshape(b, 1, -1, s), "w_coverage": w_coverage}
        attention_fn = functools.partial(attention_fn, **of_beams)
    if window is not None:
        attention_fn = _around(queries, state.position, memory, window, attention_fn)
    # What is not asked for is not passed on: not every attention has weights to return.
    options = {"return_weights": True} if return_weights else {}
    result: Any = attention_fn(queries, keys, values, mask=memory.mask, **options)
    context, weights = result if return_weights else (result, None)
    return context.reshape(query.shape).astype(jnp.float32), weights


def _around(
    queries: Float[Array, "B W 1 D"], position: Int[Array, ""], memory: Memory, window: Window, attend: AttentionFn
) -> AttentionFn:
    """Has an attention look at the window of each query alone, equations 9 and 10 of Luong et al. (2015)."""
    key_position = jnp.cumsum(memory.mask[:, 0, 0], axis=-1) - 1  # of tokens among those of their row
    place, sigma = position.astype(jnp.float32).reshape(1, 1, 1), None
    if window.w is not None and window.v is not None:
        length = memory.mask.sum(axis=-1)
        place, sigma = aligned_position(queries.swapaxes(1, 2), length, w=window.w, v=window.v), window.size / 2
    return functools.partial(
        aligned_attention,
        position=place,
        window=window.size,
        sigma=sigma,
        key_position=key_position,
        attention_fn=attend,
    )
