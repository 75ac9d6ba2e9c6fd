"""Image captioning: images with captions from files or built-in shapes."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import grain
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.data.batching.batches import (
    Batch,
    BatchSpec,
    Example,
    ExampleList,
    ExampleSource,
    LazyExamples,
    LoaderOptions,
    train_batches,
)
from tfx_jax.data.sources.images import IMAGE_SUFFIXES, image_of, read_image
from tfx_jax.data.sources.splits import SPLITS, Split, Splits
from tfx_jax.data.sources.text import PairSource, read_tsv
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of
from tfx_jax.files import is_local
from tfx_jax.functional.attention.hard import score_function_loss
from tfx_jax.functional.losses import label_smoothed_cross_entropy
from tfx_jax.generation.decoding import BeamSearch, DecodingConfig, Search, decode
from tfx_jax.metrics.bleu import bleu_scores
from tfx_jax.models.captioning import CaptionerConfig
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.synthetic.shapes import IMAGE_SIZE, MAX_WORDS, draw_scene
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.files import FileData, check_batch, split_path
from tfx_jax.tasks.loss import LossOutput, Metric, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import ImageAttention, TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.answers import Prediction


class Captioned(NamedTuple):
    """An image with its caption.

    Attributes:
      image: RGB image, [height, width, 3] uint8.
      caption: a sentence.
      boxes: for each word of the caption, the pixels (top, left, bottom, right) of the object that it names, the last
        two exclusive, or zeros; [words, 4] int32, or [0, 4] if unknown.
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
        """Returns the image with this index."""
        ...

    def captions(self) -> Iterator[str]:
        """Yields captions from which the vocabulary is built."""
        ...

    def of_one_image(self) -> list[list[int]]:
        """Returns the indices of the captions of each image."""
        ...


@documented
@dataclasses.dataclass
class CaptionData(FileData):
    """Source of the captioned images, and size of a batch."""

    dataset: str = one_of(("shapes", "files"), "shapes")  # shapes: built-in images, see `tfx_jax.synthetic.shapes`
    seed: int = at_least(0, 0)  # shapes: seed of the images, independent of config.seed
    num_train: int = at_least(1, 1_000_000)  # shapes: images
    num_heldout: int = at_least(1, 1_000)  # shapes: images of the validation split and of the test split
    data_dir: str = ""  # files: folder to which the files below, and the images they name, are relative
    # files: lines of the form image file, TAB, caption; several lines may name one image
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    language: str = "en"  # ISO 639 code of the captions' language, by which BLEU splits them into tokens
    image_size: int = at_least(1, IMAGE_SIZE)  # height and width of every image, as in the model
    tokenizer: str = one_of(("words", "sentencepiece", "characters"), "words")
    max_length: int = at_least(1, MAX_WORDS + 1)  # tokens of a caption, including EOS; longer captions are cut
    tokens_per_batch: int = at_least(1, 1_024)  # caption positions of a global batch, including padding

    @property
    def knows_objects(self) -> bool:
        """Whether the data has a box for each word that names an object."""
        return self.dataset == "shapes"

    def load(self, split: Split) -> CaptionedImages:
        """Returns the images of a split.

        Raises:
          UserError: if its table cannot be read, a line has no file or no caption, or a file does not exist.
        """
        if self.dataset == "shapes":
            return ShapeImages(self, split)
        path = split_path(self, split)
        table = read_tsv(path)
        if len(table) < table.num_lines:
            raise UserError(
                f"{path}: {table.num_lines - len(table):,} of {table.num_lines:,} lines have no image or no caption: "
                "fill them or leave them out"
            )
        return FileImages(table, epath.Path(self.data_dir), self.image_size)

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        check_batch(self, what="caption")
        name = "config.task.data"
        if (size := getattr(model, "image_size", self.image_size)) != self.image_size:
            raise UserError(f"config.model.image_size={size} must equal {name}.image_size={self.image_size}")
        if self.dataset == "files":
            return
        if self.image_size != IMAGE_SIZE:
            raise UserError(
                f"{name}.image_size={self.image_size} must be {IMAGE_SIZE}, the size of the built-in images"
            )
        if self.tokenizer != "words":
            raise UserError(
                f'{name}.tokenizer must be "words" with dataset="shapes", where each word has one bounding box'
            )
        if self.max_length <= MAX_WORDS:
            raise UserError(
                f"{name}.max_length={self.max_length} must be more than {MAX_WORDS}, the words of the longest caption"
            )

    def tiny(self) -> None:
        """Sets a small set of built-in images."""
        self.dataset, self.tokenizer, self.image_size = "shapes", "words", IMAGE_SIZE
        self.num_train, self.num_heldout = 64, 16
        self.max_length, self.tokens_per_batch = MAX_WORDS + 1, 256


class ShapeImages:
    """Images of colored shapes; each depends only on the seed, the split and its index."""

    def __init__(self, data: CaptionData, split: Split):
        """Stores the seed and the number of images; images are drawn at access."""
        self._key, self._held_out = (data.seed, SPLITS.index(split)), split != "train"
        self._count = data.num_train if split == "train" else data.num_heldout

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Captioned:
        """Generates image `index` with its caption and, for each word, the box of the shape that it names."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        scene = draw_scene((*self._key, index), held_out=self._held_out)
        # `named` has for each word the index of the shape that it names, or -1.
        boxes = [(0, 0, 0, 0) if shape < 0 else scene.shapes[shape].box for shape in scene.named]
        return Captioned(scene.image, " ".join(scene.words), np.array(boxes, np.int32))

    def captions(self) -> Iterator[str]:
        """Yields enough captions to contain every word."""
        for index in range(min(self._count, 1_000)):
            yield self[index].caption

    def of_one_image(self) -> list[list[int]]:
        """Returns the indices of all images, each in a list: an image has one caption."""
        return [[index] for index in range(self._count)]


class FileImages:
    """Images listed in a table of files and captions; each is read at access."""

    def __init__(self, table: PairSource, folder: epath.Path, size: int):
        """Wraps the table; only captions are read until an image is accessed.

        Args:
          table: files as sources, captions as targets.
          folder: folder to which the files are relative.
          size: required height and width of each image in pixels.

        Raises:
          UserError: if a local file does not exist.
        """
        self._table, self._folder, self._size = table, folder, size
        names = (table[index]["source"] for index in range(len(table) if is_local(folder) else 0))
        for name in dict.fromkeys(names):  # here, not at the step that reads it
            if not (folder / name).exists():
                raise UserError(f"{folder / name} does not exist")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Captioned:
        """Returns the image with this index.

        Raises:
          UserError: if it cannot be read, or has another size.
        """
        pair = self._table[index]
        return Captioned(read_image(self._folder / pair["source"], self._size), pair["target"])

    def captions(self) -> Iterator[str]:
        """Yields all captions."""
        for index in range(len(self)):
            yield self._table[index]["target"]

    def of_one_image(self) -> list[list[int]]:
        """Returns the indices of the captions of each image, that is, of the lines that name the same file."""
        indices: dict[str, list[int]] = {}
        for index in range(len(self)):
            indices.setdefault(self._table[index]["source"], []).append(index)
        return list(indices.values())


BASELINE_DECAY = 0.9
"""Decay of the moving average of rewards (Xu et al., 2015, section 4.1)."""


@documented
@dataclasses.dataclass
class CaptioningConfig(TaskConfig):
    """Generates captions of images."""

    data: CaptionData = dataclasses.field(default_factory=CaptionData)
    attention_penalty: float = at_least(0, 1.0)  # soft attention: lambda of equation 14
    score_weight: float = at_least(0, 1.0)  # hard attention: lambda_r of section 4.1
    entropy_weight: float = at_least(0, 0.01)  # hard attention: lambda_e of section 4.1
    decoding: DecodingConfig = dataclasses.field(default_factory=lambda: DecodingConfig(extra_length=0))

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "captioner", "captioning")
        self.data.validate(model)

    def tiny(self) -> None:
        self.data.tiny()
        self.decoding.beam_size = 1

    def setup(self, model: CaptionerConfig, splits: Splits[CaptionedImages], artifacts: Artifacts) -> "CaptioningTask":
        """Trains or loads the tokenizer, on the captions."""
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: splits["train"].captions(), kind=self.data.tokenizer, family="marian"
        )
        return CaptioningTask(self, model, splits, tokenizer)

    def planned(self, model: CaptionerConfig, options: LoaderOptions) -> PlannedTask:
        image = (np.uint8, model.image_size, model.image_size, 3)
        arrays = {"caption": (np.int32, LENGTH), "boxes": (np.int32, LENGTH, 4), "image": image}
        batch = planned_batch(self.data, options, arrays)
        return PlannedTask(CaptioningTask(self, model, NO_DATA, NO_DATA), batch)


class CaptioningTask:
    """Image captioning.

    Attributes:
      tokenizer: tokenizer of the captions.
    """

    unit = "caption token"

    def __init__(
        self,
        config: CaptioningConfig,
        model_config: CaptionerConfig,
        splits: Splits[CaptionedImages],
        tokenizer: HFTokenizer,
    ):
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self._splits = splits

    @property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """Metrics: exact match first for built-in images, which have one right caption; BLEU first for files."""
        exact_match = MetricInfo("exact_match", "exact match", " %")
        accuracy = MetricInfo("accuracy", "accuracy", " %", note="tokens, given the right ones before them")
        if not self.config.data.knows_objects:
            return MetricInfo("bleu", "sacreBLEU"), accuracy, exact_match
        note = "at words that name one, given those before"
        return exact_match, accuracy, MetricInfo("on_object", "attention on the object", " %", note=note)

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return self.model_config.make(rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all captions are padded to the same, short length."""
        data = self.config.data
        fixed_lengths = {"image": self.model_config.image_size}
        return BatchSpec((data.max_length,), data.tokens_per_batch, fixed_lengths=fixed_lengths)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        examples = self._lazy(self._splits["train"])
        return train_batches(lambda epoch: examples, self.batch_spec, options)  # the same examples in every epoch

    def rows(self, split: Split) -> CaptionedImages:
        """Returns the images of a split."""
        return self._splits[split]

    def encode(self, images: Sequence[Captioned]) -> list[Example]:
        """Returns one example per image: "image" [Y, X, 3] uint8, "caption" [T] int32, "boxes" [T, 4] int32.

        The box of a token is that of the object it names, or zeros; see `Captioned`. Captions of more than `max_length`
        tokens are cut.
        """
        examples = []
        for image, caption, boxes_of_words in images:
            *ids, eos_id = self.tokenizer.encode_with_specials(caption).ids
            ids = [*ids[: self.config.data.max_length - 1], eos_id]
            boxes = np.zeros((len(ids), 4), np.int32)
            boxes[: len(boxes_of_words)] = boxes_of_words
            examples.append({"image": image, "caption": np.array(ids, np.int32), "boxes": boxes})
        return examples

    def _lazy(self, images: CaptionedImages, indices: Sequence[int] | None = None) -> LazyExamples:
        """Returns examples that are created at access; all count as equally long, so that batches mix all captions.

        Args:
          images: a split.
          indices: of the captions that are examples; None means all.
        """
        indices = range(len(images)) if indices is None else indices
        lengths = np.full(len(indices), self.config.data.max_length)
        is_read = isinstance(images, FileImages)
        return LazyExamples(indices, lambda index: self.encode([images[index]])[0], lengths, reads_files=is_read)

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return captioning_loss(
            model,
            batch,
            rngs,
            attention_penalty=config.attention_penalty,
            score_weight=config.score_weight,
            entropy_weight=config.entropy_weight,
        )

    def predict(self, model: TrainedModel, images: Sequence[np.ndarray]) -> list[str]:
        """Returns a caption for each image, [height, width, 3] uint8."""
        examples = ExampleList(self.encode([Captioned(image) for image in images]), by="caption")
        return [self.tokenizer.decode(ids) for ids in self._write(model, examples)]

    inputs = ("image",)
    suffixes = IMAGE_SUFFIXES
    empty_answer: ClassVar[Prediction] = {"caption": ""}

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[Any]]) -> list[Prediction]:
        """Returns a caption for each image, a file or an array."""
        size = self.model_config.image_size
        images = [image_of(row[0], size, 3, is_cropped=False) for row in rows]
        return [{"caption": caption} for caption in self.predict(model, images)]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Writes a caption for each image of a split, and scores each reference token given the previous ones.

        BLEU compares the caption with all that the image has, and an exact match is that of any of them.
        """
        images = self._splits[split]
        captions_of = images.of_one_image()
        # Like the training text: the model cannot write another form.
        references = [[self.tokenizer.normalize(images[index].caption) for index in rows] for rows in captions_of]
        described = self._lazy(images, [rows[0] for rows in captions_of])
        captions = [self.tokenizer.decode(ids) for ids in self._write(model, described)]
        sums = model.sum_metrics(_metrics, self._lazy(images), self.batch_spec)
        scores = bleu_scores(captions, references, language=self.config.data.language)
        values = {"bleu": scores.sacrebleu, "exact_match": scores.exact_match}
        values |= {name: 100 * float(sums[name].mean) for name in ("accuracy", "on_object")}
        count = f"{len(images):,} captions"
        if len(references) < len(images):
            count += f" of {len(references):,} images"
        return eval_result(self.metrics, values, count)

    def attention_example(self, model: TrainedModel) -> ImageAttention:
        example = self._splits["validation"][0]
        return self.attention(model, example.image, example.caption)

    def attention(self, model: TrainedModel, image: np.ndarray, caption: str | None = None) -> ImageAttention:
        """Returns the attention map of each token of a caption, including EOS; by default the model's own caption."""
        caption = self.predict(model, [image])[0] if caption is None else caption
        (example,) = self.encode([Captioned(image, caption)])
        size = self.model_config.grid_size
        (weights,) = model.map_batches(_weights, [{name: array[None] for name, array in example.items()}])
        titles = self.tokenizer.pieces(example["caption"].tolist())
        return ImageAttention(image, titles, weights[0].reshape(-1, size, size), " ".join(titles[:-1]))

    def _write(self, model: TrainedModel, examples: ExampleSource) -> list[list[int]]:
        """Returns the tokens of the caption that the configured search finds for each example, including EOS."""
        decoding, length = self.config.decoding, self.config.data.max_length
        search = BeamSearch(decoding.beam_size, decoding.length_penalty)
        options = {"search": search, "eos_id": self.model_config.eos_id, "max_length": length + decoding.extra_length}
        padded = model.predict(functools.partial(write_captions, **options), examples, self.batch_spec)
        return [[token for token in tokens if token >= 0] for tokens in padded]


def captioning_loss(
    model: Any,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    attention_penalty: float = 1.0,
    score_weight: float = 1.0,
    entropy_weight: float = 0.01,
) -> LossOutput:
    """Sums the cross entropy of captions and the term that trains the attention (Xu et al., 2015).

    Soft attention adds, for each caption, lambda sum_i (1 - sum_t alpha_ti)^2 of equation 14, over locations i and
    tokens t. Hard attention adds, in training, the score function of equation 12, whose reward is the log-likelihood of
    the whole caption minus the moving average in `model.baseline`, and the entropy of the sampled locations. The
    returned loss has the gradient of the terms of hard attention, but not their value, which means nothing.

    Args:
      model: model of the kind "captioner": `model.teach(image, caption, rngs=...)` returns a
        `tfx_jax.models.captioning.Captions`; `model.baseline` is None for soft attention, or a Variable that this
        function updates if `rngs` is given.
      batch: "image" [B, Y, X, 3], "caption" [B, T] int32, followed by padding, and "boxes" [B, T, 4] int32: pixels
        (top, left, bottom, right) of the object that a token names, or zeros.
      rngs: stream `dropout`; None means evaluation.
      attention_penalty: lambda.
      score_weight: lambda_r.
      entropy_weight: lambda_e.

    Returns:
      The output of `summed_cross_entropy`, with the additional metrics "on_object" (see `object_weights`), "entropy" of
      the attention in nats and, for soft attention, "penalty", the mean of equation 14 over captions, without lambda.
    """
    caption = batch["caption"]
    weights = (caption != model.config.pad_id).astype(jnp.float32)
    captions = model.teach(batch["image"], caption, rngs=rngs)
    output = summed_cross_entropy(captions.logits, caption, weights)
    boxes = jnp.where(weights[..., None] > 0, batch["boxes"], 0)
    metrics = output.metrics | {
        "on_object": object_weights(captions.weights, boxes, model.config.image_size),
        "entropy": Metric((captions.entropy * weights).sum(), weights.sum()),
    }
    is_row = weights.any(axis=1)  # False for padding examples
    if model.baseline is None:
        total_attention = (captions.weights * weights[..., None]).sum(axis=1)  # of each location, [B, L]
        penalty = jnp.where(is_row, jnp.square(1 - total_attention).sum(axis=1), 0.0).sum()
        metrics["penalty"] = Metric(penalty, is_row.sum(dtype=jnp.float32))
        return output._replace(loss=output.loss + attention_penalty * penalty, metrics=metrics)
    if rngs is None:
        return output._replace(metrics=metrics)
    nll = label_smoothed_cross_entropy(captions.logits, caption)
    reward = -jax.lax.stop_gradient((nll * weights).sum(axis=1))  # log-likelihood of each caption, [B]
    is_sampled = captions.is_drawn & is_row  # captions whose locations were sampled
    score = score_function_loss((captions.log_prob * weights).sum(axis=1), reward, model.baseline[...])  # [B]
    entropy = (captions.entropy * weights).sum()
    added = score_weight * jnp.where(is_sampled, score, 0.0).sum() - entropy_weight * entropy
    model.baseline[...] = moving_average(model.baseline[...], reward, is_sampled)
    # Adds the gradient of `added`, and 0 to the value.
    return output._replace(loss=output.loss + added - jax.lax.stop_gradient(added), metrics=metrics)


def moving_average(
    average: Float[Array, ""], rewards: Float[Array, " B"], counts: Bool[Array, " B"]
) -> Float[Array, ""]:
    """Updates a moving average: b_k = 0.9 b_(k-1) + 0.1 r_k, where r_k is the mean reward of a batch.

    Args:
      average: b_(k-1).
      rewards: reward of each example.
      counts: whether an example is part of the mean; if none is, the average does not change.
    """
    num_counted = counts.sum()
    mean = jnp.where(counts, rewards, 0.0).sum() / jnp.maximum(num_counted, 1)
    return jnp.where(num_counted > 0, BASELINE_DECAY * average + (1 - BASELINE_DECAY) * mean, average)


def object_weights(weights: Float[Array, "B T L"], boxes: Int[Array, "B T 4"], image_size: int) -> Metric:
    """Computes the share of attention that is on the object that a token names, over the tokens that name one.

    Args:
      weights: attention weights of each token over the L cells of a square grid, row by row.
      boxes: for each token the pixels (top, left, bottom, right) of the object that it names, the last two exclusive,
        or zeros. A cell is on the object if it has a pixel of the box.
      image_size: height and width of the image in pixels.

    Returns:
      The sum of the shares, with the number of tokens that name an object as the weight.
    """
    grid_size = round(weights.shape[-1] ** 0.5)
    cell_size = image_size // grid_size  # pixels
    start = jnp.arange(grid_size)[None, None] * cell_size  # first pixel of each row or column of cells
    top, left, bottom, right = (boxes[..., side, None] for side in range(4))
    rows = (start < bottom) & (start + cell_size > top)  # [B, T, grid_size]: rows of cells that overlap the box
    columns = (start < right) & (start + cell_size > left)
    is_on_object = (rows[..., :, None] & columns[..., None, :]).reshape(weights.shape)  # [B, T, L]
    names_object = boxes[..., 2] > 0  # [B, T]: zeros mean no object
    share_sum = jnp.where(is_on_object & names_object[..., None], weights, 0.0).sum()
    return Metric(share_sum, names_object.sum(dtype=jnp.float32))


def write_captions(
    model: Any, batch: dict[str, Array], *, search: Search, eos_id: int, max_length: int
) -> Int[Array, "B L"]:
    """Returns the tokens of the best caption of each image, including EOS, then -1; for `TrainedModel.predict`.

    Args:
      model: model of the kind "captioner".
      batch: "image" [B, Y, X, 3].
      search: how tokens are chosen.
      eos_id: EOS token.
      max_length: L, maximum number of tokens of a caption, including EOS.
    """
    return decode(model.decoder(), batch["image"], search=search, eos_ids=(eos_id,), max_length=max_length)


def _metrics(model: Any, batch: dict[str, Array]) -> dict[str, Metric]:
    """Returns the metrics of the loss without dropout, for `TrainedModel.sum_metrics`."""
    return captioning_loss(model, batch, rngs=None).metrics


def _weights(model: Any, batch: dict[str, Array]) -> Float[Array, "B T L"]:
    """Returns the attention weights of each caption token over the image, for `TrainedModel.map_batches`."""
    return model.teach(batch["image"], batch["caption"]).weights
