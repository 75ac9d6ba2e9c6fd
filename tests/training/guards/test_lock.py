"""One training at a time in a workdir, and disks and stores that fail as one line."""

import errno
import os
import subprocess
import sys

import pytest
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.guards.lock import locked, report_storage_errors


def test_second_one_is_told_who_holds_it_and_the_lock_dies_with_its_process(tmp_path):
    program = f"""
import time
from etils import epath
from tfx_jax.training.guards.lock import locked
with locked(epath.Path({str(tmp_path)!r})):
    print("locked", flush=True)
    time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        message = rf"is in use by process {process.pid} on .*: wait until it ends, or use another workdir"
        with pytest.raises(UserError, match=message), locked(epath.Path(tmp_path)):
            pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with locked(epath.Path(tmp_path)):
        pass
    with locked(epath.Path(tmp_path)):  # and it is given back
        pass


def test_object_stores_have_no_lock():
    with locked(epath.Path("gs://bucket/run")):
        pass


def test_full_disk_is_one_line(tmp_path):
    path = str(tmp_path / "config.json")
    with (
        pytest.raises(
            UserError, match=rf"cannot write {path} \(No space left on device\): free disk space and rerun the same"
        ),
        report_storage_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.ETIMEDOUT])
def test_a_disk_that_fails_is_one_line(tmp_path, number):
    path, reason = str(tmp_path / "part-3"), os.strerror(number)
    message = rf"^{path}: {reason}: fix this and rerun the same command$"
    with pytest.raises(UserError, match=message), report_storage_errors(tmp_path):
        raise OSError(number, reason, path)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ConnectionError("a peer"), KeyError("x")]
)
def test_what_no_disk_raises_is_left_to_others(tmp_path, error):
    for workdir in (tmp_path, "gs://bucket/run"):
        with pytest.raises(type(error)), report_storage_errors(workdir):
            raise error


@pytest.mark.parametrize("module", ["gcsfs.retry", "google.api_core.exceptions", "aiohttp.client_exceptions"])
def test_a_store_that_fails_is_one_line(tmp_path, module):
    error = type("HttpError", (Exception,), {"__module__": module})("Rate limit\nexceeded, 429")
    message = r"^gs://bucket/run cannot be reached \(Rate limit exceeded, 429\): rerun the same command$"
    with pytest.raises(UserError, match=message), report_storage_errors("gs://bucket/run"):
        raise error
    with pytest.raises(type(error)), report_storage_errors(tmp_path):
        raise error
