"""Learning curves of a run: its loss and the metric that ranks its evaluations, by step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tfx_jax.errors import UserError
from tfx_jax.tasks.task import MetricInfo
from tfx_jax.training.reporting.progress import Evaluation, History

_BLUE, _ORANGE, _GRAY = "#0072b2", "#d55e00", "#b0b0b0"  # Okabe and Ito's colors, distinguishable by the color-blind
_LOG_FROM = 3.0  # losses that fall by more than this factor get a logarithmic axis
_MOST_MARKERS = 60


def draw_learning_curves(
    history: History, evaluations: Sequence[Evaluation], metric: MetricInfo, *, unit: str = "token"
) -> Figure | None:
    """Draws the loss and below it, if they are known, a metric of the evaluations and the learning rate.

    Losses of evaluations are drawn beside the training loss. Returns None if there is nothing to draw.
    """
    steps, losses = history.curve("train/loss")
    if not steps.size and not evaluations:
        return None
    rate_steps, rates = history.curve("train/learning_rate")
    num_panels = bool(steps.size) + bool(evaluations) + bool(rates.size)
    figure = Figure(figsize=(8.0, 1.0 + 2.9 * num_panels), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(num_panels, sharex=True)))
    if steps.size:
        _draw_loss(panels[0], steps, losses, *history.curve("train/nll"), evaluations, unit=unit)
    if evaluations:
        _draw_metric(panels[bool(steps.size)], evaluations, metric)
    if rates.size:
        panels[-1].set_title("learning rate", loc="left", fontsize=11)
        panels[-1].plot(rate_steps, rates, color=_BLUE, linewidth=1.8, marker="o" if rates.size == 1 else None)
        panels[-1].set_ylim(bottom=0)
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
    panel: Axes,
    steps: np.ndarray,
    losses: np.ndarray,
    nll_steps: np.ndarray,
    nlls: np.ndarray,
    evaluations: Sequence[Evaluation],
    *,
    unit: str,
) -> None:
    """Draws the training loss, the cross entropy without label smoothing if it differs, and losses of evaluations."""
    curves = [(steps, losses, _BLUE, "training")]
    if nlls.size and not (losses.shape == nlls.shape and np.allclose(losses, nlls)):
        curves = [(steps, losses, _BLUE, "with label smoothing"), (nll_steps, nlls, _ORANGE, "cross entropy")]
    for curve_steps, values, color, label in curves:
        smooth = _running_mean(values, len(values) // 50)
        if smooth is not values:
            panel.plot(curve_steps, values, color=color, alpha=0.25, linewidth=0.8)
        marker = "o" if len(curve_steps) == 1 else None  # a line of one point is invisible
        panel.plot(curve_steps, smooth, color=color, linewidth=1.8, label=label, marker=marker)
    # Not all tasks report a loss.
    validation = [
        (evaluation["step"], evaluation["loss"])
        for evaluation in evaluations
        if math.isfinite(evaluation.get("loss", math.nan))
    ]
    if validation:
        validation_steps, validation_losses = np.array(validation, float).T
        style: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 4, "linewidth": 1}
        panel.plot(validation_steps, validation_losses, label="validation", **style)
        curves.append((validation_steps, validation_losses, "black", "validation"))
    title = "loss" if validation else "training loss"
    panel.set_title(f"{title}, nats for each {unit}", loc="left", fontsize=11)
    if len(curves) > 1:
        panel.legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0
        )  # above the curves
    all_losses = np.concatenate([values for _, values, _, _ in curves])
    if 0 < all_losses.min() * _LOG_FROM < all_losses.max():
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
    # Equal values span no range, so the margin depends on their size instead.
    margin = 0.1 * (np.nanmax(values) - np.nanmin(values)) or max(0.1 * abs(values[best]), 0.1)
    panel.set_ylim(np.nanmin(values) - margin, np.nanmax(values) + margin)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of the `width` values around each value (fewer at the ends); unchanged for widths below 2.

    >>> _running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist()
    [1.5, 3.0, 6.0, 7.5]
    """
    if width < 2:
        return values
    window = np.ones(width)
    num_values = np.convolve(np.ones_like(values), window, "same")  # in the window around each value
    return np.convolve(values, window, "same") / num_values


def compared_tags(histories: Mapping[str, History]) -> list[str]:
    """Returns the names of the losses and metrics that runs have logged, in the order of their first values."""
    points = [point for history in histories.values() for point in history.points]
    tags = dict.fromkeys(tag for point in points for tag in point.scalars)
    return [tag for tag in tags if tag.startswith(("train/loss", "validation/"))]


def draw_comparison(histories: Mapping[str, History]) -> Figure:
    """Draws the training loss and each metric of the evaluations, with a curve for each run.

    Raises:
      UserError: if no run has logged a loss or a metric.
    """
    tags = compared_tags(histories)
    if not tags:
        raise UserError("none of the runs has logged a loss or a metric: there is nothing to draw")
    figure = Figure(figsize=(8.0, 1.0 + 2.9 * len(tags)), layout="constrained")
    for panel, tag in zip(np.atleast_1d(figure.subplots(len(tags), sharex=True)), tags, strict=True):
        panel.set_title(tag.replace("/", " "), loc="left", fontsize=11)
        for name, history in histories.items():
            steps, values = history.curve(tag)
            marker = "o" if 0 < len(steps) <= _MOST_MARKERS and tag != "train/loss" else None
            panel.plot(steps, _running_mean(values, len(values) // 50), label=name, marker=marker, markersize=4)
        panel.grid(color="#e6e6e6", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.axes[-1].set_xlabel("step")
    return figure
