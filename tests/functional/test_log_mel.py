"""Log-mel energies against sums written out in float64, and what sounds give which band."""

import functools
import math

import jax
import numpy as np
import pytest

from tfx_jax.functional import log_mel, mel_filters, whisper_features

RATE, BANDS = 1_000, 5  # a window of 25 samples, a hop of 10, a transform of 32

_log_mel = jax.jit(log_mel, static_argnames=("sample_rate", "num_bands", "window_seconds", "hop_seconds"))
_ours = functools.partial(_log_mel, sample_rate=RATE, num_bands=BANDS)


def _mels(frequency):
    return 2595 * math.log10(1 + frequency / 700)


def _oracle(samples):
    """Frame by frame, bin by bin, band by band."""
    rows = []
    for start in range(0, len(samples), 10):
        heard = [*samples[start : start + 25], *[0.0] * 25][:25]
        windowed = [x * math.sin(math.pi * n / 25) ** 2 for n, x in enumerate(heard)]
        power = []
        for k in range(17):
            terms = [x * np.exp(-2j * math.pi * k * n / 32) for n, x in enumerate(windowed)]
            power.append(abs(sum(terms)) ** 2)
        energies = []
        for band in range(BANDS):
            corners = [700 * (10 ** (_mels(RATE / 2) * (band + i) / (BANDS + 1) / 2595) - 1) for i in range(3)]
            energy = 0.0
            for k, value in enumerate(power):
                frequency = k * RATE / 32
                if corners[0] <= frequency <= corners[1]:
                    energy += value * (frequency - corners[0]) / (corners[1] - corners[0])
                elif corners[1] < frequency <= corners[2]:
                    energy += value * (corners[2] - frequency) / (corners[2] - corners[1])
            energies.append(math.log(max(energy, 1e-10)))
        rows.append(energies)
    return np.array(rows)


def test_equals_the_sums_in_float64():
    samples = np.random.default_rng(0).uniform(-1, 1, (2, 73)).astype(np.float32)
    found = _ours(samples)
    assert (found.shape, found.dtype) == ((2, 8, BANDS), np.float32)
    np.testing.assert_allclose(found, [_oracle(row.astype(np.float64)) for row in samples], atol=2e-5)


@pytest.mark.parametrize("hop_seconds", [0.005, 0.0125, 0.025])
def test_hops_are_cut_out_of_the_sound(hop_seconds):
    """Frames of a hop are every so many frames of a hop of one sample."""
    samples = np.random.default_rng(1).uniform(-1, 1, (1, 60)).astype(np.float32)
    hop = round(hop_seconds * RATE)
    every = _ours(samples, hop_seconds=0.001)
    np.testing.assert_allclose(_ours(samples, hop_seconds=hop_seconds), every[:, ::hop], atol=1e-4)


def test_silence_behind_changes_nothing_and_has_the_floor():
    samples = np.random.default_rng(2).uniform(-1, 1, (1, 40)).astype(np.float32)
    longer = _ours(np.pad(samples, ((0, 0), (0, 60))))
    np.testing.assert_allclose(longer[:, :4], _ours(samples), atol=1e-6)
    np.testing.assert_allclose(longer[:, 4:], math.log(1e-10), rtol=1e-6)


def test_a_tone_is_loudest_in_the_band_around_it():
    filters = mel_filters(20, 512, 16_000)
    for band in (3, 10, 17):
        frequency = filters[band].argmax() * 16_000 / 512
        tone = np.sin(2 * np.pi * frequency * np.arange(4_000) / 16_000)[None].astype(np.float32)
        found = np.asarray(_log_mel(tone, sample_rate=16_000, num_bands=20))
        assert set(found[0, :20].argmax(axis=-1)) == {band}


def _slaney_filters(num_bands):
    """Of 201 bins up to 8,000 Hz: triangles of area 1, whose corners grow linearly to 1,000 Hz, then by 6.4 in 27."""

    def frequency(mel):
        return mel * 200 / 3 if mel < 15 else 1_000 * 6.4 ** ((mel - 15) / 27)

    highest = 15 + 27 * math.log(8) / math.log(6.4)
    filters = np.zeros((num_bands, 201))
    for band in range(num_bands):
        low, peak, high = (frequency(highest * (band + i) / (num_bands + 1)) for i in range(3))
        for k in range(201):
            if low <= 40 * k <= high:
                side = (40 * k - low) / (peak - low) if 40 * k <= peak else (high - 40 * k) / (high - peak)
                filters[band, k] = side * 2 / (high - low)
    return filters


def test_features_of_whisper_equal_the_sums_in_float64():
    """Frames around every 160th sample of a sound that is mirrored at its ends; each row has its own floor."""
    samples = np.random.default_rng(3).uniform(-1, 1, (2, 900)).astype(np.float32)
    samples[1, :600] = 0
    found = jax.jit(whisper_features)(samples)
    assert (found.shape, found.dtype) == ((2, 5, 80), np.float32)
    turn = np.exp(-2j * np.pi * np.outer(np.arange(201), np.arange(400)) / 400)
    for row, ours in zip(samples.astype(np.float64), found, strict=True):
        mirrored = [*row[200:0:-1], *row, *row[-2:-202:-1]]
        frames = [
            np.array(mirrored[160 * t : 160 * t + 400]) * np.sin(np.pi * np.arange(400) / 400) ** 2 for t in range(5)
        ]
        energies = np.array([_slaney_filters(80) @ np.abs(turn @ frame) ** 2 for frame in frames])
        want = np.log10(np.maximum(energies, 1e-10))
        np.testing.assert_allclose(ours, (np.maximum(want, want.max() - 8) + 4) / 4, atol=2e-5)


def test_a_sound_that_is_too_short_to_be_mirrored_is_refused():
    assert jax.eval_shape(whisper_features, np.zeros((1, 201), np.float32)).shape == (1, 1, 80)
    message = "samples must have at least 201 samples in each row, got 200: pad with zeros, to 30 seconds for Whisper"
    with pytest.raises(ValueError, match=message):
        whisper_features(np.zeros((1, 200), np.float32))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="scale must be htk or slaney, got 'mel'"):
        mel_filters(20, 512, 16_000, scale="mel")
    with pytest.raises(ValueError, match=r"^num_bands=200 is too large for 257 frequencies, "):
        mel_filters(200, 512, 16_000)
    with pytest.raises(ValueError, match=r"^hop_seconds must be .* got a hop of 50 and a window of 25 samples$"):
        log_mel(np.zeros((1, 9), np.float32), sample_rate=RATE, hop_seconds=0.05)
