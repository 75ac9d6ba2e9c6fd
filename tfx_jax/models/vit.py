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
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

# num_layers, d_model, num_heads (Dosovitskiy et al., 2021, table 1) and patch_size of each published model.
_SIZES = {
    "ViT-B/16": (12, 768, 12, 16),
    "ViT-B/32": (12, 768, 12, 32),
    "ViT-L/16": (24, 1024, 16, 16),
    "ViT-L/32": (24, 1024, 16, 32),
    "ViT-H/14": (32, 1280, 16, 14),
}


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class ViTConfig:
    """Configuration of a Vision Transformer; the defaults are ViT-B/16 with the 1,000 classes of ImageNet."""

    image_size: int = at_least(1, 224)  # height and width of an image in pixels
    patch_size: int = at_least(1, 16)  # height and width of a patch in pixels
    num_channels: int = at_least(1, 3)
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 768)
    num_heads: int = at_least(1, 12)
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.0)  # dropout of each sublayer's output and of patches plus positions
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    activation: str = one_of(ACTIVATIONS, "gelu")  # "gelu" is exact; "gelu_tanh" approximates it
    layer_norm_epsilon: float = at_least(0, 1e-6)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # of every layer
    distillation_token: bool = False  # whether a second token stands behind that of the class, as in DeiT
    distillation_head: bool = False  # whether that token is classified too, and the mean of both logits given
    # Whether a body without a head has a linear layer with tanh over the class token's vector: the hidden layer that
    # the paper's classifier has in pre-training and loses afterwards.
    has_pooler: bool = True
    labels: tuple[str, ...] = tuple(f"LABEL_{index}" for index in range(1000))  # names of the classes
    problem_type: str | None = None  # kept for export to Hugging Face, which chooses a loss by it; unused here
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "image_classifier"
    is_causal: ClassVar[bool] = False
    has_position_bias: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """The number of classes."""
        return len(self.labels)

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.distillation_head and not self.distillation_token:
            raise ValueError("distillation_head=True needs distillation_token=True")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not divisible by patch_size={self.patch_size}")

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU, for the built-in synthetic images of 48 x 48 pixels."""
        del max_length
        self.image_size, self.patch_size, self.num_channels = 48, 12, 3
        self.num_layers, self.d_model, self.num_heads, self.d_ff = 2, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "ViTClassifier":
        return ViTClassifier(self, rngs=rngs)

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "ViTConfig":
        """Returns the configuration of "ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32" or "ViT-H/14".

        Raises:
          ValueError: if `name` is unknown; the message lists the names.
        """
        if name not in _SIZES:
            raise ValueError(f"no published ViT is called {name!r}; there are {', '.join(_SIZES)}")
        num_layers, d_model, num_heads, patch_size = _SIZES[name]
        sizes: dict[str, Any] = {"num_layers": num_layers, "d_model": d_model}
        sizes |= {"num_heads": num_heads, "patch_size": patch_size}
        return cls(**sizes | overrides)


class ViTOutput(NamedTuple):
    """Outputs of the encoder.

    Attributes:
      sequence: vectors of the class token, of the distillation token if there is one, and of the patches, row by row,
        [B, S, D]; S is the number of all of these.
      pooled: output of the pooler, tanh of a linear map of the class token's vector, [B, D]; None without a pooler.
    """

    sequence: Float[Array, "B S D"]
    pooled: Any


class PatchEmbedding(nnx.Module):
    """Linear map from all pixels of a patch to one vector (Dosovitskiy et al., 2021, equation 1)."""

    def __init__(
        self, num_channels: int, patch_size: int, d_model: int, *, use_bias: bool = True, dtype: Any, rngs: nnx.Rngs
    ):
        """Initializes the kernel, [channels, rows, columns, d_model], and a bias of zeros."""
        init = nnx.initializers.lecun_normal(in_axis=(0, 1, 2), out_axis=3)
        shape = (num_channels, patch_size, patch_size, d_model)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(d_model)) if use_bias else None
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B P D"]:
        """Embeds the patches of images, row by row; height and width must be multiples of the patch size."""
        batch, height, width, channels = images.shape
        size, d_model = self.kernel.shape[2:]
        # [B, rows, size, columns, size, C]: y and x index a patch, u and v a pixel in it.
        patches = images.astype(self.dtype).reshape(batch, height // size, size, width // size, size, channels)
        x = jnp.einsum("ByuxvC,CuvD->ByxD", patches, self.kernel[...].astype(self.dtype))
        x = x.reshape(batch, -1, d_model)
        return x if self.bias is None else x + self.bias[...].astype(self.dtype)[None, None]


class ViT(nnx.Module):
    """Pre-norm encoder layers over a class token and the patches of an image.

    Attributes:
      base_model_prefix: the attribute under which `ViTClassifier` holds its encoder.
    """

    base_model_prefix = "vit"

    def __init__(
        self,
        config: ViTConfig,
        *,
        attention_fn: AttentionFn | None = None,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, or the activation is unknown.
        """
        c = checked(config)
        c.attention.check(num_heads=c.num_heads, d_k=c.d_model // c.num_heads)
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

        def make_layer(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            """Makes a layer with this attention."""
            core = attention_fn or layer_attention.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs)
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
        """Encodes images with bidirectional self-attention between patches.

        Args:
          images: [B, height, width, channels], normalized as in training.
          interpolate: whether to accept images whose height and width are other multiples of the patch size than
            `config.image_size`; positions are then interpolated (section 3.2), see `interpolate_positions`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          A `ViTOutput`; with `return_attention` the pair (output, {"encoder/0/self": [B, N, S, S], ...}).

        Raises:
          ValueError: if the number of channels is wrong, the size differs from `config.image_size` without
            `interpolate`, or height or width is not a multiple of the patch size.
        """
        c = self.config
        _, height, width, channels = images.shape
        size, model_size = (height, width), (c.image_size, c.image_size)
        if channels != c.num_channels:
            raise ValueError(f"images must have num_channels={c.num_channels} channels, got {channels}")
        if size != model_size and not interpolate:
            raise ValueError(
                f"images of {size} pixels, but the model's are {model_size}: resize them, or pass interpolate=True"
            )
        positions = self.positions.table[...]
        if size != model_size:
            old, new = _grid(model_size, c.patch_size), _grid(size, c.patch_size)
            # The tokens of class and distillation are in front and keep their vectors; `interpolate_positions` copies
            # one of them.
            num_front_tokens = int(self.distillation_token is not None)
            patches = interpolate_positions(positions[num_front_tokens:], old, new)
            positions = jnp.concatenate([positions[:num_front_tokens], patches])
        x = self.patches(images)
        tokens = [token for token in (self.class_token, self.distillation_token) if token is not None]
        token_shape = (x.shape[0], 1, x.shape[2])
        front = [jnp.broadcast_to(token[...].astype(x.dtype), token_shape) for token in tokens]
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
    """A `ViT` encoder in `self.vit` with a linear layer over its class token: classifies images into `config.labels`.

    The linear layer is initialized to zero, as in the paper's fine-tuning (section 3.2).
    """

    heads: ClassVar[tuple[str, ...]] = ("classifier", "distillation_classifier")

    def __init__(self, config: ViTConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters; arguments and errors are those of `ViT`, and empty `labels` are an error."""
        if not config.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        self.vit = ViT(dataclasses.replace(config, has_pooler=False), attention_fn=attention_fn, rngs=rngs)
        options: dict[str, Any] = {"kernel_init": nnx.initializers.zeros_init(), "dtype": jnp.float32}
        make_classifier = functools.partial(nnx.Linear, config.d_model, len(config.labels), **options)
        self.classifier = make_classifier(rngs=rngs)
        self.distillation_classifier = make_classifier(rngs=rngs) if config.distillation_head else None
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        interpolate: bool = False,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Returns float32 logits, [B, number of labels]; with `return_attention` the pair (logits, maps).

        Arguments, maps and errors are those of `ViT`.
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
    """Interpolates learned positions for images of another size (Dosovitskiy et al., 2021, section 3.2).

    Both grids cover the same image: their outer corners coincide, not the centers of their corner patches. Outside the
    grid, the nearest patch is repeated. A smaller grid is sampled without anti-aliasing.

    Args:
      table: vectors of the class token, which is copied, and then of the patches, row by row.
      grid: rows and columns of patches in `table`.
      new_grid: rows and columns of patches in the result.
      method: "bicubic" (Keys, 1981, with a = -0.75, as in transformers) or "bilinear".

    Returns:
      The table for the new grid, float32, [1 + new_grid[0] * new_grid[1], D].

    Raises:
      ValueError: if `table` does not have 1 + grid[0] * grid[1] vectors, or the method is unknown.

    >>> table = jnp.array([[9.0], [0.0], [1.0]])
    >>> interpolate_positions(table, (1, 2), (1, 4), method="bilinear")[:, 0].tolist()
    [9.0, 0.0, 0.25, 0.75, 1.0]
    """
    if table.shape[0] != 1 + grid[0] * grid[1]:
        raise ValueError(
            f"table has {table.shape[0]} positions, but a class token and {grid} patches need {1 + grid[0] * grid[1]}"
        )
    if method not in _KERNELS:
        raise ValueError(f"method must be one of {', '.join(_KERNELS)}, got {method!r}")
    patches = table[1:].reshape(*grid, -1)
    rows, columns = (_resampling(old, new, method) for old, new in zip(grid, new_grid, strict=True))
    # Interpolation is separable: a matrix [new, old] for each axis.
    patches = jnp.einsum("Yy,Xx,yxD->YXD", rows, columns, patches, precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([table[:1], patches.reshape(-1, table.shape[1])])


def _cubic(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Returns the weight that bicubic interpolation gives a sample at each distance, in samples (Keys, 1981)."""
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


_KERNELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bicubic": _cubic,
    "bilinear": lambda distance: np.maximum(1 - distance, 0),
}


def _resampling(old: int, new: int, method: str) -> Float[np.ndarray, "new old"]:
    """Returns the matrix that interpolates `old` samples of a line to `new` samples of the same line."""
    centers = (np.arange(new) + 0.5) * old / new - 0.5  # of the new samples, in units of the old ones
    matrix = np.zeros((new, old))
    for offset in (-1, 0, 1, 2):
        neighbor = np.floor(centers) + offset
        weights = _KERNELS[method](np.abs(centers - neighbor))
        column = np.clip(neighbor, 0, old - 1).astype(int)  # outside the line, the last sample is repeated
        np.add.at(matrix, (np.arange(new), column), weights)
    return matrix.astype(np.float32)


def _grid(size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Returns the numbers of rows and columns of patches in an image of `size`, (height, width) in pixels."""
    if size[0] % patch_size or size[1] % patch_size:
        raise ValueError(f"images of {size} pixels do not divide into patches of patch_size={patch_size}")
    return size[0] // patch_size, size[1] // patch_size
