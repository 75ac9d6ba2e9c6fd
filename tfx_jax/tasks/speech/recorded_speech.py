"""Utterances as sounds: built-in tones, spoken digits, or WAV files with transcripts."""

import dataclasses
import fractions
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, Float, Int

from tfx_jax.data.sources.audio import TABLE, SoundFiles, read_wav_file
from tfx_jax.data.sources.lines import is_blank, read_lines
from tfx_jax.data.sources.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of, within
from tfx_jax.functional.audio import log_mel
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.files import FileData, check_batch, split_path
from tfx_jax.tasks.speech.speech_data import Utterance, Utterances

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_HOP_SECONDS = 0.01
_SILENCE = (0.15, 0.3)  # seconds of silence between digits; a third of the utterances has none at an end


class Sound(NamedTuple):
    """Parameters of the features computed from frames of samples."""

    sample_rate: int  # samples per second
    num_features: int  # mel bands


@documented
@dataclasses.dataclass
class RecordedSpeech(FileData):
    """Source of the sounds, and size of a batch; a frame is 10 ms.

    Examples contain samples, one frame per row; the model gets log-mel features, see `log_mel_features`.
    """

    # tones: built in, one tone per character; fsdd: zips of the Free Spoken Digit Dataset, whose digits of one speaker
    # are joined with silence between; files: any WAV files
    dataset: str = one_of(("tones", "fsdd", "files"), "tones")
    data_dir: str = ""  # folder to which the names below are relative
    # fsdd: a zip or a folder; files: a zip that contains `transcripts.tsv`, or such a table beside the files, with
    # lines of the form WAV file name, TAB, transcript
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    sample_rate: int = at_least(100, 16_000)  # samples per second; other sounds are resampled
    num_features: int = at_least(1, 80)  # mel bands
    seed: int = at_least(0, 0)  # tones, fsdd: seed of the utterances, independent of config.seed
    num_train: int = at_least(1, 10_000)  # tones, fsdd: training utterances
    num_heldout: int = at_least(1, 500)  # tones, fsdd: utterances of the validation split and of the test split
    min_digits: int = at_least(1, 1)  # fsdd: minimum digits of an utterance
    max_digits: int = at_least(1, 5)
    # Speed perturbation: training also uses each utterance slower and faster by this fraction, 0.1 in "Audio
    # Augmentation for Speech Recognition" (Ko et al., 2015); 0: none.
    speed_spread: float = within(0, 0.5, 0.0)
    max_characters: int = at_least(1, 32)  # maximum characters of a transcript
    max_length: int = at_least(1, 512)  # frames; longer training utterances are left out
    tokens_per_batch: int = at_least(1, 8_192)  # frames of a global batch, including padding

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return round(_HOP_SECONDS * self.sample_rate)

    @property
    def frame(self) -> tuple[int, type[np.generic]]:
        """The pair (size, dtype) of a frame of an example."""
        return self.hop, np.int16

    @property
    def sound(self) -> Sound:
        """Parameters of the features."""
        return Sound(self.sample_rate, self.num_features)

    def has_split(self, split: Split) -> bool:
        """Returns whether a split exists."""
        return self.dataset == "tones" or bool(getattr(self, f"{split}_file"))

    def load(self, split: Split) -> Utterances:
        """Returns the utterances of a split.

        Raises:
          UserError: if they cannot be read.
        """
        utterances = self._recorded(split)
        if split != "train" or not self.speed_spread:
            return utterances
        return AtSpeeds(utterances, speeds=(1.0, 1 - self.speed_spread, 1 + self.speed_spread))

    def _recorded(self, split: Split) -> Utterances:
        """Returns the utterances of a split at their own speed."""
        if self.dataset == "tones":
            return Tones(self, split)
        path = split_path(self, split)
        return SpokenDigits(self, split, SoundFiles(path)) if self.dataset == "fsdd" else _open_table(self, path)

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        del model
        check_batch(self, what="utterance")
        if self.max_digits < self.min_digits:
            raise UserError(
                f"config.task.data.max_digits={self.max_digits} must be at least min_digits={self.min_digits}"
            )

    def tiny(self) -> None:
        """Sets a small data set that is easily learned."""
        self.dataset, self.sample_rate, self.num_features = "tones", 1_000, 8
        self.num_train, self.num_heldout, self.max_characters = 200, 20, 4
        self.max_length, self.tokens_per_batch = 96, 960


class Tones:
    """Utterances whose characters are tones; each depends only on the seed, the split and its index.

    Attributes:
      characters: see `Utterances`.
      lengths: see `Utterances`.
      transcripts: see `Utterances`.
    """

    characters = "abcd"

    def __init__(self, data: RecordedSpeech, split: Split):
        """Generates the transcripts; sounds are generated at access."""
        self._data, self._split = data, SPLITS.index(split)
        count = data.num_train if split == "train" else data.num_heldout
        plans = [self._plan(index) for index in range(count)]
        self.transcripts = ["".join(self.characters[letter] for letter in letters) for letters, _, _ in plans]
        self.lengths = np.array([durations.sum() for _, durations, _ in plans], np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        """Generates utterance `index`: frames [T, hop] int16 of samples, with its transcript."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        letters, durations, rng = self._plan(index)
        hop, rate = self._data.hop, self._data.sample_rate
        pieces = [np.zeros(durations[0] * hop)]  # silence before the first letter
        # Each letter is a sine tone, followed by silence. The tones divide 0 Hz to half of the sample rate evenly.
        for letter, tone_frames, silent_frames in zip(letters, durations[1::2], durations[2::2], strict=True):
            seconds = np.arange(tone_frames * hop) / rate
            frequency = rate * (letter + 1) / (2 * len(self.characters) + 2)
            pieces += [0.3 * np.sin(2 * np.pi * frequency * seconds), np.zeros(silent_frames * hop)]
        sound = np.concatenate(pieces)
        sound += 0.003 * rng.standard_normal(len(sound))  # noise, 37 dB below the tones
        samples = np.rint(sound * 32_768).astype(np.int16)
        return Utterance(samples.reshape(-1, hop), self.transcripts[index])

    def _plan(self, index: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
        """Samples the content of an utterance with L letters.

        Returns:
          A triple: index in `characters` of each letter, int [L]; numbers of frames of silence, tone, silence, ...,
          silence, int [2 L + 1]; and the generator from which the noise is sampled next.
        """
        rng = np.random.default_rng((self._data.seed, self._split, index))
        # A letter and the silence after it take at most 20 frames, and the silence before the first at most 8.
        max_letters = min(self._data.max_characters, max(1, (self._data.max_length - 8) // 20))
        letters = rng.integers(len(self.characters), size=int(rng.integers(1, max_letters + 1)))
        durations = np.empty(2 * len(letters) + 1, np.int64)
        durations[::2] = rng.integers(4, 9, size=len(letters) + 1)  # silence: 4 to 8 frames
        durations[1::2] = rng.integers(8, 13, size=len(letters))  # tones: 8 to 12 frames
        return letters, durations, rng


class SpokenDigits:
    """Strings of digits of one speaker, joined from files named DIGIT_SPEAKER_NUMBER.wav with silence between.

    Free Spoken Digit Dataset, https://github.com/Jakobovski/free-spoken-digit-dataset. Each utterance depends only on
    the seed, the split and its index.

    Attributes:
      characters: see `Utterances`.
      lengths: see `Utterances`.
      transcripts: see `Utterances`.
    """

    characters = " " + "".join(sorted(set("".join(DIGITS))))

    def __init__(self, data: RecordedSpeech, split: Split, files: SoundFiles):
        """Reads all sounds into memory; they are short.

        Raises:
          UserError: if there is none, or one cannot be read.
        """
        self._data, self._split = data, SPLITS.index(split)
        self._sounds: dict[str, list[tuple[int, np.ndarray]]] = {}  # by speaker: pairs (digit, samples)
        for name in files.names:
            if match := re.fullmatch(r"(?:.*/)?(\d)_([^/_]+)_\d+\.wav", name):
                digit, speaker = match.groups()
                sound = files.read_sound(name, data.sample_rate)
                self._sounds.setdefault(speaker, []).append((int(digit), sound))
        if not self._sounds:
            raise UserError(f"{files.path} has no file named DIGIT_SPEAKER_NUMBER.wav")
        self._speakers = sorted(self._sounds)
        count = data.num_train if split == "train" else data.num_heldout
        plans = [self._plan(index) for index in range(count)]
        self.transcripts = [" ".join(DIGITS[digit] for digit in digits) for digits, _, _, _ in plans]
        num_samples = [sum(map(len, sounds)) + sum(silences) for _, sounds, silences, _ in plans]
        self.lengths = -(-np.array(num_samples) // data.hop)  # frames, rounded up

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        """Joins recordings to utterance `index`: frames [T, hop] int16 of samples, with its transcript."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        _, sounds, silences, rng = self._plan(index)
        # Noise as quiet as the silence of the recordings.
        first_gap, *gaps = [rng.normal(0, 3, size).astype(np.int16) for size in silences]
        pieces = [first_gap]
        for sound, gap in zip(sounds, gaps, strict=True):
            pieces += [sound, gap]
        return Utterance(in_frames(np.concatenate(pieces), self._data.hop), self.transcripts[index])

    def _plan(self, index: int) -> tuple[list[int], list[np.ndarray], list[int], np.random.Generator]:
        """Samples the content of an utterance with D digits.

        Returns:
          D digits, D sounds (int16 samples), D + 1 numbers of samples of silence before, between and after them, and
          the generator from which the noise is sampled next.
        """
        data = self._data
        rng = np.random.default_rng((data.seed, self._split, index))
        sounds_of_speaker = self._sounds[self._speakers[rng.integers(len(self._speakers))]]
        count = int(rng.integers(data.min_digits, data.max_digits + 1))
        chosen = [sounds_of_speaker[number] for number in rng.integers(len(sounds_of_speaker), size=count)]
        low, high = (round(seconds * data.sample_rate) for seconds in _SILENCE)
        silences = rng.integers(low, high + 1, size=count + 1).tolist()
        # At both ends a third of the numbers is negative, and means no silence.
        silences[0], silences[-1] = np.maximum(rng.integers(-high // 2, high + 1, size=2), 0).tolist()
        digits, sounds = [digit for digit, _ in chosen], [sound for _, sound in chosen]
        # Drop digits at the end, and the silence after them, until the transcript is short enough.
        while len(" ".join(DIGITS[digit] for digit in digits)) > data.max_characters and len(digits) > 1:
            digits, sounds, silences = digits[:-1], sounds[:-1], silences[:-1]
        return digits, sounds, silences, rng


class FileUtterances:
    """WAV files with transcripts; each is read at access.

    Attributes:
      characters: see `Utterances`.
      lengths: see `Utterances`.
      transcripts: see `Utterances`.
    """

    def __init__(self, data: RecordedSpeech, files: SoundFiles, rows: Sequence[tuple[str, str]]):
        """Reads every file once to determine its length.

        Args:
          data: configuration of the data.
          files: source of the files.
          rows: pairs (file name, transcript), one per utterance.

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
    """Utterances at several speeds, which also changes their pitch (speed perturbation).

    Attributes:
      characters: see `Utterances`.
      lengths: lengths of all utterances at the first speed, then at the second, and so on.
      transcripts: transcripts in the same order.
    """

    def __init__(self, utterances: Utterances, speeds: Sequence[float]):
        """Wraps utterances; they are resampled at access.

        Args:
          utterances: utterances whose frames contain samples.
          speeds: playback speeds, rounded to hundredths; 1 is the original.
        """
        self._utterances, self.characters = utterances, utterances.characters
        self._speeds = [fractions.Fraction(speed).limit_denominator(100) for speed in speeds]
        self.lengths = np.concatenate([_lengths_at(speed, utterances.lengths) for speed in self._speeds])
        self.transcripts = [*utterances.transcripts] * len(self._speeds)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Utterance:
        """Returns an utterance at a speed; all utterances at one speed come before those at the next."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        speed_index, index = divmod(index, len(self._utterances))
        frames, transcript = self._utterances[index]
        speed = self._speeds[speed_index]
        num_frames, hop = frames.shape
        if speed != 1:
            from scipy.signal import resample_poly  # importing takes 0.7 s

            sound = resample_poly(frames.ravel().astype(np.float64), speed.denominator, speed.numerator)
            samples = np.clip(np.rint(sound), -32_768, 32_767).astype(np.int16)
            frames = in_frames(samples[: _lengths_at(speed, num_frames) * hop], hop)
        return Utterance(frames, transcript)


def _lengths_at(speed: fractions.Fraction, lengths: Any) -> Any:
    """Returns lengths, an int or an array, at another speed, rounded up as in `scipy.signal.resample_poly`."""
    return -(-lengths * speed.denominator // speed.numerator)  # lengths / speed, rounded up


def _open_table(data: RecordedSpeech, path: epath.Path) -> FileUtterances:
    """Reads the table of WAV files and transcripts at `path`, or in the zip at `path`.

    Raises:
      UserError: if it is not UTF-8, has a line of another form, or is empty; or if a file cannot be read.
    """
    is_zip = path.suffix.lower() == ".zip"
    files = SoundFiles(path if is_zip else path.parent)
    try:
        lines = files.read(TABLE).decode("utf-8-sig").split("\n") if is_zip else read_lines(path)
    except UnicodeDecodeError:
        raise UserError(f"{TABLE} in {files.path} is not UTF-8: convert it, e.g. with iconv") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not is_blank(line):
            file, *transcript = line.split("\t")
            if len(transcript) != 1 or is_blank(transcript[0]):
                raise UserError(f"{path}, line {number}: a line must be a WAV file name, one TAB and the transcript")
            rows.append((file, " ".join(transcript[0].split())))
    if not rows:
        raise UserError(f"{path} has only blank lines: name a WAV file and its transcript in each")
    return FileUtterances(data, files, rows)


_SILENT_FRAMES = 10
"""Frames of silence, a tenth of a second, added on either side of a file: tightly cut speech is recognized better."""


def utterance_of(source: Any, data: RecordedSpeech) -> Utterance:
    """Returns a recording, padded with silence, as an utterance without transcript.

    Args:
      source: path of a WAV file of any sample rate, or samples at the rate of the data, [samples] int16.
      data: configuration of the data that the model was trained on.

    Raises:
      UserError: if a file cannot be read, an array has another shape or dtype, or the recording is longer than training
        utterances may be.
    """
    if hasattr(source, "shape"):
        name, samples = "the recording", np.asarray(source)
        if samples.ndim != 1 or samples.dtype != np.int16:
            raise UserError(
                f"a recording must be an array [samples] of int16, got {list(samples.shape)} of {samples.dtype}"
            )
    else:
        name = os.fspath(source)
        samples = read_wav_file(name, data.sample_rate)
    frames = in_frames(samples, data.hop)
    if len(frames) > data.max_length:
        seconds, max_seconds = (count * data.hop / data.sample_rate for count in (len(frames), data.max_length))
        raise UserError(
            f"{name} lasts {seconds:.1f} seconds, but the model was trained on at most {max_seconds:.1f}: cut the file"
        )
    padding = min(_SILENT_FRAMES, (data.max_length - len(frames)) // 2)
    return Utterance(np.pad(frames, ((padding, padding), (0, 0))), "")


def in_frames(samples: np.ndarray, hop: int) -> np.ndarray:
    """Cuts samples into frames, [T, hop]; the last frame is padded with zeros."""
    num_padding = -len(samples) % hop  # up to a multiple of `hop`
    return np.pad(samples, (0, num_padding)).reshape(-1, hop)


def log_mel_features(
    frames: Int[Array, "B T hop"], num_frames: Int[Array, " B"], sound: Sound
) -> Float[Array, "B T F"]:
    """Computes log-mel features relative to the maximum of the utterance: 1 at the maximum, -1 from 80 dB below it on.

    Thus neither loudness nor the amount of silence changes the features of a word, unlike a mean over the utterance.
    The range is that of Whisper (Radford et al., 2022, section 2.2), which does not normalize loudness. 0, which
    the masks of `spec_augment` contain, is in the middle of the range.

    Args:
      frames: 16-bit samples, with zeros after the valid ones.
      num_frames: number of valid frames of each utterance; features of other frames are -1.
      sound: sample rate and number of bands.
    """
    samples = frames.reshape(frames.shape[0], -1).astype(jnp.float32) / 32_768
    # The floor is about the quantization noise of 16 bits, so that digital silence is not lower.
    energies = log_mel(samples, sample_rate=sound.sample_rate, num_bands=sound.num_features, floor=1e-6)
    is_valid = (jnp.arange(frames.shape[1])[None] < num_frames[:, None])[..., None]  # [B, T, 1]
    largest = jnp.where(is_valid, energies, -jnp.inf).max(axis=(1, 2), keepdims=True)
    decades = (energies - largest) / math.log(10)  # powers of ten below the maximum; 8 are 80 dB
    return jnp.where(is_valid, 1 + jnp.maximum(decades, -8) / 4, -1)  # maps -8 .. 0 to -1 .. 1
