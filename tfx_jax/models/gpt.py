"""The language models GPT, GPT-2 and GPT-3: a stack of causal layers over learned positions."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.masks import SegmentIds
from tfx_jax.functional.layers import add_bias
from tfx_jax.models.config import DTYPES, layer_pattern
from tfx_jax.models.flops import stack_flops
from tfx_jax.models.padding import count, hide_padding, left_aligned
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention, ShardAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.cache import KVCache
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.fused_decoder import FusedKVCache, arrange, fused_step, init_fused_cache
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.replay import at_last, init_replay, replay_step
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

_INIT_STDDEV = 0.02

# Layers, width, heads and head size of each published model. GPT: Radford et al. (2018), section 4.1. GPT-2: Radford et
# al. (2019), table 2, with the parameters that were released. GPT-3: Brown et al. (2020), table 2.1, of which two rows
# do not have num_heads * d_k = d_model.
_SIZES = {
    "gpt": (12, 768, 12, 64),
    "gpt2": (12, 768, 12, 64),
    "gpt2-medium": (24, 1024, 16, 64),
    "gpt2-large": (36, 1280, 20, 64),
    "gpt2-xl": (48, 1600, 25, 64),
    "gpt3-small": (12, 768, 12, 64),
    "gpt3-medium": (24, 1024, 16, 64),
    "gpt3-large": (24, 1536, 16, 96),
    "gpt3-xl": (24, 2048, 24, 128),
    "gpt3-2.7b": (32, 2560, 32, 80),
    "gpt3-6.7b": (32, 4096, 32, 128),
    "gpt3-13b": (40, 5140, 40, 128),
    "gpt3": (96, 12288, 96, 128),
}


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps a copy of its own, as a static part
class GPTConfig:
    """Sizes of a GPT; the defaults are those of the smallest GPT-2."""

    vocab_size: int = at_least(0, 50_257)
    max_length: int = at_least(1, 1024)  # tokens that it can look back on, itself included: the learned positions
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 768)
    num_heads: int = at_least(1, 12)
    d_k: int | None = at_least(1, None)  # size of a head; None: d_model / num_heads
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # of each sublayer's output and of the sums of embeddings and positions
    attention_dropout_rate: float = fraction(0.1)  # of the attention weights
    pre_norm: bool = True  # x + f(norm(x)) and a norm at the end, since GPT-2; GPT has norm(x + f(x))
    use_bias: bool = True  # whether projections, feed-forward layers and norms have offsets
    activation: str = one_of(ACTIVATIONS, "gelu_tanh")
    layer_norm_epsilon: float = at_least(0, 1e-5)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    dtype: str = one_of(DTYPES, "float32")  # of the computation; parameters, logits and statistics stay float32
    remat: str = one_of(REMATS, "none")  # what the backward pass computes again: "full" layers, all but "dots"
    unroll: bool = False  # whether layers are compiled one by one: slow to compile, faster on a TPU, see `scan_layers`

    kind: ClassVar[str] = "decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "GPTConfig":
        """The sizes of a published model: "gpt", "gpt2", "gpt2-medium" ... "gpt2-xl", "gpt3-small" ... "gpt3".

        GPT-3's layers alternate between dense and banded attention; these are dense.

        Raises:
          ValueError: for another name.
        """
        if name not in _SIZES:
            raise ValueError(f"no published GPT is called {name!r}; there are {', '.join(_SIZES)}")
        num_layers, d_model, num_heads, d_k = _SIZES[name]
        sizes: dict[str, Any] = {"num_layers": num_layers, "d_model": d_model, "num_heads": num_heads, "d_k": d_k}
        if name == "gpt":
            sizes |= {"vocab_size": 40_478, "max_length": 512, "pre_norm": False}
        elif name.startswith("gpt3"):
            sizes |= {"max_length": 2048}
        return cls(**sizes | overrides)

    def validate(self) -> None:
        if self.d_k is None and self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.max_length = max_length

    def make(self, *, shard_attention: ShardAttention | None = None, rngs: nnx.Rngs) -> "GPT":
        return GPT(self, shard_attention=shard_attention, rngs=rngs)

    def training_flops(self, rows: int, length: int, *, num_predicted: int) -> int:
        return stack_flops(
            rows=rows,
            length=length,
            num_predicted=num_predicted,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_k=self.d_k,
            d_ff=self.experts.active(4 * self.d_model if self.d_ff is None else self.d_ff),
        )


class GPT(nnx.Module):
    """A language model (Radford et al., 2018 and 2019; Brown et al., 2020) whose output layer is its embedding."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention_fn: AttentionFn | None = None,
        shard_attention: ShardAttention | None = None,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters as GPT-2 does: normal, 0.02, residual projections 0.02 / sqrt(2 L).

        Args:
          config: the sizes.
          attention_fn: the attention of every layer, with the signature of `dot_product_attention`; None means what
            `config.attention` names.
          shard_attention: calls it on a mesh, see `tfx_jax.nn.MultiHeadAttention`.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other, the activation has no such name, or the attention does not
            fit.
        """
        c = config
        c.experts.validate()
        c.attention.check(is_causal=True)
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation={c.activation!r} is none of {', '.join(ACTIVATIONS)}")
        dtype = jnp.dtype(c.dtype)
        make_norm = functools.partial(LayerNorm, use_bias=c.use_bias)
        residual = functools.partial(
            Residual,
            c.d_model,
            dropout_rate=c.dropout_rate,
            pre_norm=c.pre_norm,
            epsilon=c.layer_norm_epsilon,
            make_norm=make_norm,
        )

        def make_layer(own: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> EncoderLayer:
            d_k = c.d_model // c.num_heads if c.d_k is None else c.d_k
            attention = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                d_k=c.d_k,
                use_bias=c.use_bias,
                dropout_rate=c.attention_dropout_rate,
                attention_fn=attention_fn or own.make(c.num_heads, d_k, rngs=rngs),
                shard_attention=shard_attention,
                dtype=dtype,
                rngs=rngs,
            )
            feed_forward = (c.experts.make if is_sparse else FeedForward)(
                c.d_model,
                4 * c.d_model if c.d_ff is None else c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=c.use_bias,
                dtype=dtype,
                rngs=rngs,
            )
            network = feed_forward.experts if isinstance(feed_forward, MixtureOfExperts) else feed_forward
            inner = (attention.query.kernel, attention.key.kernel, attention.value.kernel, network.up)
            for params, stddev in (
                (inner, _INIT_STDDEV),
                ((attention.out.kernel, network.down), _INIT_STDDEV * (2 * c.num_layers) ** -0.5),
            ):
                for param in params:
                    param[...] = stddev * jax.random.normal(rngs.params(), param.shape, param.dtype)
            return EncoderLayer(attention, feed_forward, residual)

        init = {"init_stddev": _INIT_STDDEV, "rngs": rngs}
        self.embedding = Embedding(c.vocab_size, c.d_model, dtype=dtype, **init)
        self.positions = LearnedPositions(c.max_length, c.d_model, **init)
        self.decoder_layers = stack_layers(layer_pattern(make_layer, c.attention, c.experts), c.num_layers, rngs)
        self.norm = make_norm(c.d_model, epsilon=c.layer_norm_epsilon) if c.pre_norm else None
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: SegmentIds | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores what comes after every token, given it and those before it.

        Args:
          tokens: ids, [B, T].
          token_mask: which of them exist, padding may be on either side or in between; None means all.
          positions: of each token; None counts the tokens that exist.
          segment_ids: of packed texts, which do not see each other; give `positions` too, or they count on.
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return every attention map.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` a pair of these and {"decoder/0/self": [B, N, T, T], ...}.

        Raises:
          ValueError: if T is more than the model's max_length, or the attention takes no `segment_ids`.
        """
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(f"{tokens.shape[1]} tokens, but the model has max_length={self.config.max_length}")
        x, extras = self._read(tokens, token_mask, positions, segment_ids, rngs, return_weights=return_attention)
        logits = self.embedding.attend(x if self.norm is None else self.norm(x))
        if not return_attention:
            return logits
        return logits, {f"decoder/{index}/self": weights for index, weights in enumerate(extras["self"])}

    def _read(
        self,
        tokens: Int[Array, "B T"],
        token_mask: Bool[Array, "B T"] | None,
        positions: Int[Array, "B T"] | None,
        segment_ids: SegmentIds | None,
        rngs: nnx.Rngs | None,
        *,
        caches: KVCache | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output of the last layer and what `EncoderLayer` returns besides, stacked over layers like `caches`."""
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if token_mask is None else count(token_mask)
        mask = None if token_mask is None else token_mask[:, None, None, :]
        if segment_ids is not None:
            self.config.attention.check(is_causal=True, is_packed=True)
            in_segment = (segment_ids[0] if isinstance(segment_ids, tuple) else segment_ids) != 0
            token_mask = in_segment if token_mask is None else token_mask & in_segment
        x = self._embed(hide_padding(tokens, token_mask), hide_padding(positions, token_mask), rngs)

        def layer_fn(
            layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None, cache: KVCache | None = None
        ) -> tuple[Array, Any]:
            options: dict[str, Any] = {"mask": mask, "is_causal": True, "segment_ids": segment_ids}
            options |= {"token_mask": token_mask, "rngs": rngs, "return_weights": return_weights}
            return layer(x, cache=cache, **options)

        c = self.config
        return scan_layers(layer_fn, self.decoder_layers, x, rngs, inputs=caches, remat=c.remat, unroll=c.unroll)

    def _embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B T"], rngs: nnx.Rngs | None
    ) -> Float[Array, "B T D"]:
        x = self.embedding(tokens)
        return drop(add_bias(x, self.positions(positions)), self.config.dropout_rate, rngs)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model as it decodes, see `tfx_jax.nn.decoding.DecodingModel`."""
        return GPTDecoder(self, int8=int8)


class Prompt(NamedTuple):
    """What a GPT knows of a prompt before it writes.

    Attributes:
      tokens: the prompt.
      is_past: which of its tokens were read, all that exist but the last.
      past: their keys and values of each layer; none where every step reads all tokens.
      last: the last token of each row, which the first step takes.
    """

    tokens: Int[Array, "B P"]
    is_past: Bool[Array, "B P"]
    past: list[FusedKVCache]
    last: Int[Array, " B"]


class GPTDecoder(nnx.Module):
    """A GPT that writes, as `tfx_jax.nn.decoding.Decoder` has it.

    All of a prompt but its last token is read at once; a step then costs one token. Only where the attention needs all
    tokens at every step, the model itself reads them all.
    """

    continues_inputs = True
    pad_id = -1

    def __init__(self, model: GPT, *, int8: bool = False):
        """Arranges the weights of the layers; the model stays as it is, and reads prompts."""
        embedding = model.embedding
        self.model = model
        self.fused = arrange(model.decoder_layers, embedding.table[...], dtype=embedding.dtype, int8=int8)

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.model.config.vocab_size

    def max_input_length(self, max_new_tokens: int) -> int:
        """What is left of the positions."""
        return self.model.config.max_length - max_new_tokens

    def encode(self, inputs: Int[Array, "B P"], token_mask: Bool[Array, "B P"] | None = None) -> Prompt:
        """Reads prompts."""
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        if self.fused is None:  # which writes behind the last token
            inputs, token_mask = left_aligned(inputs, token_mask)
        places = jnp.arange(inputs.shape[1])[None]
        last = jnp.max(jnp.where(token_mask, places, 0), axis=1, keepdims=True)
        is_past = token_mask & (places != last)
        past = []
        if self.fused is not None:
            config = self.model.config
            d_k = config.d_model // config.num_heads if config.d_k is None else config.d_k
            empty = KVCache.empty(inputs.shape[0], config.num_heads, d_k, dtype=config.dtype)
            caches = jax.tree.map(lambda leaf: jnp.stack([leaf] * config.num_layers), empty)
            _, extras = self.model._read(inputs, is_past, None, None, None, caches=caches)
            past = FusedKVCache.of_stack(*extras["cache"])
        return Prompt(inputs, is_past, past, jnp.take_along_axis(inputs, last, axis=1)[:, 0])

    def init_cache(
        self, memory: Prompt, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Makes room behind the prompts."""
        num_past = memory.tokens.shape[1]
        if num_past + max_length > self.model.config.max_length:
            raise ValueError(
                f"{num_past} tokens of prompt and {max_length} more, but the model has "
                f"max_length={self.model.config.max_length}"
            )
        if self.fused is None:
            tokens = jnp.pad(memory.tokens, ((0, 0), (0, max_length)))
            return init_replay(tokens, memory.is_past.sum(axis=1)), memory.last
        cache = init_fused_cache(memory.past, room=max_length, num_beams=num_beams, is_past=memory.is_past)
        return cache, memory.last

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Takes one token of each row."""
        if self.fused is None:
            return replay_step(self._score_last, tokens, cache)
        output, norm = self.fused.output, self.model.norm

        def embed(tokens: Array, positions: Array) -> Array:
            return self.model._embed(tokens[:, None], positions[:, None], None)

        def score(x: Array) -> Array:
            return output(x if norm is None else norm(x), jnp.float32)[:, 0]

        return fused_step(self.fused.steps, embed, score, tokens, cache)

    def _score_last(self, tokens: Int[Array, "R C"], lengths: Int[Array, " R"], _: None) -> Float[Array, "R V"]:
        exists = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        x = at_last(self.model._read(tokens, exists, None, None, None)[0], lengths)
        return self.model.embedding.attend(x if self.model.norm is None else self.model.norm(x))[:, 0]
