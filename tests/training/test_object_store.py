"""A training in a bucket: saved, resumed and read there, and one line where the store fails, wherever it does."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import time
import types

import chex
import fsspec.config
import pytest
from etils.epath import backend
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from tests.training.object_store import Server, serve
from tests.training.tiny import tiny_config, train
from tfx_jax import cli
from tfx_jax.errors import UserError
from tfx_jax.files import absolute
from tfx_jax.training.checkpoint import checkpoints as checkpoint
from tfx_jax.training.checkpoint.checkpoints import average_checkpoints, load_params
from tfx_jax.training.reporting.loggers import Sink

RUN = "gs://bucket/run"
# What writes TensorBoard's file to a store tries for two minutes, too.
NO_RECORDS = "tfx_jax.training.reporting.progress.TensorBoard", lambda *_, **__: Sink()
FAILURES = {503: "made to fail, 503", 401: "made to fail, 401", 0.0: "Server disconnected", 3.0: "FSTimeoutError"}


def test_the_whole_path_of_a_store_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert os.fspath(absolute(RUN)) == RUN
    assert os.fspath(absolute("run")) == f"{tmp_path}/run"


def test_no_room_helps_where_a_store_fails():
    error = ValueError(f'ABORTED: Error opening "zarr3" driver: Error reading {RUN}/checkpoints/6: HTTP 503')
    assert checkpoint._remedy(error) == "fix this"


@contextlib.contextmanager
def a_store(port=0):
    with serve(port) as server, a_client(server.url):
        yield server


@contextlib.contextmanager
def a_client(url):
    """Whoever asks a store waits less before trying again, and tensorstore tries twice; by itself for 15 minutes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        patch.setitem(fsspec.config.conf, "gcs", {"token": "anon", "requests_timeout": 2})
        patch.setattr("gcsfs.retry.random", types.SimpleNamespace(random=lambda: -100.0))
        for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
            patch.setitem(context, "gcs_request_retries", {"max_retries": 2, "initial_delay": "1ms"})
        _forget()
        yield
        _forget()


def _forget():
    gcs_utils.get_bucket.cache_clear()
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    fsspec.get_filesystem_class("gcs").clear_instance_cache()


@pytest.fixture(scope="module")
def port():
    """One for all tests: tensorstore asks where the store is once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which speaks gRPC
        pytest.importorskip("gcsfs")
        with Server() as server:
            found = server.server_address[1]
        yield found


@pytest.fixture
def store(port, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with a_store(port) as server:
        yield server


@pytest.mark.slow
def test_a_training_in_a_bucket_is_that_of_a_folder(store, text, tmp_path, capfd, monkeypatch):
    train(tiny_config(text, num_steps=3), RUN)
    assert train(tiny_config(text, num_steps=6), RUN).step == 6
    assert "resuming at step 3" in capfd.readouterr().err
    assert [path for path in tmp_path.iterdir() if path.name.startswith("gs:")] == []
    train(tiny_config(text, num_steps=6), tmp_path / "run")
    for step in (3, 6):
        chex.assert_trees_all_equal(load_params(RUN, step), load_params(tmp_path / "run", step))
    for run in (RUN, tmp_path / "run"):
        assert average_checkpoints(run, 2) == [3, 6]
    chex.assert_trees_all_equal(load_params(RUN, "average"), load_params(tmp_path / "run", "average"))
    assert not [name for name in store.objects if "tmp" in name or name.endswith(".partial")]
    # It is all there, and cannot be reached.
    store.fails, store.fails_at = 503, "checkpoints/6/"
    with pytest.raises(UserError) as caught:
        train(tiny_config(text, num_steps=9), RUN)
    assert str(caught.value) == f"{RUN} cannot be reached (made to fail, 503): rerun the same command"


@pytest.mark.slow
@pytest.mark.parametrize("how", [*FAILURES, None])
def test_a_store_that_fails_from_the_start(store, text, how):
    store.fails, started = how, time.monotonic()
    if how is None:
        store.shutdown()
        store.server_close()
    with pytest.raises(UserError) as caught:
        train(tiny_config(text, num_steps=3), RUN)
    assert time.monotonic() - started < 30
    assert str(caught.value).startswith(f"{RUN} cannot be reached ({FAILURES.get(how, 'Cannot connect to host')}")
    assert "\n" not in str(caught.value)


def fail_in_saves(text):
    """Prints what each training says, and ends the process, which Orbax's threads keep for five minutes."""
    with pytest.MonkeyPatch.context() as patch, a_store() as server:
        patch.setattr(*NO_RECORDS)
        for server.fails in FAILURES:
            server.objects.clear()
            server.fails_at = "POST /upload/storage/v1/b/bucket/o?name=run/checkpoints/3"
            started = time.monotonic()
            try:
                train(tiny_config(text, num_steps=3), RUN)
            except UserError as error:
                print(error, time.monotonic() - started < 30, flush=True)
            server.fails = None
            _forget()
    os._exit(0)


@pytest.mark.slow
def test_a_store_that_fails_in_a_save(port, text):
    with started("fail_in_saves", text) as process:
        told, problem = process.communicate(timeout=200)
    said = [f"{RUN} cannot be reached ({told}): rerun the same command True" for told in FAILURES.values()]
    assert told.splitlines() == said, problem


@contextlib.contextmanager
def started(function, *arguments):
    """A process of its own that calls a function of this file."""
    program = f"import sys; from tests.training import test_object_store; test_object_store.{function}(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def train_as_a_program(text, url, experiment):
    """`tfx-jax train`, from the start of a process to its end."""
    pathlib.Path(experiment).write_text(
        f"from tests.training.tiny import tiny_config\nget_config = lambda: tiny_config({text!r}, num_steps=6)\n"
    )
    with pytest.MonkeyPatch.context() as patch, a_client(url):
        patch.setattr(*NO_RECORDS)
        patch.setattr("tfx_jax.cli.train.train", train)
        patch.setattr(sys, "argv", ["tfx-jax", "train", f"--config={experiment}", f"--workdir={RUN}"])
        status = cli.main()
    sys.exit(status)


@pytest.mark.slow
def test_a_program_whose_save_failed_ends_soon_and_loses_nothing(store, text, tmp_path, capfd):
    train(tiny_config(text, num_steps=3), RUN)
    saved = {name: content for name, content in store.objects.items() if "/checkpoints/3/" in name}
    # While folders are made: what waits for them is told nothing, and Orbax gives that up after five minutes.
    store.fails, store.fails_at = 503, "/run/checkpoints/6/params"
    with started("train_as_a_program", text, store.url, tmp_path / "mine.py") as process:
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if line.startswith("tfx-jax train:"))
        said = time.monotonic()
        assert process.wait(timeout=30) == 2
        assert time.monotonic() - said < 12
    # Of two clients that ask for the same, whichever is the first.
    told = rf"{RUN} cannot be reached .*:|cannot save step 6 in {RUN}/.*; the last good .* step 3; fix this and"
    assert re.fullmatch(f"tfx-jax train: ({told}) rerun the same command\n", line), line
    store.fails = None
    assert saved == {name: store.objects[name] for name in saved}
    _forget()
    capfd.readouterr()
    assert train(tiny_config(text, num_steps=6), RUN).step == 6
    assert "resuming at step 3" in capfd.readouterr().err
