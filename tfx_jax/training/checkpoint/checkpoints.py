"""Checkpoints of a run: saving, restoring, averaging, and verifying with checksums. The one file that imports Orbax.

A checkpoint stores the parameters apart from the rest of the state, so that inference reads no optimizer state, and a
few JSON values: the position of the data iterator and the evaluations.

Checksums do not depend on the sharding. Orbax does not notice when a byte of a large array changes on disk, and a CRC
would need all of an array in order in one place. So every element is hashed with its position and the hashes are
summed: each process sums over its own shards, and the total is the same for any mesh and any number of processes. The
hash is a bijection of the element's bits: a change of one element is always noticed, changes of several but for a
chance of 2^-64.
"""

import copy
import datetime
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import path as orbax_path
from orbax.checkpoint import v1 as ocp

from tfx_jax.errors import UserError, one_line, printable
from tfx_jax.files import absolute, check_no_links, check_tree, is_local, parse_json, reach, read_small_file
from tfx_jax.models.finite import is_finite, nonfinite
from tfx_jax.training.sharding.distributed import gather_arrays, is_primary
from tfx_jax.training.step import Params, TrainState, average_trees, merge_trees

# Odd, so that multiplying by them is a bijection; from splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BLOCK = 1 << 18  # elements hashed at once: a few MB


def checksums(parts: dict[str, Any]) -> dict[str, str]:
    """The checksum of each tree of arrays; where several processes train, all of them call it.

    >>> checksums({"params": {"a": np.arange(3.0)}, "rest": np.int32(7)})
    {'params': 'b27b9e32861ba857', 'rest': 'a3349cb258289b04'}
    """
    mine = np.array([_sum_of_own(part) for part in parts.values()], np.uint64)
    total = gather_arrays(mine.view(np.uint32)).view(np.uint64).sum(axis=0)
    return {name: f"{checksum:016x}" for name, checksum in zip(parts, total, strict=True)}


def all_checksums(parts: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Those of the arrays, and "metadata" of the JSON values beside them, which say where the data goes on."""
    text = json.dumps(extra, sort_keys=True)
    return checksums(parts) | {"metadata": f"{zlib.crc32(text.encode()):08x}"}


def _sum_of_own(tree: Any) -> np.uint64:
    """Sum, modulo 2^64, of the hashes of the elements that this process answers for."""
    total, offset = np.uint64(0), 0
    for leaf in jax.tree.leaves(tree):
        for starts, values in _own_shards(leaf):
            for block, places in _blocks(values, starts, np.shape(leaf), offset):
                bits = block.view(f"u{block.itemsize}").astype(np.uint64)
                hashes = (bits ^ (places * _GOLDEN)) * _MIX
                hashes = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
                total = np.add(total, hashes.sum(), dtype=np.uint64)
        offset += np.size(leaf)
    return total


def _own_shards(leaf: Any) -> Iterator[tuple[list[int], np.ndarray]]:
    """Where each shard begins and its values: of shards that several devices hold, only the first."""
    if not isinstance(leaf, jax.Array):
        yield [0] * np.ndim(leaf), np.asarray(leaf)
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield [part.start or 0 for part in shard.index], np.asarray(shard.data)


def _blocks(
    values: np.ndarray, starts: list[int], shape: tuple[int, ...], offset: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts a shard into blocks of whole rows, each [n], with the places of the elements, [n] uint64."""
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    if not shape:
        values, starts, strides = values[None], [0], [1]
    rows = max(1, _BLOCK // max(1, int(np.prod(values.shape[1:], dtype=np.int64))))
    for first in range(0, values.shape[0], rows):
        block = np.ascontiguousarray(values[first : first + rows])
        places = np.full((1,) * block.ndim, offset, np.uint64)
        for axis, (start, stride) in enumerate(zip(starts, strides, strict=True)):
            start += first if axis == 0 else 0
            along = np.arange(start, start + block.shape[axis], dtype=np.uint64) * np.uint64(stride)
            places = places + along.reshape([-1 if other == axis else 1 for other in range(block.ndim)])
        yield block.ravel(), places.ravel()


def check_metrics(directory: epath.Path) -> None:
    """Checks that the scores of all checkpoints can be read: Orbax reads them when it opens the folder.

    Raises:
      UserError: names the file that cannot be read.
    """
    for path in sorted(directory.glob("*/metrics/metrics")):
        try:
            if not isinstance(parse_json(read_small_file(path)), dict):
                raise ValueError("no object")
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}): delete the folder it is in, and choose checkpoints by number with --step"
            ) from None


def complete_steps(checkpointer: Any) -> list[int]:
    """Steps of the checkpoints, oldest first; an empty folder, which Orbax counts, is none."""
    steps = sorted(checkpoint.step for checkpoint in checkpointer.checkpoints)
    return [step for step in steps if any((checkpointer.directory / str(step)).iterdir())]


def clear_empty(directory: epath.Path) -> None:
    """Deletes empty folders that have the name of a checkpoint: they would take the place of one that is kept."""
    folders = [path for path in directory.iterdir() if path.name.isdigit()] if directory.is_dir() else []
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class ReadableSteps:
    """Orbax's names of the checkpoints in a folder, but that none is asked what it cannot say."""

    def __init__(self, names: Any):
        """Takes the names that Orbax would use."""
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._names, name)

    def find_all(self, base_path: epath.PathLike) -> Iterator[Any]:
        """All complete checkpoints."""
        for found in self._names.find_all(base_path):
            try:
                found.commit_timestamp  # noqa: B018  which is what Orbax is going to ask for
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                found = _Undated(found.step, found.path)
            yield found


class _Undated(NamedTuple):
    """A checkpoint without a date; loading it reports that it is damaged."""

    step: int
    path: epath.Path
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    commit_timestamp: datetime.datetime = datetime.datetime.fromtimestamp(0, datetime.UTC)


# What Orbax and its storage raise for files that are damaged, missing or cannot be written.
_STORAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError)

_FORBIDDEN = ("Read-only file system", "Permission denied", "not permitted")
_NO_ROOM = ("No space left", "quota", "File too large")
_DATA = "d"  # Orbax's folders of array data

_policies = ocp.training.preservation_policies


class Checkpoints:
    """The checkpoints of one training, in `workdir/checkpoints`.

    Where several processes train, all of them call everything here.
    """

    def __init__(self, workdir: epath.PathLike, *, keep_last: int = 5, keep_best: int = 1, keep_every: int = 0):
        """Opens the folder, which is made if missing, and clears what an interrupted save left behind.

        Args:
          workdir: local or `gs://`.
          keep_last: the newest checkpoints stay.
          keep_best: of those saved with a score, the highest stay besides.
          keep_every: those of steps that are a multiple of it stay for ever; 0 for none.
        """
        self.directory = epath.Path(workdir) / "checkpoints"
        if is_primary():
            clear_empty(self.directory)
        best = _policies.BestN(
            get_metric_fn=lambda metrics: metrics["score"], n=keep_best, keep_checkpoints_without_metrics=False
        )
        kept = [_policies.LatestN(keep_last), best, *([_policies.EveryNSteps(keep_every)] if keep_every else [])]
        self._checkpointer = _checkpointer(
            self.directory,
            preservation_policy=_policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )
        self._saving: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Waits for the last save. That it failed does not hide an error that was there before."""
        if kind is not None and jax.process_count() > 1:
            return  # nothing may wait for the other processes any more: see `distributed.abort_together`
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

    def save(self, state: TrainState, extra: dict[str, Any], *, score: float | None = None) -> None:
        """Copies the state and writes it in the background; a save still under way is waited for.

        Args:
          state: saved under its step; a checkpoint of that step that is there already is replaced.
          extra: JSON values by name; "checksums" and "score" are taken.
          score: ranks this checkpoint, higher is better; None leaves it out of the ranking.

        Raises:
          UserError: if the save before this one failed, or this one cannot start.
        """
        self.wait()
        step, parts = int(state.step), _parts(state)
        # A copy: it is written in the background, when the caller's lists may have grown.
        extra = copy.deepcopy(extra) | ({} if score is None else {"score": score})
        metadata = extra | {"checksums": all_checksums(parts, extra)}
        self._guard(
            step,
            lambda: self._checkpointer.save_checkpointables_async(
                step,
                parts,
                force=True,
                overwrite=step in self.steps,
                metrics=None if score is None else {"score": score},
                custom_metadata=metadata,
            ),
        )
        self._saving = step

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
          UserError: if the save failed.
        """
        if self._saving is not None:
            step, self._saving = self._saving, None
            self._guard(step, self._checkpointer.wait)

    def restore_latest(self, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Reads the newest checkpoint that can be read, with a warning for each that cannot.

        Args:
          abstract_state: the shapes, dtypes and shardings to restore into; the latter need not be those saved.

        Returns:
          The state and the JSON values saved with it; None if there is no checkpoint.

        Raises:
          UserError: if there are checkpoints but none can be read.
        """
        wanted = _parts(abstract_state)
        steps, problem = self.steps, ""
        for step in reversed(steps):
            try:
                found, extra = _load(self._checkpointer, step, wanted)
            except _STORAGE_ERRORS as error:
                line = _line(error)
                if is_primary():
                    path = self.directory / str(step)
                    logging.warning("checkpoint %s cannot be read (%s); trying the one before", path, line)
                problem = problem or line
                continue
            return TrainState(params=found["params"], model_state=found.get("model_state", {}), **found["rest"]), extra
        if steps:
            raise UserError(
                f"none of the checkpoints in {self.directory} can be read, not the newest either ({problem}): "
                "put back a copy of it, or take another --workdir to start again"
            )
        return None

    def _guard(self, step: int, save: Callable[[], Any]) -> None:
        try:
            save()
        except _STORAGE_ERRORS as error:
            good = [saved for saved in self.steps if saved != step]
            last = f"the last good checkpoint is step {good[-1]}" if good else "there is no earlier checkpoint"
            raise UserError(
                f"cannot save step {step} in {self.directory} ({_line(error)}); {last}; "
                f"{_remedy(error)} and run the same command again"
            ) from None


def load_params(workdir: epath.PathLike, step: int | str | None = None, *, allow_nonfinite: bool = False) -> Params:
    """Gives back the parameters of a training, and the model state beside them.

    Args:
      workdir: the folder given to `tfx-jax train`.
      step: of a checkpoint; "best" for that of the best validation score, "average" for what `tfx-jax average` wrote,
        None for the newest.
      allow_nonfinite: whether a parameter may be NaN or infinite.

    Returns:
      Nested dictionary of NumPy arrays, as `flax.nnx.merge` takes it beside the model's graph definition.

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
        return _load_step(checkpointer, int(chosen), allow_nonfinite)


def load_best_params(workdir: epath.PathLike, *, allow_nonfinite: bool = False) -> Params:
    """The parameters of the best validation score or, where nothing has been evaluated, the newest."""
    with _open(workdir) as checkpointer:
        step = "best" if _scores(checkpointer) else None
    return load_params(workdir, step, allow_nonfinite=allow_nonfinite)


def saved_checksums(workdir: epath.PathLike, step: int) -> dict[str, str]:
    """What the values of a checkpoint summed up to when it was saved: equal for equal states, however sharded."""
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
    """Averages the parameters of the newest checkpoints (Vaswani et al., 2017, section 6.1) into `workdir/average`.

    Sums are float64, one checkpoint in memory at a time.

    Args:
      workdir: the folder given to `tfx-jax train`.
      last: how many checkpoints.
      or_fewer: whether a young training, which has not saved so many, gives all it has.
      allow_nonfinite: whether a parameter may be NaN or infinite.
      check: raises for parameters that are not those of the model, such as `Run.check_params`.
      on_checkpoint: is told, after each, how many of how many are read.

    Returns:
      Their steps.

    Raises:
      UserError: if there are not so many, or one cannot be read, or their average not be written.
    """
    with _open(workdir) as checkpointer:
        steps = complete_steps(checkpointer)
        if or_fewer:
            last = min(last, len(steps))
        if not 1 <= last <= len(steps):
            raise UserError(
                f"cannot average the last {last} checkpoints: {workdir} has {len(steps)}; see config.keep_last"
            )
        steps = steps[-last:]

        def load(step: int) -> Params:
            params = _load_step(checkpointer, step, allow_nonfinite)
            if check is not None:
                check(params)
            if on_checkpoint is not None:
                on_checkpoint(steps.index(step) + 1, len(steps))
            return params

        mean = average_trees(load, steps)
    path = absolute(workdir) / "average"
    check_no_links(workdir, [path.name])
    if path.exists() and not path.is_dir():  # Orbax would open it to delete its contents, and wait at a pipe forever
        raise UserError(f"{path} is not the folder of an average: delete it and run the same command again")
    try:
        metadata: dict[str, Any] = {"checksums": all_checksums({"params": mean}, {})}
        ocp.save(path, mean, overwrite=True, custom_metadata=metadata)
    except _STORAGE_ERRORS as error:
        raise UserError(
            f"cannot write {path} ({_line(error)}): {_remedy(error)} and run the same command again"
        ) from None
    return steps


def _checkpointer(directory: epath.Path, **options: Any) -> ocp.training.Checkpointer:
    check_tree(directory, data_folder=_DATA)
    for path in sorted(directory.iterdir()) if is_local(directory) and directory.is_dir() else ():
        if path.name.isdigit() and not path.is_dir():  # Orbax skips it silently
            raise UserError(f"{path} is not a folder, as a checkpoint is: delete it, or restore the checkpoint")
    check_metrics(directory)
    steps: Any = ReadableSteps(orbax_path.step.standard_name_format())
    return ocp.training.Checkpointer(absolute(directory), step_name_format=steps, **options)


def _open(workdir: epath.PathLike) -> ocp.training.Checkpointer:
    directory = reach(workdir) / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{workdir} has no checkpoints: train there first")
    checkpointer = _checkpointer(directory)
    if not complete_steps(checkpointer):
        checkpointer.close()
        raise UserError(f"{workdir} has no complete checkpoint yet")
    return checkpointer


def _best_step(checkpointer: ocp.training.Checkpointer) -> int:
    scored = _scores(checkpointer)
    if not scored:
        raise UserError(f"no checkpoint in {checkpointer.directory} has been evaluated; see config.eval_every")
    return max(scored, key=lambda step: (scored[step], step))


def _scores(checkpointer: ocp.training.Checkpointer) -> dict[int, float]:
    """Of the checkpoints that have any; UserError if one cannot be read, or is not what was saved."""
    scores: dict[int, float] = {}
    metrics: dict[int, Any] = {checkpoint.step: checkpoint.metrics or {} for checkpoint in checkpointer.checkpoints}
    for step in complete_steps(checkpointer):
        found = metrics[step].get("score")
        try:
            metadata = cast(dict[str, Any], checkpointer.metadata(step).custom_metadata) or {}
            # Older versions did not keep it there; as texts, NaN is NaN.
            if "checksums" not in metadata or str(metadata.get("score", found)) != str(found):
                raise ValueError("its score is not the one that was saved")
        except _STORAGE_ERRORS as error:
            name = f"checkpoint {checkpointer.directory / str(step)}"
            raise UserError(
                f"{name} cannot be read ({_line(error)}), so which is best? choose one with --step"
            ) from None
        if found is not None:
            scores[step] = found
    return scores


def _parts(state: TrainState) -> dict[str, Any]:
    """What Orbax keeps apart; it keeps no empty tree."""
    rest = state._asdict()
    parts = {name: rest.pop(name) for name in ("params", "model_state")}
    return {name: part for name, part in parts.items() if part} | {"rest": rest}


def _load(
    checkpointer: ocp.training.Checkpointer, step: int, wanted: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads parts of a checkpoint and its JSON values; ValueError if they are not what was saved."""
    parts, metadata, problem = {}, {}, None
    try:
        # One after the other: of two parts at once, Orbax would abandon the second when the first cannot be read.
        parts = {name: checkpointer.load_checkpointables(step, {name: target})[name] for name, target in wanted.items()}
        metadata = cast(dict[str, Any], checkpointer.metadata(step).custom_metadata)
        # Not needed here, but by `load_params`: a training must not go on from what no one can load later.
        described = checkpointer.checkpointables_metadata(step).metadata
        if any(described.get(name) is None for name in wanted):
            raise ValueError("it does not say what it holds")
    except _STORAGE_ERRORS as error:
        problem = error
    if gather_arrays(np.array([problem is not None])).any():  # what one process cannot read, none may use
        raise problem or ValueError("another process cannot read it")
    _verify(parts, metadata)
    return parts, {name: value for name, value in metadata.items() if name not in ("checksums", "score")}


def _verify(parts: dict[str, Any], metadata: dict[str, Any]) -> None:
    if not metadata:
        raise ValueError("its metadata is damaged")
    saved = metadata["checksums"]
    extra = {name: value for name, value in metadata.items() if name != "checksums"}
    damaged = [name for name, checksum in all_checksums(parts, extra).items() if saved.get(name) != checksum]
    if damaged:
        raise ValueError(f"the values of its {damaged[0]} are damaged")


def _load_step(checkpointer: ocp.training.Checkpointer, step: int, allow_nonfinite: bool) -> Params:
    name = f"checkpoint {checkpointer.directory / str(step)}"
    try:
        described = checkpointer.checkpointables_metadata(step).metadata
        if described.get("params") is None:
            raise ValueError("it does not say what it holds")
        wanted = {name: _as_numpy(described[name]) for name in ("params", "model_state") if name in described}
        found = _load(checkpointer, step, wanted)[0]
        params = merge_trees(found["params"], found.get("model_state", {}))
    except _STORAGE_ERRORS as error:
        raise UserError(f"{name} cannot be read ({_line(error)}); choose another with --step") from None
    return params if allow_nonfinite else _finite(params, name)


def _load_average(workdir: epath.Path, allow_nonfinite: bool) -> Params:
    path = absolute(workdir) / "average"
    if not path.is_dir():
        raise UserError(f"{workdir} has no average: run tfx-jax average --workdir={workdir} first")
    check_tree(path, data_folder=_DATA)
    try:
        described = ocp.metadata(path)
        params = ocp.load(path, _as_numpy(described.metadata))
        _verify({"params": params}, cast(Any, described.custom_metadata))
    except _STORAGE_ERRORS as error:
        raise UserError(f"{path} cannot be read ({_line(error)}): run tfx-jax average again") from None
    return params if allow_nonfinite else _finite(params, path)


def _finite(params: Params, place: Any) -> Params:
    """The same parameters; UserError if one is NaN or infinite."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    spoilt = [path for path, leaf in leaves if not is_finite(leaf)]
    if spoilt:
        raise nonfinite([jax.tree_util.keystr(path, simple=True, separator="/") for path in spoilt], place)
    return params


def _as_numpy(metadata: Any) -> Any:
    """The target that makes Orbax restore NumPy arrays, wherever the checkpoint was written."""
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), metadata)


def _line(error: BaseException) -> str:
    """The first line of what caused an error in the end, or its kind where that says nothing."""
    return printable(_cause(error), 200) or type(error).__name__


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), "")


def _remedy(error: BaseException) -> str:
    """What a user can do about an error of writing; tensorstore's are texts, without a number."""
    line, remedies = _cause(error), {"make the folder writable": _FORBIDDEN, "make room": _NO_ROOM}
    found = (remedy for remedy, reasons in remedies.items() if any(reason in line for reason in reasons))
    return next(found, "fix this")
