r"""Long Range Arena: each attention on ListOps, text and matching; accuracy, speed and memory side by side.

    python -m benchmarks.long_range --workdir=runs/lra --data_dir=DIR

trains the experiments lra_listops, lra_text and lra_matching once with each attention, one after the other, each in
`WORKDIR/VARIANT/TASK/ATTENTION`, and writes table.md, accuracy_speed_memory.png and learning_curves.png into the
workdir. Run the command again to resume; finished trainings are not repeated, also with more `--tasks` and
`--attentions`. DIR has the articles of WikiText-2, or of another set in its format, as train.txt.gz and valid.txt.gz.
Any `--config.FIELD=VALUE` holds for all trainings.

Attentions that have only a causal form are causal here too, as state space models are in this suite: a token sees
earlier tokens only, and the classifier reads the mean over all tokens. `dense_causal` is dense attention under the same
restriction; compare them with it.

Accuracy is that of the validation split, the best one and the one after the last step. For comparison, the table has
the accuracy of always predicting the most common label and, except for pairs, of naive Bayes on counts of tokens,
which ignores their order. Speed is the median over the logged steps of the tokens per second, without padding. Memory
is XLA's plan for a training step, without parameters and optimizer. The notes of the three experiments have results.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import SPECS
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.planning.plan import plan_training
from tfx_jax.tasks.sequence.long_range import LabeledSequences, SequenceData
from tfx_jax.training import ExperimentConfig, Result, load_config, train
from tfx_jax.training.reporting.progress import read_history

TASKS = ("listops", "text", "matching")

OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
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
    "nystrom": lambda length: {"num_landmarks": max(length // 8, 1)},
    "linformer": lambda length: {"max_length": length, "num_projected": max(length // 8, 1)},
    "induced": lambda length: {"num_inducing": max(length // 8, 1)},
    "strided": lambda length: {"stride": round(length**0.5)},
    "fixed": lambda length: {"block_size": round(length**0.5)},
    "sinkhorn": lambda length: {"block_size": max(length // 16, 1)},
    "synthesizer": lambda length: {"max_length": length},
    "dense_synthesizer": lambda length: {"max_length": length},
    "topk": lambda length: {"num_keys": max(length // 8, 1)},
    "indexed": lambda length: {"num_keys": max(length // 8, 1)},
    "moba": lambda length: {"block_size": max(length // 16, 1), "num_blocks": 1},
    "native_sparse": lambda length: {
        "block_size": max(length // 16, 1),
        "num_blocks": 1,
        "window": max(length // 16, 1),
    },
}
"""Options of attentions for a length, where they are not those of the spec's `example`.

A token sees an eighth of the sequence (in a block, a window or two blocks, or as the best keys), and there are as many
landmarks, projected keys or inducing points."""


class Trained(NamedTuple):
    """How a model of the suite attends."""

    attention: str
    """Name in `SPECS`."""
    is_causal: bool = False
    """Whether a token sees earlier tokens only; the classifier reads the mean over all tokens in either case."""


ATTENTIONS = {
    "dense": Trained("dense"),
    "dense_causal": Trained("dense", is_causal=True),
    **{
        name: Trained(name, spec.causal_only)
        for name, spec in SPECS.items()
        if spec.platform is None and name not in ("dense", "hard")
    },
}
"""Every attention that runs on any device, both ways where it can and otherwise causal, with dense attention as the
reference of both. Hard attention is left out, because its queries and keys learn by `score_function_loss` only."""


@dataclasses.dataclass
class Measured:
    """Measurements of one training.

    Attributes:
      task: one of `TASKS`.
      attention: key of `ATTENTIONS`.
      is_causal: whether a token sees earlier tokens only.
      accuracy: best accuracy on the validation split in percent.
      last: accuracy after the last step in percent.
      speed: tokens per second.
      memory: bytes of a step without parameters and optimizer.
      num_params: number of parameters of the model.
      losses: (steps, training losses in nats).
      accuracies: (steps of the evaluations, accuracies in percent).
    """

    task: str
    attention: str
    is_causal: bool
    accuracy: float
    last: float
    speed: float
    memory: int
    num_params: int
    losses: tuple[list[int], list[float]]
    accuracies: tuple[list[int], list[float]]


def make_config(task: str, attention: str, arguments: argparse.Namespace, overrides: Sequence[str]) -> ExperimentConfig:
    """Returns the experiment of a task with a key of `ATTENTIONS`; `overrides` are flags `--config.FIELD=VALUE`."""
    name, is_causal = ATTENTIONS[attention]
    data_dir = arguments.data_dir if task != "listops" and arguments.variant != "test" else None
    data_flags = [] if data_dir is None else [f"--config.task.data.data_dir={data_dir}"]
    config: Any = load_config_file(f"lra_{task}:{arguments.variant}", [*data_flags, *overrides])
    options = OPTIONS.get(name, SPECS[name].example)(config.task.data.max_length)
    config.model.attention = AttentionConfig(name, AttentionOptions(**options))
    config.model.is_causal |= is_causal
    return config


def measure(task: str, attention: str, config: ExperimentConfig, folder: pathlib.Path) -> Measured:
    """Trains or resumes in a folder and measures; earlier measurements are read from the folder.

    Raises:
      SystemExit: if a signal ended the training, which has been saved.
      UserError: if the configuration, the data or the folder cannot be used.
    """
    path = folder / "measured.json"
    if path.exists() and load_config(epath.Path(folder)) == config:
        return Measured(**json.loads(path.read_text()))
    result: Result = train(config, folder)
    if result.signum is not None:
        raise SystemExit(128 + result.signum)
    plan = plan_training(config, jax.devices())
    model: Any = config.model
    history = read_history(folder)
    losses, speeds = (history.curve(f"train/{name}") for name in ("loss", "tokens_per_second"))
    points = [(int(evaluation["step"]), evaluation["accuracy"]) for evaluation in result.evaluations]
    steps, accuracies = zip(*points, strict=True)
    _, tokens_per_second = speeds
    measured = Measured(
        task,
        attention,
        model.is_causal,
        accuracy=max(accuracies),
        last=accuracies[-1],
        speed=float(np.median(tokens_per_second)),
        memory=plan.temporary_bytes,
        num_params=plan.num_params,
        losses=(losses[0].tolist(), losses[1].tolist()),
        accuracies=(list(steps), list(accuracies)),
    )
    path.write_text(json.dumps(dataclasses.asdict(measured)))
    return measured


def baselines(config: ExperimentConfig) -> dict[str, float]:
    """Returns the accuracy on the validation split, in percent, of methods that ignore the order of tokens, by name.

    They are the most common label and, except for pairs, naive Bayes on counts of tokens.
    """
    splits, data = config.task.splits(), config.task.data
    [(_, num_commonest)] = Counter(example.label for example in splits["validation"]).most_common(1)
    result = {"(commonest label)": 100 * num_commonest / len(splits["validation"])}
    if data.num_sequences == 1:
        counts, labels = _count_tokens(splits["train"], data)
        has_label = labels == np.arange(len(data.labels))[:, np.newaxis]  # [labels, sequences]
        totals = has_label @ counts + 1.0  # [labels, V], with add-one smoothing
        log_shares = np.log(totals / totals.sum(axis=1, keepdims=True)).T
        counts, labels = _count_tokens(splits["validation"], data)
        guesses = (counts @ log_shares + np.log(has_label.mean(axis=1) + 1e-9)).argmax(axis=1)
        result["(naive Bayes)"] = 100 * float((guesses == labels).mean())
    return result


def _count_tokens(sequences: LabeledSequences, data: SequenceData) -> tuple[np.ndarray, np.ndarray]:
    """Returns (count of each token in each sequence, [sequences, V]; ids of their labels, [sequences])."""
    counts = [np.bincount(one.sequences[0], minlength=data.vocab_size) for one in sequences]
    return np.array(counts), np.array([data.labels.index(one.label) for one in sequences])


def table(found: Sequence[Measured], beside: dict[str, dict[str, float]]) -> str:
    """Returns the table in Markdown, with speed and memory relative to dense attention if that was measured.

    Args:
      found: the measurements.
      beside: `baselines` by task.
    """
    header = ["task", "attention", "causal", "parameters", "best accuracy, %", "last", "tokens/s", "MiB of a step"]
    lines = [header, ["---"] * len(header)]
    dense = {one.task: one for one in found if one.attention == "dense"}
    for task in dict.fromkeys(one.task for one in found):
        lines += [[task, name, "", "", f"{accuracy:.2f}", "", "", ""] for name, accuracy in beside[task].items()]
        for one in found:
            if one.task == task:
                speed, memory = f"{one.speed:,.0f}", f"{one.memory / 2**20:,.1f}"
                if task in dense:
                    speed += f" (x {one.speed / dense[task].speed:.2f})"
                    memory += f" (x {one.memory / dense[task].memory:.2f})"
                accuracies = [f"{one.accuracy:.2f}", f"{one.last:.2f}"]
                causal, num_params = "yes" if one.is_causal else "", f"{one.num_params:,}"
                lines.append([task, one.attention, causal, num_params, *accuracies, speed, memory])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot_trade_offs(found: Sequence[Measured], beside: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """Draws accuracy over speed, with a panel for each task; the area of a disc is the memory of a step.

    `found` and `beside` are those of `table`.
    """
    figure = Figure(figsize=(6 * len(beside), 5), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(beside), squeeze=False)[0], beside, strict=True):
        points = [one for one in found if one.task == task]
        most = max(one.memory for one in points)
        for one in points:
            color = f"C{list(ATTENTIONS).index(one.attention)}"
            panel.scatter(one.speed, one.accuracy, s=900 * one.memory / most, color=color, alpha=0.6)
            style = {"xytext": (8, 8), "textcoords": "offset points", "fontsize": 8}
            panel.annotate(f"{one.attention}, {one.memory / 2**20:,.0f} MiB", (one.speed, one.accuracy), **style)
        draw_baselines(panel, beside[task])
        panel.margins(0.2)
        panel.grid(alpha=0.3)
        panel.set(title=task, xlabel="tokens/s", ylabel="best accuracy, %")
    figure.savefig(path, dpi=120)


def plot_learning_curves(found: Sequence[Measured], beside: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """Draws the training loss above and the accuracy of evaluations below, with a column for each task.

    `found` and `beside` are those of `table`.
    """
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
    """Draws a horizontal line for each of the `baselines`."""
    for (name, accuracy), style in zip(found.items(), ("--", ":"), strict=False):
        panel.axhline(accuracy, color="gray", linestyle=style, linewidth=1)
        panel.annotate(name, (0.01, accuracy), xycoords=("axes fraction", "data"), color="gray", fontsize=8)


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a parser of names separated by commas; its result has the order of `known`."""

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
