"""The language models GPT, GPT-2 and GPT-3: a stack of causal layers over learned positions."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.models.language_model import LanguageModel
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.stack import REMATS, stack_layers

_INIT_STDDEV = 0.02

# num_layers, d_model, num_heads and d_k of each published model. GPT: Radford et al. (2018), section 4.1. GPT-2:
# Radford et al. (2019), table 2, and the released parameters. GPT-3: Brown et al. (2020), table 2.1; in two of its
# rows, num_heads * d_k differs from d_model.
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
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class GPTConfig:
    """Configuration of a GPT; the defaults are the smallest GPT-2."""

    vocab_size: int = at_least(0, 50_257)
    max_length: int = at_least(1, 1024)  # longest sequence in tokens; positions are learned
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 768)
    num_heads: int = at_least(1, 12)
    d_k: int | None = at_least(1, None)  # size of a head; None: d_model / num_heads
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # dropout of each sublayer's output and of embeddings plus positions
    attention_dropout_rate: float = fraction(0.1)  # dropout of attention weights
    pre_norm: bool = True  # true: x + f(norm(x)) and a final norm (GPT-2 and GPT-3); false: norm(x + f(x)) (GPT)
    use_bias: bool = True  # whether projections, feed-forward layers and norms have a bias
    activation: str = one_of(ACTIVATIONS, "gelu_tanh")
    layer_norm_epsilon: float = at_least(0, 1e-5)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    convolution_width: int = at_least(0, 0)  # tokens in a causal convolution of queries, keys and values; 0: none
    use_output_gate: bool = False  # whether the outputs of heads are multiplied by sigmoids of the layer's input
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Returns the configuration of "gpt", "gpt2", "gpt2-medium" ... "gpt2-xl", "gpt3-small" ... or "gpt3".

        All layers have dense attention, where GPT-3 alternates between dense and banded attention.

        Raises:
          ValueError: if `name` is unknown; the message lists the names.
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
        """Raises ValueError for fields that contradict each other."""
        if self.d_k is None and self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.max_length = max_length

    def make(self, *, rngs: nnx.Rngs) -> "GPT":
        return GPT(self, rngs=rngs)


class GPT(LanguageModel):
    """Causal language model with tied embeddings (Radford et al., 2018 and 2019; Brown et al., 2020)."""

    def __init__(self, config: GPTConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters like GPT-2: normal with deviation 0.02, residual projections 0.02 / sqrt(2 L).

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, the activation is unknown, or the attention cannot be causal.
        """
        c = checked(config)
        d_k = c.d_model // c.num_heads if c.d_k is None else c.d_k
        c.attention.check(is_causal=True, num_heads=c.num_heads, d_k=d_k)
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

        def make_layer(layer_attention: AttentionConfig, has_experts: bool, rngs: nnx.Rngs) -> EncoderLayer:
            """Makes a layer and initializes its matrices from normal distributions."""
            attention = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                d_k=d_k,
                use_bias=c.use_bias,
                convolution_width=c.convolution_width,
                use_output_gate=c.use_output_gate,
                dropout_rate=c.attention_dropout_rate,
                attention_fn=attention_fn or layer_attention.make(c.num_heads, d_k, rngs=rngs),
                dtype=dtype,
                rngs=rngs,
            )
            feed_forward = (c.experts.make if has_experts else FeedForward)(
                c.d_model,
                4 * c.d_model if c.d_ff is None else c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=c.use_bias,
                dtype=dtype,
                rngs=rngs,
            )
            networks = feed_forward.networks if isinstance(feed_forward, MixtureOfExperts) else [feed_forward]
            input_matrices = [attention.query.kernel, attention.key.kernel, attention.value.kernel]
            input_matrices += [network.up for network in networks]
            if attention.output_gate is not None:
                input_matrices.append(attention.output_gate.kernel)
            # Added to the residual stream, twice in a layer.
            output_matrices = [attention.out.kernel, *(network.down for network in networks)]
            output_stddev = _INIT_STDDEV * (2 * c.num_layers) ** -0.5
            for params, stddev in ((input_matrices, _INIT_STDDEV), (output_matrices, output_stddev)):
                for param in params:
                    param[...] = stddev * jax.random.normal(rngs.params(), param.shape, param.dtype)
            return EncoderLayer(attention, feed_forward, residual)

        init = {"init_stddev": _INIT_STDDEV, "rngs": rngs}
        self.embedding = Embedding(c.vocab_size, c.d_model, dtype=dtype, **init)
        self.positions = LearnedPositions(c.max_length, c.d_model, **init)
        self.decoder_layers = stack_layers(layer_pattern(make_layer, c.attention, c.experts), c.num_layers, rngs)
        self.norm = make_norm(c.d_model, epsilon=c.layer_norm_epsilon) if c.pre_norm else None
        self.config = copy.deepcopy(c)

    def embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B T"], rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T D"]:
        """Returns token vectors plus position vectors, the input of the first layer."""
        x = self.embedding(tokens)
        return drop(add_bias(x, self.positions(positions)), self.config.dropout_rate, rngs)

    def output(self) -> Embedding:
        """Returns the embedding, which is also the output layer."""
        return self.embedding

    def last_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the final norm, if any."""
        return x if self.norm is None else self.norm(x)
