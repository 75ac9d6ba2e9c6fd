"""Runs tests over one mutant after another.

Importing JAX takes longer than most tests that kill a mutant. So one process imports it, with all else that is not
ours, and forks for every mutant: that is safe for as long as JAX has no backend, which only a fork gets.
"""

import collections
import contextlib
import gc
import importlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from tests.mutants.mutant import Mutant, mutated

# What most tests import and what is slow to: several seconds for each mutant without it.
SLOW_IMPORTS = (
    "jax",
    "jax.experimental.pallas",
    "flax.nnx",
    "optax",
    "grain",
    "orbax.checkpoint.experimental.v1",
    "chex",
    "hypothesis.strategies",
)
_WHEN_IMPORTED = ", when it was imported"
_OURS = ("tests", "tfx_jax", "experiments")
_NO_TESTS = {pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR}


class Outcome(NamedTuple):
    """How the tests took a mutant."""

    status: str
    """"survived"; "killed"; or "timed out", which counts as killed."""
    seconds: float
    failed: tuple[str, ...]
    """The test that failed; of the library as it is, all that did."""


class _Job(NamedTuple):
    mutant: Mutant | None
    """None: the library as it is."""
    tests: tuple[str, ...]
    limit: float


class Runner:
    """Forks for each mutant, as many at once as there are copies of the tree.

    Args:
      root: the checkout; it is copied, never changed.
      folder: for the copies and what the tests print.
      jobs: how many run at once.
      imports: what every fork has imported already.
    """

    def __init__(self, root: pathlib.Path, folder: pathlib.Path, jobs: int, imports: Sequence[str] = SLOW_IMPORTS):
        for module in imports:
            importlib.import_module(module)
        folder.mkdir(exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", "-p", "no:xdist", "-c", os.devnull, str(folder)])  # imports its plugins
        gc.freeze()  # what was imported is no garbage, in no fork
        self._root, self._folder = root, folder
        self._copies = [folder / f"copy-{number}" for number in range(jobs)]
        for copy in self._copies:
            _copy_tree(root, copy)

    def run(self, mutants: Sequence[Mutant], limit: float) -> Iterator[tuple[Mutant, Outcome]]:
        """Runs the tests of each mutant, for at most `limit` seconds, in the order in which they end."""
        for job, outcome in self._run([_Job(mutant, mutant.tests, limit) for mutant in mutants]):
            assert job.mutant is not None
            yield job.mutant, outcome

    def failing(self, names: Iterable[str], limit: float) -> set[str]:
        """Runs what killed mutants on the library as it is; gives what fails there too, and so says nothing of them."""
        files = collections.defaultdict(list)
        for name in sorted(names):
            file, _, test = name.removesuffix(_WHEN_IMPORTED).partition("::")
            files[file].append(f"{file.removeprefix('tests/')} -k {test}")
        jobs = [_Job(None, tuple(tests), limit) for tests in files.values()]
        return {
            name
            for job, outcome in self._run(jobs)
            for name in (job.tests if outcome.status == "timed out" else outcome.failed)
        }

    def _run(self, jobs: list[_Job]) -> Iterator[tuple[_Job, Outcome]]:
        waiting, free, running = list(reversed(jobs)), list(self._copies), {}
        try:
            while waiting or running:
                while waiting and free:
                    copy, job = free.pop(), waiting.pop()
                    running[self._start(job, copy)] = job, copy, time.monotonic()
                time.sleep(0.05)
                for process, (job, copy, started) in list(running.items()):
                    seconds = time.monotonic() - started
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if not ended and seconds < job.limit:
                        continue
                    _kill_group(process)  # what it has started goes with it
                    if not ended:
                        os.waitpid(process, 0)
                    del running[process]
                    free.append(copy)
                    self._restore(job, copy)
                    yield job, _outcome(job, copy, status if ended else None, seconds)
        finally:
            for process in running:
                _kill_group(process)

    def _start(self, job: _Job, copy: pathlib.Path) -> int:
        if job.mutant is not None:
            place = copy / "tfx_jax" / job.mutant.file
            place.write_text(mutated(self._root, job.mutant))
            os.utime(place, (0, 0))  # a mutant as long as the original, of the same second, would be taken for it
        process = os.fork()
        if process == 0:
            try:
                os.setsid()
                os._exit(_run_tests(job, copy))
            except BaseException:  # whatever happens, this process must not go on as if it were the first
                traceback.print_exc()
                os._exit(pytest.ExitCode.INTERNAL_ERROR)
        return process

    def _restore(self, job: _Job, copy: pathlib.Path) -> None:
        if job.mutant is not None:
            place = pathlib.Path("tfx_jax", job.mutant.file)
            shutil.copy2(self._root / place, copy / place)


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
    # With the time of its source, so that a file that is restored is not taken for one that changed.
    subprocess.run([sys.executable, "-m", "compileall", "-q", copy / "tfx_jax"], check=True)


class _Failures:
    """Keeps those tests that were asked for, and the names of those that fail."""

    def __init__(self, tests: Sequence[str]):
        self._words: dict[str, list[str]] = {}
        for file, word in map(_file_and_word, tests):
            self._words.setdefault(file, []).append(word)
        self.names: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left = [], []
        for item in items:
            file, _, name = item.nodeid.partition("::")
            words = self._words.get(file.removeprefix("tests/"), [])
            (kept if any(word in name for word in words) else left).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.names.append(report.nodeid + _WHEN_IMPORTED)


def _run_tests(job: _Job, copy: pathlib.Path) -> int:
    """In the fork: pytest's exit status; the names of tests that failed are left in a file."""
    output = os.open(f"{copy}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    sys.dont_write_bytecode = True  # nor may a mutant be taken for the original, or for another mutant
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(copy), *sys.path]
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    importlib.invalidate_caches()
    assert pathlib.Path(importlib.import_module("tfx_jax.errors").__file__ or "").is_relative_to(copy)
    files = dict.fromkeys(f"tests/{_file_and_word(test)[0]}" for test in job.tests)
    failures = _Failures(job.tests)
    # Plugins are imported already, so pytest cannot rewrite their assertions: nobody misses that.
    quietly = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    options = [*(["-x"] if job.mutant else []), "-q", "-m", "not slow", "-p", "no:xdist", "-W", quietly]
    status = pytest.main([*options, f"--rootdir={copy}", "-c", f"{copy}/pyproject.toml", *files], plugins=[failures])
    pathlib.Path(f"{copy}.json").write_text(json.dumps(failures.names))
    sys.stdout.flush()
    return int(status)


def _outcome(job: _Job, copy: pathlib.Path, status: int | None, seconds: float) -> Outcome:
    if status is None:
        return Outcome("timed out", seconds, ())
    report = pathlib.Path(f"{copy}.json")
    names = json.loads(report.read_text()) if report.exists() else []
    report.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    what = job.mutant.title if job.mutant else "no mutant"
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        raise SystemExit(f"{what}: its tests were killed by another program, or for lack of memory; begin again there")
    if code in _NO_TESTS:
        raise SystemExit(f"{what}: pytest ran no tests of {job.tests}:\n{pathlib.Path(f'{copy}.log').read_text()}")
    return Outcome("survived" if code == 0 else "killed", seconds, tuple(names or (["a crash"] if code < 0 else [])))


def _file_and_word(test: str) -> tuple[str, str]:
    file, _, word = test.partition(" -k ")
    return file, word


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def as_json(outcomes: dict[Mutant, Outcome]) -> list[dict[str, Any]]:
    """One entry for each mutant."""
    return [{"file": m.file, "name": m.name, **outcome._asdict()} for m, outcome in outcomes.items()]
