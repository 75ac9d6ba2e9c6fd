"""Classification of images with a Vision Transformer (Dosovitskiy et al., 2021)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from tfx_jax.data.batching import Batch, BatchSpec, Example, LoaderOptions, train_batches
from tfx_jax.data.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import documented, fraction
from tfx_jax.functional.rollout import attention_rollout
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.vit import ViTConfig
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.classification import CLASS_METRICS, class_result, class_scores
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.image_data import ImageData, LabelledImage, LabelledImages
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.prediction import ImageAttention, TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, PlannedTask


@documented
@dataclasses.dataclass
class ImageClassificationConfig:
    """To give each image a label."""

    data: ImageData = dataclasses.field(default_factory=ImageData)
    label_smoothing: float = fraction(0.0)

    def validate(self, model: ModelConfig) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        require_kind(model, "image_classifier", "classification of images")
        self.data.validate(model)

    def tiny(self) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        self.data.tiny()

    def splits(self) -> Splits[LabelledImages]:
        """Returns the images of each split."""
        return Splits(self.data.has_split, self.data.load, field="folder")

    def setup(
        self, model: ViTConfig, splits: Splits[LabelledImages], artifacts: Artifacts
    ) -> "ImageClassificationTask":
        """See `tfx_jax.tasks.task.TaskConfig`; the model gets the labels that there are."""
        labels = setup_json(artifacts, "labels.json", lambda: list(splits["train"].labels))
        return ImageClassificationTask(self, dataclasses.replace(model, labels=tuple(labels)), splits)

    def planned(self, model: ViTConfig, options: LoaderOptions) -> PlannedTask:
        """See `tfx_jax.tasks.task.TaskConfig`; classes are as many as the model has labels."""
        batch = planned_batch(self.data, options, dtypes={}, scalars={"label": np.int32, "row_weights": np.float32})
        shape = (*batch["label"].shape, model.image_size, model.image_size, model.num_channels)
        batch["image"] = jax.ShapeDtypeStruct(shape, np.dtype(np.uint8))
        return PlannedTask(ImageClassificationTask(self, model, NO_DATA), batch)


class ImageClassificationTask:
    """Classification of images.

    Attributes:
      labels: those of the training split, in the order of their ids.
    """

    metrics = CLASS_METRICS
    unit = "image"

    def __init__(self, config: ImageClassificationConfig, model_config: ViTConfig, splits: Splits[LabelledImages]):
        """Takes what `ImageClassificationConfig.setup` made."""
        self.config, self.model_config, self.labels = config, model_config, model_config.labels
        self._splits = splits

    def make_model(self, *, shard_attention: ShardAttention | None = None, rngs: nnx.Rngs) -> Any:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.make(shard_attention=shard_attention, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all images are of one size."""
        data = self.config.data
        return BatchSpec((1,), data.tokens_per_batch, fixed_lengths={"image": self.model_config.image_size})

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """See `tfx_jax.tasks.task.Task`."""
        examples = _Examples(self, self.images("train"))
        return train_batches(lambda epoch: examples, self.batch_spec, options)

    def images(self, split: Split) -> LabelledImages:
        """Returns the images of a split.

        Raises:
          UserError: if it has a label that the training split has not.
        """
        images = self._splits[split]
        if strange := {*images.labels} - {*self.labels}:
            raise UserError(f"the label {min(strange)!r} is none of the {len(self.labels)} of the training split")
        return images

    def encode(self, images: Sequence[LabelledImage]) -> list[Example]:
        """Returns an example for each image: "image" [Y, X, C] uint8, "label" int32 and "row_weights" float32."""
        number = {label: index for index, label in enumerate(self.labels)}
        return [
            {"image": image, "label": np.array(number[label], np.int32), "row_weights": np.array(1, np.float32)}
            for image, label in images
        ]

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `image_classification_loss`."""
        c = self.config
        return image_classification_loss(
            model,
            batch,
            rngs,
            label_smoothing=c.label_smoothing,
            max_shift=c.data.max_shift,
            is_mirrored=c.data.is_mirrored,
        )

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.training_flops(shapes["image"][0])

    def predict(self, model: TrainedModel, images: Sequence[np.ndarray]) -> list[str]:
        """Returns the likeliest label of each image, [height, width, channels] uint8."""
        examples = _Examples(self, [LabelledImage(image, self.labels[0]) for image in images])
        found = model.predict(predict_classes, examples, self.batch_spec)
        return [self.labels[predicted] for predicted, _ in found]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Classifies every image of a split."""
        found = model.predict(predict_classes, _Examples(self, self.images(split)), self.batch_spec)
        predicted, wanted = ([self.labels[pair[side]] for pair in found] for side in (0, 1))
        return class_result(class_scores(predicted, wanted, self.labels), len(found), "images")

    def attention_example(self, model: TrainedModel) -> ImageAttention:
        """See `tfx_jax.tasks.task.Task`."""
        return self.attention(model, self.images("validation")[0].image)

    def attention(self, model: TrainedModel, image: np.ndarray) -> ImageAttention:
        """Computes what the class token sees of an image, through all layers and in each, the mean of its heads."""
        ((logits, rollout, layers),) = model.map_batches(_class_attention, [{"image": image[None]}])
        maps = np.concatenate([rollout, layers[:, 0]])
        side = self.model_config.image_size // self.model_config.patch_size
        titles = ["rollout", *(f"layer {number}" for number in range(1, 1 + len(layers)))]
        return ImageAttention(image, titles, maps.reshape(-1, side, side), self.labels[int(logits[0].argmax())])


class _Examples:
    """The examples of images, each made when it is asked for; all alike long."""

    def __init__(self, task: ImageClassificationTask, images: LabelledImages | Sequence[LabelledImage]):
        self._task, self._images, self.lengths = task, images, np.ones(len(images), np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Example:
        (example,) = self._task.encode([self._images[index]])
        return example


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
      model: of the kind "image_classifier": `model(images, rngs=...)` gives the logits of the classes.
      batch: "image" [B, Y, X, C] uint8, "label" [B] int32, the id of a class, and "row_weights" [B] float32, 0 for
        padding.
      rngs: stream `dropout`, which also changes images as `changed` does; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.
      max_shift: see `changed`.
      is_mirrored: see `changed`.

    Returns:
      What `summed_cross_entropy` gives for rows; `num_tokens` counts the images read.
    """
    image = batch["image"]
    if rngs is not None and (max_shift or is_mirrored):
        image = changed(image, rngs.dropout(), max_shift=max_shift, is_mirrored=is_mirrored)
    logits = model(normalised(image), rngs=rngs)
    output = summed_cross_entropy(logits, batch["label"], batch["row_weights"], label_smoothing=label_smoothing)
    return output._replace(num_tokens=batch["row_weights"].sum())


def normalised(image: UInt8[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
    """Takes 0 to 255 to -1 to 1, float32, which is what published Vision Transformers read."""
    return image.astype(jnp.float32) / 127.5 - 1.0


def changed(
    image: UInt8[Array, "B Y X C"], rng: Array, *, max_shift: int, is_mirrored: bool
) -> UInt8[Array, "B Y X C"]:
    """Moves each image by a whole number of pixels, and mirrors every other one.

    Args:
      image: of which each row draws for itself; what comes in from outside is black.
      rng: PRNG key.
      max_shift: each axis is moved by -max_shift to max_shift pixels, all alike likely.
      is_mirrored: whether left and right are exchanged with probability 1/2.
    """
    b, *sides, _ = image.shape
    for_shifts, for_mirrors = jax.random.split(rng)
    if is_mirrored:
        mirror = jax.random.bernoulli(for_mirrors, 0.5, (b,))[:, None, None, None]
        image = jnp.where(mirror, image[:, :, ::-1], image)
    if max_shift:
        pad = (max_shift, max_shift)
        starts = jax.random.randint(for_shifts, (2, b), 0, 2 * max_shift + 1)
        padded = jnp.pad(image, ((0, 0), pad, pad, (0, 0)))
        # Rows, then columns: a gather along one axis each keeps images where they are when devices share the batch.
        for axis, (side, start) in enumerate(zip(sides, starts, strict=True), start=1):
            places = jnp.expand_dims(start[:, None] + jnp.arange(side)[None], (3 - axis, 3))
            padded = jnp.take_along_axis(padded, places, axis=axis)
        image = padded
    return image


def predict_classes(model: Any, batch: dict[str, Array]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The id of each image's likeliest class, and its label; for `TrainedModel.predict`."""
    return model(normalised(batch["image"])).argmax(axis=-1), batch["label"]


def _class_attention(model: Any, batch: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Logits [B, V], and the patches that the class token sees: through all layers [B, P], in each [L, B, P]."""
    logits, maps = model(normalised(batch["image"]), return_attention=True)
    layers = [maps[f"encoder/{index}/self"] for index in range(len(maps))]
    of_layers = jnp.stack([weights.mean(axis=1)[:, 0, 1:] for weights in layers]).astype(jnp.float32)
    return logits, attention_rollout(layers)[:, 0, 1:], of_layers
