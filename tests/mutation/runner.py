"""Runs tests on one mutant after another.

Importing JAX takes longer than most tests that notice a mutant. So one process imports it, with the other packages that
are not ours, and forks for each mutant. That is safe as long as JAX has no backend, which only the forks get.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest

from tests.compilation import kept_folder

IMPORTS = (
    "jax",
    "jax.experimental.pallas",
    "flax.nnx",
    "optax",
    "grain",
    "orbax.checkpoint.experimental.v1",
    "chex",
    "hypothesis.strategies",
)
"""What many tests import and what is slow to import."""


class Task(NamedTuple):
    """Tests to run on a copy of the tree."""

    tests: tuple[str, ...]
    """Files or ids of tests, in order."""
    file: str = ""
    """The library's file that is replaced; empty: none, the tests run on the library as it is."""
    source: str = ""
    """Its text."""


class Limits(NamedTuple):
    """What the tests of one task may use."""

    seconds: float = 60.0
    """CPU time after which no further test starts."""
    test_seconds: int = 120
    """Wall-clock time of one test, for endless loops."""
    gigabytes: int = 10
    """Memory of one process."""


class Outcome(NamedTuple):
    """How the tests of one task ended."""

    status: str
    """"survived", "killed", "timed out" (of an endless test), or "crashed"."""
    seconds: float
    failed: tuple[str, ...]
    """Ids of the failed tests: one for a mutant, all where the library is as it is."""
    passed: int
    """How many tests passed."""


class Runner:
    """Forks for each task; as many tasks run at once as there are copies of the tree.

    Args:
      root: the checkout; it is copied, never changed.
      folder: for the copies and what the tests print.
      jobs: how many tasks run at once.
      limits: of each task.
      imports: modules that every fork shares.
    """

    def __init__(
        self,
        root: pathlib.Path,
        folder: pathlib.Path,
        jobs: int = 1,
        limits: Limits = Limits(),  # noqa: B008
        imports: Iterable[str] = IMPORTS,
    ):
        for module in imports:
            importlib.import_module(module)
        folder.mkdir(exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", "-p", "no:xdist", "-c", os.devnull, str(folder)])  # imports its plugins
        gc.freeze()  # keeps the pages of what was imported shared
        self._root, self._limits = root, limits
        self._copies = [folder / f"copy-{number}" for number in range(jobs)]
        for copy in self._copies:
            _copy_tree(root, copy)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Outcome]]:
        """Generates (index of the task, outcome), in the order in which tasks end."""
        waiting, free, running = list(reversed(range(len(tasks)))), list(self._copies), {}
        try:
            while waiting or running:
                while waiting and free:
                    copy, index = free.pop(), waiting.pop()
                    running[self._start(tasks[index], copy)] = index, copy, time.monotonic()
                time.sleep(0.05)
                for process, (index, copy, started) in list(running.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        _kill_group(process)  # processes that the tests started and left
                        del running[process]
                        free.append(copy)
                        yield index, self._finish(tasks[index], copy, status, time.monotonic() - started)
        finally:
            for process in running:
                _kill_group(process)

    def _start(self, task: Task, copy: pathlib.Path) -> int:
        if task.file:
            (copy / task.file).write_text(task.source)
            os.utime(copy / task.file, (0, 0))  # Python trusts bytecode whose source has the same size and time
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            try:
                os.setsid()
                os._exit(_run_tests(task, copy, self._limits))
            except BaseException:  # whatever happens, this process must not go on as if it were the first
                traceback.print_exc()
                os._exit(pytest.ExitCode.INTERNAL_ERROR)
        return process

    def _finish(self, task: Task, copy: pathlib.Path, status: int, seconds: float) -> Outcome:
        if task.file:
            shutil.copy2(self._root / task.file, copy / task.file)
        notes = pathlib.Path(f"{copy}.json")
        passed, failed = json.loads(notes.read_text()) if notes.exists() else (0, [])
        notes.unlink(missing_ok=True)
        code = os.waitstatus_to_exitcode(status)
        log = pathlib.Path(f"{copy}.log").read_text()
        # A mutant that cannot be imported fails in the first conftest.py that imports it, before any test.
        conftest = re.search(r"ImportError while loading conftest '(.*)/conftest\.py'", log)
        if task.file and code == pytest.ExitCode.USAGE_ERROR and conftest:
            beside = [test for test in task.tests if (copy / test).is_relative_to(conftest[1])]
            return Outcome("killed", seconds, tuple(beside[:1]), passed)
        if code in (-signal.SIGKILL, -signal.SIGTERM) or code in (
            pytest.ExitCode.USAGE_ERROR,
            pytest.ExitCode.INTERNAL_ERROR,
        ):
            raise SystemExit(f"the tests {task.tests} were stopped from outside or did not start:\n{log}")
        if code == -signal.SIGALRM:
            return Outcome("timed out", seconds, tuple(failed), passed)
        if code < 0:
            return Outcome("crashed", seconds, tuple(failed), passed)
        return Outcome("killed" if failed else "survived", seconds, tuple(failed), passed)


def _copy_tree(root: pathlib.Path, copy: pathlib.Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", copy / "tfx_jax"], check=True)


class _Recorder:
    """A plugin of pytest that enforces limits and notes how tests end, at once, because a test may end the process."""

    def __init__(self, notes: pathlib.Path, limits: Limits):
        self._notes, self._limits = notes, limits
        self._passed, self._failed = 0, []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        if sum(os.times()[:4]) > self._limits.seconds:
            item.session.shouldstop = "out of CPU time"
        self._write(running=[item.nodeid])
        signal.alarm(self._limits.test_seconds)  # ends the process, even inside a compiled program
        result = yield
        signal.alarm(0)
        self._write()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed += report.when == "call" and report.passed
        self._failed += [report.nodeid] if report.failed else []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._failed += [report.nodeid] if report.failed else []
        self._write()

    def _write(self, running: Sequence[str] = ()) -> None:
        self._notes.write_text(json.dumps([self._passed, [*self._failed, *running]]))


def _run_tests(task: Task, copy: pathlib.Path, limits: Limits) -> int:
    """Runs pytest in the fork; returns its exit status."""
    output = os.open(f"{copy}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    sys.dont_write_bytecode = True  # else the bytecode of a mutant could be taken for that of the next
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(copy), *sys.path]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tfx_jax", "experiments")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    resource.setrlimit(resource.RLIMIT_DATA, (limits.gigabytes << 30, limits.gigabytes << 30))
    _use_kept_programs(pathlib.Path(f"{copy}.programs"))
    signal.alarm(limits.test_seconds)  # for collecting
    # The plugins are imported already, so pytest cannot rewrite their assertions.
    options = [
        "-q",
        "-m",
        "not slow and not nightly",
        "-p",
        "no:xdist",
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    ]
    options += ["-x"] if task.file else []
    recorder = _Recorder(pathlib.Path(f"{copy}.json"), limits)
    status = pytest.main(
        [*options, f"--rootdir={copy}", "-c", f"{copy}/pyproject.toml", *task.tests], plugins=[recorder]
    )
    sys.stdout.flush()
    return int(status)


def _use_kept_programs(folder: pathlib.Path) -> None:
    """Lets JAX read the programs that ordinary runs of the tests kept; what mutants compile is not kept."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kept = kept_folder()
    for name in os.listdir(kept) if kept.is_dir() else []:
        with contextlib.suppress(OSError):  # another file system, or removed meanwhile
            os.link(kept / name, folder / name)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_compilation_cache_dir", str(folder))


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
