"""The reader of compiled programs, on programs whose exchanges are known, and a table from end to end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.benchmarks import pod


def _compiled(body, shape, out_spec, num_devices=4):
    mesh = jax.make_mesh((8 // num_devices, num_devices), ("copy", "d"), axis_types=(AxisType.Auto,) * 2)
    fn = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=out_spec)
    return jax.jit(fn).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()


@pytest.mark.parametrize(
    ("body", "out_spec", "kind", "num_bytes", "moved"),
    [
        # Of [4, 8] float32, 128 bytes, a device holds a row of 32.
        (lambda x: jax.lax.psum(x, "d"), P(), "all-reduce", 32, 2 * 32 * 3 / 4),
        (lambda x: jax.lax.all_gather(x, "d")[None], P("d"), "all-gather", 128, 128 * 3 / 4),
        (lambda x: jax.lax.ppermute(x, "d", [(0, 1), (1, 2), (2, 3), (3, 0)]), P("d"), "collective-permute", 32, 32),
        (lambda x: jax.lax.all_to_all(x, "d", 1, 0, tiled=True), P("d"), "all-to-all", 32, 32 * 3 / 4),
    ],
)
def test_one_exchange(body, out_spec, kind, num_bytes, moved):
    (found,) = pod.collectives(_compiled(body, (4, 8), out_spec))
    assert (found.kind, found.num_bytes, found.count, found.devices) == (kind, num_bytes, 1, (0, 1, 2, 3))
    assert found.moved == moved


def test_loops_multiply():
    def body(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jnp.sin(jax.lax.psum(x, "d") + x), None), x, length=5)[0], None

        return jax.lax.scan(outer, x, length=3)[0]

    (found,) = pod.collectives(_compiled(body, (4, 8), P("d")))
    assert (found.kind, found.count) == ("all-reduce", 15)


def test_what_one_device_does_alone_is_no_exchange():
    assert pod.collectives(_compiled(lambda x: jax.lax.psum(x, "d") + x, (1, 8), P("d"), num_devices=1)) == []


def test_a_group_inside_a_node_is_fast():
    h100 = pod.PODS["h100-64"]
    assert h100.bandwidth(range(8, 16)) == h100.near_bandwidth
    assert h100.bandwidth((0, 8)) == h100.bandwidth(range(64)) == h100.far_bandwidth


@pytest.mark.parametrize("name", pod.MODELS)
def test_models_are_as_large_as_said(name):
    config = pod.MODELS[name]
    attention = 4 * config.d_model**2
    feed_forward = 2 * config.d_model * config.d_ff
    matrices = config.num_layers * (3 * attention + 2 * feed_forward) + config.vocab_size * config.d_model
    assert np.isclose(matrices, {"big": 214e6, "1b": 1.04e9}[name], rtol=0.01)


@pytest.mark.parametrize("others", [[], pytest.param(["fsdp x tensor 8"], marks=pytest.mark.slow)])
def test_table(monkeypatch, tmp_path, capsys, others):
    small = pod.TransformerConfig(64, num_layers=1, d_model=16, num_heads=8, d_ff=32)
    few = pod.Pod(8, 1e12, 1e9, 1e11, near=4, near_bandwidth=1e10, far_bandwidth=1e9)
    monkeypatch.setattr(pod, "MODELS", {"small": small})
    monkeypatch.setattr(pod, "PODS", {"few": few})
    monkeypatch.setattr(jax.config, "update", functools.partial(_ignore_device_count, jax.config.update))
    strategies = ",".join(["data", *others])
    pod.main([f"--output={tmp_path}", f"--strategies={strategies}", "--tokens=32", "--length=16"])
    header, _, data, *more = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert header.startswith("| strategy | state GiB")
    cells = dict(zip(header.split(" | "), data.split(" | "), strict=True))
    assert cells["all-gather"] == ""
    assert cells["all-reduce"].split(" / ")[0] != "0"
    assert [line.split(" | ")[0] for line in more] == [f"| {other}" for other in others]
    assert (tmp_path / "pod.md").read_text().count("\n| ") == 2 + len(others)


def _ignore_device_count(update, name, value):
    if name != "jax_num_cpu_devices":  # the tests have theirs already
        update(name, value)
