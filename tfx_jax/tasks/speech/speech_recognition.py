"""Speech recognition: from frames of sound to characters, trained without alignments (CTC: Graves et al., 2006)."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.data.batching.batches import (
    Batch,
    BatchSpec,
    Example,
    ExampleList,
    LazyExamples,
    LoaderOptions,
    train_batches,
)
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import MAX_BEAMS, at_least, documented, fraction, within
from tfx_jax.functional.audio import spec_augment
from tfx_jax.generation.ctc import BLANK, collapse, prefix_beam_search
from tfx_jax.metrics.edit_distance import recognition_scores
from tfx_jax.models.config import MakesModel, ModelConfig, require_kind
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.files import few_boundaries
from tfx_jax.tasks.loss import LossOutput, Metric
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech, Sound, log_mel_features, utterance_of
from tfx_jax.tasks.speech.speech_data import SpeechData, Utterance, Utterances
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.answers import Prediction


class CTCConfig(MakesModel, Protocol):
    """Configuration of a model of the kind "ctc"."""

    num_features: int

    def num_steps(self, num_frames: Any) -> Any:
        """Returns the number of model steps for a number of frames: an int, or an array of integers."""
        ...


@documented
@dataclasses.dataclass
class MaskConfig:
    """SpecAugment masks of training, see `tfx_jax.functional.audio`; none by default."""

    num_time_masks: int = at_least(0, 0)
    max_time_share: float = fraction(0.05)  # maximum length of a time mask, as a fraction of the utterance
    num_frequency_masks: int = at_least(0, 0)
    max_frequencies: int = at_least(0, 27)  # maximum width of a frequency mask


@documented
@dataclasses.dataclass
class SpeechRecognitionConfig(TaskConfig):
    """Transcribes speech."""

    data: SpeechData | RecordedSpeech = dataclasses.field(default_factory=SpeechData)
    masks: MaskConfig = dataclasses.field(default_factory=MaskConfig)
    beam_size: int = within(1, MAX_BEAMS, 1)  # beam width of the prefix search; 1: labels of the most likely path

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "ctc", "speech recognition")
        self.data.validate(model)

    def setup(self, model: CTCConfig, splits: Splits[Utterances], artifacts: Artifacts) -> "SpeechRecognitionTask":
        """Sets up the task; the model gets the labels and features of the data."""
        characters = setup_json(artifacts, "characters.json", lambda: list(splits["train"].characters))
        return SpeechRecognitionTask(self, self._resized(model, characters), splits, tuple(characters))

    def planned(self, model: CTCConfig, options: LoaderOptions) -> PlannedTask:
        """Plans the task; for recorded speech, with the number of labels of the model's configuration."""
        # Only the number of characters matters; one label is the blank.
        characters = getattr(self.data, "characters", "?" * max(1, model.vocab_size - 1))
        size, dtype = self.data.frame
        arrays = {"frames": (dtype, LENGTH, size), "labels": (np.int32, self.data.max_characters)}
        arrays |= {"num_frames": (np.int32,), "num_labels": (np.int32,)}
        batch = planned_batch(self.data, options, arrays)
        model = self._resized(model, characters)
        return PlannedTask(SpeechRecognitionTask(self, model, NO_DATA, tuple(characters)), batch)

    def _resized(self, model: CTCConfig, characters: Sequence[str]) -> CTCConfig:
        """Returns the model configuration with the features of the data, and a label per character plus the blank."""
        sizes: dict[str, Any] = {"vocab_size": 1 + len(characters), "num_features": self.data.num_features}
        return dataclasses.replace(cast(Any, model), **sizes)


class SpeechRecognitionTask:
    """Speech recognition with CTC.

    Attributes:
      characters: characters of the transcripts; the label of the first is 1.
    """

    unit = "frame"

    def __init__(
        self,
        config: SpeechRecognitionConfig,
        model_config: CTCConfig,
        splits: Splits[Utterances],
        characters: tuple[str, ...],
    ):
        self.config, self.model_config, self.characters = config, model_config, characters
        self._splits = splits

    @property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """Metrics; for recorded speech, whose transcripts have words, word error rate first."""
        cer = MetricInfo(
            "cer", "character error rate", " %", is_loss=True, note="edits over the references' characters"
        )
        exact_match = MetricInfo("exact_match", "exact match", " %")
        if self.config.data.sound is None:
            return cer, exact_match
        wer = MetricInfo("wer", "word error rate", " %", is_loss=True, note="edits over words")
        return wer, cer, exact_match

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return self.model_config.make(rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: examples of similar length together, all labels padded to one length."""
        data = self.config.data
        fixed_lengths = {"labels": data.max_characters}
        boundaries = few_boundaries(data.max_length)
        if data.dataset == "files":  # each length is compiled: powers of two, so a quarter of a batch is padding
            boundaries = tuple(n for n in boundaries if n == data.max_length or (n >= 64 and n & (n - 1) == 0))
        return BatchSpec(boundaries, data.tokens_per_batch, fixed_lengths=fixed_lengths)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns the training data, without utterances that are too long or too fast for their transcript.

        Raises:
          UserError: if none is left, a transcript is longer than `max_characters`, or an utterance of the validation
            split is too long.
        """
        utterances, longest = self._splits["train"], self.config.data.max_length
        if "validation" in self._splits and (most := self._splits["validation"].lengths.max()) > longest:
            raise UserError(
                f"an utterance of the validation split has {most} frames, but config.task.data.max_length={longest}: "
                "raise it, or cut the utterance"
            )
        lengths = utterances.lengths
        num_needed_steps = np.array([*map(steps_needed, utterances.transcripts)])
        fits = (lengths <= longest) & (num_needed_steps <= self.model_config.num_steps(lengths))
        if not fits.any():
            raise UserError(
                f"no training utterance has both at most max_length={longest} frames and enough model steps for its "
                f"transcript: the first has {lengths[0]} frames for {utterances.transcripts[0]!r}"
            )
        for transcript in itertools.compress(utterances.transcripts, fits):  # here, not at the step that reads it
            self._check_transcript(transcript)
        lengths = np.where(fits, lengths, -1)  # -1: left out of all batches
        is_read = self.config.data.dataset == "files"
        examples = LazyExamples(utterances, lambda utterance: self.encode([utterance])[0], lengths, reads_files=is_read)
        return train_batches(lambda epoch: examples, self.batch_spec, options)  # the same examples in every epoch

    def encode(self, utterances: Sequence[Utterance] | Utterances) -> list[Example]:
        """Returns one example per utterance.

        Raises:
          UserError: if a character does not occur in the training split, a transcript is longer than `max_characters`,
            or no alignment fits into the model's steps.
        """
        label_ids = {character: label for label, character in enumerate(self.characters, BLANK + 1)}
        return [self._example(utterances[index], label_ids) for index in range(len(utterances))]

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """Sums the CTC loss; computes the features of recorded sound, and masks them in training."""
        data, masks = self.config.data, self.config.masks
        if data.sound is not None:
            batch = batch | {"frames": log_mel_features(batch["frames"], batch["num_frames"], data.sound)}
        if rngs is not None and masks.num_time_masks + masks.num_frequency_masks:
            options = dataclasses.asdict(masks)
            frames = spec_augment(batch["frames"], batch["num_frames"], rngs.dropout(), **options)
            batch = batch | {"frames": frames}
        return recognition_loss(model, batch, rngs)

    def predict(self, model: TrainedModel, utterances: Sequence[Utterance] | Utterances) -> list[str]:
        """Returns the transcript of each utterance, by most likely path or prefix search."""
        untranscribed = [Utterance(utterances[index].frames, "") for index in range(len(utterances))]
        examples, sound = ExampleList(self.encode(untranscribed), by="frames"), self.config.data.sound
        if self.config.beam_size == 1:
            paths = model.predict(functools.partial(predict_path, sound=sound), examples, self.batch_spec)
            label_lists = [collapse(path) for path in paths]
        else:
            scores = model.predict(functools.partial(predict_scores, sound=sound), examples, self.batch_spec)
            label_lists = [
                prefix_beam_search(np.array(rows)[:num_steps], self.config.beam_size) for rows, num_steps in scores
            ]
        return ["".join(self.characters[label - BLANK - 1] for label in labels) for labels in label_lists]

    inputs = ("recording",)
    suffixes = (".wav",)
    empty_answer: ClassVar[Prediction] = {"transcript": ""}

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[Any]]) -> list[Prediction]:
        """Returns the transcript of each recording, a WAV file or an array of samples.

        Raises:
          UserError: also if the model was trained on synthetic frames instead of sound.
        """
        data = self.config.data
        if not isinstance(data, RecordedSpeech):
            raise UserError("the model was trained on synthetic frames, not on audio: name a run of recorded speech")
        utterances = [utterance_of(row[0], data) for row in rows]
        return [{"transcript": text} for text in self.predict(model, utterances)]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Transcribes every utterance of a split and scores the transcripts."""
        utterances = self._splits[split]
        references = utterances.transcripts
        scores = recognition_scores(self.predict(model, utterances), references)
        return eval_result(self.metrics, scores._asdict(), f"{len(references):,} utterances")

    def _check_transcript(self, transcript: str) -> None:
        """Raises UserError if a transcript is longer than `max_characters`."""
        if len(transcript) > (most := self.config.data.max_characters):
            raise UserError(
                f"the transcript {transcript[:40]!r} has {len(transcript)} characters, but "
                f"config.task.data.max_characters={most}: raise it"
            )

    def _example(self, utterance: Utterance, label_ids: Mapping[str, int]) -> Example:
        """Returns "frames" [T, F], "labels" [N], "num_frames" and "num_labels"; see `encode` for its errors."""
        frames, transcript = utterance
        if unknown := {*transcript} - label_ids.keys():
            raise UserError(
                f"a transcript has the character {min(unknown)!r}, which no training transcript has: replace it"
            )
        self._check_transcript(transcript)
        labels = np.array([label_ids[character] for character in transcript], np.int32)
        needed, steps = steps_needed(transcript), self.model_config.num_steps(len(frames))
        if needed > steps:
            raise UserError(f"{transcript!r} needs {needed} model steps, but {len(frames)} frames give only {steps}")
        counts = {"num_frames": len(frames), "num_labels": len(labels)}
        arrays = {name: np.array(value, np.int32) for name, value in counts.items()}
        _, dtype = self.config.data.frame
        return {"frames": frames.astype(dtype), "labels": labels} | arrays


def steps_needed(transcript: str) -> int:
    """Returns the steps of the shortest alignment of a transcript, with a blank between equal characters."""
    num_blanks = sum(left == right for left, right in itertools.pairwise(transcript))
    return len(transcript) + num_blanks


def recognition_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the negative log likelihood of transcripts, over all their alignments (Graves et al., 2006, section 4).

    Args:
      model: model of the kind "ctc": `model(frames, num_frames, rngs=...)` returns the logits of the labels at each
        step (0 is the blank), and `model.config.num_steps(num_frames)` is the number of valid steps.
      batch: "frames" [B, T, F] float32, "num_frames" [B] int32, 0 for padding examples, "labels" [B, N] int32 and
        "num_labels" [B] int32.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      The summed loss in nats with the number of characters as its weight; the metric "utterance_nll", whose weight is
      the number of utterances; `num_tokens` counts the frames. All are float32 scalars.
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
      logits: unnormalized scores of the labels, including `BLANK`, at each step.
      num_steps: number of valid steps of each example.
      labels: labels of the transcript, then any padding.
      num_labels: number of valid labels of each example. If no alignment fits into the steps, the value is about 1e5.

    Returns:
      Nats, float32 [B].
    """
    step_padding = jnp.arange(logits.shape[1])[None] >= num_steps[:, None]  # [B, S], True at padding
    label_padding = jnp.arange(labels.shape[1])[None] >= num_labels[:, None]  # [B, N]
    labels = jnp.where(label_padding, BLANK, labels)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax relies on both
        return optax.ctc_loss(
            logits, step_padding.astype(jnp.float32), labels, label_padding.astype(jnp.float32), blank_id=BLANK
        )


def predict_path(model: Any, batch: dict[str, Array], *, sound: Sound | None = None) -> Int[Array, "B S"]:
    """Returns the most likely label of each step, including `BLANK`, for `TrainedModel.predict`.

    `batch` is as for `recognition_loss`, without labels; with a `sound`, frames contain samples.
    """
    logits, num_steps = _logits(model, batch, sound)
    exists = jnp.arange(logits.shape[1])[None] < num_steps[:, None]
    return jnp.where(exists, logits.argmax(axis=-1), BLANK)


def predict_scores(
    model: Any, batch: dict[str, Array], *, sound: Sound | None = None
) -> tuple[Float[Array, "B S V"], Int[Array, " B"]]:
    """Returns the pair (log-probabilities of the labels at each step, number of valid steps); see `predict_path`."""
    logits, num_steps = _logits(model, batch, sound)
    return jax.nn.log_softmax(logits, axis=-1), num_steps


def _logits(model: Any, batch: dict[str, Array], sound: Sound | None) -> tuple[Array, Array]:
    """Returns the logits of the labels at each step, [B, S, V], and the number of valid steps, [B]."""
    frames, num_frames = batch["frames"], batch["num_frames"]
    logits = model(frames if sound is None else log_mel_features(frames, num_frames, sound), num_frames)
    return logits, model.config.num_steps(num_frames)
