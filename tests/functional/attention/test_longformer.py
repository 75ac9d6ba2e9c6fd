"""Longformer's attention: projections of global tokens, how many of these there are, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import mixed
from tests.functional.attention.oracles.sparse import longformer_weights
from tfx_jax.functional import longformer_attention, sliding_window_attention

B, T = 3, 37
RNG = np.random.default_rng(0)
GLOBAL = RNG.random((B, T)) < 0.2
GLOBAL[1] = False


def arrays(seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, T, 4, 5), (B, T, 2, 5), (B, T, 2, 3)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("most", [64, 3])
def test_global_tokens_have_projections_of_their_own(most):
    """Each row has other global tokens, the second none; those beyond the most are as all others."""
    local, own = arrays(), arrays(1)
    random = np.random.default_rng(2)
    bias = random.normal(size=(1, 4, 1, T)).astype(np.float32)
    mask, ids = random.random((B, 1, 1, T)) < 0.8, np.sort(random.integers(0, 3, (B, T)))
    exists = GLOBAL & mask[:, 0, 0] & (ids != 0)  # padding is never global
    chosen = exists & (exists.cumsum(axis=1) <= most)
    assert (chosen != exists).any() == (most == 3)
    attend = functools.partial(longformer_attention, window=2, max_global_tokens=most, return_weights=True)
    named = dict(zip(("global_query", "global_key", "global_value"), own, strict=True))
    out, weights = jax.jit(attend)(*local, bias, mask, global_mask=GLOBAL, segment_ids=ids, **named)
    for row in range(B):
        (q, k, v), (gq, gk, gv) = ([x[row : row + 1] for x in each] for each in (local, own))
        options = {"bias": bias, "mask": mask[row : row + 1], "segment_ids": ids[row : row + 1]}
        near = longformer_weights(q, k, window=2, is_global=chosen[row], **options)
        far = longformer_weights(gq, gk, window=T, is_global=chosen[row], **options)
        is_global = chosen[row][None, None, :, None]
        np.testing.assert_allclose(weights[row : row + 1], np.where(is_global, far, near), atol=1e-5)
        want = np.where(chosen[row][None, :, None, None], mixed(far, gv), mixed(near, v))
        np.testing.assert_allclose(out[row : row + 1], want, atol=1e-5)


def test_without_global_tokens_it_is_a_sliding_window():
    expected = jax.jit(functools.partial(sliding_window_attention, window=3))(*arrays())
    for mask in (None, np.zeros((B, T), bool)):
        found = jax.jit(functools.partial(longformer_attention, window=3))(*arrays(), global_mask=mask)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_dropout_drops_single_weights_and_keeps_their_mean():
    query, key, _ = arrays()
    unit = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, 2, T))  # what comes out are the weights
    attend = functools.partial(longformer_attention, window=4, dropout_rate=0.25, return_weights=True)
    out, weights = jax.device_get(jax.jit(attend)(query, key, unit, global_mask=GLOBAL, dropout_rng=jax.random.key(0)))
    dropped = out.transpose(0, 2, 1, 3)
    kept = dropped > 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-5)
    for rows in (GLOBAL, ~GLOBAL):
        total = (weights > 0).swapaxes(1, 2)[rows].sum()
        assert abs(kept.swapaxes(1, 2)[rows].sum() / total - 0.75) < 4 * (0.25 * 0.75 / total) ** 0.5


def test_memory_is_linear():
    def used(length):
        like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        is_global = jax.ShapeDtypeStruct((1, length), jnp.bool_)

        def loss(query, key, value, is_global):
            return jnp.square(longformer_attention(query, key, value, window=256, global_mask=is_global)).sum()

        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        return program.lower(like, like, like, is_global).compile().memory_analysis().temp_size_in_bytes

    assert used(16_384) < 4.1 * used(4_096)


def test_what_cannot_be_is_refused():
    query, key, value = arrays()
    for options, message in (
        ({"is_causal": True}, "no causal form"),
        ({"global_mask": np.ones((B, 1), bool)}, r"must have shape \[B, T\] = \(3, 37\), got \(3, 1\)"),
        ({"window": -1}, "window must be at least 0"),
        ({"max_global_tokens": 0}, "max_global_tokens at least 1"),
        ({"mask": np.ones((B, 1, 1, T), np.int32)}, "mask must be boolean"),
    ):
        with pytest.raises(ValueError, match=message):
            longformer_attention(query, key, value, **{"window": 2} | options)
    with pytest.raises(ValueError, match="needs as many keys as queries, got 36 queries and 37 keys"):
        longformer_attention(query[:, 1:], key, value, window=2)
