"""What tests compile: quickly, once, and not much of it.

Compiling is nearly all that these tests do. So XLA compiles with the least effort, what is compiled is kept for later
runs, and each test has a budget of programs: one that needs more says why, with `@pytest.mark.compiles(number, why)`.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import tempfile
from collections.abc import MutableMapping

import pytest

BUDGET = 20
"""How many programs a test may compile, or take from the cache, while it runs; fixtures are not counted.

A good test has one or two. The rest is for operations outside of programs that another test of the same worker may have
compiled before, or not: which one comes first differs from run to run.
"""

CACHE_BYTES = 3 << 30
"""How large the kept programs may become; the oldest make room."""

_COMPILED = "/jax/core/compile/backend_compile_duration"


def compile_quickly(environment: MutableMapping[str, str]) -> None:
    """Sets what makes XLA compile fast instead of making fast programs; call it before JAX is imported.

    Programs that tests start inherit it, so that they give the same bits. `JAX_DISABLE_MOST_OPTIMIZATIONS=0` brings
    ordinary compilation back.
    """
    environment.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # Eight devices share a few busy cores: XLA ends the process where one of them is 40 seconds late for the others.
    _add_flags(environment, "--xla_cpu_collective_call_terminate_timeout_seconds=300")
    _add_flags(environment, "--xla_cpu_collective_timeout_seconds=300")
    # The emitters of fusions take two thirds of a small program's time; newer versions cannot do without.
    if environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and _version("jaxlib") < (0, 11):
        # A program for several devices that comes out of the cache may run its collectives in another order on each of
        # them, and wait for ever, unless they have an order.
        _add_flags(
            environment,
            "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
            " --xla_cpu_enable_concurrency_optimized_scheduler=false",
        )
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # Else the path of the cache is part of each key, and nothing that another process kept is found.
    environment["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"


def _add_flags(environment: MutableMapping[str, str], flags: str) -> None:
    if flags not in environment.get("XLA_FLAGS", ""):
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(number) for number in importlib.metadata.version(package).split(".")[:2])


class SharedCache:
    """A folder of compiled programs that outlives a run and that several processes use at once.

    JAX does not write the files of its cache atomically. So each worker has a folder of its own, of hard links to what
    is kept; after each file of tests it gives away what is new and complete, and takes what the others gave.

    Args:
      kept: the folder that outlives the run; its name tells versions and processors apart.
    """

    def __init__(self, kept: pathlib.Path):
        self._kept = kept
        kept.mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="running-", dir=kept.parent))
        self._seen: set[str] = set()
        self.exchange()

    def exchange(self) -> None:
        """Keeps what this worker compiled, and links what others kept meanwhile."""
        mine, theirs = set(os.listdir(self.folder)), set(os.listdir(self._kept))
        for name in mine - theirs - self._seen:
            if _is_complete(self.folder / name):
                _link(self.folder / name, self._kept / name)
        for name in theirs - mine:
            _link(self._kept / name, self.folder / name)
        self._seen |= mine | theirs

    def pytest_runtest_teardown(self, item, nextitem):
        """Exchanges programs where a file of tests ends."""
        if nextitem is not None and nextitem.path != item.path:
            self.exchange()

    def pytest_unconfigure(self):
        """Keeps what is left, removes this worker's folder, and makes room where too much is kept."""
        self.exchange()
        shutil.rmtree(self.folder, ignore_errors=True)
        files = sorted((file.stat().st_mtime, file.stat().st_size, file.path) for file in os.scandir(self._kept))
        excess = sum(size for _, size, _ in files) - CACHE_BYTES
        for _, size, path in files:
            if excess <= 0:
                break
            pathlib.Path(path).unlink(missing_ok=True)
            excess -= size


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # another worker was faster, or made room
        os.link(source, target)


def _is_complete(path: pathlib.Path) -> bool:
    """Whether the program that wrote this file had finished: some tests kill programs."""
    from jax._src.compilation_cache import decompress_executable

    try:
        return bool(decompress_executable(path.read_bytes()))
    except Exception:  # each of the codecs that JAX may have chosen raises its own
        return False


def kept_folder() -> pathlib.Path:
    """Names the folder for these versions on this processor; `TFX_JAX_TEST_CACHE` moves it."""
    root = os.environ.get("TFX_JAX_TEST_CACHE") or pathlib.Path.home() / ".cache" / "tfx_jax" / "tests"
    cpu = pathlib.Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    versions = [platform.python_version(), *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))]
    told_apart = hashlib.sha256(repr((versions, flags, platform.machine())).encode()).hexdigest()[:12]
    return pathlib.Path(root) / told_apart


class CompileBudget:
    """Counts the programs that each test compiles, and fails a test that compiles too many."""

    def __init__(self) -> None:
        import jax

        self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: object) -> None:
        if event == _COMPILED:
            self._programs += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = self._programs
        result = yield
        used = self._programs - before
        mark = item.get_closest_marker("compiles")
        if mark is not None and (len(mark.args) != 2 or not isinstance(mark.args[0], int) or not mark.args[1]):
            pytest.fail("say how many programs and why: @pytest.mark.compiles(number, 'reason')", pytrace=False)
        budget = BUDGET if mark is None else mark.args[0]
        if used > budget and _version("jax") < (0, 11):  # another JAX compiles other crumbs: one stack counts
            pytest.fail(
                f"compiled {used} programs, {budget} are allowed: jit what runs eagerly, share what is compiled, or say"
                " why not with @pytest.mark.compiles(number, 'reason')",
                pytrace=False,
            )
        return result
