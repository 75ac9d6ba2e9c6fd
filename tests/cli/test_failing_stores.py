"""Disks and stores that fail while they are read: one line that names the file or the store, whatever reads there."""

import errno
import io
import os
import sys
import types

import fsspec
import fsspec.config
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem

from tests.training.tiny import tiny_config, write_text
from tfx_jax.cli import main
from tfx_jax.training.config import save_config

READING = ["translate", "evaluate", "predict", "average", "attend"]
_failing = {}  # what is raised, by the end of the path that is opened


@pytest.fixture(scope="module", autouse=True)
def _hook():
    """There is no taking an audit hook away; without an entry it does nothing."""

    def raise_if_asked(event, arguments):
        if _failing and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            for end, error in _failing.items():
                if path.endswith(end):
                    raise error(path)

    sys.addaudithook(raise_if_asked)


@pytest.fixture
def failing():
    yield _failing
    _failing.clear()


@pytest.fixture
def fails(capfd, monkeypatch):
    """`fails(verb, workdir)`: the one line that a verb ends with."""
    monkeypatch.delenv("TFX_JAX_TRACEBACK", raising=False)

    def run(verb, *options):
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"w1 w2\n")))
        assert main([verb, *options, *(["--source=w1", "--output=x.png"] if verb == "attend" else [])]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line.removeprefix(f"tfx-jax {verb}: ")

    return run


@pytest.fixture
def workdir(tmp_path):
    """What verbs read before the first checkpoint: of a training that has not saved."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_text(tmp_path)
    save_config(tiny_config(tmp_path), folder)
    (folder / "artifacts.json").write_text("{}")
    return folder


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("file", ["config.json", "artifacts.json"])
def test_what_cannot_be_read_is_not_called_damaged(workdir, fails, failing, number, file):
    failing[file] = lambda path: OSError(number, os.strerror(number), path)
    for verb in READING[: None if file == "config.json" else 2]:
        assert fails(verb, f"--workdir={workdir}") == f"cannot read {workdir / file}: {os.strerror(number)}"


class Store(LocalFileSystem):
    """A store that is a folder, with the errors of another: `gs://bucket/run` is the folder's `run`."""

    protocol = ("gs", "gcs")
    cachable = False
    root = None

    def __init__(self, **options):
        type(self).options = options
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path):
        return os.fspath(path).replace("gs://bucket", str(cls.root))


@pytest.fixture
def store(tmp_path, monkeypatch):
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gcs", Store)
    fsspec.config.conf.pop("gcs", None)
    monkeypatch.setattr(Store, "root", tmp_path)
    yield Store
    fsspec.config.conf.pop("gcs", None)
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()


CLIENTS = ["gcsfs.retry", "google.auth.exceptions", "aiohttp.client_exceptions", "fsspec.exceptions"]


@pytest.mark.parametrize("base", [Exception, OSError])
@pytest.mark.parametrize("module", CLIENTS)
def test_a_store_that_fails_under_any_verb(workdir, store, fails, failing, module, base):
    error = type("HttpError", (base,), {"__module__": module})
    failing["config.json"] = lambda path: error("made to\nfail\x1b[2J, 500")
    advice = "check the network and rerun the same command"
    for verb in READING:
        line = fails(verb, "--workdir=gs://bucket/run")
        if base is OSError:
            assert line == "cannot read gs://bucket/run/config.json: made to fail\\x1b[2J, 500"
        else:
            assert line == rf"a remote store cannot be reached (made to fail\x1b[2J, 500): {advice}"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (type("HttpError", (Exception,), {"__module__": "gcsfs"})("500,\nmade to fail"), "500, made to fail"),
        (ConnectionError("Connect call failed"), "Connect call failed"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_store_of_which_nothing_is_known(store, fails, monkeypatch, error, told):
    def exists(self, path):
        raise error

    monkeypatch.setattr(Store, "exists", exists)
    for verb in ("translate", "average"):
        assert fails(verb, "--workdir=gs://bucket/run") == f"gs://bucket/run cannot be reached ({told})"


def test_no_request_waits_for_ever(store, fails, failing, monkeypatch):
    monkeypatch.delenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", raising=False)
    monkeypatch.delenv("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", raising=False)
    assert fails("translate", "--workdir=gs://bucket/run").startswith("gs://bucket/run has no config.json")
    assert store.options["requests_timeout"] == 20
    assert os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] == "20"
    monkeypatch.delenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS")
    monkeypatch.delenv("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES")
