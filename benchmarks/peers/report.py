"""Reports of the measurements: a Markdown table, all samples as JSON, a figure."""

import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.peers.measure import Result

_HEADER = """| row | what | against | ours, 1/s | peer, 1/s | ratio | range | fastest | others | target |
|---|---|---|---|---|---|---|---|---|---|"""


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table with a line for each peer of each row, and lists of phases and skipped sides."""
    lines = [_HEADER]
    for result in results:
        ours = result.row.sides[0].label
        for side in result.row.sides[1:]:
            if side.label not in result.samples or not result.samples.get(ours):
                continue
            ratios = result.ratios(side.label)
            mine, theirs = (_number(statistics.median(result.speeds(label))) for label in (ours, side.label))
            median, target = statistics.median(ratios), side.target
            verdict = "" if target is None else f">= {target:g} {'met' if median >= target else '**missed**'}"
            lines.append(
                f"| {result.row.name} | {result.row.title} [{result.row.unit}] | {side.label} | {mine} | {theirs} "
                f"| **{median:.2f}** | {min(ratios):.2f} to {max(ratios):.2f} | {result.fastest_ratio(side.label):.2f} "
                f"| {_neighbors(result, ours, side.label)} | {verdict} |"
            )
    lines += [*_phases(results), *_outputs(results), *_skipped(results)]
    return "\n".join(lines) + "\n"


def with_section(page: str, title: str, text: str) -> str:
    """Returns a page on which a section, "### title", has another text; a new one comes first below "## Measured"."""
    section = f"### {title}\n\n{text.strip()}\n\n"
    old = re.search(rf"^### {re.escape(title)}\n.*?(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    if old is None:
        start = re.search(r"^## Measured\n.*?(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
        if start is None:
            raise ValueError("the page has no section '## Measured'")
        return page[: start.end()] + section + page[start.end() :]
    return page[: old.start()] + section + page[old.end() :]


def _neighbors(result: Result, *labels: str) -> str:
    """Returns the share of the machine that other processes used, as the mean over the turns of the sides."""
    shares = [share for label in labels for share in result.neighbors.get(label, ())]
    return f"{statistics.mean(shares):.0%}" if shares else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _phases(results: Sequence[Result]) -> list[str]:
    """Returns lines with the median seconds of the phases of each side, and their total."""
    lines: list[str] = []
    for result in results:
        for label, rounds in result.about.items() if result.row.is_fresh else ():
            names = list(rounds[0])
            medians = [statistics.median(phases[name] for phases in rounds) for name in names]
            total = statistics.median(sum(phases.values()) for phases in rounds)
            words = ", ".join(f"{name} {seconds:.2f}" for name, seconds in zip(names, medians, strict=True))
            unit = "s" if result.row.unit == "start" else result.row.unit
            lines.append(f"- {result.row.name}, {label}: {total:.2f} {unit} ({words})")
    return ["", "Of what a process does once, medians:", "", *lines] if lines else []


def _outputs(results: Sequence[Result]) -> list[str]:
    """Returns lines that say how many of our best hypotheses are in the beams of sides with the same weights."""
    lines = []
    for result in results:
        if not result.row.is_fresh:
            ours = result.about.get(result.row.sides[0].label, {}).get("best", [])
            for label, about in result.about.items():
                if ours and "beams" in about:
                    found = sum(best in beams for best, beams in zip(ours, about["beams"], strict=True))
                    lines.append(f"- {result.row.name}: {found} of our {len(ours)} best are in the beams of {label}")
    return ["", "With the same weights:", "", *lines] if lines else []


def _skipped(results: Sequence[Result]) -> list[str]:
    lines = [f"- {r.row.name}, {label}: {why}" for r in results for label, why in r.skipped.items()]
    return ["", "Skipped:", "", *lines] if lines else []


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Returns all measurements, including the seconds of every unit."""
    return [
        {
            "row": result.row.name,
            "title": result.row.title,
            "unit": result.row.unit,
            "sides": [
                {
                    "label": side.label,
                    "target": side.target,
                    "work": result.work.get(side.label),
                    "seconds": result.samples.get(side.label),
                    "ratios": result.ratios(side.label) if _is_compared(result, side.label) else None,
                    "about": result.about.get(side.label),
                    "neighbors": result.neighbors.get(side.label),
                    "skipped": result.skipped.get(side.label),
                }
                for side in result.row.sides
            ],
        }
        for result in results
    ]


def _is_compared(result: Result, label: str) -> bool:
    return bool(result.samples.get(label)) and bool(result.samples.get(result.row.sides[0].label))


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Draws a bar for each ratio with its range, and a tick at its target."""
    bars = [
        (f"{result.row.name} / {side.label}", result.ratios(side.label), side.target)
        for result in results
        for side in result.row.sides[1:]
        if _is_compared(result, side.label)
    ]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for position, (_, ratios, target) in enumerate(bars):
        median = statistics.median(ratios)
        spread = [[median - min(ratios)], [max(ratios) - median]]
        axes.barh(position, median, color="tab:blue" if target is None or median >= target else "tab:orange")
        axes.errorbar(median, position, xerr=spread, color="black", capsize=3)
        if target is not None:
            axes.plot([target] * 2, [position - 0.45, position + 0.45], color="tab:red", linewidth=2)
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("our speed over the peer's: median and range of the rounds; red: target")
    figure.savefig(path, dpi=150)
