"""The report of a run, `report.md`."""

import contextlib
import datetime
import functools
import importlib.metadata
import io
import math
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.tasks.task import MetricInfo, ReportTable
from tfx_jax.training.checkpoint.artifacts import read_sealed
from tfx_jax.training.config import ExperimentConfig, flat
from tfx_jax.training.reporting.meter import PARTS, peak_flops
from tfx_jax.training.reporting.progress import Evaluation, History, clock, read_history
from tfx_jax.training.run import Run

_PARTS = {
    "data": "waiting for data",
    "compile": "compiling",
    "step": "computing",
    "save": "saving",
    "evaluate": "evaluating",
}


def write_report(
    workdir: epath.PathLike,
    run: Run[Any],
    *,
    step: int,
    signum: int | None,
    num_params: int,
    num_trained: int,
    device_kinds: Sequence[str],
    evaluations: Sequence[Evaluation],
    message: Callable[[str], None],
    tables: Sequence[ReportTable] = (),
) -> None:
    """Writes the report and the learning curves from the TensorBoard files of all runs of a workdir.

    Each file is replaced atomically. A failure is reported in one line: it must not fail the run, which has been saved.
    The seconds since the last logged step of a killed run are unknown.

    Args:
      workdir: folder of the run.
      run: the run.
      step: last step.
      signum: signal that interrupted the run, or None.
      num_params: number of parameters of the model.
      num_trained: how many of them are trained.
      device_kinds: `device_kind` of each device of the last run.
      evaluations: all evaluations so far.
      message: function that prints a line: the path of the report, or why there is none.
      tables: tables of the task, such as sample predictions.
    """
    try:
        from tfx_jax.training.reporting.learning_curves import draw_learning_curves  # Matplotlib is slow to import

        folder, history, config = epath.Path(workdir), read_history(workdir), run.config
        figure = draw_learning_curves(history, evaluations, run.best_metric, unit=run.task.unit)
        if figure is not None:
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=150)
            write_file(folder / "learning_curves.png", picture.getvalue())
        parts = [
            f"# Training report\n\nStep {step:,} of {config.num_steps:,}: {_ending(run, step, signum)}.",
            "" if figure is None else "![Learning curves](learning_curves.png)",
            _table(("", ""), _facts(history, run, step, (num_params, num_trained), device_kinds)),
            _time_table(history),
            _evaluation_table(evaluations, run.task.metrics, run.best_metric),
            *(f"## {table.title}\n\n{_table(table.header, table.rows)}" for table in tables if table.rows),
            "## How to repeat it\n\n" + _table(("", ""), _origin(folder, config)),
            f"## Configuration\n\n{config_table(config)}",
        ]
        write_file(folder / "report.md", ("\n\n".join(part for part in parts if part) + "\n").encode())
        message(f"report in {folder / 'report.md'}")
    except Exception as error:  # storage and Matplotlib raise errors of many classes
        message(f"no report: {' '.join(str(error).split())}")


def _ending(run: Run[Any], step: int, signum: int | None) -> str:
    """Returns in words why the run ended at `step`."""
    config = run.config
    if signum is not None:
        return f"interrupted by {signal.Signals(signum).name}, rerun the same command to resume"
    if step < config.num_steps:
        return f"stopped early, without a better {run.best_metric.title} in the last {config.patience} evaluations"
    return "finished"


def _facts(
    history: History, run: Run[Any], step: int, sizes: tuple[int, int], device_kinds: Sequence[str]
) -> list[tuple[str, str]]:
    """Returns the rows (name, value) of the first table: size, devices, tokens, speed and skipped steps."""
    config, (num_params, num_trained) = run.config, sizes
    units = f"{run.task.unit}s".capitalize()  # such as "Target tokens"
    facts = [
        ("Parameters", f"{num_params:,}" + (f", {num_trained:,} trained" if num_trained < num_params else "")),
        ("Devices", ", ".join(f"{device_kinds.count(kind)} x {kind}" for kind in dict.fromkeys(device_kinds))),
        ("Computation", config.model.dtype),
    ]
    starts = [start for start in history.starts if start < step]
    if len(starts) > 1:
        facts.append(("Runs", f"{len(starts)}, the last from step {starts[-1]:,}"))
    steps, tokens = history.curve("train/tokens_per_step")
    if steps.size:
        # Steps that a killed run did not log are assumed to be like the steps logged after it.
        num_tokens = float((tokens * np.diff(steps, prepend=0)).sum())
        facts.append((f"{units} seen", f"{num_tokens:,.0f}, {num_tokens / steps[-1]:,.0f} a step"))
    rate = _mean_rate(history, "train/tokens_per_second")
    if rate is not None:
        facts.append((f"{units} a second", f"{rate:,.0f} while training"))
    facts += _mfu_fact(history, config, device_kinds)
    bad = history.curve("train/bad_steps")[1].sum()
    if bad:
        facts.append(("Skipped steps", f"{bad:,.0f}"))
    return facts


def _origin(workdir: epath.Path, config: ExperimentConfig) -> list[tuple[str, str]]:
    """Returns rows that say what the run was made from: command, code, seed and data. What is unknown is left out."""
    packages = filter(None, map(_version, ("tfx-jax", "jax", "jaxlib", "flax", "numpy")))
    rows = [("Command", f"`{command}`")] if (command := _command()) else []
    rows += [
        ("Date", f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"),
        ("Versions", ", ".join([*packages, f"Python {platform.python_version()}"])),
    ]
    if commit := _commit():
        rows.append(("Commit of tfx_jax", commit))
    rows.append(("Seed", str(config.seed)))
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # missing or damaged
        files: dict[str, Any] = read_sealed(workdir / "data.json")["files"]
        rows += [
            (f"`{name}`", f"{record['size']:,} bytes, BLAKE2b {record['checksum'] or 'not computed'}")
            for name, record in files.items()
        ]
    return rows


def _command() -> str:
    """Returns the command that this process runs; "" if the library was not called from the command line."""
    program, *arguments = sys.argv
    path = pathlib.Path(program)
    if path.name == "tfx-jax":
        return shlex.join([path.name, *arguments])
    if path.parts[-2:] == ("tfx_jax", "__main__.py"):
        return shlex.join(["python", "-m", "tfx_jax", *arguments])
    return ""


def _version(package: str) -> str:
    """Returns a package with its version; "" if it is not installed, such as a clone that is in the path."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Returns the commit of the clone that the library runs from, with "changed" if files differ; "" elsewhere."""
    folder = pathlib.Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return ""
    try:
        git = functools.partial(subprocess.run, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        return f"{commit}, changed" if git(["git", "status", "--porcelain", "-uno"]).stdout else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _mfu_fact(history: History, config: ExperimentConfig, device_kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the row of the utilization for `_facts`; [] if it or the peak is unknown."""
    mfu, peak = _mean_rate(history, "train/mfu"), peak_flops(device_kinds)
    if mfu is None or peak is None:
        return []
    text = f"{mfu:.1%} of the devices' peak at 16 bits, {peak / 1e12:,.0f} TFLOP/s; padding is counted as work"
    if config.model.dtype == "float32":
        text += "; **the computation is float32, the peak that of bfloat16**"
    return [("Model FLOP utilization", text)]


def _time_table(history: History) -> str:
    """Returns the table of times of all runs, including steps that were lost and repeated; "" without any times."""
    points = [*history.points, *history.superseded]
    seconds = {part: sum(point.scalars.get(f"time/{part}", 0.0) for point in points) for part in PARTS}
    total = sum(seconds.values())
    if not total:
        return ""
    rows = [(_PARTS[part], clock(value), f"{value / total:.1%}") for part, value in seconds.items()]
    rows.append(("**total**", f"**{clock(total)}**", ""))
    lost = sum(point.scalars.get(f"time/{part}", 0.0) for point in history.superseded for part in PARTS)
    if lost:
        rows.append(("of which repeated after a restart", clock(lost), f"{lost / total:.1%}"))
    return "## Where the time went\n\n" + _table(("", "time", "share"), rows)


def _evaluation_table(evaluations: Sequence[Evaluation], metrics: Sequence[MetricInfo], best_metric: MetricInfo) -> str:
    """Returns the table of all evaluations, with the best value of `best_metric` in bold; "" if there are none."""
    if not evaluations:
        return ""
    values = [evaluation[best_metric.name] for evaluation in evaluations]
    finite_values = [value for value in values if math.isfinite(value)]
    best = (min if best_metric.is_loss else max)(finite_values, default=None)
    rows = []
    for evaluation in evaluations:
        # Evaluations from before a metric was added lack it.
        cells = [metric.format(evaluation[metric.name]) if metric.name in evaluation else "" for metric in metrics]
        if evaluation[best_metric.name] == best:
            index = metrics.index(best_metric)
            cells[index] = f"**{cells[index]}**"
        rows.append((f"{evaluation['step']:,}", *cells))
    titles = (f"{metric.title} ({metric.note})" if metric.note else metric.title for metric in metrics)
    return "## Evaluations on the validation split\n\n" + _table(("step", *titles), rows)


def config_table(config: ExperimentConfig) -> str:
    """Returns the fields that differ from their defaults, as a Markdown table."""
    # The defaults of the same classes of model, task and data.
    task = type(config.task)()
    task.data = type(config.task.data)()
    default = flat(ExperimentConfig(model=type(config.model)(), task=task))
    chosen = flat(config)
    rows = [
        (f"`{name}`", f"`{value!r}`", f"`{default[name]!r}`")
        for name, value in chosen.items()
        if value != default[name]
    ]
    if not rows:
        return "The defaults."
    return "What differs from the defaults.\n\n" + _table(("field", "value", "default"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    # A cell must be one line, and its "|" must not end it.
    header_cells, *row_cells = ([" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in [header, *rows])
    lines = [header_cells, ["---"] * len(header), *row_cells]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _mean_rate(history: History, tag: str) -> float | None:
    """Returns the mean of the rate `tag`, weighted by the seconds of each point; None if it was not measured."""
    rates = [
        (point.scalars[tag], point.scalars["time/data"] + point.scalars["time/step"])
        for point in history.points
        if tag in point.scalars and "time/step" in point.scalars
    ]
    total_seconds = sum(seconds for _, seconds in rates)
    return sum(rate * seconds for rate, seconds in rates) / total_seconds if total_seconds else None
