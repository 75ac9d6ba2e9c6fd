"""Masks over time and frequency: how large they are, where they lie, and that padding has no part in them."""

import functools

import jax
import numpy as np

from tfx_jax.functional import spec_augment

ROWS, T, F = 300, 24, 10
FRAMES = np.ones((ROWS, T, F), np.float32)


@functools.cache
def _drawn(num_frames, **options):
    lengths = np.full(ROWS, num_frames, np.int32)
    return np.asarray(jax.jit(functools.partial(spec_augment, **options))(FRAMES, lengths, jax.random.key(0)))


def test_a_mask_over_time_is_one_block_of_frames_that_exist():
    """Lengths from none to a quarter of twenty, each alike often, and every frame is hidden at times."""
    drawn = _drawn(20, num_time_masks=1, max_time_share=0.25, num_frequency_masks=0)
    hidden = ~drawn.any(axis=2)
    np.testing.assert_array_equal(drawn, np.broadcast_to(~hidden[..., None], drawn.shape))
    assert not hidden[:, 20:].any()
    edges = np.abs(np.diff(np.pad(hidden, ((0, 0), (1, 1))).astype(int), axis=1)).sum(axis=1)
    assert set(edges) <= {0, 2}
    lengths = np.bincount(hidden.sum(axis=1), minlength=6)
    assert len(lengths) == 6
    expected = ROWS / 6
    assert ((lengths - expected) ** 2 / expected).sum() < 20.5  # chi-squared of 5 degrees of freedom, p = 0.001
    assert hidden[:, :20].any(axis=0).all()


def test_a_mask_over_frequency_is_one_block_of_bands():
    drawn = _drawn(20, num_time_masks=0, num_frequency_masks=1, max_frequencies=3)
    hidden = ~drawn.any(axis=1)
    np.testing.assert_array_equal(drawn, np.broadcast_to(~hidden[:, None], drawn.shape))
    assert set(hidden.sum(axis=1)) == {0, 1, 2, 3}
    assert hidden.any(axis=0).all()


def test_masks_add_up_and_rows_draw_their_own():
    drawn = _drawn(24, num_time_masks=2, max_time_share=0.5, num_frequency_masks=2, max_frequencies=4)
    times, bands = ~drawn.any(axis=2), ~drawn.any(axis=1)
    assert times.sum(axis=1).max() > 12
    assert bands.sum(axis=1).max() > 4
    assert len({row.tobytes() for row in drawn}) > ROWS / 2


def test_a_row_without_frames_and_no_key_change_nothing():
    np.testing.assert_array_equal(_drawn(0, num_frequency_masks=0), FRAMES)
    assert spec_augment(FRAMES, np.full(ROWS, T), None) is FRAMES
