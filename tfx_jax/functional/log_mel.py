"""What speech models hear: the energies of a sound in bands that are spaced as pitch is perceived."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def log_mel(
    samples: Float[Array, "B samples"],
    *,
    sample_rate: int,
    num_bands: int = 80,
    window_seconds: float = 0.025,
    hop_seconds: float = 0.01,
    floor: float = 1e-10,
) -> Float[Array, "B T F"]:
    """Computes log(max(mel(|STFT(x)|^2), floor)), the logarithm to base e.

    Frame t has the samples from t * hop on, under a periodic Hann window and filled up with zeros to the next power of
    two; behind the end there is silence. So a frame depends on no sample before it, and what stands behind a sound that
    is zero there changes nothing. The bands are those of `mel_filters`.

    Args:
      samples: -1 to 1, [B, samples].
      sample_rate: samples of a second.
      num_bands: F.
      window_seconds: length of a frame.
      hop_seconds: between the beginnings of frames, rounded to whole samples, as the window is.
      floor: of an energy, before the logarithm.

    Returns:
      float32 [B, T, F], T = ceil(samples / hop).

    Raises:
      ValueError: if a hop is longer than a window or shorter than a sample.

    >>> import jax
    >>> jax.eval_shape(lambda x: log_mel(x, sample_rate=16_000), jnp.zeros((2, 16_001))).shape
    (2, 101, 80)
    """
    window, hop = round(window_seconds * sample_rate), round(hop_seconds * sample_rate)
    if not 1 <= hop <= window:
        raise ValueError(f"a hop of {hop} samples, but a window of {window}")
    size = 1 << (window - 1).bit_length()
    rows, length = samples.shape
    num_frames = -(-length // hop)
    padded = jnp.pad(samples.astype(jnp.float32), ((0, 0), (0, num_frames * hop + window - length)))
    # As pieces of one hop beside each other: slices, where indices would be gathers.
    num_pieces = -(-window // hop)
    pieces = jnp.pad(padded, ((0, 0), (0, -padded.shape[1] % hop))).reshape(rows, -1, hop)
    pieces = jnp.pad(pieces, ((0, 0), (0, max(0, num_frames + num_pieces - 1 - pieces.shape[1])), (0, 0)))
    frames = jnp.concatenate([pieces[:, start : start + num_frames] for start in range(num_pieces)], axis=2)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    frames = frames[:, :, :window] * hann.astype(np.float32)[None, None]
    spectrum = jnp.fft.rfft(frames, n=size, axis=2)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    energies = power @ mel_filters(num_bands, size, sample_rate).T
    return jnp.log(jnp.maximum(energies, floor))


def mel_filters(num_bands: int, size: int, sample_rate: int) -> Float[np.ndarray, "F bins"]:
    """Triangles over the bins of a Fourier transform, whose corners are equally far apart in mels.

    Mels are 2595 log10(1 + f / 700) ("HTK"; O'Shaughnessy, 1987); bands reach from 0 Hz to half of the sample rate,
    and each has a peak of 1.

    Args:
      num_bands: F.
      size: of the transform, which gives size / 2 + 1 bins.
      sample_rate: samples of a second.

    Raises:
      ValueError: if there are so many bands that one of them has no bin.
    """
    highest = 2595 * math.log10(1 + sample_rate / 2 / 700)
    corners = 700 * (10 ** (np.linspace(0, highest, num_bands + 2) / 2595) - 1)
    bins = np.arange(size // 2 + 1) * sample_rate / size
    low, peak, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    filters = np.maximum(0, np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak)))
    if not filters.any(axis=1).all():
        raise ValueError(f"{num_bands} bands are too many for {size // 2 + 1} frequencies: a band has none")
    return filters.astype(np.float32)
