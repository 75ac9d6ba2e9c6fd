"""Show, attend and tell: a decoder that looks somewhere in an image for each word of a caption (Xu et al., 2015)."""

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
from tfx_jax.functional.recurrent import lstm_cell, narrow_product
from tfx_jax.functional.search import BeamInvariant
from tfx_jax.models.config import DTYPES
from tfx_jax.models.encoder_decoder import check_token_ids, shift_right
from tfx_jax.nn.basic import Embedding, LearnedPositions, drop
from tfx_jax.nn.decoding import Decoder

VARIANTS = ("soft", "hard")
_LEAST = 1e-30  # of a probability whose logarithm is taken: the gradient at 0 has to be a number


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class CaptionerConfig:
    """Sizes of a model that describes images (https://arxiv.org/abs/1502.03044).

    `variant` says how the decoder looks at the grid: "soft" takes the expected feature (section 4.2), "hard" draws one
    place in training and takes the most probable one afterwards (section 4.1).

    What differs from the paper: the encoder is small and trained with the decoder, not a VGG network that was trained
    before; each place of the grid has a learned vector added, for so small an encoder sees too little around it to know
    where it is; embeddings, states and the hidden layer of the attention are of one size; the projections of the first
    state have one layer.
    """

    vocab_size: int = at_least(0, 10_000)  # of a training, 0: by the size of its captions
    image_size: int = at_least(1, 48)  # pixels, of height and width
    channels: tuple[int, ...] = (32, 64, 128)  # of each convolution, which halves the grid; the last is the paper's D
    d_model: int = at_least(1, 128)  # of embeddings, of the LSTM and of the hidden layer of the attention
    variant: str = one_of(VARIANTS, "soft")
    soft_share: float = fraction(0.5)  # of "hard": of the training images so many get the expected feature all the same
    dropout_rate: float = fraction(0.0)  # of embeddings and of the layer before the logits
    pad_id: int = at_least(0, 0)  # the token that fills a row
    start_id: int = at_least(0, 1)  # the one that the decoder reads first
    eos_id: int = at_least(0, 2)  # the one that ends a caption; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # of products; parameters, states and logits stay float32

    kind: ClassVar[str] = "captioner"

    def validate(self) -> None:
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"channels must be one or more positive numbers, got {self.channels}")
        if self.image_size % 2 ** len(self.channels):
            raise ValueError(
                f"image_size={self.image_size} cannot be halved {len(self.channels)} times, once for each of "
                f"channels={self.channels}"
            )

    def tiny(self, *, max_length: int) -> None:
        del max_length  # a recurrence has no end
        self.vocab_size, self.channels, self.d_model = 1_000, (8, 16, 16), 32

    def make(self, *, rngs: nnx.Rngs) -> "Captioner":
        return Captioner(self, rngs=rngs)

    @property
    def grid_size(self) -> int:
        """Places of the grid, of its height and of its width."""
        return self.image_size // 2 ** len(self.channels)


class Memory(NamedTuple):
    """What a decoder has of an image."""

    features: Float[Array, "B L 1 C"]  # the paper's annotation vectors a_i, float32
    keys: Float[Array, "B L 1 D"]  # multiplied once, not at every step


class Looked(NamedTuple):
    """What a decoder read for a word of each caption, and how it chose that; R = B * W rows."""

    context: Float[Array, "R C"]
    weights: Float[Array, "R L"]  # of the places; of a hard choice 1 and zeros
    log_prob: Float[Array, " R"]  # of a hard choice; 0 of an expectation
    entropy: Float[Array, " R"]  # of the probabilities, in nats


class Captions(NamedTuple):
    """What a model says of captions that it is told.

    Attributes:
      logits: of every token, float32.
      weights: alpha_ti: what the token was written by looking at, row by row of the grid; of a hard choice 1 and zeros.
      log_prob: of a hard choice log p(s_t | s_<t, a), with a gradient; of an expectation 0.
      entropy: H[s_t], of the probabilities of the places, in nats.
      is_drawn: whether the choices for a caption were drawn.
    """

    logits: Float[Array, "B T V"]
    weights: Float[Array, "B T L"]
    log_prob: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    is_drawn: Bool[Array, " B"]


class Captioner(nnx.Module):
    """Convolutions over an image, and an LSTM that looks at their grid before it writes each word.

    It is its own `tfx_jax.nn.decoding.Decoder`, whose inputs are images.
    """

    continues_inputs = False

    def __init__(self, config: CaptionerConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other, or there is no such variant or start token.
        """
        c = config
        c.validate()
        if c.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {c.variant!r}")
        check_token_ids(c)
        d, features, dtype = c.d_model, c.channels[-1], jnp.dtype(c.dtype)
        glorot, he = nnx.initializers.glorot_uniform(), nnx.initializers.he_normal()
        matrix = lambda rows, columns: nnx.Param(glorot(rngs.params(), (rows, columns)))  # noqa: E731
        # Three by three pixels of an even side need one more, at either end. With it in front in all convolutions but
        # the last, a place of the grid sees its own square of pixels and as many on every side of it, but for one.
        paddings = [((1, 0), (1, 0))] * (len(c.channels) - 1) + [((0, 1), (0, 1))]
        self.convolutions = nnx.List(
            nnx.Conv(c_in, c_out, (3, 3), strides=2, padding=padding, kernel_init=he, dtype=dtype, rngs=rngs)
            for c_in, c_out, padding in zip((3, *c.channels), c.channels, paddings, strict=False)
        )
        self.positions = LearnedPositions(c.grid_size**2, features, rngs=rngs)
        self.embedding = Embedding(c.vocab_size, d, init_stddev=0.1, dtype=dtype, rngs=rngs)
        self.initial = matrix(features, 2 * d)
        self.initial_bias = nnx.Param(jnp.zeros(2 * d))
        self.kernel, self.feed = matrix(d, 4 * d), matrix(features, 4 * d)
        self.recurrent = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (d, 4 * d)))
        self.bias = nnx.Param(jnp.zeros(4 * d).at[d : 2 * d].set(1.0))  # the forget gate starts open
        self.w_query, self.w_key = matrix(d, d), matrix(features, d)
        self.v = nnx.Param(nnx.initializers.normal(d**-0.5)(rngs.params(), (d,)))
        self.gate, self.gate_bias = matrix(d, 1), nnx.Param(jnp.zeros(1))
        self.l_h, self.l_z = matrix(d, d), matrix(features, d)
        self.l_o, self.logits_bias = matrix(c.vocab_size, d), nnx.Param(jnp.zeros(c.vocab_size))
        # The moving average of log p(y | s, a), by which hard attention tells a good choice: no gradient changes it.
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
        """Scores every next token of captions, given the images and the tokens before it (teacher forcing).

        Args:
          images: see `encode`.
          captions: tokens to be predicted; the decoder reads them shifted right behind the start token.
          rngs: see `teach`.
          return_attention: also return where it looked.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` a pair of these and {"decoder/0/cross": [B, 1, T, L]}, the
          places of the grid row by row.
        """
        found = self.teach(images, captions, rngs=rngs)
        return (found.logits, {"decoder/0/cross": found.weights[:, None]}) if return_attention else found.logits

    def teach(
        self, images: Shaped[Array, "B Y X 3"], captions: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None
    ) -> Captions:
        """Does what a call does, and returns all that the loss is made of.

        Args:
          images: see `encode`.
          captions: tokens to be predicted.
          rngs: stream `dropout`, of which places are drawn as well; None means evaluation.
        """
        c, (b, length) = self.config, captions.shape
        memory = self.encode(images)
        words = drop(self.embedding(shift_right(captions, c.start_id)), self.config.dropout_rate, rngs)
        is_drawn, keys = None, None
        if c.variant == "hard" and rngs is not None:
            is_drawn = jax.random.uniform(rngs.dropout(), (b,)) >= c.soft_share
            keys = jax.random.split(rngs.dropout(), length)

        def write(state: tuple[Array, Array], given: tuple[Array, Array | None]) -> tuple[Any, Any]:
            state, looked = self._advance(memory, state, *given, is_drawn)
            return state, (state[0], looked)

        given = narrow_product(words, self._of(self.kernel)).swapaxes(0, 1), keys
        _, outputs = jax.lax.scan(write, self._first_state(memory), given)
        h, looked = jax.tree.map(lambda x: x.swapaxes(0, 1), outputs)
        logits = self._logits(h, looked.context, words, rngs)
        is_drawn = jnp.zeros(b, bool) if is_drawn is None else is_drawn
        return Captions(logits, looked.weights, looked.log_prob, looked.entropy, is_drawn)

    def _first_state(self, memory: Memory) -> tuple[Array, Array]:
        """Makes (h, c) of the mean feature (section 3.1.2)."""
        mean = memory.features.mean(axis=(1, 2))
        both = jnp.tanh(add_bias(narrow_product(mean, self._of(self.initial)), self.initial_bias[...]))
        h, c = jnp.split(both, 2, axis=1)
        return h, c

    def _advance(
        self,
        memory: Memory,
        state: tuple[Array, Array],
        gates: Float[Array, "R 4*D"],
        key: Array | None = None,
        is_drawn: Bool[Array, " B"] | None = None,
    ) -> tuple[tuple[Array, Array], Looked]:
        """Looks, and takes a step of the LSTM: equations 1 to 6, and the gate of section 4.2.1."""
        looked = self._look(memory, state[0], key, is_drawn)
        gate = jax.nn.sigmoid(add_bias(narrow_product(state[0], self._of(self.gate)), self.gate_bias[...]))
        context = gate * looked.context
        gates = add_bias(gates + narrow_product(context, self._of(self.feed)), self.bias[...])
        h, c = lstm_cell(gates, state, self._of(self.recurrent))
        return (h, c), looked._replace(context=context)

    def _look(
        self, memory: Memory, query: Float[Array, "R D"], key: Array | None, is_drawn: Bool[Array, " B"] | None
    ) -> Looked:
        """Reads the grid; the W beams of an image are so many queries, which share its keys."""
        attend = functools.partial(additive_attention, w_query=self._of(self.w_query), w_key=None, v=self.v[...])
        arrays = query.reshape(memory.keys.shape[0], -1, 1, query.shape[1]), memory.keys, memory.features
        if self.config.variant == "soft":
            context, weights = attend(*arrays, return_weights=True)
            log_prob, probs = jnp.zeros(weights.shape[:3]), weights
        else:
            asked: dict[str, Any] = {"return_weights": True, "return_log_prob": True, "return_probs": True}
            context, weights, log_prob, probs = hard_attention(*arrays, attention_fn=attend, rng=key, **asked)
        if is_drawn is not None:  # in a training of "hard": one query for an image, and an expectation for some of them
            expected = jnp.einsum("BNTS,BSNU->BTNU", probs, memory.features)
            drawn = is_drawn.reshape(-1, 1, 1, 1)
            context, weights = jnp.where(drawn, context, expected), jnp.where(drawn, weights, probs)
            log_prob = jnp.where(drawn[..., 0], log_prob, 0.0)
        entropy = -(probs * jnp.log(jnp.maximum(probs, _LEAST))).sum(axis=-1)
        rows = query.shape[0]
        return Looked(*(x.reshape(rows, *x.shape[3:]) for x in (context, weights, log_prob, entropy)))

    def _logits(
        self,
        h: Float[Array, "*batch D"],
        context: Float[Array, "*batch C"],
        words: Float[Array, "*batch D"],
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch V"]:
        """Scores the vocabulary: equation 7, L_o (E y + L_h h + L_z z), and a bias."""
        hidden = words.astype(h.dtype) + narrow_product(h, self._of(self.l_h))
        hidden = hidden + narrow_product(context, self._of(self.l_z))
        hidden = drop(hidden, self.config.dropout_rate, rngs).astype(self.embedding.dtype)
        return add_bias(linear_logits(hidden, self.l_o[...]), self.logits_bias[...])

    def _of(self, param: nnx.Param[Array]) -> Array:
        """A matrix, as products take it."""
        return param[...].astype(self.embedding.dtype)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model itself, see `tfx_jax.nn.decoding.DecodingModel`."""
        if int8:
            raise UserError("a Captioner has no products of integers: leave int8 out")
        return self

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.config.vocab_size

    @property
    def pad_id(self) -> int:
        """As in the configuration."""
        return self.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """No limit."""
        del max_new_tokens
        return None

    def encode(self, inputs: Shaped[Array, "B Y X 3"], token_mask: Any = None) -> Memory:
        """Reads images: red, green and blue, 0 to 255, of any dtype; no part of one is hidden.

        Raises:
          ValueError: if they have another size than the configuration says.
        """
        del token_mask
        c = self.config
        if inputs.shape[1:] != (c.image_size, c.image_size, 3):
            raise ValueError(f"images of shape {inputs.shape[1:]}, but the model has image_size={c.image_size}")
        x = inputs.astype(jnp.float32) / 127.5 - 1.0
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        x = add_bias(x.astype(jnp.float32).reshape(len(x), -1, x.shape[-1]), self.positions.table[...])
        return Memory(x[:, :, None], narrow_product(x, self._of(self.w_key))[:, :, None])

    def init_cache(
        self, memory: Memory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Begins; states follow their beams, and the grid stays where it is."""
        del max_length, num_beams  # a state takes no more room for more steps, and the search repeats it
        cache = {"state": self._first_state(memory), "memory": BeamInvariant(memory)}
        return cache, jnp.full(memory.keys.shape[:1], self.config.start_id)

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Takes one token of each row."""
        words = self.embedding(tokens)
        state, looked = self._advance(
            cache["memory"].value, cache["state"], narrow_product(words, self._of(self.kernel))
        )
        return self._logits(state[0], looked.context, words), cache | {"state": state}
