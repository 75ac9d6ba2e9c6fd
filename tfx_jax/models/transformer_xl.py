"""Transformer-XL (Dai et al., 2019, https://arxiv.org/abs/1901.02860): a language model that remembers segments."""

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
from tfx_jax.models.config import DTYPES
from tfx_jax.models.padding import hide_padding
from tfx_jax.nn.attention import AttentionConfig, MultiHeadAttention
from tfx_jax.nn.basic import Embedding, FeedForward, drop
from tfx_jax.nn.layers import Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class TransformerXLConfig:
    """Sizes of a Transformer-XL; the defaults are the 12 layers of 41 M parameters on enwik8 (table 2)."""

    vocab_size: int = at_least(0, 204)
    memory_length: int = at_least(1, 512)  # M, positions of each layer that training carries to the next segment
    eval_memory_length: int | None = at_least(0, None)  # that evaluation and generation do; None: as in training
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_ff: int | None = at_least(1, 2048)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # of the embeddings, of each sublayer's output and of the last layer's
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    attention: AttentionConfig = dataclasses.field(default_factory=lambda: AttentionConfig("relative"))  # no other
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "recurrent_decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False

    @property
    def memory_length_of_evaluation(self) -> int:
        """How many positions of each layer evaluation and generation remember."""
        return self.memory_length if self.eval_memory_length is None else self.eval_memory_length

    def validate(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd, but distances are encoded by pairs of sinusoids")
        if self.attention.name != "relative":
            raise ValueError(f'attention.name="{self.attention.name}": a Transformer-XL has "relative" attention alone')

    def tiny(self, *, max_length: int) -> None:
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 2, 32, 2, 64
        self.memory_length, self.eval_memory_length = max_length, 2 * max_length

    def make(self, *, rngs: nnx.Rngs) -> "TransformerXL":
        return TransformerXL(self, rngs=rngs)

    def init_memories(self, rows: int, memory_length: int | None = None) -> "Memories":
        """Makes the memories of texts that begin, of which nothing exists.

        Args:
          rows: B.
          memory_length: M; None means that of training.
        """
        length = self.memory_length if memory_length is None else memory_length
        shape = rows, self.num_layers, length, self.d_model
        return Memories(jnp.zeros(shape, self.dtype), jnp.zeros(rows, jnp.int32))


class Memories(NamedTuple):
    """What a Transformer-XL remembers of the texts of B rows; each row's belong to the text that it continues.

    Attributes:
      inputs: the inputs of each layer at the last M positions, [B, L, M, D]; what does not exist is in front.
      lengths: how many of the M exist, [B] int32.
    """

    inputs: Float[Array, "B L M D"]
    lengths: Int[Array, " B"]

    def forget(self, rows: Bool[Array, " B"]) -> "Memories":
        """Empties the memory of some rows: their text begins."""
        return self._replace(lengths=jnp.where(rows, 0, self.lengths))


class TransformerXLLayer(nnx.Module):
    """Attention from a segment to the memory and itself, then feed-forward; post-norm, as the paper has it."""

    def __init__(
        self, self_attention: MultiHeadAttention, feed_forward: FeedForward, make_residual: Callable[[], Residual]
    ):
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
          x: the inputs at the segment's positions, [B, T, D].
          memory: those before them, [B, M, D].
          mask: which of all S = M + T a position may see, besides being causal, [B, 1, T, S] or [B, 1, 1, S].
          rngs: stream `dropout`; None means evaluation.
        """

        def attend(x: Array) -> tuple[Array, None]:
            seen = jnp.concatenate([memory, x], axis=1)
            return self.self_attention(x, seen, mask=mask, is_causal=True, rngs=rngs), None

        x, _ = self.self_attention_residual(attend, x, rngs)
        x, _ = self.feed_forward_residual(lambda x: (self.feed_forward(x, rngs=rngs), None), x, rngs)
        return x


class TransformerXL(nnx.Module):
    """A language model that reads segment after segment, its output layer being its embedding.

    The biases u and v are each layer's own, as in the authors' TensorFlow code (`untie_r`).
    """

    def __init__(self, config: TransformerXLConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.
        """
        c = config
        dtype = jnp.dtype(c.dtype)

        def make_layer(rngs: nnx.Rngs) -> TransformerXLLayer:
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
        """Makes the memories of texts that begin; None is the length of training."""
        return self.config.init_memories(rows, memory_length)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        memories: Memories | None = None,
        *,
        memory_length: int | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T V"], Memories]:
        """Scores what comes after every token of a segment, given it, those before it and the memories.

        Args:
          tokens: ids, [B, T].
          memories: of the segments before; None means that the texts begin. No gradient goes into them.
          memory_length: of those that are returned; None means as long as those given, or as in training.
          rngs: stream `dropout`; None means evaluation.

        Returns:
          float32 logits, [B, T, V], and the memories for the segment that follows.
        """
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
        """The output of the last layer, and the next memories.

        `token_mask` is of texts that begin, what does not exist in front; `window` is how far back a position sees.
        """
        t, m = tokens.shape[1], memories.inputs.shape[2]
        exists = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        in_memory = jnp.arange(m)[None] >= m - memories.lengths[:, None]
        mask = jnp.concatenate([in_memory, exists], axis=1)[:, None, None, :]
        if window is not None:
            back = m + jnp.arange(t)[:, None] - jnp.arange(m + t)[None]
            mask = mask & (back <= window)[None, None]
        x = drop(self.embedding(hide_padding(tokens, token_mask)), self.config.dropout_rate, rngs)

        def layer_fn(layer: TransformerXLLayer, x: Array, rngs: nnx.Rngs | None, memory: Array) -> tuple[Array, Array]:
            return layer(x, memory, mask, rngs=rngs), _last(jnp.concatenate([memory, x], axis=1), memory_length)

        c, inputs = self.config, jax.lax.stop_gradient(memories.inputs).swapaxes(0, 1)
        x, inputs = scan_layers(layer_fn, self.decoder_layers, x, rngs, inputs=inputs, remat=c.remat, unroll=c.unroll)
        lengths = jnp.minimum(memories.lengths + exists.sum(axis=1, dtype=jnp.int32), memory_length)
        return drop(x, self.config.dropout_rate, rngs), Memories(inputs.swapaxes(0, 1), lengths)

    def decoder(self, *, int8: bool = False) -> "TransformerXLDecoder":
        """Returns the model as it decodes, see `tfx_jax.nn.decoding.DecodingModel`."""
        if int8:
            raise UserError("a Transformer-XL has no products of integers: leave int8 out")
        return TransformerXLDecoder(self)


class TransformerXLDecoder(nnx.Module):
    """A Transformer-XL that writes, as `tfx_jax.nn.decoding.Decoder` has it, without end: it sees what it remembers.

    Each token sees as many positions before it as the memory of evaluation is long, those of the prompt too. A step
    projects the memory again.
    """

    continues_inputs = True
    pad_id = -1

    def __init__(self, model: TransformerXL):
        """Takes the model as it is."""
        self.model = model

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.model.config.vocab_size

    def max_input_length(self, max_new_tokens: int) -> None:
        """There is no limit."""

    def encode(
        self, inputs: Int[Array, "B P"], token_mask: Bool[Array, "B P"] | None = None
    ) -> tuple[Memories, Int[Array, " B"]]:
        """Reads prompts, all but their last tokens."""
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        order = jnp.argsort(token_mask, axis=1, stable=True)  # tokens to the end, where a memory has them
        tokens, exists = (jnp.take_along_axis(x, order, axis=1) for x in (inputs, token_mask))
        past, is_past = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (tokens, exists))  # never of no token
        length = self.model.config.memory_length_of_evaluation
        empty = self.model.init_memories(inputs.shape[0], 0)
        _, memories = self.model._read(past, empty, length, None, token_mask=is_past, window=length)
        return memories, tokens[:, -1]

    def init_cache(
        self, memory: tuple[Memories, Int[Array, " B"]], *, max_length: int, num_beams: int = 1
    ) -> tuple[Memories, Int[Array, " B"]]:
        """The cache is what the model remembers, however much is written."""
        return memory

    def step(self, tokens: Int[Array, " R"], cache: Memories) -> tuple[Float[Array, "R V"], Memories]:
        """Takes one token of each row as a segment."""
        logits, memories = self.model(tokens[:, None], cache)
        return logits[:, 0], memories


def _last(x: Float[Array, "B S D"], length: int) -> Float[Array, "B M D"]:
    """The last positions of a sequence, or all of them behind zeros."""
    missing = length - x.shape[1]
    return x[:, -missing:] if missing < 0 else jnp.pad(x, ((0, 0), (missing, 0), (0, 0)))
