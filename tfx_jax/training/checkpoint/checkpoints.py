"""Checkpoints of a run: saving, restoring, averaging and verifying. The only module that imports Orbax.

A checkpoint stores the parameters, and their moving average if there is one, apart from the rest of the state, so that
inference reads no optimizer state. It also stores a few JSON values: the position of the data iterator, the evaluations
and, if frozen parameters of a pretrained model are left out, their record (see `base`).

Checksums do not depend on the sharding. They are needed because Orbax does not notice a changed byte of a large array
on disk. A CRC would need the whole array in order on one process. Instead, every element is hashed with its position,
and the hashes are summed: each process sums over its own shards, and the total is the same for any mesh and any number
of processes. The hash is a bijection of the element's bits: a change of one element is always noticed, and changes of
several elements are missed with probability 2^-64.
"""

import contextlib
import copy
import datetime
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import path as orbax_path
from orbax.checkpoint import v1 as ocp

from tfx_jax.arrays import leaves_by_path, path_name
from tfx_jax.data.files import write_file
from tfx_jax.errors import UserError, printable
from tfx_jax.files import absolute, check_no_links, check_tree, is_local, reach
from tfx_jax.models.finite import is_finite, nonfinite
from tfx_jax.training.checkpoint.base import read_base, without
from tfx_jax.training.sharding.distributed import gather_arrays, is_primary
from tfx_jax.training.step import Params, TrainState, average_trees, merge_trees

# Odd, so that multiplying by them is a bijection; from splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BLOCK = 1 << 18  # elements hashed at once (a few MB)


def checksums(parts: dict[str, Any]) -> dict[str, str]:
    """Computes a checksum of each tree of arrays, by name; all processes of a run must call it.

    >>> checksums({"params": {"a": np.arange(3.0)}, "rest": np.int32(7)})
    {'params': 'b27b9e32861ba857', 'rest': 'a3349cb258289b04'}
    """
    local = np.array([_sum_of_local_hashes(part) for part in parts.values()], np.uint64)  # [parts]
    # Gathered as pairs of uint32, because JAX has no 64-bit integers by default.
    total = gather_arrays(local.view(np.uint32)).view(np.uint64).sum(axis=0)  # [processes, parts] -> [parts]
    return {name: f"{checksum:016x}" for name, checksum in zip(parts, total, strict=True)}


def all_checksums(parts: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the checksums of the arrays and, as "metadata", that of the JSON values `extra`."""
    return checksums(parts) | {"metadata": _checksum_of_values(extra)}


def _checksum_of_values(extra: dict[str, Any]) -> str:
    """Returns the checksum of JSON values."""
    return f"{zlib.crc32(json.dumps(extra, sort_keys=True).encode()):08x}"


def _sum_of_local_hashes(tree: Any) -> np.uint64:
    """Returns the sum, modulo 2^64, of the hashes of the elements in this process's shards."""
    total, offset = np.uint64(0), 0  # offset: number of elements in the leaves before
    for leaf in jax.tree.leaves(tree):
        for starts, values in _own_shards(leaf):
            for block, positions in _blocks(values, starts, np.shape(leaf), offset):
                bits = block.view(f"u{block.itemsize}").astype(np.uint64)  # the elements' bytes as integers
                hashes = (bits ^ (positions * _GOLDEN)) * _MIX
                hashes = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
                total = np.add(total, hashes.sum(), dtype=np.uint64)
        offset += np.size(leaf)
    return total


def _own_shards(leaf: Any) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yields the start indices and the values of this process's shards; of replicated shards only the first replica."""
    if not isinstance(leaf, jax.Array):
        yield [0] * np.ndim(leaf), np.asarray(leaf)
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield [part.start or 0 for part in shard.index], np.asarray(shard.data)


def _blocks(
    values: np.ndarray, starts: list[int], shape: tuple[int, ...], offset: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Splits a shard into blocks along its first axis.

    Args:
      values: values of the shard.
      starts: index of the shard's first element in the whole array, along each axis.
      shape: shape of the whole array.
      offset: position of the array's first element in the sequence of all elements of the tree.

    Yields:
      Pairs (values [n], positions [n] uint64): the values of a block and their positions in that sequence.
    """
    # Distance of neighbors along each axis in the flattened array.
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    if not shape:  # a scalar counts as an array of one element
        values, starts, strides = values[None], [0], [1]
    rows_per_block = max(1, _BLOCK // max(1, int(np.prod(values.shape[1:], dtype=np.int64))))
    for first_row in range(0, values.shape[0], rows_per_block):
        block = np.ascontiguousarray(values[first_row : first_row + rows_per_block])
        positions = np.full((1,) * block.ndim, offset, np.uint64)
        for axis, (start, stride) in enumerate(zip(starts, strides, strict=True)):
            start += first_row if axis == 0 else 0
            summands = np.arange(start, start + block.shape[axis], dtype=np.uint64) * np.uint64(stride)
            # Broadcasts along this axis of the block: shape [1, .., n, .., 1].
            positions = positions + summands.reshape([-1 if other == axis else 1 for other in range(block.ndim)])
        yield block.ravel(), positions.ravel()


def complete_steps(checkpointer: Any) -> list[int]:
    """Returns the steps of the complete checkpoints, oldest first; empty folders, which Orbax counts, are left out."""
    steps = sorted(checkpoint.step for checkpoint in checkpointer.checkpoints)
    return [step for step in steps if any((checkpointer.directory / str(step)).iterdir())]


def clear_empty(directory: epath.Path) -> None:
    """Deletes empty folders named like checkpoints: Orbax would count them among the checkpoints to keep."""
    for path in list(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


class ReadableSteps:
    """Wraps Orbax's step-name format so that a checkpoint without a readable date does not raise."""

    def __init__(self, names: Any):
        """Stores the format that Orbax would use."""
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._names, name)

    def find_all(self, base_path: epath.PathLike) -> Iterator[Any]:
        """Yields all complete checkpoints."""
        for step in self._names.find_all(base_path):
            try:
                step.commit_timestamp  # noqa: B018  Orbax will read this property
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                step = _Undated(step.step, step.path)
            yield step


class _Undated(NamedTuple):
    """A checkpoint without a date; loading it reports the damage."""

    step: int
    path: epath.Path
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    commit_timestamp: datetime.datetime = datetime.datetime.fromtimestamp(0, datetime.UTC)


# Errors that Orbax and its storage raise for files that are damaged, missing or not writable.
_STORAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError)

_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "timed out")  # of a storage that another attempt may reach
_FORBIDDEN = ("Read-only file system", "Permission denied", "not permitted")
_DISK_FULL = ("No space left", "quota", "File too large")
_METADATA = "_CHECKPOINT_METADATA"  # name of Orbax's file with the JSON values
_DATA = "d"  # name of Orbax's folders of array data

_policies = ocp.training.preservation_policies


class _Best:
    """Orbax's policy that keeps the `count` checkpoints of the highest scores, of equal ones the latest.

    `scores` has them by step; who adds a score later changes what is kept.
    """

    def __init__(self, count: int, scores: Mapping[int, float]):
        self._count, self._scores = count, scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether to keep each of the checkpoints."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step in self._scores]
        best = sorted(steps, key=lambda step: (self._scores[step], step), reverse=True)[: self._count]
        return [checkpoint.step in best for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of one run, in `workdir/checkpoints`.

    In a run of several processes, all of them must call each method.
    """

    def __init__(self, workdir: epath.PathLike, *, keep_last: int = 5, keep_best: int = 1, keep_every: int = 0):
        """Opens the folder, creating it if necessary, and deletes the remains of an interrupted save.

        Args:
          workdir: local or `gs://`.
          keep_last: number of newest checkpoints to keep.
          keep_best: number of checkpoints with the highest scores to keep in addition.
          keep_every: checkpoints at multiples of this step are never deleted; 0: there are no such checkpoints.
        """
        self.directory = epath.Path(workdir) / "checkpoints"
        if is_primary():
            clear_empty(self.directory)
        self._scores: dict[int, float] = {}  # of the checkpoints that have one, by step
        policies: list[Any] = [_policies.LatestN(keep_last), _Best(keep_best, self._scores)]
        if keep_every:
            policies.append(_policies.EveryNSteps(keep_every))
        self._checkpointer = _checkpointer(
            self.directory,
            preservation_policy=_policies.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
        )
        for step in self.steps:
            with contextlib.suppress(*_STORAGE_ERRORS):  # resuming will report it
                if (score := _score(self._checkpointer, step)) is not None:
                    self._scores[step] = score
        self._saving: int | None = None  # step that is being written in the background

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Waits for the last save. Its failure does not hide an exception that ended the block."""
        if kind is not None and jax.process_count() > 1:
            return  # must not wait for the other processes: see `distributed.abort_together`
        try:
            self.wait()
        except UserError as error:
            if kind is None:
                raise
            logging.warning("%s", error)
        finally:
            self._checkpointer.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return complete_steps(self._checkpointer)

    def save(self, state: TrainState, extra: dict[str, Any]) -> None:
        """Copies the state and writes it in the background, after waiting for a save that is still running.

        Args:
          state: saved under its step; an existing checkpoint of that step is deleted before.
          extra: JSON values by name; the names "checksums" and "score" are reserved. "base" is the record of arrays
            that the checkpoint leaves out.

        Raises:
          UserError: if the previous save failed, or this one cannot start.
        """
        self.wait()
        step, parts = int(state.step), _parts(state, extra.get("base"))
        # A copy, because it is written in the background while the caller's lists may grow.
        metadata = copy.deepcopy(extra) | {"checksums": all_checksums(parts, extra)}
        self._guard(
            step,
            lambda: self._checkpointer.save_checkpointables_async(
                step,
                parts,
                force=True,
                overwrite=step in self.steps,
                custom_metadata=metadata,
            ),
        )
        self._saving = step

    def score(self, step: int, extra: dict[str, Any], score: float | None) -> None:
        """Adds a score to a saved checkpoint and replaces its JSON values, after waiting for a running save.

        Its arrays are not written again: Orbax would delete the checkpoint before, and an abrupt end lose it.

        Args:
          step: step of the checkpoint.
          extra: JSON values as for `save`.
          score: ranks this checkpoint, higher is better; None excludes it from the ranking.

        Raises:
          UserError: if the save failed, or the values cannot be written.
        """
        self.wait()
        if score is not None:
            extra = extra | {"score": score}
            self._scores[step] = score
        self._guard(step, lambda: _replace_values(self.directory / str(step) / _METADATA, extra))

    def wait(self) -> None:
        """Waits until no save is running.

        Raises:
          UserError: if the save failed.
        """
        if self._saving is not None:
            step, self._saving = self._saving, None
            self._guard(step, self._checkpointer.wait)

    def restore_latest(self, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Reads the newest readable checkpoint; logs a warning for each unreadable one.

        Args:
          abstract_state: shapes, dtypes and shardings to restore into; the shardings may differ from the saved ones.

        Returns:
          A pair: the state, and the JSON values saved with it. None if there is no checkpoint.

        Raises:
          UserError: if there are checkpoints, but none can be read, or the storage cannot be reached at the moment.
        """
        steps, problem = self.steps, ""
        for step in reversed(steps):
            try:
                parts, extra = _load(
                    self._checkpointer, step, lambda metadata: _parts(abstract_state, metadata.get("base"))
                )
            except _STORAGE_ERRORS as error:
                if isinstance(error, jax.errors.JaxRuntimeError):
                    raise  # of memory or another process: the checkpoint may be sound
                line, path = _line(error), self.directory / str(step)
                if isinstance(error, (ConnectionError, TimeoutError)) or any(status in line for status in _UNREACHABLE):
                    raise UserError(f"checkpoint {path} cannot be reached ({line}): rerun the same command") from None
                if is_primary():
                    logging.warning("checkpoint %s cannot be read (%s); trying the one before", path, line)
                problem = problem or line
                continue
            model_state = parts.get("model_state", {})
            if "base" in extra:
                model_state = self._completed(model_state, abstract_state.model_state, extra["base"])
            params, ema = parts["params"], parts.get("ema")
            return TrainState(params=params, model_state=model_state, ema=ema, **parts["rest"]), extra
        if steps:
            raise UserError(
                f"no checkpoint in {self.directory} can be read (newest: {problem}): restore a copy of one, or use "
                "another workdir to start again"
            )
        return None

    def _completed(self, model_state: Params, abstract: Params, record: dict[str, Any]) -> Params:
        """Returns the restored model state with the frozen arrays of a record, from the model that the run began with.

        The arrays get the shardings of the `abstract` model state.
        """
        arrays, _ = read_base(record, self.directory.parent, load_best_params)
        saved = leaves_by_path(model_state)

        def complete(path: Any, leaf: Any) -> jax.Array:
            """Returns the array of the record, sharded like `leaf`, or the restored one if the record has none."""
            name = path_name(path)
            value = arrays.get(name)
            if value is None:
                return saved[name]
            # Each process copies only the slices of its own shards to its devices.
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

        return jax.tree_util.tree_map_with_path(complete, abstract)

    def _guard(self, step: int, save: Callable[[], Any]) -> None:
        """Calls `save`, which saves a step or waits for it; raises UserError instead of a storage error."""
        try:
            save()
        except _STORAGE_ERRORS as error:
            others = [saved for saved in self.steps if saved != step]
            last_good = f"the last good checkpoint is step {others[-1]}" if others else "no earlier checkpoint exists"
            raise UserError(
                f"cannot save step {step} in {self.directory} ({_line(error)}); {last_good}; "
                f"{_remedy(error)} and rerun the same command"
            ) from None


def load_params(workdir: epath.PathLike, step: int | str | None = None, *, allow_nonfinite: bool = False) -> Params:
    """Returns the parameters and the model state of a checkpoint.

    Args:
      workdir: the folder given to `tfx-jax train`.
      step: number of the checkpoint; "best" for the best validation score, "average" for the result of
        `tfx-jax average`, None for the newest.
      allow_nonfinite: whether parameters may be NaN or infinite.

    Returns:
      Nested dictionary of NumPy arrays, which `flax.nnx.merge` combines with the model's graph definition.

    Raises:
      UserError: if there is no such checkpoint, it cannot be read, or a parameter is NaN or infinite.
    """
    if step == "average":
        return _load_average(epath.Path(workdir), allow_nonfinite)
    with _open(workdir) as checkpointer:
        steps = complete_steps(checkpointer)
        if step == "best":
            step = _best_step(checkpointer)
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise UserError(f"{workdir} has no checkpoint of step {chosen}; there are {', '.join(map(str, steps))}")
        return _with_base(*_load_step(checkpointer, int(chosen), allow_nonfinite), reach(workdir))


def load_best_params(workdir: epath.PathLike, *, allow_nonfinite: bool = False) -> Params:
    """Returns the parameters with the best validation score or, if nothing has been evaluated, the newest."""
    return load_params(workdir, best_or_latest_step(workdir), allow_nonfinite=allow_nonfinite)


def best_or_latest_step(workdir: epath.PathLike) -> int:
    """Returns the step of the checkpoint that `load_best_params` loads."""
    with _open(workdir) as checkpointer:
        return _best_step(checkpointer) if _scores(checkpointer) else complete_steps(checkpointer)[-1]


def saved_checksums(workdir: epath.PathLike, step: int) -> dict[str, str]:
    """Returns the checksums stored with a checkpoint. They are equal for equal states, however sharded."""
    with _open(workdir) as checkpointer:
        return cast(dict[str, Any], checkpointer.metadata(step).custom_metadata)["checksums"]


def average_checkpoints(
    workdir: epath.PathLike,
    last: int,
    *,
    or_fewer: bool = False,
    allow_nonfinite: bool = False,
    check: Callable[[Params], object] | None = None,
    on_checkpoint: Callable[[int, int], object] | None = None,
) -> list[int]:
    """Writes the mean of the newest checkpoints (Vaswani et al., 2017, section 6.1) to `workdir/average`.

    Sums are float64; one checkpoint is in memory at a time.

    Args:
      workdir: the folder given to `tfx-jax train`.
      last: number of checkpoints.
      or_fewer: whether to average all checkpoints if there are fewer than `last`; otherwise that is an error.
      allow_nonfinite: whether parameters may be NaN or infinite.
      check: raises for parameters that do not fit the model, such as `Run.check_params`.
      on_checkpoint: called after each checkpoint with the number read and the total.

    Returns:
      Steps of the averaged checkpoints.

    Raises:
      UserError: if there are too few checkpoints, one cannot be read, or the mean cannot be written.
    """
    with _open(workdir) as checkpointer:
        steps = complete_steps(checkpointer)
        if or_fewer:
            last = min(last, len(steps))
        if not 1 <= last <= len(steps):
            raise UserError(
                f"cannot average the last {last} checkpoints: {workdir} has {len(steps)}; --last must be 1 to "
                f"{len(steps)} (config.keep_last limits how many are kept)"
            )
        steps = steps[-last:]
        bases: list[tuple[dict[str, Any], Params]] = []  # record and arrays that the checkpoints leave out, if any

        def load(step: int) -> Params:
            """Loads and checks the parameters of a checkpoint; keeps the record of frozen ones of the first."""
            params, record = _load_step(checkpointer, step, allow_nonfinite)
            if record is not None and not bases:
                bases.append((record, _with_base({}, record, reach(workdir))))
            if check is not None:
                check(merge_trees(params, bases[0][1]) if bases else params)
            if on_checkpoint is not None:
                on_checkpoint(steps.index(step) + 1, len(steps))
            return params

        mean = average_trees(load, steps)
    path = absolute(workdir) / "average"
    # An earlier average is replaced when the new one is complete; a store has no such renaming.
    new_path = path.with_name("average.new") if is_local(path) else path
    check_no_links(workdir, [path.name, new_path.name])
    if path.exists() and not path.is_dir():  # Orbax would open it, and wait forever if it is a pipe
        raise UserError(f"{path} must be a folder, but is a file: delete it and rerun the same command")
    try:
        extra = {"base": bases[0][0]} if bases else {}
        metadata: dict[str, Any] = extra | {"checksums": all_checksums({"params": mean}, extra)}
        ocp.save(new_path, mean, overwrite=True, custom_metadata=metadata)
        if new_path != path:
            path.rmtree(missing_ok=True)
            new_path.rename(path)
    except _STORAGE_ERRORS as error:
        for unfinished in path.parent.glob(f"{new_path.name}{orbax_path.atomicity.TMP_DIR_SUFFIX}*"):
            unfinished.rmtree(missing_ok=True)  # it keeps a full disk full
        raise UserError(f"cannot write {path} ({_line(error)}): {_remedy(error)} and rerun the same command") from None
    return steps


def _replace_values(path: epath.Path, extra: dict[str, Any]) -> None:
    """Replaces the JSON values of a checkpoint in Orbax's file; all processes of a run must call it."""
    problem = None
    if is_primary():
        try:
            values = json.loads(path.read_bytes())
            sums = values["custom_metadata"]["checksums"] | {"metadata": _checksum_of_values(extra)}
            values["custom_metadata"] = extra | {"checksums": sums}
            write_file(path, json.dumps(values).encode())
        except _STORAGE_ERRORS as error:
            problem = error
    if gather_arrays(np.array([problem is not None])).any():  # the others wait for the file
        raise problem or OSError("another process cannot write")


def _checkpointer(directory: epath.Path, **options: Any) -> ocp.training.Checkpointer:
    """Opens Orbax's checkpointer, after checking everything in the folder that it would read."""
    check_tree(directory, data_folder=_DATA)
    for path in sorted(directory.iterdir()) if is_local(directory) and directory.is_dir() else ():
        if path.name.isdigit() and not path.is_dir():  # Orbax would skip it silently
            raise UserError(
                f"{path} must be a checkpoint's folder, but is a file: delete it, or restore the checkpoint"
            )
    steps: Any = ReadableSteps(orbax_path.step.standard_name_format())
    return ocp.training.Checkpointer(absolute(directory), step_name_format=steps, **options)


def _open(workdir: epath.PathLike) -> ocp.training.Checkpointer:
    """Opens the checkpoints of a workdir for reading; raises UserError if there are none."""
    directory = reach(workdir) / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{workdir} has no checkpoints: run tfx-jax train with this --workdir first")
    checkpointer = _checkpointer(directory)
    if not complete_steps(checkpointer):
        checkpointer.close()
        raise UserError(f"{workdir} has no complete checkpoint yet: wait for the run to save one, or resume it")
    return checkpointer


def _best_step(checkpointer: ocp.training.Checkpointer) -> int:
    """Returns the step with the highest score, the latest of equal ones; raises UserError if there are no scores."""
    scores = _scores(checkpointer)
    if not scores:
        raise UserError(
            f"no checkpoint in {checkpointer.directory} has been evaluated, so none is the best: choose one with "
            "--step, or lower config.eval_every"
        )
    return max(scores, key=lambda step: (scores[step], step))


def _scores(checkpointer: ocp.training.Checkpointer) -> dict[int, float]:
    """Returns the scores of checkpoints that have one, by step; raises UserError if one is unreadable or changed."""
    scores: dict[int, float] = {}
    for step in complete_steps(checkpointer):
        try:
            score = _score(checkpointer, step)
        except _STORAGE_ERRORS as error:
            name = f"checkpoint {checkpointer.directory / str(step)}"
            raise UserError(
                f"{name} cannot be read ({_line(error)}), so the best one is unknown: choose one with --step"
            ) from None
        if score is not None:
            scores[step] = score
    return scores


def _score(checkpointer: ocp.training.Checkpointer, step: int) -> float | None:
    """Returns the score of a checkpoint, None if it has none; raises one of `_STORAGE_ERRORS` if it is unreadable."""
    metadata = dict(_metadata(checkpointer.metadata(step).custom_metadata))
    if metadata.pop("checksums")["metadata"] != _checksum_of_values(metadata):
        raise ValueError("its metadata is damaged")
    return metadata.get("score")


def _parts(state: TrainState, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the trees that Orbax stores separately: "params", "rest" and, unless empty, "model_state" and "ema".

    Arrays of the record `base` are left out of "model_state".
    """
    rest = state._asdict()
    if base:
        rest["model_state"] = without(rest["model_state"], base["dtypes"])
    parts = {name: rest.pop(name) for name in ("params", "model_state", "ema")}
    return {name: part for name, part in parts.items() if part} | {"rest": rest}


def _load(
    checkpointer: ocp.training.Checkpointer, step: int, make_targets: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads parts of a checkpoint; all processes of a run must call it.

    Args:
      checkpointer: checkpointer of the folder.
      step: step of the checkpoint.
      make_targets: returns, from the JSON values that were saved with the checkpoint, the parts to read by name (see
        `_parts`): for each, the tree of shapes, dtypes and shardings to restore into.

    Returns:
      A pair: the parts by name, and the JSON values that were saved with the checkpoint.

    Raises:
      ValueError: if the parts do not match their checksums; or another of `_STORAGE_ERRORS` if they cannot be read.
    """
    parts, metadata, problem = {}, {}, None
    try:
        metadata = _metadata(checkpointer.metadata(step).custom_metadata)
        targets = make_targets(metadata)
        # One after the other: reading two parts at once, Orbax would abandon the second if the first is unreadable.
        parts = {
            name: checkpointer.load_checkpointables(step, {name: target})[name] for name, target in targets.items()
        }
        # `load_params` needs this description: a run must not resume from a checkpoint that cannot be loaded later.
        described = checkpointer.checkpointables_metadata(step).metadata
        if any(described.get(name) is None for name in targets):
            raise ValueError("its description of its arrays is missing")
    except _STORAGE_ERRORS as error:
        problem = error
    if gather_arrays(np.array([problem is not None])).any():  # if one process cannot read it, none may use it
        raise problem or ValueError("another process cannot read it")
    _verify(parts, metadata)
    return parts, {name: value for name, value in metadata.items() if name not in ("checksums", "score")}


def _metadata(values: Any) -> dict[str, Any]:
    """Returns the JSON values that were saved with arrays; raises ValueError if there are none."""
    if not values:
        raise ValueError("its metadata is damaged")
    return values


def _verify(parts: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Raises ValueError if the arrays or the metadata do not match the stored checksums."""
    saved = metadata["checksums"]
    extra = {name: value for name, value in metadata.items() if name != "checksums"}
    damaged = [name for name, checksum in all_checksums(parts, extra).items() if saved.get(name) != checksum]
    if damaged:
        raise ValueError(f"the values of its {damaged[0]} are damaged")


def _load_step(
    checkpointer: ocp.training.Checkpointer, step: int, allow_nonfinite: bool
) -> tuple[Params, dict[str, Any] | None]:
    """Reads the parameters and the model state of a checkpoint as one tree; raises UserError if it is unreadable.

    If the run keeps a moving average of the parameters, it is read in their place.

    Returns:
      A pair: the tree, and the record of the arrays that the checkpoint leaves out, if there are any.
    """
    name = f"checkpoint {checkpointer.directory / str(step)}"
    try:
        described = checkpointer.checkpointables_metadata(step).metadata
        if described.get("params") is None:
            raise ValueError("its description of its arrays is missing")
        params_name = "ema" if "ema" in described else "params"  # the moving average, if the run keeps one
        targets = {part: _as_numpy(described[part]) for part in (params_name, "model_state") if part in described}
        parts, extra = _load(checkpointer, step, lambda _: targets)
        params = merge_trees(parts[params_name], parts.get("model_state", {}))
    except _STORAGE_ERRORS as error:
        raise UserError(f"{name} cannot be read ({_line(error)}); choose another with --step") from None
    return params if allow_nonfinite else _check_finite(params, name), extra.get("base")


def _load_average(workdir: epath.Path, allow_nonfinite: bool) -> Params:
    """Reads the mean of checkpoints that `average_checkpoints` wrote; raises UserError if it cannot be read."""
    path = absolute(workdir) / "average"
    if not path.is_dir():
        raise UserError(f"{workdir} has no average: run tfx-jax average --workdir={workdir} first")
    check_tree(path, data_folder=_DATA)
    try:
        described = ocp.metadata(path)
        params = ocp.load(path, _as_numpy(described.metadata))
        metadata = _metadata(described.custom_metadata)
        _verify({"params": params}, metadata)
    except _STORAGE_ERRORS as error:
        raise UserError(f"{path} cannot be read ({_line(error)}): run tfx-jax average again") from None
    return _with_base(params if allow_nonfinite else _check_finite(params, path), metadata.get("base"), reach(workdir))


def _with_base(params: Params, record: dict[str, Any] | None, workdir: epath.Path) -> Params:
    """Returns the parameters with the arrays of a record, if there is one, added."""
    return params if record is None else merge_trees(params, read_base(record, workdir, load_best_params)[1])


def _check_finite(params: Params, source: Any) -> Params:
    """Returns the parameters; raises UserError, which names their `source`, if one is NaN or infinite."""
    bad_names = [name for name, leaf in leaves_by_path(params).items() if not is_finite(leaf)]
    if bad_names:
        raise nonfinite(bad_names, source)
    return params


def _as_numpy(metadata: Any) -> Any:
    """Returns the target that makes Orbax restore NumPy arrays, whatever devices the checkpoint was written from."""
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), metadata)


def _line(error: BaseException) -> str:
    """Returns the first line of the root cause of an error, or its class name if that line is empty."""
    return printable(_cause(error), 200) or type(error).__name__


def _cause(error: BaseException) -> str:
    """Returns the first line of the message of the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), "")


def _remedy(error: BaseException) -> str:
    """Returns what the user can do about a write error; tensorstore's errors are texts without an error number."""
    line = _cause(error)
    if any(reason in line for reason in _FORBIDDEN):
        return "make the folder writable"
    if any(reason in line for reason in _DISK_FULL):
        return "free disk space"
    return "fix this"
