"""TPU slices and GPUs that are not there: how many devices and hosts, and that having them changes nothing here."""

import importlib.util
import os
import signal
import subprocess
import sys

import jax
import pytest

from tfx_jax.errors import UserError
from tfx_jax.planning import topologies


@pytest.mark.aot
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("topology", topologies.TOPOLOGIES)
def test_slices_have_a_device_for_each_core_of_their_hosts_of_four_chips(tpu_devices, topology, num_slices):
    generation, shape = topology.split(":")
    chips = num_slices
    for size in shape.split("x"):
        chips *= int(size)
    devices = tpu_devices(topology, num_slices)
    assert len(devices) == len({device.id for device in devices}) == chips * (2 if generation == "tpu7x" else 1)
    assert {device.platform for device in devices} == {"tpu"}
    assert {device.process_index for device in devices} == set(range(max(chips // 4, num_slices)))
    assert {getattr(device, "slice_index", 0) for device in devices} == set(range(num_slices))


@pytest.mark.aot
def test_devices_of_this_machine_and_its_environment_stay_what_they_are(tpu_devices, monkeypatch):
    for name in topologies.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    before = dict(os.environ), jax.devices()
    topologies.tpu_devices("v5e:4x4")
    assert (dict(os.environ), jax.devices()) == before
    assert jax.default_backend() == "cpu"


@pytest.mark.aot
def test_several_processes_may_load_libtpu_at_once(tpu_devices):
    tpu_devices("v5e:2x2")
    program = "from tfx_jax.planning.topologies import tpu_devices; print(len(tpu_devices('v5e:4x4')))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert other.stdout == "16\n", other.stderr


@pytest.mark.aot
def test_sigterm_prints_no_stack_trace(tpu_devices):
    """libtpu handles signals unless it is told not to; flags of the user are passed on."""
    program = (
        "import os, signal\nfrom tfx_jax.planning import topologies\ntopologies.tpu_devices('v5e:2x2')\n"
        "assert os.environ['LIBTPU_INIT_ARGS'] == '--xla_tpu_scoped_vmem_limit_kib=20000'\n"
        "signal.raise_signal(signal.SIGTERM)"
    )
    flags = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=20000"}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | flags
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


@pytest.mark.aot
def test_with_the_cpu_as_platform_python_is_quiet():
    """Without it, JAX looks for TPUs and libtpu warns that there are none."""
    pytest.importorskip("libtpu")
    program = "import tfx_jax.planning, jax; print(jax.devices()[0].platform)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("cpu\n", "")


def test_topology_that_does_not_exist_is_one_line():
    with pytest.raises(
        UserError,
        match=r"^unknown topology v5e:3x5: use one of v4:2x2x1, .*, tpu7x:8x8x8, or for GPUs a name such as "
        r"h100:1x8x8$",
    ):
        topologies.tpu_devices("v5e:3x5")


@pytest.mark.parametrize("topology", ["tpu8i:4x1x1", "tpu8t:2x2x1"])
def test_a_tpu_that_libtpu_does_not_describe_is_one_line(topology):
    message = rf"^{topology} cannot be planned: JAX knows this TPU, but no libtpu .*; use one of v4:2x2x1, "
    with pytest.raises(UserError, match=message):
        topologies.absent_devices(topology)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["tpu8i:4x1x1", "tpu8t:2x2x1"])
def test_libtpu_does_not_describe_it(tpu_devices, monkeypatch, topology):
    """Once this fails, plan it: `TOPOLOGIES`, its speeds in `CHIPS` and its peak."""
    monkeypatch.setattr(topologies, "_UNDESCRIBED", ())
    monkeypatch.setattr(topologies, "TOPOLOGIES", (topology,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Invalid TPU external name"):
        topologies.tpu_devices(topology)


def test_missing_libtpu_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'^v5e:4x4 needs libtpu: pip install "tfx-jax\[plan\] @ git\+https'):
        topologies.tpu_devices("v5e:4x4")


@pytest.mark.parametrize("topology", ["h100", "h100:8x8", "h200:1x0x8", "h100:1x2x9", "h100:1x8x8x", "h100:axbxc"])
def test_nodes_that_do_not_exist_are_one_line(topology):
    with pytest.raises(
        UserError,
        match=rf"^unknown topology {topology}: GPU topologies \(h100, h200\) are slices x nodes x GPUs per node",
    ):
        topologies.absent_devices(topology)


def test_slices_of_gpus_are_said_once():
    with pytest.raises(UserError, match=r"^h100:1x2x8 includes the number of slices"):
        topologies.absent_devices("h100:1x2x8", 2)


def test_missing_cuda_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'^h100:1x8x8 needs JAX for CUDA: pip install "tfx-jax\[plan-cuda\] @ git'):
        topologies.absent_devices("h100:1x8x8")


@pytest.mark.aot
@pytest.mark.parametrize(("topology", "num_hosts", "num_gpus"), [("h100:1x1x1", 1, 1), ("h200:2x3x8", 6, 8)])
def test_nodes_have_a_device_for_each_gpu(gpu_devices, topology, num_hosts, num_gpus):
    devices = gpu_devices(topology)
    assert [device.process_index for device in devices] == [host for host in range(num_hosts) for _ in range(num_gpus)]
    assert [device.id for device in devices] == [*range(num_hosts * num_gpus)]
    assert {device.platform for device in devices} == {"gpu"}
    assert jax.default_backend() == "cpu"
