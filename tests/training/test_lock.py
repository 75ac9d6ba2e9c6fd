"""One training at a time in a workdir, and a full disk as one line."""

import errno
import pathlib
import subprocess
import sys

import pytest
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.lock import locked, report_disk_full


def test_second_one_is_told_who_holds_it_and_the_lock_dies_with_its_process(tmp_path):
    program = f"""
import time
from etils import epath
from tfx_jax.training.lock import locked
with locked(epath.Path({str(tmp_path)!r})):
    print("locked", flush=True)
    time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        message = rf"is in use by process {process.pid} on .*: wait until it ends, or take another --workdir"
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
        pytest.raises(UserError, match=rf"cannot write {path} \(No space left on device\): make room and run the same"),
        report_disk_full(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", path)
    with pytest.raises(FileNotFoundError), report_disk_full(tmp_path):
        (pathlib.Path(tmp_path) / "nothing").read_text()
