"""A training in a bucket: saved, gone on with and read there, and one line where the store fails, wherever it does."""

import contextlib
import os
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
from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint import average_checkpoints, load_params
from tfx_jax.training.workdir import absolute

RUN = "gs://bucket/run"
FAILURES = {503: "made to fail, 503", 401: "made to fail, 401", 0.0: "Server disconnected", 3.0: "FSTimeoutError"}


def test_the_whole_path_of_a_store_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert os.fspath(absolute(RUN)) == RUN
    assert os.fspath(absolute("run")) == f"{tmp_path}/run"


@contextlib.contextmanager
def a_store(port=0):
    """Whoever asks it waits less before trying again, and tensorstore tries twice; by itself it does for 15 minutes."""
    with pytest.MonkeyPatch.context() as patch, serve(port) as server:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, server.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        patch.setitem(fsspec.config.conf, "gcs", {"token": "anon", "requests_timeout": 2})
        patch.setattr("gcsfs.retry.random", types.SimpleNamespace(random=lambda: -100.0))
        for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
            patch.setitem(context, "gcs_request_retries", {"max_retries": 2, "initial_delay": "1ms"})
        _forget()
        yield server
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
    assert str(caught.value) == f"{RUN} cannot be reached (made to fail, 503): run the same command again"


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
    # What writes TensorBoard's file to a store tries for two minutes, too.
    with pytest.MonkeyPatch.context() as patch, a_store() as server:
        patch.setattr("tfx_jax.training.progress.Progress._open_records", lambda *_: None)
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
    program = "import sys; from tests.training.test_object_store import fail_in_saves; fail_in_saves(sys.argv[1])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", program, str(text)], env=environment, capture_output=True, text=True, timeout=200
    )
    said = [f"{RUN} cannot be reached ({told}): run the same command again True" for told in FAILURES.values()]
    assert ended.stdout.splitlines() == said, ended.stderr
