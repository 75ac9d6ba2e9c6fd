"""The Vision Transformer: an encoder whose tokens are the patches of an image (Dosovitskiy et al., 2021).

With `distillation_token` it is DeiT (Touvron et al., 2021).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.models.config import DTYPES, layer_pattern
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

# Layers, width and heads of Dosovitskiy et al. (2021), table 1, and the sides of the patches that they report.
_SIZES = {
    "ViT-B/16": (12, 768, 12, 16),
    "ViT-B/32": (12, 768, 12, 32),
    "ViT-L/16": (24, 1024, 16, 16),
    "ViT-L/32": (24, 1024, 16, 32),
    "ViT-H/14": (32, 1280, 16, 14),
}


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class ViTConfig:
    """Sizes of a Vision Transformer; the defaults are those of ViT-B/16 with the classes of ImageNet."""

    image_size: int = at_least(1, 224)  # pixels, of height and width
    patch_size: int = at_least(1, 16)  # pixels, likewise
    num_channels: int = at_least(1, 3)
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 768)
    num_heads: int = at_least(1, 12)
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.0)  # of each sublayer's output and of the sums of patches and positions
    attention_dropout_rate: float = fraction(0.0)  # of the attention weights
    activation: str = one_of(ACTIVATIONS, "gelu")  # "gelu" is the exact one
    layer_norm_epsilon: float = at_least(0, 1e-6)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # of every layer
    distillation_token: bool = False  # whether a second token stands behind that of the class, as in DeiT
    distillation_head: bool = False  # whether that token is classified too, and the mean of both logits given
    # Whether a body without a head has a linear layer with tanh over the class token's vector: the hidden layer that
    # the paper's classifier has in pre-training and loses afterwards.
    has_pooler: bool = True
    labels: tuple[str, ...] = tuple(f"LABEL_{index}" for index in range(1000))  # names of the classes
    problem_type: str | None = None  # Hugging Face's word for the loss of a classifier; nothing here depends on it
    dtype: str = one_of(DTYPES, "float32")  # of the computation; parameters, logits and statistics stay float32
    remat: str = one_of(REMATS, "none")  # what the backward pass computes again: "full" layers, all but "dots"
    unroll: bool = False  # whether layers are compiled one by one: slow to compile, faster on a TPU, see `scan_layers`

    kind: ClassVar[str] = "image_classifier"
    is_causal: ClassVar[bool] = False
    has_position_bias: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """The number of classes."""
        return len(self.labels)

    def validate(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.distillation_head and not self.distillation_token:
            raise ValueError("distillation_head=True needs distillation_token=True")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not divisible by patch_size={self.patch_size}")

    def tiny(self, *, max_length: int) -> None:
        """See `tfx_jax.models.config.ModelConfig`; images are those that are built in."""
        del max_length
        self.image_size, self.patch_size, self.num_channels = 48, 12, 3
        self.num_layers, self.d_model, self.num_heads, self.d_ff = 2, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "ViTClassifier":
        return ViTClassifier(self, rngs=rngs)

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "ViTConfig":
        """The sizes of a published model: "ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32" or "ViT-H/14".

        Raises:
          ValueError: for another name.
        """
        if name not in _SIZES:
            raise ValueError(f"no published ViT is called {name!r}; there are {', '.join(_SIZES)}")
        num_layers, d_model, num_heads, patch_size = _SIZES[name]
        sizes: dict[str, Any] = {"num_layers": num_layers, "d_model": d_model}
        sizes |= {"num_heads": num_heads, "patch_size": patch_size}
        return cls(**sizes | overrides)


class ViTOutput(NamedTuple):
    """What an image becomes.

    Attributes:
      sequence: a vector for the class token and, row by row, for each patch, [B, S, D], S = 1 + patches.
      pooled: one for the whole image, made from that of the class token, [B, D]; None without a pooler.
    """

    sequence: Float[Array, "B S D"]
    pooled: Any


class PatchEmbedding(nnx.Module):
    """The linear map of all pixels of a patch (Dosovitskiy et al., 2021, equation 1)."""

    def __init__(self, num_channels: int, patch_size: int, d_model: int, *, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=(0, 1, 2), out_axis=3)
        shape = (num_channels, patch_size, patch_size, d_model)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(d_model))
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B P D"]:
        """Embeds the patches of images, row by row; both sides are whole numbers of patches."""
        batch, height, width, channels = images.shape
        size, d_model = self.kernel.shape[2:]
        patches = images.astype(self.dtype).reshape(batch, height // size, size, width // size, size, channels)
        x = jnp.einsum("ByuxvC,CuvD->ByxD", patches, self.kernel[...].astype(self.dtype))
        return x.reshape(batch, -1, d_model) + self.bias[...].astype(self.dtype)[None, None]


class ViT(nnx.Module):
    """Pre-norm encoder layers over a class token and the patches of an image."""

    def __init__(
        self,
        config: ViTConfig,
        *,
        attention_fn: AttentionFn | None = None,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters.

        Args:
          config: the sizes.
          attention_fn: the attention of every layer, with the signature of `dot_product_attention`; None means what
            `config.attention` names.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other, or the activation has no such name.
        """
        c = config
        c.attention.check()
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation={c.activation!r} is none of {', '.join(ACTIVATIONS)}")
        num_rows, num_columns = _grid((c.image_size, c.image_size), c.patch_size)
        dtype = jnp.dtype(c.dtype)
        attention = functools.partial(
            MultiHeadAttention,
            c.d_model,
            c.num_heads,
            use_bias=True,
            dropout_rate=c.attention_dropout_rate,
            dtype=dtype,
        )

        feed_forward = functools.partial(
            FeedForward,
            c.d_model,
            4 * c.d_model if c.d_ff is None else c.d_ff,
            activation_fn=ACTIVATIONS[c.activation],
            dtype=dtype,
        )
        residual = functools.partial(
            Residual, c.d_model, dropout_rate=c.dropout_rate, pre_norm=True, epsilon=c.layer_norm_epsilon
        )

        def make_layer(own: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            core = attention_fn or own.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs)
            return EncoderLayer(attention(attention_fn=core, rngs=rngs), feed_forward(rngs=rngs), residual)

        self.patches = PatchEmbedding(c.num_channels, c.patch_size, c.d_model, dtype=dtype, rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros(c.d_model))
        self.distillation_token = nnx.Param(jnp.zeros(c.d_model)) if c.distillation_token else None
        num_positions = 1 + c.distillation_token + num_rows * num_columns
        self.positions = LearnedPositions(num_positions, c.d_model, init_stddev=0.02, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(make_layer, c.attention), c.num_layers, rngs)
        self.norm = LayerNorm(c.d_model, epsilon=c.layer_norm_epsilon)
        self.pooler = nnx.Linear(c.d_model, c.d_model, dtype=dtype, rngs=rngs) if c.has_pooler else None
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        interpolate: bool = False,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Reads images; every patch sees all others.

        Args:
          images: [B, height, width, channels], normalized as the model was trained.
          interpolate: whether they may have another size than the configuration's, any number of patches high and
            wide; positions are then interpolated (section 3.2), see `interpolate_positions`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return every attention map.

        Returns:
          A `ViTOutput`; with `return_attention` a pair of it and {"encoder/0/self": [B, N, S, S], ...}.

        Raises:
          ValueError: if the images have another size, or none of whole patches, or another number of channels.
        """
        c = self.config
        _, height, width, channels = images.shape
        size, own_size = (height, width), (c.image_size, c.image_size)
        if channels != c.num_channels:
            raise ValueError(f"images of {channels} channels, but the model has num_channels={c.num_channels}")
        if size != own_size and not interpolate:
            raise ValueError(f"images of {size} pixels, but the model's are {own_size}: resize, or interpolate=True")
        positions = self.positions.table[...]
        if size != own_size and self.distillation_token is not None:
            # The vector of the distillation token keeps its place, as that of the class token does.
            patches = interpolate_positions(positions[1:], _grid(own_size, c.patch_size), _grid(size, c.patch_size))
            positions = jnp.concatenate([positions[:1], patches])
        elif size != own_size:
            positions = interpolate_positions(positions, _grid(own_size, c.patch_size), _grid(size, c.patch_size))
        x = self.patches(images)
        tokens = [token for token in (self.class_token, self.distillation_token) if token is not None]
        front = [jnp.broadcast_to(token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2])) for token in tokens]
        x = add_bias(jnp.concatenate([*front, x], axis=1), positions)
        x = drop(x, c.dropout_rate, rngs)

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            return layer(x, rngs=rngs, return_weights=return_attention)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=c.remat, unroll=c.unroll)
        x = self.norm(x)
        output = ViTOutput(x, None if self.pooler is None else jnp.tanh(self.pooler(x[:, 0])))
        if not return_attention:
            return output
        return output, {f"encoder/{index}/self": weights for index, weights in enumerate(maps["self"])}


class ViTClassifier(nnx.Module):
    """A Vision Transformer, as `vit`, and a linear layer over its class token: gives an image one of `config.labels`.

    The linear layer starts at zero, as the paper has it for fine-tuning (section 3.2).
    """

    def __init__(self, config: ViTConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters; arguments and errors are those of a `ViT`, and there must be labels."""
        if not config.labels:
            raise ValueError("a model that classifies needs labels, but its configuration has none")
        self.vit = ViT(dataclasses.replace(config, has_pooler=False), attention_fn=attention_fn, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.classifier = nnx.Linear(
            config.d_model, len(config.labels), kernel_init=zeros, dtype=jnp.float32, rngs=rngs
        )
        again = functools.partial(nnx.Linear, config.d_model, len(config.labels), kernel_init=zeros, dtype=jnp.float32)
        self.distillation_classifier = again(rngs=rngs) if config.distillation_head else None
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        interpolate: bool = False,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores images: float32 logits, [B, labels]; with `return_attention` a pair of these and the maps.

        Arguments, maps and errors are those of a `ViT`.
        """
        result = self.vit(images, interpolate=interpolate, rngs=rngs, return_attention=return_attention)
        output, maps = result if return_attention else (result, None)
        logits = self.classifier(output.sequence[:, 0])
        if self.distillation_classifier is not None:
            logits = (logits + self.distillation_classifier(output.sequence[:, 1])) / 2
        return (logits, maps) if return_attention else logits


def interpolate_positions(
    table: Float[Array, "P D"],
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    method: str = "bicubic",
) -> Float[Array, "Q D"]:
    """Positions for images of another size, from those learned (Dosovitskiy et al., 2021, section 3.2).

    Patches keep their places in the image: the corners of both grids coincide, not the centers of their corner
    patches. Beyond the border the last patch is repeated, and a smaller grid is not smoothed before.

    Args:
      table: the vector of the class token, which stays, then those of the patches, row by row.
      grid: rows and columns of patches that it has vectors for.
      new_grid: rows and columns wanted.
      method: "bicubic" (Keys, 1981, with a = -0.75, as transformers has it) or "bilinear".

    Returns:
      The table for the new grid, float32.

    Raises:
      ValueError: if the table has not as many vectors as the grid says, or there is no such method.

    >>> table = jnp.array([[9.0], [0.0], [1.0]])
    >>> interpolate_positions(table, (1, 2), (1, 4), method="bilinear")[:, 0].tolist()
    [9.0, 0.0, 0.25, 0.75, 1.0]
    """
    if table.shape[0] != 1 + grid[0] * grid[1]:
        raise ValueError(
            f"{table.shape[0]} positions, but a class token and {grid} patches need {1 + grid[0] * grid[1]}"
        )
    if method not in _KERNELS:
        raise ValueError(f"method={method!r} is none of {', '.join(_KERNELS)}")
    patches = table[1:].reshape(*grid, -1)
    rows, columns = (_resampling(old, new, method) for old, new in zip(grid, new_grid, strict=True))
    patches = jnp.einsum("Yy,Xx,yxD->YXD", rows, columns, patches, precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([table[:1], patches.reshape(-1, table.shape[1])])


def _cubic(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


_KERNELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bicubic": _cubic,
    "bilinear": lambda distance: np.maximum(1 - distance, 0),
}


def _resampling(old: int, new: int, method: str) -> Float[np.ndarray, "new old"]:
    """What every one of `old` points on a line contributes to each of `new` on the same line."""
    places = (np.arange(new) + 0.5) * old / new - 0.5
    matrix = np.zeros((new, old))
    for offset in (-1, 0, 1, 2):
        neighbor = np.floor(places) + offset
        weights = _KERNELS[method](np.abs(places - neighbor))
        np.add.at(matrix, (np.arange(new), np.clip(neighbor, 0, old - 1).astype(int)), weights)
    return matrix.astype(np.float32)


def _grid(size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches."""
    if size[0] % patch_size or size[1] % patch_size:
        raise ValueError(f"images of {size} pixels do not divide into patches of patch_size={patch_size}")
    return size[0] // patch_size, size[1] // patch_size
