"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860), a language model with a memory of previous segments."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.padding import check_tokens, hide_padding
from tfx_jax.nn.attention import AttentionConfig, MultiHeadAttention
from tfx_jax.nn.basic import Embedding, FeedForward, drop
from tfx_jax.nn.layers import Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class TransformerXLConfig:
    """Configuration of a Transformer-XL; the defaults are the 12-layer, 41 M parameter model for enwik8 (table 2)."""

    vocab_size: int = at_least(0, 204)
    memory_length: int = at_least(1, 512)  # M, positions of each layer that training carries to the next segment
    eval_memory_length: int | None = at_least(0, None)  # M in evaluation and generation; None: memory_length
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_ff: int | None = at_least(1, 2048)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # dropout of embeddings, of each sublayer's output and of the last layer's
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    attention: AttentionConfig = dataclasses.field(default_factory=lambda: AttentionConfig("relative"))  # fixed
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "recurrent_decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False

    @property
    def memory_length_of_evaluation(self) -> int:
        """M in evaluation and generation: the number of positions of each layer in memory."""
        return self.memory_length if self.eval_memory_length is None else self.eval_memory_length

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} must be even: distances are encoded by pairs of sinusoids")
        if self.attention.name != "relative":
            raise ValueError(f'attention.name must be "relative" in a Transformer-XL, got "{self.attention.name}"')

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 2, 32, 2, 64
        self.memory_length, self.eval_memory_length = max_length, 2 * max_length

    def make(self, *, rngs: nnx.Rngs) -> "TransformerXL":
        return TransformerXL(self, rngs=rngs)

    def init_memories(self, rows: int, memory_length: int | None = None) -> "Memories":
        """Returns empty memories, for the beginning of texts.

        Args:
          rows: B, the batch size.
          memory_length: M; None means `self.memory_length`.
        """
        length = self.memory_length if memory_length is None else memory_length
        shape = rows, self.num_layers, length, self.d_model
        return Memories(jnp.zeros(shape, self.dtype), jnp.zeros(rows, jnp.int32))


class Memories(NamedTuple):
    """Memory of the previous segments of B texts.

    Attributes:
      inputs: the inputs of each layer at the last M positions, [B, L, M, D]; missing positions come first.
      lengths: number of valid positions, 0 .. M, [B] int32.
    """

    inputs: Float[Array, "B L M D"]
    lengths: Int[Array, " B"]

    def forget(self, rows: Bool[Array, " B"]) -> "Memories":
        """Empties the memory of the rows where `rows` is True, because a new text begins there."""
        return self._replace(lengths=jnp.where(rows, 0, self.lengths))


class TransformerXLLayer(nnx.Module):
    """Attention from a segment to the memory and itself, then a feed-forward network; post-norm as in the paper."""

    def __init__(
        self, self_attention: MultiHeadAttention, feed_forward: FeedForward, make_residual: Callable[[], Residual]
    ):
        """Composes the layer; `make_residual` makes the residual connection of each of the two sublayers."""
        self.self_attention = self_attention
        self.self_attention_residual = make_residual()
        self.feed_forward = feed_forward
        self.feed_forward_residual = make_residual()

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B M D"],
        mask: Bool[Array, "B 1 #T S"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T D"]:
        """Transforms a segment.

        Args:
          x: inputs at the segment's positions, [B, T, D].
          memory: inputs at the M positions before the segment, [B, M, D].
          mask: True where a position may attend to one of the S = M + T inputs, in addition to the causal mask,
            [B, 1, T, S] or [B, 1, 1, S].
          rngs: stream `dropout`; None means evaluation.
        """

        def attend(x: Array) -> Array:
            context = jnp.concatenate([memory, x], axis=1)
            return self.self_attention(x, context, mask=mask, is_causal=True, rngs=rngs)

        x = self.self_attention_residual(attend, x, rngs)
        x = self.feed_forward_residual(lambda x: self.feed_forward(x, rngs=rngs), x, rngs)
        return x


class TransformerXL(nnx.Module):
    """Language model that reads a text segment by segment; its output layer is the embedding.

    Each layer has its own biases u and v, as in the authors' TensorFlow code (`untie_r`).
    """

    def __init__(self, config: TransformerXLConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, or the attention is another one than "relative".
        """
        c = checked(config)
        dtype = jnp.dtype(c.dtype)

        def make_layer(rngs: nnx.Rngs) -> TransformerXLLayer:
            """Makes a layer with relative attention."""
            attention = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                dropout_rate=c.attention_dropout_rate,
                attention_fn=c.attention.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs),
                dtype=dtype,
                rngs=rngs,
            )
            feed_forward = FeedForward(c.d_model, c.d_ff or 4 * c.d_model, dtype=dtype, rngs=rngs)
            return TransformerXLLayer(
                attention, feed_forward, functools.partial(Residual, c.d_model, dropout_rate=c.dropout_rate)
            )

        self.embedding = Embedding(c.vocab_size, c.d_model, scale=math.sqrt(c.d_model), dtype=dtype, rngs=rngs)
        self.decoder_layers = stack_layers(make_layer, c.num_layers, rngs)
        self.config = copy.deepcopy(c)

    def init_memories(self, rows: int, memory_length: int | None = None) -> Memories:
        """Returns empty memories of `rows` texts; `memory_length=None` means `config.memory_length`."""
        return self.config.init_memories(rows, memory_length)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        memories: Memories | None = None,
        *,
        memory_length: int | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T V"], Memories]:
        """Returns the logits of each next token of a segment, given the tokens so far and the memories.

        Args:
          tokens: ids, [B, T].
          memories: memories of the previous segments, without gradients; None means that the texts begin.
          memory_length: length of the returned memories; None means the length of `memories`, or
            `config.memory_length` without them.
          rngs: stream `dropout`; None means evaluation.

        Returns:
          float32 logits, [B, T, V], and the memories for the next segment.
        """
        check_tokens(tokens=tokens)
        if memories is None:
            length = self.config.memory_length if memory_length is None else memory_length
            memories = self.init_memories(tokens.shape[0], 0)
        else:
            length = memories.inputs.shape[2] if memory_length is None else memory_length
        x, memories = self._read(tokens, memories, length, rngs)
        return self.embedding.attend(x), memories

    def _read(
        self,
        tokens: Int[Array, "B T"],
        memories: Memories,
        memory_length: int,
        rngs: nnx.Rngs | None,
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "B T D"], Memories]:
        """Reads a segment; returns the output of the last layer and the memories for the next segment.

        Args:
          tokens: ids of the segment.
          memories: memories of the previous segments.
          memory_length: length of the returned memories.
          rngs: stream `dropout`; None means evaluation.
          token_mask: False for padding, which must be at the start of texts and only with empty memories.
          window: maximum distance to which a position attends; None means no limit.
        """
        t, m = tokens.shape[1], memories.inputs.shape[2]
        exists = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        # A memory of fewer than m tokens is at the end of its m positions; the first positions are empty.
        in_memory = jnp.arange(m)[None] >= m - memories.lengths[:, None]
        mask = jnp.concatenate([in_memory, exists], axis=1)[:, None, None, :]  # [B, 1, 1, m + T]
        if window is not None:
            # Query t has position m + t among the keys, which are the memory followed by the tokens.
            distance = m + jnp.arange(t)[:, None] - jnp.arange(m + t)[None]
            mask = mask & (distance <= window)[None, None]
        x = drop(self.embedding(hide_padding(tokens, token_mask)), self.config.dropout_rate, rngs)

        def layer_fn(layer: TransformerXLLayer, x: Array, rngs: nnx.Rngs | None, memory: Array) -> tuple[Array, Array]:
            """Returns the output of one layer and its next memory, the last of its inputs."""
            return layer(x, memory, mask, rngs=rngs), _last(jnp.concatenate([memory, x], axis=1), memory_length)

        c, inputs = self.config, jax.lax.stop_gradient(memories.inputs).swapaxes(0, 1)
        x, inputs = scan_layers(layer_fn, self.decoder_layers, x, rngs, inputs=inputs, remat=c.remat, unroll=c.unroll)
        lengths = jnp.minimum(memories.lengths + exists.sum(axis=1, dtype=jnp.int32), memory_length)
        return drop(x, self.config.dropout_rate, rngs), Memories(inputs.swapaxes(0, 1), lengths)

    def decoder(self, *, int8: bool = False) -> "TransformerXLDecoder":
        """Returns a decoder, see `tfx_jax.nn.decoding.DecodingModel`; int8 is not supported."""
        if int8:
            raise UserError("a Transformer-XL does not support int8: leave int8 out")
        return TransformerXLDecoder(self)


class TransformerXLDecoder(nnx.Module):
    """Decodes a `TransformerXL`, for any number of tokens; implements `tfx_jax.nn.decoding.Decoder`.

    Each token, also of the prompt, attends to the `eval_memory_length` positions before it. Each step projects the
    memory to keys and values again.
    """

    continues_inputs = True
    pad_id = -1

    def __init__(self, model: TransformerXL):
        self.model = model

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.model.config.vocab_size

    def max_input_length(self, max_new_tokens: int) -> None:
        """Returns None: inputs may have any length."""

    def encode(
        self, inputs: Int[Array, "B P"], token_mask: Bool[Array, "B P"] | None = None
    ) -> tuple[Memories, Int[Array, " B"]]:
        """Reads all tokens of the prompts but the last; returns the memories and the last tokens."""
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        order = jnp.argsort(token_mask, axis=1, stable=True)  # padding first, as in `Memories`
        tokens, exists = (jnp.take_along_axis(x, order, axis=1) for x in (inputs, token_mask))
        # All tokens but the last, with padding in front, so that there is at least one position.
        past, is_past = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (tokens, exists))
        length = self.model.config.memory_length_of_evaluation
        empty = self.model.init_memories(inputs.shape[0], 0)
        _, memories = self.model._read(past, empty, length, rngs=None, token_mask=is_past, window=length)
        return memories, tokens[:, -1]

    def init_cache(
        self, memory: tuple[Memories, Int[Array, " B"]], *, max_length: int, num_beams: int = 1
    ) -> tuple[Memories, Int[Array, " B"]]:
        """Returns the memories as the cache, whose size does not depend on `max_length`, and the first tokens."""
        return memory

    def step(self, tokens: Int[Array, " R"], cache: Memories) -> tuple[Float[Array, "R V"], Memories]:
        """Reads one token of each row (beam) as a segment; returns logits of the next token and the new memories."""
        logits, memories = self.model(tokens[:, None], cache)
        return logits[:, 0], memories


def _last(x: Float[Array, "B S D"], length: int) -> Float[Array, "B M D"]:
    """Returns the last `length` positions of a sequence, with zeros in front of a shorter one."""
    excess = x.shape[1] - length
    if excess > 0:
        return x[:, excess:]
    return jnp.pad(x, ((0, 0), (-excess, 0), (0, 0)))
