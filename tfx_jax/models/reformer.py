"""The Reformer: hashed attention, reversible layers and feed-forward networks in pieces, for long texts."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.lsh import lsh_attention, lsh_num_buckets
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.reversible import reversible_stack
from tfx_jax.models.config import DTYPES
from tfx_jax.models.padding import count, hide_padding, left_aligned
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, Linear, drop
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.distribution import current_distribution
from tfx_jax.nn.replay import at_last, init_replay, replay_step
from tfx_jax.nn.stack import stack_layers, unstack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class ReformerConfig:
    """Sizes of a Reformer; the defaults are those of the paper's three layers for enwik8, for texts of 4,096 tokens."""

    vocab_size: int = at_least(0, 256)
    max_length: int = at_least(1, 4_096)  # tokens that it can look back on, itself included: the learned positions
    num_layers: int = at_least(1, 3)
    d_model: int = at_least(1, 1_024)
    num_heads: int = at_least(1, 8)
    d_ff: int = at_least(1, 4_096)
    dropout_rate: float = fraction(0.1)  # of embeddings and of what each sublayer adds
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    full_attention: bool = False  # whether every earlier token is seen, whatever its hash
    num_hashes: int = at_least(1, 4)  # rounds; parameters do not depend on them: more can be taken to evaluate
    num_buckets: int | None = at_least(1, None)  # of a round, an even number; None: two per chunk of max_length tokens
    chunk_size: int = at_least(1, 64)  # earlier tokens of its bucket that a token sees
    feed_forward_chunk_size: int | None = at_least(1, None)  # positions computed at once; None: all
    activation: str = one_of(ACTIVATIONS, "relu")
    dtype: str = one_of(DTYPES, "float32")  # of the sublayers; parameters, both streams and logits stay float32

    kind: ClassVar[str] = "decoder"

    def validate(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.num_buckets is not None and self.num_buckets > 1 and self.num_buckets % 2:
            raise ValueError(f"num_buckets={self.num_buckets} must be even, or 1: a rotated axis and its opposite")

    def tiny(self, *, max_length: int) -> None:
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 2, 32, 2, 64
        self.max_length, self.chunk_size, self.feed_forward_chunk_size = max_length, 8, 8

    def make(self, *, rngs: nnx.Rngs) -> "Reformer":
        return Reformer(self, rngs=rngs)


class SharedAttention(nnx.Module):
    """Norm and causal self-attention whose keys are its queries at unit length: the f of a Reformer's layer."""

    def __init__(self, config: ReformerConfig, rngs: nnx.Rngs):
        """Initializes the parameters, as `tfx_jax.nn.MultiHeadAttention` does."""
        c = config
        heads = (c.num_heads, c.d_model // c.num_heads)
        options: dict[str, Any] = {"use_bias": False, "dtype": jnp.dtype(c.dtype), "rngs": rngs}
        into_heads = nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform")
        self.norm = LayerNorm(c.d_model)
        self.query_key = Linear(c.d_model, heads, kernel_init=into_heads, **options)
        self.value = Linear(c.d_model, heads, kernel_init=into_heads, **options)
        self.out = Linear(heads, c.d_model, kernel_init=nnx.initializers.glorot_uniform(), **options)
        self.config = c

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rng: Array | None,
        mask: Bool[Array, "B 1 1 T"] | None,
        segment_ids: Int[Array, "B T"] | None,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Attends; `rng` draws rotations and dropout, without it the rotations are those of evaluation."""
        c = self.config
        rotations, for_weights, for_output = [None] * 3 if rng is None else jax.random.split(rng, 3)
        num_buckets = c.num_buckets or lsh_num_buckets(c.max_length, chunk_size=c.chunk_size)
        hashing: dict[str, Any] = {"num_hashes": c.num_hashes, "num_buckets": num_buckets, "chunk_size": c.chunk_size}
        if c.full_attention:
            hashing = {"num_hashes": 1, "num_buckets": 1, "chunk_size": x.shape[1]}
        attend = functools.partial(lsh_attention, rng=jax.random.key(0) if rotations is None else rotations, **hashing)
        options: dict[str, Any] = {"is_causal": True, "return_weights": return_weights}
        options |= {"mask": mask, "segment_ids": segment_ids}
        options |= {"dropout_rate": c.attention_dropout_rate, "dropout_rng": for_weights}
        x = self.norm(x)
        query = self.query_key(x)
        result: Any = current_distribution().attend(attend, query, query, self.value(x), **options)
        context, weights = result if return_weights else (result, None)
        output = _drop(self.out(context), c.dropout_rate, for_output)
        return (output, weights) if return_weights else output


class ChunkedFeedForward(nnx.Module):
    """Norm and feed-forward network, piece by piece along the sequence: the g of a Reformer's layer."""

    def __init__(self, config: ReformerConfig, rngs: nnx.Rngs):
        """Initializes the parameters."""
        c = config
        self.norm = LayerNorm(c.d_model)
        self.feed_forward = FeedForward(
            c.d_model, c.d_ff, activation_fn=ACTIVATIONS[c.activation], dtype=jnp.dtype(c.dtype), rngs=rngs
        )
        self.config = c

    def __call__(self, x: Float[Array, "B T D"], rng: Array | None) -> Float[Array, "B T D"]:
        """Transforms every position alone; `rng` draws dropout, None means evaluation."""
        size, length = self.config.feed_forward_chunk_size, x.shape[1]
        if size is None or size >= length:
            y = self._transform(x)
        else:
            graphdef, params = nnx.split(self)

            @jax.checkpoint  # the hidden units of one piece live at a time, in the backward pass as well
            def transform(params: Any, piece: Array) -> Array:
                return nnx.merge(graphdef, params)._transform(piece)

            padded = jnp.pad(x, ((0, 0), (0, -length % size), (0, 0)))
            pieces = padded.reshape(x.shape[0], -1, size, x.shape[2]).swapaxes(0, 1)
            y = jax.lax.map(functools.partial(transform, params), pieces)
            y = y.swapaxes(0, 1).reshape(padded.shape)[:, :length]
        return _drop(y, self.config.dropout_rate, rng)

    def _transform(self, x: Float[Array, "B C D"]) -> Float[Array, "B C D"]:
        return self.feed_forward(self.norm(x))


def _drop(x: Float[Array, "B T D"], rate: float, rng: Array | None) -> Float[Array, "B T D"]:
    return drop(x, rate, None if rng is None else nnx.Rngs(dropout=rng))


class Reformer(nnx.Module):
    r"""A language model whose training memory grows with neither the square of a text nor the number of layers.

    "Reformer: The Efficient Transformer" (Kitaev et al., 2020, https://arxiv.org/abs/2001.04451). Two streams begin as
    the embeddings; a layer adds to both in turn,

        y1 = x1 + Attention(norm(x2)),   y2 = x2 + FeedForward(norm(y1)),

    so that the backward pass recovers what each layer was given (`tfx_jax.functional.reversible_stack`). The logits are
    made from a norm of both, [y1; y2], as in the authors' code. Keys are the queries at unit length; random rotations
    decide which of them a query sees (`tfx_jax.functional.lsh_attention`): other ones at every step of training, always
    the same in evaluation. Positions are learned one by one, where the paper makes each of two factors.
    """

    def __init__(self, config: ReformerConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other.
        """
        c = copy.deepcopy(config)
        c.validate()
        init = {"init_stddev": 0.02, "rngs": rngs}
        self.embedding = Embedding(c.vocab_size, c.d_model, dtype=jnp.float32, **init)
        self.positions = LearnedPositions(c.max_length, c.d_model, **init)
        self.attention_layers = stack_layers(lambda rngs: SharedAttention(c, rngs), c.num_layers, rngs)
        self.feed_forward_layers = stack_layers(lambda rngs: ChunkedFeedForward(c, rngs), c.num_layers, rngs)
        self.norm = LayerNorm(2 * c.d_model)
        self.output = Linear(2 * c.d_model, c.vocab_size, kernel_init=nnx.initializers.glorot_uniform(), rngs=rngs)
        self.config = c

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores what comes after every token, given it and those before it.

        Args:
          tokens: ids, [B, T].
          token_mask: which of them exist, padding may be on either side or in between; None means all.
          positions: of each token; None counts the tokens that exist.
          segment_ids: of packed texts, [B, T], which do not see each other; give `positions` too, or they count on.
          rngs: stream `dropout`, which draws the rotations as well; None means evaluation.
          return_attention: also return every attention map.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` a pair of these and {"decoder/0/self": [B, N, T, T], ...}.

        Raises:
          ValueError: if T is more than the model's max_length.
        """
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(f"{tokens.shape[1]} tokens, but the model has max_length={self.config.max_length}")
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if token_mask is None else count(token_mask)
        mask = None if token_mask is None else token_mask[:, None, None, :]
        if segment_ids is not None:
            token_mask = segment_ids != 0 if token_mask is None else token_mask & (segment_ids != 0)
        x = self._embed(hide_padding(tokens, token_mask), hide_padding(positions, token_mask), rngs)
        if return_attention:
            streams, maps = self._with_maps(x, mask, segment_ids, rngs)
            return self._score(streams), maps
        return self._score(self._run(x, mask, segment_ids, rngs))

    def _embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B T"], rngs: nnx.Rngs | None
    ) -> Float[Array, "B T D"]:
        return drop(add_bias(self.embedding(tokens), self.positions(positions)), self.config.dropout_rate, rngs)

    def _run(self, x: Array, mask: Array | None, segment_ids: Any, rngs: nnx.Rngs | None) -> Float[Array, "B T 2*D"]:
        attention, attention_params = nnx.split(self.attention_layers)
        feed_forward, feed_forward_params = nnx.split(self.feed_forward_layers)

        def attend(params: Any, x: Array, rng: Array | None, mask: Array | None, segment_ids: Any) -> Array:
            return nnx.merge(attention, params)(x, rng, mask, segment_ids)

        def transform(params: Any, x: Array, rng: Array | None, mask: Array | None, segment_ids: Any) -> Array:
            return nnx.merge(feed_forward, params)(x, rng)

        params = attention_params, feed_forward_params
        rng = None if rngs is None else rngs.dropout()
        return jnp.concatenate(reversible_stack(attend, transform, params, x, x, mask, segment_ids, rng=rng), axis=-1)

    def _with_maps(
        self, x: Array, mask: Array | None, segment_ids: Any, rngs: nnx.Rngs | None
    ) -> tuple[Float[Array, "B T 2*D"], dict[str, Array]]:
        """What `_run` computes, layer by layer, and the maps; to look at, not to train."""
        maps, x1, x2 = {}, x, x
        layers = zip(unstack_layers(self.attention_layers), unstack_layers(self.feed_forward_layers), strict=True)
        for index, (attend, transform) in enumerate(layers):
            rng, other_rng = (None, None) if rngs is None else (rngs.dropout(), rngs.dropout())
            added, maps[f"decoder/{index}/self"] = attend(x2, rng, mask, segment_ids, return_weights=True)
            x1 = x1 + added.astype(x1.dtype)
            x2 = x2 + transform(x1, other_rng).astype(x2.dtype)
        return jnp.concatenate([x1, x2], axis=-1), maps

    def _score(self, streams: Float[Array, "B T 2*D"]) -> Float[Array, "B T V"]:
        return self.output(self.norm(streams))

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model as it decodes, see `tfx_jax.nn.decoding.DecodingModel`; there are no weights of 8 bits."""
        if int8:
            raise UserError("a Reformer has no products of integers: leave int8 out")
        return ReformerDecoder(self)


class ReformerDecoder(nnx.Module):
    """A Reformer that writes, as `tfx_jax.nn.decoding.Decoder` has it: every step reads all tokens.

    Which keys a query sees depends on the hashes of all, so that there is nothing to keep.
    """

    continues_inputs = True
    pad_id = -1

    def __init__(self, model: Reformer):
        self.model = model

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.model.config.vocab_size

    def max_input_length(self, max_new_tokens: int) -> int:
        """What is left of the positions."""
        return self.model.config.max_length - max_new_tokens

    def encode(
        self, inputs: Int[Array, "B P"], token_mask: Bool[Array, "B P"] | None = None
    ) -> tuple[Int[Array, "B P"], Int[Array, " B"]]:
        """Moves the prompts to the front, and counts their tokens."""
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        inputs, token_mask = left_aligned(inputs, token_mask)
        return inputs, token_mask.sum(axis=1)

    def init_cache(
        self, memory: tuple[Array, Array], *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Makes room behind the prompts; the first step takes the last token of each."""
        del num_beams
        tokens, lengths = memory
        limit = self.model.config.max_length
        if tokens.shape[1] + max_length > limit:
            raise ValueError(
                f"{tokens.shape[1]} tokens of prompt and {max_length} more, but the model has max_length={limit}"
            )
        last = jnp.maximum(lengths - 1, 0)
        first = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
        return init_replay(jnp.pad(tokens, ((0, 0), (0, max_length))), last), first

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Takes one token of each row."""
        return replay_step(self._score_last, tokens, cache)

    def _score_last(self, tokens: Int[Array, "R C"], lengths: Int[Array, " R"], _: None) -> Float[Array, "R V"]:
        model, exists = self.model, jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        streams = model._run(
            model._embed(hide_padding(tokens, exists), count(exists), None), exists[:, None, None], None, None
        )
        return model._score(at_last(streams, lengths))[:, 0]
