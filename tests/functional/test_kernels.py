"""The other implementations of dense attention: equal where they apply, and clear about where they do not.

There is no accelerator here. TPU kernels run in the interpreter of Pallas and are lowered for TPU; for cuDNN, `jax.nn`
is made to compute by XLA what it was asked to give to cuDNN.
"""

import functools
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import chunked_attention, dot_product_attention

DIMS = chex.Dimensions(B=2, T=6, S=10, N=4, K=2, H=16, U=8)


def _inputs(dims=DIMS, seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=dims[axes]).astype(dtype) for axes in ("BTNH", "BSKH", "BSKU"))


def _padding(lengths, num_keys):
    return np.arange(num_keys)[None, None, None] < np.array(lengths)[:, None, None, None]


def _same_sizes(length=6, dtype=jnp.float32):
    return _inputs(chex.Dimensions(B=2, T=length, S=length, N=2, K=2, H=16, U=16), dtype=dtype)


def _gradients(arrays, **options):
    """Of the square distance to 1, with respect to all arrays; and the output."""

    def loss(arrays):
        out = dot_product_attention(*arrays, **options)
        return jnp.square(out.astype(jnp.float32) - 1.0).sum(), out

    return jax.jit(jax.grad(loss, has_aux=True))(arrays)


@pytest.fixture(autouse=True)
def _promotion():
    """JAX's own kernels rely on the promotion of dtypes that the tests of our functions forbid."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def on(monkeypatch):
    """Lets the library believe that it runs on another backend."""
    return lambda backend: monkeypatch.setattr(jax, "default_backend", lambda: backend)


@pytest.fixture
def interpreted(on, monkeypatch):
    """For flash the interpreter of TPU programs, for splash the general one: only that knows vmap."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu import splash_attention

    on("tpu")
    make = functools.partial(splash_attention.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", make)
    return pltpu.force_tpu_interpret_mode


def test_chunked_is_chunked_attention():
    """The same program, down to the weights, which are dense."""
    ids = np.ones((2, 6), int), np.ones((2, 10), int)
    mask, bias = _padding([9, 3], DIMS.S), np.linspace(-1, 1, 10, dtype=np.float32)[None, None, None]
    options = {"is_causal": True, "scale": 0.2, "segment_ids": ids, "dropout_rate": 0.5, "return_weights": True}

    def lowered(attend):
        def program(*arrays):
            return attend(*arrays, dropout_rng=jax.random.key(0), **options)

        return jax.jit(program).lower(*_inputs(), bias, mask).as_text()

    chosen = functools.partial(dot_product_attention, implementation="chunked")
    assert lowered(chosen) == lowered(chunked_attention) != lowered(dot_product_attention)


def test_importing_the_functions_does_not_import_pallas():
    code = "import sys, tfx_jax.functional; print([name for name in sys.modules if 'pallas.ops' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"


class TestSplash:
    def test_causal_and_padded_with_grouped_queries_and_gradients(self, interpreted):
        mask = _padding([9, 0], DIMS.S)
        mask[..., :6] = False  # the first query sees no key
        got = _gradients(_inputs(), mask=mask, is_causal=True, scale=0.3, implementation="splash")
        want = _gradients(_inputs(), mask=mask, is_causal=True, scale=0.3)
        chex.assert_trees_all_close(got, want, atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(got[1])[1], 0)

    def test_segments_and_weights(self, interpreted):
        ids = np.array([[1] * 4 + [2] * 2, [0] + [3] * 5]), np.array([[2] * 4 + [1] * 6, [0] * 3 + [3] * 7])
        attend = functools.partial(dot_product_attention, segment_ids=ids, return_weights=True)
        got = jax.jit(functools.partial(attend, implementation="splash"))(*_inputs())
        chex.assert_trees_all_close(got, jax.jit(attend)(*_inputs()), atol=1e-5)
        np.testing.assert_array_equal(np.asarray(got[0])[1, 0], 0)

    def test_more_causal_queries_than_keys(self, interpreted):
        dims = chex.Dimensions(B=1, T=7, S=4, N=2, K=1, H=16, U=8)
        got = _gradients(_inputs(dims), is_causal=True, implementation="splash")
        chex.assert_trees_all_close(got, _gradients(_inputs(dims), is_causal=True), atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(got[1])[:, :3], 0)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_lowers_for_tpu(self, on, dtype):
        on("tpu")
        arrays = _inputs(chex.Dimensions(B=2, T=700, S=1100, N=4, K=2, H=64, U=32), dtype=dtype)
        mask = np.ones((1, 1, 1, 1100), bool)

        def loss(arrays):
            out = dot_product_attention(*arrays, mask=mask, is_causal=True, implementation="splash")
            return out.astype(jnp.float32).sum()

        program = jax.jit(jax.grad(loss)).trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert program.count("tpu_custom_call") >= 3  # the output and two kernels of the gradient


class TestFlash:
    def test_bias_and_padding_with_gradients(self, interpreted):
        query, key, value = _same_sizes()
        bias = np.random.default_rng(1).normal(size=(1, 2, 6, 6)).astype(np.float32)
        options = {"mask": _padding([5, 0], 6), "is_causal": True, "scale": 0.3}
        with interpreted():
            got = _gradients((query, key, value, bias), implementation="flash", **options)
        chex.assert_trees_all_close(got, _gradients((query, key, value, bias), **options), atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(got[1])[1], 0)

    def test_lowers_for_tpu(self, on):
        on("tpu")
        arrays = *_same_sizes(600, jnp.bfloat16), np.ones((1, 2, 1, 600), np.float32)

        def loss(arrays):
            return dot_product_attention(*arrays, implementation="flash").astype(jnp.float32).sum()

        program = jax.jit(jax.grad(loss)).trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert program.count("tpu_custom_call") >= 3


class TestCudnn:
    @pytest.fixture
    def calls(self, on, monkeypatch):
        """What was asked of cuDNN; XLA answers."""
        on("gpu")
        calls, original = [], jax.nn.dot_product_attention

        def attend(*arrays, implementation, **options):
            calls.append(implementation)
            return original(*arrays, implementation="xla", **options)

        monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
        return calls

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_around_the_kernel(self, calls, is_causal):
        """Queries without keys are zero with finite gradients; a bias and a mask have all pairs."""
        arrays = *_same_sizes(dtype=jnp.bfloat16), np.linspace(-1, 1, 6, dtype=np.float32)[None, None, None]
        mask = _padding([5, 0], 6)
        mask[..., 0] = False
        options = {"mask": mask, "is_causal": is_causal}
        ids = np.array([[1] * 3 + [2] * 3, [0] * 2 + [1] * 4])
        gradients, out = _gradients(arrays, implementation="cudnn", segment_ids=ids, **options)
        want_gradients, want = _gradients(arrays, segment_ids=ids, **options)
        assert calls == ["cudnn"]
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(out)[1], 0)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=3e-2)
        for got, expected in zip(gradients, want_gradients, strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=0.15)

    def test_more_causal_queries_than_keys(self, calls):
        dims = chex.Dimensions(B=1, T=8, S=4, N=2, K=1, H=16, U=16)
        query, key, value = _inputs(dims, dtype=jnp.bfloat16)
        attend = functools.partial(dot_product_attention, is_causal=True)
        out, want = (
            np.asarray(jax.jit(attend)(query, key, value), np.float32)
            for attend in (functools.partial(attend, implementation="cudnn"), attend)
        )
        np.testing.assert_allclose(out, want, atol=3e-2)
        np.testing.assert_array_equal(out[:, :4], 0)

    @pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
    def test_on_a_gpu(self):
        arrays = _same_sizes(128, jnp.bfloat16)
        got = _gradients(arrays, is_causal=True, implementation="cudnn")
        chex.assert_trees_all_close(got, _gradients(arrays, is_causal=True), atol=5e-2, rtol=5e-2)


def _random(shape, dtype=jnp.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


class TestErrors:
    @pytest.mark.parametrize(
        ("implementation", "backend", "options", "match"),
        [
            ("magic", "cpu", {}, "implementation must be xla, chunked, cudnn, splash, flash, got 'magic'"),
            ("splash", "cpu", {}, "'splash' needs a TPU, got backend 'cpu'; use implementation='chunked'"),
            ("flash", "gpu", {}, "'flash' needs a TPU, got backend 'gpu'"),
            ("cudnn", "tpu", {}, "'cudnn' needs a GPU, got backend 'tpu'"),
            ("splash", "tpu", {"dropout_rate": 0.1}, "'splash' has no dropout, got dropout_rate=0.1"),
            ("splash", "tpu", {"value": _random((2, 10, 4, 16), jnp.bfloat16)}, "one dtype, got float32, .* bfloat16"),
            (
                "splash",
                "tpu",
                {"bias": _random((1, 1, 1, 10))},
                r"has no bias, got one of shape \(1, 1, 1, 10\); .*flash",
            ),
            (
                "splash",
                "tpu",
                {"mask": np.ones((1, 1, 6, 10), bool)},
                r"only as padding, .*is_causal.*got shape \(1, 1, 6, 10\)",
            ),
            ("flash", "tpu", {"mask": np.ones((2, 4, 1, 10), bool)}, "only as padding, .*segment_ids"),
            ("flash", "tpu", {"is_causal": True}, "aligns causality at the first key .* got T=6 and S=10; .*splash"),
            ("flash", "tpu", {"value": _random((2, 10, 4, 8))}, "as wide as keys, got d_v=8 and d_k=16; .*splash"),
            (
                "flash",
                "tpu",
                {"key": _random((2, 10, 2, 16)), "value": _random((2, 10, 2, 16))},
                "got 2 and 4; .*splash",
            ),
            ("cudnn", "gpu", {}, "needs float16 or bfloat16, got float32"),
        ],
        ids=str,
    )
    def test_what_a_kernel_cannot_do(self, on, implementation, backend, options, match):
        on(backend)
        query, key, value = _inputs(chex.Dimensions(B=2, T=6, S=10, N=4, K=4, H=16, U=16))
        arrays = {"query": query, "key": key, "value": value, "dropout_rng": jax.random.key(0)} | options
        with pytest.raises(ValueError, match=match):
            dot_product_attention(**arrays, implementation=implementation)

    @pytest.mark.parametrize("implementation", ["splash", "flash"])
    def test_float16_on_tpu(self, on, implementation):
        on("tpu")
        with pytest.raises(ValueError, match=f"'{implementation}' needs float32 or bfloat16, got float16"):
            dot_product_attention(*_same_sizes(dtype=jnp.float16), implementation=implementation)

    def test_wide_heads_of_flash(self, on):
        on("tpu")
        x = _random((1, 4, 1, 192))
        with pytest.raises(ValueError, match="head size below 128 or a multiple of it, got 192"):
            dot_product_attention(x, x, x, implementation="flash")

    @pytest.mark.parametrize(
        ("shape", "options", "match"),
        [
            ((1, 4, 1, 12), {}, "a multiple of 8, at most 256 .*, got 12"),
            ((1, 4, 1, 264), {}, "a multiple of 8, at most 256 .*, got 264"),
            ((1, 5, 1, 16), {"mask": np.ones((1, 1, 1, 5), bool)}, "even lengths .* got T=5 and S=5"),
            ((1, 5, 1, 16), {"bias": np.ones((1, 1, 1, 5), np.float32)}, "even lengths .* got T=5 and S=5"),
        ],
    )
    def test_sizes_of_cudnn(self, on, shape, options, match):
        on("gpu")
        x = _random(shape, jnp.bfloat16)
        with pytest.raises(ValueError, match=match):
            dot_product_attention(x, x, x, implementation="cudnn", **options)

    def test_lengths_and_widths_of_cudnn(self, on):
        on("gpu")
        query, key, value = _inputs(dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match="as wide as keys, got d_v=8 and d_k=16"):
            dot_product_attention(query, key, value, implementation="cudnn")
        with pytest.raises(ValueError, match=r"aligns causality at the first key .* got T=6 and S=10"):
            dot_product_attention(query, key, key, is_causal=True, implementation="cudnn")

    def test_sizes_that_do_not_fit(self, on):
        on("tpu")
        query, key, value = _inputs()
        with pytest.raises(ValueError, match="query and key head sizes differ: 8 != 16"):
            dot_product_attention(query[..., :8], key, value, implementation="splash")
