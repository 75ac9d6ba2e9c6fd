"""Llama, and the decoders that differ from it by options.

These are Mistral, Mixtral, Qwen (with experts too), Gemma, OLMo 2, SmolLM3, Phi-3, gpt-oss, Granite, StableLM,
DeepSeek-V2 and V3, and Qwen3-Next.

A layer is x = x + attention(norm(x)), then x = x + feed_forward(norm(x)), with rotary positions, grouped queries, RMS
norms and a gated feed-forward network or a mixture of such networks. `tfx_jax.models.hf.load` reads Hugging Face
folders of these models.
"""

import copy
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of, within
from tfx_jax.functional import layer_norm, rms_norm
from tfx_jax.functional.attention import SPECS
from tfx_jax.functional.attention.dense import soft_capped
from tfx_jax.functional.attention.spec import RecurrentDecoding
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.language_model import LanguageModel
from tfx_jax.models.padding import check_tokens, last_index
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention, RotaryConfig, head_sizes_of
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, Linear, RMSNorm, drop
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.stack import REMATS, stack_layers

NORMS = ("pre", "output", "both")
"""Values of `LlamaConfig.norms`: a norm before each sublayer, on its output (OLMo 2), or both (Gemma 2)."""
QK_NORMS = ("none", "head", "all", "each")
"""Values of `LlamaConfig.qk_norm`: no norm of queries and keys, one for each head separately (Qwen3, Gemma 3), one over
all heads together (OLMo 2), or one for each head separately, which has one scale per head (StableLM 2)."""
NORM_KINDS = ("rms", "layer")
"""Values of `LlamaConfig.norm_kind`: RMS norms, or layer norms (StableLM), which have a bias but for queries and
keys."""


@documented
@dataclasses.dataclass(unsafe_hash=True)
class RecurrentConfig:
    """Layers with a recurrent state, whose heads have another number and other sizes: Gated DeltaNet in Qwen3-Next.

    Queries, keys and values go through a short convolution. The outputs of heads have an RMS norm, and SiLU of a linear
    map of the layer's input multiplies them (Yang et al., 2024, https://arxiv.org/abs/2412.06464, section 3.3). There
    are no rotary positions and no norms of queries and keys.
    """

    num_heads: int = at_least(0, 0)  # heads of values and outputs; 0: recurrent layers are as all others
    num_key_heads: int | None = at_least(1, None)  # heads of queries and keys, a divisor of num_heads; None: num_heads
    d_k: int = at_least(1, 128)  # size of a query and a key
    d_v: int = at_least(1, 128)  # size of a value
    convolution_width: int = at_least(1, 4)  # tokens in the convolution

    def validate(self) -> None:
        """Raises ValueError if num_key_heads does not divide num_heads."""
        if self.num_heads % (self.num_key_heads or 1):
            raise ValueError(
                f"recurrent.num_key_heads={self.num_key_heads} does not divide recurrent.num_heads={self.num_heads}"
            )


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class LlamaConfig:
    """Sizes and options of a Llama; the defaults are those of Llama 2 7B (Touvron et al., 2023)."""

    vocab_size: int = at_least(0, 32_000)
    max_length: int = at_least(1, 4096)  # tokens of prompt and continuation together
    num_layers: int = at_least(1, 32)
    d_model: int = at_least(1, 4096)
    num_heads: int = at_least(1, 32)
    num_kv_heads: int | None = at_least(1, None)  # heads of keys and values, a divisor of num_heads; None: num_heads
    d_k: int | None = at_least(1, None)  # size of a head; None: d_model / num_heads
    d_ff: int = at_least(1, 11_008)
    activation: str = one_of(ACTIVATIONS, "swish")  # of the feed-forward network's gate
    use_ff_bias: bool = False  # whether the maps of feed-forward networks have offsets
    ff_gate_offset: float = 0.0  # added to what multiplies hidden units: 1 in gpt-oss
    ff_limit: float | None = None  # bounds both factors of hidden units: 7 in gpt-oss
    experts: ExpertsConfig = dataclasses.field(default_factory=lambda: ExpertsConfig(every=1))
    num_dense_layers: int = at_least(0, 0)  # first layers without experts: 3 in DeepSeek-V3
    norms: str = one_of(NORMS, "pre")  # norms of a branch: before it, of its output, or both
    norm_kind: str = one_of(NORM_KINDS, "rms")  # RMS norms, or layer norms with a bias
    norm_epsilon: float = at_least(0, 1e-5)
    norm_scale_offset: float = within(0, 1, 0.0)  # added to the scales of norms: 1 in Gemma
    qk_norm: str = one_of(QK_NORMS, "none")  # of queries and keys: of a head, all together, or "each" with its scale
    use_value_norm: bool = False  # whether values, which are latents in latent attention, have an RMS norm
    query_rank: int | None = at_least(1, None)  # size of a vector, with an RMS norm, from which queries are computed
    is_parallel: bool = False  # whether attention and feed-forward network read the same norm
    use_qkv_bias: bool = False  # whether queries, keys and values have a bias
    use_out_bias: bool = False  # whether the output projection of the attention has one
    use_sinks: bool = False  # whether each head has a logit that takes a share of the softmax
    attention_scale: float | None = None  # of the attention logits; None: 1 / sqrt(d_k)
    attention_soft_cap: float | None = None  # bounds the attention logits: 50 in Gemma 2
    logits_soft_cap: float | None = None  # bounds the logits of tokens: 30 in Gemma 2
    logits_divisor: float = 1.0  # divides the logits of tokens, above 0: 16 in Granite
    embedding_scale: float = 1.0  # multiplies embeddings: sqrt(d_model) in Gemma, 12 in Granite
    residual_scale: float = 1.0  # multiplies what each branch adds: 0.22 in Granite
    is_tied: bool = False  # whether the output layer is the embedding
    rotary: RotaryConfig = dataclasses.field(default_factory=RotaryConfig)
    window_rotary_base: float | None = None  # rotary base of layers with window attention; None: as the others
    no_rotary_every: int = at_least(0, 0)  # every such layer has no rotary positions: 4 in SmolLM3; 0: all have
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    convolution_width: int = at_least(0, 0)  # tokens in a causal convolution of queries, keys and values; 0: none
    use_output_gate: bool = False  # whether the outputs of heads are multiplied by sigmoids of the layer's input
    recurrent: RecurrentConfig = dataclasses.field(default_factory=RecurrentConfig)
    dropout_rate: float = fraction(0.0)  # of embeddings and branches
    attention_dropout_rate: float = fraction(0.0)
    labels: tuple[str, ...] = ()  # names of the classes, for a `LlamaClassifier`
    problem_type: str | None = None  # kept for export to Hugging Face, which chooses a loss by it; unused here
    dtype: str = one_of(DTYPES, "float32")  # of the computation; parameters, logits and statistics stay float32
    remat: str = one_of(REMATS, "none")  # what the backward pass computes again: "full" layers, all but "dots"
    unroll: bool = False  # whether layers are compiled one by one: slow to compile, faster on a TPU, see `scan_layers`

    kind: ClassVar[str] = "decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False

    @property
    def head_size(self) -> int:
        """H, the number of features of a head."""
        return self.d_model // self.num_heads if self.d_k is None else self.d_k

    @property
    def pattern_length(self) -> int:
        """Number of layers after which attentions, rotary positions and experts repeat."""
        return math.lcm(len(self.attention.names), self.no_rotary_every or 1, len(self.experts.pattern()))

    @property
    def stacks(self) -> list[tuple[str, range, int]]:
        """Name, indices of the layers, and length of the repeated pattern of each stack, from input to output.

        Before the pattern of all layers come the first layers without experts, and as many more as leave whole
        repetitions.
        """
        period, num_dense = self.pattern_length, self.num_dense_layers if self.experts.num_experts else 0
        first = self.num_layers - max(0, self.num_layers - num_dense) // period * period
        # Without experts, layers repeat a shorter pattern. Other first layers are different, a pattern of their own.
        without_experts = math.lcm(len(self.attention.names), self.no_rotary_every or 1)
        first_period = without_experts if first <= num_dense and first % without_experts == 0 else first
        stacks = [
            ("first_layers", range(first), first_period),
            ("decoder_layers", range(first, self.num_layers), period),
        ]
        if first == self.num_layers:
            return [("decoder_layers", range(first), first_period)]
        return stacks if first else stacks[1:]

    def has_experts(self, index: int) -> bool:
        """Returns whether a layer has a mixture of experts."""
        pattern = self.experts.pattern()
        return index >= self.num_dense_layers and pattern[index % len(pattern)]

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_k is None and self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}; give d_k")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if not (self.num_dense_layers and self.experts.num_experts) and self.num_layers % self.pattern_length:
            raise ValueError(
                f"num_layers={self.num_layers} is no multiple of the {self.pattern_length} layers of the pattern"
            )
        if round(self.rotary.fraction * self.head_size / 2) < 1:
            raise ValueError(f"rotary.fraction={self.rotary.fraction} leaves no feature of {self.head_size} to rotate")
        if self.norm_kind == "layer" and self.norm_scale_offset:
            raise ValueError(f"norm_scale_offset={self.norm_scale_offset} is for RMS norms: set norm_kind to 'rms'")
        if self.is_parallel and self.norms != "pre":
            raise ValueError(f"is_parallel is for norms='pre', got norms={self.norms!r}")
        if self.logits_divisor <= 0:
            raise ValueError(f"logits_divisor must be above 0, got {self.logits_divisor}")
        for name in ("attention_soft_cap", "logits_soft_cap"):
            if (cap := getattr(self, name)) is not None and not cap > 0:
                raise ValueError(f"{name} must be above 0, or None for no cap, got {cap}")
        self.experts.validate()
        self.recurrent.validate()
        try:
            self.rotary.validate(self.head_size)
        except ValueError as error:
            raise ValueError(f"rotary: {error}") from None

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        self.vocab_size, self.d_model, self.num_heads, self.num_kv_heads, self.d_ff = 1_000, 32, 4, 2, 64
        self.num_dense_layers = min(self.num_dense_layers, 1)
        self.d_k, self.max_length = None, max_length
        self.num_layers = (1 + self.num_dense_layers) * self.pattern_length

    def make(self, *, rngs: nnx.Rngs) -> "Llama":
        return Llama(self, rngs=rngs)


class Llama(LanguageModel):
    """A language model with rotary positions, gated feed-forward networks and grouped queries."""

    def __init__(self, config: LlamaConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes all matrices from a normal distribution with standard deviation 0.02.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: the attention of every layer, with the signature of `dot_product_attention`; None means the
            attentions that `config.attention` names.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other or the attention does not fit.
        """
        c = checked(config)
        c.attention.check(is_causal=True, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, d_k=c.head_size)
        dtype = jnp.dtype(c.dtype)
        if c.norm_kind == "layer":
            make_norm = functools.partial(LayerNorm, epsilon=c.norm_epsilon)
            make_head_norm = functools.partial(make_norm, use_bias=False)
        else:
            make_norm = functools.partial(RMSNorm, epsilon=c.norm_epsilon, scale_offset=c.norm_scale_offset)
            make_head_norm = make_norm
        residual = functools.partial(
            Residual,
            c.d_model,
            dropout_rate=c.dropout_rate,
            pre_norm=True,
            input_norm=c.norms != "output",
            output_norm=c.norms != "pre",
            scale=c.residual_scale,
            epsilon=c.norm_epsilon,
            make_norm=make_norm,
        )
        num_kv_heads = c.num_kv_heads or c.num_heads

        def make_layer(index: int, attention_config: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            """Makes layer `index`, or one that the pattern repeats from there."""
            rotary = c.rotary
            if attention_config.name == "window" and c.window_rotary_base is not None:
                rotary = RotaryConfig(base=c.window_rotary_base)
            if c.no_rotary_every and (index + 1) % c.no_rotary_every == 0:
                rotary = None
            options: dict[str, Any]
            if c.recurrent.num_heads and _is_recurrent(attention_config):
                r = c.recurrent
                sizes: dict[str, Any] = {"num_heads": r.num_heads, "d_k": r.d_k}
                layer_attention = attention_fn or attention_config.make(**sizes, rngs=rngs)
                options = {"num_key_heads": r.num_key_heads, "d_v": r.d_v, "convolution_width": r.convolution_width}
                options |= {"use_gate_bias": False, "use_output_gate": True, "gate_fn": jax.nn.silu}
                options["output_norm"] = RMSNorm(r.d_v, epsilon=c.norm_epsilon)
            else:
                sizes = {"num_heads": c.num_heads, "num_kv_heads": num_kv_heads, "d_k": c.head_size}
                layer_attention = attention_fn or attention_config.make(**sizes, rngs=rngs)
                head_sizes = head_sizes_of(layer_attention, c.head_size)
                options = {"use_bias": c.use_qkv_bias, "use_out_bias": c.use_out_bias, "use_sinks": c.use_sinks}
                options |= {"scale": c.attention_scale, "logits_soft_cap": c.attention_soft_cap, "rotary": rotary}
                options |= {"convolution_width": c.convolution_width, "use_output_gate": c.use_output_gate}
                if c.qk_norm != "none":
                    normed = (("query_norm", c.num_heads, c.head_size), ("key_norm", num_kv_heads, head_sizes.key))
                    for name, heads, size in normed:
                        if c.qk_norm == "each":
                            options[name] = NormOfEachHead(c, heads, size)
                        else:
                            options[name] = make_head_norm(heads * size if c.qk_norm == "all" else size)
                if c.use_value_norm:
                    options["value_norm"] = RMSNorm(head_sizes.value, epsilon=_LATENT_EPSILON)
                if c.query_rank is not None:
                    options["query_rank"] = c.query_rank
                    options["query_rank_norm"] = RMSNorm(c.query_rank, epsilon=_LATENT_EPSILON)
            attention = MultiHeadAttention(
                c.d_model,
                dropout_rate=c.attention_dropout_rate,
                attention_fn=layer_attention,
                dtype=dtype,
                rngs=rngs,
                **sizes,
                **options,
            )
            feed_forward = (c.experts.make if c.has_experts(index) else FeedForward)(
                c.d_model,
                c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=c.use_ff_bias,
                is_gated=True,
                gate_offset=c.ff_gate_offset,
                limit=c.ff_limit,
                dtype=dtype,
                rngs=rngs,
            )
            # Replace the initial values of all matrices except the router's by the normal distribution.
            networks = feed_forward.networks if isinstance(feed_forward, MixtureOfExperts) else [feed_forward]
            maps = (attention.query, attention.key, attention.value, attention.out, attention.output_gate)
            for param in (*maps, attention.query_down):
                if param is not None:
                    param.kernel[...] = _normal(rngs, param.kernel)
            for param in (matrix for network in networks for matrix in (network.up, network.gate, network.down)):
                if param is not None:
                    param[...] = _normal(rngs, param)
            return EncoderLayer(attention, feed_forward, residual, is_parallel=c.is_parallel)

        attention_configs = c.attention.pattern()
        make_embedding = functools.partial(
            Embedding, c.vocab_size, c.d_model, init_stddev=_INIT_STDDEV, dtype=dtype, rngs=rngs
        )
        self.embedding = make_embedding(scale=c.embedding_scale)
        for name, indices, period in c.stacks:
            makers = [
                functools.partial(make_layer, i, attention_configs[i % len(attention_configs)])
                for i in indices[:period]
            ]
            setattr(self, name, stack_layers(makers, len(indices), rngs))
        self.norm = make_norm(c.d_model)
        self.output_embedding = None if c.is_tied else make_embedding()
        self.config = copy.deepcopy(c)

    def embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B T"], rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T D"]:
        """Returns embeddings of tokens without positions, which the attention adds by rotation."""
        del positions
        return drop(self.embedding(tokens), self.config.dropout_rate, rngs)

    def last_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(x)

    def output(self) -> Embedding:
        return self.embedding if self.output_embedding is None else self.output_embedding

    def logits_of(self, products: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        cap, divisor = self.config.logits_soft_cap, self.config.logits_divisor
        logits = products if divisor == 1.0 else products / divisor
        return logits if cap is None else soft_capped(logits, cap)


class LlamaBody(nnx.Module):
    """A Llama without an output layer, as in embedding models: vectors of tokens, [B, T, D]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Initializes a Llama without an output layer; arguments and errors are those of `Llama`."""
        self.llama = Llama(dataclasses.replace(config, is_tied=True), rngs=rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the normalized output of the last layer; each token has seen those before it.

        Args:
          tokens: ids, [B, T].
          token_mask: True for tokens, False for padding (on either side), [B, T]; None means no padding.
          rngs: stream `dropout`; None means evaluation.

        Raises:
          ValueError: if T exceeds `config.max_length`.
        """
        check_tokens(self.llama.config.max_length, tokens=tokens)
        return self.llama.last_norm(self.llama.read(tokens, token_mask, rngs=rngs)[0])


class LlamaClassifier(nnx.Module):
    """Classifies a text into `config.labels` by the vector of its last token: reward models and rerankers."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Initializes a Llama without an output layer, and the linear layer over the last token.

        Raises:
          ValueError: as `Llama`, and if there are no labels.
        """
        if not config.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        self.llama = Llama(dataclasses.replace(config, is_tied=True), rngs=rngs)
        self.classifier = Linear(config.d_model, len(config.labels), use_bias=False, rngs=rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B C"]:
        """Returns float32 logits, C = number of labels; arguments and errors are those of `LlamaBody`."""
        check_tokens(self.llama.config.max_length, tokens=tokens)
        x, _ = self.llama.read(tokens, token_mask, rngs=rngs)
        exists = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        x = jnp.take_along_axis(x, last_index(exists)[:, None, None], axis=1)  # [B, 1, D]
        return self.classifier(self.llama.last_norm(x)[:, 0].astype(jnp.float32))


class NormOfEachHead(nnx.Module):
    """Normalizes queries or keys of each head separately, with one scale per head and without a bias."""

    def __init__(self, config: LlamaConfig, num_heads: int, head_size: int):
        """Initializes the scales, [N, H]."""
        self.scale = nnx.Param(jnp.full((num_heads, head_size), 1.0 - config.norm_scale_offset))
        self.scale_offset = config.norm_scale_offset
        normalize = layer_norm if config.norm_kind == "layer" else rms_norm
        self.normalize = functools.partial(normalize, epsilon=config.norm_epsilon)

    def __call__(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Normalizes the last axis."""
        scale = self.scale[...] + self.scale_offset if self.scale_offset else self.scale[...]
        return (self.normalize(heads.astype(scale.dtype)) * scale[None, None]).astype(heads.dtype)


def _is_recurrent(attention: AttentionConfig) -> bool:
    """Returns whether an attention decodes from a recurrent state."""
    spec = SPECS[attention.names[0]]
    options = spec.passed(attention.options.given)
    return spec.decoding is not None and isinstance(spec.decoding(**options), RecurrentDecoding)


_INIT_STDDEV = 0.02
_LATENT_EPSILON = 1e-6  # of the norms inside the attention of DeepSeek-V2 and V3, whatever that of the others


def _normal(rngs: nnx.Rngs, param: nnx.Param[Array]) -> Array:
    """Returns new initial values for a parameter."""
    return _INIT_STDDEV * jax.random.normal(rngs.params(), param.shape, param.dtype)
