r"""A training step of the same Llama by MaxText and by us, compiled for 16 TPU v5e and read in the same way.

    pip install maxtext jinja2 sympy "tfx-jax[plan] @ git+https://github.com/tfx-jax/tfx-jax"   # Python 3.12
    python benchmarks/maxtext_step.py

prints a Markdown table. No TPU is needed and nothing is timed: MaxText's own `train_compile` compiles its step, and the
program is read as `tfx-jax plan` reads ours. Both steps have the same sizes, batch, bfloat16 computation on float32
parameters, AdamW, clipped gradients and no dropout; the devices share the rows and nothing else.

The result is in docs/pod_on_paper.md.
"""

import argparse
import contextlib
import dataclasses
import importlib.resources
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import jax

from tfx_jax.models import LlamaConfig
from tfx_jax.planning.plan import Plan, plan_step, read_plan
from tfx_jax.planning.topologies import absent_devices
from tfx_jax.tasks import LanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig

TOPOLOGY = "v5e:4x4"
ROWS_OF_DEVICE = 4
MODEL = LlamaConfig(
    vocab_size=32_000, max_length=1_024, num_layers=12, d_model=768, num_heads=12, num_kv_heads=12, d_ff=2_048
)
MAXTEXT = {  # arguments of each form of the stack of layers
    "MaxText, loop, all recomputed": ["remat_policy=full"],
    "MaxText, loop, products kept": ["remat_policy=minimal"],
    "MaxText, no loop, all recomputed": ["scan_layers=false", "remat_policy=full"],
    "MaxText, no loop, products kept": ["scan_layers=false", "remat_policy=minimal"],
}
OURS: dict[str, dict[str, Any]] = {  # fields of the model's configuration
    "tfx_jax, loop, all recomputed": {"remat": "full"},
    "tfx_jax, loop, products kept": {"remat": "dots"},
    "tfx_jax, loop, nothing recomputed": {},
    "tfx_jax, no loop, nothing recomputed": {"unroll": True},
}


class Compiled(NamedTuple):
    """The plan of a compiled step and the seconds of one core that tracing and compiling it took."""

    plan: Plan
    seconds: float


def config_of(num_devices: int, **options: Any) -> ExperimentConfig:
    """Returns the experiment whose training step is compiled; `options` are those of the model."""
    data = TextData(max_length=MODEL.max_length, tokens_per_batch=ROWS_OF_DEVICE * num_devices * MODEL.max_length)
    config = ExperimentConfig(dataclasses.replace(MODEL, dtype="bfloat16", **options), LanguageModelConfig(data))
    config.optimizer.name, config.optimizer.clip_norm = "adamw", 1.0
    return config


def maxtext_arguments(num_devices: int) -> list[str]:
    """Returns the arguments of MaxText's `train_compile` for the same model and batch."""
    values = {
        "compile_topology": f"v5e-{num_devices}",
        "compile_topology_num_slices": 1,
        "run_name": "step",
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "decoder_block": "llama2",
        "vocab_size": MODEL.vocab_size,
        "max_target_length": MODEL.max_length,
        "base_num_decoder_layers": MODEL.num_layers,
        "base_emb_dim": MODEL.d_model,
        "base_num_query_heads": MODEL.num_heads,
        "base_num_kv_heads": MODEL.num_kv_heads,
        "head_dim": MODEL.d_model // MODEL.num_heads,
        "base_mlp_dim": MODEL.d_ff,
        "mlp_activations": "['silu','linear']",
        "logits_via_embedding": False,
        "per_device_batch_size": ROWS_OF_DEVICE,
        "ici_data_parallelism": num_devices,
        "ici_fsdp_parallelism": 1,
        "dtype": "bfloat16",
        "weight_dtype": "float32",
        "opt_type": "adamw",
        "gradient_clipping_threshold": 1.0,
    }
    return [f"{name}={value}" for name, value in values.items()]


def compiled(form: str) -> Compiled:
    """Compiles the step of a form. Call it in a new process, because both libraries set options of JAX."""
    jax.config.update("jax_platforms", "cpu")
    devices = absent_devices(TOPOLOGY)
    step = plan_step(config_of(len(devices), **OURS.get(form, {})), devices)
    if form in OURS:
        step_fn: Any = step.setup.step_fn  # a function of jax.jit
        arguments = step.setup.abstract_state, step.batch, jax.random.key(0)
        program, seconds = _timed(lambda: step_fn.trace(*arguments).lower().compile())
    else:
        with contextlib.redirect_stdout(sys.stderr):  # MaxText reports there
            program, seconds = _compiled_by_maxtext([*maxtext_arguments(len(devices)), *MAXTEXT[form]])
    return Compiled(read_plan(step, program), seconds)


def _compiled_by_maxtext(arguments: Sequence[str]) -> tuple[Any, float]:
    """Returns the program that MaxText's `train_compile` makes, and the seconds of one core that it took."""
    from maxtext.trainers.pre_train import train_compile  # type: ignore[import-not-found]

    base = importlib.resources.files("maxtext") / "configs" / "base.yml"
    found: list[tuple[Any, float]] = []
    compile_step = train_compile.jit_and_compile

    def keep(*args: Any, **kwargs: Any) -> Any:
        """Compiles the step as MaxText does, and keeps the program."""
        found.append(_timed(lambda: compile_step(*args, **kwargs)))
        return found[-1][0]

    with mock.patch.object(train_compile, "jit_and_compile", keep):
        train_compile.main(["train_compile", str(base), *arguments])
    return found[0]


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Returns what `make` makes and the seconds of one core that it took."""
    start = time.process_time()
    return make(), time.process_time() - start


def row(form: str, found: Compiled) -> str:
    """Returns the row of a form in the table."""
    plan, seconds = found
    if plan.predicted_step_seconds is None:
        return f"| {form} | | | {plan.peak_bytes / 2**30:.2f} | {seconds:.0f} |"
    return (
        f"| {form} | {1e3 * plan.predicted_step_seconds:.1f} | {100 * (plan.predicted_mfu or 0):.0f}% "
        f"| {plan.peak_bytes / 2**30:.2f} | {seconds:.0f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns an exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="compile the forms whose name contains this")
    only = parser.parse_args(argv).only
    forms = [form for form in MAXTEXT | OURS if only in form]
    if importlib.util.find_spec("maxtext") is None and any(form in MAXTEXT for form in forms):
        print("MaxText is not installed: pip install maxtext, or --only=tfx_jax", file=sys.stderr)
        return 1
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print("| step | ms | MFU | GiB | seconds to compile |\n|---|--:|--:|--:|--:|", flush=True)
    for form in forms:
        with futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            print(row(form, pool.submit(compiled, form).result()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
