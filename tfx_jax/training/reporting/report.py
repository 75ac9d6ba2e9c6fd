"""The report of a run: `report.md` and `learning_curves.png`."""

import io
import math
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tfx_jax.data.files import write_file
from tfx_jax.tasks.task import MetricInfo
from tfx_jax.training.config import ExperimentConfig, flat
from tfx_jax.training.reporting.meter import PARTS, peak_flops
from tfx_jax.training.reporting.progress import Evaluation, History, clock, read_history
from tfx_jax.training.run import Run

_BLUE, _ORANGE, _GRAY = "#0072b2", "#d55e00", "#b0b0b0"  # Okabe and Ito's, told apart by everyone
_LOG_FROM = 3.0  # a loss that falls by more than this factor is drawn on a logarithmic axis
_MOST_MARKERS = 60


def draw_learning_curves(
    history: History, evaluations: Sequence[Evaluation], metric: MetricInfo, *, unit: str = "token"
) -> Figure | None:
    """Draws the loss, and below it a metric if there is an evaluation; None if there is nothing to draw."""
    steps, losses = history.curve("train/loss")
    if not steps.size and not evaluations:
        return None
    rows = bool(steps.size) + bool(evaluations)
    figure = Figure(figsize=(8.0, 1.0 + 2.9 * rows), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(rows, sharex=True)))
    if steps.size:
        _draw_loss(panels[0], steps, losses, *history.curve("train/nll"), unit=unit)
    if evaluations:
        _draw_metric(panels[-1], evaluations, metric)
    last = max([*steps, *(evaluation["step"] for evaluation in evaluations)])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#e6e6e6", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.set_xlim(0, last * 1.02)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.xaxis.set_major_locator(MaxNLocator(8, steps=(1, 2, 2.5, 5, 10), integer=True))
    panels[-1].set_xlabel("step")
    return figure


def _draw_loss(
    panel: Axes, steps: np.ndarray, losses: np.ndarray, nll_steps: np.ndarray, nlls: np.ndarray, *, unit: str
) -> None:
    """The trained loss, and the cross entropy without label smoothing where that is another."""
    panel.set_title(f"training loss, nats for each {unit}", loc="left", fontsize=11)
    curves = [(steps, losses, _BLUE, "with label smoothing")]
    if nlls.size and not (losses.shape == nlls.shape and np.allclose(losses, nlls)):
        curves.append((nll_steps, nlls, _ORANGE, "cross entropy"))
    for at, values, color, label in curves:
        smooth = _running_mean(values, len(values) // 50)
        if smooth is not values:
            panel.plot(at, values, color=color, alpha=0.25, linewidth=0.8)
        panel.plot(at, smooth, color=color, linewidth=1.8, label=label, marker="o" if len(at) == 1 else None)
    if len(curves) > 1:
        panel.legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0
        )  # above the curves
    everything = np.concatenate([values for _, values, _, _ in curves])
    if 0 < everything.min() * _LOG_FROM < everything.max():
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_locator(NullLocator())


def _draw_metric(panel: Axes, evaluations: Sequence[Evaluation], metric: MetricInfo) -> None:
    panel.set_title(f"validation {metric.title}{metric.unit and ','}{metric.unit}", loc="left", fontsize=11)
    steps = [evaluation["step"] for evaluation in evaluations]
    values = np.array([evaluation[metric.name] for evaluation in evaluations], dtype=float)
    values[~np.isfinite(values)] = np.nan  # which is not drawn, and the best of nothing
    marker = "o" if len(steps) <= _MOST_MARKERS else None
    panel.plot(steps, values, color=_BLUE, linewidth=1.8, marker=marker, markersize=4.5, clip_on=False, zorder=3)
    if np.isnan(values).all():
        return
    best = int(np.nanargmin(values) if metric.is_loss else np.nanargmax(values))
    panel.axhline(values[best], color=_GRAY, linewidth=0.8, linestyle="--")
    said = f"best {metric.format(values[best])} at step {steps[best]:,}"
    panel.set_title(said, loc="right", color="#606060", fontsize=9)  # where no curve can run through it
    if not metric.is_loss:
        panel.set_ylim(0, max(values[best] * 1.15, 1.0))


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the `width` values around each, of fewer at the ends; the values themselves for widths below 2.

    >>> _running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist()
    [1.5, 3.0, 6.0, 7.5]
    """
    if width < 2:
        return values
    weights = np.ones(width)
    return np.convolve(values, weights, "same") / np.convolve(np.ones_like(values), weights, "same")


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
    device_kinds: Sequence[str],
    evaluations: Sequence[Evaluation],
    message: Callable[[str], None],
) -> None:
    """Writes report and picture from what all runs of a workdir left in its TensorBoard files.

    Each file is replaced at once or not at all. What cannot be written is reported in one line: the training, which is
    saved by then, must not fail for it. The seconds since the last logged step of a run that was killed are not known.

    Args:
      workdir: of the training.
      run: what was trained.
      step: where it ended.
      signum: the signal that interrupted it, or None.
      num_params: parameters of the model.
      device_kinds: of each device that it ran on last, its `device_kind`.
      evaluations: all so far.
      message: shows a line: where the report is, or why there is none.
    """
    try:
        from tfx_jax.training.reporting.report import draw_learning_curves  # Matplotlib is slow to import

        folder, history, config = epath.Path(workdir), read_history(workdir), run.config
        figure = draw_learning_curves(history, evaluations, run.task.metrics[0], unit=run.task.unit)
        if figure is not None:
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=150)
            write_file(folder / "learning_curves.png", picture.getvalue())
        parts = [
            f"# Training report\n\nStep {step:,} of {config.num_steps:,}: {_ending(run, step, signum)}.",
            "" if figure is None else "![Learning curves](learning_curves.png)",
            _table(("", ""), _facts(history, run, step, num_params, device_kinds)),
            _time_table(history),
            _evaluation_table(evaluations, run.task.metrics),
            f"## Configuration\n\n{config_table(config)}",
        ]
        write_file(folder / "report.md", ("\n\n".join(part for part in parts if part) + "\n").encode())
        message(f"report in {folder / 'report.md'}")
    except Exception as error:  # whatever storage and Matplotlib raise
        message(f"no report: {' '.join(str(error).split())}")


def _ending(run: Run[Any], step: int, signum: int | None) -> str:
    config = run.config
    if signum is not None:
        return f"interrupted by {signal.Signals(signum).name}, the same command goes on"
    if step < config.num_steps:
        return f"stopped early, without a better {run.task.metrics[0].title} in the last {config.patience} evaluations"
    return "finished"


def _facts(
    history: History, run: Run[Any], step: int, num_params: int, device_kinds: Sequence[str]
) -> list[tuple[str, str]]:
    """Rows of the first table: name and value."""
    config, what = run.config, f"{run.task.unit}s".capitalize()
    facts = [
        ("Parameters", f"{num_params:,}"),
        ("Devices", ", ".join(f"{device_kinds.count(kind)} x {kind}" for kind in dict.fromkeys(device_kinds))),
        ("Computation", config.model.dtype),
    ]
    starts = [start for start in history.starts if start < step]
    if len(starts) > 1:
        facts.append(("Runs", f"{len(starts)}, the last from step {starts[-1]:,}"))
    steps, tokens = history.curve("train/tokens_per_step")
    if steps.size:
        # What a killed run did not log is taken to have been like the steps logged after it.
        seen = float((tokens * np.diff(steps, prepend=0)).sum())
        facts.append((f"{what} seen", f"{seen:,.0f}, {seen / steps[-1]:,.0f} a step"))
    rate = _mean_rate(history, "train/tokens_per_second")
    if rate is not None:
        facts.append((f"{what} a second", f"{rate:,.0f} while training"))
    facts += _mfu_fact(history, config, device_kinds)
    bad = history.curve("train/bad_steps")[1].sum()
    if bad:
        facts.append(("Skipped steps", f"{bad:,.0f}"))
    return facts


def _mfu_fact(history: History, config: ExperimentConfig, device_kinds: Sequence[str]) -> list[tuple[str, str]]:
    mfu, peak = _mean_rate(history, "train/mfu"), peak_flops(device_kinds)
    if mfu is None or peak is None:
        return []
    text = f"{mfu:.1%} of the devices' peak at 16 bits, {peak / 1e12:,.0f} TFLOP/s; padding is counted as work"
    if config.model.dtype == "float32":
        text += "; **the computation is float32, the peak that of bfloat16**"
    return [("Model FLOP utilization", text)]


def _time_table(history: History) -> str:
    """Of all runs, steps that were lost and taken again included."""
    points = [*history.points, *history.superseded]
    seconds = {part: sum(point.scalars.get(f"time/{part}", 0.0) for point in points) for part in PARTS}
    total = sum(seconds.values())
    if not total:
        return ""
    rows = [(_PARTS[part], clock(value), f"{value / total:.1%}") for part, value in seconds.items()]
    rows.append(("**together**", f"**{clock(total)}**", ""))
    lost = sum(point.scalars.get(f"time/{part}", 0.0) for point in history.superseded for part in PARTS)
    if lost:
        rows.append(("of it for steps lost and taken again", clock(lost), f"{lost / total:.1%}"))
    return "## Where the time went\n\n" + _table(("", "time", "share"), rows)


def _evaluation_table(evaluations: Sequence[Evaluation], metrics: Sequence[MetricInfo]) -> str:
    if not evaluations:
        return ""
    values = [value for evaluation in evaluations if math.isfinite(value := evaluation[metrics[0].name])]
    best = (min if metrics[0].is_loss else max)(values, default=None)
    rows = []
    for evaluation in evaluations:
        first, *others = (metric.format(evaluation[metric.name]) for metric in metrics)
        is_best = evaluation[metrics[0].name] == best
        rows.append((f"{evaluation['step']:,}", f"**{first}**" if is_best else first, *others))
    titles = (f"{metric.title} ({metric.note})" if metric.note else metric.title for metric in metrics)
    return "## Evaluations on the validation split\n\n" + _table(("step", *titles), rows)


def config_table(config: ExperimentConfig) -> str:
    """Returns what differs from the defaults, as a Markdown table."""
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
    """A Markdown table."""
    cells = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _mean_rate(history: History, tag: str) -> float | None:
    """The mean over the time in which the rate was measured."""
    rates = [
        (point.scalars[tag], point.scalars["time/data"] + point.scalars["time/step"])
        for point in history.points
        if tag in point.scalars and "time/step" in point.scalars
    ]
    seconds = sum(weight for _, weight in rates)
    return sum(rate * weight for rate, weight in rates) / seconds if seconds else None
