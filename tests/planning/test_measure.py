"""Timing that is fair and memory that is told from the right place; never how long anything takes."""

import jax
import jax.numpy as jnp
import pytest

from tfx_jax.planning import measure
from tfx_jax.planning.measure import Products, Workload, alternate, compile_apart, measured, peak_memory


def test_rivals_take_turns():
    order = []
    times = alternate([lambda: order.append("a"), lambda: order.append("b")], rounds=3)
    assert order == ["a", "b"] * 3
    assert [len(seconds) for seconds in times] == [3, 3]


def test_call_after_compile_apart_compiles_nothing():
    traces = []

    @jax.jit
    def double(x):
        traces.append(1)
        return x + x

    compilation = compile_apart(double, jnp.ones((1024,)))
    assert min(compilation.trace_seconds, compilation.compile_seconds) > 0
    assert compilation.program_bytes >= 2 * 4 * 1024
    double(jnp.ones((1024,)))
    assert len(traces) == double._cache_size() == 1


def test_donated_memory_counts_once():
    like = jnp.ones((256, 256))
    planned = [
        compile_apart(jax.jit(lambda x: x + 1.0, donate_argnums=donated), like).program_bytes for donated in ((), (0,))
    ]
    assert planned[0] - planned[1] == 4 * 256 * 256


@pytest.fixture
def small_products(monkeypatch):
    monkeypatch.setattr(measure, "_PRODUCT_SIZES", (16, 32))


def matmul_peak(dtype, rounds=5):
    """What `measured` holds a workload against, without one."""
    products = Products(dtype)
    return products.peak(alternate(products.runs, rounds), jax.device_count())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_is_positive(small_products, dtype):
    assert matmul_peak(dtype, rounds=2) > 0


def test_peak_is_that_of_the_fastest_size(monkeypatch, small_products):
    seconds = {16: 0.01, 32: 0.04}  # 32 does eight times as much
    monkeypatch.setattr(measure, "product", lambda size, dtype: lambda: size)
    monkeypatch.setattr(measure, "timed", lambda run: (None, seconds[run()]))
    assert matmul_peak("float32") == pytest.approx(2 * 32**3 / 0.04)
    seconds[32] = 0.09
    assert matmul_peak("float32") == pytest.approx(2 * 16**3 / 0.01)


def test_products_stop_growing_when_they_take_long(monkeypatch):
    monkeypatch.setattr(measure, "_PRODUCT_SIZES", (1, 2, 4, 8, 16, 32))
    monkeypatch.setattr(measure, "product", lambda size, dtype: lambda: size)
    monkeypatch.setattr(measure, "timed", lambda run: (None, run() / 100))
    assert [run() for run in Products("float32").runs] == [2, 4, 8]


def test_devices_of_an_accelerator_add_up(monkeypatch, small_products):
    times = [[1.0], [1.0, 2.0, 4.0]]
    assert Products("float32").peak(times, num_devices=4) == 32**3
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert Products("float32").peak(times, num_devices=4) == 4 * 32**3


def test_rates_follow_from_the_median(monkeypatch, small_products):
    runs = []
    workload = Workload(lambda: runs.append(1), 0.5, 2.0, 0.25, target_tokens=60, flops=3_000, program_bytes=77)
    monkeypatch.setattr(measure, "alternate", lambda runs, rounds: [[2.0, 9.0, 3.0], [1.0] * 3, [4.0, 9.0, 4.0]])
    found = measured(workload, steps=3, dtype="float32")
    assert len(runs) == 1  # the warm-up that does not count
    assert found["median_step_seconds"] == 3.0
    assert (found["fastest_step_seconds"], found["slowest_step_seconds"]) == (2.0, 9.0)
    assert (found["trace_seconds"], found["compile_seconds"], found["first_step_seconds"]) == (0.5, 2.0, 0.25)
    assert found["target_tokens_per_second"] == 20.0
    assert found["flops_per_second"] == 1_000.0
    assert found["matmul_peak_flops_per_second"] == 2 * 32**3 / 4
    assert found["utilization"] == pytest.approx(1_000 / (2 * 32**3 / 4))
    assert found["peak_memory_bytes"] == 77


def test_unknown_flops_have_no_utilization(small_products):
    found = measured(Workload(lambda: None, 0.0, 0.0, 0.0, 1, None, 1), steps=1, dtype="float32")
    assert found["flops_per_step"] is found["flops_per_second"] is found["utilization"] is None


def test_memory_is_the_devices_own_where_it_tells(monkeypatch):
    found = peak_memory(123)
    assert found["peak_memory_bytes"] == 123
    assert found["peak_memory_source"] == "compiled program"
    assert found["process_peak_bytes"] > 10 * 2**20

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 456}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert peak_memory(123) == {"peak_memory_bytes": 456, "peak_memory_source": "device"}
