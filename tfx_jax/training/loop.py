"""The training loop: from a configuration to a trained model in a workdir, however often it is interrupted."""

import contextlib
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from tfx_jax.data.bucketing import batches
from tfx_jax.data.text import PairSource
from tfx_jax.errors import UserError
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.checkpoint import Checkpoints
from tfx_jax.training.config import ExperimentConfig, check_config, save_config, validate
from tfx_jax.training.distributed import ending_together, fetch, is_primary, primary_first
from tfx_jax.training.experiment import Experiment, has_part, open_pairs
from tfx_jax.training.interrupt import StopRequest, stop_on_signals
from tfx_jax.training.lock import locked, told_when_full
from tfx_jax.training.optimizer import learning_rate, make_optimizer
from tfx_jax.training.progress import Progress
from tfx_jax.training.sharding import DATA_PARALLEL, make_mesh, shard_batch, state_shardings
from tfx_jax.training.step import Metrics, TrainState, init_state, jit_update
from tfx_jax.training.watchdog import Watchdog


class Result(NamedTuple):
    """How a training ended."""

    step: int
    """The step of the last checkpoint."""
    evaluations: list[dict[str, float]]
    """Of every evaluation so far "step", "bleu" and "exact_match"."""
    signum: int | None
    """The signal that interrupted it, or None."""


def train(config: ExperimentConfig, workdir: epath.PathLike) -> Result:
    """Trains until `config.num_steps`, or on from where an earlier run in the same workdir stopped.

    A run that is interrupted and started again gives, bit for bit, the parameters of one that was not.

    Args:
      config: the experiment.
      workdir: where configuration, tokenizer, checkpoints and TensorBoard files go; local or `gs://`.

    Returns:
      How it ended.

    Raises:
      UserError: if the configuration, the data or the workdir do not allow it, if the loss stops being finite, or if a
        checkpoint cannot be written.
    """
    validate(config)
    with ending_together(), told_when_full(workdir):
        return _train(config, epath.Path(workdir))


def _train(config: ExperimentConfig, workdir: epath.Path) -> Result:
    pairs = open_pairs(config.data, "train")
    validation = open_pairs(config.data, "validation") if has_part(config.data, "validation") else None
    if validation is None and (config.eval_every or config.patience):
        raise UserError("config.eval_every and config.patience need config.data.validation_source")
    workdir.mkdir(parents=True, exist_ok=True)
    with (
        locked(workdir) if is_primary() else contextlib.nullcontext(),
        stop_on_signals() as stop,
        _checkpoints(config, workdir) as checkpoints,
    ):
        trainer = _Trainer(config, workdir, checkpoints, pairs, validation)
        trainer.run(stop)
        checkpoints.wait()
        return Result(trainer.saved_step, trainer.evaluations, stop.signum)


def _checkpoints(config: ExperimentConfig, workdir: epath.Path) -> Checkpoints:
    """Those of the workdir, if it is this experiment's."""
    with primary_first("config.json"):
        if is_primary():
            save_config(config, workdir)
        else:
            check_config(config, workdir)
    return Checkpoints(workdir, keep_last=config.keep_last, keep_best=config.keep_best, keep_every=config.keep_every)


class _Trainer:
    """State and surroundings of one run."""

    def __init__(
        self,
        config: ExperimentConfig,
        workdir: epath.Path,
        checkpoints: Checkpoints,
        pairs: PairSource,
        validation: PairSource | None,
    ):
        self.config = config
        self.checkpoints = checkpoints
        self.validation = validation
        self.experiment = Experiment(config, workdir)
        self.mesh = make_mesh(config.mesh.data)
        if jax.process_count() > 1 and self.mesh.size < jax.device_count():
            raise UserError(f"config.mesh has {self.mesh.size} of {jax.device_count()} devices: processes share all")
        self.iterator = iter(
            batches(
                pairs,
                self.experiment.tokenizer,
                tokens_per_batch=config.data.tokens_per_batch,
                max_length=config.data.max_length,
                seed=config.seed,
                window=config.data.window,
                rows_multiple=self.mesh.size,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
        )
        optimizer = make_optimizer(config.optimizer, config.model.d_model)
        self.learning_rate = learning_rate(config.optimizer, config.model.d_model)
        graphdef, first_state = init_state(self.experiment.make_model, optimizer)
        shardings = state_shardings(jax.eval_shape(first_state), self.mesh, DATA_PARALLEL)
        self.evaluations: list[dict[str, float]] = []
        self.state = self._restore(first_state, shardings)
        loss_fn = functools.partial(translation_loss, label_smoothing=config.label_smoothing)
        self.step_fn = jit_update(graphdef, loss_fn, optimizer, shardings)
        self.rng = jax.random.key(config.seed)
        self.translator = self.experiment.translator()
        self.saved_step = self.first_step = int(self.state.step)
        self.progress = Progress(workdir, first_step=self.first_step, num_steps=config.num_steps)
        self.watchdog = Watchdog(config.hang_seconds)

    def _restore(self, first_state: Any, shardings: TrainState) -> TrainState:
        """The newest checkpoint, or the first state."""
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(first_state),
            shardings,
        )
        restored = self.checkpoints.restore_latest(abstract)
        if restored is None:
            return jax.jit(first_state, out_shardings=shardings)()
        state, extra = restored
        self.iterator.set_state(extra["data"])
        self.evaluations = extra["evaluations"]
        return state

    def run(self, stop: StopRequest) -> None:
        """Steps, logs, evaluates and saves until the end, or until `stop` asks."""
        config = self.config
        if self.first_step:
            self.progress.message(f"resuming at step {self.first_step}")
        meter = _Meter()
        try:
            for step in range(self.first_step + 1, config.num_steps + 1):
                if stop.is_due(step) or self._has_converged():
                    break
                self.watchdog.beat(f"reads the batch of step {step}")
                batch = shard_batch(next(self.iterator), self.mesh)
                self.watchdog.beat(f"computes step {step}")
                self.state, metrics = self.step_fn(self.state, batch, self.rng)
                self._check(meter.add(step, metrics))
                if step % config.log_every == 0 or step == config.num_steps:
                    self._log(step, meter)
                if self.validation is not None and self._is_evaluated(step):
                    self._check(meter.drain())
                    self._evaluate(step, self.validation)
                    meter.restart_clock()
                elif step % config.checkpoint_every == 0:
                    self._check(meter.drain())
                    self._save()
            self._check(meter.drain())
            if int(self.state.step) > self.saved_step:
                self._save()
            self.checkpoints.wait()
            if stop.signum is not None:
                self.progress.message(f"stopped, saved at step {self.saved_step}: run the same command to go on")
            elif self._has_converged() and int(self.state.step) < config.num_steps:
                self.progress.message(f"stopped early: no better BLEU in the last {config.patience} evaluations")
        finally:
            self.iterator.close()
            self.progress.close()
            self.watchdog.close()

    def _save(self, score: float | None = None) -> None:
        self.watchdog.beat("saves")
        extra = {"data": self.iterator.get_state(), "evaluations": self.evaluations}
        self.checkpoints.save(self.state, extra, score=score)
        self.saved_step = int(self.state.step)

    def _check(self, done: list[tuple[int, dict[str, float]]]) -> None:
        """Stops the run at the first loss or gradient that is not finite; what was saved before is unharmed."""
        for step, metrics in done:
            # A finite loss with such a gradient has spoilt the parameters already: they must not be saved.
            broken = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
            if broken:
                self.checkpoints.wait()
                good = (
                    f"the last good checkpoint is step {self.saved_step}" if self.saved_step else "nothing is saved yet"
                )
                raise UserError(
                    f"the {broken[0]} is {metrics[broken[0]]} at step {step}; {good}: "
                    "lower the learning rate or lengthen the warm-up"
                )

    def _log(self, step: int, meter: "_Meter") -> None:
        self._check(meter.drain())
        sums, seconds = meter.take()
        tokens = max(sums["tokens"], 1.0)
        loss = sums["loss"] / tokens
        scalars = {
            "train/loss": loss,
            "train/nll": sums["nll"] / tokens,
            "train/accuracy": sums["correct"] / tokens,
            "train/grad_norm": sums["grad_norm"] / sums["steps"],
            "train/learning_rate": float(np.asarray(self.learning_rate(step - 1))),
            "train/tokens_per_second": tokens / seconds,
        }
        self.progress.log(step, scalars, loss=loss, tokens_per_second=tokens / seconds)

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.eval_every
        return step == self.config.num_steps or (every > 0 and step % every == 0)

    def _evaluate(self, step: int, pairs: PairSource) -> None:
        """Translates the validation part, saves with its BLEU as the score."""
        started = time.monotonic()
        self.watchdog.beat(None)
        params = fetch(self.state.params)
        scores, _, _ = self.experiment.evaluate(self.translator, params, pairs)
        self.evaluations.append({"step": step, "bleu": scores.tokenised, "exact_match": scores.exact_match})
        self.progress.scalars(step, {"validation/bleu": scores.tokenised, "validation/exact_match": scores.exact_match})
        self._save(score=scores.tokenised)
        self.progress.message(
            f"step {step}: validation BLEU {scores.tokenised:.2f} (tokenised), {scores.sacrebleu:.2f} (sacreBLEU), "
            f"exact match {scores.exact_match:.1f} %, {time.monotonic() - started:.0f} s"
        )

    def _has_converged(self) -> bool:
        """Whether the last `patience` evaluations brought no better BLEU."""
        patience = self.config.patience
        bleus = [evaluation["bleu"] for evaluation in self.evaluations]
        return 0 < patience < len(bleus) and max(bleus[-patience:]) <= max(bleus[:-patience])


class _Meter:
    """Sums the metrics of many steps without making the device wait: a step's are fetched while the next one runs."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Metrics]] = []
        self._sums: dict[str, float] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of the token rate what happened until now."""
        self._since = time.monotonic()

    def add(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """Takes the metrics of a step that was just started; returns those of the steps that are done."""
        done = self.drain()
        self._waiting.append((step, metrics))
        return done

    def drain(self) -> list[tuple[int, dict[str, float]]]:
        """Waits for everything; returns (step, metrics) of what came in."""
        done = []
        for step, metrics in self._waiting:
            fetched = {name: float(np.asarray(value)) for name, value in metrics.items()} | {"steps": 1.0}
            self._sums = {name: self._sums.get(name, 0.0) + value for name, value in fetched.items()}
            done.append((step, fetched))
        self._waiting.clear()
        return done

    def take(self) -> tuple[dict[str, float], float]:
        """Returns the sums and the seconds since the last call, and starts again."""
        sums, seconds = self._sums, time.monotonic() - self._since
        self._sums = {}
        self.restart_clock()
        return sums, seconds
