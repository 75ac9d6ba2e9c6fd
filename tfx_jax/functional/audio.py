"""Speech features: log-mel spectrograms and SpecAugment."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


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


def spec_augment(
    frames: Float[Array, "B T F"],
    num_frames: Int[Array, " B"],
    rng: Array | None,
    *,
    num_time_masks: int = 2,
    max_time_share: float = 0.05,
    num_frequency_masks: int = 2,
    max_frequencies: int = 27,
) -> Float[Array, "B T F"]:
    """Zeroes blocks of frames and of bands (SpecAugment: Park et al., 2019, https://arxiv.org/abs/1904.08779).

    A mask over time has t frames, drawn from 0 to `max_time_share` of those of the row, each alike likely, and begins
    anywhere it fits; one over frequency has f bands, from 0 to `max_frequencies`. Masks may overlap. The paper's
    warping of time, which it reports to give little, is left out; that masks over time are a share of a row is of Park
    et al. (2020, https://arxiv.org/abs/1912.05533), and what the Conformer uses.

    Args:
      frames: whose mean should be 0, as a mask says nothing then, [B, T, F].
      num_frames: how many of them each row has, [B].
      rng: PRNG key, from which each row draws its own masks; None means evaluation and returns `frames` unchanged.
      num_time_masks: of each row.
      max_time_share: see above.
      num_frequency_masks: of each row.
      max_frequencies: see above, at most F.

    Returns:
      Like `frames`.
    """
    if rng is None:
        return frames
    rows, length, bands = frames.shape
    for_times, for_frequencies = jax.random.split(rng)
    longest = (num_frames.astype(jnp.float32) * max_time_share).astype(jnp.int32)
    times = _masked(for_times, num_time_masks, longest, num_frames, length)
    of_bands = jnp.full(rows, bands)
    widest = jnp.full(rows, min(max_frequencies, bands))
    frequencies = _masked(for_frequencies, num_frequency_masks, widest, of_bands, bands)
    return jnp.where(times[:, :, None] | frequencies[:, None], jnp.zeros((), frames.dtype), frames)


def _masked(rng: Array, count: int, longest: Int[Array, " B"], sizes: Int[Array, " B"], length: int) -> Array:
    """Which of `length` places `count` masks of a row hide, [B, length]."""
    for_lengths, for_starts = jax.random.split(rng)
    shape = (count, longest.shape[0])
    lengths = jax.random.randint(for_lengths, shape, 0, longest[None] + 1)
    starts = jax.random.randint(for_starts, shape, 0, jnp.maximum(sizes[None] - lengths, 0) + 1)
    places = jnp.arange(length)[None, None]
    return ((places >= starts[..., None]) & (places < (starts + lengths)[..., None])).any(axis=0)
