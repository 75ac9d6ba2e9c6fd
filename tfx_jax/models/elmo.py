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
from tfx_jax.functional.recurrent import State, lstm_cell, narrow_product, scan_cell
from tfx_jax.models.config import DTYPES
from tfx_jax.nn.basic import Linear, drop

NUM_CHARACTERS = 259
"""What a word is written in: 256 bytes, its begin and its end, and the mark between sentences; 0 is padding."""

_GLOROT = nnx.initializers.glorot_uniform()


@documented
@dataclasses.dataclass(unsafe_hash=True)
class CharacterConfig:
    """Sizes of a character CNN; the defaults are those of the published ELMo."""

    d_character: int = at_least(1, 16)
    filter_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)  # in characters
    num_filters: tuple[int, ...] = (32, 32, 64, 128, 256, 512, 1024)  # of each width
    num_highway: int = at_least(0, 2)

    def check(self) -> None:
        """Checks how fields go together.

        Raises:
          ValueError: if there is not one number of filters for each width, or none at all.
        """
        widths, numbers = self.filter_widths, self.num_filters
        if len(widths) != len(numbers) or not widths or min(*widths, *numbers) < 1:
            raise ValueError(f"filter_widths={widths} needs as many num_filters, all from 1 up, got {numbers}")


@documented
@dataclasses.dataclass(unsafe_hash=True)
class ElmoTaggerConfig:
    """Sizes of what is trained above a frozen ELMo, or without one."""

    use_elmo: bool = True  # whether each word has ELMo's vector beside its own
    characters: CharacterConfig = dataclasses.field(
        default_factory=lambda: CharacterConfig(16, (1, 2, 3, 4), (32, 32, 64, 64), 1)
    )
    d_word: int = at_least(1, 128)  # of the word's own vector
    d_hidden: int = at_least(1, 200)  # of either direction of its LSTM
    dropout_rate: float = fraction(0.5)  # of what the LSTM and the classifier read


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class ElmoConfig:
    """Sizes of an ELMo; the defaults are those of the published "original" model, of the One Billion Word corpus."""

    vocab_size: int = at_least(1, 793_471)  # words that the softmax tells apart; those that are read have no limit
    word_length: int = at_least(3, 50)  # bytes of a word with its begin and its end; the rest is cut off
    characters: CharacterConfig = dataclasses.field(default_factory=CharacterConfig)
    num_layers: int = at_least(1, 2)  # the paper's L, each in both directions
    d_hidden: int = at_least(1, 4_096)  # of the cells of a direction
    d_model: int = at_least(1, 512)  # of words, and what the cells' outputs are projected to
    dropout_rate: float = fraction(0.1)  # of what each layer and the softmax read
    tagger: ElmoTaggerConfig = dataclasses.field(default_factory=ElmoTaggerConfig)
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # names of the classes, for a model that tags
    dtype: str = one_of(DTYPES, "float32")  # of products; parameters, states and logits stay float32

    kind: ClassVar[str] = "elmo"

    def validate(self) -> None:
        for name, characters in (("characters", self.characters), ("tagger.characters", self.tagger.characters)):
            try:
                characters.check()
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None

    def tiny(self, *, max_length: int) -> None:
        """See `tfx_jax.models.config.ModelConfig`; a recurrence has no end."""
        del max_length
        small = CharacterConfig(4, (1, 3), (8, 12), 1)
        self.vocab_size, self.word_length, self.characters = 1_000, 12, small
        self.num_layers, self.d_hidden, self.d_model = 2, 32, 16
        self.tagger = ElmoTaggerConfig(self.tagger.use_elmo, copy.copy(small), 16, 16, self.tagger.dropout_rate)


class Convolution(nnx.Module):
    """Filters of one width over the characters of a word, and the largest answer of each (Kim et al., 2016)."""

    def __init__(self, width: int, d_character: int, num_filters: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_GLOROT(rngs.params(), (width, d_character, num_filters)))
        self.bias = nnx.Param(jnp.zeros(num_filters))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "R W C"], exists: Bool[Array, "R W"]) -> Float[Array, "R F"]:
        """Returns relu(max_t (x[t] K[0] + x[t + 1] K[1] + ... + b)) over windows that begin at a character.

        Args:
          x: characters of words, zeros behind the last one of each.
          exists: where they are. Nothing depends on how many columns there are behind them.
        """
        width = self.kernel.shape[0]
        kernel = self.kernel[...].astype(self.dtype)
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype), kernel, (1,), [(0, width - 1)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        y = add_bias(y, self.bias[...])
        return jax.nn.relu(jnp.where(exists[..., None], y, jnp.zeros((), y.dtype)).max(axis=1))


class Highway(nnx.Module):
    """A layer part of which passes by: equation 8 of Kim et al. (2016, https://arxiv.org/abs/1508.06615)."""

    def __init__(self, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the parameters; the gates start at sigmoid(-2), with most passing by, as in section 2.3 there."""
        self.transform = Linear(size, size, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        self.gate = Linear(size, size, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        self.gate.bias = nnx.Param(jnp.full(size, -2.0))

    def __call__(self, x: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        """Returns t relu(x W + b) + (1 - t) x with t = sigmoid(x W_t + b_t)."""
        gate = jax.nn.sigmoid(self.gate(x))
        return gate * jax.nn.relu(self.transform(x)) + (1 - gate) * x


class CharacterEncoder(nnx.Module):
    """A word's vector from its characters: filters of several widths, highway layers and a projection."""

    def __init__(self, config: CharacterConfig, d_model: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        c, features, options = config, sum(config.num_filters), {"dtype": dtype, "rngs": rngs}
        self.table = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (NUM_CHARACTERS, c.d_character)))
        sizes = zip(c.filter_widths, c.num_filters, strict=True)
        self.filters = nnx.List([Convolution(width, c.d_character, number, **options) for width, number in sizes])
        self.highway = nnx.List([Highway(features, **options) for _ in range(c.num_highway)])
        self.projection = Linear(features, d_model, kernel_init=_GLOROT, **options)

    def __call__(self, characters: Int[Array, "B T W"]) -> Float[Array, "B T D"]:
        """Returns a vector for each word, in the dtype of the computation.

        Args:
          characters: from 1 to NUM_CHARACTERS, behind the last one of each word 0, which is no character. A word
            without any gets a vector too, of no meaning.
        """
        rows = characters.reshape(-1, characters.shape[-1])
        exists = rows != 0
        vectors = lookup(self.table[...], rows - 1)
        vectors = jnp.where(exists[..., None], vectors, 0.0)
        x = jnp.concatenate([convolution(vectors, exists) for convolution in self.filters], axis=-1)
        for layer in self.highway:
            x = layer(x)
        return self.projection(x).reshape(*characters.shape[:-1], -1)


class LSTM(nnx.Module):
    """An LSTM in one direction, its outputs projected if `d_out` is given (Sak et al., 2014).

    With the names of "Long Short-Term Memory Based Recurrent Neural Network Architectures for Large Vocabulary Speech
    Recognition" (https://arxiv.org/abs/1402.1128, equations 7 to 13, without peepholes): the cell continues with
    r = P (o tanh(c)), and r is what it gives out.
    """

    def __init__(self, d_in: int, d_hidden: int, d_out: int | None = None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the parameters; the forget gates start open (Jozefowicz et al., 2015)."""
        self.d_hidden, self.d_out, self.dtype = d_hidden, d_out or d_hidden, dtype
        self.kernel = nnx.Param(_GLOROT(rngs.params(), (d_in, 4 * d_hidden)))
        self.recurrent = nnx.Param(_GLOROT(rngs.params(), (self.d_out, 4 * d_hidden)))
        self.bias = nnx.Param(jnp.zeros(4 * d_hidden).at[d_hidden : 2 * d_hidden].set(1.0))
        self.projection = nnx.Param(_GLOROT(rngs.params(), (d_hidden, d_out))) if d_out else None

    def __call__(
        self, x: Float[Array, "B T I"], token_mask: Bool[Array, "B T"], *, is_reversed: bool = False
    ) -> Float[Array, "B T O"]:
        """Reads from the first word on, or from the last one back; where there is no word, nothing is read."""
        gates = add_bias(narrow_product(x.astype(self.dtype), self.kernel[...]), self.bias[...])
        projection = None if self.projection is None else self.projection[...].astype(self.dtype)

        def step(gates: Array, state: State, recurrent: Array) -> State:
            wide, c = lstm_cell(gates, state, recurrent)
            return wide if projection is None else narrow_product(wide, projection), c

        rows = x.shape[0]
        state = jnp.zeros((rows, self.d_out)), jnp.zeros((rows, self.d_hidden))
        recurrent = self.recurrent[...].astype(self.dtype)
        outputs, _ = scan_cell(step, gates, state, recurrent, token_mask, is_reversed=is_reversed)
        return outputs.astype(x.dtype)


class BidirectionalLSTM(nnx.Module):
    """Two LSTMs that read in opposite directions and do not see each other."""

    def __init__(self, d_in: int, d_hidden: int, d_out: int | None = None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.forward = LSTM(d_in, d_hidden, d_out, dtype=dtype, rngs=rngs)
        self.backward = LSTM(d_in, d_hidden, d_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T 2 I"], token_mask: Bool[Array, "B T"]) -> Float[Array, "B T 2 O"]:
        """Reads x[:, :, 0] forwards and x[:, :, 1] backwards."""
        forward = self.forward(x[:, :, 0], token_mask)
        return jnp.stack([forward, self.backward(x[:, :, 1], token_mask, is_reversed=True)], axis=2)


class Elmo(nnx.Module):
    """A character CNN and L layers of LSTMs in both directions, from the second on with residuals (section 3.2)."""

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other.
        """
        c, dtype = config, jnp.dtype(config.dtype)
        c.validate()
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
        """Reads rows of words.

        Args:
          characters: of each word, see `CharacterEncoder`.
          token_mask: which words exist; None means all. Padding changes nothing in either direction, wherever it is.
          rngs: stream `dropout`; None means evaluation.

        Returns:
          The layers h_j, j = 0 ... L, with J = L + 1: the words themselves, twice, and the outputs of each layer of
          LSTMs, forward and backward beside each other. That of a word in direction 0 depends on no word behind it, in
          direction 1 on none before it. What stands where there is no word means nothing.
        """
        if token_mask is None:
            token_mask = jnp.ones(characters.shape[:2], bool)
        words = self.words(characters)
        layers = [jnp.stack([words, words], axis=2)]
        for index, layer in enumerate(self.layers):
            x = layers[-1]
            y = layer(drop(x, self.dropout_rate, rngs), token_mask)
            layers.append(x + y if index else y)
        return jnp.stack(layers)


class ElmoLanguageModel(nnx.Module):
    """An ELMo, as `elmo`, and a softmax over a vocabulary: what pre-training learns (Peters et al., 2018, section 3.1).

    As there, both directions share the words' vectors and the softmax, and nothing else.
    """

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters; see `Elmo`."""
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
        """Scores, at each word, what follows it (direction 0) and what precedes it (1): float32 logits."""
        x = self.elmo(characters, token_mask=token_mask, rngs=rngs)[-1]
        return self.softmax(drop(x, self.config.dropout_rate, rngs))


class Frozen(nnx.Variable[Array]):
    """What has been learned before, and is no parameter any more: no gradient, optimizer or weight decay changes it."""


def freeze(module: nnx.Module) -> None:
    """Turns all parameters of a module, and of what it has, into `Frozen`; their paths and values stay."""
    for _, part in list(nnx.iter_modules(module)):
        for name, value in list(vars(part).items()):
            if isinstance(value, nnx.Param):
                setattr(part, name, Frozen(value[...]))


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
    """Its parameters, s and gamma: at the start, the mean of all layers."""

    def __init__(self, num_layers: int):
        self.weights, self.scale = nnx.Param(jnp.zeros(num_layers)), nnx.Param(jnp.ones(()))

    def __call__(self, layers: Float[Array, "J *batch"]) -> Float[Array, "*batch"]:
        return scalar_mix(layers, self.weights[...], self.scale[...])


class ElmoTagger(nnx.Module):
    """Gives every word one of `config.labels`, read off by a bidirectional LSTM and a linear layer.

    It reads a vector of the word's characters, which is trained with it, and with `config.tagger.use_elmo` that of
    `elmo` beside it, whose own parameters are frozen: only how its layers are mixed is learned.
    """

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters, those of the frozen part too, which are to be taken from elsewhere.

        Args:
          config: the sizes.
          rngs: stream `params`.

        Raises:
          ValueError: as an `Elmo`, and if there are no labels.
        """
        if not config.labels:
            raise ValueError("a model that tags needs labels, but its configuration has none")
        config.validate()
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
        self.config = dataclasses.replace(copy.deepcopy(config), dropout_rate=0.0)  # ELMo is frozen

    def __call__(
        self,
        characters: Int[Array, "B T W"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T C"]:
        """Scores the tags of each word, float32.

        Args:
          characters: of each word, see `tfx_jax.models.elmo.CharacterEncoder`.
          token_mask: which words exist; None means all.
          rngs: stream `dropout`; None means evaluation. ELMo itself is evaluated in any case.
        """
        if token_mask is None:
            token_mask = jnp.ones(characters.shape[:2], bool)
        x = self.words(characters)
        if self.elmo is not None and self.mix is not None:
            layers = self.elmo(characters, token_mask=token_mask)
            mixed = self.mix(layers.reshape(*layers.shape[:3], -1))
            x = jnp.concatenate([x, mixed], axis=-1)
        x = drop(x, self.config.tagger.dropout_rate, rngs)
        x = self.lstm(jnp.stack([x, x], axis=2), token_mask)
        return self.classifier(drop(x.reshape(*x.shape[:2], -1), self.config.tagger.dropout_rate, rngs))
