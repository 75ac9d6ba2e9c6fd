"""WAV files in a folder or a zip."""

import io
import math
import struct
import warnings
import zipfile
import zlib

import numpy as np
import scipy.io.wavfile
from etils import epath

from tfx_jax.errors import UserError

TABLE = "transcripts.tsv"
"""Name of the file with transcripts in a zip. Each line is the name of a WAV file, a TAB and the transcript."""

_MAX_RATE = 192_000  # Hz; the filter that resamples a higher rate would need much memory and time


class SoundFiles:
    """The files of a folder or a zip.

    Attributes:
      names: names of the WAV files in alphabetical order, without those in subfolders of a folder.
    """

    def __init__(self, path: epath.PathLike):
        """Lists a folder or opens a zip.

        Raises:
          UserError: if the folder or file does not exist, or the file is not a zip.
        """
        self.path = epath.Path(path)
        self._zip = None
        if self.path.is_dir():
            self.names = sorted(path.name for path in self.path.iterdir() if path.suffix.lower() == ".wav")
            return
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(self.path.read_bytes()))
        except FileNotFoundError:
            raise UserError(f"there is no folder or zip {self.path}") from None
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path} cannot be read as a zip: {error}") from None
        self.names = sorted(name for name in self._zip.namelist() if name.lower().endswith(".wav"))

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
          UserError: if it does not exist or cannot be read.
        """
        try:
            return (self.path / name).read_bytes() if self._zip is None else self._zip.read(name)
        except (FileNotFoundError, KeyError):
            raise UserError(f"there is no file {name} in {self.path}") from None
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            # Damaged, or with a password.
            raise UserError(f"{name} in {self.path} cannot be read: {error}") from None

    def read_sound(self, name: str, sample_rate: int) -> np.ndarray:
        """Returns the samples of a WAV file, [samples] int16, see `read_wav`.

        Raises:
          UserError: if the file does not exist, is not a WAV file, has no samples, or a sample is NaN or infinite.
        """
        return read_wav(self.read(name), sample_rate, name=f"{name} in {self.path}")


def read_wav_file(path: epath.PathLike, sample_rate: int) -> np.ndarray:
    """Returns the samples of a WAV file, see `read_wav`; raises UserError also if the file cannot be read."""
    try:
        content = epath.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    return read_wav(content, sample_rate, name=str(path))


def read_wav(content: bytes, sample_rate: int, *, name: str) -> np.ndarray:
    """Decodes a WAV file with integer or floating-point samples and any number of channels.

    Args:
      content: bytes of the file.
      sample_rate: sample rate of the result in Hz; rates from a quarter of it to 192,000 Hz are resampled to it by
        `scipy.signal.resample_poly`.
      name: name of the file for error messages.

    Returns:
      The mean of the channels, [samples] int16, clipped to full scale.

    Raises:
      UserError: if it is not a WAV file, has no samples or an unsupported rate, or a sample is NaN or infinite.
    """
    if _is_cut(content):
        raise UserError(f"{name} cannot be read as a WAV file: it ends before its last sample")
    try:
        with warnings.catch_warnings():  # about unknown chunks
            warnings.simplefilter("ignore", scipy.io.wavfile.WavFileWarning)
            rate, samples = scipy.io.wavfile.read(io.BytesIO(content))
    except Exception as error:  # for damaged files scipy raises many types, and some messages mean nothing to users
        reason = " ".join(str(error).split()) if isinstance(error, ValueError) else "it is damaged"
        raise UserError(f"{name} cannot be read as a WAV file: {reason}") from None
    if not samples.size or rate < 1:
        raise UserError(f"the recording {name} is empty (0 audio samples)")
    least = -(-sample_rate // 4)  # resampling makes an array at most four times as long
    if rate != sample_rate and not least <= rate <= _MAX_RATE:
        raise UserError(f"{name} has a sample rate of {rate:,} Hz, not {least:,} to {_MAX_RATE:,} Hz: resample it")
    if samples.dtype == np.uint8:
        sound = (samples.astype(np.float64) - 128) / 128  # 8-bit WAV is unsigned, with silence at 128
    elif np.issubdtype(samples.dtype, np.integer):
        sound = samples / -float(np.iinfo(samples.dtype).min)  # in [-1, 1)
    else:
        sound = samples.astype(np.float64)
    if not np.isfinite(sound).all():
        raise UserError(f"{name} has a sample that is NaN or infinite")
    sound = sound.reshape(len(sound), -1).mean(axis=1)  # [samples] or [samples, channels] -> [samples]
    if rate != sample_rate:
        from scipy.signal import resample_poly  # a late import, because it takes 0.7 s and most runs do not need it

        divisor = math.gcd(rate, sample_rate)
        sound = resample_poly(sound, sample_rate // divisor, rate // divisor)
    return np.clip(np.rint(sound * 32_768), -32_768, 32_767).astype(np.int16)


def _is_cut(content: bytes) -> bool:
    """Returns whether the end of a WAV file's samples is missing, of which scipy only warns.

    A program that writes to a pipe gives their size as 0xFFFFFFFF, which means as many as there are.
    """
    order = ">" if content[:4] == b"RIFX" else "<"
    start = 12  # of a chunk: its name, its size and, padded to an even length, its content
    while len(content) >= start + 8:
        name, size = struct.unpack(f"{order}4sI", content[start : start + 8])
        if name == b"data":
            return size != 0xFFFFFFFF and start + 8 + size > len(content)
        start += 8 + size + size % 2
    return False
