"""The Reformer: LSH attention, reversible layers and chunked feed-forward networks, for long texts."""

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
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.padding import check_tokens, hide_padding, left_aligned, positions_from_mask
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, Linear, drop
from tfx_jax.nn.decoding import Decoder, at_last, init_replay, replay_step
from tfx_jax.nn.distribution import current_distribution
from tfx_jax.nn.stack import stack_layers, unstack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class ReformerConfig:
    """Configuration of a Reformer; the defaults are the paper's three layers for enwik8, for texts of 4,096 tokens."""

    vocab_size: int = at_least(0, 256)
    max_length: int = at_least(1, 4_096)  # longest sequence in tokens; positions are learned
    num_layers: int = at_least(1, 3)
    d_model: int = at_least(1, 1_024)
    num_heads: int = at_least(1, 8)
    d_ff: int = at_least(1, 4_096)
    dropout_rate: float = fraction(0.1)  # dropout of embeddings and of each sublayer's output
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    full_attention: bool = False  # true: attend to all earlier tokens, without hashing
    num_hashes: int = at_least(1, 4)  # rounds of hashing; no parameter depends on it, so evaluation may use more
    num_buckets: int | None = at_least(
        1, None
    )  # buckets of a round, even or 1; None: about 2 * max_length / chunk_size
    chunk_size: int = at_least(1, 64)  # earlier tokens of its bucket that a token sees
    feed_forward_chunk_size: int | None = at_least(1, None)  # positions computed at once; None: all
    activation: str = one_of(ACTIVATIONS, "relu")
    dtype: str = one_of(DTYPES, "float32")  # dtype of the sublayers; parameters, both streams, logits: float32

    kind: ClassVar[str] = "decoder"

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.num_buckets is not None and self.num_buckets > 1 and self.num_buckets % 2:
            raise ValueError(
                f"num_buckets={self.num_buckets} must be even or 1: buckets are the two directions of each rotated axis"
            )

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 2, 32, 2, 64
        self.max_length, self.chunk_size, self.feed_forward_chunk_size = max_length, 8, 8

    def make(self, *, rngs: nnx.Rngs) -> "Reformer":
        return Reformer(self, rngs=rngs)


class SharedAttention(nnx.Module):
    """Norm and causal LSH self-attention whose keys are the normalized queries: F of a reversible layer."""

    def __init__(self, config: ReformerConfig, rngs: nnx.Rngs):
        """Initializes the parameters like `tfx_jax.nn.MultiHeadAttention`."""
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
        """Returns the attention output before the residual sum; with `return_weights` the pair (output, weights).

        `rng` samples rotations and dropout; None means evaluation: fixed rotations, no dropout.
        """
        c = self.config
        rotation_rng, weights_rng, output_rng = [None] * 3 if rng is None else jax.random.split(rng, 3)
        num_buckets = c.num_buckets or lsh_num_buckets(c.max_length, chunk_size=c.chunk_size)
        hashing: dict[str, Any] = {"num_hashes": c.num_hashes, "num_buckets": num_buckets, "chunk_size": c.chunk_size}
        if c.full_attention:
            # One bucket and one chunk with all tokens: every token sees all earlier ones.
            hashing = {"num_hashes": 1, "num_buckets": 1, "chunk_size": x.shape[1]}
        rotation_rng = jax.random.key(0) if rotation_rng is None else rotation_rng
        attend = functools.partial(lsh_attention, rng=rotation_rng, **hashing)
        options: dict[str, Any] = {"is_causal": True, "return_weights": return_weights}
        options |= {"mask": mask, "segment_ids": segment_ids}
        options |= {"dropout_rate": c.attention_dropout_rate, "dropout_rng": weights_rng}
        x = self.norm(x)
        query = self.query_key(x)  # queries are keys too, as the paper has it
        result: Any = current_distribution().attend(attend, query, query, self.value(x), **options)
        context, weights = result if return_weights else (result, None)
        output = _drop(self.out(context), c.dropout_rate, output_rng)
        return (output, weights) if return_weights else output


class ChunkedFeedForward(nnx.Module):
    """Norm and feed-forward network, computed in chunks of the sequence: G of a reversible layer."""

    def __init__(self, config: ReformerConfig, rngs: nnx.Rngs):
        """Initializes the norm and the feed-forward network."""
        c = config
        self.norm = LayerNorm(c.d_model)
        self.feed_forward = FeedForward(
            c.d_model, c.d_ff, activation_fn=ACTIVATIONS[c.activation], dtype=jnp.dtype(c.dtype), rngs=rngs
        )
        self.config = c

    def __call__(self, x: Float[Array, "B T D"], rng: Array | None) -> Float[Array, "B T D"]:
        """Returns the network's output before the residual sum; `rng` samples dropout, None means evaluation."""
        size, length = self.config.feed_forward_chunk_size, x.shape[1]
        if size is None or size >= length:
            y = self._transform(x)
        else:
            graphdef, params = nnx.split(self)

            @jax.checkpoint  # also in the backward pass, keep the hidden units of only one chunk in memory
            def transform(params: Any, chunk: Array) -> Array:
                return nnx.merge(graphdef, params)._transform(chunk)

            padded = jnp.pad(x, ((0, 0), (0, -length % size), (0, 0)))
            chunks = padded.reshape(x.shape[0], -1, size, x.shape[2]).swapaxes(0, 1)
            y = jax.lax.map(functools.partial(transform, params), chunks)
            y = y.swapaxes(0, 1).reshape(padded.shape)[:, :length]
        return _drop(y, self.config.dropout_rate, rng)

    def _transform(self, x: Float[Array, "B C D"]) -> Float[Array, "B C D"]:
        """Transforms C positions at once."""
        return self.feed_forward(self.norm(x))


def _drop(x: Float[Array, "B T D"], rate: float, rng: Array | None) -> Float[Array, "B T D"]:
    """Applies dropout with a key; None means evaluation."""
    return drop(x, rate, None if rng is None else nnx.Rngs(dropout=rng))


class Reformer(nnx.Module):
    r"""Language model with training memory linear in the sequence length and independent of the number of layers.

    "Reformer: The Efficient Transformer" (Kitaev et al., 2020, https://arxiv.org/abs/2001.04451). Both streams x1, x2
    start as the embeddings. A layer updates one and then the other,

        y1 = x1 + Attention(norm(x2)),   y2 = x2 + FeedForward(norm(y1)),

    so that the backward pass can recompute the inputs of a layer from its outputs
    (`tfx_jax.functional.reversible_stack`). Logits come from the normalized concatenation [y1; y2], as in the authors'
    code. Keys are the queries at unit length. Random rotations assign queries to buckets
    (`tfx_jax.functional.lsh_attention`): new ones at each training step, fixed ones in evaluation. Positions have one
    learned vector each, where the paper factorizes them (axial positions).
    """

    def __init__(self, config: ReformerConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other.
        """
        c = copy.deepcopy(checked(config))
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
        """Returns the logits of each next token, given the tokens so far.

        Args:
          tokens: ids, [B, T].
          token_mask: True for tokens, False for padding (anywhere), [B, T]; None means no padding.
          positions: position of each token, [B, T]; None counts tokens from 0, without padding.
          segment_ids: number of the packed text that each token belongs to, 0 for padding, [B, T]. Texts do not attend
            to each other. Pass `positions` too; otherwise they continue from text to text.
          rngs: stream `dropout`, which also samples the rotations; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` the pair (logits, {"decoder/0/self": [B, N, T, T], ...}).

        Raises:
          ValueError: if T exceeds `config.max_length`.
        """
        check_tokens(self.config.max_length, tokens=tokens)
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if token_mask is None else positions_from_mask(token_mask)
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
        """Returns token vectors plus position vectors."""
        return drop(add_bias(self.embedding(tokens), self.positions(positions)), self.config.dropout_rate, rngs)

    def _run(self, x: Array, mask: Array | None, segment_ids: Any, rngs: nnx.Rngs | None) -> Float[Array, "B T 2*D"]:
        """Runs the reversible layers on both streams; returns their concatenation."""
        attention_graph, attention_params = nnx.split(self.attention_layers)
        feed_forward_graph, feed_forward_params = nnx.split(self.feed_forward_layers)

        # The functions f and g of `reversible_stack`, with the parameters of one layer.
        def attend(params: Any, x: Array, rng: Array | None, mask: Array | None, segment_ids: Any) -> Array:
            return nnx.merge(attention_graph, params)(x, rng, mask, segment_ids)

        def transform(params: Any, x: Array, rng: Array | None, mask: Array | None, segment_ids: Any) -> Array:
            return nnx.merge(feed_forward_graph, params)(x, rng)

        params = attention_params, feed_forward_params
        rng = None if rngs is None else rngs.dropout()
        return jnp.concatenate(reversible_stack(attend, transform, params, x, x, mask, segment_ids, rng=rng), axis=-1)

    def _with_maps(
        self, x: Array, mask: Array | None, segment_ids: Any, rngs: nnx.Rngs | None
    ) -> tuple[Float[Array, "B T 2*D"], dict[str, Array]]:
        """Runs the layers one by one and also returns each layer's attention map.

        For inspection: unlike `_run`, it stores all activations, and with `rngs` its random numbers differ.
        """
        maps, x1, x2 = {}, x, x
        layers = zip(unstack_layers(self.attention_layers), unstack_layers(self.feed_forward_layers), strict=True)
        for index, (attend, transform) in enumerate(layers):
            attention_rng, network_rng = (None, None) if rngs is None else (rngs.dropout(), rngs.dropout())
            attended, maps[f"decoder/{index}/self"] = attend(x2, attention_rng, mask, segment_ids, return_weights=True)
            x1 = x1 + attended.astype(x1.dtype)
            x2 = x2 + transform(x1, network_rng).astype(x2.dtype)
        return jnp.concatenate([x1, x2], axis=-1), maps

    def _score(self, streams: Float[Array, "B T 2*D"]) -> Float[Array, "B T V"]:
        """Returns the logits for both streams, concatenated."""
        return self.output(self.norm(streams))

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns a decoder, see `tfx_jax.nn.decoding.DecodingModel`; int8 is not supported."""
        if int8:
            raise UserError("a Reformer does not support int8: leave int8 out")
        return ReformerDecoder(self)


class ReformerDecoder(nnx.Module):
    """Decodes a `Reformer`; implements `tfx_jax.nn.decoding.Decoder`. Each step runs the model over all tokens so far.

    Which keys a query sees depends on the hashes of all tokens, so a KV cache is of no use.
    """

    continues_inputs = True
    pad_id = -1

    def __init__(self, model: Reformer):
        self.model = model

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.model.config.vocab_size

    def max_input_length(self, max_new_tokens: int) -> int:
        """Returns the number of positions that remain for the prompt."""
        return self.model.config.max_length - max_new_tokens

    def encode(
        self, inputs: Int[Array, "B P"], token_mask: Bool[Array, "B P"] | None = None
    ) -> tuple[Int[Array, "B P"], Int[Array, " B"]]:
        """Returns the prompts with padding moved to the end, and the number of tokens of each."""
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        inputs, token_mask = left_aligned(inputs, token_mask)
        return inputs, token_mask.sum(axis=1)

    def init_cache(
        self, memory: tuple[Array, Array], *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Pads the prompts by `max_length` for the new tokens; the first step reads the last token of each prompt."""
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
        """Reads one token of each row (beam); returns logits of the next token and the new cache."""
        return replay_step(self._score_last, tokens, cache)

    def _score_last(self, tokens: Int[Array, "R C"], lengths: Int[Array, " R"], _: None) -> Float[Array, "R V"]:
        """Returns the logits after the last of the first `lengths` tokens of each row."""
        model, exists = self.model, jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        streams = model._run(
            model._embed(hide_padding(tokens, exists), positions_from_mask(exists), rngs=None),
            mask=exists[:, None, None],
            segment_ids=None,
            rngs=None,
        )
        return model._score(at_last(streams, lengths))[:, 0]
