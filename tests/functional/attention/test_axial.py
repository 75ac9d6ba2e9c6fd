"""Attention over axes against attention over one sequence at a time."""

import itertools

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tfx_jax.functional import attention_over_axes, dot_product_attention

# Three axes besides batch, heads and size; queries and keys differ in those attended over.
QUERY_AXES, KEY_AXES = (3, 2, 4), (5, 6, 3)
B, N, K, H, U = 2, 4, 2, 8, 6


_attend = jax.jit(attention_over_axes, static_argnames=("attention_fn", "axes", "return_weights", "is_causal"))


def _inputs(axes):
    random = np.random.default_rng(0)
    keys = [KEY_AXES[i] if i + 1 in axes else QUERY_AXES[i] for i in range(3)]
    shapes = (B, *QUERY_AXES, N, H), (B, *keys, K, H), (B, *keys, K, U)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def _one_at_a_time(query, key, value, axes, mask):
    """Every sequence by itself, picked out by its place in the other axes; out and weights in the documented layout."""
    others = [axis for axis in range(4) if axis not in axes]
    batch, queries, keys = ([x.shape[i] for i in part] for x, part in ((query, others), (query, axes), (key, axes)))
    out, weights = np.zeros((*batch, *queries, N, U)), np.zeros((*batch, N, *queries, *keys))
    moved = [np.moveaxis(x, (*others, *axes), range(4)) for x in (query, key, value)]
    for place in itertools.product(*map(range, batch)):
        one_query, one_key, one_value = (x[place].reshape(1, -1, *x.shape[-2:]) for x in moved)
        one_weights = dense_weights(one_query, one_key, mask=mask[place].reshape(1, N, np.prod(queries), np.prod(keys)))
        out[place] = mixed(one_weights, one_value).reshape(*queries, N, U)
        weights[place] = one_weights.reshape(N, *queries, *keys)
    return np.moveaxis(out, range(4), (*others, *axes)), weights


@pytest.mark.parametrize("axes", [(1,), (2,), (3,), (1, 2), (2, 3), (3, 1), (1, 2, 3), (3, 2, 1)], ids=str)
def test_equals_one_sequence_at_a_time(axes):
    inputs = _inputs(axes)
    others = [axis for axis in range(4) if axis not in axes]
    shape = (*(inputs[0].shape[i] for i in others), N, *(inputs[x].shape[i] for x in (0, 1) for i in axes))
    mask = np.random.default_rng(1).random(shape) < 0.7
    got = _attend(dot_product_attention, *inputs, mask=mask, axes=axes, return_weights=True)
    for x, want in zip(got, _one_at_a_time(*inputs, axes, mask), strict=True):
        np.testing.assert_allclose(x, want, atol=1e-5)


@pytest.mark.parametrize("axes", [(1,), (3, 1), (3, 2, 1)], ids=str)
def test_axes_may_be_counted_from_the_end(axes):
    """The same program, so that nothing need be compiled."""
    counted_from_either_end = (
        _attend.lower(dot_product_attention, *_inputs(axes), axes=counted).as_text()
        for counted in (axes, tuple(axis - 5 for axis in axes))
    )
    assert len(set(counted_from_either_end)) == 1


def test_masks_and_biases_broadcast_over_whole_groups_of_axes_and_single_ones():
    query, key, value = _inputs((1, 3))
    full = (B, 2, N, 3, 4, 5, 3)

    def attend(mask, bias):
        return attention_over_axes(dot_product_attention, query, key, value, axes=(1, 3), mask=mask, bias=bias)

    # Two in one program: the broadcast pair of arrays, and the same written out.
    both = jax.jit(lambda pair, full_pair: (attend(*pair), attend(*full_pair)))
    for shape in ((1, 1, 1, 1, 1, 5, 3), (B, 1, 1, 1, 1, 1, 3), (1, 2, N, 3, 1, 1, 1), (B, 2, 1, 1, 4, 5, 1)):
        random = np.random.default_rng(2)
        mask, bias = random.random(shape) < 0.6, random.normal(size=shape).astype(np.float32)
        got, want = both((mask, bias), (np.broadcast_to(mask, full), np.broadcast_to(bias, full)))
        np.testing.assert_array_equal(got, want)


def test_segments_and_options_are_passed_on():
    query, key, value = _inputs(())
    ids = np.random.default_rng(3).integers(0, 3, (B, *QUERY_AXES))
    same = (ids[:, :, :, None, :, None] == ids[:, :, :, None, None, :]) & (ids != 0)[:, :, :, None, :, None]
    got = _attend(dot_product_attention, query, key, value, axes=(3,), segment_ids=ids, is_causal=True)
    mask = same & np.tri(4, dtype=bool)[None, None, None, None]
    want = _attend(dot_product_attention, query, key, value, axes=(3,), mask=mask)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(0, 3, 4, 1, 8), (2, 3, 0, 1, 8), (2, 0, 4, 1, 8)], ids=str)
def test_of_nothing_is_nothing(shape):
    attend = jax.jit(lambda x: attention_over_axes(dot_product_attention, x, x, x, axes=(1,)))
    assert attend(np.ones(shape, np.float32)).shape == shape


@pytest.mark.parametrize("axes", [(), (0,), (4,), (-1,), (5,), (-5,), (2, 2), (2, -3)], ids=str)
def test_axes_that_are_none(axes):
    with pytest.raises(ValueError, match=r"must be different axes between the batch \(0\) and the features \(4\)"):
        attention_over_axes(dot_product_attention, *_inputs(()), axes=axes)


def test_sizes_that_do_not_fit():
    query, key, value = _inputs((2,))
    with pytest.raises(ValueError, match="equal lengths in the axes that are not attended over"):
        attention_over_axes(dot_product_attention, query, key, value, axes=(1,))
    with pytest.raises(ValueError, match="key and value must have equal axes but for the last, got"):
        attention_over_axes(dot_product_attention, query, key, value.swapaxes(1, 3), axes=(1, 2, 3))
    with pytest.raises(ValueError, match="must have equal ranks, got 6, 5 and 6"):
        attention_over_axes(dot_product_attention, query, key[0], value, axes=(2,))
    with pytest.raises(ValueError, match=r"broadcastable to \(2, 3, 4, 4, 2, 6\), got shape \(1, 6\)"):
        attention_over_axes(dot_product_attention, query, key, value, mask=np.ones((1, 6), bool), axes=(2,))
