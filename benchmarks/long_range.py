r"""Long Range Arena: each attention on ListOps, text and matching; accuracy, speed and memory side by side.

    python -m benchmarks.long_range --workdir=runs/lra --data_dir=DIR

trains the experiments lra_listops, lra_text and lra_matching once with each attention, one after the other, each in
`WORKDIR/VARIANT/TASK/ATTENTION`, and writes table.md, accuracy_speed_memory.png and learning_curves.png into the
workdir. Run again, it goes on where it stopped; what is done already costs nothing more, whatever `--tasks` and
`--attentions` are added. DIR has the articles of WikiText-2, or of another set in its format, as train.txt.gz and
valid.txt.gz. Any `--config.FIELD=VALUE` holds for all trainings.

Accuracy is that of the validation split, at its best and after the last step; beside it stands that of the commonest
label and, but for pairs, of naive Bayes on counts of tokens, which knows nothing of their order. Speed is the median
over the lines of the log of how many tokens a second were trained on, padding not counted. Memory is what XLA plans for
a training step besides parameters and optimizer. The notes of the three experiments have what was measured.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.planning.plan import plan_training
from tfx_jax.tasks.sequence.long_range import LabeledSequences, SequenceData
from tfx_jax.training import ExperimentConfig, Result, load_config, train
from tfx_jax.training.reporting.progress import read_history

TASKS = ("listops", "text", "matching")

ATTENTIONS: dict[str, Callable[[int], dict[str, int]]] = {
    "dense": lambda length: {},
    "chunked": lambda length: {"chunk_size": max(length // 8, 1)},
    "local": lambda length: {"block_size": max(length // 8, 1)},
    "window": lambda length: {"window": max(length // 16, 1)},
    "bigbird": lambda length: {
        "block_size": max(length // 32, 1),
        "num_global_blocks": 1,
        "num_window_blocks": 3,
        "num_random_blocks": 2,
    },
    "lsh": lambda length: {"num_hashes": 2, "num_buckets": 32, "chunk_size": max(length // 16, 1)},
    "routing": lambda length: {"num_clusters": round(length**0.5), "window": -(-length // round(length**0.5))},
    "favor": lambda length: {},
    "linear": lambda length: {},
    "nystrom": lambda length: {"num_landmarks": max(length // 8, 1)},
}
"""The options of each attention for a length: of a block or window, a token sees an eighth of the sequence, and
there are as many landmarks."""


@dataclasses.dataclass
class Measured:
    """What became of one training.

    Attributes:
      task: of `TASKS`.
      attention: of `ATTENTIONS`.
      accuracy: of the validation split in percent, the best.
      last: the same after the last step.
      speed: tokens a second.
      memory: bytes of a step besides parameters and optimizer.
      num_params: of the model.
      losses: [steps, nats] of the training.
      accuracies: [steps, percent] of the evaluations.
    """

    task: str
    attention: str
    accuracy: float
    last: float
    speed: float
    memory: int
    num_params: int
    losses: tuple[list[int], list[float]]
    accuracies: tuple[list[int], list[float]]


def make_config(task: str, attention: str, arguments: argparse.Namespace, overrides: Sequence[str]) -> ExperimentConfig:
    """Returns the experiment of a task with an attention."""
    data_dir = arguments.data_dir if task != "listops" and arguments.variant != "test" else None
    more = [] if data_dir is None else [f"--config.task.data.data_dir={data_dir}"]
    config: Any = load_config_file(f"lra_{task}:{arguments.variant}", [*more, *overrides])
    options = AttentionOptions(**ATTENTIONS[attention](config.task.data.max_length))
    config.model.attention = AttentionConfig(attention, options)
    return config


def measure(task: str, attention: str, config: ExperimentConfig, folder: pathlib.Path) -> Measured:
    """Trains or resumes, and measures; what was measured before is read.

    Raises:
      SystemExit: if a signal ended the training, which has been saved.
      UserError: as `tfx_jax.training.loop.train`.
    """
    path = folder / "measured.json"
    if path.exists() and load_config(epath.Path(folder)) == config:
        return Measured(**json.loads(path.read_text()))
    result: Result = train(config, folder)
    if result.signum is not None:
        raise SystemExit(128 + result.signum)
    plan, history = plan_training(config, jax.devices()), read_history(folder)
    losses, speeds = (history.curve(f"train/{name}") for name in ("loss", "tokens_per_second"))
    steps, accuracies = zip(*((int(each["step"]), each["accuracy"]) for each in result.evaluations), strict=True)
    measured = Measured(
        task,
        attention,
        accuracy=max(accuracies),
        last=accuracies[-1],
        speed=float(np.median(speeds[1])),
        memory=plan.temporary_bytes,
        num_params=plan.num_params,
        losses=(losses[0].tolist(), losses[1].tolist()),
        accuracies=(list(steps), list(accuracies)),
    )
    path.write_text(json.dumps(dataclasses.asdict(measured)))
    return measured


def baselines(config: ExperimentConfig) -> dict[str, float]:
    """Returns the accuracy in percent on the validation split of what knows no order of tokens.

    It is that of always saying the commonest label and, but for pairs, that of naive Bayes on counts of tokens.
    """
    splits, data = config.task.splits(), config.task.data
    commonest = Counter(one.label for one in splits["validation"]).most_common(1)[0][1]
    found = {"(commonest label)": 100 * commonest / len(splits["validation"])}
    if data.num_sequences == 1:
        counts, labels = _counted(splits["train"], data)
        is_of = labels == np.arange(len(data.labels))[:, np.newaxis]
        totals = is_of @ counts + 1.0
        log_shares = np.log(totals / totals.sum(axis=1, keepdims=True)).T
        counts, labels = _counted(splits["validation"], data)
        guesses = (counts @ log_shares + np.log(is_of.mean(axis=1) + 1e-9)).argmax(axis=1)
        found["(naive Bayes)"] = 100 * float((guesses == labels).mean())
    return found


def _counted(sequences: LabeledSequences, data: SequenceData) -> tuple[np.ndarray, np.ndarray]:
    """Returns how often each sequence has each token, [sequences, V], and the ids of their labels."""
    counts = [np.bincount(one.sequences[0], minlength=data.vocab_size) for one in sequences]
    return np.array(counts), np.array([data.labels.index(one.label) for one in sequences])


def table(found: Sequence[Measured], beside: dict[str, dict[str, float]]) -> str:
    """Returns the table in Markdown, with speed and memory beside those of dense attention if that ran."""
    header = ["task", "attention", "parameters", "best accuracy, %", "last", "tokens/s", "MiB of a step"]
    lines = [header, ["---"] * len(header)]
    dense = {one.task: one for one in found if one.attention == "dense"}
    for task in dict.fromkeys(one.task for one in found):
        lines += [[task, name, "", f"{accuracy:.2f}", "", "", ""] for name, accuracy in beside[task].items()]
        for one in found:
            if one.task == task:
                speed, memory = f"{one.speed:,.0f}", f"{one.memory / 2**20:,.1f}"
                if task in dense:
                    speed += f" (x {one.speed / dense[task].speed:.2f})"
                    memory += f" (x {one.memory / dense[task].memory:.2f})"
                accuracies = [f"{one.accuracy:.2f}", f"{one.last:.2f}"]
                lines.append([task, one.attention, f"{one.num_params:,}", *accuracies, speed, memory])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot_trade_offs(found: Sequence[Measured], beside: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """Draws accuracy over speed, a panel for each task; the area of a disc is the memory of a step."""
    figure = Figure(figsize=(6 * len(beside), 5), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(beside), squeeze=False)[0], beside, strict=True):
        points = [one for one in found if one.task == task]
        most = max(one.memory for one in points)
        for one in points:
            color = f"C{list(ATTENTIONS).index(one.attention)}"
            panel.scatter(one.speed, one.accuracy, s=900 * one.memory / most, color=color, alpha=0.6)
            place = {"xytext": (8, 8), "textcoords": "offset points", "fontsize": 8}
            panel.annotate(f"{one.attention}, {one.memory / 2**20:,.0f} MiB", (one.speed, one.accuracy), **place)
        draw_baselines(panel, beside[task])
        panel.margins(0.2)
        panel.grid(alpha=0.3)
        panel.set(title=task, xlabel="tokens/s", ylabel="best accuracy, %")
    figure.savefig(path, dpi=120)


def plot_learning_curves(found: Sequence[Measured], beside: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """Draws the training loss above and the accuracy of evaluations below, a column for each task."""
    figure = Figure(figsize=(6 * len(beside), 8), layout="constrained")
    for column, task in zip(figure.subplots(2, len(beside), squeeze=False).T, beside, strict=True):
        for one in (one for one in found if one.task == task):
            style = {"color": f"C{list(ATTENTIONS).index(one.attention)}", "label": one.attention}
            column[0].plot(*one.losses, **style)
            column[1].plot(*one.accuracies, marker="o", **style)
        draw_baselines(column[1], beside[task])
        column[0].set(title=task, ylabel="training loss, nats")
        column[1].set(xlabel="step", ylabel="validation accuracy, %")
        for panel in column:
            panel.grid(alpha=0.3)
    names = {str(line.get_label()): line for panel in figure.axes[::2] for line in panel.lines}
    figure.legend(names.values(), names.keys(), loc="outside upper center", ncols=7, frameon=False)
    figure.savefig(path, dpi=120)


def draw_baselines(panel: Axes, found: dict[str, float]) -> None:
    for (name, accuracy), style in zip(found.items(), ("--", ":"), strict=False):
        panel.axhline(accuracy, color="gray", linestyle=style, linewidth=1)
        panel.annotate(name, (0.01, accuracy), xycoords=("axes fraction", "data"), color="gray", fontsize=8)


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns what reads names with commas between, in the order in which they are known."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if strange := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"unknown {min(strange)!r}; there are {', '.join(known)}")
        return [name for name in known if name in chosen]

    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for trainings, table and plots")
    parser.add_argument("--data_dir", help="folder with train.txt.gz and valid.txt.gz, for text and matching")
    parser.add_argument("--variant", default="small", choices=("test", "small", "paper"))
    parser.add_argument("--tasks", type=names_of(TASKS), default=",".join(TASKS), help="with commas")
    parser.add_argument("--attentions", type=names_of(tuple(ATTENTIONS)), default=",".join(ATTENTIONS))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments, overrides = parser.parse_known_args(argv)
    set_up_program()
    found: list[Measured] = []
    beside: dict[str, dict[str, float]] = {}
    try:
        for task in arguments.tasks:
            for attention in arguments.attentions:
                print(f"{task} with {attention} attention", file=sys.stderr)
                config = make_config(task, attention, arguments, overrides)
                if task not in beside:
                    beside[task] = baselines(config)
                folder = arguments.workdir / arguments.variant / task / attention
                found.append(measure(task, attention, config, folder))
    except UserError as error:
        parser.error(str(error))
    kind = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, variant {arguments.variant}"
    text = f"# Long Range Arena\n\n{kind}\n\n{table(found, beside)}\n"
    (arguments.workdir / "table.md").write_text(text)
    plot_trade_offs(found, beside, arguments.workdir / "accuracy_speed_memory.png")
    plot_learning_curves(found, beside, arguments.workdir / "learning_curves.png")
    print(text)


if __name__ == "__main__":
    main()
