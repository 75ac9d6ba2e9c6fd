"""Sounds of WAV files, in a folder or in a zip."""

import io
import math
import warnings
import zipfile

import numpy as np
import scipy.io.wavfile
from etils import epath

from tfx_jax.errors import UserError

TABLE = "transcripts.tsv"
"""In a zip: lines of the form name of a WAV file, TAB, transcript."""


class SoundFiles:
    """The files below a folder, or of a zip.

    Attributes:
      names: of the WAV files, of a folder those that lie in it, not below; in alphabetical order.
    """

    def __init__(self, path: epath.PathLike):
        """Opens a zip, if that is one.

        Raises:
          UserError: if there is no such folder or file, or it is no zip.
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
        """Returns what a file has.

        Raises:
          UserError: if there is none, or it cannot be read.
        """
        try:
            return (self.path / name).read_bytes() if self._zip is None else self._zip.read(name)
        except (FileNotFoundError, KeyError):
            raise UserError(f"there is no file {name} in {self.path}") from None
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # damaged, or with a password
            raise UserError(f"{name} in {self.path} cannot be read: {error}") from None

    def read_sound(self, name: str, sample_rate: int) -> np.ndarray:
        """Returns the samples of a WAV file, see `read_wav`.

        Raises:
          UserError: as `read` and `read_wav` do.
        """
        return read_wav(self.read(name), sample_rate, name=f"{name} in {self.path}")


def read_wav(content: bytes, sample_rate: int, *, name: str) -> np.ndarray:
    """Reads a WAV file of integers or floating-point numbers, of any rate and with any number of channels.

    Args:
      content: of the file.
      sample_rate: wanted; a sound of another one is resampled, by `scipy.signal.resample_poly`.
      name: what messages call the file.

    Returns:
      The mean of the channels, [samples] int16; what is louder than full scale is cut.

    Raises:
      UserError: if it is no WAV file, has no samples, or one that is no number.
    """
    try:
        with warnings.catch_warnings():  # of chunks that are not understood, and of data that ends too soon
            warnings.simplefilter("ignore", scipy.io.wavfile.WavFileWarning)
            rate, samples = scipy.io.wavfile.read(io.BytesIO(content))
    except Exception as error:  # of a damaged file scipy says many things, some about its own variables
        reason = " ".join(str(error).split()) if isinstance(error, ValueError) else "it is damaged"
        raise UserError(f"{name} cannot be read as a WAV file: {reason}") from None
    if not samples.size or rate < 1:
        raise UserError(f"{name} has no samples")
    if samples.dtype == np.uint8:
        sound = (samples.astype(np.float64) - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        sound = samples / -float(np.iinfo(samples.dtype).min)
    else:
        sound = samples.astype(np.float64)
    if not np.isfinite(sound).all():
        raise UserError(f"{name} has a sample that is no number")
    sound = sound.reshape(len(sound), -1).mean(axis=1)
    if rate != sample_rate:
        from scipy.signal import resample_poly  # takes 0.7 s, which most runs do not need

        divisor = math.gcd(rate, sample_rate)
        sound = resample_poly(sound, sample_rate // divisor, rate // divisor)
    return np.clip(np.rint(sound * 32_768), -32_768, 32_767).astype(np.int16)
