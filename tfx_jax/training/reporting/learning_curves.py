"""Learning curves of a run: its loss and the first metric of its evaluations, by step."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tfx_jax.tasks.task import MetricInfo
from tfx_jax.training.reporting.progress import Evaluation, History

_BLUE, _ORANGE, _GRAY = "#0072b2", "#d55e00", "#b0b0b0"  # Okabe and Ito's colors, distinguishable by the color-blind
_LOG_FROM = 3.0  # losses that fall by more than this factor get a logarithmic axis
_MOST_MARKERS = 60


def draw_learning_curves(
    history: History, evaluations: Sequence[Evaluation], metric: MetricInfo, *, unit: str = "token"
) -> Figure | None:
    """Draws the loss and, if there are evaluations, a metric below it; returns None if there is nothing to draw."""
    steps, losses = history.curve("train/loss")
    if not steps.size and not evaluations:
        return None
    num_panels = bool(steps.size) + bool(evaluations)
    figure = Figure(figsize=(8.0, 1.0 + 2.9 * num_panels), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(num_panels, sharex=True)))
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
    """Draws the training loss and, if it differs, the cross entropy without label smoothing."""
    panel.set_title(f"training loss, nats for each {unit}", loc="left", fontsize=11)
    curves = [(steps, losses, _BLUE, "with label smoothing")]
    if nlls.size and not (losses.shape == nlls.shape and np.allclose(losses, nlls)):
        curves.append((nll_steps, nlls, _ORANGE, "cross entropy"))
    for curve_steps, values, color, label in curves:
        smooth = _running_mean(values, len(values) // 50)
        if smooth is not values:
            panel.plot(curve_steps, values, color=color, alpha=0.25, linewidth=0.8)
        marker = "o" if len(curve_steps) == 1 else None  # a line of one point is invisible
        panel.plot(curve_steps, smooth, color=color, linewidth=1.8, label=label, marker=marker)
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
    """Draws the curve of a validation metric and a line at its best value, which the title states."""
    unit = f",{metric.unit}" if metric.unit else ""  # as in "accuracy, %": the unit begins with a space
    panel.set_title(f"validation {metric.title}{unit}", loc="left", fontsize=11)
    steps = [evaluation["step"] for evaluation in evaluations]
    values = np.array([evaluation[metric.name] for evaluation in evaluations], dtype=float)
    values[~np.isfinite(values)] = np.nan  # not drawn, and never the best
    marker = "o" if len(steps) <= _MOST_MARKERS else None
    panel.plot(steps, values, color=_BLUE, linewidth=1.8, marker=marker, markersize=4.5, clip_on=False, zorder=3)
    if np.isnan(values).all():
        return
    best = int(np.nanargmin(values) if metric.is_loss else np.nanargmax(values))
    panel.axhline(values[best], color=_GRAY, linewidth=0.8, linestyle="--")
    summary = f"best {metric.format(values[best])} at step {steps[best]:,}"
    panel.set_title(summary, loc="right", color="#606060", fontsize=9)  # outside the axes, where no curve crosses it
    if not metric.is_loss:
        panel.set_ylim(0, max(values[best] * 1.15, 1.0))  # some space above the best value


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of the `width` values around each value (fewer at the ends); unchanged for widths below 2.

    >>> _running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist()
    [1.5, 3.0, 6.0, 7.5]
    """
    if width < 2:
        return values
    weights = np.ones(width)
    return np.convolve(values, weights, "same") / np.convolve(np.ones_like(values), weights, "same")
