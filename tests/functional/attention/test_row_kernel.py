"""Attention of whole rows: the values and gradients of the formula, of float64, and the very weights that it drops."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import dot_product_attention
from tfx_jax.functional.attention.dense import make_request
from tfx_jax.functional.attention.dot_product import default_implementations
from tfx_jax.functional.attention.row_kernel import row_attention

# A batch, queries, keys, heads and their size, causality, dropout. Two heads share lanes; one is wider than they are.
CASES = {
    "pairs of heads": (2, 384, 512, 2, 64, True, 0.1),
    "one wide head": (2, 256, 128, 1, 256, False, 0.0),
}


@pytest.fixture(autouse=True)
def _interpreted():
    """Kernels rely on promotions that the tests of our functions forbid."""
    from jax.experimental.pallas import tpu

    with jax.numpy_dtype_promotion("standard"), tpu.force_tpu_interpret_mode():
        yield


def draw(case):
    """Query, key, value, what the gradient of the output is, and a mask of which the last row hides all."""
    b, t, s, n, h, *_ = CASES[case]
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(b, length, n, h)).astype(np.float32) for length in (t, s, s, t)]
    mask = random.random((b, 1, 1, s)) < 0.8
    mask[-1] = False
    return *arrays, mask


def with_gradients(attend, query, key, value, gradient):
    out, pull_back = jax.vjp(attend, query, key, value)
    return out, *pull_back(gradient)


def oracle(case, query, key, value, gradient, mask, kept):
    """In float64: the output and the gradients, given by what each weight is multiplied."""
    _, t, s, _, h, is_causal, _ = CASES[case]
    query, key, value, gradient = (np.float64(x) for x in (query, key, value, gradient))
    seen = (
        mask & (np.arange(s)[None] <= np.arange(t)[:, None] + s - t) if is_causal else np.broadcast_to(mask, mask.shape)
    )
    logits = np.where(seen, np.einsum("btnh,bsnh->bnts", query, key) * h**-0.5, -1e300)
    exp = np.exp(logits - logits.max(-1, keepdims=True)) * seen
    weights = exp / np.maximum(exp.sum(-1, keepdims=True), 1e-300)
    for_weights = np.einsum("btnh,bsnh->bnts", gradient, value) * kept
    for_logits = weights * (for_weights - (weights * for_weights).sum(-1, keepdims=True)) * h**-0.5
    return (
        np.einsum("bnts,bsnh->btnh", weights * kept, value),
        np.einsum("bnts,bsnh->btnh", for_logits, key),
        np.einsum("bnts,btnh->bsnh", for_logits, query),
        np.einsum("bnts,btnh->bsnh", weights * kept, gradient),
    )


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_float64(case):
    b, t, s, n, h, is_causal, rate = CASES[case]
    *arrays, mask = draw(case)
    options = {"dropout_rate": rate, "dropout_rng": jax.random.key(3)}
    # With equal logits and values that name their keys, the formula tells which weights it drops.
    dropped = functools.partial(dot_product_attention, implementation="xla", scale=0.0, **options)
    kept = np.asarray(
        jax.jit(lambda: dropped(*(jnp.zeros((b, length, n, 1)) for length in (t, s)), name_keys(b, s, n)))()
    )
    kept = np.moveaxis(kept, 1, 2) * s
    attend = functools.partial(row_attention, mask=mask, is_causal=is_causal, scale=h**-0.5, **options)
    got = jax.jit(functools.partial(with_gradients, attend))(*arrays)
    chex.assert_trees_all_close(got, oracle(case, *arrays, mask, kept), atol=2e-5)
    np.testing.assert_array_equal(got[0][-1], 0)


def name_keys(b, s, n):
    return jnp.broadcast_to(jnp.eye(s)[None, :, None], (b, s, n, s))


def test_bfloat16_is_rounded_where_the_formula_rounds():
    *arrays, mask = (jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for x in draw("one wide head"))
    by_rows, formula = (
        jax.jit(functools.partial(with_gradients, attend))(*arrays)
        for attend in (
            functools.partial(row_attention, mask=mask, scale=256**-0.5),
            functools.partial(dot_product_attention, mask=mask, implementation="xla"),
        )
    )
    assert {x.dtype for x in by_rows} == {jnp.dtype(jnp.bfloat16)}
    for got, want in zip(by_rows, formula, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), atol=2e-2)


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


X = like(2, 256, 4, 64)


def _are_best(*arrays, return_weights=False, **options):
    request = make_request(*arrays, **options)
    return default_implementations(request, return_weights=return_weights, platform="tpu") == ("rows",)


@pytest.mark.parametrize(
    ("arrays", "options", "match"),
    [
        ((X, like(2, 256, 2, 64), like(2, 256, 2, 64)), {}, "as many key heads as query heads, got 2 and 4; .*splash"),
        ((X, X, like(2, 256, 4, 32)), {}, "values as wide as keys, got d_v=32"),
        ((X, X, X), {"bias": like(1, 1, 1, 256)}, "has no bias, .*flash"),
        ((X, X, X), {"mask": like(2, 1, 256, 256, dtype=bool)}, "only a padding mask"),
        ((X, X, X), {"segment_ids": like(2, 256, dtype=jnp.int32)}, "has no segment_ids, got some; .*splash"),
        ((like(2, 256, 4, 80),) * 3, {}, "a head size that divides 128 .* got 4 heads of size 80"),
        ((like(2, 256, 3, 64),) * 3, {}, "a multiple of 128, got 3 heads of size 64"),
        ((like(2, 200, 4, 64), X, X), {}, "multiples of 128, at most 1024, got T=200 and S=256"),
        ((like(2, 1152, 4, 64),) * 3, {}, "multiples of 128, at most 1024, got T=1152"),
    ],
    ids=lambda x: x.split(",")[0] if isinstance(x, str) else "",
)
def test_what_it_cannot_do_is_one_line_and_not_chosen(arrays, options, match):
    assert not _are_best(*arrays, **options)
    attend = functools.partial(dot_product_attention, implementation="rows")
    with (
        jax.default_matmul_precision("default"),
        pytest.raises(ValueError, match=rf"implementation='rows' .*{match}"),
    ):
        jax.eval_shape(lambda arrays, options: attend(*arrays, **options), arrays, options)


def test_is_chosen_with_dropout_where_rows_are_not_too_short():
    with jax.default_matmul_precision("default"):
        options = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0), "is_causal": True}
        assert _are_best(X, X, X, **options)
        assert not _are_best(X, X, X, return_weights=True)
        short = like(2, 128, 4, 64)
        assert not _are_best(short, X, X)
