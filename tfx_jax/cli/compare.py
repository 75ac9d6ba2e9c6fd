"""`tfx-jax compare`: sets training runs side by side, in a table and a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfx_jax.arguments import Parser, folder
from tfx_jax.errors import UserError
from tfx_jax.training.config import flat, load_config
from tfx_jax.training.reporting.attention_plot import save_figure
from tfx_jax.training.reporting.learning_curves import compared_tags, draw_comparison
from tfx_jax.training.reporting.progress import History, read_history

_MISSING = object()  # value of a field that a configuration does not have


def run(argv: Sequence[str]) -> int:
    """Prints the table, and draws the picture if a file is named."""
    parser = Parser(
        "compare", "Compares training runs: the fields that differ, the losses and the evaluations, and their curves."
    )
    parser.add_argument("workdirs", nargs="+", type=folder, metavar="WORKDIR", help="folder of a run, two or more")
    parser.add_argument("--output", help="image file of the curves to write (.png, .pdf or .svg)")
    arguments = parser.parse_args(argv)
    names = list(dict.fromkeys(arguments.workdirs))
    if len(names) < 2:
        raise UserError("compare needs two or more workdirs")
    configs = [flat(load_config(name)) for name in names]
    histories = {name: read_history(name) for name in names}
    # Without the labels, which the data decide: config.json has their default.
    fields = list(dict.fromkeys(field for config in configs for field in config))
    rows = [("", *names)]
    for field in fields:
        values = [config.get(field, _MISSING) for config in configs]
        if field != "model.labels" and any(value != values[0] for value in values):
            rows.append((field, *map(_shown, values)))
    rows += _results(histories)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if arguments.output is not None:
        save_figure(arguments.output, lambda: draw_comparison(histories))
        print(f"drew the curves in {arguments.output}")
    return 0


def _shown(value: Any) -> str:
    """Returns the cell of a field's value: "-" if the configuration lacks the field."""
    if value is _MISSING:
        return "-"
    return '""' if value == "" else str(value)


def _results(histories: Mapping[str, History]) -> list[tuple[str, ...]]:
    """Returns the rows of the results: last step, and last value and range of each loss and metric."""
    last_steps = [max((point.step for point in history.points), default=0) for history in histories.values()]
    rows = [("last step", *(f"{step:,}" for step in last_steps))]
    for tag in compared_tags(histories):
        curves = [history.curve(tag)[1] for history in histories.values()]  # values of each run
        rows.append((f"{tag}, last", *(f"{curve[-1]:.4g}" if curve.size else "" for curve in curves)))
        rows.append((f"{tag}, range", *(_range(curve) for curve in curves)))
    return rows


def _range(curve: np.ndarray) -> str:
    return f"{curve.min():.4g} to {curve.max():.4g}" if curve.size else ""
