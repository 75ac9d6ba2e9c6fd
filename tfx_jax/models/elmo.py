"""ELMo (Peters et al., 2018): a bidirectional language model over characters, and a tagger on top of it."""

import copy
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias, lookup
from tfx_jax.functional.recurrent import State, lstm_cell, mixed_product, scan_cell
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.nn.basic import Linear, drop
from tfx_jax.nn.lora import freeze

NUM_CHARACTERS = 259
"""Size of the alphabet of words: 256 bytes, begin and end of a word, and the sentence mark; id 0 is padding."""

_GLOROT = nnx.initializers.glorot_uniform()


@documented
@dataclasses.dataclass(unsafe_hash=True)
class CharacterConfig:
    """Configuration of a character CNN; the defaults are those of the published ELMo."""

    d_character: int = at_least(1, 16)  # size of a character's vector
    filter_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)  # widths of the filters in characters
    num_filters: tuple[int, ...] = (32, 32, 64, 128, 256, 512, 1024)  # number of filters of each width
    num_highway: int = at_least(0, 2)  # number of highway layers

    def check(self) -> None:
        """Checks that there is a positive number of filters for each width.

        Raises:
          ValueError: if `filter_widths` is empty, `num_filters` differs in length, or a number is below 1.
        """
        widths, numbers = self.filter_widths, self.num_filters
        if len(widths) != len(numbers) or not widths or min(*widths, *numbers) < 1:
            raise ValueError(f"filter_widths={widths} needs as many num_filters, all at least 1, got {numbers}")


@documented
@dataclasses.dataclass(unsafe_hash=True)
class ElmoTaggerConfig:
    """Configuration of the tagger's trained layers, above a frozen ELMo or without one."""

    use_elmo: bool = True  # whether ELMo's vector of a word is concatenated to the tagger's own
    characters: CharacterConfig = dataclasses.field(
        default_factory=lambda: CharacterConfig(
            d_character=16, filter_widths=(1, 2, 3, 4), num_filters=(32, 32, 64, 64), num_highway=1
        )
    )
    d_word: int = at_least(1, 128)  # size of the tagger's own word vectors
    d_hidden: int = at_least(1, 200)  # hidden units of each direction of its LSTM
    dropout_rate: float = fraction(0.5)  # dropout of the inputs of the LSTM and of the classifier


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class ElmoConfig:
    """Configuration of an ELMo; the defaults are the published "original" model, trained on One Billion Word."""

    vocab_size: int = at_least(1, 793_471)  # classes of the softmax; input words are characters and have no limit
    word_length: int = at_least(3, 50)  # longest word in bytes, begin and end marks included; the rest is cut off
    characters: CharacterConfig = dataclasses.field(default_factory=CharacterConfig)
    num_layers: int = at_least(1, 2)  # the paper's L: bidirectional LSTM layers
    d_hidden: int = at_least(1, 4_096)  # cells of one direction of a layer
    d_model: int = at_least(1, 512)  # size of word vectors and of the projected outputs of one direction
    dropout_rate: float = fraction(0.1)  # dropout of the inputs of each layer and of the softmax
    tagger: ElmoTaggerConfig = dataclasses.field(default_factory=ElmoTaggerConfig)
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # names of the classes of a tagger
    dtype: str = one_of(DTYPES, "float32")  # dtype of matrix products; parameters, states, logits: float32

    kind: ClassVar[str] = "elmo"

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        for name, characters in (("characters", self.characters), ("tagger.characters", self.tagger.characters)):
            try:
                characters.check()
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # a recurrent network has no maximum length
        small = CharacterConfig(d_character=4, filter_widths=(1, 3), num_filters=(8, 12), num_highway=1)
        self.vocab_size, self.word_length, self.characters = 1_000, 12, small
        self.num_layers, self.d_hidden, self.d_model = 2, 32, 16
        self.tagger = dataclasses.replace(self.tagger, characters=copy.copy(small), d_word=16, d_hidden=16)


class Convolution(nnx.Module):
    """Convolution over the characters of a word with filters of one width, then max pooling (Kim et al., 2016)."""

    def __init__(self, width: int, d_character: int, num_filters: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the filters, [width, d_character, num_filters], by Glorot and Bengio (2010)."""
        self.kernel = nnx.Param(_GLOROT(rngs.params(), (width, d_character, num_filters)))
        self.bias = nnx.Param(jnp.zeros(num_filters))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "R W C"], exists: Bool[Array, "R W"]) -> Float[Array, "R F"]:
        """Returns relu(max_t (x[t] K[0] + x[t + 1] K[1] + ... + b)), t over windows that start at a character.

        Args:
          x: vectors of the characters of R words, zeros after the last character.
          exists: True for characters, False for padding. The result does not depend on the amount of padding.
        """
        width = self.kernel.shape[0]
        kernel = self.kernel[...].astype(self.dtype)
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype), kernel, (1,), [(0, width - 1)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        y = add_bias(y, self.bias[...])
        return jax.nn.relu(jnp.where(exists[..., None], y, jnp.zeros((), y.dtype)).max(axis=1))


class Highway(nnx.Module):
    """Highway layer: gated mix of a layer and its input, equation 8 of Kim et al. (2016, arXiv:1508.06615)."""

    def __init__(self, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the parameters; gates start at sigmoid(-2), so that most of the input is kept (section 2.3)."""
        self.transform = Linear(size, size, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        self.gate = Linear(size, size, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        self.gate.bias = nnx.Param(jnp.full(size, -2.0))

    def __call__(self, x: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """Returns t relu(x W + b) + (1 - t) x with t = sigmoid(x W_t + b_t)."""
        gate = jax.nn.sigmoid(self.gate(x))
        return gate * jax.nn.relu(self.transform(x)) + (1 - gate) * x


class CharacterEncoder(nnx.Module):
    """Computes a word's vector from its characters: filters of several widths, highway layers and a projection."""

    def __init__(self, config: CharacterConfig, d_model: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the vectors of characters, the filters, the highway layers and the projection to `d_model`."""
        c, features, options = config, sum(config.num_filters), {"dtype": dtype, "rngs": rngs}
        self.table = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (NUM_CHARACTERS, c.d_character)))
        sizes = zip(c.filter_widths, c.num_filters, strict=True)
        self.filters = nnx.List([Convolution(width, c.d_character, number, **options) for width, number in sizes])
        self.highway = nnx.List([Highway(features, **options) for _ in range(c.num_highway)])
        self.projection = Linear(features, d_model, kernel_init=_GLOROT, **options)

    def __call__(self, characters: Int[Array, "B T W"]) -> Float[Array, "B T D"]:
        """Returns a vector for each word, in the dtype of the computation.

        Args:
          characters: ids from 1 to NUM_CHARACTERS, [B, T, W], padded with 0 at the end. A word without characters gets
            an arbitrary vector.
        """
        words = characters.reshape(-1, characters.shape[-1])
        exists = words != 0
        vectors = lookup(self.table[...], words - 1)
        vectors = jnp.where(exists[..., None], vectors, 0.0)
        x = jnp.concatenate([convolution(vectors, exists) for convolution in self.filters], axis=-1)
        for layer in self.highway:
            x = layer(x)
        return self.projection(x).reshape(*characters.shape[:-1], -1)


class LSTM(nnx.Module):
    """Unidirectional LSTM, with projected outputs if `d_out` is given (Sak et al., 2014).

    In the notation of "Long Short-Term Memory Based Recurrent Neural Network Architectures for Large Vocabulary Speech
    Recognition" (https://arxiv.org/abs/1402.1128, equations 7 to 13, without peepholes), r = P (o tanh(c)) is both the
    output and the recurrent state.
    """

    def __init__(self, d_in: int, d_hidden: int, d_out: int | None = None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the parameters; the bias of the forget gates starts at 1 (Jozefowicz et al., 2015)."""
        self.d_hidden, self.d_out, self.dtype = d_hidden, d_out or d_hidden, dtype
        self.kernel = nnx.Param(_GLOROT(rngs.params(), (d_in, 4 * d_hidden)))
        self.recurrent = nnx.Param(_GLOROT(rngs.params(), (self.d_out, 4 * d_hidden)))
        self.bias = nnx.Param(jnp.zeros(4 * d_hidden).at[d_hidden : 2 * d_hidden].set(1.0))
        self.projection = nnx.Param(_GLOROT(rngs.params(), (d_hidden, d_out))) if d_out else None

    def __call__(
        self, x: Float[Array, "B T I"], token_mask: Bool[Array, "B T"], *, is_reversed: bool = False
    ) -> Float[Array, "B T O"]:
        """Returns the output at each word, read left to right, or right to left if `is_reversed`.

        Where `token_mask` is False the state does not change, and the output repeats that of the word read before.
        """
        input_gates = add_bias(mixed_product(x.astype(self.dtype), self.kernel[...]), self.bias[...])
        projection = None if self.projection is None else self.projection[...].astype(self.dtype)

        def step(gates: Array, state: State, recurrent: Array) -> State:
            """Takes one step of the cell and projects its output."""
            hidden, c = lstm_cell(gates, state, recurrent)
            return hidden if projection is None else mixed_product(hidden, projection), c

        batch_size = x.shape[0]
        state = jnp.zeros((batch_size, self.d_out)), jnp.zeros((batch_size, self.d_hidden))
        recurrent = self.recurrent[...].astype(self.dtype)
        outputs, _ = scan_cell(step, input_gates, state, recurrent, token_mask, is_reversed=is_reversed)
        return outputs.astype(x.dtype)


class BidirectionalLSTM(nnx.Module):
    """Two independent LSTMs that read in opposite directions."""

    def __init__(self, d_in: int, d_hidden: int, d_out: int | None = None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.forward = LSTM(d_in, d_hidden, d_out, dtype=dtype, rngs=rngs)
        self.backward = LSTM(d_in, d_hidden, d_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T 2 I"], token_mask: Bool[Array, "B T"]) -> Float[Array, "B T 2 O"]:
        """Runs the forward LSTM on x[:, :, 0] and the backward LSTM on x[:, :, 1]."""
        forward = self.forward(x[:, :, 0], token_mask)
        return jnp.stack([forward, self.backward(x[:, :, 1], token_mask, is_reversed=True)], axis=2)


class Elmo(nnx.Module):
    """Character CNN and L bidirectional LSTM layers, with residuals from the second layer on (section 3.2)."""

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other.
        """
        c, dtype = checked(config), jnp.dtype(config.dtype)
        self.words = CharacterEncoder(c.characters, c.d_model, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [BidirectionalLSTM(c.d_model, c.d_hidden, c.d_model, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)]
        )
        self.dropout_rate = c.dropout_rate

    def __call__(
        self,
        characters: Int[Array, "B T W"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "J B T 2 D"]:
        """Computes the representations of words in context.

        Args:
          characters: ids of the characters of each word, see `CharacterEncoder`.
          token_mask: True for words, False for padding, which may be anywhere and does not affect words; None means no
            padding.
          rngs: stream `dropout`; None means evaluation.

        Returns:
          The layers h_j, j = 0 ... L, stacked (J = L + 1): first the word vectors, the same for both directions, then
          the outputs of each LSTM layer. Axis 3 is the direction: 0 depends on the word and those before it, 1 on the
          word and those after it. Values at padding are arbitrary.
        """
        if token_mask is None:
            token_mask = jnp.ones(characters.shape[:2], bool)
        words = self.words(characters)
        layers = [jnp.stack([words, words], axis=2)]  # the same for both directions
        for index, layer in enumerate(self.layers):
            x = layers[-1]
            y = layer(drop(x, self.dropout_rate, rngs), token_mask)
            layers.append(x + y if index else y)
        return jnp.stack(layers)


class ElmoLanguageModel(nnx.Module):
    """An `Elmo` in `self.elmo` with a softmax over words, for pre-training (Peters et al., 2018, section 3.1).

    As in the paper, the two directions share the word vectors and the softmax, but no LSTM.
    """

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters; arguments and errors are those of `Elmo`."""
        self.elmo = Elmo(config, rngs=rngs)
        init = nnx.initializers.normal(config.d_model**-0.5)
        self.softmax = Linear(config.d_model, config.vocab_size, kernel_init=init, rngs=rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        characters: Int[Array, "B T W"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T 2 V"]:
        """Returns float32 logits of the next word (direction 0) and of the previous word (direction 1)."""
        x = self.elmo(characters, token_mask=token_mask, rngs=rngs)[-1]
        return self.softmax(drop(x, self.config.dropout_rate, rngs))


def scalar_mix(
    layers: Float[Array, "J *batch"], weights: Float[Array, " J"], gamma: Float[Array, ""]
) -> Float[Array, "*batch"]:
    """Returns gamma * sum_j softmax(weights)_j layers[j]: equation 1 of Peters et al. (2018).

    >>> scalar_mix(jnp.array([[1.0], [3.0]]), jnp.zeros(2), jnp.array(2.0)).tolist()
    [4.0]
    """
    shares = gamma * jax.nn.softmax(weights)
    return jnp.einsum("J,J...->...", shares.astype(layers.dtype), layers)


class ScalarMix(nnx.Module):
    """Learned `scalar_mix`, initialized to the mean of all layers."""

    def __init__(self, num_layers: int):
        self.weights, self.scale = nnx.Param(jnp.zeros(num_layers)), nnx.Param(jnp.ones(()))

    def __call__(self, layers: Float[Array, "J *batch"]) -> Float[Array, "*batch"]:
        return scalar_mix(layers, self.weights[...], self.scale[...])


class ElmoTagger(nnx.Module):
    """Classifies every word into `config.labels`: character CNN, bidirectional LSTM and a linear layer.

    With `config.tagger.use_elmo`, the `ScalarMix` of the layers of `self.elmo` is concatenated to each word vector. The
    parameters of `self.elmo` are frozen; the mixing weights are trained.
    """

    heads: ClassVar[tuple[str, ...]] = ("words", "lstm", "classifier", "mix")

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        """Initializes all parameters, also those of the frozen ELMo, which the caller replaces by pre-trained ones.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: as for `Elmo`, and if there are no labels.
        """
        if not config.labels:
            raise ValueError("a tagger needs labels, got none: set labels to the names of the classes")
        checked(config)
        c, dtype = config.tagger, jnp.dtype(config.dtype)
        glorot = nnx.initializers.glorot_uniform()
        self.words = CharacterEncoder(c.characters, c.d_word, dtype=dtype, rngs=rngs)
        d_features = 2 * config.d_model if c.use_elmo else 0
        self.lstm = BidirectionalLSTM(c.d_word + d_features, c.d_hidden, dtype=dtype, rngs=rngs)
        self.classifier = Linear(2 * c.d_hidden, len(config.labels), kernel_init=glorot, rngs=rngs)
        self.elmo = Elmo(config, rngs=rngs) if c.use_elmo else None
        self.mix = ScalarMix(config.num_layers + 1) if c.use_elmo else None
        if self.elmo is not None:
            freeze(self.elmo)
        self.config = dataclasses.replace(copy.deepcopy(config), dropout_rate=0.0)  # no dropout in the frozen ELMo

    def __call__(
        self,
        characters: Int[Array, "B T W"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T C"]:
        """Returns float32 logits of the labels of each word.

        Args:
          characters: ids of the characters of each word, see `CharacterEncoder`.
          token_mask: True for words, False for padding; None means no padding.
          rngs: stream `dropout`; None means evaluation. ELMo itself never uses dropout here.
        """
        if token_mask is None:
            token_mask = jnp.ones(characters.shape[:2], bool)
        x = self.words(characters)
        if self.elmo is not None and self.mix is not None:
            layers = self.elmo(characters, token_mask=token_mask)
            mixed = self.mix(layers.reshape(*layers.shape[:3], -1))  # both directions concatenated, [B, T, 2 D]
            x = jnp.concatenate([x, mixed], axis=-1)
        x = drop(x, self.config.tagger.dropout_rate, rngs)
        x = self.lstm(jnp.stack([x, x], axis=2), token_mask)
        return self.classifier(drop(x.reshape(*x.shape[:2], -1), self.config.tagger.dropout_rate, rngs))
