"""What the decoder of `tfx_jax.models.seq2seq` remembers, and how it looks at a source, whatever scores its tokens."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.additive import additive_attention, general_attention
from tfx_jax.functional.aligned import aligned_attention, aligned_position
from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.functional.linear import add_bias
from tfx_jax.functional.recurrent import State, narrow_product
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


class SourceAttention(nnx.Module):
    """How a state of the decoder looks at the source: by a score, or as another attention does it."""

    def __init__(
        self,
        size: int,
        *,
        score: str,
        scaled: bool,
        alignment: str,
        window: int,
        has_coverage: bool,
        attention_fn: AttentionFn | None = None,
        rngs: nnx.Rngs,
    ):
        """Draws the parameters; all but `size` are options of `Seq2Seq`, of which `attention_fn` replaces the score."""
        matrix = lambda: nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (size, size)))  # noqa: E731
        vector = lambda: nnx.Param(nnx.initializers.normal(size**-0.5)(rngs.params(), (size,)))  # noqa: E731
        # w_c and b_attn of See's equation 11, zeros: a trained model to which coverage is added begins as what it was.
        zeros = lambda: nnx.Param(jnp.zeros(size)) if has_coverage else None  # noqa: E731
        score = score if attention_fn is None else ""
        self.w_query = matrix() if score in ("concat", "general") else None
        self.w_key = matrix() if score == "concat" else None
        self.v = vector() if score == "concat" else None
        self.w_coverage, self.b_score = zeros(), zeros()
        self.w_position = matrix() if alignment == "local-p" else None
        self.v_position = vector() if alignment == "local-p" else None
        self.scale = size**-0.5 if scaled else 1.0
        self.window = None if alignment == "global" else window
        self.attention_fn = attention_fn

    def keys(self, output: Float[Array, "B S D"]) -> Float[Array, "B S 1 D"] | None:
        """What a score makes of the encoder's output alone; None where it takes that as it is."""
        if self.w_key is None:
            return None
        keys = narrow_product(output, self.w_key[...])[:, :, None]
        return keys if self.b_score is None else add_bias(keys, self.b_score[...])

    def __call__(
        self, query: Float[Array, "R D"], state: DecoderState, memory: Memory, *, return_weights: bool
    ) -> tuple[Float[Array, "R D"], Float[Array, "B 1 W S"] | None]:
        """Returns contexts and weights; the W beams of a source are so many queries, which share its keys."""
        b, s, d = memory.output.shape
        queries = query.astype(memory.output.dtype).reshape(b, -1, 1, d)
        values = memory.output[:, :, None]
        keys = values if memory.keys is None else memory.keys
        attention_fn = self._scored() if self.attention_fn is None else self.attention_fn
        if state.coverage is not None and self.w_coverage is not None:
            of_beams = {"coverage": state.coverage.reshape(b, 1, -1, s), "w_coverage": self.w_coverage[...]}
            attention_fn = functools.partial(attention_fn, **of_beams)
        if self.window is not None:
            attention_fn = self._around(queries, state.position, memory.mask, self.window, attention_fn)
        # What is not asked for is not passed on: not every attention has weights to return.
        options = {"return_weights": True} if return_weights else {}
        result: Any = attention_fn(queries, keys, values, mask=memory.mask, **options)
        context, weights = result if return_weights else (result, None)
        return context.reshape(query.shape).astype(jnp.float32), weights

    def _scored(self) -> AttentionFn:
        """The attention by its parameters: "concat" has w_query and v, "general" w_query alone, "dot" neither."""
        if self.w_query is None:
            return functools.partial(dot_product_attention, scale=self.scale)
        if self.v is None:
            return functools.partial(general_attention, w=self.w_query[...], scale=self.scale)
        return functools.partial(additive_attention, w_query=self.w_query[...], w_key=None, v=self.v[...])

    def _around(
        self,
        queries: Float[Array, "B W 1 D"],
        position: Int[Array, ""],
        mask: Bool[Array, "B 1 1 S"],
        window: int,
        attention_fn: AttentionFn,
    ) -> AttentionFn:
        """Has an attention look at the window of each query alone, equations 9 and 10 of Luong et al. (2015)."""
        key_position = jnp.cumsum(mask[:, 0, 0], axis=-1) - 1  # of tokens among those of their row
        place, sigma = position.astype(jnp.float32).reshape(1, 1, 1), None
        if self.w_position is not None and self.v_position is not None:
            w, v, length = self.w_position[...], self.v_position[...], mask.sum(axis=-1)
            place, sigma = aligned_position(queries.swapaxes(1, 2), length, w=w, v=v), window / 2
        return functools.partial(
            aligned_attention,
            position=place,
            window=window,
            sigma=sigma,
            key_position=key_position,
            attention_fn=attention_fn,
        )
