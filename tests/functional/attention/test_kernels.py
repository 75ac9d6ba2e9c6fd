"""The other implementations of dense attention: equal where they apply, and clear about where they do not.

There is no accelerator here. TPU kernels run in the interpreter of Pallas; for cuDNN, `jax.nn` is made to compute by
XLA what it was asked to give to cuDNN. Both are lowered for accelerators, as far as this needs none.
"""

import functools
import subprocess
import sys
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tfx_jax.functional import chunked_attention, dot_product_attention
from tfx_jax.functional.attention import dot_product, kernels

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
def _ordinary_numbers():
    """Interpreters rely on the promotion of dtypes that the tests of our functions forbid, kernels on the precision."""
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("default"):
        yield


@pytest.fixture
def anywhere(monkeypatch):
    """Lets kernels be lowered for a CPU."""
    for name in ("splash", "flash", "cudnn"):
        monkeypatch.setitem(kernels.PLATFORMS, name, "cpu")


@pytest.fixture
def interpreted(anywhere, monkeypatch):
    """For flash the interpreter of TPU programs, for splash the general one: only that knows vmap."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu import splash_attention

    make = functools.partial(splash_attention.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", make)
    return pltpu.force_tpu_interpret_mode


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def with_cuda(monkeypatch):
    """Lets cuDNN be traced, and lowered for CUDA, where it is not installed."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)


def _lowered(attend, arrays, platform, **options):
    """The program of the gradients of an attention's sum, for another platform."""

    def loss(arrays, options):
        return attend(*arrays, **options).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss)).trace(arrays, options).lower(lowering_platforms=(platform,)).as_text()


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

    def test_queries_without_keys_have_no_gradient(self, interpreted):
        """For their segment has no key, only later ones, or hidden ones, in the first block of keys or in none."""
        ids = np.array([[1, 0, 9, 5, 5, 2], [3] * 6]), np.array([[5] * 6 + [1, 2, 9, 0], [3] * 9 + [4]])
        options = {"segment_ids": ids, "mask": _padding([8, 0], DIMS.S), "is_causal": True}
        gradients, out = _gradients(_inputs(), implementation="splash", **options)
        chex.assert_trees_all_close((gradients, out), _gradients(_inputs(), **options), atol=1e-4, rtol=1e-4)
        assert np.asarray(out).any(axis=(-1, -2)).tolist() == [[False] * 3 + [True] * 3, [False] * 6]
        assert np.asarray(gradients[0]).any(axis=(-1, -2)).tolist() == [[False] * 3 + [True] * 3, [False] * 6]

    @pytest.mark.parametrize(
        ("options", "window"),
        [
            ({"mask": _padding([9, 0], DIMS.S), "is_causal": True}, (3, 0)),
            ({"segment_ids": (np.array([[1] * 6, [0] + [3] * 5]), np.array([[1] * 10, [0] * 3 + [3] * 7]))}, (4, 2)),
            pytest.param({}, (2, 1), marks=pytest.mark.slow),
        ],
        ids=["causal and padded", "segments", "alone"],
    )
    def test_soft_cap_sinks_and_window_with_gradients(self, interpreted, options, window):
        """In a window, padded queries see no key at all."""
        arrays = _inputs()
        sinks = np.array([0.5, -1, -np.inf, 2], np.float32)

        def gradients(implementation):
            def loss(arrays, sinks):
                more = {"logits_soft_cap": 1.5, "sinks": sinks, "local_window_size": window, **options}
                out = dot_product_attention(*arrays, implementation=implementation, **more)
                return jnp.square(out - 1.0).sum(), out

            return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays, sinks)

        chex.assert_trees_all_close(gradients("splash"), gradients("xla"), atol=1e-4, rtol=1e-4)

    def test_sinks_are_float32_beside_bfloat16(self, interpreted):
        """Splash gives their gradient in the dtype of the queries."""
        sinks = np.float32([3.01, 3.02, 3.03, 3.04])

        def gradient(implementation):
            def loss(sinks, arrays):
                out = dot_product_attention(*arrays, sinks=sinks, implementation=implementation)
                return jnp.square(out.astype(jnp.float32) - 1.0).sum()

            return jax.jit(jax.grad(loss))

        arrays = _inputs(dtype=jnp.bfloat16)
        got, want = (gradient(name)(sinks, arrays) for name in ("splash", "xla"))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=2e-2)

    def test_more_causal_queries_than_keys(self, interpreted):
        dims = chex.Dimensions(B=1, T=7, S=4, N=2, K=1, H=16, U=8)
        got = _gradients(_inputs(dims), is_causal=True, implementation="splash")
        chex.assert_trees_all_close(got, _gradients(_inputs(dims), is_causal=True), atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(got[1])[:, :3], 0)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_lowers_for_tpu(self, dtype):
        arrays = _inputs(chex.Dimensions(B=2, T=700, S=1100, N=4, K=2, H=64, U=32), dtype=dtype)
        options = {"mask": np.ones((1, 1, 1, 1100), bool), "sinks": np.zeros(4, np.float32)}
        static = {"is_causal": True, "logits_soft_cap": 50.0, "local_window_size": 100}
        attend = functools.partial(dot_product_attention, **static, implementation="splash")
        program = _lowered(attend, arrays, "tpu", **options)
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

    @pytest.mark.parametrize(
        "options",
        [{"mask": _padding([5, 0], 6)}, {"segment_ids": np.array([[1, 1, 0, 2, 2, 2], [0] * 6])}],
        ids=["padding", "segments"],
    )
    def test_queries_without_keys(self, interpreted, options):
        options |= {"is_causal": True}
        if "mask" in options:
            options["mask"][0, ..., :2] = False
        with interpreted():
            got = _gradients(_same_sizes(), implementation="flash", **options)
        chex.assert_trees_all_close(got, _gradients(_same_sizes(), **options), atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(got[1])[1], 0)

    def test_lowers_for_tpu(self):
        arrays = *_same_sizes(600, jnp.bfloat16), np.ones((1, 2, 1, 600), np.float32)
        program = _lowered(functools.partial(dot_product_attention, implementation="flash"), arrays, "tpu")
        assert program.count("tpu_custom_call") >= 3


class TestCudnn:
    @pytest.fixture
    def calls(self, anywhere, monkeypatch):
        """What was asked of cuDNN, by whether it has lengths; XLA answers."""
        calls, original = [], jax.nn.dot_product_attention

        def attend(*arrays, implementation, **options):
            calls.append((implementation, options["key_value_seq_lengths"] is not None))
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
        assert calls == [("cudnn", False)]
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(out)[1], 0)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=3e-2)
        for got, expected in zip(gradients, want_gradients, strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=0.15)

    def test_padding_is_lengths_wherever_it_hides(self, calls):
        """Even of odd lengths, which cuDNN does not take with a bias."""
        mask = np.array([[1, 0, 1, 0, 0, 1, 1], [0] * 7], bool)[:, None, None]
        arrays = _same_sizes(7, jnp.bfloat16)
        gradients, out = _gradients(arrays, implementation="cudnn", mask=mask)
        want_gradients, want = _gradients(arrays, mask=mask)
        assert calls == [("cudnn", True)]
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

    def test_lowers_for_cuda(self, with_cuda):
        mask = np.ones((2, 1, 1, 600), bool)
        attend = functools.partial(dot_product_attention, implementation="cudnn")
        program = _lowered(attend, _same_sizes(600, jnp.bfloat16), "cuda", mask=mask)
        assert program.count("__cudnn$fmhaSoftmax") == 2
        assert "600x600" not in program

    def test_older_gpus_have_it_not(self, calls, monkeypatch):
        monkeypatch.setattr(jax, "local_devices", lambda: [mock.Mock(platform="gpu", compute_capability="7.5")])
        with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.0 or more, got 7\.5; use"):
            jax.eval_shape(
                functools.partial(dot_product_attention, implementation="cudnn"), *_same_sizes(8, jnp.bfloat16)
            )

    @pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
    def test_on_a_gpu(self):
        arrays = _same_sizes(128, jnp.bfloat16)
        got = _gradients(arrays, is_causal=True, implementation="cudnn")
        chex.assert_trees_all_close(got, _gradients(arrays, is_causal=True), atol=5e-2, rtol=5e-2)


class TestBest:
    """What is chosen where no implementation is asked for."""

    def _calls(self, attend, platform, **options):
        """How often it calls each kernel, the gradients included."""
        query, key = (jax.ShapeDtypeStruct((2, 1024, num_heads, 16), jnp.bfloat16) for num_heads in (2, 1))
        program = _lowered(attend, (query, key, key), platform, **options)
        return {"tpu": program.count("tpu_custom_call"), "cuda": program.count("__cudnn$fmha")}

    @pytest.mark.parametrize(
        ("platform", "calls"), [("tpu", {"tpu": 3, "cuda": 0}), ("cuda", {"tpu": 0, "cuda": 2}), ("cpu", {})]
    )
    def test_of_the_platform_that_it_is_lowered_for(self, one_device, with_cuda, platform, calls):
        attend = functools.partial(dot_product_attention, is_causal=True)
        assert self._calls(attend, platform) == {"tpu": 0, "cuda": 0} | calls
        ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
        assert self._calls(attend, platform, segment_ids=ids) == {"tpu": 0, "cuda": 0} | calls

    @pytest.mark.parametrize(
        "options",
        [
            {"logits_soft_cap": 30.0},
            {"sinks": jax.ShapeDtypeStruct((2,), jnp.float32)},
            {"local_window_size": 100},
            {
                "key_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
                "query_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
            },
        ],
        ids=lambda options: "".join(options),
    )
    def test_has_the_options_that_are_asked_for(self, one_device, with_cuda, options):
        """Splash has them all, cuDNN lengths alone."""
        arrays = {name: x for name, x in options.items() if hasattr(x, "shape")}
        static = {name: x for name, x in options.items() if not hasattr(x, "shape")}
        attend = functools.partial(dot_product_attention, is_causal=True, **static)
        assert self._calls(attend, "tpu", **arrays) == {"tpu": 3, "cuda": 0}
        assert self._calls(attend, "cuda", **arrays) == {"tpu": 0, "cuda": 2 if "key_lengths" in options else 0}

    def test_is_the_formula_for_cuda_where_cudnn_is_not(self, one_device):
        assert self._calls(dot_product_attention, "cuda") == {"tpu": 0, "cuda": 0}

    def test_is_the_formula_where_a_compiler_may_divide_it(self):
        """Which no kernel can be: inside shard_map none has to, but there kernels do not say what check_vma asks."""
        mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
        by_device = functools.partial(
            jax.shard_map, dot_product_attention, mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        assert self._calls(dot_product_attention, "tpu") == {"tpu": 0, "cuda": 0}
        assert self._calls(by_device(check_vma=False), "tpu") == {"tpu": 3, "cuda": 0}
        assert self._calls(by_device(), "tpu") == {"tpu": 0, "cuda": 0}

    @pytest.mark.parametrize(
        "options",
        [
            {"dropout_rate": 0.1, "dropout_rng": jax.eval_shape(lambda: jax.random.key(0))},
            {"bias": jax.ShapeDtypeStruct((1, 2, 1, 1024), jnp.float32)},
            {"mask": jax.ShapeDtypeStruct((1, 1, 1024, 1024), jnp.bool_)},
            {"scale": jax.ShapeDtypeStruct((), jnp.float32)},
            {"return_weights": True},
            {"return_lse": True},
            {"score_mod": lambda logits, *_: logits},
            {"mask_mod": lambda b, n, t, s: s > 0},
            {"query": jax.ShapeDtypeStruct((2, 1023, 2, 16), jnp.float32)},
        ],
        ids=lambda options: "".join(options),
    )
    def test_is_the_formula_where_kernels_cannot_or_need_not(self, one_device, options):
        arrays = {name: jax.ShapeDtypeStruct((2, 1024, 2, 16), jnp.float32) for name in ("query", "key", "value")}
        static = {name: x for name, x in options.items() if not hasattr(x, "shape")}
        arrays |= {name: x for name, x in options.items() if hasattr(x, "shape")}

        def traced(**implementation):
            attend = functools.partial(dot_product_attention, **static, **implementation)
            return str(jax.make_jaxpr(lambda arrays: attend(**arrays))(arrays))

        assert traced() == traced(implementation="xla")

    def test_gradients_through_layers_that_are_computed_again(self, interpreted, one_device, monkeypatch):
        """Where a kernel and the formula leave different things for the gradient."""
        monkeypatch.setattr(dot_product, "_LONG", 4)
        mask = _padding([5, 0], 6)

        def gradients(**options):
            def layer(x, scale):
                return x + dot_product_attention(scale * x, x, x, mask=mask, is_causal=True, **options), None

            def loss(x, scales):
                return sum(jnp.square(jax.lax.scan(f, x, scales)[0]).sum() for f in (layer, jax.checkpoint(layer)))

            return jax.jit(jax.grad(loss, argnums=(0, 1)))

        arrays = _same_sizes()[0] / 4, np.linspace(0.5, 1.5, 3, dtype=np.float32)
        assert "splash" in str(gradients().trace(*arrays).jaxpr)
        chex.assert_trees_all_close(
            gradients()(*arrays), gradients(implementation="xla")(*arrays), rtol=1e-4, atol=1e-4
        )


class TestInOrder:
    """Of several implementations by name."""

    @pytest.mark.parametrize(
        ("platform", "names", "calls"),
        [
            ("tpu", ("splash", "cudnn", "chunked"), (3, 0)),
            ("cuda", ("splash", "cudnn", "chunked"), (0, 2)),
            ("cpu", ("splash", "cudnn", "chunked"), (0, 0)),
            ("cuda", ("chunked", "cudnn"), (0, 0)),
        ],
    )
    def test_the_first_of_the_platform_is_taken_at_any_length(self, with_cuda, platform, names, calls):
        attend = functools.partial(dot_product_attention, is_causal=True, implementation=names)
        program = _lowered(attend, _same_sizes(256, jnp.bfloat16), platform)
        assert (program.count("tpu_custom_call"), program.count("__cudnn$fmha")) == calls

    @pytest.mark.parametrize("names", [("cudnn", "flash", "chunked"), ["flash", "chunked"]])
    def test_the_next_is_taken_where_one_cannot(self, names):
        options = {"sinks": np.zeros(4, np.float32), "return_weights": True}

        def lowered(implementation):
            def program(*arrays):
                return dot_product_attention(*arrays, implementation=implementation, **options)

            return jax.jit(program).lower(*_inputs()).as_text()

        assert lowered(names) == lowered("chunked") != lowered("xla")

    def test_none_but_kernels_of_other_platforms_are_one_line(self):
        with pytest.raises(ValueError, match="'splash' needs a TPU, got platform 'cpu'; use implementation='chunked'"):
            jax.jit(functools.partial(dot_product_attention, implementation=("cudnn", "splash"))).lower(*_same_sizes())
        with pytest.raises(ValueError, match="implementation must not be an empty tuple"):
            dot_product_attention(*_same_sizes(), implementation=())


def _random(shape, dtype=jnp.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


class TestErrors:
    @pytest.mark.parametrize(
        ("implementation", "options", "match"),
        [
            (
                "magic",
                {},
                "implementation must be xla, chunked, cudnn, splash, flash, rows, or a tuple .*, got 'magic'",
            ),
            (("flash", "magic"), {}, "implementation must be xla, .*, got 'magic'"),
            (("flash", "rows"), {"sinks": np.zeros(4, np.float32)}, "'flash' has no sinks, .*; .*'rows' has no sinks"),
            ("splash", {"dropout_rng": None}, "'splash' needs a TPU, got platform 'cpu'; use implementation='chunked'"),
            ("flash", {"dropout_rng": None}, "'flash' needs a TPU, got platform 'cpu'"),
            ("splash", {"dropout_rate": 0.1}, "'splash' has no dropout, got dropout_rate=0.1"),
            ("splash", {"value": _random((2, 10, 4, 16), jnp.bfloat16)}, "one dtype, got float32, .* bfloat16"),
            (
                "splash",
                {"bias": _random((1, 1, 1, 10))},
                r"has no bias, got one of shape \(1, 1, 1, 10\); .*flash",
            ),
            (
                "splash",
                {"mask": np.ones((1, 1, 6, 10), bool)},
                r"only a padding mask, .*is_causal.*got shape \(1, 1, 6, 10\)",
            ),
            ("flash", {"mask": np.ones((2, 4, 1, 10), bool)}, "only a padding mask, .*segment_ids"),
            ("flash", {"is_causal": True}, "aligns causality at the first key .* got T=6 and S=10; .*splash"),
            ("flash", {"value": _random((2, 10, 4, 8))}, "as wide as keys, got d_v=8 and d_k=16; .*splash"),
            (
                "flash",
                {"key": _random((2, 10, 2, 16)), "value": _random((2, 10, 2, 16))},
                "got 2 and 4; .*splash",
            ),
            ("cudnn", {}, "needs float16 or bfloat16, got float32"),
            ("cudnn", {"logits_soft_cap": 30.0}, "'cudnn' has no logits_soft_cap, got 30.0; .*chunked"),
            ("cudnn", {"sinks": np.zeros(4, np.float32)}, r"has no sinks, got one of shape \(4,\); .*chunked"),
            ("flash", {"sinks": np.zeros(4, np.float32)}, r"has no sinks, got one of shape \(4,\); .*splash"),
            ("rows", {"local_window_size": 3}, r"'rows' has no local_window_size, got \(3, 3\); .*splash"),
            ("splash", {"score_mod": len}, "'splash' has no score_mod, got one; .*chunked"),
            ("flash", {"mask_mod": len}, "'flash' has no mask_mod, got one, or key_lengths .*chunked"),
            ("splash", {"return_lse": True}, "'splash' has no return_lse, got True; .*chunked"),
            (
                "splash",
                {"query": _random((2, 11, 4, 16)), "local_window_size": 3},
                "at least as many keys as queries with local_window_size, got T=11 and S=10; .*chunked",
            ),
        ],
        ids=str,
    )
    def test_what_a_kernel_cannot_do(self, implementation, options, match):
        query, key, value = _inputs(chex.Dimensions(B=2, T=6, S=10, N=4, K=4, H=16, U=16))
        arrays = {"query": query, "key": key, "value": value, "dropout_rng": jax.random.key(0)} | options
        with pytest.raises(ValueError, match=match):
            dot_product_attention(**arrays, implementation=implementation)

    @pytest.mark.parametrize("implementation", ["splash", "flash"])
    def test_float16_on_tpu(self, implementation):
        with pytest.raises(ValueError, match=f"'{implementation}' needs float32 or bfloat16, got float16"):
            dot_product_attention(*_same_sizes(dtype=jnp.float16), implementation=implementation)

    def test_precision_of_bfloat16_on_tpu(self):
        with (
            jax.default_matmul_precision("highest"),
            pytest.raises(ValueError, match=r"got .*precision='highest'; use"),
        ):
            dot_product_attention(*_same_sizes(dtype=jnp.bfloat16), implementation="splash")

    def test_wide_heads_of_flash(self):
        x = _random((1, 4, 1, 192))
        with pytest.raises(ValueError, match="head size below 128 or a multiple of it, got 192"):
            dot_product_attention(x, x, x, implementation="flash")

    @pytest.mark.parametrize(
        ("shape", "options", "match"),
        [
            ((1, 4, 1, 12), {}, "a multiple of 8, at most 256 .*, got 12"),
            ((1, 4, 1, 264), {}, "a multiple of 8, at most 256 .*, got 264"),
            (
                (1, 5, 1, 16),
                {"mask": np.ones((1, 1, 1, 5), bool), "is_causal": True},
                "even lengths .* got T=5 and S=5",
            ),
            ((1, 5, 1, 16), {"segment_ids": np.ones((1, 5), int)}, "even lengths .* got T=5 and S=5"),
            ((1, 5, 1, 16), {"bias": np.ones((1, 1, 1, 5), np.float32)}, "even lengths .* got T=5 and S=5"),
        ],
    )
    def test_sizes_of_cudnn(self, shape, options, match):
        x = _random(shape, jnp.bfloat16)
        with pytest.raises(ValueError, match=match):
            dot_product_attention(x, x, x, implementation="cudnn", **options)

    def test_lengths_and_widths_of_cudnn(self):
        query, key, value = _inputs(dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match="as wide as keys, got d_v=8 and d_k=16"):
            dot_product_attention(query, key, value, implementation="cudnn")
        with pytest.raises(ValueError, match=r"aligns causality at the first key .* got T=6 and S=10"):
            dot_product_attention(query, key, key, is_causal=True, implementation="cudnn")

    def test_sizes_that_do_not_fit(self):
        query, key, value = _inputs()
        with pytest.raises(ValueError, match="query and key must have equal head sizes, got 8 != 16"):
            dot_product_attention(query[..., :8], key, value, implementation="splash")
        with pytest.raises(ValueError, match="query must have rank 4"):
            dot_product_attention(query[0, 0, 0], key, value)
