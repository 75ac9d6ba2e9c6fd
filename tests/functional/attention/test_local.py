"""Local and sliding-window attention: what they see, what they cost, and what they refuse."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import mixed
from tests.functional.attention.oracles.sparse import local_pairs, weights_of_texts, window_pairs
from tfx_jax.functional import dot_product_attention, local_attention, sliding_window_attention


def _inputs(t, s, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, t, 4, 5), (2, s, 2, 5), (2, s, 2, 3)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def _assert_follows(pairs, attend, t, s, is_causal):
    """Values and maps equal the oracle's, with a bias, padding and packed segments."""
    query, key, value = _inputs(t, s)
    random = np.random.default_rng(1)
    bias = random.normal(size=(1, 4, 1, s)).astype(np.float32)
    padding = random.random((2, 1, 1, s)) < 0.8
    ids = np.sort(random.integers(0, 3, size=(2, s)))
    attend = jax.jit(functools.partial(attend, is_causal=is_causal, return_weights=True))
    out, weights = attend(query, key, value, bias, padding, segment_ids=(ids[:, s - t :], ids))
    want = weights_of_texts(pairs, query, key, bias=bias, mask=padding, segment_ids=ids, is_causal=is_causal)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)


@pytest.mark.parametrize(
    ("t", "s", "block_size", "is_causal"),
    [
        (11, 11, 4, False),
        (11, 11, 4, True),
        (8, 8, 1, False),
        (5, 13, 3, False),  # the first query is in the middle of a block
        (1, 10, 4, True),
        (7, 7, 100, True),
    ],
)
def test_local_attention_sees_the_block_and_nothing_else(t, s, block_size, is_causal):
    attend = functools.partial(local_attention, block_size=block_size)
    _assert_follows(functools.partial(local_pairs, block_size=block_size), attend, t, s, is_causal)


@pytest.mark.parametrize(
    ("t", "s", "window", "block_size", "is_causal"),
    [
        (13, 13, 2, 4, True),
        (13, 13, (5, 0), 2, False),
        (12, 12, (0, 7), 3, False),
        (9, 9, 0, 2, False),
        (70, 70, (4, 3), None, False),  # three blocks, none of them full
        (3, 20, 4, None, True),
        (9, 14, 10**9, 4, True),
        pytest.param(13, 13, 2, 4, False, marks=pytest.mark.slow),
        pytest.param(10, 10, 3, None, True, marks=pytest.mark.slow),
        pytest.param(1, 20, 4, None, False, marks=pytest.mark.slow),
    ],
)
def test_sliding_window_attention_sees_the_band_and_nothing_else(t, s, window, block_size, is_causal):
    attend = functools.partial(sliding_window_attention, window=window, block_size=block_size)
    back, ahead = window if isinstance(window, tuple) else (window, window)
    _assert_follows(functools.partial(window_pairs, back=back, ahead=ahead), attend, t, s, is_causal)


@pytest.mark.parametrize("name", ["local", "window"])
def test_masks_of_any_shape_and_texts_in_any_order(name):
    """Of one row, of each head, of all keys at once; padding is what no head may see. Texts may be interleaved."""
    query, key, value = _inputs(11, 11)
    random = np.random.default_rng(3)
    ids = random.permuted(np.array([[0, 1, 1, 1, 1, 5, 5, 5, 5, 3, 3]] * 2), axis=1)
    if name == "local":
        attend, pairs = functools.partial(local_attention, block_size=3), functools.partial(local_pairs, block_size=3)
    else:
        attend = functools.partial(sliding_window_attention, window=2, block_size=4)
        pairs = functools.partial(window_pairs, back=2, ahead=2)
    shapes = {(1, 1, 1, 11): ids, (1, 4, 1, 11): None, (2, 4, 1, 11): ids, (2, 1, 1, 1): None}
    masks = {shape: random.random(shape) < 0.6 for shape in shapes}
    masks[2, 1, 1, 1] = np.array([True, False]).reshape(2, 1, 1, 1)

    @jax.jit
    def run(*arrays):
        return [attend(*arrays, None, masks[shape], segment_ids=ids) for shape, ids in shapes.items()]

    for out, (shape, ids) in zip(run(query, key, value), shapes.items(), strict=True):
        want = weights_of_texts(pairs, query, key, mask=masks[shape], segment_ids=ids)
        np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)


def test_gradients_of_decoding_with_a_cache_equal_those_of_dense_attention():
    query, key, value = _inputs(5, 13)
    bias = np.random.default_rng(1).normal(size=(2, 1, 1, 13)).astype(np.float32)
    pairs = np.asarray(window_pairs(5, 13, back=3, ahead=0))[None, None]

    def gradients(attend, **options):
        def loss(*arrays):
            return jnp.square(attend(*arrays, **options) - 1.0).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, key, value, bias)

    sparse = functools.partial(sliding_window_attention, window=3, block_size=2, is_causal=True)
    chex.assert_trees_all_close(gradients(sparse), gradients(dot_product_attention, mask=pairs), atol=1e-4)


@pytest.mark.parametrize(
    "attend",
    [
        functools.partial(local_attention, block_size=16),
        functools.partial(sliding_window_attention, window=8, block_size=16),
    ],
)
def test_dropout_drops_single_weights_and_keeps_their_mean(attend):
    query, key, _ = _inputs(64, 64)
    # What comes out are the weights themselves.
    unit = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (2, 64, 2, 64))
    attend = jax.jit(functools.partial(attend, dropout_rate=0.25, return_weights=True))
    out, weights = map(np.asarray, attend(query, key, unit, dropout_rng=jax.random.key(0)))
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    dropped = out.transpose(0, 2, 1, 3)
    seen = weights > 0
    kept = dropped > 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-5)
    assert abs(kept[seen].mean() - 0.75) < 4 * (0.25 * 0.75 / seen.sum()) ** 0.5
    assert not np.array_equal(kept[..., :16, :16], kept[..., 16:32, 16:32])  # each block draws its own
    without, _ = attend(query, key, unit)
    np.testing.assert_allclose(np.asarray(without).transpose(0, 2, 1, 3), weights, atol=1e-6)


def _compiled(attend, length, with_gradient=True):
    """The loss, alone or with its gradients."""

    def loss(*arrays):
        return jnp.square(attend(*arrays)).sum()

    def both(*arrays):
        return loss(*arrays), jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
    return jax.jit(both if with_gradient else loss).lower(like, like, like).compile()


@pytest.mark.parametrize(
    "attend",
    [
        functools.partial(local_attention, block_size=128),
        functools.partial(sliding_window_attention, window=128, is_causal=True),
        pytest.param(functools.partial(sliding_window_attention, window=128), marks=pytest.mark.slow),
    ],
    ids=["local", "causal window", "window"],
)
def test_memory_is_linear_up_to_65536_tokens(attend):
    """Forward and backward: both are in the program."""
    short, long = (_compiled(attend, length).memory_analysis().temp_size_in_bytes for length in (16_384, 65_536))
    assert long < 4.1 * short
    assert long < 65_536**2 / 4  # a sixteenth of one float32 map


def test_local_attention_takes_the_operations_of_dense_attention_over_the_number_of_blocks():
    dense = _compiled(dot_product_attention, 1024, with_gradient=False).cost_analysis()["flops"]
    local = _compiled(functools.partial(local_attention, block_size=128), 1024, with_gradient=False).cost_analysis()
    assert local["flops"] == pytest.approx(dense / 8, rel=0.05)


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (functools.partial(local_attention, block_size=0), "block_size must be at least 1, got 0"),
        (functools.partial(sliding_window_attention, window=-1), "window must be at least 0, got -1"),
        (functools.partial(sliding_window_attention, window=(2, -3)), r"window must be at least 0, got \(2, -3\)"),
        (functools.partial(sliding_window_attention, window=1, block_size=0), "block_size must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(attend, message):
    with pytest.raises(ValueError, match=message):
        attend(*_inputs(6, 6))


@pytest.mark.parametrize(
    "attend",
    [functools.partial(local_attention, block_size=2), functools.partial(sliding_window_attention, window=2)],
    ids=["local", "window"],
)
def test_impossible_arrays_are_refused(attend):
    query, key, value = _inputs(6, 6)
    attend = functools.partial(jax.eval_shape, attend)
    with pytest.raises(ValueError, match=r"bias must be the same for all queries, got shape \(1, 1, 6, 6\)"):
        attend(query, key, value, np.zeros((1, 1, 6, 6), np.float32))
    with pytest.raises(
        ValueError, match=r"mask must be the same .* got shape \(2, 1, 6, 1\).*is_causal and segment_ids"
    ):
        attend(query, key, value, None, np.ones((2, 1, 6, 1), bool))
    with pytest.raises(ValueError, match=r"at most as many queries as keys \(5\), got 6"):
        attend(query, key[:, :5], value[:, :5])
    with pytest.raises(ValueError, match=r"segment_ids must have shapes .*\(2, 6\).* got \(\(2, 5\), \(2, 5\)\)"):
        attend(query, key, value, segment_ids=np.ones((2, 5), np.int32))
    with pytest.raises(ValueError, match="equal head sizes, got 5 != 3"):
        attend(query, value, value)
