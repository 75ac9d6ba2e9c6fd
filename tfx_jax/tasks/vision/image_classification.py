"""Image classification: labeled images from files or built-in sets."""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Float, UInt8

from tfx_jax.data.batching.batches import BatchSpec, Example, LazyExamples, LoaderOptions
from tfx_jax.data.sources.images import IMAGE_SUFFIXES, image_of, read_center
from tfx_jax.data.sources.splits import SPLITS, Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.rollout import attention_rollout
from tfx_jax.models.config import MakesModel, ModelConfig, require_kind
from tfx_jax.synthetic.shapes import IMAGE_SIZE, draw_scene
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.classification import LABEL_ARRAYS, ClassificationBase, class_loss, label_arrays
from tfx_jax.tasks.files import check_batch
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.prediction import ImageAttention, TrainedModel, check_returns_attention
from tfx_jax.tasks.task import Artifacts, PlannedTask, TaskConfig
from tfx_jax.tasks.text.answers import NO_CLASS, Prediction, class_predictions


class ImageClassifierConfig(MakesModel, Protocol):
    """The configuration of a model of the kind "image_classifier".

    `model(images, rngs=...)` returns logits [B, labels] for images [B, Y, X, C] between -1 and 1. If the model has
    attention, `model(images, return_attention=True)` also returns {"encoder/0/self": [B, N, T, T], ...} for a class
    token and T - 1 patches, row by row, or {"pool/0/cross": [B, N, 1, P]} for N learned queries that pool P patches.

    Attributes:
      image_size: pixels of both sides of an image.
      num_channels: 3 for red, green and blue, 1 for gray.
      labels: names of the classes; the task sets them.
    """

    image_size: int
    num_channels: int
    labels: tuple[str, ...]


class LabeledImage(NamedTuple):
    """An image with its class.

    Attributes:
      image: [height, width, channels] uint8.
      label: name of its class.
    """

    image: np.ndarray
    label: str


class LabeledImages(Protocol):
    """Random access to labeled images."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all classes."""
        ...

    def __len__(self) -> int:
        """The number of images."""
        ...

    def __getitem__(self, index: int) -> LabeledImage:
        """Returns the image with this index."""
        ...


@documented
@dataclasses.dataclass
class ImageData:
    """Source of the labeled images, size of a batch, and augmentation."""

    # shapes: built-in images of one to three shapes, see `tfx_jax.synthetic.shapes`; digits: those of scikit-learn, 8 x
    # 8 pixels, gray; folder: image files in one folder per class, such as train/cat/1.png
    dataset: str = one_of(("shapes", "digits", "folder"), "shapes")
    seed: int = at_least(0, 0)  # shapes, digits: seed of images and splits, independent of config.seed
    num_train: int = at_least(1, 20_000)  # shapes: images
    num_heldout: int = at_least(1, 1_000)  # shapes: images of the validation split and of the test split
    data_dir: str = ""  # folder: folder to which the names below are relative
    train_folder: str = "train"
    validation_folder: str = "val"
    test_folder: str = ""
    image_size: int = at_least(1, IMAGE_SIZE)  # height and width in pixels; files are center-cropped and resized
    num_channels: int = at_least(1, 3)  # 3: RGB, 1: gray
    max_shift: int = at_least(0, 0)  # augmentation: maximum shift in pixels along each axis
    is_mirrored: bool = False  # augmentation: whether to mirror images with probability 1/2
    tokens_per_batch: int = at_least(1, 64)  # images of a global batch

    @property
    def max_length(self) -> int:
        """Units that an image counts in `tokens_per_batch`."""
        return 1

    def has_split(self, split: Split) -> bool:
        """Returns whether a split exists."""
        return self.dataset != "folder" or bool(self._folder(split))

    def load(self, split: Split) -> LabeledImages:
        """Returns the images of a split.

        Raises:
          UserError: if there are none, or scikit-learn, which has the digits, is not installed.
        """
        if self.dataset == "shapes":
            return CountedShapes(self, split)
        if self.dataset == "digits":
            return Digits(self.seed, split)
        return FolderImages(epath.Path(self.data_dir) / self._folder(split), self.image_size, self.num_channels)

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        check_batch(self, what="image")
        name = "config.task.data"
        image_model = cast(ImageClassifierConfig, model)
        for field in ("image_size", "num_channels"):
            if getattr(image_model, field) != getattr(self, field):
                raise UserError(
                    f"config.model.{field}={getattr(image_model, field)} must equal {name}.{field}="
                    f"{getattr(self, field)}"
                )
        # Required size and channels; 0: both numbers of channels are possible.
        size, channels = {"shapes": (IMAGE_SIZE, 3), "digits": (8, 1)}.get(self.dataset, (self.image_size, 0))
        if self.image_size != size:
            raise UserError(f"{name}.image_size={self.image_size} must be {size}, the size of {self.dataset}")
        if channels and self.num_channels != channels:
            raise UserError(f"{name}.num_channels={self.num_channels} must be {channels}, as in {self.dataset}")
        if self.num_channels not in (1, 3):
            raise UserError(f"{name}.num_channels={self.num_channels} must be 3 (RGB) or 1 (gray)")
        if self.max_shift >= self.image_size:
            raise UserError(f"{name}.max_shift={self.max_shift} must be less than image_size={self.image_size}")

    def tiny(self) -> None:
        """Sets a small set of built-in images."""
        self.dataset, self.image_size, self.num_channels = "shapes", IMAGE_SIZE, 3
        self.num_train, self.num_heldout, self.tokens_per_batch = 64, 16, 16

    def _folder(self, split: Split) -> str:
        return getattr(self, f"{split}_folder")


class CountedShapes:
    """Images of colored shapes whose class is the number of shapes; each depends only on seed, split and index.

    Attributes:
      labels: see `LabeledImages`.
    """

    labels = ("1", "2", "3")

    def __init__(self, data: ImageData, split: Split):
        """Stores the seed; images are drawn at access."""
        self._key, self._held_out = (data.seed, SPLITS.index(split)), split != "train"
        self._count = data.num_train if split == "train" else data.num_heldout

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> LabeledImage:
        """Generates image `index`, labeled with the number of its shapes."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        scene = draw_scene((*self._key, index), held_out=self._held_out)
        return LabeledImage(scene.image, str(len(scene.shapes)))


class Digits:
    """The 1,797 handwritten digits that come with scikit-learn, of Alpaydin and Kaynak (1998).

    They are shuffled; a tenth is the validation split, another tenth the test split.

    Attributes:
      labels: see `LabeledImages`.
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
        split_indices = {"train": order[2 * count :], "validation": order[:count], "test": order[count : 2 * count]}
        indices = split_indices[split]
        # The data has gray values from 0 to 16.
        self._images = np.rint(images[indices] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        self._label_ids = labels[indices]

    def __len__(self) -> int:
        return len(self._label_ids)

    def __getitem__(self, index: int) -> LabeledImage:
        return LabeledImage(self._images[index], self.labels[self._label_ids[index]])


class FolderImages:
    """Image files in one folder per class, as in torchvision's `ImageFolder`; each is read at access.

    Attributes:
      labels: the names of the folders, in alphabetical order.
    """

    def __init__(self, folder: epath.Path, size: int, num_channels: int):
        """Lists the image files at any depth below the folder of their class.

        Args:
          folder: folder with a subfolder per class; hidden folders (with a dot) are ignored.
          size: height and width of the images in pixels.
          num_channels: 3 or 1.

        Raises:
          UserError: if there is no such folder, or a class has no image.
        """
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: name one with a subfolder per class")
        classes = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        if not classes:
            raise UserError(f"{folder} has no folder for each class, such as {folder / 'cat'}")
        self.labels = tuple(path.name for path in classes)
        self._files: list[tuple[epath.Path, str]] = []
        for path in classes:
            files = _image_files(path)
            if not files:
                raise UserError(f"{path} has no image, a file that ends with one of {', '.join(IMAGE_SUFFIXES)}")
            self._files += [(file, path.name) for file in files]
        self._size, self._num_channels = size, num_channels

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> LabeledImage:
        """Returns the image with this index.

        Raises:
          UserError: if it cannot be read.
        """
        path, label = self._files[index]
        return LabeledImage(read_center(path, self._size, self._num_channels), label)


def _image_files(folder: epath.Path) -> list[epath.Path]:
    """Returns all image files below a folder, local or remote, sorted by path."""
    files: list[epath.Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            files += _image_files(path)
        elif path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("."):
            files.append(path)
    return files


@documented
@dataclasses.dataclass
class ImageClassificationConfig(TaskConfig):
    """Predicts the label of each image."""

    data: ImageData = dataclasses.field(default_factory=ImageData)
    label_smoothing: float = fraction(0.0)

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "image_classifier", "classification of images")
        self.data.validate(model)

    def splits(self) -> Splits[LabeledImages]:
        """Returns the images of each split."""
        return Splits(self.data.has_split, self.data.load, field="folder")

    def setup(
        self, model: ImageClassifierConfig, splits: Splits[LabeledImages], artifacts: Artifacts
    ) -> "ImageClassificationTask":
        """Sets up the task; the model gets the labels of the training split."""
        labels = setup_json(artifacts, "labels.json", lambda: list(splits["train"].labels))
        with_labels: Any = dataclasses.replace(cast(Any, model), labels=tuple(labels))
        return ImageClassificationTask(self, with_labels, splits)

    def planned(self, model: ImageClassifierConfig, options: LoaderOptions) -> PlannedTask:
        """Plans the task, with as many classes as the model has labels."""
        image = (np.uint8, model.image_size, model.image_size, model.num_channels)
        batch = planned_batch(self.data, options, LABEL_ARRAYS | {"image": image})
        return PlannedTask(ImageClassificationTask(self, model, NO_DATA), batch)


def _logits(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None = None) -> Float[Array, "B C"]:
    return model(normalized(batch["image"]), rngs=rngs)


class ImageClassificationTask(ClassificationBase[ImageClassificationConfig, ImageClassifierConfig, LabeledImages]):
    """Classification of images."""

    logits = staticmethod(_logits)
    unit = "image"
    row_name = "images"

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all images have one size."""
        data = self.config.data
        return BatchSpec((1,), data.tokens_per_batch, fixed_lengths={"image": self.model_config.image_size})

    def rows(self, split: Split) -> LabeledImages:
        """Returns the images of a split.

        Raises:
          UserError: if a label does not occur in the training split.
        """
        images = self._splits[split]
        if unknown := {*images.labels} - {*self.labels}:
            raise UserError(
                f"the label {min(unknown)!r} does not occur in the training split ({len(self.labels)} labels)"
            )
        return images

    def encode(self, rows: LabeledImages | Sequence[LabeledImage]) -> LazyExamples:
        """Returns one example per image: "image" [Y, X, C] uint8, and its label."""
        is_folder = isinstance(rows, FolderImages)
        return LazyExamples(rows, self._example, np.ones(len(rows), np.int64), reads_files=is_folder)

    def _example(self, row: LabeledImage) -> Example:
        return {"image": row.image} | label_arrays(self.label_ids[row.label])

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return image_classification_loss(
            model,
            batch,
            rngs,
            label_smoothing=config.label_smoothing,
            max_shift=config.data.max_shift,
            is_mirrored=config.data.is_mirrored,
        )

    def predict(self, model: TrainedModel, rows: Sequence[np.ndarray]) -> list[str]:
        """Returns the most likely label of each image, [height, width, channels] uint8."""
        unlabeled: Any = [LabeledImage(image, self.labels[0]) for image in rows]
        return super().predict(model, unlabeled)

    inputs = ("image",)
    suffixes = IMAGE_SUFFIXES
    empty_answer: ClassVar[Prediction] = NO_CLASS

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[Any]]) -> list[Prediction]:
        """Returns the most likely label of each image, a file or an array, and all probabilities."""
        data, size = self.config.data, self.model_config.image_size
        images: Any = [LabeledImage(image_of(row[0], size, data.num_channels), self.labels[0]) for row in rows]
        return class_predictions(self.labels, model.predict(self.probabilities, self.encode(images), self.batch_spec))

    def attention_example(self, model: TrainedModel) -> ImageAttention:
        return self.attention(model, self.rows("validation")[0].image)

    def attention(self, model: TrainedModel, image: np.ndarray) -> ImageAttention:
        """Returns the attention behind the class: what pools the patches, or that of the class token over the image.

        The class token has several maps: through all layers, and of each layer (head mean).

        Raises:
          UserError: if the model has no attention.
        """
        ((logits, whole, layers),) = model.map_batches(_class_attention, [{"image": image[None]}])
        maps = np.concatenate([whole, layers[:, 0]])
        side = math.isqrt(maps.shape[-1])
        titles = ["rollout" if len(layers) else "pooling", *(f"layer {number}" for number in range(1, 1 + len(layers)))]
        return ImageAttention(image, titles, maps.reshape(-1, side, side), self.labels[int(logits[0].argmax())])


def image_classification_loss(
    model: Any,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    label_smoothing: float = 0.0,
    max_shift: int = 0,
    is_mirrored: bool = False,
) -> LossOutput:
    """Sums the cross entropy of the classes of images.

    Args:
      model: model of the kind "image_classifier": `model(images, rngs=...)` returns the class logits.
      batch: "image" [B, Y, X, C] uint8, "label" [B] int32, the id of a class, and "row_weights" [B] float32, 0 for
        padding.
      rngs: stream `dropout`, also used for augmentation; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.
      max_shift: see `augment`.
      is_mirrored: see `augment`.

    Returns:
      The output of `class_loss`; `num_tokens` counts the images.
    """
    if rngs is not None and (max_shift or is_mirrored):
        image = augment(batch["image"], rngs.dropout(), max_shift=max_shift, is_mirrored=is_mirrored)
        batch = batch | {"image": image}
    return class_loss(_logits(model, batch, rngs), batch, batch["row_weights"], label_smoothing=label_smoothing)


def normalized(image: UInt8[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
    """Maps 0 .. 255 to -1 .. 1, float32, the range of published Vision Transformers."""
    return image.astype(jnp.float32) / 127.5 - 1.0


def augment(
    image: UInt8[Array, "B Y X C"], rng: Array, *, max_shift: int, is_mirrored: bool
) -> UInt8[Array, "B Y X C"]:
    """Shifts each image by a random whole number of pixels, and mirrors it with probability 1/2.

    Args:
      image: images; each is augmented independently, with black pixels shifted in.
      rng: PRNG key.
      max_shift: each axis is shifted by -max_shift to max_shift pixels, all equally likely.
      is_mirrored: whether to mirror images.
    """
    num_images, *sides, _ = image.shape
    shift_rng, mirror_rng = jax.random.split(rng)
    if is_mirrored:
        mirror = jax.random.bernoulli(mirror_rng, 0.5, (num_images,))[:, None, None, None]
        image = jnp.where(mirror, image[:, :, ::-1], image)
    if max_shift:
        pad = (max_shift, max_shift)
        # First row and column of each image that is kept of the padded one, [B] each.
        first_rows, first_columns = jax.random.randint(shift_rng, (2, num_images), 0, 2 * max_shift + 1)
        rows = first_rows[:, None] + jnp.arange(sides[0])[None]  # [B, Y]
        columns = first_columns[:, None] + jnp.arange(sides[1])[None]  # [B, X]
        image = jnp.pad(image, ((0, 0), pad, pad, (0, 0)))
        # A gather along one axis at a time keeps images on their devices if these share the batch.
        image = jnp.take_along_axis(image, rows[:, :, None, None], axis=1)
        image = jnp.take_along_axis(image, columns[:, None, :, None], axis=2)
    return image


def _class_attention(model: Any, batch: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Returns logits [B, V], and the attention to patches: of the whole model [B, P], and of layers [L, B, P].

    Of a class token, that of the whole model is the rollout. A model that pools the patches has no layers, L = 0.
    """
    check_returns_attention(model)
    logits, maps = model(normalized(batch["image"]), return_attention=True)
    if "pool/0/cross" in maps:
        weights = maps["pool/0/cross"].mean(axis=1)[:, 0].astype(jnp.float32)
        return logits, weights, jnp.zeros((0, *weights.shape))
    layers = [maps[f"encoder/{index}/self"] for index in range(len(maps))]
    # Of the queries only the class token, number 0; of the keys only the patches after it.
    layer_means = jnp.stack([weights.mean(axis=1)[:, 0, 1:] for weights in layers]).astype(jnp.float32)
    return logits, attention_rollout(layers)[:, 0, 1:], layer_means
