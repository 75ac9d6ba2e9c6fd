"""Masks against what their sentences say, one pair of query and key at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import causal_mask, padding_mask, segment_mask

SIZES = st.integers(0, 6)


@settings(deadline=None, max_examples=15)
@given(num_queries=SIZES, num_keys=st.none() | SIZES, offset=st.none() | st.integers(-7, 7))
def test_causal_mask(num_queries, num_keys, offset):
    mask = np.asarray(causal_mask(num_queries, num_keys, offset=offset))
    keys = num_queries if num_keys is None else num_keys
    last = keys - num_queries if offset is None else offset
    assert mask.shape == (1, 1, num_queries, keys)
    assert mask.dtype == bool
    for t, s in np.ndindex(num_queries, keys):
        assert mask[0, 0, t, s] == (s <= t + last)


def test_last_query_sees_every_key_by_default():
    for num_queries, num_keys in ((4, 4), (2, 5), (1, 6), (5, 2)):
        assert causal_mask(num_queries, num_keys)[0, 0, -1].all()


def test_rows_of_the_square_mask_are_those_of_decoding_steps():
    square = causal_mask(5)
    for t in range(5):
        np.testing.assert_array_equal(square[:, :, t : t + 1, : t + 1], causal_mask(1, t + 1))
        np.testing.assert_array_equal(square[:, :, t : t + 1], causal_mask(1, 5, offset=t))


@settings(deadline=None, max_examples=10)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), num_keys=SIZES)
def test_padding_mask(lengths, num_keys):
    mask = np.asarray(padding_mask(jnp.array(lengths), num_keys))
    assert mask.shape == (len(lengths), 1, 1, num_keys)
    assert mask.dtype == bool
    for b, s in np.ndindex(len(lengths), num_keys):
        assert mask[b, 0, 0, s] == (s < lengths[b])


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_segment_mask(data):
    b, t, s = (data.draw(st.integers(1, 4), label=name) for name in "BTS")
    ids = st.integers(0, 2)
    query_ids, key_ids = (
        np.array(data.draw(st.lists(ids, min_size=b * n, max_size=b * n))).reshape(b, n) for n in (t, s)
    )
    mask = np.asarray(jax.jit(segment_mask)(query_ids, key_ids))
    assert mask.shape == (b, 1, t, s)
    assert mask.dtype == bool
    for i, j, k in np.ndindex(b, t, s):
        assert mask[i, 0, j, k] == (query_ids[i, j] == key_ids[i, k] and query_ids[i, j] != 0)


def test_masks_combine_with_and():
    mask = causal_mask(3) & padding_mask(jnp.array([3, 2]), 3) & segment_mask(*[jnp.array([[1, 2, 2], [1, 1, 0]])] * 2)
    np.testing.assert_array_equal(mask[:, 0], [[[1, 0, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [0, 0, 0]]])


def test_masks_of_traced_values():
    lengths, ids = jnp.array([2, 4]), jnp.array([[1, 1, 2, 0], [3, 0, 0, 3]])
    np.testing.assert_array_equal(jax.jit(padding_mask, static_argnums=1)(lengths, 5), padding_mask(lengths, 5))
    np.testing.assert_array_equal(jax.jit(segment_mask)(ids, ids), segment_mask(ids, ids))
