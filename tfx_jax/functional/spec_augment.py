"""Masks over time and frequency, which keep a recogniser from trusting any one of them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
