"""A tagger of words that has the vectors of a frozen ELMo, or has not (Peters et al., 2018, sections 3.2 and 3.3)."""

import copy

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.models.elmo import BidirectionalLSTM, CharacterEncoder, Elmo, ElmoConfig
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.nn.dropout import drop
from tfx_jax.nn.linear import Linear


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
        """See `scalar_mix`."""
        return scalar_mix(layers, self.weights[...], self.scale[...])


class ElmoTagger(nnx.Module):
    """Gives every word one of `config.labels`, read off by a bidirectional LSTM and a linear layer.

    It reads a vector of the word's characters, which is trained with it, and with `config.tagger.use_elmo` that of
    `elmo` beside it, whose own parameters are frozen: only how its layers are mixed is learned.
    """

    def __init__(self, config: ElmoConfig, *, shard_attention: ShardAttention | None = None, rngs: nnx.Rngs):
        """Draws the parameters, those of the frozen part too, which are to be taken from elsewhere.

        Args:
          config: the sizes.
          shard_attention: of no use to a model that has none.
          rngs: stream `params`.

        Raises:
          ValueError: as an `Elmo`, and if there are no labels.
        """
        del shard_attention
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
        self.config = copy.deepcopy(config)

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
