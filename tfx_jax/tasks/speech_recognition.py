"""Speech recognition: frames of sound in, characters out, aligned by nobody (CTC: Graves et al., 2006)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.data.batching import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.splits import SPLITS, Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, one_of
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.san_ctc import SanCTCConfig
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.loss import LossOutput, Metric
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo
from tfx_jax.tasks.text_files import check_batch, few_boundaries

BLANK = 0
"""The label that says nothing; the characters are 1, 2, ..."""

_TEMPLATE_FRAMES = 6


class Utterance(NamedTuple):
    """What was said.

    Attributes:
      frames: features of the sound, float32 [T, F].
      transcript: the characters.
    """

    frames: np.ndarray
    transcript: str


class Utterances(Protocol):
    """Random access to utterances, and how many frames each has, which is known before any is made or read."""

    @property
    def lengths(self) -> np.ndarray:
        """Frames of each utterance, [number of utterances] int."""
        ...

    def __len__(self) -> int:
        """The number of utterances."""
        ...

    def __getitem__(self, index: int) -> Utterance:
        """The utterance with this index."""
        ...


@dataclasses.dataclass
class SpeechData:
    """Which utterances there are, and how much of them makes a batch.

    The synthetic ones are made when they are asked for: a character is a template of six random frames, spoken slower
    or faster, with noise on it; characters are drawn alike, so that there is nothing but the sound to tell them by.
    """

    dataset: str = one_of(("synthetic",), "synthetic")
    seed: int = at_least(0, 0)  # of the templates and of all utterances; the training's seed changes none
    characters: str = "abcdefghijklmnopqrstuvwxyz"
    num_features: int = at_least(1, 16)  # of a frame
    num_train: int = at_least(1, 10_000)  # utterances
    num_heldout: int = at_least(1, 200)  # of the validation split, and of the test split
    max_characters: int = at_least(1, 8)  # of an utterance, which has at least one
    min_frames: int = at_least(1, 4)  # of a character
    max_frames: int = at_least(1, 10)
    max_silence: int = at_least(0, 6)  # frames before, after and between characters
    noise: float = at_least(0, 0.5)  # standard deviation, of templates whose numbers have 1
    max_length: int = at_least(1, 128)  # frames; of a longer utterance the last characters are not said
    tokens_per_batch: int = at_least(1, 2_048)  # frames of a global batch, padding included

    def has_split(self, split: Split) -> bool:
        """Tells whether there is a split."""
        return split in SPLITS

    def load(self, split: Split) -> Utterances:
        """Returns the utterances of a split."""
        return SyntheticSpeech(self, split)

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        check_batch(self, what="utterance")
        name = "config.task.data"
        if not self.characters or len({*self.characters}) < len(self.characters):
            raise UserError(f"{name}.characters must be some, each once, got {self.characters!r}")
        if self.max_frames < self.min_frames:
            raise UserError(f"{name}.max_frames={self.max_frames} is less than min_frames={self.min_frames}")
        if self.max_length < (longest := self.max_frames + 2 * self.max_silence):
            raise UserError(f"{name}.max_length={self.max_length} may hold no character: {longest} frames are enough")
        if self.min_frames < (least := 2 * cast(SanCTCConfig, model).subsampling):  # a blank between equal characters
            raise UserError(
                f"{name}.min_frames={self.min_frames} must be at least {least}, two steps of the model for a character"
            )

    def tiny(self) -> None:
        """Sets a little that is easily learned."""
        self.dataset, self.characters, self.num_features = "synthetic", "abcd", 8
        self.num_train, self.num_heldout, self.max_characters, self.noise = 200, 20, 5, 0.2
        self.min_frames, self.max_frames, self.max_silence = 4, 6, 3
        self.max_length, self.tokens_per_batch = 48, 512


class SyntheticSpeech:
    """The utterances of a split, of which each depends on the seed, the split and its index alone.

    Attributes:
      templates: what the characters sound like, float32 [characters, 6, F]; the same in every split.
      lengths: frames of each utterance.
    """

    def __init__(self, data: SpeechData, split: Split):
        """Draws how long each utterance is, but none of its frames."""
        self._data, self._split = data, SPLITS.index(split)
        shape = (len(data.characters), _TEMPLATE_FRAMES, data.num_features)
        self.templates = np.random.default_rng((data.seed, len(SPLITS))).normal(size=shape).astype(np.float32)
        count = data.num_train if split == "train" else data.num_heldout
        self.lengths = np.array([self._plan(index)[1].sum() for index in range(count)], np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        if not 0 <= index < len(self):
            raise IndexError(index)
        characters, parts, rng = self._plan(index)
        data, frames = self._data, np.zeros((parts.sum(), self._data.num_features), np.float32)
        ends = np.cumsum(parts)
        for character, end, count in zip(characters, ends[1::2], parts[1::2], strict=True):
            frames[end - count : end] = self.templates[character, np.arange(count) * _TEMPLATE_FRAMES // count]
        frames += data.noise * rng.standard_normal(frames.shape, np.float32)
        return Utterance(frames, "".join(data.characters[character] for character in characters))

    def _plan(self, index: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
        """Draws characters, and the frames of silence, character, silence, ..., silence; the noise comes next."""
        data = self._data
        rng = np.random.default_rng((data.seed, self._split, index))
        count = int(rng.integers(1, data.max_characters + 1))
        characters = rng.integers(len(data.characters), size=count)
        parts = np.empty(2 * count + 1, np.int64)
        parts[::2] = rng.integers(data.max_silence + 1, size=count + 1)
        parts[1::2] = rng.integers(data.min_frames, data.max_frames + 1, size=count)
        fits = int(np.searchsorted(np.cumsum(parts)[2::2], data.max_length, side="right"))
        return characters[:fits], parts[: 2 * fits + 1], rng


@dataclasses.dataclass
class SpeechRecognitionConfig:
    """To write down what is said."""

    data: SpeechData = dataclasses.field(default_factory=SpeechData)

    def validate(self, model: ModelConfig) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        require_kind(model, "ctc", "speech recognition")
        self.data.validate(model)

    def tiny(self) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        self.data.tiny()

    def splits(self) -> Splits[Utterances]:
        """Returns the utterances of each split."""
        return Splits(self.data.has_split, self.data.load)

    def setup(self, model: SanCTCConfig, splits: Splits[Utterances], artifacts: Artifacts) -> "SpeechRecognitionTask":
        """See `tfx_jax.tasks.task.TaskConfig`; the model gets the labels and the features that there are."""
        characters = setup_json(artifacts, "characters.json", lambda: list(self.data.characters))
        model = dataclasses.replace(model, vocab_size=1 + len(characters), num_features=self.data.num_features)
        return SpeechRecognitionTask(self, model, splits, tuple(characters))


class SpeechRecognitionTask:
    """Speech recognition with CTC.

    Attributes:
      characters: that can be written; the label of the first is 1.
    """

    metrics = (
        MetricInfo("cer", "character error rate", " %", is_loss=True, note="edits over characters of the references"),
        MetricInfo("exact_match", "exact match", " %"),
    )
    unit = "frame"

    def __init__(
        self,
        config: SpeechRecognitionConfig,
        model_config: SanCTCConfig,
        splits: Splits[Utterances],
        characters: tuple[str, ...],
    ):
        """Takes what `SpeechRecognitionConfig.setup` made."""
        self.config, self.model_config, self.characters = config, model_config, characters
        self._splits = splits

    def make_model(self, *, shard_attention: ShardAttention | None = None, rngs: nnx.Rngs) -> Any:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.make(shard_attention=shard_attention, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: those of similar length together, all with room for as many labels."""
        data = self.config.data
        fixed_lengths = {"labels": data.max_characters}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, fixed_lengths=fixed_lengths)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """See `tfx_jax.tasks.task.Task`."""
        examples = _Examples(self, self._splits["train"])
        return train_batches(lambda epoch: examples, self.batch_spec, options)

    def encode(self, utterances: Sequence[Utterance] | Utterances) -> list[Example]:
        """Returns an example for each utterance.

        Raises:
          UserError: for a character that the training split has not, a transcript that is longer than
            `max_characters`, or one that no alignment fits into the steps of the model.
        """
        number = {character: label for label, character in enumerate(self.characters, BLANK + 1)}
        return [self._example(utterances[index], number) for index in range(len(utterances))]

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `recognition_loss`."""
        return recognition_loss(model, batch, rngs)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `tfx_jax.tasks.task.Task`."""
        rows, num_frames, _ = shapes["frames"]
        return self.model_config.training_flops(rows, num_frames)

    def predict(self, model: TrainedModel, utterances: Sequence[Utterance] | Utterances) -> list[str]:
        """Returns the transcript that each utterance's likeliest path gives; the true ones are not looked at."""
        unknown = [Utterance(utterances[index].frames, "") for index in range(len(utterances))]
        paths = model.predict(predict_path, ExampleList(self.encode(unknown), by="frames"), self.batch_spec)
        return ["".join(self.characters[label - BLANK - 1] for label in collapse(path)) for path in paths]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Writes down every utterance of a split."""
        utterances = self._splits[split]
        references = [utterances[index].transcript for index in range(len(utterances))]
        scores = recognition_scores(self.predict(model, utterances), references)
        told = ", ".join(f"{metric.title} {metric.format(getattr(scores, metric.name))}" for metric in self.metrics)
        return EvalResult(scores._asdict(), f"{told}, {len(references):,} utterances")

    def _example(self, utterance: Utterance, number: Mapping[str, int]) -> Example:
        frames, transcript = utterance
        if strange := {*transcript} - number.keys():
            raise UserError(f"the character {min(strange)!r} is none of the {len(number)} of the training split")
        if len(transcript) > (most := self.config.data.max_characters):
            raise UserError(f"a transcript of {len(transcript)} characters is longer than max_characters={most}")
        labels = np.array([number[character] for character in transcript], np.int32)
        needed, steps = len(labels) + int((labels[1:] == labels[:-1]).sum()), self.model_config.num_steps(len(frames))
        if needed > steps:
            raise UserError(f"{transcript!r} needs {needed} steps, but {len(frames)} frames are {steps} of the model's")
        counts = {"num_frames": len(frames), "num_labels": len(labels)}
        arrays = {name: np.array(value, np.int32) for name, value in counts.items()}
        return {"frames": frames.astype(np.float32), "labels": labels} | arrays


class _Examples:
    """The examples of utterances, each made when it is asked for."""

    def __init__(self, task: SpeechRecognitionTask, utterances: Utterances):
        self._task, self._utterances, self.lengths = task, utterances, utterances.lengths

    def __len__(self) -> int:
        return len(self._utterances)

    def __getitem__(self, index: int) -> Example:
        (example,) = self._task.encode([self._utterances[index]])
        return example


def recognition_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the negative log likelihood of transcripts, over all their alignments (Graves et al., 2006, section 4).

    Args:
      model: of the kind "ctc": `model(frames, num_frames, rngs=...)` gives the logits of the labels at each step, of
        which 0 is the blank, and `model.config.num_steps(num_frames)` says how many steps count.
      batch: "frames" [B, T, F] float32, "num_frames" [B] int32, 0 for padding, "labels" [B, N] int32 and "num_labels"
        [B] int32.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      The summed loss in nats and the number of characters as its weight; the metric "utterance_nll", of which the
      weight is the number of utterances; `num_tokens` counts the frames read. All float32 scalars.
    """
    frames, num_frames, labels = batch["frames"], batch["num_frames"], batch["labels"]
    logits = model(frames, num_frames, rngs=rngs)
    is_row = num_frames > 0
    nll = jnp.where(is_row, ctc_nll(logits, model.config.num_steps(num_frames), labels, batch["num_labels"]), 0.0)
    weight = jnp.where(is_row, batch["num_labels"], 0).sum(dtype=jnp.float32)
    metrics = {"utterance_nll": Metric(nll.sum(), is_row.sum(dtype=jnp.float32))}
    return LossOutput(nll.sum(), weight, metrics, num_tokens=num_frames.sum(dtype=jnp.float32))


def ctc_nll(
    logits: Float[Array, "B S V"], num_steps: Int[Array, " B"], labels: Int[Array, "B N"], num_labels: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Computes the negative log likelihood of labels over all alignments, by `optax.ctc_loss`.

    Args:
      logits: unnormalised scores of the labels at each step, of which `BLANK` is one.
      num_steps: how many steps of each row count.
      labels: what is said, behind it anything.
      num_labels: how many labels of each row count. Where no alignment fits into the steps, the value is about 1e5.

    Returns:
      Nats, float32 [B].
    """
    step_padding = jnp.arange(logits.shape[1])[None] >= num_steps[:, None]
    label_padding = jnp.arange(labels.shape[1])[None] >= num_labels[:, None]
    labels = jnp.where(label_padding, BLANK, labels)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax relies on both
        return optax.ctc_loss(
            logits, step_padding.astype(jnp.float32), labels, label_padding.astype(jnp.float32), blank_id=BLANK
        )


def predict_path(model: Any, batch: dict[str, Array]) -> Int[Array, "B S"]:
    """The likeliest label of each step, `BLANK` where there is none; for `TrainedModel.predict`.

    `batch` as for `recognition_loss`, without labels.
    """
    labels = model(batch["frames"], batch["num_frames"]).argmax(axis=-1)
    exists = jnp.arange(labels.shape[1])[None] < model.config.num_steps(batch["num_frames"])[:, None]
    return jnp.where(exists, labels, BLANK)


def collapse(path: Sequence[int]) -> list[int]:
    """Returns the labels of a path: of equal ones side by side, one, and no blanks (Graves et al., 2006, section 3.1).

    >>> collapse([0, 3, 3, 0, 3, 1])
    [3, 3, 1]
    """
    labels = np.asarray(path, np.int64)
    return labels[(labels != BLANK) & (np.diff(labels, prepend=BLANK) != 0)].tolist()


class RecognitionScores(NamedTuple):
    """How well transcripts are written, in percent.

    Attributes:
      cer: edits that turn the predictions into the references, over the characters of all references.
      exact_match: share of the predictions that are their references.
    """

    cer: float
    exact_match: float


def recognition_scores(predictions: Sequence[str], references: Sequence[str]) -> RecognitionScores:
    """Scores transcripts.

    Raises:
      ValueError: if the sides differ in length, or the references have no character.

    >>> recognition_scores(["abd", "x"], ["abcd", "x"])
    RecognitionScores(cer=20.0, exact_match=50.0)
    """
    num_characters = sum(map(len, references))
    if len(predictions) != len(references) or not num_characters:
        raise ValueError(f"{len(predictions)} predictions cannot be scored by {len(references)} references")
    edits, exact = sum(map(edit_distance, predictions, references)), sum(map(str.__eq__, predictions, references))
    return RecognitionScores(100 * edits / num_characters, 100 * exact / len(predictions))


def edit_distance(first: str, second: str) -> int:
    """Counts the characters to insert, delete or replace (Levenshtein, 1966).

    >>> edit_distance("kitten", "sitting")
    3
    """
    codes = np.array([ord(character) for character in second], np.int64)
    places = np.arange(len(codes) + 1)
    row = places
    for character in first:
        others = np.minimum(row[:-1] + (codes != ord(character)), row[1:] + 1)
        # Insertions last: the least of all places before, each one dearer with the distance.
        row = np.minimum.accumulate(np.concatenate([row[:1] + 1, others]) - places) + places
    return int(row[-1])
