r"""A pod on paper: what each strategy would exchange on 256 TPU v5e or 64 H100, from the program of one training step.

    python experiments/benchmarks/pod.py --output=runs/pod

compiles a step of the paper's big model and of one with a billion parameters for as many simulated devices, once for
every strategy, runs nothing, and reads from the compiled programs which collectives they hold, between which devices,
how many bytes they move and how often (loops counted as often as they turn). With the published speeds of chip and
network that gives three times of which the longest is the least a step could take (a roofline), if nothing overlapped
badly and every link were as fast as its datasheet. Nothing here was timed. It prints a table for each model and pod and
writes them as pod.md with pod.json beside it.

The programs are compiled for CPU, so some figures are bounds from above. Its compiler has no reduce-scatter: under FSDP
it sums each gradient for all devices, which then keep their part, twice the bytes that TPU and GPU send. Products of
bfloat16 it makes in float32 and sums before rounding: twice the bytes for the activations of tensor parallelism. And
the temporary buffers are those of its own, weaker fusion.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.memory import state_memory
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding import BATCH, make_mesh, shard_training

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
_BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}


class Collective(NamedTuple):
    """An exchange between devices in a compiled program."""

    kind: str
    """One of KINDS."""
    devices: tuple[int, ...]
    """Who takes part, in the first of its groups."""
    num_bytes: int
    """Of its result on one device."""
    count: int
    """How often it is done."""
    source: str
    """The JAX operation it comes from."""

    @property
    def moved(self) -> float:
        """Bytes that leave each device in the usual algorithms on a ring, every time together."""
        n = len(self.devices)
        share = {
            "all-gather": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-to-all": (n - 1) / n,
            "collective-permute": 1,
        }
        return self.count * self.num_bytes * share[self.kind]


def collectives(hlo: str) -> list[Collective]:
    """Reads a compiled program's text; what one device does alone is left out."""
    bodies = dict(_computations(hlo))
    found: list[Collective] = []

    def walk(name: str, times: int) -> None:
        for line in bodies[name]:
            operation = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([\w-]+?)(?:-start)?\(", line)
            if operation is None:
                continue
            if operation[2] in KINDS:
                devices = _devices(line)
                if len(devices) > 1:
                    label = re.search(r'op_name="([^"]*)"', line)
                    source = label[1] if label else ""
                    found.append(Collective(operation[2], devices, _num_bytes(operation[1]), times, source))
            for called, turns in _called(line, operation[2]):
                walk(called, times * turns)

    walk(next(name for name in bodies if name.startswith("ENTRY ")), 1)
    return found


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """The lines of each function of the program by its name; that of the entry has "ENTRY " before it."""
    name, lines = "", []
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name, lines = (header[1] or "") + header[2], []
        elif line.startswith("}"):
            yield name, lines
        else:
            lines.append(line)


def _called(line: str, operation: str) -> Iterator[tuple[str, int]]:
    if operation == "while":
        turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        body = re.search(r"body=%?([\w.-]+)", line)
        assert body is not None
        yield body[1], int(turns[1]) if turns else 1
    elif operation in ("call", "fusion", "async"):
        for name in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line):
            yield name, 1
    elif operation == "conditional":
        for names in re.findall(r"(?:branch_computations=\{|_computation=)([^,}]*(?:, %[^,}]*)*)", line):
            for name in names.split(", "):
                yield name.strip("% "), 1


def _num_bytes(result: str) -> int:
    """Of a result such as "(f32[2,3]{1,0}, s32[])".

    >>> _num_bytes("(f32[2,3]{1,0}, s32[])")
    28
    """
    return sum(
        _BITS[dtype] * int(np.prod([int(size) for size in sizes.split(",") if size], dtype=np.int64)) // 8
        for dtype, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", result)
    )


def _devices(line: str) -> tuple[int, ...]:
    """The first group of devices that exchange something.

    >>> _devices("replica_groups={{0,2},{1,3}}, "), _devices("replica_groups=[2,2]<=[4], ")
    ((0, 2), (0, 1))
    >>> _devices("replica_groups=[4,2]<=[2,4]T(1,0), ")
    (0, 4)
    >>> _devices("replica_groups=mesh['a'=2,'b'=4] {'a'}, "), _devices("source_target_pairs={{0,4},{4,0},{1,5}}")
    ((0, 4), (0, 4))
    """
    if pairs := re.search(r"source_target_pairs=\{(\S*)\}", line):
        following = {int(one): int(other) for one, other in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")}
        ring = [next(iter(following))]
        while (device := following.get(ring[-1])) is not None and device not in ring:
            ring.append(device)
        return tuple(ring)
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return tuple(map(int, groups[1].split(",")))
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return tuple(_iota(groups[3], groups[4]).reshape(int(groups[1]), int(groups[2]))[0].tolist())
    groups = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    )
    if groups is None:
        raise ValueError(f"cannot read which devices take part in {line.strip()[:200]}")
    axes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
    taking_part = re.findall(r"'(\w+)'", groups[4])
    ids = _iota(groups[2] or ",".join(axes.values()), groups[3]).reshape([int(size) for size in axes.values()])
    return tuple(ids[tuple(slice(None) if axis in taking_part else 0 for axis in axes)].ravel().tolist())


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Device numbers in the notation of XLA: counted in one shape, its axes then reordered."""
    shape = [int(size) for size in sizes.split(",")]
    ids = np.arange(np.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(axis) for axis in order.split(",")])


@dataclasses.dataclass
class Pod:
    """Published speeds, of one chip and in one direction."""

    num_devices: int
    peak_flops: float  # dense bfloat16
    memory: float  # bytes
    memory_bandwidth: float  # bytes/s
    near: int  # so many neighbouring devices share the fast network
    near_bandwidth: float  # bytes/s
    far_bandwidth: float  # bytes/s

    def bandwidth(self, devices: Sequence[int]) -> float:
        """Of the slowest link that such a group needs."""
        return self.near_bandwidth if len({device // self.near for device in devices}) == 1 else self.far_bandwidth


# TPU v5e: https://cloud.google.com/tpu/docs/v5e (197 TFLOP/s, 16 GB, 819 GB/s, 1,600 Gbit/s of interconnect in four
# links; a ring along one axis of the torus uses two of them, one for each direction: 100 GB/s). H100 SXM: NVIDIA's
# datasheet (989.4 TFLOP/s dense, 80 GB, 3.35 TB/s, NVLink 450 GB/s in each direction between eight) and the eight
# adapters of a DGX H100, 400 Gbit/s for each GPU: 50 GB/s between nodes.
PODS = {
    "v5e-256": Pod(256, 197e12, 16e9, 819e9, near=256, near_bandwidth=100e9, far_bandwidth=100e9),
    "h100-64": Pod(64, 989.4e12, 80e9, 3.35e12, near=8, near_bandwidth=450e9, far_bandwidth=50e9),
}

MODELS = {
    "big": TransformerConfig.big(dtype="bfloat16"),
    # 15 + 15 layers of 1,536: 1.04 billion parameters.
    "1b": TransformerConfig(
        32_000, num_layers=15, d_model=1536, num_heads=16, d_ff=6144, pre_norm=True, dtype="bfloat16", remat="full"
    ),
}


def strategies(num_devices: int) -> dict[str, dict[str, int]]:
    """Sizes of the mesh's axes by name."""
    return {
        "data": {"data": num_devices},
        "fsdp": {"data": 1, "fsdp": num_devices},
        "data x fsdp 8": {"data": num_devices // 8, "fsdp": 8},
        "data x tensor 8": {"data": num_devices // 8, "tensor": 8},
        "fsdp x tensor 8": {"data": 1, "fsdp": num_devices // 8, "tensor": 8},
        "fsdp x sequence 8": {"data": 1, "fsdp": num_devices // 8, "sequence": 8},
    }


@dataclasses.dataclass
class Line:
    """A strategy on paper."""

    strategy: str
    state_bytes: int  # parameters and moments on each device
    temporary_bytes: int  # as planned for CPU
    exchanges: dict[str, tuple[int, float]]  # by kind: how many in a step, bytes that leave each device
    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def bound(self) -> str:
        """What a step waits for at least."""
        times = {"compute": self.compute_seconds, "memory": self.memory_seconds, "network": self.network_seconds}
        return max(times, key=lambda name: times[name])

    @property
    def seconds(self) -> float:
        """The least a step could take."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)


def compiled(
    config: TransformerConfig, sizes: dict[str, Any], rows: int, length: int
) -> tuple[jax.stages.Compiled, int]:
    """The program of a training step, and the bytes of state that each device holds."""
    mesh = make_mesh(**sizes)
    training = shard_training(
        mesh,
        lambda shard_attention: Transformer(config, shard_attention=shard_attention, rngs=nnx.Rngs(params=0)),
        functools.partial(translation_loss, label_smoothing=0.1),
        make_optimizer(OptimizerConfig(), config.d_model),
    )
    step_fn: Any = training.step_fn  # of jax.jit
    side = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=NamedSharding(mesh, BATCH))
    program = step_fn.lower(training.abstract_state, {"source": side, "target": side}, jax.random.key(0)).compile()
    memory = state_memory(training.abstract_state)
    return program, memory.params + memory.optimizer


def line(strategy: str, config: TransformerConfig, pod: Pod, tokens: int, length: int) -> Line:
    """Compiles a strategy and adds up."""
    rows = tokens * pod.num_devices // length
    program, state_bytes = compiled(config, strategies(pod.num_devices)[strategy], rows, length)
    found = collectives(program.as_text() or "")
    exchanges: dict[str, tuple[int, float]] = {}
    for collective in found:
        count, moved = exchanges.get(collective.kind, (0, 0.0))
        exchanges[collective.kind] = count + collective.count, moved + collective.moved
    analysis = program.memory_analysis()
    assert analysis is not None  # CPU has one
    # Rematerialisation computes the forward pass, a third of the whole, once more.
    flops = config.training_flops(rows, length, length) * (4 / 3 if config.remat == "full" else 1)
    return Line(
        strategy,
        state_bytes,
        analysis.temp_size_in_bytes,
        exchanges,
        compute_seconds=flops / pod.num_devices / pod.peak_flops,
        # Every step reads and writes the state and the gradients once, and no less.
        memory_seconds=(2 * state_bytes + 2 * state_bytes / 3) / pod.memory_bandwidth,
        network_seconds=sum(collective.moved / pod.bandwidth(collective.devices) for collective in found),
    )


def report(name: str, pod_name: str, lines: Sequence[Line], tokens: int, length: int) -> str:
    """One table in Markdown."""
    pod = PODS[pod_name]
    text = [f"## {name} on {pod_name}, {tokens:,} tokens of each side on each device, sentences of {length}", ""]
    columns = ["strategy", "state GiB", "temporary GiB", *KINDS, "compute ms", "memory ms", "network ms", "bound by"]
    text += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for found in lines:
        too_much = "" if found.state_bytes + found.temporary_bytes < pod.memory else " (too much)"
        exchanged = [
            f"{found.exchanges[kind][0]:,} / {found.exchanges[kind][1] / 2**20:,.0f}" if kind in found.exchanges else ""
            for kind in KINDS
        ]
        times = [f"{1e3 * t:.1f}" for t in (found.compute_seconds, found.memory_seconds, found.network_seconds)]
        memory = [f"{found.state_bytes / 2**30:.2f}", f"{found.temporary_bytes / 2**30:.2f}{too_much}"]
        text += ["| " + " | ".join([found.strategy, *memory, *exchanged, *times, found.bound]) + " |"]
    return "\n".join([*text, ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for the tables and the data")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas")
    parser.add_argument("--pods", default=",".join(PODS), help="with commas")
    parser.add_argument("--strategies", help="with commas; all by default")
    parser.add_argument("--tokens", type=int, default=4096, help="of each side, on each device")
    parser.add_argument("--length", type=int, default=256, help="of a sentence, in tokens")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", max(PODS[pod].num_devices for pod in arguments.pods.split(",")))
    arguments.output.mkdir(parents=True, exist_ok=True)

    tables, data = [], []
    for model in arguments.models.split(","):
        for pod in arguments.pods.split(","):
            lines = []
            for strategy in (arguments.strategies or ",".join(strategies(1))).split(","):
                print(f"{model} on {pod}: {strategy}", file=sys.stderr)
                lines.append(line(strategy, MODELS[model], PODS[pod], arguments.tokens, arguments.length))
                data.append({"model": model, "pod": pod} | dataclasses.asdict(lines[-1]))
            tables.append(report(model, pod, lines, arguments.tokens, arguments.length))
    heading = "Exchanges: how many in a step / MiB that leave each device.\n"
    (arguments.output / "pod.md").write_text("\n".join([heading, *tables]))
    (arguments.output / "pod.json").write_text(json.dumps(data, indent=1))
    print("\n".join([heading, *tables]))


if __name__ == "__main__":
    main()
