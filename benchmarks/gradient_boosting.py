r"""What gradient boosting makes of the table that an experiment of events reads: scikit-learn, beside our models.

    python benchmarks/gradient_boosting.py --config=seq2vec_icu2012 --config.task.data.data_dir=DIR

needs scikit-learn. Columns, rows and metrics are those of our models. `HistGradientBoostingClassifier` has its default
options and treats an empty cell as a separate value.

Measured, scikit-learn 1.9.1, on the 400 stays of dev of `seq2vec_icu2012`: AUROC 0.8952 (0.8544 to 0.9299), average
precision 0.5732 (0.4694 to 0.6965).
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from tfx_jax.cli.train import load_config_file
from tfx_jax.data.sources import Split, Table
from tfx_jax.errors import UserError
from tfx_jax.metrics import auroc, average_precision, with_interval
from tfx_jax.tasks.events import EventData, TableRows


def compare(data: EventData) -> str:
    """Fits trees to the training split of a table; returns a line with their metrics on the validation split.

    Raises:
      UserError: if scikit-learn is not installed, or the data are not a table or cannot be read.
    """
    train, validation = _table(data, "train"), _table(data, "validation")
    try:
        ensemble = importlib.import_module("sklearn.ensemble")
    except ImportError:
        raise UserError("scikit-learn is not installed: pip install scikit-learn") from None
    trees = ensemble.HistGradientBoostingClassifier(random_state=0).fit(train.values, train.labels)
    order = [validation.columns.index(name) for name in train.columns]
    scores = trees.predict_proba(validation.values[:, order])[:, 1]  # probability of class 1
    area, precision = (with_interval(scorer, scores, validation.labels) for scorer in (auroc, average_precision))
    return f"AUROC {area}, average precision {precision}, {len(scores):,} records"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the metrics of gradient boosting on an experiment's table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="experiment, of the task event_classification")
    arguments, overrides = parser.parse_known_args(argv)
    try:
        print(compare(load_config_file(arguments.config, overrides).task.data))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _table(data: EventData, split: Split) -> Table:
    """Returns a split as a table; raises UserError if the data set has no table."""
    rows = data.load(split)
    if not isinstance(rows, TableRows):
        raise UserError('trees are fitted to tables: config.task.data.dataset must be "files"')
    return rows.table


if __name__ == "__main__":
    sys.exit(main())
