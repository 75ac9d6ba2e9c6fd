"""Attention pooling of patches: classifies an image by a weighted mean of its patches (Ilse et al., 2018)."""

import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.structured import structured_pooling
from tfx_jax.functional.layers import add_bias
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.vit import PatchEmbedding
from tfx_jax.nn.basic import LearnedPositions, Linear, drop


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class PatchPoolingConfig:
    """Configuration of a classifier by attention-based pooling (https://arxiv.org/abs/1802.04712).

    The paper classifies a bag of instances; here an image is the bag, and its patches are the instances. The weights
    are those of equation 8, without the gate of equation 9.

    Differences from the paper, table 5: an instance is embedded by one linear layer and ReLU, not by convolutions.
    Patches have learned positions, because an image, unlike a bag, has an order. The defaults of `d_model` and `d_ff`
    are the table's 500 and 128; the other sizes are those of an image of the built-in shapes.
    """

    image_size: int = at_least(1, 48)  # height and width of an image in pixels
    patch_size: int = at_least(1, 6)  # height and width of a patch in pixels
    num_channels: int = at_least(1, 3)
    d_model: int = at_least(1, 500)  # size of the vector of a patch and of the pooled vector, the paper's M
    d_ff: int = at_least(1, 128)  # hidden units of the score of a patch, the paper's L
    dropout_rate: float = fraction(0.0)  # dropout of the pooled vector
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # names of the classes; set by the task
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, weights, logits: float32

    kind: ClassVar[str] = "image_classifier"

    @property
    def vocab_size(self) -> int:
        """The number of classes."""
        return len(self.labels)

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not divisible by patch_size={self.patch_size}")

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU, for the built-in synthetic images of 48 x 48 pixels."""
        del max_length
        self.image_size, self.patch_size, self.num_channels = 48, 12, 3
        self.d_model, self.d_ff = 32, 16

    def make(self, *, rngs: nnx.Rngs) -> "PatchPooling":
        return PatchPooling(self, rngs=rngs)


class PatchPooling(nnx.Module):
    """Embeds the patches of an image, pools them by the attention of one learned query, and classifies linearly."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)  # what adapters leave trainable

    def __init__(self, config: PatchPoolingConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, or there are no labels.
        """
        c = checked(config)
        if not c.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        self.patches = PatchEmbedding(c.num_channels, c.patch_size, c.d_model, dtype=jnp.dtype(c.dtype), rngs=rngs)
        self.positions = LearnedPositions(c.num_patches, c.d_model, init_stddev=0.02, rngs=rngs)
        self.key = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (c.d_model, c.d_ff), jnp.float32))
        self.query = nnx.Param(jnp.zeros(c.d_ff))  # all scores are zero: the pooling starts as the mean
        self.classifier = Linear(c.d_model, len(c.labels), rngs=rngs)
        self.config = copy.deepcopy(c)

    def __call__(
        self, images: Float[Array, "B Y X C"], *, rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> Any:
        """Classifies images into `config.labels`.

        Args:
          images: [B, height, width, channels], normalized as in training.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention weights.

        Returns:
          float32 logits, [B, number of labels]; with `return_attention` the pair (logits,
          {"pool/0/cross": [B, 1, 1, P]}), the weights of the P patches, row by row.

        Raises:
          ValueError: if size or channels of the images are not those of `config`.
        """
        c = self.config
        if images.shape[1:] != (c.image_size, c.image_size, c.num_channels):
            raise ValueError(
                f"images must have image_size={c.image_size} rows and columns and num_channels={c.num_channels} "
                f"channels, got shape {images.shape[1:]}"
            )
        patches = jax.nn.relu(add_bias(self.patches(images), self.positions.table[...]))
        pooled, weights = structured_pooling(patches, self.key[...], self.query[...][:, None])
        logits = self.classifier(drop(pooled[:, 0], c.dropout_rate, rngs))
        return (logits, {"pool/0/cross": weights[:, :, None]}) if return_attention else logits
