"""Weights of chosen queries and heads: those rows of all weights, in memory of those rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights
from tfx_jax.functional import attention_weights

B, T, S, N, K, H = 2, 6, 9, 4, 2, 5
QUERIES, HEADS = (5, 0, 3), (3, 0)


def _normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


QUERY, KEY = _normal(B, T, N, H), _normal(B, S, K, H)
IDS = np.array([[1, 1, 2, 2, 0, 3], [4, 4, 4, 5, 5, 5]]), np.array([[1, 2, 2, 3, 3, 1, 0, 0, 2], [5, 4] * 4 + [7]])


@pytest.mark.parametrize("heads", [HEADS, None])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "scale": 0.3},
        {"bias": _normal(1, N, T, S), "mask": _normal(B, 1, T, S) < 0.5},
        {"bias": _normal(B, 1, 1, S), "mask": _normal(B, N, 1, S) < 0.5, "is_causal": True},
        {"segment_ids": IDS},
    ],
    ids=lambda options: "-".join(options),
)
def test_are_rows_of_all_weights(options, heads):
    got = jax.jit(lambda: attention_weights(QUERY, KEY, queries=QUERIES, heads=heads, **options))()
    if "segment_ids" in options:
        query_ids, key_ids = (ids[:, None] for ids in IDS)
        same = (query_ids[..., :, None] == key_ids[..., None, :]) & (query_ids != 0)[..., None]
        options = {"mask": same}
    want = dense_weights(QUERY, KEY, **options)[:, list(heads or range(N))][:, :, list(QUERIES)]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert got.dtype == jnp.float32


def test_have_no_memory_of_other_rows():
    like = jax.ShapeDtypeStruct((1, 8192, 4, 8), jnp.bfloat16)
    some = jax.jit(functools.partial(attention_weights, queries=(0, 8191), heads=(1,), is_causal=True))
    assert some.lower(like, like).compile().memory_analysis().temp_size_in_bytes < 1 << 20  # a row has 32 KiB


@pytest.mark.parametrize(("chosen", "named"), [({"queries": (0, T)}, f"{T - 1}, got {T}"), ({"heads": [-1]}, "got -1")])
def test_there_are_no_others(chosen, named):
    with pytest.raises(ValueError, match=rf"{next(iter(chosen))} must be in 0 \.\. .*{named}"):
        attention_weights(QUERY, KEY, **{"queries": (0,)} | chosen)
