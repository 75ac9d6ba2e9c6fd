"""LongT5's attention against a loop over pairs in float64; padding, what is refused, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import block_summaries, transient_global_attention

B, T, N, K, H, U = 3, 41, 4, 2, 5, 3
WINDOW, BLOCK = 3, 4
MASK = np.random.default_rng(0).random((B, T)) < 0.8
MASK[1], MASK[2, BLOCK - 1 :] = True, False  # no padding; fewer tokens than a block


def arrays(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, U), "distance_bias": (N, 2 * WINDOW + 1)}
    g = T // BLOCK
    shapes |= {"summary_key": (B, g, K, H), "summary_value": (B, g, K, U), "summary_bias": (N, 2 * g - 1)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def blocks_of(tokens):
    """The tokens of each block, by their columns; those behind the last full block belong to it."""
    count = len(tokens) // BLOCK
    return [tokens[i * BLOCK : (i + 1) * BLOCK if i < count - 1 else None] for i in range(count)]


def by_pairs(mask, *, query, key, value, distance_bias, summary_key=None, summary_value=None, summary_bias=None):
    """Output [B, T, N, U] and weights [B, N, T, G + T] of the formula, query by query."""
    g = 0 if summary_key is None else summary_key.shape[1]
    out, weights = np.zeros((B, T, N, U)), np.zeros((B, N, T, g + T))
    for row in range(B):
        tokens = np.flatnonzero(mask[row])
        blocks = blocks_of(tokens) if g else []
        for place, column in enumerate(tokens):
            block = next((i for i, members in enumerate(blocks) if column in members), None)
            for head in range(N):
                logits, values, keys, kv = [], [], [], head // (N // K)
                for i in range(len(blocks)):
                    logit = query[row, column, head].astype(float) @ summary_key[row, i, kv] * H**-0.5
                    logits.append(logit + summary_bias[head, g - 1 + i - block])
                    values.append(summary_value[row, i, kv])
                    keys.append(i)
                for other in range(max(place - WINDOW, 0), min(place + WINDOW + 1, len(tokens))):
                    logit = query[row, column, head].astype(float) @ key[row, tokens[other], kv] * H**-0.5
                    logits.append(logit + distance_bias[head, WINDOW + other - place])
                    values.append(value[row, tokens[other], kv])
                    keys.append(g + tokens[other])
                unnormalized = np.exp(np.array(logits) - max(logits))
                weights[row, head, column, keys] = unnormalized / unnormalized.sum()
                out[row, column, head] = weights[row, head, column, keys] @ np.array(values)
    return out, weights


@pytest.mark.parametrize("has_summaries", [True, False])
@pytest.mark.parametrize("is_padded", [True, False])
def test_is_the_formula(has_summaries, is_padded):
    inputs = arrays()
    if not has_summaries:
        inputs = {name: x for name, x in inputs.items() if "summary" not in name}
    mask = MASK if is_padded else np.ones_like(MASK)
    attend = functools.partial(
        transient_global_attention, mask=mask[:, None, None] if is_padded else None, return_weights=True
    )
    attend = functools.partial(attend, block_size=BLOCK) if has_summaries else attend
    out, weights = jax.jit(lambda inputs: attend(**inputs))(inputs)
    expected, expected_weights = by_pairs(mask, **inputs)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-5)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_summaries_are_sums_of_blocks():
    x = np.random.default_rng(2).normal(size=(B, T, 6)).astype(np.float32)
    found = jax.jit(functools.partial(block_summaries, block_size=BLOCK))(x, MASK[:, None, None])
    expected = np.zeros((B, T // BLOCK, 6))
    for row in range(B):
        for i, members in enumerate(blocks_of(np.flatnonzero(MASK[row]))):
            expected[row, i] = x[row, members].astype(float).sum(axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not expected[2].any()
    assert np.abs(expected[1]).min() > 0


def test_an_empty_batch_has_weights_of_summaries_too():
    empty = {name: array if name.endswith("bias") else array[:0] for name, array in arrays().items()}
    out, weights = transient_global_attention(**empty, block_size=BLOCK, return_weights=True)
    assert (out.shape, weights.shape) == ((0, T, N, U), (0, N, T, T // BLOCK + T))


def test_memory_is_linear_forward_and_backward():
    """Not of all pairs: 2 heads of 4,096 tokens would be 128 MiB."""

    def loss(query, bias):
        return jnp.square(transient_global_attention(query, query, query, distance_bias=bias)).sum()

    query, bias = jax.ShapeDtypeStruct((1, 4_096, 2, 8), jnp.float32), jax.ShapeDtypeStruct((2, 129), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(query, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "pass as many keys as queries"),
        ({"bias": np.zeros((1, 1, 1, T))}, "pass as many keys as queries"),
        ({"mask": np.ones((1, 1, T, T), bool)}, "mask must be "),
        ({"distance_bias": np.zeros((N, 6))}, r"distance_bias must have shape \[4, 2 \* window \+ 1\], got \(4, 6\)"),
        ({"summary_key": np.zeros((B, 9, K, H), np.float32)}, r"summary_key must have shape \(3, 10, 2, 5\), got"),
        ({"summary_bias": None}, r"summary_bias must have shape \(4, 19\), got None"),
        ({"block_size": None}, "block_size must be an integer"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        transient_global_attention(**arrays() | {"block_size": BLOCK} | options)
