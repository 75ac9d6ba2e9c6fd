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
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from tfx_jax.bench.programs import KINDS, collectives
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.memory import state_memory
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding import BATCH, make_mesh, shard_training


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
