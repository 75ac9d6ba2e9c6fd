"""Images to classify: built-in shapes to count, handwritten digits, or folders of files."""

import dataclasses
import importlib
from typing import NamedTuple, Protocol, cast

import numpy as np
from etils import epath

from tfx_jax.data.images import IMAGE_SUFFIXES, read_centre
from tfx_jax.data.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.models.vit import ViTConfig
from tfx_jax.tasks.text_files import check_batch
from tfx_jax.toy_shapes import IMAGE_SIZE, draw_scene


class LabelledImage(NamedTuple):
    """An image and its class.

    Attributes:
      image: [height, width, channels] uint8.
      label: the name of its class.
    """

    image: np.ndarray
    label: str


class LabelledImages(Protocol):
    """Random access to images with classes."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all classes."""
        ...

    def __len__(self) -> int:
        """The number of images."""
        ...

    def __getitem__(self, index: int) -> LabelledImage:
        """The image with this index."""
        ...


@documented
@dataclasses.dataclass
class ImageData:
    """Which images there are, how many of them make a batch, and how training changes them."""

    # shapes: built in, see `tfx_jax.toy_shapes`, of which there are one to three; digits: those of scikit-learn, 8 x 8
    # pixels, grey; folder: files in a folder for each class, such as train/cat/1.png
    dataset: str = one_of(("shapes", "digits", "folder"), "shapes")
    seed: int = at_least(0, 0)  # of the shapes, and of the splits of the digits; the training's seed changes none
    num_train: int = at_least(1, 20_000)  # shapes: images
    num_heldout: int = at_least(1, 1_000)  # shapes: images of the validation split, and of the test split
    data_dir: str = ""  # folder: that the names below are relative to
    train_folder: str = "train"
    validation_folder: str = "val"
    test_folder: str = ""
    image_size: int = at_least(1, IMAGE_SIZE)  # pixels of both sides; of files, the middle is cut out and resized
    num_channels: int = at_least(1, 3)  # 3 for red, green and blue, 1 for grey
    max_shift: int = at_least(0, 0)  # training: pixels that an image is moved by, at most, along each axis
    is_mirrored: bool = False  # training: whether every other image has its left and right exchanged
    tokens_per_batch: int = at_least(1, 64)  # images of a global batch

    @property
    def max_length(self) -> int:
        """What an image counts in `tokens_per_batch`."""
        return 1

    def has_split(self, split: Split) -> bool:
        """Tells whether there is a split."""
        return self.dataset != "folder" or bool(self._folder(split))

    def load(self, split: Split) -> LabelledImages:
        """Returns the images of a split.

        Raises:
          UserError: if there are none, or scikit-learn is not installed that has the digits.
        """
        if self.dataset == "shapes":
            return CountedShapes(self, split)
        if self.dataset == "digits":
            return Digits(self.seed, split)
        return FolderImages(epath.Path(self.data_dir) / self._folder(split), self.image_size, self.num_channels)

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        check_batch(self, what="image")
        name, of_model = "config.task.data", cast(ViTConfig, model)
        for field in ("image_size", "num_channels"):
            if getattr(of_model, field) != getattr(self, field):
                raise UserError(
                    f"config.model.{field}={getattr(of_model, field)} is not {name}.{field}={getattr(self, field)}"
                )
        size, channels = {"shapes": (IMAGE_SIZE, 3), "digits": (8, 1)}.get(self.dataset, (self.image_size, 0))
        if self.image_size != size:
            raise UserError(f"{name}.image_size={self.image_size} must be {size}, the size of {self.dataset}")
        if channels and self.num_channels != channels:
            raise UserError(f"{name}.num_channels={self.num_channels} must be {channels}, those of {self.dataset}")
        if self.num_channels not in (1, 3):
            raise UserError(f"{name}.num_channels={self.num_channels} must be 3, red, green and blue, or 1, grey")
        if self.max_shift >= self.image_size:
            raise UserError(f"{name}.max_shift={self.max_shift} would move images of {self.image_size} pixels away")

    def tiny(self) -> None:
        """Sets a few images that are quickly drawn."""
        self.dataset, self.image_size, self.num_channels = "shapes", IMAGE_SIZE, 3
        self.num_train, self.num_heldout, self.tokens_per_batch = 64, 16, 16

    def _folder(self, split: Split) -> str:
        return getattr(self, f"{split}_folder")


class CountedShapes:
    """Coloured shapes, of which each image depends on the seed, the split and its index alone; the class is how many.

    Attributes:
      labels: see `LabelledImages`.
    """

    labels = ("1", "2", "3")

    def __init__(self, data: ImageData, split: Split):
        """Draws nothing yet."""
        self._key, self._held_out = (data.seed, SPLITS.index(split)), split != "train"
        self._count = data.num_train if split == "train" else data.num_heldout

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> LabelledImage:
        if not 0 <= index < self._count:
            raise IndexError(index)
        scene = draw_scene((*self._key, index), held_out=self._held_out)
        return LabelledImage(scene.image, str(len(scene.shapes)))


class Digits:
    """The 1,797 handwritten digits that come with scikit-learn, of Alpaydin and Kaynak (1998).

    They are shuffled, and a tenth is held out for validation, another for the test.

    Attributes:
      labels: see `LabelledImages`.
    """

    labels = tuple("0123456789")

    def __init__(self, seed: int, split: Split):
        """Reads the digits.

        Raises:
          UserError: if scikit-learn is not installed.
        """
        try:
            datasets = importlib.import_module("sklearn.datasets")
        except ImportError:
            raise UserError('dataset="digits" is in scikit-learn: pip install scikit-learn') from None
        images, labels = datasets.load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        count = len(labels) // 10 + 1
        held_out = {"train": order[2 * count :], "validation": order[:count], "test": order[count : 2 * count]}
        chosen = held_out[split]
        self._images = np.rint(images[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        self._numbers = labels[chosen]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> LabelledImage:
        return LabelledImage(self._images[index], self.labels[self._numbers[index]])


class FolderImages:
    """Files in a folder for each class, as torchvision's `ImageFolder` has them, each read when it is asked for.

    Attributes:
      labels: the names of the folders, in alphabetical order.
    """

    def __init__(self, folder: epath.Path, size: int, num_channels: int):
        """Lists the files, at any depth below the folder of their class; others than images are passed over.

        Args:
          folder: with a folder for each class; those whose names begin with a dot are none.
          size: pixels of both sides of what is read.
          num_channels: 3 or 1.

        Raises:
          UserError: if there is no such folder, or a class has no image.
        """
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
        classes = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        if not classes:
            raise UserError(f"{folder} has no folder for each class, such as {folder / 'cat'}")
        self.labels = tuple(path.name for path in classes)
        self._files: list[tuple[epath.Path, str]] = []
        for path in classes:
            found = _image_files(path)
            if not found:
                raise UserError(f"{path} has no image, a file that ends with one of {', '.join(IMAGE_SUFFIXES)}")
            self._files += [(file, path.name) for file in found]
        self._size, self._num_channels = size, num_channels

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> LabelledImage:
        """The image with this index.

        Raises:
          UserError: if it cannot be read.
        """
        path, label = self._files[index]
        return LabelledImage(read_centre(path, self._size, self._num_channels), label)


def _image_files(folder: epath.Path) -> list[epath.Path]:
    """All images below a folder, in alphabetical order of their paths, wherever it is."""
    found: list[epath.Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found += _image_files(path)
        elif path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("."):
            found.append(path)
    return found
