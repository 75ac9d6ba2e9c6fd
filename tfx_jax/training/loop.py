"""The training loop: from a configuration to a trained model in a workdir, resumable after any interruption."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from tfx_jax.arrays import leaves_by_path
from tfx_jax.data.batching.batches import Batch
from tfx_jax.data.sources.splits import SPLITS, Splits
from tfx_jax.errors import UserError
from tfx_jax.tasks.task import ReportTable
from tfx_jax.training.checkpoint.artifacts import listed_artifacts, newest_step
from tfx_jax.training.checkpoint.checkpoints import Checkpoints
from tfx_jax.training.checkpoint.data_files import check_data_files
from tfx_jax.training.config import ExperimentConfig, check_config, flat, save_config, validate
from tfx_jax.training.flops import training_flops
from tfx_jax.training.guards.interrupt import StopRequest, stop_on_signals
from tfx_jax.training.guards.lock import locked, report_storage_errors
from tfx_jax.training.guards.memory import (
    check_state,
    device_memory,
    out_of_memory_as_user_error,
    report,
    state_memory,
    step_memory,
)
from tfx_jax.training.guards.rejected_run import removes_rejected_run
from tfx_jax.training.guards.watchdog import Watchdog
from tfx_jax.training.init_from import adopt_pretrained_config, init_from_state
from tfx_jax.training.optimizer import learning_rate
from tfx_jax.training.reporting.attention_picture import write_attention
from tfx_jax.training.reporting.loggers import Outcome, check_logger
from tfx_jax.training.reporting.meter import MetricAccumulator
from tfx_jax.training.reporting.profiling import Profile
from tfx_jax.training.reporting.progress import Progress
from tfx_jax.training.reporting.report import config_table, write_report
from tfx_jax.training.run import Run, make_run
from tfx_jax.training.sharding.distributed import abort_together, check_agreement, is_primary, library, process0_first
from tfx_jax.training.sharding.strategies import TrainSetup, make_mesh, shard_batch
from tfx_jax.training.step import Metrics, TrainState
from tfx_jax.training.train_setup import base_rng, make_train_setup
from tfx_jax.training.workdir import find_workdir, make_workdir

_MAX_BAD_STEPS = 20  # consecutive skipped steps after which the run stops


class Result(NamedTuple):
    """Outcome of a training run."""

    step: int
    """Step of the last checkpoint."""
    evaluations: list[dict[str, float]]
    """One dictionary per evaluation: "step" and the task's metrics, such as "bleu" and "exact_match" of translation."""
    signum: int | None
    """Signal that interrupted the run, or None."""


def train(
    config: ExperimentConfig, workdir: epath.PathLike, *, profile: range | None = None, logger: str | None = None
) -> Result:
    """Trains until `config.num_steps`, or resumes an earlier run in the same workdir.

    A run that was interrupted and resumed ends with the same parameters, bit for bit, as an uninterrupted one. If it
    resumes on other devices or with another `accumulate`, every example of an epoch is still read once.

    Args:
      config: the experiment.
      workdir: folder for configuration, tokenizer, checkpoints, TensorBoard files and report; local or `gs://`.
      profile: steps to trace into `workdir/profile`; None: trace nothing.
      logger: "wandb" or "mlflow" also gets what TensorBoard shows; a resumed run continues there. Errors of its package
        do not stop the run.

    Returns:
      The last saved step, the evaluations and the interrupting signal.

    Raises:
      UserError: if the configuration, the data or the workdir are unusable, the loss stops being finite, memory does
        not suffice, a checkpoint cannot be written, or the package of `logger` is not installed.
    """
    if isinstance(config, str):  # the name of an experiment or a file, as on the command line
        raise UserError(
            f"config must be an ExperimentConfig, got the name {config!r:.100}: "
            "tfx_jax.cli.train.load_config_file returns the configuration of an experiment or a file"
        )
    path = find_workdir(workdir)
    with report_storage_errors(path):
        config = validate(adopt_pretrained_config(config, path))
    with abort_together(), report_storage_errors(path):
        if logger is not None and is_primary():
            check_logger(logger)
        return _train(config, path, profile, logger)


def _train(config: ExperimentConfig, workdir: epath.Path, profile: range | None, logger: str | None) -> Result:
    """Does the work of `train`, whose arguments it gets after they were checked."""
    check_agreement(lambda: {"the code": library()})  # the configuration is compared in `_open_checkpoints`
    splits = config.task.splits()
    splits["train"]  # raises for unreadable data before anything is written
    if "validation" in splits:
        splits["validation"]
    elif config.eval_every or config.patience:
        raise UserError(
            "config.eval_every and config.patience need a validation split, but config.task.data has none: name its "
            "validation files, or set both to 0"
        )
    if "test" in splits and getattr(config.task.data, "test_file", ""):
        splits["test"]  # what is named should be readable, though no step reads it
    is_new = not workdir.exists()
    make_workdir(workdir)
    with (
        locked(workdir) if is_primary() else contextlib.nullcontext(),
        removes_rejected_run(workdir, is_new=is_new) if is_primary() else contextlib.nullcontext(),
        stop_on_signals() as stop,
        _open_checkpoints(config, workdir) as checkpoints,
        contextlib.closing(Watchdog(config.hang_seconds)) as watchdog,
        out_of_memory_as_user_error(),
    ):
        check_data_files(config.task.data, workdir)
        run = make_run(config, workdir, splits=splits)
        check_agreement(lambda: {"the tokenizer or the labels": listed_artifacts(workdir), **_sizes(splits)})
        mesh, has_validation = make_mesh(**dataclasses.asdict(config.mesh)), "validation" in splits
        with contextlib.closing(iter(run.train_data(mesh))) as iterator:  # its thread reads ahead
            trainer = _Trainer(
                run, workdir, mesh, iterator, checkpoints, watchdog, profile, logger, has_validation=has_validation
            )
            trainer.train(stop)
        checkpoints.wait()
        return Result(trainer.saved_step, trainer.evaluations, stop.signum)


def _sizes(splits: Splits[Any]) -> dict[str, str]:
    """Describes, for `check_agreement`, the number of examples in the splits that a run reads; streams are left out."""
    used = {split: splits[split] for split in SPLITS if split != "test" and split in splits}  # no step reads "test"
    return {
        f"the size of the {split} split": str(len(data)) for split, data in used.items() if hasattr(data, "__len__")
    }


def _open_checkpoints(config: ExperimentConfig, workdir: epath.Path) -> Checkpoints:
    """Opens the checkpoints of the workdir, after checking that they belong to this experiment."""
    with process0_first("config.json"):
        if is_primary():
            if (step := newest_step(workdir) or 0) > config.num_steps:
                raise UserError(f"{workdir} is at step {step:,} already: config.num_steps must be at least that")
            save_config(config, workdir)
        else:
            check_config(config, workdir)
    return Checkpoints(workdir, keep_last=config.keep_last, keep_best=config.keep_best, keep_every=config.keep_every)


def _step_scalars(schedule: optax.Schedule, frozen: Collection[str], state: TrainState) -> dict[str, jax.Array]:
    """Returns the learning rate of the last update, and the norm of all parameters, those with `frozen` paths too."""
    frozen_leaves = [leaf for path, leaf in leaves_by_path(state.model_state).items() if path in frozen]
    leaves = [leaf.astype(jnp.float32) for leaf in (*jax.tree.leaves(state.params), *frozen_leaves)]
    # Optimizers count their updates, from 0, for the schedule; skipped steps are none. Adafactor's stacks have an equal
    # count for each layer.
    counts = [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    num_updates = jnp.max(counts[0]) if counts else state.step
    learning_rate = jnp.asarray(schedule(jnp.maximum(num_updates - 1, 0)))
    return {"train/learning_rate": learning_rate, "train/param_norm": optax.tree.norm(leaves)}


class _Trainer:
    """State and resources of one run."""

    def __init__(
        self,
        run: Run[Any],
        workdir: epath.Path,
        mesh: Mesh,
        iterator: grain.DatasetIterator[Batch],
        checkpoints: Checkpoints,
        watchdog: Watchdog,
        profile: range | None,
        logger: str | None,
        *,
        has_validation: bool,
    ):
        self.run = run
        self.config = config = run.config
        self.has_validation = has_validation
        self.workdir = workdir
        self.checkpoints = checkpoints
        self.watchdog = watchdog
        self.mesh, self.iterator = mesh, iterator
        schedule = learning_rate(config.optimizer, config.model.d_model, config.num_steps)
        self.step_scalars = jax.jit(functools.partial(_step_scalars, schedule, run.frozen_paths))
        training = make_train_setup(config, run.make_model, run.task.loss, self.mesh, make_carry=run.make_carry)
        self.step_fn = training.step_fn
        self.memory = state_memory(training.abstract_state, run.frozen_paths)
        check_state(self.memory, device_memory(self.mesh))
        self.evaluations: list[dict[str, float]] = []
        self.start_message = ""
        self.base: dict[str, Any] | None = None  # record of frozen parameters that checkpoints leave out
        self.state = self._restore(training)
        self.rng = base_rng(config)
        self.saved_step = self.last_done_step = int(self.state.step)  # waits until the state is computed
        self.watchdog.beat(None)  # no limit until the first step
        self.progress = Progress(
            workdir if is_primary() else None,
            last_done_step=self.last_done_step,
            num_steps=config.num_steps,
            unit=run.task.unit,
            logger=logger,
        )
        self.device_kinds = [device.device_kind for device in self.mesh.devices.flat]
        count_flops = functools.partial(training_flops, run.make_model, run.task.loss, make_carry=run.make_carry)
        self.meter = MetricAccumulator(count_flops, self.device_kinds)
        steps = profile if is_primary() else None
        self.profile = Profile(
            workdir, steps, last_done_step=self.last_done_step, meter=self.meter, message=self.progress.message
        )

    def _restore(self, training: TrainSetup) -> TrainState:
        """Returns the newest checkpoint, or the initial state."""
        # No limit for a pretrained model: of frozen parameters that checkpoints leave out, or for the first step.
        self.watchdog.beat(None if self.config.init_from else "reads the checkpoints")
        restored = self.checkpoints.restore_latest(training.abstract_state)
        if restored is None:
            self.iterator.start_prefetch()  # the first sort buffer is read while the parameters are initialized
            if not self.config.init_from:
                self.watchdog.beat("initializes the parameters")
                return training.first_state()
            state, self.base, self.start_message = init_from_state(
                training, self.config.init_from, self.run.frozen_paths
            )
            return state
        state, extra = restored
        self.iterator.set_state(extra["data"])
        self.evaluations, self.base = extra["evaluations"], extra.get("base")
        return state

    def train(self, stop: StopRequest) -> None:
        """Trains, logs, evaluates and saves until the last step, or until `stop` requests an end."""
        config = self.config
        if self.last_done_step:
            self.start_message = f"resuming at step {self.last_done_step}"
        if self.start_message:
            self.progress.message(self.start_message)
        self.progress.text("config", config_table(config))
        metric_names = [f"validation/{metric.name}" for metric in self.run.task.metrics]
        self.progress.hparams(flat(config), ["train/loss", *metric_names])
        meter = self.meter
        outcome: Outcome = "failed"
        try:
            if self._misses_evaluation():
                with meter.timed("evaluate"):
                    self._evaluate(self.last_done_step)
            for step in range(self.last_done_step + 1, config.num_steps + 1):
                if stop.is_due(step) or self._has_converged():
                    break
                with self.profile.step(step, self.state):
                    self.watchdog.beat(f"reads the batch of step {step}")
                    with meter.timed("data"):
                        batch = shard_batch(next(self.iterator), self.mesh)
                    self.watchdog.beat(f"computes step {step}")
                    if step == self.last_done_step + 1:
                        with meter.timed("compile"):
                            temporary = step_memory(self.step_fn, self.state, batch, self.rng)
                            self.step_scalars(self.state)
                        self.progress.message(report(self.memory, temporary, device_memory(self.mesh)))
                    with meter.starting(batch):
                        self.state, metrics = self.step_fn(self.state, batch, self.rng)
                    self._check(meter.add(step, metrics))
                if step % config.log_every == 0 or step == config.num_steps:
                    self._log(step)
                if self.has_validation and self._is_evaluated(step):
                    self._check(meter.drain())
                    with meter.timed("evaluate"):
                        self._evaluate(step)
                elif step % config.checkpoint_every == 0:
                    self._check(meter.drain())
                    # Among bad steps the parameters may be the cause: only those before are kept.
                    if not int(self.state.skip_state.in_a_row):
                        self._save()
            self._check(meter.drain())
            if int(self.state.step) > self.saved_step:
                self._save()
            with meter.timed("save"):
                self.checkpoints.wait()
            if stop.signum is not None:
                saved = f"saved at step {self.saved_step}" if self.saved_step else "before the first step"
                self.progress.message(f"stopped, {saved}: rerun the same command to resume")
            elif self._has_converged() and int(self.state.step) < config.num_steps:
                self.progress.message(
                    f"stopped early: no better {self.run.best_metric.title} in the last {config.patience} evaluations"
                )
            self._report(stop.signum)
            outcome = "finished" if stop.signum is None else "stopped"
        finally:
            self.profile.close()
            self.watchdog.beat(None)  # no limit: loggers upload
            self.progress.close(outcome)

    def _save(self) -> None:
        """Starts to save a checkpoint."""
        self.watchdog.beat("saves")
        with self.meter.timed("save"):
            self.checkpoints.save(self.state, self._saved_values())
        self.saved_step = int(self.state.step)

    def _saved_values(self) -> dict[str, Any]:
        """Returns the JSON values of a checkpoint."""
        values = {"data": self.iterator.get_state(), "evaluations": self.evaluations}
        return values | ({"base": self.base} if self.base else {})

    def _check(self, finished: list[tuple[int, Metrics]]) -> None:
        """Checks the metrics of finished steps, pairs (step, metrics), and logs the bad steps that were skipped.

        Raises:
          UserError: at a bad step that was not skipped, or after too many skipped ones; checkpoints are not affected.
        """
        for step, metrics in finished:
            self.progress.step(step)
            # A finite loss with a non-finite gradient has corrupted the parameters: they must not be saved.
            numbers = metrics.numbers
            values = {"loss": metrics.means["loss"].mean, "grad_norm": numbers["grad_norm"]}
            nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
            if not nonfinite and not numbers.get("bad"):
                continue
            if nonfinite:
                problem = f"the {nonfinite[0]} is {values[nonfinite[0]]}"
            else:
                problem = f"the loss per {self.run.task.unit} is {values['loss']:.4g}, a spike"
            if self.config.bad_steps == "skip" and numbers["bad_in_a_row"] < _MAX_BAD_STEPS:
                self.progress.message(f"{problem} at step {step}: skipped ({numbers['bad_in_a_row']:.0f} in a row)")
                continue
            self.checkpoints.wait()
            first_bad = step + 1 - max(1, int(numbers.get("bad_in_a_row", 0)))
            good_steps = [saved for saved in self.checkpoints.steps if saved < first_bad]
            last_good = (
                f"the last good checkpoint is step {good_steps[-1]}" if good_steps else "no checkpoint exists yet"
            )
            remedy = "lower the learning rate or lengthen the warm-up"
            if self.config.bad_steps == "skip":
                problem = f"{_MAX_BAD_STEPS} bad steps in a row: {problem}"
            else:
                remedy += ', or set config.bad_steps="skip" to skip such steps'
            raise UserError(f"{problem} at step {step}; {last_good}: {remedy}")

    def _log(self, step: int) -> None:
        """Logs the metrics of the steps since the last line."""
        self._check(self.meter.drain())
        step_scalars = {name: float(np.asarray(value)) for name, value in self.step_scalars(self.state).items()}
        scalars = self.meter.take() | step_scalars
        # Both are NaN if all steps since the last line were skipped.
        loss = scalars.get("train/loss", math.nan)
        tokens_per_second = scalars.get("train/tokens_per_second", math.nan)
        self.progress.log(step, scalars, loss=loss, tokens_per_second=tokens_per_second, mfu=scalars.get("train/mfu"))

    def _report(self, signum: int | None) -> None:
        """Logs the last metrics and writes `report.md`; `signum` is the signal that ended the run, None without one."""
        step = int(self.state.step)
        # What was measured since the last log line: steps before an interruption, the last evaluation and save.
        self.progress.scalars(step, self.meter.take())
        tables = self._tables(step) if signum is None else []
        if is_primary():
            write_report(
                self.workdir,
                self.run,
                step=step,
                signum=signum,
                num_params=self.memory.num_params,
                num_trained=self.memory.num_trained,
                device_kinds=self.device_kinds,
                evaluations=self.evaluations,
                message=self.progress.message,
                tables=tables,
            )

    def _tables(self, step: int) -> list[ReportTable]:
        """Returns the task's tables about the validation split; [] if it has none, or they cannot be made."""
        if not self.has_validation or not hasattr(self.run.task, "report_tables"):
            return []
        self.watchdog.beat(None)
        self.progress.stage(f"step {step}/{self.config.num_steps}  writing the report")
        try:
            return self.run.task.report_tables(self.run.placed(self.state.variables))
        except Exception as error:  # must not fail the run, which has been saved
            if jax.process_count() > 1:
                raise  # the other processes wait for this one: see `abort_together`
            self.progress.message(f"no tables in the report: {' '.join(str(error).split())}")
            return []

    def _misses_evaluation(self) -> bool:
        """Returns whether the previous run ended during its last evaluation."""
        is_due = self.last_done_step > 0 and self.has_validation and self._is_evaluated(self.last_done_step)
        return is_due and all(evaluation["step"] != self.last_done_step for evaluation in self.evaluations)

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.eval_every
        return step == self.config.num_steps or (every > 0 and step % every == 0)

    def _evaluate(self, step: int) -> None:
        """Saves, evaluates on the validation split, and adds the score that ranks checkpoints to the saved one.

        The save comes first to keep the training so far, in case the evaluation fails.
        """
        started_at = time.monotonic()
        if step > self.saved_step:
            self._save()
        self.watchdog.beat(None)  # no limit: an evaluation may take longer than a step
        stage = f"step {step}/{self.config.num_steps}  evaluating on the validation split"
        self.progress.stage(stage)
        model = self.run.placed(
            self.state.variables,
            on_batch=lambda done, total: self.progress.stage(f"{stage}: {done:,} of {total:,}"),
        )
        metrics, summary = self.run.task.evaluate(model)
        write_attention(self.run.task, model, self.progress, step)
        self.evaluations.append({"step": step} | metrics)
        self.progress.scalars(step, {f"validation/{name}": value for name, value in metrics.items()})
        best_metric = self.run.best_metric
        rank = self.run.rank(metrics)
        self.watchdog.beat("saves")
        with self.meter.timed("save"):
            self.checkpoints.score(step, self._saved_values(), rank if math.isfinite(rank) else None)
        if not math.isfinite(rank):
            summary += f", {best_metric.title} is {metrics[best_metric.name]}: this checkpoint cannot be the best"
        self.progress.message(f"step {step}: validation {summary}, {time.monotonic() - started_at:.0f} s")

    def _has_converged(self) -> bool:
        """Returns whether the last `patience` evaluations brought no better score; never with a patience of 0."""
        patience = self.config.patience
        ranks = [self.run.rank(evaluation) for evaluation in self.evaluations]
        if not 0 < patience < len(ranks):
            return False
        return max(ranks[-patience:]) <= max(ranks[:-patience])
