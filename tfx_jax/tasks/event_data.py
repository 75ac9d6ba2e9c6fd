"""Records of events: the rows of a table, an event for each cell that has a number, or a built-in synthetic cohort."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tfx_jax.data.splits import SPLITS, Split
from tfx_jax.data.tables import Table, read_table
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.text_files import check_batch, has_file, split_path

_QUANTILES = np.linspace(0.0, 1.0, 101)


class Record(NamedTuple):
    """What was measured, and what became of it.

    Attributes:
      variables: which of the variables each event is of, int [T].
      values: what was found, float [T].
      times: when, float [T] in [0, 1].
      label: 0 or 1.
    """

    variables: np.ndarray
    values: np.ndarray
    times: np.ndarray
    label: int


class Records(Protocol):
    """Random access to records; how many events each has is known before any is made.

    Attributes:
      source: what messages call them.
      names: of the variables.
    """

    source: str
    names: tuple[str, ...]

    @property
    def lengths(self) -> np.ndarray:
        """Events of each record, [number of records] int."""
        ...

    def __len__(self) -> int:
        """The number of records."""
        ...

    def __getitem__(self, index: int) -> Record:
        """The record with this index."""
        ...


@documented
@dataclasses.dataclass
class EventData:
    """Which records there are, and how much of them makes a batch.

    "files": a row of a table is a record, a column is a variable, and a cell with a number is an event; empty cells are
    none. A table says nothing of when its numbers were measured, so the time of every event is 0. Where columns are
    statistics of one series, such as "HR_first" and "HR_last", each is a variable with a meaning of its own to learn:
    that "last" is late is told by nothing else, and no hour is made up for it.

    "synthetic": a cohort of records, made when they are asked for. Events of `num_variables` variables have values of
    the standard normal distribution at any time; the label is 1 if and only if variable 0 was found above `threshold`
    between the times `window_start` and `window_end`. High values of it at other times, low ones in time and all other
    variables are distractors.
    """

    dataset: str = one_of(("synthetic", "files"), "synthetic")
    data_dir: str = ""  # files: the folder that the names below are relative to
    train_file: str = ""  # comma-separated values, plain or .gz, whose first line names the columns
    validation_file: str = ""
    test_file: str = ""
    label_column: str = ""  # 0 or 1
    exclude_columns: str = ""  # names of columns that are no inputs, with commas between
    seed: int = at_least(0, 0)  # synthetic: this and the following; the training's seed changes no record
    num_train: int = at_least(1, 20_000)
    num_heldout: int = at_least(1, 1_000)  # records of the validation split, and of the test split
    num_variables: int = at_least(2, 20)
    min_events: int = at_least(1, 30)  # of a record
    cause_rate: float = fraction(0.15)  # of the events are of variable 0, on average
    threshold: float = 0.5
    window_start: float = fraction(0.3)
    window_end: float = fraction(0.6)
    max_length: int = at_least(1, 50)  # events of a record
    tokens_per_batch: int = at_least(1, 3_200)  # events of a global batch, padding included

    def has_split(self, split: Split) -> bool:
        """Tells whether the configuration names a split; a cohort has all of them."""
        return has_file(self, split)

    def load(self, split: Split) -> Records:
        """Reads the records of a split, or says how they are drawn.

        Raises:
          UserError: if they cannot be read, or a row has more than `max_length` numbers.
        """
        if self.dataset == "synthetic":
            return Cohort(self, split)
        path = split_path(self, split)
        exclude = [name.strip() for name in self.exclude_columns.split(",") if name.strip()]
        rows = TableRows(read_table(path, label_column=self.label_column, exclude=exclude), str(path))
        if (most := rows.lengths.max()) > self.max_length:
            raise UserError(f"{path} has a row of {most} numbers, more than config.task.data.max_length")
        return rows

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        del model
        name = "config.task.data"
        check_batch(self, what="record")
        if self.dataset == "files" and not self.label_column:
            raise UserError(f'{name}.label_column must name a column for {name}.dataset="files"')
        if self.dataset == "synthetic" and self.max_length < self.min_events:
            raise UserError(f"{name}.max_length={self.max_length} is less than min_events={self.min_events}")
        if not self.window_start < self.window_end:
            raise UserError(f"{name}.window_end={self.window_end} must be after window_start={self.window_start}")

    def tiny(self) -> None:
        """Sets a little cohort."""
        self.dataset, self.num_train, self.num_heldout, self.num_variables = "synthetic", 256, 64, 5
        self.min_events, self.max_length, self.tokens_per_batch = 6, 8, 256


class TableRows:
    """The rows of a table as records."""

    def __init__(self, table: Table, source: str):
        """Takes a table, and what messages call it."""
        self.source, self.names, self.table = source, table.columns, table
        self._is_measured = ~np.isnan(table.values)

    @property
    def lengths(self) -> np.ndarray:
        """Numbers of each row."""
        return self._is_measured.sum(axis=1)

    def __len__(self) -> int:
        return len(self.table.labels)

    def __getitem__(self, index: int) -> Record:
        variables = np.flatnonzero(self._is_measured[index])
        values = self.table.values[index, variables]
        return Record(variables, values, np.zeros(len(variables)), int(self.table.labels[index]))


class Cohort:
    """Synthetic records, of which each depends on the seed, the split and its index alone; see `EventData`."""

    def __init__(self, data: EventData, split: Split):
        """Draws how many events each record has, but none of these."""
        self._data, self._split = data, SPLITS.index(split)
        self.source = f"the cohort's {split} split"
        self.names = tuple(f"variable {number}" for number in range(data.num_variables))
        count = data.num_train if split == "train" else data.num_heldout
        rng = np.random.default_rng((data.seed, self._split))
        self.lengths = rng.integers(data.min_events, data.max_length, count, endpoint=True)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Record:
        if not 0 <= index < len(self):
            raise IndexError(index)
        data, count = self._data, self.lengths[index]
        rng = np.random.default_rng((data.seed, self._split, index))
        variables = np.where(rng.random(count) < data.cause_rate, 0, rng.integers(1, data.num_variables, count))
        values, times = rng.standard_normal(count), rng.random(count)
        return Record(variables, values, times, int(is_cause(data, variables, values, times).any()))


def is_cause(data: EventData, variables: np.ndarray, values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Which events of a cohort are the cause of a label 1, bool [T]."""
    return (variables == 0) & (values > data.threshold) & (data.window_start <= times) & (times < data.window_end)


def fit_scales(records: Records) -> list[dict[str, Any]]:
    """Finds how values of each variable are ranked among those of the records.

    Returns:
      For each variable its name, and "values" with their "ranks": up to 101 quantiles in increasing order, and the
      share of the values that are below, equal ones counting half. A variable without any values ranks all as 0.5.
    """
    everything = [records[index] for index in range(len(records))]
    variables, values = (np.concatenate([record[part] for record in everything]) for part in (0, 1))
    scales = []
    for number, name in enumerate(records.names):
        found = values[variables == number]
        quantiles = np.quantile(found, _QUANTILES) if len(found) else np.zeros(1)
        levels, group = np.unique(quantiles, return_inverse=True)
        shares = _QUANTILES if len(found) else np.full(1, 0.5)
        ranks = np.bincount(group, weights=shares) / np.bincount(group)
        scales.append({"name": name, "values": levels.tolist(), "ranks": ranks.tolist()})
    return scales


def rank_values(scales: Sequence[Mapping[str, Any]], variables: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Scales values to [0, 1] by rank, linearly between those that `fit_scales` found; float32 [T].

    >>> scales = [{"name": "pH", "values": [7.0, 7.4], "ranks": [0.0, 1.0]}]
    >>> rank_values(scales, np.array([0, 0]), np.array([7.1, 9.0])).round(2).tolist()
    [0.25, 1.0]
    """
    ranks = np.zeros(len(values), np.float32)
    for number in np.unique(variables):
        is_of, scale = variables == number, scales[number]
        ranks[is_of] = np.interp(values[is_of], scale["values"], scale["ranks"])
    return ranks
