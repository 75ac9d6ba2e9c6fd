"""Show, attend and tell: image captioning with attention to a grid of image features (Xu et al., 2015)."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.additive import additive_attention
from tfx_jax.functional.attention.hard import hard_attention
from tfx_jax.functional.layers import add_bias, linear_logits
from tfx_jax.functional.recurrent import lstm_cell, mixed_product
from tfx_jax.functional.search import BeamInvariant
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.encoder_decoder import check_special_ids, shift_right
from tfx_jax.models.padding import check_tokens
from tfx_jax.nn.basic import Embedding, LearnedPositions, drop
from tfx_jax.nn.decoding import Decoder

VARIANTS = ("soft", "hard")
_MIN_PROBABILITY = 1e-30  # lower bound inside a logarithm, so that the gradient at probability 0 is finite


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class CaptionerConfig:
    """Configuration of an image captioning model (https://arxiv.org/abs/1502.03044).

    `variant` chooses the attention to the grid of image features: "soft" takes their expectation (section 4.2). "hard"
    samples one grid cell in training and takes the most probable one in evaluation (section 4.1).

    Differences from the paper: the encoder is a small network trained with the decoder, not a pre-trained VGG network.
    Each grid cell has a learned position vector, because the receptive field of so small an encoder does not tell cells
    apart. Embeddings, states and the hidden layer of the attention have the same size. The projections to the first
    state have one layer.
    """

    vocab_size: int = at_least(0, 10_000)  # 0: `train` chooses it by the amount of text in the captions
    image_size: int = at_least(1, 48)  # height and width of an image in pixels
    channels: tuple[int, ...] = (32, 64, 128)  # channels of the convolutions, of stride 2; the last is the paper's D
    d_model: int = at_least(1, 128)  # size of embeddings, of the LSTM and of the hidden layer of the attention
    variant: str = one_of(VARIANTS, "soft")
    soft_share: float = fraction(0.5)  # for "hard": fraction of the training images that use the expectation instead
    dropout_rate: float = fraction(0.0)  # dropout of embeddings and of the layer before the logits
    pad_id: int = at_least(0, 0)  # id of the padding token
    start_id: int = at_least(0, 1)  # id of the token that the decoder reads first
    eos_id: int = at_least(0, 2)  # id of the token that ends a caption; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # dtype of matrix products; parameters, states, logits: float32

    kind: ClassVar[str] = "captioner"

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"channels must be one or more positive numbers, got {self.channels}")
        if self.image_size % 2 ** len(self.channels):
            raise ValueError(
                f"image_size={self.image_size} must be divisible by {2 ** len(self.channels)}, because each of "
                f"channels={self.channels} halves the image"
            )

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # a recurrent network has no maximum length
        self.vocab_size, self.channels, self.d_model = 1_000, (8, 16, 16), 32

    def make(self, *, rngs: nnx.Rngs) -> "Captioner":
        return Captioner(self, rngs=rngs)

    @property
    def grid_size(self) -> int:
        """Height and width of the grid in cells."""
        return self.image_size // 2 ** len(self.channels)


class Memory(NamedTuple):
    """The encoded image, with L grid cells."""

    features: Float[Array, "B L 1 C"]  # the paper's annotation vectors a_i, float32
    keys: Float[Array, "B L 1 D"]  # projected features, computed once for all steps


class Glimpse(NamedTuple):
    """Result of one attention step; R = B * W rows, W beams per image."""

    context: Float[Array, "R C"]
    weights: Float[Array, "R L"]  # attention weights of grid cells; one-hot for hard attention
    log_prob: Float[Array, " R"]  # log-probability of the chosen cell; 0 for soft attention
    entropy: Float[Array, " R"]  # entropy of the cells' probabilities in nats


class Captions(NamedTuple):
    """Outputs for given captions (teacher forcing).

    Attributes:
      logits: logits of every token, float32.
      weights: alpha_ti, attention weights of the grid cells at each token, row by row; one-hot for hard attention.
      log_prob: log p(s_t | s_<t, a) of the chosen cell, with a gradient; 0 for soft attention.
      entropy: H[s_t], entropy of the cells' probabilities in nats.
      is_drawn: whether the cells of a caption were sampled (hard attention in training).
    """

    logits: Float[Array, "B T V"]
    weights: Float[Array, "B T L"]
    log_prob: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    is_drawn: Bool[Array, " B"]


class Captioner(nnx.Module):
    """Convolutional encoder and an LSTM decoder that attends to the grid of features before each word.

    The model itself implements `tfx_jax.nn.decoding.Decoder`, with images as inputs.
    """

    continues_inputs = False

    def __init__(self, config: CaptionerConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, `variant` is unknown, or `pad_id` or `start_id` is outside the
            vocabulary.
        """
        c = checked(config)
        check_special_ids(c)
        d, features, dtype = c.d_model, c.channels[-1], jnp.dtype(c.dtype)
        glorot, he = nnx.initializers.glorot_uniform(), nnx.initializers.he_normal()

        def matrix(rows: int, columns: int) -> Any:
            return nnx.Param(glorot(rngs.params(), (rows, columns)))

        # A 3 x 3 convolution of stride 2 over an even side needs one pixel of padding, at either end. Padding at the
        # start in all convolutions but the last centers each cell's receptive field on its own pixels, up to one pixel.
        paddings = [((1, 0), (1, 0))] * (len(c.channels) - 1) + [((0, 1), (0, 1))]
        self.convolutions = nnx.List(
            nnx.Conv(c_in, c_out, (3, 3), strides=2, padding=padding, kernel_init=he, dtype=dtype, rngs=rngs)
            for c_in, c_out, padding in zip((3, *c.channels), c.channels, paddings, strict=False)
        )
        self.positions = LearnedPositions(c.grid_size**2, features, rngs=rngs)
        self.embedding = Embedding(c.vocab_size, d, init_stddev=0.1, dtype=dtype, rngs=rngs)
        self.initial = matrix(features, 2 * d)  # to the initial h and c
        self.initial_bias = nnx.Param(jnp.zeros(2 * d))
        # Matrices to the LSTM's gates: from the previous word and from the context.
        self.kernel, self.feed = matrix(d, 4 * d), matrix(features, 4 * d)
        self.recurrent = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (d, 4 * d)))
        self.bias = nnx.Param(jnp.zeros(4 * d).at[d : 2 * d].set(1.0))  # 1 for the forget gate
        # Parameters of the additive score, of the gate of section 4.2.1 and of equation 7.
        self.w_query, self.w_key = matrix(d, d), matrix(features, d)
        self.v = nnx.Param(nnx.initializers.normal(d**-0.5)(rngs.params(), (d,)))
        self.gate, self.gate_bias = matrix(d, 1), nnx.Param(jnp.zeros(1))
        self.l_h, self.l_z = matrix(d, d), matrix(features, d)
        self.l_o, self.logits_bias = matrix(c.vocab_size, d), nnx.Param(jnp.zeros(c.vocab_size))
        # Moving average of log p(y | s, a), the baseline of REINFORCE for hard attention; not trained by gradients.
        self.baseline = nnx.BatchStat(jnp.zeros(())) if c.variant == "hard" else None
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        images: Shaped[Array, "B Y X 3"],
        captions: Int[Array, "B T"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores each caption token given the image and the tokens before it (teacher forcing).

        Args:
          images: pixels, see `encode`.
          captions: tokens to predict, [B, T]; the decoder reads them shifted right by one, after `config.start_id`.
          rngs: stream `dropout`, see `teach`.
          return_attention: whether to also return the attention map.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` the pair (logits, {"decoder/0/cross": [B, 1, T, L]}), L
          being the grid cells, row by row.
        """
        outputs = self.teach(images, captions, rngs=rngs)
        return (outputs.logits, {"decoder/0/cross": outputs.weights[:, None]}) if return_attention else outputs.logits

    def teach(
        self, images: Shaped[Array, "B Y X 3"], captions: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None
    ) -> Captions:
        """Runs the model with teacher forcing and returns all inputs of the loss.

        Args:
          images: pixels, see `encode`.
          captions: tokens to predict, [B, T].
          rngs: stream `dropout`, which also samples grid cells; None means evaluation.
        """
        check_tokens(captions=captions)
        c, (b, length) = self.config, captions.shape
        memory = self.encode(images)
        words = drop(self.embedding(shift_right(captions, c.start_id)), self.config.dropout_rate, rngs)
        is_drawn, keys = None, None
        if c.variant == "hard" and rngs is not None:
            is_drawn = jax.random.uniform(rngs.dropout(), (b,)) >= c.soft_share
            keys = jax.random.split(rngs.dropout(), length)

        def step(state: tuple[Array, Array], gates_and_key: tuple[Array, Array | None]) -> tuple[Any, Any]:
            """Takes one step of the decoder; returns the new (h, c), and h with the `Glimpse`."""
            state, glimpse = self._advance(memory, state, *gates_and_key, is_drawn)
            return state, (state[0], glimpse)

        gates = mixed_product(words, self._cast(self.kernel)).swapaxes(0, 1)
        _, outputs = jax.lax.scan(step, self._first_state(memory), (gates, keys))
        h, glimpses = jax.tree.map(lambda x: x.swapaxes(0, 1), outputs)
        logits = self._logits(h, glimpses.context, words, rngs)
        is_drawn = jnp.zeros(b, bool) if is_drawn is None else is_drawn
        return Captions(logits, glimpses.weights, glimpses.log_prob, glimpses.entropy, is_drawn)

    def _first_state(self, memory: Memory) -> tuple[Array, Array]:
        """Returns the initial (h, c), computed from the mean feature (section 3.1.2)."""
        mean = memory.features.mean(axis=(1, 2))
        states = jnp.tanh(add_bias(mixed_product(mean, self._cast(self.initial)), self.initial_bias[...]))
        h, c = jnp.split(states, 2, axis=1)
        return h, c

    def _advance(
        self,
        memory: Memory,
        state: tuple[Array, Array],
        gates: Float[Array, "R 4*D"],
        key: Array | None = None,
        is_drawn: Bool[Array, " B"] | None = None,
    ) -> tuple[tuple[Array, Array], Glimpse]:
        """Attends and runs one LSTM step: equations 1 to 6, and the gate of section 4.2.1.

        Args:
          memory: the encoded images.
          state: (h, c) of each row.
          gates: projection of the previous word to the LSTM's gates.
          key: PRNG key that samples grid cells; None takes the most probable ones.
          is_drawn: which images use sampled cells instead of the expectation; None means that `variant` decides.

        Returns:
          The new (h, c), and the `Glimpse` with its context multiplied by the gate.
        """
        glimpse = self._attend(memory, state[0], key, is_drawn)
        gate = jax.nn.sigmoid(add_bias(mixed_product(state[0], self._cast(self.gate)), self.gate_bias[...]))
        context = gate * glimpse.context
        gates = add_bias(gates + mixed_product(context, self._cast(self.feed)), self.bias[...])
        h, c = lstm_cell(gates, state, self._cast(self.recurrent))
        return (h, c), glimpse._replace(context=context)

    def _attend(
        self, memory: Memory, query: Float[Array, "R D"], key: Array | None, is_drawn: Bool[Array, " B"] | None
    ) -> Glimpse:
        """Attends to the grid; the W = R / B beams of an image are W queries to the same keys."""
        attend = functools.partial(additive_attention, w_query=self._cast(self.w_query), w_key=None, v=self.v[...])
        arrays = query.reshape(memory.keys.shape[0], -1, 1, query.shape[1]), memory.keys, memory.features
        if self.config.variant == "soft":
            context, weights = attend(*arrays, return_weights=True)
            log_prob, probs = jnp.zeros(weights.shape[:3]), weights
        else:
            options: dict[str, Any] = {"return_weights": True, "return_log_prob": True, "return_probs": True}
            context, weights, log_prob, probs = hard_attention(*arrays, attention_fn=attend, rng=key, **options)
        if is_drawn is not None:  # training with "hard": some images use the expectation instead (`soft_share`)
            expected = jnp.einsum("BNTS,BSNU->BTNU", probs, memory.features)
            drawn = is_drawn.reshape(-1, 1, 1, 1)
            context, weights = jnp.where(drawn, context, expected), jnp.where(drawn, weights, probs)
            log_prob = jnp.where(drawn[..., 0], log_prob, 0.0)
        entropy = -(probs * jnp.log(jnp.maximum(probs, _MIN_PROBABILITY))).sum(axis=-1)
        rows = query.shape[0]
        return Glimpse(*(x.reshape(rows, *x.shape[3:]) for x in (context, weights, log_prob, entropy)))

    def _logits(
        self,
        h: Float[Array, "*batch D"],
        context: Float[Array, "*batch C"],
        words: Float[Array, "*batch D"],
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch V"]:
        """Returns logits, L_o (E y + L_h h + L_z z) as in equation 7, plus a bias."""
        hidden = words.astype(h.dtype) + mixed_product(h, self._cast(self.l_h))
        hidden = hidden + mixed_product(context, self._cast(self.l_z))
        hidden = drop(hidden, self.config.dropout_rate, rngs).astype(self.embedding.dtype)
        return add_bias(linear_logits(hidden, self.l_o[...]), self.logits_bias[...])

    def _cast(self, param: nnx.Param[Array]) -> Array:
        """Returns a parameter in the dtype of matrix products."""
        return param[...].astype(self.embedding.dtype)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model itself, see `tfx_jax.nn.decoding.DecodingModel`."""
        if int8:
            raise UserError("a Captioner does not support int8: leave int8 out")
        return self

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.config.vocab_size

    @property
    def pad_id(self) -> int:
        """The padding token, which is never generated."""
        return self.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns None: inputs may have any length."""
        del max_new_tokens
        return None

    def encode(self, inputs: Shaped[Array, "B Y X 3"], token_mask: Any = None) -> Memory:
        """Encodes RGB images, values from 0 to 255 in any dtype; `token_mask` is ignored.

        Raises:
          ValueError: if the size of the images is not `config.image_size`.
        """
        del token_mask
        c = self.config
        if inputs.shape[1:] != (c.image_size, c.image_size, 3):
            raise ValueError(
                f"images must be RGB with image_size={c.image_size} rows and columns, got shape {inputs.shape[1:]}"
            )
        x = inputs.astype(jnp.float32) / 127.5 - 1.0
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        cells = x.astype(jnp.float32).reshape(len(x), -1, x.shape[-1])  # [B, L, C], row by row
        cells = add_bias(cells, self.positions.table[...])
        # Both get an axis for one head.
        return Memory(cells[:, :, None], mixed_product(cells, self._cast(self.w_key))[:, :, None])

    def init_cache(
        self, memory: Memory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Returns the first step's cache, state (reordered with the beams) and image (not reordered), and tokens."""
        del max_length, num_beams  # the state has a constant size, and the search repeats it for each beam
        cache = {"state": self._first_state(memory), "memory": BeamInvariant(memory)}
        return cache, jnp.full(memory.keys.shape[:1], self.config.start_id)

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Reads one token of each row (beam); returns logits of the next token and the new cache."""
        words = self.embedding(tokens)
        state, glimpse = self._advance(
            cache["memory"].value, cache["state"], mixed_product(words, self._cast(self.kernel))
        )
        return self._logits(state[0], glimpse.context, words), cache | {"state": state}
