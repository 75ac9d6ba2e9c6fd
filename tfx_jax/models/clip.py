"""CLIP and SigLIP, which compare images with texts: two towers whose outputs are vectors of one space.

Papers: Radford et al. (2021), https://arxiv.org/abs/2103.00020, and Zhai et al. (2023),
https://arxiv.org/abs/2303.15343. `tfx_jax.models.hf.load` reads the published parameters.
"""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.padding import check_tokens
from tfx_jax.models.vit import PatchEmbedding
from tfx_jax.nn.attention import MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, Linear
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.stack import scan_layers, stack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)
class TowerConfig:
    """Layers of one of the towers of a CLIP."""

    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_ff: int = at_least(1, 2048)
    activation: str = one_of(ACTIVATIONS, "quick_gelu")
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    layer_norm_epsilon: float = at_least(0, 1e-5)


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class ClipConfig:
    """Configuration of a CLIP or, with `is_siglip`, a SigLIP; the defaults are those of CLIP ViT-B/32."""

    is_siglip: bool = False
    vocab_size: int = at_least(1, 49_408)
    max_length: int = at_least(1, 77)  # longest text in tokens; positions are learned
    eos_id: int = at_least(0, 49_407)  # CLIP: the first such token represents a text; 2: the highest id does
    image_size: int = at_least(1, 224)  # height and width of an image in pixels
    patch_size: int = at_least(1, 32)
    num_channels: int = at_least(1, 3)
    d_output: int | None = at_least(1, 512)  # size of the vectors that are compared; None: a tower without projection
    text: TowerConfig = dataclasses.field(default_factory=TowerConfig)
    image: TowerConfig = dataclasses.field(default_factory=lambda: TowerConfig(12, 768, 12, 3072))
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        for name, tower in (("text", self.text), ("image", self.image)):
            if tower.d_model % tower.num_heads:
                raise ValueError(f"{name}.d_model={tower.d_model} is not divisible by num_heads={tower.num_heads}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not divisible by patch_size={self.patch_size}")


class TowerOutput(NamedTuple):
    """Outputs of a tower.

    Attributes:
      sequence: vectors of the tokens or patches, [B, S, D]; normalized, except in the image tower of CLIP.
      pooled: one vector per text or image, projected if the tower has a projection, [B, E].
    """

    sequence: Float[Array, "B S D"]
    pooled: Float[Array, "B E"]


class ClipOutput(NamedTuple):
    """Similarities of images and texts.

    Attributes:
      logits: similarity of each image with each text, times a learned scale (SigLIP: plus a learned bias), [B, N].
        CLIP's probabilities are softmaxes of a row or a column, those of SigLIP are sigmoids.
      images: unit vectors of the images, [B, E].
      texts: unit vectors of the texts, [N, E].
    """

    logits: Float[Array, "B N"]
    images: Float[Array, "B E"]
    texts: Float[Array, "N E"]


def _layers(c: TowerConfig, *, dtype: Any, rngs: nnx.Rngs) -> EncoderLayer:
    """Returns the stack of pre-norm layers of a tower."""
    attention = functools.partial(
        MultiHeadAttention,
        c.d_model,
        c.num_heads,
        use_bias=True,
        dropout_rate=c.attention_dropout_rate,
        dtype=dtype,
    )
    residual = functools.partial(Residual, c.d_model, pre_norm=True, epsilon=c.layer_norm_epsilon)
    return stack_layers(
        lambda rngs: EncoderLayer(attention(rngs=rngs), _feed_forward(c, dtype=dtype, rngs=rngs), residual),
        c.num_layers,
        rngs,
    )


def _feed_forward(c: TowerConfig, *, dtype: Any, rngs: nnx.Rngs) -> FeedForward:
    """Returns the feed-forward network of a layer of a tower."""
    return FeedForward(c.d_model, c.d_ff, activation_fn=ACTIVATIONS[c.activation], dtype=dtype, rngs=rngs)


def _projection(c: TowerConfig, d_output: int | None, **options: Any) -> Linear | None:
    """Returns the linear layer over the vector of a text or image, or None without `d_output`."""
    return None if d_output is None else Linear(c.d_model, d_output, **options)


def _run(layers: EncoderLayer, x: Array, rngs: nnx.Rngs | None, **options: Any) -> Float[Array, "B S D"]:
    """Returns the output of the last layer; the options are those of `EncoderLayer`."""
    return scan_layers(lambda layer, x, rngs: layer(x, rngs=rngs, **options), layers, x, rngs)[0]


class TextTower(nnx.Module):
    """Layers over the tokens of a text: causal in CLIP, bidirectional in SigLIP."""

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters for the sizes of `config.text`."""
        c, tower, dtype = checked(config), config.text, jnp.dtype(config.dtype)
        self.embedding = Embedding(c.vocab_size, tower.d_model, init_stddev=0.02, dtype=dtype, rngs=rngs)
        self.positions = LearnedPositions(c.max_length, tower.d_model, init_stddev=0.02, rngs=rngs)
        self.encoder_layers = _layers(tower, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(tower.d_model, epsilon=tower.layer_norm_epsilon)
        self.projection = _projection(tower, c.d_output, use_bias=c.is_siglip, dtype=dtype, rngs=rngs)
        self.config = copy.deepcopy(c)

    def __call__(
        self, tokens: Int[Array, "B T"], token_mask: Bool[Array, "B T"] | None = None, rngs: nnx.Rngs | None = None
    ) -> TowerOutput:
        """Reads texts; each is represented by EOS (CLIP), or by the last position, even if it is padding (SigLIP).

        Raises:
          ValueError: if there are more than `config.max_length` tokens.
        """
        check_tokens(tokens=tokens)
        c, length = self.config, tokens.shape[1]
        if length > c.max_length:
            raise ValueError(f"texts of {length} tokens, but the model has max_length={c.max_length}")
        x = add_bias(self.embedding(tokens), self.positions.table[...][:length])
        options: dict[str, Any] = {} if c.is_siglip else {"is_causal": True}
        if token_mask is not None:
            options["mask"] = token_mask[:, None, None, :]
        x = self.norm(_run(self.encoder_layers, x, rngs, **options))
        if c.is_siglip:
            pooled = x[:, -1]
        else:
            # The first CLIPs name a wrong id, 2. Their EOS is the highest id of a text, which `argmax` finds too.
            is_end = tokens if c.eos_id == 2 else tokens == c.eos_id
            first_end = jnp.argmax(is_end, axis=1)[:, None, None]
            pooled = jnp.take_along_axis(x, first_end, axis=1)[:, 0]
        return TowerOutput(x, pooled if self.projection is None else self.projection(pooled))


class AttentionPooling(nnx.Module):
    """A learned query that attends to all patches, and a feed-forward network (Zhai et al., 2022, section 3.2)."""

    def __init__(self, config: TowerConfig, *, dtype: Any, rngs: nnx.Rngs):
        """Initializes the query ("probe"), the attention and the feed-forward network."""
        c = config
        self.probe = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.d_model,)))
        self.attention = MultiHeadAttention(c.d_model, c.num_heads, use_bias=True, dtype=dtype, rngs=rngs)
        self.feed_forward_residual = Residual(c.d_model, pre_norm=True, epsilon=c.layer_norm_epsilon)
        self.feed_forward = _feed_forward(c, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B D"]:
        """Returns one vector per image."""
        probe = jnp.broadcast_to(self.probe[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return self.feed_forward_residual(self.feed_forward, self.attention(probe, x))[:, 0]


class ImageTower(nnx.Module):
    """Layers over the patches of an image and, in CLIP, a class token."""

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters for the sizes of `config.image`."""
        c, tower, dtype = checked(config), config.image, jnp.dtype(config.dtype)
        num_patches = (c.image_size // c.patch_size) ** 2
        norm = functools.partial(LayerNorm, tower.d_model, epsilon=tower.layer_norm_epsilon)
        self.patches = PatchEmbedding(
            c.num_channels, c.patch_size, tower.d_model, use_bias=c.is_siglip, dtype=dtype, rngs=rngs
        )
        self.class_token = None if c.is_siglip else nnx.Param(jnp.zeros(tower.d_model))
        self.positions = LearnedPositions(num_patches + (not c.is_siglip), tower.d_model, init_stddev=0.02, rngs=rngs)
        self.embedding_norm = None if c.is_siglip else norm()
        self.encoder_layers = _layers(tower, dtype=dtype, rngs=rngs)
        self.norm = norm()
        self.pooling = AttentionPooling(tower, dtype=dtype, rngs=rngs) if c.is_siglip else None
        d_output = None if c.is_siglip else c.d_output  # of a SigLIP, the pooling is the output
        self.projection = _projection(tower, d_output, use_bias=False, dtype=dtype, rngs=rngs)
        self.config = copy.deepcopy(c)

    def __call__(self, images: Float[Array, "B Y X C"], rngs: nnx.Rngs | None = None) -> TowerOutput:
        """Reads images, whose pixels are normalized as in training.

        Raises:
          ValueError: if the images do not have the size and channels of the model.
        """
        c = self.config
        expected = c.image_size, c.image_size, c.num_channels
        if images.shape[1:] != expected:
            raise ValueError(f"images of shape {images.shape[1:]}, but the model reads {expected}: resize them")
        x = self.patches(images)
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], axis=1)
        x = add_bias(x, self.positions.table[...])
        x = _run(self.encoder_layers, x if self.embedding_norm is None else self.embedding_norm(x), rngs)
        if self.pooling is not None:
            x = self.norm(x)
            return TowerOutput(x, self.pooling(x))
        pooled = self.norm(x[:, 0])
        return TowerOutput(x, pooled if self.projection is None else self.projection(pooled))


class Clip(nnx.Module):
    """Both towers, `text` and `image`, and the similarity of their outputs."""

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, or an activation is unknown.
        """
        c = config
        if c.d_output is None or (c.is_siglip and c.d_output != c.image.d_model):
            needed = (
                f"image.d_model={c.image.d_model} in a SigLIP" if c.is_siglip else "the size of the compared vectors"
            )
            raise ValueError(f"d_output={c.d_output} must be {needed}")
        self.text = TextTower(config, rngs=rngs)
        self.image = ImageTower(config, rngs=rngs)
        # Logarithm of the scale of similarities: of 1 / 0.07 (Radford et al.), of 10 with a bias of -10 (Zhai et al.).
        self.log_scale = nnx.Param(jnp.log(jnp.array([10.0 if config.is_siglip else 1 / 0.07])))
        self.bias = nnx.Param(jnp.array([-10.0])) if config.is_siglip else None
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        tokens: Int[Array, "N T"],
        *,
        token_mask: Bool[Array, "N T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> ClipOutput:
        """Compares each image with each text.

        Args:
          images: pixels normalized as in training.
          tokens: texts. CLIP's end with EOS, and padding behind changes nothing; SigLIP's are padded to
            `config.max_length`, and padding is read like other tokens.
          token_mask: tokens that may be attended to; None means all.
          rngs: stream `dropout`; None means evaluation.

        Raises:
          ValueError: if the images do not have the size and channels of the model, or a text is longer than
            `config.max_length`.
        """
        outputs = self.image(images, rngs).pooled, self.text(tokens, token_mask, rngs).pooled
        outputs = [x.astype(jnp.float32) for x in outputs]
        image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in outputs)  # unit vectors
        logits = jnp.einsum("BE,NE->BN", image, text) * jnp.exp(self.log_scale[...])[None]
        return ClipOutput(logits if self.bias is None else logits + self.bias[...][None], image, text)
