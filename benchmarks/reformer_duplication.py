r"""Table 2 of the Reformer: what attention a model needs to say a sequence again, after training with another.

    python -m benchmarks.reformer_duplication --workdir=runs/table_2

trains the experiment reformer_duplication once with each number of rounds of hashing and with full attention, each in
`WORKDIR/VARIANT/NAME`. It evaluates the best checkpoint of each training on the test split with all these attentions,
and writes table.md into `WORKDIR/VARIANT`: the percentage of correct symbols in the second half, and the paper's
figures. Run the command again to resume. Any `--config.FIELD=VALUE` holds for all trainings.
"""

import argparse
import copy
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.training import ExperimentConfig, make_run, train, validate
from tfx_jax.training.checkpoint import load_best_params

ATTENTIONS = {"full": 0, "lsh-8": 8, "lsh-4": 4, "lsh-2": 2, "lsh-1": 1}
"""Rounds of hashing; 0 means full attention."""

PAPER = {
    "full": (100.0, 94.8, 92.5, 76.9, 52.5),
    "lsh-4": (0.8, 100.0, 99.9, 99.4, 91.9),
    "lsh-2": (0.8, 100.0, 99.9, 98.1, 86.8),
    "lsh-1": (0.8, 99.9, 99.6, 94.8, 77.9),
}
"""Percentages of Table 2 (Kitaev et al., 2020): trained with the key, evaluated with each of `ATTENTIONS` in turn."""


def with_attention(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Returns a copy of the experiment with the attention `name`, a key of `ATTENTIONS`."""
    config = copy.deepcopy(config)
    model: Any = config.model
    model.full_attention = name == "full"
    model.num_hashes = ATTENTIONS[name] or 1
    return validate(config)


def accuracies(config: ExperimentConfig, name: str, folder: pathlib.Path) -> dict[str, float]:
    """Trains or resumes with one attention, and evaluates with all.

    Args:
      config: the experiment.
      name: key of `ATTENTIONS` for the training.
      folder: workdir of the training.

    Returns:
      Percentage of correct symbols by the attention of the evaluation.

    Raises:
      SystemExit: if a signal ended the training, which has been saved.
      UserError: if the configuration, the data or the workdir cannot be used.
    """
    result = train(with_attention(config, name), folder)
    if result.signum is not None:
        raise SystemExit(128 + result.signum)
    params = load_best_params(epath.Path(folder))
    percentages = {}
    for other in ATTENTIONS:
        run = make_run(with_attention(config, other), folder, can_make=False)
        percentages[other] = run.evaluate(params, "test").metrics["accuracy"]
    return percentages


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the table in Markdown, with the percentages of the paper in brackets.

    `found` has the results of `accuracies` by the attention of the training.
    """
    lines = [["trained \\ evaluated", *ATTENTIONS], ["---", *["--:"] * len(ATTENTIONS)]]
    for name, percentages in found.items():
        published = PAPER.get(name, (None,) * len(ATTENTIONS))
        cells = zip(percentages.values(), published, strict=True)
        lines.append([name, *(f"{ours:.2f}" + ("" if theirs is None else f" ({theirs})") for ours, theirs in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for trainings and table")
    parser.add_argument("--variant", default="small", choices=("test", "small", "full"))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments, overrides = parser.parse_known_args(argv)
    set_up_program()
    folder = arguments.workdir / arguments.variant
    found = {}  # results of `accuracies` by the attention of the training
    try:
        config = load_config_file(f"reformer_duplication:{arguments.variant}", overrides)
        for name in ATTENTIONS:
            print(f"trained with {name}", file=sys.stderr)
            found[name] = accuracies(config, name, folder / name)
    except UserError as error:
        parser.error(str(error))
    length = config.task.data.max_length
    kind = f"{length} tokens, {config.num_steps} steps, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    text = f"# Duplication of symbols\n\n{kind}; in brackets the paper, 1,024 tokens, 150,000 steps\n\n{table(found)}\n"
    (folder / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
