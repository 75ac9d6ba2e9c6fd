"""Images to describe: built-in coloured shapes, or those of files."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from etils import epath

from tfx_jax.data.images import read_image
from tfx_jax.data.splits import SPLITS, Split
from tfx_jax.data.text import PairSource, read_tsv
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.text_files import check_batch, has_file, split_path
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


@documented
@dataclasses.dataclass
class CaptionData:
    """Which images there are, and how much of them makes a batch."""

    dataset: str = one_of(("shapes", "files"), "shapes")  # the first built in, see `tfx_jax.toy_shapes`
    seed: int = at_least(0, 0)  # of the shapes; the training's seed changes none
    num_train: int = at_least(1, 1_000_000)  # shapes: images
    num_heldout: int = at_least(1, 1_000)  # shapes: images of the validation split, and of the test split
    data_dir: str = ""  # files: the folder that the names below, and those in them, are relative to
    # files: lines of the form file of an image, TAB, caption; several of them may name one image
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    image_size: int = at_least(1, IMAGE_SIZE)  # pixels of both sides of every image, as the model has it
    tokenizer: str = one_of(("words", "sentencepiece", "characters"), "words")
    max_length: int = at_least(1, MAX_WORDS + 1)  # tokens of a caption, its end included; longer ones are cut
    tokens_per_batch: int = at_least(1, 1_024)  # positions of the captions of a global batch, padding included

    @property
    def knows_objects(self) -> bool:
        """Whether there is a box for each word that names an object."""
        return self.dataset == "shapes"

    def has_split(self, split: Split) -> bool:
        """Tells whether there is a split."""
        return has_file(self, split)

    def load(self, split: Split) -> CaptionedImages:
        """Returns the images of a split.

        Raises:
          UserError: if its table cannot be read.
        """
        if self.dataset == "shapes":
            return ShapeImages(self, split)
        return FileImages(read_tsv(split_path(self, split)), epath.Path(self.data_dir), self.image_size)

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        check_batch(self, what="caption")
        name = "config.task.data"
        if (size := getattr(model, "image_size", self.image_size)) != self.image_size:
            raise UserError(f"config.model.image_size={size} is not {name}.image_size={self.image_size}")
        if self.dataset == "files":
            return
        if self.image_size != IMAGE_SIZE:
            raise UserError(
                f"{name}.image_size={self.image_size} must be {IMAGE_SIZE}, the size of the built-in images"
            )
        if self.tokenizer != "words":
            raise UserError(f'{name}.tokenizer must be "words" for shapes: each word has its own box')
        if self.max_length <= MAX_WORDS:
            raise UserError(
                f"{name}.max_length={self.max_length} must be more than {MAX_WORDS}, the words of the longest caption"
            )

    def tiny(self) -> None:
        """Sets a little that is quickly drawn."""
        self.dataset, self.tokenizer, self.image_size = "shapes", "words", IMAGE_SIZE
        self.num_train, self.num_heldout = 64, 16
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


class FileImages:
    """Images of a table of files and captions, each read when it is asked for."""

    def __init__(self, table: PairSource, folder: epath.Path, size: int):
        """Takes the table, of which nothing but captions is read yet.

        Args:
          table: files as sources, captions as targets.
          folder: that the files are relative to.
          size: pixels that both sides of each image must have.
        """
        self._table, self._folder, self._size = table, folder, size

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Captioned:
        """The image with this index.

        Raises:
          UserError: if it cannot be read, or has another size.
        """
        pair = self._table[index]
        return Captioned(read_image(self._folder / pair["source"], self._size), pair["target"])

    def captions(self) -> Iterator[str]:
        """Yields all."""
        for index in range(len(self)):
            yield self._table[index]["target"]
