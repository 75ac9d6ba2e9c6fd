r"""Plans TPU pods without one: what each strategy costs on slices and H100, by the programs that would run there.

    pip install "tfx-jax[plan,plan-cuda] @ git+https://github.com/tfx-jax/tfx-jax"
    python benchmarks/pod.py --output=docs --page=docs/pod_on_paper.md

plans one training step (`tfx_jax.planning.plan`) for each model, pod and strategy (a cell): compiles it with the
compiler of the devices, without having the devices, and reads memory, exchanges and times from the program. Nothing is
timed. A cell takes one or two minutes of a core for a TPU slice, a quarter of that for GPUs. Each is written into
OUTPUT/pod.json when it is done, and not planned again: run the command again to resume. `--only` plans some cells, such
as "big/*" or "*/v5e-16/*,*/h100-64/data". Cells whose compiler is not installed are left out, with a message. At the
end the tables are printed, and written into the page between its two marks.
"""

import argparse
import dataclasses
import fnmatch
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax

from tfx_jax.cli.plan import as_json
from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig
from tfx_jax.models.config import ModelConfig
from tfx_jax.planning.plan import plan_training
from tfx_jax.planning.topologies import absent_devices
from tfx_jax.tasks import (
    BertPretrainingConfig,
    LanguageModelConfig,
    PairData,
    SpanCorruptionConfig,
    TextData,
    TranslationConfig,
)
from tfx_jax.tasks.task import TaskConfig
from tfx_jax.training import ExperimentConfig, MeshConfig

PODS = {
    "v5e-16": "v5e:4x4",
    "v5e-256": "v5e:16x16",
    "v6e-256": "v6e:16x16",
    "v5p-128": "v5p:4x4x8",
    "h100-64": "h100:1x8x8",
}
"""Topologies by name; the number in a name is the number of devices."""

TOKENS = 4096
"""Tokens of a batch on each device; in translation, tokens of each side."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its task, and the strategies that make sense for it.

    Attributes:
      model: configuration of the model.
      task: class of the task's configuration, called with the data.
      length: tokens of an example.
      strategies: parallelism, in the notation of `mesh`.
      what: description for the heading.
    """

    model: ModelConfig
    task: Callable[[Any], TaskConfig]
    length: int
    strategies: tuple[str, ...]
    what: str

    def config(self, num_devices: int) -> ExperimentConfig:
        """Returns the experiment on a number of devices."""
        sizes: dict[str, Any] = {"max_length": self.length, "tokens_per_batch": TOKENS * num_devices}
        data = (PairData if self.task is TranslationConfig else TextData)(**sizes)
        return ExperimentConfig(self.model, self.task(data))


_SMALL = ("data", "data x fsdp 8")
_ALL = ("data", "data x fsdp 8", "fsdp", "data x tensor 8", "fsdp x sequence 8")

CASES = {
    "base": Case(TransformerConfig(dtype="bfloat16"), TranslationConfig, 256, _SMALL, "the paper's base Transformer"),
    "big": Case(TransformerConfig.big(dtype="bfloat16"), TranslationConfig, 256, _ALL, "the paper's big Transformer"),
    "1b": Case(
        TransformerConfig(
            32_000, num_layers=15, d_model=1536, num_heads=16, d_ff=6144, pre_norm=True, dtype="bfloat16", remat="full"
        ),
        TranslationConfig,
        256,
        ("data x fsdp 8", "fsdp", "fsdp x tensor 8", "fsdp x sequence 8"),
        "a Transformer of 15 + 15 layers of 1,536, each computed again in the backward pass",
    ),
    "gpt2": Case(GPTConfig(dtype="bfloat16"), LanguageModelConfig, 1024, _SMALL, "GPT-2, 124 million"),
    "gpt2-xl": Case(
        GPTConfig.published("gpt2-xl", dtype="bfloat16", remat="full"),
        LanguageModelConfig,
        1024,
        # More devices do not divide all sizes (1,600 columns), and none divides the 25 heads.
        ("data x fsdp 8", "data x fsdp 16"),
        "GPT-2, 1.5 billion, each layer computed again in the backward pass",
    ),
    "t5-base": Case(T5Config.published("t5-base", dtype="bfloat16"), SpanCorruptionConfig, 512, _SMALL, "T5 base"),
    "bert-base": Case(BertConfig(dtype="bfloat16"), BertPretrainingConfig, 512, _SMALL, "BERT base"),
}

_BEGIN, _END = "<!-- tables of benchmarks/pod.py -->\n", "<!-- end of the tables -->\n"


def mesh(strategy: str, num_devices: int) -> MeshConfig:
    """Returns the sizes of the mesh's axes for a strategy, "AXIS" or "AXIS x AXIS SIZE".

    The first axis gets all devices that the second one leaves.

    >>> mesh("fsdp", 64).fsdp, mesh("fsdp x tensor 8", 64).fsdp, mesh("data x tensor 8", 64).data
    (64, 8, 8)
    """
    first, _, second = strategy.partition(" x ")
    sizes = {"data": 1}
    if second:
        axis, size = second.split()
        sizes[axis] = int(size)
        num_devices //= int(size)
    return MeshConfig(**sizes | {first: num_devices})


def cells(only: str) -> Iterator[tuple[str, str, str]]:
    """Yields (model, pod, strategy) of every cell whose name MODEL/POD/STRATEGY matches a pattern in `only`."""
    for model, case in CASES.items():
        for pod in PODS:
            for strategy in case.strategies:
                if any(fnmatch.fnmatch(f"{model}/{pod}/{strategy}", pattern) for pattern in only.split(",")):
                    yield model, pod, strategy


def planned(model: str, pod: str, strategy: str) -> dict[str, Any]:
    """Returns the output of `tfx-jax plan --json` for a cell; if it cannot be planned, "fits": False and the "error".

    Raises:
      UserError: if there is no compiler for the devices.
    """
    jax.config.update("jax_platforms", "cpu")
    # The default stack overflows with gpt2-xl.
    os.environ.setdefault("LIBTPU_INIT_ARGS", "--fibers_default_thread_stack_size=1048576")
    devices = absent_devices(PODS[pod])
    config = dataclasses.replace(CASES[model].config(len(devices)), mesh=mesh(strategy, len(devices)))
    try:
        return as_json(plan_training(config, devices))
    except UserError as error:
        return {"fits": False, "error": str(error)}


def apart(cell: tuple[str, str, str]) -> dict[str, Any]:
    """Calls `planned` for a cell in a separate process, because compilers may crash and do not free all memory."""
    with futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(planned, *cell).result()
        except BrokenProcessPool:
            return {"fits": False, "error": "the compiler crashes"}


def table(model: str, found: dict[str, dict[str, Any]]) -> str:
    """Returns the table of a model in Markdown; `found` has the results of `planned` by MODEL/POD/STRATEGY."""
    heading = f"## {model}: {CASES[model].what}; examples of {CASES[model].length}"
    columns = (
        "pod",
        "strategy",
        "GiB",
        "exchanges",
        "hidden",
        "compute ms",
        "network ms",
        "step ms",
        "MFU",
        "bound by",
    )
    lines = [heading, "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, cell in found.items():
        cell_model, pod, strategy = name.split("/")
        if cell_model == model:
            lines.append("| " + " | ".join([pod, strategy, *_row(cell)]) + " |")
    return "\n".join([*lines, ""])


def _row(cell: dict[str, Any]) -> list[str]:
    """Returns the columns of a cell after pod and strategy."""
    if not cell["fits"]:
        return [cell["error"], *[""] * 7]
    exchanges = ", ".join(
        f"{kind} {total['count']:,} / {total['bytes'] / 2**20:,.0f}" for kind, total in cell["collectives"].items()
    )
    seconds = cell["seconds"]
    at_least, at_most = (">= ", "<= ") if cell["is_bound"] else ("", "")
    return [
        f"{cell['peak_bytes'] / 2**30:.2f}",
        exchanges,
        f"{cell['async_share']:.0%}",
        *(f"{1e3 * seconds[name]:.1f}" for name in ("compute", "network")),
        f"{at_least}{1e3 * cell['predicted_step_seconds']:.1f}",
        f"{at_most}{cell['predicted_mfu']:.0%}",
        cell["bound"],
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of pod.json, which is resumed")
    parser.add_argument("--page", type=pathlib.Path, help="Markdown to write the tables into")
    parser.add_argument("--only", default="*", help="patterns of MODEL/POD/STRATEGY, with commas")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "pod.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for cell in cells(arguments.only):
        name = "/".join(cell)
        if name in found:
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            found[name] = apart(cell)
        except UserError as error:
            print(f"  left out: {error}", file=sys.stderr, flush=True)
            continue
        new = file.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1))
        new.replace(file)
    in_order = {name: found[name] for cell in cells("*") if (name := "/".join(cell)) in found}
    models = dict.fromkeys(name.partition("/")[0] for name in in_order)
    tables = "\n".join(table(model, in_order) for model in models)
    print(tables)
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text().partition(_BEGIN)
        arguments.page.write_text(f"{before}{_BEGIN}\n{tables}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
