"""Start-up times of two commands: `translate` until its first line, `train` until its first step."""

import io
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from etils import epath

from benchmarks.peers.sizes import SIZES

_EXPERIMENT = pathlib.Path(__file__).parents[2] / "experiments" / "transformer_demo.py"
_TRACED = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
_COMPILED = ("/jax/core/compile/backend_compile_duration",)


class _FirstStepDone(BaseException):
    """Ends a training; a BaseException, so that the library does not catch it."""


class _Clock:
    """Seconds since another process started this one, divided into phases.

    `spawned_at` is the other process's `time.monotonic`, which all processes share.
    """

    def __init__(self, spawned_at: float):
        self._spawned_at = spawned_at
        self._spans: dict[str, list[tuple[float, float]]] = {"trace": [], "compile": []}
        self.phases: dict[str, float] = {}

    def now(self) -> float:
        return time.monotonic() - self._spawned_at

    def listen(self) -> None:
        """Records when JAX traces and compiles."""
        import jax

        def note(event: str, duration_secs: float, **_: Any) -> None:
            kind = "trace" if event in _TRACED else "compile" if event in _COMPILED else None
            if kind is not None:
                self._spans[kind].append((self.now() - duration_secs, self.now()))

        jax.monitoring.register_event_duration_secs_listener(note)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside the context to a phase, without the time of tracing and compiling."""
        start, before = self.now(), self._in_jax()
        yield
        self.phases[name] = self.phases.get(name, 0) + self.now() - start - (self._in_jax() - before)

    def _in_jax(self) -> float:
        """Returns the seconds of tracing and compiling so far."""
        return _union([span for spans in self._spans.values() for span in spans])

    def finish(self) -> dict[str, float]:
        """Returns the seconds of all phases; "rest" is the remaining time until now."""
        total = self.now()
        compiling = _union(self._spans["compile"])
        self.phases |= {"trace": self._in_jax() - compiling, "compile": compiling}
        return self.phases | {"rest": total - sum(self.phases.values())}


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals; the tracing of a function contains that of functions it calls."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def prepare(*, model: str, workdir: str) -> dict[str, float]:
    """Makes the working directory for `translate` and `train`: a tokenizer and a checkpoint of random parameters."""
    if not (pathlib.Path(workdir) / "checkpoints").exists():
        from tfx_jax.cli.train import load_config_file
        from tfx_jax.training import make_run
        from tfx_jax.training.checkpoint import Checkpoints
        from tfx_jax.training.config import save_config
        from tfx_jax.training.sharding.strategies import make_mesh
        from tfx_jax.training.train_setup import make_train_setup

        config = load_config_file(*_config_options(model))
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
        save_config(config, epath.Path(workdir))
        run = make_run(config, workdir)
        training = make_train_setup(config, run.make_model, run.task.loss, make_mesh())
        with Checkpoints(workdir) as checkpoints:
            checkpoints.save(training.first_state(), {})
    return {}


def translate(*, model: str, workdir: str, is_cached: bool, spawned_at: float) -> dict[str, float]:
    """Returns the seconds of the phases of `tfx-jax translate` until it has written the translation of one line."""
    clock = _Clock(spawned_at)
    with _cache(workdir if is_cached else None):
        from tfx_jax.cli import translate as verb

        clock.listen()
        clock.phases["imports"] = clock.now()
        verb.load_model = _in_phase(clock, "checkpoint", verb.load_model)
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"the dog that the girl saw ate two apples .\n"))
        sys.stdout = io.TextIOWrapper(io.BytesIO())
        verb.run(["--workdir", workdir])
        return clock.finish()


def train(*, model: str, workdir: str, is_cached: bool, spawned_at: float) -> dict[str, float]:
    """Returns the seconds of the phases of `tfx-jax train` until the first step, in a new workdir with a tokenizer."""
    clock = _Clock(spawned_at)
    with _cache(workdir if is_cached else None), tempfile.TemporaryDirectory() as new:
        import jax

        from tfx_jax.cli import train as verb
        from tfx_jax.training import loop

        clock.listen()
        clock.phases["imports"] = clock.now()
        shutil.copytree(pathlib.Path(workdir) / "tokenizer", pathlib.Path(new) / "tokenizer")
        loop.make_run = _in_phase(clock, "tokenizer", loop.make_run)
        make_train_setup = loop.make_train_setup

        def one_step(*arguments: Any, **options: Any) -> Any:
            training = make_train_setup(*arguments, **options)
            step: Any = training.step_fn

            def run(*arguments: Any) -> Any:
                with clock.phase("step"):
                    jax.block_until_ready(step(*arguments))
                raise _FirstStepDone

            run.lower = step.lower  # the loop asks the program how much memory it takes
            first_state = _in_phase(clock, "first state", lambda: jax.block_until_ready(training.first_state()))
            return training._replace(step_fn=run, first_state=first_state)

        loop.make_train_setup = one_step
        file, overrides = _config_options(model)
        try:
            verb.run([f"--config={file}", *overrides, f"--workdir={new}"])
        except _FirstStepDone:
            return clock.finish()
    raise RuntimeError("the training ended before its first step")


@contextmanager
def _cache(workdir: str | None) -> Iterator[None]:
    """Sets the folder of the compilation cache, before JAX is imported: in `workdir`, or temporary if None."""
    with tempfile.TemporaryDirectory() as empty:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = empty if workdir is None else f"{workdir}/xla"
        yield


def _in_phase(clock: _Clock, name: str, function: Callable[..., Any]) -> Any:
    """Returns the function, wrapped so that its calls count as a phase."""

    def timed(*arguments: Any, **options: Any) -> Any:
        with clock.phase(name):
            return function(*arguments, **options)

    return timed


def _config_options(model: str) -> tuple[str, list[str]]:
    """Returns (experiment file, overrides that give its model one of our sizes)."""
    sizes = SIZES[model]._asdict()
    sizes.pop("vocab_size")  # the tokenizer of the grammar determines it
    return str(_EXPERIMENT), [f"--config.model.{name}={value}" for name, value in sizes.items()]
