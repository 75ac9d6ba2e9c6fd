"""Masks against what their sentences say, one pair of query and key at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import causal_mask, dot_product_attention, padding_mask, segment_mask

SIZES = st.integers(0, 3)  # few, as each of them is a program
OFFSETS = range(-7, 8)
_padding = jax.jit(padding_mask, static_argnums=1)
_segments = jax.jit(segment_mask)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, None), (4, None), (2, 5), (5, 2), (1, 4), (3, 0)])
def test_causal_mask(num_queries, num_keys):
    """With every offset, traced, and with none."""

    @jax.jit
    def masks(offsets):
        by_default = causal_mask(num_queries, num_keys)
        return by_default, jax.vmap(lambda offset: causal_mask(num_queries, num_keys, offset=offset))(offsets)

    by_default, by_offset = masks(np.array(OFFSETS))
    keys = num_queries if num_keys is None else num_keys
    for offset, mask in zip([None, *OFFSETS], map(np.asarray, [by_default, *np.asarray(by_offset)]), strict=True):
        last = keys - num_queries if offset is None else offset
        assert mask.shape == (1, 1, num_queries, keys)
        assert mask.dtype == bool
        for t, s in np.ndindex(num_queries, keys):
            assert mask[0, 0, t, s] == (s <= t + last)


def test_last_query_sees_every_key_by_default():
    sizes = ((4, 4), (2, 5), (1, 6), (5, 2))
    for mask in jax.jit(lambda: [causal_mask(num_queries, num_keys) for num_queries, num_keys in sizes])():
        assert np.asarray(mask)[0, 0, -1].all()


def test_rows_of_the_square_mask_are_those_of_decoding_steps():
    steps = [(t + 1, {}) for t in range(5)] + [(5, {"offset": t}) for t in range(5)]
    square, rows = jax.jit(lambda: (causal_mask(5), [causal_mask(1, keys, **offset) for keys, offset in steps]))()
    square = np.asarray(square)
    for i, (keys, _) in enumerate(steps):
        np.testing.assert_array_equal(square[:, :, i % 5 : i % 5 + 1, :keys], rows[i])


@settings(deadline=None, max_examples=10)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3), num_keys=SIZES)
def test_padding_mask(lengths, num_keys):
    mask = np.asarray(_padding(np.array(lengths), num_keys))
    assert mask.shape == (len(lengths), 1, 1, num_keys)
    assert mask.dtype == bool
    for b, s in np.ndindex(len(lengths), num_keys):
        assert mask[b, 0, 0, s] == (s < lengths[b])


def test_a_mask_of_tokens_is_no_length():
    with pytest.raises(
        ValueError, match=r"lengths must be \[B\], got shape \(2, 3\); .*tokens\.astype\(bool\)\[:, None, None\]"
    ):
        padding_mask(np.ones((2, 3), np.int32), 3)


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_segment_mask(data):
    b, t, s = (data.draw(st.integers(1, 4), label=name) for name in "BTS")
    ids = st.integers(0, 2)
    query_ids, key_ids = (
        np.array(data.draw(st.lists(ids, min_size=b * n, max_size=b * n))).reshape(b, n) for n in (t, s)
    )
    mask = np.asarray(_segments(query_ids, key_ids))
    assert mask.shape == (b, 1, t, s)
    assert mask.dtype == bool
    for i, j, k in np.ndindex(b, t, s):
        assert mask[i, 0, j, k] == (query_ids[i, j] == key_ids[i, k] and query_ids[i, j] != 0)


def test_masks_combine_with_and():
    ids = np.array([[1, 2, 2], [1, 1, 0]])
    mask = jax.jit(lambda: causal_mask(3) & padding_mask(jnp.array([3, 2]), 3) & segment_mask(ids, ids))()
    np.testing.assert_array_equal(
        np.asarray(mask)[:, 0], [[[1, 0, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [0, 0, 0]]]
    )


def test_inputs_of_heads_by_length_are_told_what_the_layout_is():
    """Queries and keys of [B, N, T, H]: of different lengths, or with a mask or a bias."""
    query, key = np.zeros((2, 4, 7, 8), np.float32), np.zeros((2, 4, 5, 8), np.float32)
    layout = r"the layout of query, key and value is \[batch, length, heads, size\]"
    with pytest.raises(ValueError, match=rf"got 5 key heads and 7 query heads; {layout}"):
        dot_product_attention(query, key, key)
    for shape in ((2, 4, 7, 7), (1, 4, 7, 7), (2, 1, 7, 7), (1, 1, 7, 7)):
        with pytest.raises(ValueError, match=layout):
            dot_product_attention(query, query, query, mask=np.ones(shape, bool))
        with pytest.raises(ValueError, match=layout):
            dot_product_attention(query, query, query, bias=np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=r"got shape \(2, 4, 6, 7\)$"):
        dot_product_attention(query, query, query, mask=np.ones((2, 4, 6, 7), bool))
