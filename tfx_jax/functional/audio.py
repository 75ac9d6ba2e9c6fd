"""Speech features: log-mel spectrograms and SpecAugment."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

WHISPER_SAMPLE_RATE, WHISPER_HOP = 16_000, 160
"""Samples per second, and samples between the starts of frames, of `whisper_features`."""


def log_mel(
    samples: Float[Array, "B samples"],
    *,
    sample_rate: int,
    num_bands: int = 80,
    window_seconds: float = 0.025,
    hop_seconds: float = 0.01,
    floor: float = 1e-10,
) -> Float[Array, "B T F"]:
    """Computes the log-mel spectrogram log(max(mel(|STFT(x)|^2), floor)), with the natural logarithm.

    Frame t starts at sample t * hop. It is multiplied by a periodic Hann window and zero-padded to the next power of
    two; after the last sample the signal is zero. So a frame does not depend on earlier samples, and zeros appended to
    a sound do not change its frames. The bands are those of `mel_filters`.

    Args:
      samples: from -1 to 1, [B, samples].
      sample_rate: samples per second.
      num_bands: F.
      window_seconds: length of a frame, rounded to whole samples.
      hop_seconds: distance between the starts of frames, rounded to whole samples.
      floor: smallest energy, applied before the logarithm.

    Returns:
      float32 [B, T, F], T = ceil(samples / hop).

    Raises:
      ValueError: if the hop is longer than the window or shorter than one sample.

    >>> import jax
    >>> jax.eval_shape(lambda x: log_mel(x, sample_rate=16_000), jnp.zeros((2, 16_001))).shape
    (2, 101, 80)
    """
    window, hop = round(window_seconds * sample_rate), round(hop_seconds * sample_rate)
    if not 1 <= hop <= window:
        raise ValueError(
            f"hop_seconds must be at least one sample and at most window_seconds, got a hop of {hop} and a window of "
            f"{window} samples"
        )
    size = 1 << (window - 1).bit_length()  # the next power of two
    length = samples.shape[1]
    num_frames = -(-length // hop)  # rounded up: frame i starts at sample i * hop
    padded = jnp.pad(samples.astype(jnp.float32), ((0, 0), (0, num_frames * hop + window - length)))
    energies = _powers(padded, num_frames, window, hop, size) @ mel_filters(num_bands, size, sample_rate).T
    return jnp.log(jnp.maximum(energies, floor))


def whisper_features(samples: Float[Array, "B samples"], *, num_bands: int = 80) -> Float[Array, "B T F"]:
    """Computes the features of Whisper (Radford et al., 2022, section 2.2): a log-mel spectrogram, about -1 to 1.5.

    Frame t is centered at sample 160 t, has 400 samples and a periodic Hann window; the sound is mirrored at its ends.
    The bands are those of `mel_filters` on the "slaney" scale. Decimal logarithms of energies are at least the largest
    of the sound minus 8, and then x becomes (x + 4) / 4.

    Args:
      samples: 16,000 per second, from -1 to 1, [B, samples]; at least 201. Pad them to 30 seconds with zeros.
      num_bands: F.

    Returns:
      float32 [B, T, F], T = samples / 160, rounded down.

    Raises:
      ValueError: for fewer than 201 samples, which cannot be mirrored.

    >>> import jax
    >>> jax.eval_shape(whisper_features, jnp.zeros((2, 480_000))).shape
    (2, 3000, 80)
    """
    window, hop = 400, WHISPER_HOP
    if samples.shape[1] <= window // 2:
        raise ValueError(
            f"samples must have at least {window // 2 + 1} samples in each row, got {samples.shape[1]}: pad with "
            "zeros, to 30 seconds for Whisper"
        )
    padded = jnp.pad(samples.astype(jnp.float32), ((0, 0), (window // 2, window // 2)), mode="reflect")
    power = _powers(padded, samples.shape[1] // hop, window, hop, window)
    energies = power @ mel_filters(num_bands, window, WHISPER_SAMPLE_RATE, scale="slaney").T
    log_energies = jnp.log10(jnp.maximum(energies, 1e-10))
    smallest = log_energies.max(axis=(1, 2), keepdims=True) - 8
    return (jnp.maximum(log_energies, smallest) + 4) / 4


def _powers(padded: Array, num_frames: int, window: int, hop: int, size: int) -> Float[Array, "B T bins"]:
    """Returns the power spectra of frames that start every `hop` samples, windowed and zero-padded to `size`.

    `padded` are the samples, [B, samples], long enough for all frames; a frame has `window` samples, and a spectrum
    size / 2 + 1 bins.
    """
    # Frames are concatenated from pieces of one hop: slices are faster than a gather by indices.
    num_pieces = -(-window // hop)  # of a frame, rounded up
    pieces = jnp.pad(padded, ((0, 0), (0, -padded.shape[1] % hop))).reshape(padded.shape[0], -1, hop)
    num_missing = max(0, num_frames + num_pieces - 1 - pieces.shape[1])
    pieces = jnp.pad(pieces, ((0, 0), (0, num_missing), (0, 0)))
    frames = jnp.concatenate([pieces[:, start : start + num_frames] for start in range(num_pieces)], axis=2)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)  # the Hann window
    frames = frames[:, :, :window] * hann.astype(np.float32)[None, None]
    spectrum = jnp.fft.rfft(frames, n=size, axis=2)
    return jnp.square(spectrum.real) + jnp.square(spectrum.imag)


def mel_filters(num_bands: int, size: int, sample_rate: int, *, scale: str = "htk") -> Float[np.ndarray, "F bins"]:
    """Returns triangular filters over the bins of a Fourier transform, with corners equally spaced in mels.

    On the scale "htk", mels are 2595 log10(1 + f / 700) (O'Shaughnessy, 1987) and each band has a peak of 1. On the
    scale "slaney" (Slaney, 1998, Auditory Toolbox), mels are f / (200 / 3) up to 1,000 Hz and grow by 27 where f grows
    6.4 times above, and each band has an area of 1 over frequencies. The bands cover 0 Hz to half of the sample rate.

    Args:
      num_bands: F.
      size: length of the transform, which has size / 2 + 1 bins.
      sample_rate: samples per second.
      scale: "htk" or "slaney".

    Raises:
      ValueError: if there are so many bands that one contains no bin, or the scale is unknown.
    """
    if scale not in ("htk", "slaney"):
        raise ValueError(f"scale must be htk or slaney, got {scale!r}")
    nyquist = sample_rate / 2
    if scale == "htk":
        highest = 2595 * math.log10(1 + nyquist / 700)  # in mels
        corners = 700 * (10 ** (np.linspace(0, highest, num_bands + 2) / 2595) - 1)  # in Hz
    else:
        per_mel = math.log(6.4) / 27  # of the logarithm, above 1,000 Hz, which are 15 mels
        highest = 15 + math.log(nyquist / 1000) / per_mel if nyquist > 1000 else nyquist * 3 / 200
        mels = np.linspace(0, highest, num_bands + 2)
        corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * per_mel))
    bins = np.arange(size // 2 + 1) * sample_rate / size  # frequencies in Hz
    # Band i rises from corner i to its peak at corner i + 1 and falls to corner i + 2.
    low, peak, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    filters = np.maximum(0, np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak)))
    if not filters.any(axis=1).all():
        raise ValueError(
            f"num_bands={num_bands} is too large for {size // 2 + 1} frequencies, because a band contains none: use "
            "fewer bands or a longer window"
        )
    return (filters if scale == "htk" else filters * 2 / (high - low)).astype(np.float32)


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

    The length of a time mask is uniform from 0 to `max_time_share` of the frames of the row, its start uniform over all
    positions where it fits. The width of a frequency mask is uniform from 0 to `max_frequencies`. Masks may overlap.
    Time masks relative to the length are from Park et al. (2020, https://arxiv.org/abs/1912.05533), as in the
    Conformer. The paper's time warping, which it reports to help little, is not implemented.

    Args:
      frames: [B, T, F]; normalize them to mean 0, so that a mask sets the mean.
      num_frames: number of frames of each row, [B].
      rng: PRNG key; each row gets separate masks. None means evaluation and returns `frames` unchanged.
      num_time_masks: time masks per row.
      max_time_share: longest time mask, as a share of the row's frames.
      num_frequency_masks: frequency masks per row.
      max_frequencies: widest frequency mask, in bands; at most F.

    Returns:
      The masked frames, in the shape and dtype of `frames`.
    """
    if rng is None:
        return frames
    rows, length, bands = frames.shape
    rng_times, rng_frequencies = jax.random.split(rng)
    longest = (num_frames.astype(jnp.float32) * max_time_share).astype(jnp.int32)
    times = _masked(rng_times, num_time_masks, longest, num_frames, length)
    num_bands = jnp.full(rows, bands)
    widest = jnp.full(rows, min(max_frequencies, bands))
    frequencies = _masked(rng_frequencies, num_frequency_masks, widest, num_bands, bands)
    return jnp.where(times[:, :, None] | frequencies[:, None], jnp.zeros((), frames.dtype), frames)


def _masked(rng: Array, count: int, longest: Int[Array, " B"], sizes: Int[Array, " B"], length: int) -> Array:
    """Returns which of `length` positions are hidden by any of `count` masks per row, bool [B, length].

    Masks are at most `longest` long and lie within the first `sizes` positions.
    """
    rng_lengths, rng_starts = jax.random.split(rng)
    shape = (count, longest.shape[0])
    lengths = jax.random.randint(rng_lengths, shape, 0, longest[None] + 1)
    starts = jax.random.randint(rng_starts, shape, 0, jnp.maximum(sizes[None] - lengths, 0) + 1)
    positions = jnp.arange(length)[None, None]
    is_from_start, is_before_end = positions >= starts[..., None], positions < (starts + lengths)[..., None]
    return (is_from_start & is_before_end).any(axis=0)
