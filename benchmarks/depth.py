r"""What depth costs: the time to compile a training step, and the memory it takes with each kind of rematerialization.

    python benchmarks/depth.py

prints two Markdown tables; what takes longest are the layers that are not scanned. Everything is compiled from shapes
and nothing is run, so models fit that the machine has no room for. It is the base model of "Attention Is All You Need"
but for its depth, with dropout, Adam and float32; options choose otherwise.

Time is that of Python, which traces and lowers the step, and that of XLA, each of one compilation. Memory is what XLA
plans besides arguments and results: "forward" of the loss alone, "step" of a whole training step, whose gradients,
4 bytes a parameter, are in it. The part that rematerialization can save is given without them.

Measured (`--unrolled=6`; two CPU cores, jax 0.10.2, other work beside it, 4 minutes). Seconds to trace and lower, and
to compile: 0.8 and 10.3 with 6 + 6 layers, 1.3 and 13.1 with 24 + 24, 0.8 and 10.4 with 96 + 96; unrolled, 2.1 and 24.8
with 6 + 6. Temporary buffers of a step besides the gradients, MiB:

    layers     parameters      none      dots     full
     6 + 6         63 M       4,092     2,886    1,830
    24 + 24       195 M      11,200     6,342    2,118
    96 + 96       725 M      39,634    20,166    3,270
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from tfx_jax.models import encoder_decoder
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.nn.stack import unstack_layers
from tfx_jax.tasks import translation_loss
from tfx_jax.training import OptimizerConfig
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.step import init_state, update

REMAT = ("none", "dots", "full")
LOSS = functools.partial(translation_loss, label_smoothing=0.1)


class Compiled(NamedTuple):
    """Costs of one compilation and memory of the program."""

    lowering: float  # seconds to trace and lower
    compilation: float  # seconds to compile
    temporary: int  # bytes of temporary buffers


def loop_over_layers(
    fn: Callable[..., Any], layers: Any, x: jax.Array, rngs: Any, *, inputs: None, remat: str, unroll: bool
) -> tuple[Any, None]:
    """Replaces `tfx_jax.nn.scan_layers` by a Python loop over the layers, for comparison."""
    assert (inputs, remat, unroll) == (None, "none", False)
    for layer in unstack_layers(layers):
        x, _ = fn(layer, x, None if rngs is None else nnx.Rngs(dropout=rngs.dropout()))
    return x, None


def compile_step(config: TransformerConfig, rows: int, length: int) -> dict[str, Compiled]:
    """Compiles the forward pass alone and a whole step, for a batch of `rows` rows of `length` tokens on each side.

    Returns:
      The results for "forward" and "step".
    """
    optimizer = make_optimizer(OptimizerConfig(), config.d_model)
    graphdef, first_state = init_state(lambda: Transformer(config, rngs=nnx.Rngs(0)), optimizer)
    state, rng = jax.eval_shape(first_state), jax.eval_shape(lambda: jax.random.key(0))
    batch = {side: jax.ShapeDtypeStruct((rows, length), jnp.int32) for side in ("source", "target")}

    def forward(state: Any, batch: Any, rng: Any) -> Any:
        return LOSS(nnx.merge(graphdef, state.variables), batch, nnx.Rngs(dropout=rng))

    step = functools.partial(update, graphdef, LOSS, optimizer)
    programs = {"forward": jax.jit(forward), "step": jax.jit(step, donate_argnums=0)}
    return {name: _compile(program, state, batch, rng) for name, program in programs.items()}


def _compile(program: Any, *arguments: Any) -> Compiled:
    started = time.perf_counter()
    lowered = program.lower(*arguments)
    lowering = time.perf_counter() - started
    started = time.perf_counter()
    compiled = lowered.compile()
    compilation = time.perf_counter() - started
    return Compiled(lowering, compilation, compiled.memory_analysis().temp_size_in_bytes)


def num_params(config: TransformerConfig) -> int:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def times_table(found: dict[tuple[int, str], dict[str, Compiled]]) -> str:
    """Returns the table of compilation times.

    Args:
      found: results of `compile_step` by (number of layers, kind of rematerialization or "unrolled").
    """
    lines = ["| layers | stack | trace and lower, s | compile, s |", "|---|---|---|---|"]
    for (layers, how), programs in found.items():
        if how in ("none", "unrolled"):
            step, stack = programs["step"], "scanned" if how == "none" else how
            lines.append(f"| {layers} + {layers} | {stack} | {step.lowering:.1f} | {step.compilation:.1f} |")
    return "\n".join(lines)


def memory_table(found: dict[tuple[int, str], dict[str, Compiled]], params: dict[int, int]) -> str:
    """Returns the table of temporary buffers in MiB.

    The last column is the memory without gradients, relative to that without rematerialization.

    Args:
      found: results of `compile_step` by (number of layers, kind of rematerialization or "unrolled").
      params: number of parameters by number of layers.
    """
    header = ["layers", "parameters, M", "remat", "forward", "step", "step without gradients", "relative"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for (layers, how), programs in found.items():
        if how in REMAT:
            besides = programs["step"].temporary - 4 * params[layers]
            relative = besides / (found[layers, "none"]["step"].temporary - 4 * params[layers])
            sizes = [programs["forward"].temporary, programs["step"].temporary, besides]
            columns = [f"{layers} + {layers}", f"{params[layers] / 1e6:,.0f}", how]
            lines.append(
                "| " + " | ".join([*columns, *(f"{size / 2**20:,.0f}" for size in sizes), f"{relative:.2f}"]) + " |"
            )
    return "\n".join(lines)


def depths(text: str) -> list[int]:
    """Parses numbers separated by commas; returns them sorted."""
    return sorted({int(depth) for depth in text.split(",") if depth})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--layers", type=depths, default="6,24,96", help="of encoder and decoder each, with commas")
    parser.add_argument("--unrolled", type=depths, default="6,24", help="depths also compiled without a scan")
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--length", type=int, default=64, help="of a row, in tokens of each side")
    parser.add_argument("--vocab_size", type=int, default=37_000, help="the logits' share of the memory")
    parser.add_argument("--d_model", type=int, default=512, help="d_ff is four times as much, heads have 64")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)

    found, params = {}, {}
    make_config = functools.partial(
        TransformerConfig,
        arguments.vocab_size,
        d_model=arguments.d_model,
        num_heads=arguments.d_model // 64,
        d_ff=4 * arguments.d_model,
    )
    for layers in arguments.layers:
        params[layers] = num_params(make_config(num_layers=layers))
        for remat in REMAT:
            print(f"{layers} layers, remat={remat}", file=sys.stderr)
            config = make_config(num_layers=layers, remat=remat)
            found[layers, remat] = compile_step(config, arguments.rows, arguments.length)
    for layers in arguments.unrolled:
        print(f"{layers} layers, unrolled", file=sys.stderr)
        with mock.patch.object(encoder_decoder, "scan_layers", loop_over_layers):
            found[layers, "unrolled"] = compile_step(make_config(num_layers=layers), arguments.rows, arguments.length)
    device = f"{jax.devices()[0].device_kind} ({os.cpu_count()} cores), jax {jax.__version__}"
    print(f"# Depth\n\n{device}; a batch of {arguments.rows} x {arguments.length} tokens of each side\n")
    print(f"## Time to compile a step\n\n{times_table(dict(sorted(found.items())))}\n")
    print(f"## Temporary buffers, MiB\n\n{memory_table(found, params)}")


if __name__ == "__main__":
    main()
