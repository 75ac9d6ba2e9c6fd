"""Several processes: how they find each other, train as one, stop as one, and what they leave on disk."""

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.training.tiny import tiny_config, train
from tfx_jax.errors import UserError
from tfx_jax.training import loop
from tfx_jax.training.checkpoint.checkpoints import Checkpoints, load_params
from tfx_jax.training.config import check_config, save_config
from tfx_jax.training.sharding import distributed
from tfx_jax.training.sharding import distributed as agreement
from tfx_jax.training.sharding.distributed import check_agreement, gather_lists, initialize_from_env, library
from tfx_jax.training.sharding.strategies import with_shardings
from tfx_jax.training.step import TrainState


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", None, None), "--num-processes and --process-id missing: --coordinator, .* must be given together"),
        ((None, 2, 0), "--coordinator missing"),
        (("a", 2, 0), "--coordinator=a must be HOST:PORT"),
        (("a:b", 2, 0), "--coordinator=a:b must be HOST:PORT"),
        (("a:1", 2, 2), "--process-id=2 must be at least 0 and below --num-processes=2"),
        (("a:1", 0, 0), "--process-id=0 must be at least 0 and below --num-processes=0"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(UserError, match=message):
        initialize_from_env(*arguments)


def test_nothing_happens_alone(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("not alone"))
    initialize_from_env()
    initialize_from_env("host:1", 1, 0)


SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({}, None),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, "a Slurm step"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell inside an allocation of two tasks
        (SLURM, None),  # the batch script itself, outside srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "a TPU slice"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),  # one host, a notebook's for example
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1", "TPU_WORKER_HOSTNAMES": "a"}, "a TPU slice"),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, "a TPU slice"),
        (POD, None),  # any pod, a notebook's for example
        (POD | {"JOB_COMPLETION_INDEX": "3"}, "a Kubernetes job"),
    ],
)
def test_signs_of_several_processes(monkeypatch, environment, cluster):
    """As if everything were installed that each of them needs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("libtpu", "kubernetes"))
    assert distributed._cluster(environment) == cluster


def test_a_job_without_the_kubernetes_package_trains_alone_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert distributed._cluster(POD | {"JOB_COMPLETION_INDEX": "3"}) is None
    assert "pod 3 of a job trains without the other pods: install jax[k8s]" in caplog.text


def test_cluster_that_jax_cannot_join_is_one_line(monkeypatch):
    def initialize():
        raise ValueError("coordinator_address should be defined.")  # as JAX says under Open MPI 5

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^Open MPI was found, but JAX cannot join its processes \(coordinator_"):
        initialize_from_env()


def test_process_0_that_never_comes_is_one_line():
    with socket.socket() as listener:  # bound, but not listening: no one else gets the port meanwhile
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"nothing listens at --coordinator=127.0.0.1:{port} \(.*start process 0"):
            distributed._await_listener("127.0.0.1", port, timeout=0.1)
        listener.listen()
        with pytest.raises(UserError, match=rf"another program listens at --coordinator=127.0.0.1:{port}: use another"):
            distributed._await_listener("127.0.0.1", port, answer_timeout=0.1)
        with pytest.raises(UserError, match=f"port {port} of --coordinator cannot be used .*: use another"):
            distributed._check_free(port)
    distributed._check_free(port)


def test_who_answers_as_jax_does_is_process_0_and_others_are_not():
    """An answer that comes in pieces, and one of HTTP/1."""
    said = [(b"\0\0\x06", b"\4\0\0\0\0\0"), (b"HTTP/1.1 400 Bad Request\r\n",)]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            for pieces in said:
                with listener.accept()[0] as connection:
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(0.05)
                    connection.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        distributed._await_listener("127.0.0.1", port)
        with pytest.raises(UserError, match=r": use another port$"):
            distributed._await_listener("127.0.0.1", port, answer_timeout=0.1)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: NCCL operation ncclGroupEnd() failed: remote error"), True),
        *[
            (jax.errors.JaxRuntimeError(f"{status}: the connection was lost"), True)
            for status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
        ],
        *[
            (jax.errors.JaxRuntimeError(f"{status}: of one program"), False)  # starting again would not help
            for status in ("RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT", "UNIMPLEMENTED")
        ],
        (ValueError("shapes differ"), False),
    ],
)
def test_which_errors_mean_that_a_process_is_gone(error, is_lost):
    assert distributed._is_connection_error(error) is is_lost


def test_the_last_line_of_a_process_is_safe_to_print(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", lambda status: None)
    distributed.leave("lost another process (\x1b[2Jhidden\n)", distributed.RESTART)
    assert capfd.readouterr().err == "tfx-jax: process 0 of 1: lost another process (\\x1b[2Jhidden\\n)\n"


def test_gathering_alone_changes_nothing():
    assert gather_lists(["a", "何"]) == ["a", "何"]


def test_another_process_must_see_the_same_configuration(tmp_path):
    with pytest.raises(
        UserError, match=r"has no config\.json, which process 0 has just written: .* that all processes share"
    ):
        check_config(tiny_config("text"), tmp_path)
    save_config(tiny_config("text"), tmp_path)
    check_config(tiny_config("text"), tmp_path)
    with pytest.raises(UserError, match="this process was started with num_steps=8, not 9 as process 0 was"):
        check_config(tiny_config("text", num_steps=8), tmp_path)


@pytest.mark.parametrize(
    ("others", "who"), [({1: "b"}, "process 1"), ({2: "b", 3: "c"}, "processes 2, 3")], ids=["one", "two"]
)
def test_processes_that_disagree_are_named(monkeypatch, others, who):
    codes = {process: zlib.crc32(code.encode()) for process, code in others.items()}

    def gather(mine):
        found = np.tile(mine, (4, 1))
        for process, code in codes.items():
            found[process, 1] = code
        return found

    check_agreement(lambda: pytest.fail("alone"))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(agreement, "gather_arrays", gather)
    with pytest.raises(
        UserError, match=rf"^the data of {who} differs from that of process 0: start all processes with the same$"
    ):
        check_agreement(lambda: {"the code": "a", "the data": "a"})
    codes.clear()
    check_agreement(lambda: {"the code": "a", "the data": "a"})


def test_the_code_is_known_by_every_line(tmp_path, monkeypatch):
    shutil.copytree(pathlib.Path(agreement.__file__).parents[2], tmp_path / "tfx_jax")
    monkeypatch.setattr(agreement, "__file__", str(tmp_path / "tfx_jax/training/sharding/distributed.py"))
    before = library.__wrapped__()
    assert before == library.__wrapped__()
    with (tmp_path / "tfx_jax" / "functional" / "masks.py").open("a") as file:
        file.write("\n")
    assert library.__wrapped__() != before


def run_pair(program, *arguments, devices=4):
    """Runs a program as two processes; returns their exit statuses and what they wrote to stderr."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    beginning = f"""
import json, os, sys
import jax
jax.config.update("jax_num_cpu_devices", {devices})
jax.config.update("jax_default_matmul_precision", "highest")
from tfx_jax.training.sharding.distributed import initialize_from_env
index, arguments = int(sys.argv[1]), sys.argv[2:]
initialize_from_env("127.0.0.1:{port}", 2, index)
initialize_from_env()  # the second call does nothing
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", beginning + program, str(index), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


TRAIN = """
from tests.training.tiny import tiny_config, train
from tfx_jax.training import loop
text, workdir, signum, changes = arguments
losses, log, add = {}, loop.Progress.log, loop.MetricAccumulator.add
def note(progress, step, scalars, **rest):
    losses[step] = scalars["train/loss"]
    log(progress, step, scalars, **rest)
def interrupt(meter, step, metrics):
    if index == 1 and step == 5 and int(signum):
        os.kill(os.getpid(), int(signum))
    return add(meter, step, metrics)
loop.Progress.log, loop.MetricAccumulator.add = note, interrupt
result = train(tiny_config(text, -1, **json.loads(changes)), workdir)
with open(f"{workdir}/losses.{index}", "w") as file:
    json.dump([losses, result.evaluations], file)
sys.exit(0 if result.signum is None else 128 + result.signum)
"""


@pytest.mark.slow
def test_two_processes_train_as_one(text, tmp_path, scalars):
    validation = {"validation": "validation.tsv"}
    alone = train(tiny_config(text, -1, **validation), tmp_path / "alone")
    statuses, errors = run_pair(TRAIN, text, tmp_path / "pair", 0, json.dumps(validation))
    assert statuses == [0, 0], errors
    losses = {step: logged["train/loss"] for step, logged in enumerate(scalars, 1)}
    for index in range(2):
        found, evaluations = json.loads((tmp_path / "pair" / f"losses.{index}").read_text())
        assert sorted(map(int, found)) == sorted(losses)
        np.testing.assert_allclose([found[str(step)] for step in losses], list(losses.values()), atol=1e-5, rtol=0)
        assert evaluations == alone.evaluations
    assert "step 9/9" in errors[0]
    assert "step" not in errors[1]  # one process speaks for all
    assert len(list((tmp_path / "pair" / "tensorboard").iterdir())) == 1
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        load_params(tmp_path / "pair"),
        load_params(tmp_path / "alone"),
    )
    # One process goes on where two have stopped.
    assert train(tiny_config(text, -1, num_steps=10, **validation), tmp_path / "pair").step == 10


EVALUATE = """
from tests.training.tiny import tiny_config
from tfx_jax.training.config import MeshConfig
from tfx_jax.training.loop import train
text, workdir, changes = arguments
config = tiny_config(text, **json.loads(changes))
config.mesh = MeshConfig(data=1, fsdp=8)
with open(f"{workdir}.{index}", "w") as file:
    json.dump(train(config, workdir).evaluations, file)
"""


@pytest.mark.slow
def test_two_processes_evaluate_together_what_neither_has_whole(text, tmp_path):
    changes = {"validation": "validation.tsv", "num_steps": 3}
    expected = loop.train(tiny_config(text, **changes), tmp_path / "alone").evaluations
    statuses, errors = run_pair(EVALUATE, text, tmp_path / "pair", json.dumps(changes))
    assert statuses == [0, 0], errors
    for index in range(2):
        (found,) = json.loads((tmp_path / f"pair.{index}").read_text())
        assert found == pytest.approx(expected[0], rel=1e-4)


DISAGREE = """
from tests.training.tiny import tiny_config, train
from tfx_jax.training import loop
if index == 1:
    loop.library = lambda: "another"
train(tiny_config(arguments[0]), arguments[1])
"""


@pytest.mark.slow
def test_two_processes_with_different_code_end_with_one_line_each(text, tmp_path):
    statuses, errors = run_pair(DISAGREE, text, tmp_path)
    assert statuses == [2, 2], errors
    line = "the code of process 1 differs from that of process 0: start all processes with the same\n"
    for index in range(2):
        assert f"tfx-jax: process {index} of 2: {line}" in errors[index]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_the_same_step(text, tmp_path):
    changes = json.dumps({"num_steps": 100_000, "log_every": 1_000, "checkpoint_every": 100_000})
    statuses, errors = run_pair(TRAIN, text, tmp_path, int(signal.SIGTERM), changes)
    assert statuses == [143, 143], errors
    assert "stopped, saved at step" in errors[0]
    (step,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert 5 <= step < 100_000
    load_params(tmp_path, step)


@pytest.mark.slow
def test_the_survivor_of_two_says_so_and_asks_to_be_restarted(text, tmp_path):
    # With one device each, the broken connection shows at once; else JAX aborts the survivor after 100 s.
    statuses, errors = run_pair(TRAIN, text, tmp_path, int(signal.SIGKILL), "{}", devices=1)
    assert statuses == [distributed.RESTART, -signal.SIGKILL], errors
    # Not always in the last line: JAX's own threads complain as well, and one may come after it.
    assert "\ntfx-jax: process 0 of 2: lost another process (" in "\n" + errors[0]
    assert "Traceback" not in errors[0]
    assert train(tiny_config(text, -1), tmp_path).step == 9


SPREAD = """
import numpy as np
from jax.sharding import AxisType, Mesh
from tfx_jax.arrays import to_host
from tfx_jax.training.sharding.strategies import held_batch_shards, make_mesh, process_shard, shard_batch
places = np.array([0, 1, 4, 5, 2, 3, 6, 7]).reshape(4, 1, 1, 1, 2)  # as in a row of two hosts that are tiles
mesh = Mesh(np.array(jax.devices())[places], make_mesh().axis_names, axis_types=(AxisType.Auto,) * 5)
assert process_shard(mesh) == (index, 2)
assert held_batch_shards(mesh) == ((0, 2), (1, 3))[index]
examples = np.arange(8 * 5).reshape(2, 4, 5)
batch = to_host(shard_batch({"source": examples[index]}, mesh))["source"]
np.testing.assert_array_equal(batch, examples.reshape(2, 2, 2, 5).swapaxes(0, 1).reshape(8, 5))
"""


@pytest.mark.slow
def test_batch_of_two_processes_whose_devices_alternate():
    statuses, errors = run_pair(SPREAD)
    assert statuses == [0, 0], errors


SAVE = """
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tfx_jax.training.checkpoint.checkpoints import Checkpoints
from tfx_jax.arrays import to_host
from tfx_jax.training.sharding.distributed import gather_lists
from tfx_jax.training.step import TrainState
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
values = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
def state(spec):
    whole = NamedSharding(mesh, P())
    table = jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])
    step = jax.make_array_from_callback((), whole, lambda index: np.int32(3))
    return TrainState(step, {"table": table}, (), (), {})
with Checkpoints(arguments[0]) as checkpoints:
    checkpoints.save(state(P("a", "b")), {"data": 7})
    checkpoints.wait()
    shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    restored, extra = checkpoints.restore_latest(jax.tree.map(shape_of, state(P("b"))))
assert extra == {"data": 7}
assert not restored.params["table"].is_fully_addressable
np.testing.assert_array_equal(to_host(restored.params)["table"], values)
assert gather_lists([f"何{number}" for number in range(index, 5, 2)]) == [f"何{number}" for number in range(5)]
"""


@pytest.mark.slow
def test_shards_of_two_processes_are_read_by_one(tmp_path):
    """Written by two processes, read by them on another mesh, and by one on a third."""
    statuses, errors = run_pair(SAVE, tmp_path)
    assert statuses == [0, 0], errors
    mesh = jax.make_mesh((3, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    shardings = TrainState(NamedSharding(mesh, P()), {"table": NamedSharding(mesh, P(None, ("b", "a")))}, (), (), {})
    shapes = TrainState(np.int32(0), {"table": np.zeros((16, 6), np.float32)}, (), (), {})
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore_latest(with_shardings(shapes, shardings))
    values = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    np.testing.assert_array_equal(restored.params["table"], values)
    np.testing.assert_array_equal(load_params(tmp_path)["table"], values)
