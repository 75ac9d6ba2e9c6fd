"""Utterances to recognize: built-in synthetic speech, whose frames are noisy templates of characters."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from tfx_jax.data.sources.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.models.san_ctc import SanCTCConfig
from tfx_jax.tasks.files import check_batch

_TEMPLATE_FRAMES = 6


class Utterance(NamedTuple):
    """The sound of an utterance and its transcript.

    Attributes:
      frames: acoustic features, float32 [T, F], or samples, int16 [T, samples per frame].
      transcript: transcript as characters.
    """

    frames: np.ndarray
    transcript: str


class Utterances(Protocol):
    """Random access to utterances; transcripts and lengths are known before a sound is generated or read."""

    @property
    def characters(self) -> str:
        """All characters of the transcripts, each once."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Number of frames of each utterance, [number of utterances] int."""
        ...

    @property
    def transcripts(self) -> Sequence[str]:
        """Transcript of each utterance."""
        ...

    def __len__(self) -> int:
        """The number of utterances."""
        ...

    def __getitem__(self, index: int) -> Utterance:
        """Returns the utterance with this index."""
        ...


@documented
@dataclasses.dataclass
class SpeechData:
    """Source of the utterances, and size of a batch.

    Synthetic utterances are generated at access. A character is a template of six random frames, stretched or
    shortened, with noise. All characters are equally likely, so that only the sound distinguishes them.
    """

    dataset: str = one_of(("synthetic",), "synthetic")
    seed: int = at_least(0, 0)  # seed of templates and utterances, independent of config.seed
    characters: str = "abcdefghijklmnopqrstuvwxyz"
    num_features: int = at_least(1, 16)  # features per frame
    num_train: int = at_least(1, 10_000)  # utterances
    num_heldout: int = at_least(1, 200)  # utterances of the validation split and of the test split
    max_characters: int = at_least(1, 8)  # characters of an utterance, 1 to this number
    min_frames: int = at_least(1, 4)  # minimum number of frames of a character
    max_frames: int = at_least(1, 10)
    max_silence: int = at_least(0, 6)  # maximum frames of silence before, after and between characters
    noise: float = at_least(0, 0.5)  # standard deviation of the noise; that of the templates is 1
    max_length: int = at_least(1, 128)  # maximum frames of an utterance; longer ones lose their last characters
    tokens_per_batch: int = at_least(1, 2_048)  # frames of a global batch, including padding

    @property
    def frame(self) -> tuple[int, type[np.generic]]:
        """The pair (size, dtype) of a frame of an example."""
        return self.num_features, np.float32

    @property
    def sound(self) -> None:
        """None: frames are features already, not samples."""
        return

    def has_split(self, split: Split) -> bool:
        """Returns whether a split exists."""
        return split in SPLITS

    def load(self, split: Split) -> Utterances:
        """Returns the utterances of a split."""
        return SyntheticSpeech(self, split)

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        check_batch(self, what="utterance")
        name = "config.task.data"
        if not self.characters or len({*self.characters}) < len(self.characters):
            raise UserError(f"{name}.characters must be one or more different characters, got {self.characters!r}")
        if self.max_frames < self.min_frames:
            raise UserError(f"{name}.max_frames={self.max_frames} must be at least min_frames={self.min_frames}")
        if self.max_length < (longest := self.max_frames + 2 * self.max_silence):
            raise UserError(
                f"{name}.max_length={self.max_length} must be at least {longest}, the frames of the longest character"
            )
        if self.min_frames < (least := 2 * cast(SanCTCConfig, model).subsampling):  # a blank between equal characters
            raise UserError(
                f"{name}.min_frames={self.min_frames} must be at least {least}, two steps of the model per character"
            )

    def tiny(self) -> None:
        """Sets a small data set that is easily learned."""
        self.dataset, self.characters, self.num_features = "synthetic", "abcd", 8
        self.num_train, self.num_heldout, self.max_characters, self.noise = 200, 20, 5, 0.2
        self.min_frames, self.max_frames, self.max_silence = 8, 10, 3
        self.max_length, self.tokens_per_batch = 64, 512


class SyntheticSpeech:
    """Synthetic utterances of a split; each depends only on the seed, the split and its index.

    Attributes:
      characters: see `Utterances`.
      templates: template of each character, float32 [characters, 6, F]; the same in every split.
      lengths: frames of each utterance.
      transcripts: see `Utterances`.
    """

    def __init__(self, data: SpeechData, split: Split):
        """Generates transcripts and durations; frames are generated at access."""
        self._data, self._split, self.characters = data, SPLITS.index(split), data.characters
        shape = (len(data.characters), _TEMPLATE_FRAMES, data.num_features)
        self.templates = np.random.default_rng((data.seed, len(SPLITS))).normal(size=shape).astype(np.float32)
        count = data.num_train if split == "train" else data.num_heldout
        plans = [self._plan(index) for index in range(count)]
        self.transcripts = ["".join(data.characters[index] for index in characters) for characters, _, _ in plans]
        self.lengths = np.array([durations.sum() for _, durations, _ in plans], np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        """Generates utterance `index`: frames [T, num_features] float32, with its transcript."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        characters, durations, rng = self._plan(index)
        data = self._data
        frames = np.zeros((durations.sum(), data.num_features), np.float32)
        ends = np.cumsum(durations)
        # Durations alternate between silence and characters, so the odd ones are those of the characters.
        for character, end, count in zip(characters, ends[1::2], durations[1::2], strict=True):
            template_frames = np.arange(count) * _TEMPLATE_FRAMES // count  # repeats or omits frames of the template
            frames[end - count : end] = self.templates[character, template_frames]
        frames += data.noise * rng.standard_normal(frames.shape, np.float32)
        return Utterance(frames, self.transcripts[index])

    def _plan(self, index: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
        """Samples the content of an utterance with C characters.

        Returns:
          A triple: indices of the characters, int [C]; numbers of frames of silence, character, silence, ..., silence,
          int [2 C + 1]; and the generator from which the noise is sampled next.
        """
        data = self._data
        rng = np.random.default_rng((data.seed, self._split, index))
        count = int(rng.integers(1, data.max_characters + 1))
        characters = rng.integers(len(data.characters), size=count)
        durations = np.empty(2 * count + 1, np.int64)
        durations[::2] = rng.integers(data.max_silence + 1, size=count + 1)
        durations[1::2] = rng.integers(data.min_frames, data.max_frames + 1, size=count)
        # The number of characters that end, with the silence after them, within `max_length` frames.
        num_fitting = int(np.searchsorted(np.cumsum(durations)[2::2], data.max_length, side="right"))
        return characters[:num_fitting], durations[: 2 * num_fitting + 1], rng
