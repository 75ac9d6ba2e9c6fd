r"""Our model of a table, gradient boosting and logistic regression, by cross-validation over the training split.

    python benchmarks/cross_validation.py --config=seq2vec_icu2012 --config.task.data.data_dir=DIR --output=runs/folds

needs scikit-learn. The rows of the training split are divided into `--folds` parts with the same share of label 1; each
part is scored by models that were fitted to the others. Ours is trained with `--seeds` seeds, and "mean of the seeds"
scores by the mean of their log-odds. The parameters are those of the last step: no evaluation chooses among them.
`HistGradientBoostingClassifier` has its default options, and with "mean of the seeds" as many random states, each of
which sees its own sample of the columns; the regression sees medians where nothing was measured, and whether it was.

Each line is the mean AUROC of the parts, and how much more it is than that of gradient boosting, with the 95 % interval
of the bootstrap: the rows of both labels are drawn again in each part, the same for both models. Trainings are kept in
`--output` and not done again.
"""

import argparse
import copy
import csv
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfx_jax.cli.train import load_config_file
from tfx_jax.data.sources import Table
from tfx_jax.errors import UserError
from tfx_jax.metrics import auroc
from tfx_jax.tasks.events import EventData, TableRows
from tfx_jax.training import ExperimentConfig, train
from tfx_jax.training.checkpoint import load_params
from tfx_jax.training.run import load_run

RESAMPLES = 1_000


def parts_of(labels: np.ndarray, folds: int, *, seed: int = 0) -> np.ndarray:
    """Returns the part of each row, 0 .. folds - 1, [rows] int: random, with the same share of each label."""
    rng, parts = np.random.default_rng(seed), np.zeros(len(labels), int)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        parts[rows] = np.arange(len(rows)) % folds
    return parts


def write_parts(table: Table, label_column: str, parts: np.ndarray, folder: pathlib.Path) -> None:
    """Writes, for each part, its rows and those of the other parts as files that an experiment reads."""
    for part in range(parts.max() + 1):
        _write(folder / f"part-{part}" / "others.csv", table, label_column, parts != part)
        _write(folder / f"part-{part}" / "part.csv", table, label_column, parts == part)


def ours(config: ExperimentConfig, seed: int, parts: np.ndarray, folder: pathlib.Path) -> np.ndarray:
    """Returns the log-odds of label 1 of each row, [rows], from models that were trained on the other parts.

    Args:
      config: the experiment, whose files are those of `write_parts` here.
      seed: of the trainings.
      parts: part of each row, [rows].
      folder: that of `write_parts`, for the workdirs too.
    """
    scores = np.zeros(len(parts))
    for part in range(parts.max() + 1):
        workdir = folder / f"part-{part}-seed-{seed}"
        own = copy.deepcopy(config)
        own.seed, own.eval_every = seed, own.num_steps
        data = own.task.data
        data.data_dir, data.exclude_columns = str(folder / f"part-{part}"), ""
        data.train_file, data.validation_file = "others.csv", "part.csv"
        train(own, workdir)
        run = load_run(workdir)
        rows = run.config.task.data.load("validation")
        scores[parts == part] = run.task.predict(run.trained(load_params(workdir)), rows)
    return scores


def others(make: Any, table: Table, parts: np.ndarray) -> np.ndarray:
    """Returns the log-odds of label 1 of each row, from classifiers of scikit-learn fitted to the other parts."""
    scores = np.zeros(len(parts))
    for part in range(parts.max() + 1):
        fitted = make().fit(table.values[parts != part], table.labels[parts != part])
        probability = fitted.predict_proba(table.values[parts == part])
        scores[parts == part] = np.log(probability[:, 1]) - np.log(probability[:, 0])
    return scores


def mean_auroc(scores: np.ndarray, labels: np.ndarray, parts: np.ndarray) -> float:
    """Returns the mean of the AUROC of each part: scores of models of different parts are not compared."""
    return float(np.mean([auroc(scores[parts == part], labels[parts == part]) for part in np.unique(parts)]))


def difference(first: np.ndarray, second: np.ndarray, labels: np.ndarray, parts: np.ndarray) -> tuple[float, ...]:
    """Returns how much larger the `mean_auroc` of the first scores is, and the limits of its 95 % interval."""
    rng = np.random.default_rng(0)
    cells = [np.flatnonzero((parts == part) & (labels == label)) for part in np.unique(parts) for label in (0, 1)]

    def drawn() -> float:
        rows = np.concatenate([rng.choice(cell, len(cell)) for cell in cells])
        return mean_auroc(first[rows], labels[rows], parts[rows]) - mean_auroc(second[rows], labels[rows], parts[rows])

    low, high = np.quantile([drawn() for _ in range(RESAMPLES)], (0.025, 0.975))
    return mean_auroc(first, labels, parts) - mean_auroc(second, labels, parts), low, high


def compare(config: ExperimentConfig, folder: pathlib.Path, *, folds: int, seeds: int) -> str:
    """Trains and fits all models; returns a table of their AUROC.

    Raises:
      UserError: if scikit-learn is not installed, or the data are not a table or cannot be read.
    """
    table = _table(config.task.data)
    labels, least = np.asarray(table.labels), min(np.bincount(table.labels, minlength=2))
    if folds < 2:
        raise UserError(f"--folds={folds}: there must be 2 or more parts")
    if least < folds:
        raise UserError(f"--folds={folds}: a label has only {least} rows, and each part needs one")
    try:
        ensemble, pipeline, linear, impute, preprocessing = (
            importlib.import_module(f"sklearn.{name}")
            for name in ("ensemble", "pipeline", "linear_model", "impute", "preprocessing")
        )
    except ImportError:
        raise UserError("scikit-learn is not installed: pip install scikit-learn") from None
    parts = parts_of(labels, folds)
    scores: dict[str, np.ndarray] = {}
    write_parts(table, config.task.data.label_column, parts, folder)
    for seed in range(seeds):
        scores[f"ours, seed {seed}"] = ours(config, seed, parts, folder)
    scores["ours, mean of the seeds"] = np.mean([*scores.values()], axis=0)
    boosted = ensemble.HistGradientBoostingClassifier
    scores["gradient boosting"] = reference = others(lambda: boosted(random_state=0), table, parts)
    drawn = [
        others(lambda seed=seed: boosted(random_state=seed, max_features=0.5), table, parts) for seed in range(seeds)
    ]
    scores["gradient boosting, half of the columns, mean of the seeds"] = np.mean(drawn, axis=0)
    scores["logistic regression"] = others(
        lambda: pipeline.make_pipeline(
            impute.SimpleImputer(strategy="median", add_indicator=True),
            preprocessing.StandardScaler(),
            linear.LogisticRegression(C=0.01, max_iter=1_000),
        ),
        table,
        parts,
    )
    width = max(map(len, scores))
    lines = [f"{len(labels):,} rows, {labels.sum():,} of label 1, {folds} parts"]
    for name, values in scores.items():
        more, low, high = difference(values, reference, labels, parts)
        lines.append(
            f"{name:{width}}  {mean_auroc(values, labels, parts):.4f}  {more:+.4f} ({low:+.4f} to {high:+.4f})"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of an experiment's models; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="experiment, of the task event_classification")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for the trainings")
    parser.add_argument("--folds", type=int, default=5, help="number of parts (5)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of our model on each part (3)")
    arguments, overrides = parser.parse_known_args(argv)
    try:
        config = load_config_file(arguments.config, overrides)
        print(compare(config, arguments.output, folds=arguments.folds, seeds=arguments.seeds))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _table(data: Any) -> Table:
    """Returns the training split as a table; raises UserError if the data set has no table."""
    rows = data.load("train") if isinstance(data, EventData) else None
    if not isinstance(rows, TableRows):
        raise UserError('parts are of a table: config.task.data.dataset must be "files"')
    return rows.table


def _write(path: pathlib.Path, table: Table, label_column: str, is_in: np.ndarray) -> None:
    """Writes rows of a table as a file that the experiment reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([label_column, *table.columns])
        for values, label in zip(table.values[is_in], np.asarray(table.labels)[is_in], strict=True):
            writer.writerow([int(label), *("" if np.isnan(value) else repr(float(value)) for value in values)])


if __name__ == "__main__":
    sys.exit(main())
