"""The process of a command where libtpu is installed and no TPU is there."""

import os
import subprocess
import sys

import pytest

from tfx_jax.cli.support import options
from tfx_jax.planning.topologies import ENVIRONMENT

PROGRAM = """
from tfx_jax.cli.support.options import set_up_program
set_up_program()
import jax
print(jax.default_backend())
"""


@pytest.mark.parametrize("has_tpu", [False, True])
@pytest.mark.parametrize("has_libtpu", [False, True])
def test_libtpu_is_quiet_on_machines_without_a_tpu(monkeypatch, has_tpu, has_libtpu):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_LOG_DIR", "mine")
    monkeypatch.setattr(options, "has_tpu", lambda: has_tpu)
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: has_libtpu)
    options.quiet_libtpu()
    expected = ENVIRONMENT if has_libtpu and not has_tpu else {}
    expected = {**expected, "TPU_LOG_DIR": "mine"}
    assert {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} == expected


@pytest.mark.aot
def test_installed_libtpu_prints_nothing():
    pytest.importorskip("libtpu")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_PLATFORMS"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("cpu\n", "")
