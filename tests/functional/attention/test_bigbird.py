"""BigBird's pattern, block by block, and BigBird against equation 1 under its pattern."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.sparse import block_pairs
from tfx_jax.functional import bigbird_attention, bigbird_block_mask, dot_product_attention

BLOCKS = {"num_global_blocks": 2, "num_window_blocks": 3, "num_random_blocks": 2}


def _inputs(t, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, t, 4, 5), (2, t, 2, 5), (2, t, 2, 3)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def test_the_pattern_has_every_global_window_and_random_block_once():
    seen = bigbird_block_mask(40, **BLOCKS)
    assert seen[:2].all()
    assert seen[:, :2].all()
    for row in range(2, 40):
        near = [column for column in (row - 1, row, row + 1) if 2 <= column < 40]
        assert seen[row, near].all()
        assert seen[row].sum() == 2 + len(near) + 2


def test_random_blocks_are_uniform_and_follow_the_seed():
    patterns = np.array([bigbird_block_mask(9, **BLOCKS, seed=seed) for seed in range(600)])
    np.testing.assert_array_equal(patterns[3], bigbird_block_mask(9, **BLOCKS, seed=3))
    eligible = [2, 3, 7, 8]  # of row 5: neither global (0, 1) nor in the window (4, 5, 6)
    drawn = patterns[:, 5, eligible].mean(axis=0)
    np.testing.assert_allclose(drawn, 2 / 4, atol=4 * (0.25 / 600) ** 0.5)
    apart = patterns[:, 4, 8].astype(float) - 0.5, patterns[:, 5, 8] - 0.5
    assert abs(np.mean(apart[0] * apart[1])) < 4 * 0.25 / 600**0.5  # rows draw independently


@pytest.mark.parametrize(
    "more",
    [{"num_global_blocks": 9}, {"num_window_blocks": 101}, {"num_random_blocks": 9}],
    ids=lambda more: next(iter(more)),
)
def test_a_full_pattern_is_dense_attention(more):
    assert bigbird_block_mask(9, **BLOCKS | more).all()
    inputs = _inputs(17)
    got = jax.jit(functools.partial(bigbird_attention, block_size=2, **BLOCKS | more))(*inputs)
    np.testing.assert_allclose(got, mixed(dense_weights(*inputs[:2]), inputs[2]), atol=1e-5)


def pairs_of_tokens(mask, block_size, **blocks):
    """[B, 1, T, T]: the pattern of the tokens that a mask shows, as if there were no others."""
    pairs = np.zeros((len(mask), 1, mask.shape[3], mask.shape[3]), bool)
    for row, places in enumerate(map(np.flatnonzero, mask[:, 0, 0])):
        seen = bigbird_block_mask(-(-len(places) // block_size), **blocks)
        pairs[row, 0][np.ix_(places, places)] = block_pairs(seen, len(places), block_size)
    return pairs


@pytest.mark.parametrize(
    ("t", "block_size", "blocks", "seed"),
    [
        (37, 3, BLOCKS, 1),
        pytest.param(37, 3, BLOCKS, 0, marks=pytest.mark.slow),
        (30, 3, BLOCKS | {"num_global_blocks": 0}, 0),
        (30, 3, BLOCKS | {"num_random_blocks": 0, "num_window_blocks": 1}, 0),
        (13, 2, {"num_global_blocks": 1, "num_window_blocks": 5, "num_random_blocks": 1}, 5),
        (3, 4, BLOCKS, 0),
        (37, 3, BLOCKS | {"num_last_global_blocks": 1}, 1),
        (
            36,
            3,
            {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 0, "num_last_global_blocks": 2},
            0,
        ),
    ],
)
def test_sees_its_pattern_and_nothing_else(t, block_size, blocks, seed):
    """Values and maps equal the oracle's, with a bias and padding."""
    query, key, value = _inputs(t)
    random = np.random.default_rng(1)
    bias = random.normal(size=(1, 4, 1, t)).astype(np.float32)
    mask = random.random((2, 1, 1, t)) < 0.8
    mask[1] = True
    attend = functools.partial(bigbird_attention, block_size=block_size, **blocks, seed=seed, return_weights=True)
    out, weights = jax.jit(attend)(query, key, value, bias, mask)
    seen = pairs_of_tokens(mask, block_size, **blocks, seed=seed)
    want = dense_weights(query, key, bias=bias, mask=seen)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)


def test_the_last_blocks_may_be_global():
    seen = bigbird_block_mask(
        9, num_global_blocks=1, num_window_blocks=3, num_random_blocks=0, num_last_global_blocks=1
    )
    for row in range(1, 8):
        assert np.flatnonzero(seen[row]).tolist() == sorted({0, row - 1, row, row + 1, 8})
    assert seen[[0, 8]].all()


@pytest.mark.parametrize(("t", "shown"), [(37, 0.8), (37, None), (36, 0.8)])
def test_keys_of_the_first_block_count_several_times(t, shown):
    """As copies of them would, but for queries of global blocks; with padding and without."""
    query, key, value = _inputs(t)
    padding = None if shown is None else np.random.default_rng(1).random((2, 1, 1, t)) < shown
    blocks = {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 0, "num_last_global_blocks": 1}
    attend = functools.partial(bigbird_attention, block_size=3, **blocks, first_block_times=4, return_weights=True)
    out, weights = jax.jit(attend)(query, key, value, None, padding)
    mask = np.ones((2, 1, 1, t), bool) if padding is None else padding
    terms = np.array(dense_weights(query, key, mask=pairs_of_tokens(mask, 3, **blocks)))
    for row, places in enumerate(map(np.flatnonzero, mask[:, 0, 0])):
        middle = places[3 : len(places) - (len(places) % 3 or 3)]
        terms[row][:, middle[:, None], places[:3]] *= 4
    want = terms / np.maximum(terms.sum(axis=-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)
    for wrong in ({"first_block_times": 0}, {"num_last_global_blocks": -1}):
        with pytest.raises(ValueError, match="must be at least 1 and num_last_global_blocks at least 0"):
            bigbird_attention(query, key, value, block_size=3, **blocks | wrong)


def test_a_mask_for_all_keys_alike_hides_no_more_and_no_less():
    """Of one column, over a last block that is not full."""
    inputs = _inputs(37)
    blocks = {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 1, "num_last_global_blocks": 1}
    attend = jax.jit(functools.partial(bigbird_attention, block_size=3, **blocks))
    rows = np.array([True, False])[:, None, None, None]
    plain, hidden = attend(*inputs), attend(*inputs, None, rows)
    np.testing.assert_allclose(hidden[0], plain[0], atol=1e-6)
    np.testing.assert_array_equal(hidden[1], 0)


@pytest.mark.parametrize("num_last", [0, 2])
def test_short_texts_are_attended_densely(num_last):
    """Also in a batch with longer ones: only their own tokens count."""
    inputs = _inputs(17)
    mask = np.arange(17) >= np.array([0, 7])[:, None, None, None]
    blocks = {"num_global_blocks": 1, "num_window_blocks": 1, "num_random_blocks": 0}
    options = {"block_size": 2, **blocks, "num_last_global_blocks": num_last, "return_weights": True}
    want = dense_weights(*inputs[:2], mask=mask & mask.swapaxes(2, 3))
    for length, is_dense in ((17, [True, True]), (16, [False, True]), (9, [False, False])):
        attend = jax.jit(functools.partial(bigbird_attention, **options, dense_length=length))
        out, weights = attend(*inputs, None, mask)
        np.testing.assert_allclose(out, mixed(np.asarray(weights), inputs[2]), atol=1e-5)
        for row in range(2):
            assert np.allclose(weights[row], want[row], atol=1e-5) == is_dense[row]


def _alone(attend, inputs, places):
    """What each row gives without its other places, put back there; zeros elsewhere."""
    out = np.zeros((*inputs[0].shape[:3], inputs[2].shape[-1]), np.float32)
    for row, tokens in enumerate(places):
        out[row, tokens] = attend(*(x[row : row + 1, tokens] for x in inputs))[0]
    return out


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_last_global_blocks": 1, "first_block_times": 3, "dense_length": 14},
        pytest.param({"num_last_global_blocks": 2, "num_random_blocks": 5}, marks=pytest.mark.slow),
        pytest.param({"num_global_blocks": 0, "num_window_blocks": 5}, marks=pytest.mark.slow),
    ],
    ids=["plain", "as published", "many random", "no global"],
)
@pytest.mark.compiles(30, "each length alone is another program")
def test_a_text_is_that_alone_wherever_its_padding_is(more):
    inputs = _inputs(70)
    attend = jax.jit(functools.partial(bigbird_attention, block_size=3, **BLOCKS | more))
    random = np.random.default_rng(2)
    for places in (
        [np.arange(41), np.arange(33)],  # padding on the right
        [np.arange(41) + 29, np.arange(33) + 37],  # on the left
        [np.sort(random.permutation(70)[:41]), np.sort(random.permutation(70)[:33])],  # anywhere
        [np.arange(5, 10), np.arange(7)],  # few tokens
    ):
        mask = np.zeros((2, 1, 1, 70), bool)
        for row, tokens in enumerate(places):
            mask[row, ..., tokens] = True
        np.testing.assert_allclose(attend(*inputs, None, mask), _alone(attend, inputs, places), atol=1e-5)


def test_gradients_equal_those_of_dense_attention_under_its_pattern():
    query, key, value = _inputs(37)
    bias = np.random.default_rng(1).normal(size=(2, 1, 1, 37)).astype(np.float32)
    pairs = np.asarray(block_pairs(bigbird_block_mask(13, **BLOCKS), 37, block_size=3))[None, None]

    def gradients(attend, **options):
        def loss(*arrays):
            return jnp.square(attend(*arrays, **options) - 1.0).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, key, value, bias)

    sparse = functools.partial(bigbird_attention, block_size=3, **BLOCKS)
    chex.assert_trees_all_close(gradients(sparse), gradients(dot_product_attention, mask=pairs), atol=1e-4)


def test_global_tokens_reach_all_and_two_layers_connect_every_pair():
    attend = jax.jit(functools.partial(bigbird_attention, block_size=3, **BLOCKS))
    query, key, value = _inputs(36)

    def changed(layers, token):
        def run(value):
            for _ in range(layers):
                value = np.asarray(attend(query, key, value))[
                    :, :, ::2
                ]  # two of the four heads: as many as values have
            return value

        bump = (np.arange(36) == token).astype(np.float32)[None, :, None, None]
        return (run(value) != run(value + bump)).any(axis=(0, 2, 3))

    assert changed(1, token=0).all()
    assert not changed(1, token=30).all()
    assert changed(1, token=30)[:6].all()
    assert changed(2, token=30).all()


def test_dropout_drops_single_weights_and_keeps_their_mean():
    query, key, _ = _inputs(64)
    # What comes out are the weights themselves.
    unit = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (2, 64, 2, 64))
    attend = functools.partial(bigbird_attention, block_size=8, **BLOCKS, dropout_rate=0.25, return_weights=True)
    out, weights = map(np.asarray, jax.jit(attend)(query, key, unit, dropout_rng=jax.random.key(0)))
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    dropped = out.transpose(0, 2, 1, 3)
    seen, kept = weights > 0, dropped > 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-5)
    for rows in (slice(16), slice(16, 64)):  # the global rows, and the others
        total = seen[..., rows, :].sum()
        assert abs(kept[..., rows, :].sum() / total - 0.75) < 4 * (0.25 * 0.75 / total) ** 0.5


def test_memory_of_the_base_model_is_linear_up_to_65536_tokens():
    """Forward and backward: both are in the program."""
    attend = functools.partial(
        bigbird_attention, block_size=64, num_global_blocks=2, num_window_blocks=3, num_random_blocks=3
    )

    def loss(*arrays):
        return jnp.square(attend(*arrays)).sum()

    fn = jax.jit(lambda *arrays: (loss(*arrays), jax.grad(loss, argnums=(0, 1, 2))(*arrays)))

    def used(length):
        like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        return fn.lower(like, like, like).compile().memory_analysis().temp_size_in_bytes

    short, long = used(16_384), used(65_536)
    assert long < 4.1 * short
    assert long < 65_536**2 / 4  # a sixteenth of one float32 map


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "no causal form"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_global_blocks": -1}, "-1 global and 2 random"),
        ({"num_random_blocks": -2}, "2 global and -2 random"),
        ({"num_window_blocks": 2}, r"must be odd and at least 1 \(it counts the block itself\), got 2"),
        ({"mask": np.ones((1, 1, 6, 6), bool)}, r"\(1, 1, 6, 6\): a mask of pairs"),
        ({"mask": np.ones((1, 4, 1, 6), bool)}, "mask must be a padding mask"),
        (
            {"bias": np.ones((1, 1, 6, 6), np.float32)},
            r"bias must be the same for all queries, got shape \(1, 1, 6, 6\)",
        ),
        ({"segment_ids": np.ones((2, 6), np.int32)}, "BigBird attention does not support packed sequences"),
    ],
)
def test_what_is_impossible_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bigbird_attention(*_inputs(6), **{"block_size": 2} | BLOCKS | options)


def test_cross_attention_is_refused():
    query, key, value = _inputs(6)
    with pytest.raises(ValueError, match="4 queries and 6 keys"):
        bigbird_attention(query[:, :4], key, value, block_size=2, **BLOCKS)
