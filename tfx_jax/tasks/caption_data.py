"""Images to describe: built-in coloured shapes."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from tfx_jax.data.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.text_files import check_batch
from tfx_jax.toy_shapes import IMAGE_SIZE, MAX_WORDS, draw_scene


class Captioned(NamedTuple):
    """An image and what it shows.

    Attributes:
      image: red, green and blue, [height, width, 3] uint8.
      caption: a sentence.
      boxes: for each word of the caption, rows and columns of the object that it names: (top, left, bottom, right), the
        last two exclusive, or zeros; [words, 4] int32, or [0, 4] where nobody knows.
    """

    image: np.ndarray
    caption: str = ""
    boxes: np.ndarray = np.zeros((0, 4), np.int32)


class CaptionedImages(Protocol):
    """Random access to images with captions."""

    def __len__(self) -> int:
        """The number of images."""
        ...

    def __getitem__(self, index: int) -> Captioned:
        """The image with this index."""
        ...

    def captions(self) -> Iterator[str]:
        """Yields captions to make a vocabulary of."""
        ...


@dataclasses.dataclass
class CaptionData:
    """Which images there are, and how much of them makes a batch."""

    dataset: str = one_of(("shapes",), "shapes")  # built in, see `tfx_jax.toy_shapes`
    seed: int = at_least(0, 0)  # of the shapes; the training's seed changes none
    num_train: int = at_least(1, 1_000_000)  # shapes: images
    num_heldout: int = at_least(1, 1_000)  # of the validation split, and of the test split
    max_length: int = at_least(1, MAX_WORDS + 1)  # tokens of a caption, its end included
    tokens_per_batch: int = at_least(1, 1_024)  # positions of the captions of a global batch, padding included

    def has_split(self, split: Split) -> bool:
        """Tells whether there is a split."""
        return split in SPLITS

    def load(self, split: Split) -> CaptionedImages:
        """Returns the images of a split."""
        return ShapeImages(self, split)

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        check_batch(self, what="caption")
        if self.max_length <= MAX_WORDS:
            raise UserError(
                f"config.task.data.max_length={self.max_length} must be more than {MAX_WORDS}, as many words as a "
                "caption may have"
            )
        if (size := getattr(model, "image_size", IMAGE_SIZE)) != IMAGE_SIZE:
            raise UserError(f"config.model.image_size={size} must be {IMAGE_SIZE}, which the images of shapes have")

    def tiny(self) -> None:
        """Sets a little that is quickly drawn."""
        self.dataset, self.num_train, self.num_heldout = "shapes", 64, 16
        self.max_length, self.tokens_per_batch = MAX_WORDS + 1, 256


class ShapeImages:
    """Coloured shapes, of which each image depends on the seed, the split and its index alone."""

    def __init__(self, data: CaptionData, split: Split):
        """Draws nothing yet."""
        self._key, self._held_out = (data.seed, SPLITS.index(split)), split != "train"
        self._count = data.num_train if split == "train" else data.num_heldout

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Captioned:
        if not 0 <= index < self._count:
            raise IndexError(index)
        scene = draw_scene((*self._key, index), held_out=self._held_out)
        boxes = [(0, 0, 0, 0) if number < 0 else scene.shapes[number].box for number in scene.named]
        return Captioned(scene.image, " ".join(scene.words), np.array(boxes, np.int32))

    def captions(self) -> Iterator[str]:
        """Yields enough of them to have each word."""
        for index in range(min(self._count, 1_000)):
            yield self[index].caption
