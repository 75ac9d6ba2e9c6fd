"""Floating-point numbers of any size are attended over, and anything else is refused in one line."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.test_contract import ATTENTIONS, _inputs, every
from tfx_jax.functional import (
    additive_attention,
    alibi_slopes,
    aligned_attention,
    attention_from_logits,
    attention_weights,
    bigbird_attention,
    chunked_attention,
    dot_product_attention,
    favor_attention,
    fixed_attention,
    general_attention,
    kernel_regression,
    layer_norm,
    linear_attention,
    local_attention,
    longformer_attention,
    lsh_attention,
    moba_attention,
    nystrom_attention,
    orthogonal_features,
    retention,
    rms_norm,
    rotary_embedding,
    routing_attention,
    sinkhorn_attention,
    sliding_window_attention,
    strided_attention,
    structured_pooling,
    topk_attention,
)

NARROW = [jnp.bfloat16, jnp.float16]


@every
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_attention_refuses_what_is_no_float(case, dtype):
    """Of query, key and value alike."""
    for place, name in enumerate(("query", "key", "value")):
        arrays = list(_inputs(case))
        arrays[place] = arrays[place].astype(dtype)
        with pytest.raises(ValueError, match=rf"^{name} must hold floating-point numbers, got {np.dtype(dtype)}"):
            jax.eval_shape(case.attend, *arrays)


@every
def test_a_mask_in_the_place_of_the_bias_is_named(case):
    """Which the fourth argument is; other libraries have their mask there."""
    query, key, value = _inputs(case)
    mask = np.ones((query.shape[0], 1, 1, key.shape[1]), bool)
    with pytest.raises(ValueError, match=r"^bias, the fourth argument, is boolean: pass a mask .* by name, mask="):
        jax.eval_shape(case.attend, query, key, value, mask)


SIZES = {
    "local_window_size": (dot_product_attention, chunked_attention),
    "chunk_size": (chunked_attention, lsh_attention),
    "window": (
        sliding_window_attention,
        functools.partial(longformer_attention, max_global_tokens=1, global_mask=None),
        functools.partial(aligned_attention, position=np.zeros((1, 1, 1), np.float32)),
        functools.partial(routing_attention, centroids=np.ones((2, 4, 8), np.float32)),
    ),
    "block_size": (
        local_attention,
        functools.partial(sliding_window_attention, window=2),
        functools.partial(bigbird_attention, num_global_blocks=1, num_window_blocks=1, num_random_blocks=0),
        sinkhorn_attention,
        linear_attention,
        retention,
        fixed_attention,
        functools.partial(moba_attention, num_blocks=1),
    ),
    "num_landmarks": (nystrom_attention,),
    "num_keys": (topk_attention,),
    "stride": (strided_attention,),
}


@pytest.mark.parametrize(
    ("name", "attend"),
    [
        pytest.param(name, attend, id=f"{name}-{getattr(attend, 'func', attend).__name__}")
        for name, attends in SIZES.items()
        for attend in attends
    ],
)
def test_numbers_of_tokens_are_integers(name, attend):
    """2.5 tokens once ran as 2."""
    x = np.ones((1, 4, 2, 8), np.float32)
    options = {"rng": jax.random.key(0), "num_buckets": 2, "num_hashes": 1} if attend is lsh_attention else {}
    with pytest.raises(ValueError, match=rf"^{name} must be an integer( or a pair of .*)?, .*got 2\.5$"):
        attend(x, x, x, **{name: 2.5}, **options)


@every
def test_attention_takes_float64_of_numpy_as_float32_without_a_warning(case):
    arrays = [x.astype(np.float64) for x in _inputs(case)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Eager up to the program: what `jax.jit` is given becomes float32 before the function sees it.
        out = jax.eval_shape(lambda: case.attend(*arrays))
    assert out.dtype == jnp.float32


def test_other_functions_refuse_what_is_no_float():
    x = np.ones((1, 4, 2, 8), np.int32)
    calls = {
        "logits": lambda: attention_from_logits(np.ones((1, 2, 4, 4), np.int32), np.ones((1, 4, 2, 8), np.float32)),
        "query": lambda: attention_weights(x, x, queries=(0,)),
        "x": lambda: layer_norm(x),
        "x ": lambda: rms_norm(x),
        "x  ": lambda: rotary_embedding(x, np.arange(4)),
        "x   ": lambda: structured_pooling(x[0], np.ones((8, 3), np.float32), np.ones((3, 2), np.float32)),
        "query_points": lambda: kernel_regression(np.arange(3), np.arange(3), np.arange(3)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name.strip()} must hold floating-point numbers, got int"):
            call()


def _per_head(attention):
    random = np.random.default_rng(0)
    shapes = (
        {"w_query": (4, 8, 8), "w_key": (4, 8, 8), "v": (4, 8)} if attention is additive_attention else {"w": (4, 8, 8)}
    )
    parameters = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return lambda *x: attention(*x, **{name: jnp.asarray(p, x[0].dtype) for name, p in parameters.items()})


@pytest.mark.compiles(90, "eager too, where each operation is a program")
@pytest.mark.parametrize("attention", [additive_attention, general_attention], ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", NARROW)
def test_scores_of_each_head_in_narrow_types_on_a_cpu(attention, dtype):
    """XLA for CPUs has no product of bfloat16 for every order of axes: forward and gradient, eager and compiled."""
    attend = _per_head(attention)
    random = np.random.default_rng(1)
    x = [jnp.asarray(random.normal(size=(2, 12, 4, 8)), dtype) for _ in range(3)]
    wide = np.asarray(attend(*(a.astype(jnp.float32) for a in x)))

    def loss(*x):
        return attend(*x).astype(jnp.float32).sum()

    for out in (attend(*x), jax.jit(attend)(*x)):
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out, np.float32), wide, atol=5e-2)
    for gradients in (jax.grad(loss, (0, 1, 2))(*x), jax.jit(jax.grad(loss, (0, 1, 2)))(*x)):
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)


@pytest.mark.slow
@pytest.mark.compiles(600, "eager too, where each operation is a program")
@every
@pytest.mark.parametrize("dtype", NARROW)
def test_every_attention_in_narrow_types_forward_and_backward(case, dtype):
    """Forward eager too."""
    inputs = [jnp.asarray(x) for x in _inputs(case, dtype=dtype)]

    def loss(*x):
        return case.attend(*x).astype(jnp.float32).sum()

    def forward_and_backward(*x):
        return case.attend(*x), jax.grad(loss, (0, 1, 2))(*x)

    for call in (case.attend, jax.jit(forward_and_backward)):
        for out in jax.tree.leaves(call(*inputs)):
            assert out.dtype == dtype
            assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("attend", [linear_attention, favor_attention, nystrom_attention], ids=lambda x: x.__name__)
def test_attention_over_sums_refuses_segments_in_one_line(attend):
    x, ids = np.ones((1, 4, 2, 8), np.float32), np.ones((1, 4), np.int32)
    if attend is favor_attention:
        attend = functools.partial(attend, projection=np.ones((3, 8), np.float32))
    with pytest.raises(ValueError, match="does not support packed sequences"):
        attend(x, x, x, segment_ids=ids)


@pytest.mark.parametrize("shape", [(1, 4, 0, 8), (1, 4, 2, 0)])
@pytest.mark.parametrize(
    "case", [case for case in ATTENTIONS if case.name not in ("routing", "relative", "coverage")], ids=lambda x: x.name
)
def test_attention_without_heads_or_features_is_refused(case, shape):
    x = jax.ShapeDtypeStruct(shape, np.float32)
    with pytest.raises(ValueError, match=rf"query must have at least one head and one feature.*got \({shape[0]}, "):
        jax.eval_shape(case.attend, x, x, x)


@pytest.mark.parametrize("number", [0, -1])
def test_sizes_below_one_are_refused(number):
    for call in (lambda: alibi_slopes(number), lambda: orthogonal_features(jax.random.key(0), number, 4)):
        with pytest.raises(ValueError, match="at least 1"):
            call()
