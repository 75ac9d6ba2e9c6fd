"""Utterances that are sounds: built-in tones, spoken digits, or WAV files with transcripts."""

import dataclasses
import fractions
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, Float, Int

from tfx_jax.data.sources.audio import TABLE, SoundFiles
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.sources.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of, within
from tfx_jax.functional.audio import log_mel
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.files import check_batch, split_path
from tfx_jax.tasks.speech.speech_data import Utterance, Utterances

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_HOP_SECONDS = 0.01
_SILENCE = (0.15, 0.3)  # seconds between digits; before and after them a third has none


class Sound(NamedTuple):
    """How frames of samples become what a model hears."""

    sample_rate: int
    num_features: int


@documented
@dataclasses.dataclass
class RecordedSpeech:
    """Which sounds there are, and how much of them makes a batch; a frame is 10 ms.

    A model hears the logarithms of energies in bands, see `heard`; examples have the samples, a frame a row.
    """

    # tones: built in, each character one of its own; fsdd: the zips of Free Spoken Digit Dataset, from which digits of
    # one speaker are strung together, with silence between; files: any WAV files
    dataset: str = one_of(("tones", "fsdd", "files"), "tones")
    data_dir: str = ""  # that the names below are relative to
    # fsdd: a zip or a folder; files: a zip with `transcripts.tsv` in it, or such a table, beside which the files are:
    # lines of the form name of a WAV file, TAB, transcript
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    sample_rate: int = at_least(100, 16_000)  # a second; sounds of another rate are resampled
    num_features: int = at_least(1, 80)  # bands of energy
    seed: int = at_least(0, 0)  # tones, fsdd: of what is said; the training's seed changes none
    num_train: int = at_least(1, 10_000)  # tones, fsdd: utterances
    num_heldout: int = at_least(1, 500)  # tones, fsdd: utterances of the validation split, and of the test split
    min_digits: int = at_least(1, 1)  # fsdd: of an utterance
    max_digits: int = at_least(1, 5)
    # Training hears each utterance slower and faster by this share too, 0.1 in "Audio Augmentation for Speech
    # Recognition" (Ko et al., 2015); 0: at its own speed alone.
    speed_spread: float = within(0, 0.5, 0.0)
    max_characters: int = at_least(1, 32)  # of a transcript
    max_length: int = at_least(1, 512)  # frames; longer utterances are not trained on
    tokens_per_batch: int = at_least(1, 8_192)  # frames of a global batch, padding included

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return round(_HOP_SECONDS * self.sample_rate)

    @property
    def frame(self) -> tuple[int, type[np.generic]]:
        """How many numbers a frame of an example has, and of which kind."""
        return self.hop, np.int16

    @property
    def sound(self) -> Sound:
        """How frames become what a model hears."""
        return Sound(self.sample_rate, self.num_features)

    def has_split(self, split: Split) -> bool:
        """Tells whether there is a split."""
        return self.dataset == "tones" or bool(getattr(self, f"{split}_file"))

    def load(self, split: Split) -> Utterances:
        """Returns the utterances of a split.

        Raises:
          UserError: if they cannot be read.
        """
        utterances = self._recorded(split)
        if split != "train" or not self.speed_spread:
            return utterances
        return AtSpeeds(utterances, (1.0, 1 - self.speed_spread, 1 + self.speed_spread))

    def _recorded(self, split: Split) -> Utterances:
        if self.dataset == "tones":
            return Tones(self, split)
        path = split_path(self, split)
        return SpokenDigits(self, split, SoundFiles(path)) if self.dataset == "fsdd" else _open_table(self, path)

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        del model
        check_batch(self, what="utterance")
        if self.max_digits < self.min_digits:
            raise UserError(f"config.task.data.max_digits={self.max_digits} is less than min_digits={self.min_digits}")

    def tiny(self) -> None:
        """Sets a little that is easily learned."""
        self.dataset, self.sample_rate, self.num_features = "tones", 1_000, 8
        self.num_train, self.num_heldout, self.max_characters = 200, 20, 4
        self.max_length, self.tokens_per_batch = 96, 960


class Tones:
    """Characters that are tones, one after the other; utterances depend on the seed, the split and their index alone.

    Attributes:
      characters: see `Utterances`.
      lengths: likewise.
      transcripts: likewise.
    """

    characters = "abcd"

    def __init__(self, data: RecordedSpeech, split: Split):
        """Draws what is said, but no sound."""
        self._data, self._split = data, SPLITS.index(split)
        count = data.num_train if split == "train" else data.num_heldout
        plans = [self._plan(index) for index in range(count)]
        self.transcripts = ["".join(self.characters[letter] for letter in letters) for letters, _, _ in plans]
        self.lengths = np.array([parts.sum() for _, parts, _ in plans], np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        if not 0 <= index < len(self):
            raise IndexError(index)
        letters, parts, rng = self._plan(index)
        hop, rate = self._data.hop, self._data.sample_rate
        pieces = [np.zeros(parts[0] * hop)]
        for letter, voiced, silent in zip(letters, parts[1::2], parts[2::2], strict=True):
            seconds = np.arange(voiced * hop) / rate
            frequency = rate * (letter + 1) / (2 * len(self.characters) + 2)
            pieces += [0.3 * np.sin(2 * np.pi * frequency * seconds), np.zeros(silent * hop)]
        sound = np.concatenate(pieces)
        sound += 0.003 * rng.standard_normal(len(sound))
        samples = np.rint(sound * 32_768).astype(np.int16)
        return Utterance(samples.reshape(-1, hop), self.transcripts[index])

    def _plan(self, index: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
        """Draws letters, and the frames of silence, tone, silence, ..., silence; the noise comes next."""
        rng = np.random.default_rng((self._data.seed, self._split, index))
        most = min(self._data.max_characters, max(1, (self._data.max_length - 8) // 20))
        letters = rng.integers(len(self.characters), size=int(rng.integers(1, most + 1)))
        parts = np.empty(2 * len(letters) + 1, np.int64)
        parts[::2], parts[1::2] = rng.integers(4, 9, size=len(letters) + 1), rng.integers(8, 13, size=len(letters))
        return letters, parts, rng


class SpokenDigits:
    """Strings of digits of one speaker, out of files that are called DIGIT_SPEAKER_NUMBER.wav, with silence between.

    Free Spoken Digit Dataset, https://github.com/Jakobovski/free-spoken-digit-dataset. Utterances depend on the seed,
    the split and their index alone.

    Attributes:
      characters: see `Utterances`.
      lengths: likewise.
      transcripts: likewise.
    """

    characters = " " + "".join(sorted(set("".join(DIGITS))))

    def __init__(self, data: RecordedSpeech, split: Split, files: SoundFiles):
        """Reads all sounds, which are short.

        Raises:
          UserError: if there is none, or one cannot be read.
        """
        self._data, self._split = data, SPLITS.index(split)
        self._sounds: dict[str, list[tuple[int, np.ndarray]]] = {}  # by speaker: digits and samples
        for name in files.names:
            if found := re.fullmatch(r"(?:.*/)?(\d)_([^/_]+)_\d+\.wav", name):
                sound = files.read_sound(name, data.sample_rate)
                self._sounds.setdefault(found[2], []).append((int(found[1]), sound))
        if not self._sounds:
            raise UserError(f"{files.path} has no file that is called DIGIT_SPEAKER_NUMBER.wav")
        self._speakers = sorted(self._sounds)
        count = data.num_train if split == "train" else data.num_heldout
        plans = [self._plan(index) for index in range(count)]
        self.transcripts = [" ".join(DIGITS[digit] for digit in digits) for digits, _, _, _ in plans]
        samples = [sum(map(len, sounds)) + sum(silence) for _, sounds, silence, _ in plans]
        self.lengths = -(-np.array(samples) // data.hop)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        if not 0 <= index < len(self):
            raise IndexError(index)
        _, sounds, silences, rng = self._plan(index)
        gaps = [rng.normal(0, 3, size).astype(np.int16) for size in silences]  # as silent as the recordings' own
        pieces = [gaps[0], *(piece for pair in zip(sounds, gaps[1:], strict=True) for piece in pair)]
        return Utterance(in_frames(np.concatenate(pieces), self._data.hop), self.transcripts[index])

    def _plan(self, index: int) -> tuple[list[int], list[np.ndarray], list[int], np.random.Generator]:
        """Draws digits with their sounds, and the samples of silence around each; the noise comes next."""
        data = self._data
        rng = np.random.default_rng((data.seed, self._split, index))
        own = self._sounds[self._speakers[rng.integers(len(self._speakers))]]
        count = int(rng.integers(data.min_digits, data.max_digits + 1))
        chosen = [own[number] for number in rng.integers(len(own), size=count)]
        low, high = (round(seconds * data.sample_rate) for seconds in _SILENCE)
        silences = rng.integers(low, high + 1, size=count + 1).tolist()
        silences[0], silences[-1] = np.maximum(rng.integers(-high // 2, high + 1, size=2), 0).tolist()
        digits, sounds = [digit for digit, _ in chosen], [sound for _, sound in chosen]
        while len(" ".join(DIGITS[digit] for digit in digits)) > data.max_characters and len(digits) > 1:
            digits, sounds, silences = digits[:-1], sounds[:-1], silences[:-1]
        return digits, sounds, silences, rng


class FileUtterances:
    """WAV files with transcripts, each read when it is asked for.

    Attributes:
      characters: see `Utterances`.
      lengths: likewise.
      transcripts: likewise.
    """

    def __init__(self, data: RecordedSpeech, files: SoundFiles, rows: Sequence[tuple[str, str]]):
        """Reads every file once, for its length.

        Args:
          data: what to make of them.
          files: where they are.
          rows: the name of each and its transcript.

        Raises:
          UserError: if one cannot be read.
        """
        self._data, self._files, self._names = data, files, [name for name, _ in rows]
        self.transcripts = [transcript for _, transcript in rows]
        self.characters = "".join(sorted(set("".join(self.transcripts))))
        self.lengths = np.array([len(self[index].frames) for index in range(len(rows))], np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Utterance:
        sound = self._files.read_sound(self._names[index], self._data.sample_rate)
        return Utterance(in_frames(sound, self._data.hop), self.transcripts[index])


class AtSpeeds:
    """Utterances at several speeds each, which changes their pitch too, as a record player does.

    Attributes:
      characters: see `Utterances`.
      lengths: likewise, of all utterances at the first speed, then at the second, and so on.
      transcripts: likewise.
    """

    def __init__(self, utterances: Utterances, speeds: Sequence[float]):
        """Resamples nothing yet.

        Args:
          utterances: whose frames have samples.
          speeds: 1 for their own, more for faster; to a hundredth.
        """
        self._utterances, self.characters = utterances, utterances.characters
        self._speeds = [fractions.Fraction(speed).limit_denominator(100) for speed in speeds]
        self.lengths = np.concatenate([_slower(utterances.lengths, speed) for speed in self._speeds])
        self.transcripts = [*utterances.transcripts] * len(self._speeds)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, index = divmod(index, len(self._utterances))
        frames, transcript = self._utterances[index]
        speed, (count, hop) = self._speeds[number], frames.shape
        if speed != 1:
            from scipy.signal import resample_poly  # takes 0.7 s, which most runs do not need

            sound = resample_poly(frames.ravel().astype(np.float64), speed.denominator, speed.numerator)
            samples = np.clip(np.rint(sound), -32_768, 32_767).astype(np.int16)
            frames = in_frames(samples[: _slower(count, speed) * hop], hop)
        return Utterance(frames, transcript)


def _slower(lengths: Any, speed: fractions.Fraction) -> Any:
    """Lengths at another speed, rounded up as `scipy.signal.resample_poly` does."""
    return -(-lengths * speed.denominator // speed.numerator)


def _open_table(data: RecordedSpeech, path: epath.Path) -> FileUtterances:
    is_zip = path.suffix.lower() == ".zip"
    files = SoundFiles(path if is_zip else path.parent)
    name = TABLE if is_zip else path.name
    try:
        lines = files.read(name).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{name} in {files.path} is not UTF-8") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not is_blank(line):
            file, *transcript = line.split("\t")
            if len(transcript) != 1 or is_blank(transcript[0]):
                raise UserError(f"{path}, line {number}: a line must be the name of a WAV file, one TAB, what it says")
            rows.append((file, " ".join(transcript[0].split())))
    if not rows:
        raise UserError(f"{path} names no files")
    return FileUtterances(data, files, rows)


def in_frames(samples: np.ndarray, hop: int) -> np.ndarray:
    """Cuts a sound into frames, [T, hop], the last filled up with silence."""
    return np.pad(samples, (0, -len(samples) % hop)).reshape(-1, hop)


def heard(frames: Int[Array, "B T hop"], num_frames: Int[Array, " B"], sound: Sound) -> Float[Array, "B T F"]:
    """Returns what a model hears: log-mel energies beside the greatest of the row, 1 for that and -1 for 80 dB less.

    So neither loudness nor how much silence there is changes what is heard of a word, which a mean over the row would.
    The range is that of Whisper (Radford et al., 2022, section 2.2), whose loudness stays as it is; 0, which is what
    `spec_augment` puts into its masks, stands in the middle of it.

    Args:
      frames: of samples, 16 bits each, with zeros behind those that count.
      num_frames: how many of each row count; the others become -1.
      sound: the sample rate, and how many bands there are.
    """
    samples = frames.reshape(frames.shape[0], -1).astype(jnp.float32) / 32_768
    # The floor is about the noise of 16 bits: digital silence is no quieter than that.
    energies = log_mel(samples, sample_rate=sound.sample_rate, num_bands=sound.num_features, floor=1e-6)
    exists = (jnp.arange(frames.shape[1])[None] < num_frames[:, None])[..., None]
    greatest = jnp.where(exists, energies, -jnp.inf).max(axis=(1, 2), keepdims=True)
    decades = (energies - greatest) / math.log(10)
    return jnp.where(exists, 1 + jnp.maximum(decades, -8) / 4, -1)
