"""Processes of a distributed run: initialization, agreement, collective file access, and joint exit.

With one process, all of this does nothing and costs nothing.
"""

import contextlib
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import pathlib
import platform
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from tfx_jax.errors import UserError, printable

RESTART = 75
"""Exit status of a process that hung or lost another one: EX_TEMPFAIL, start all of them again."""


def initialize_from_env(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes of a training; call it before anything asks for a device.

    With the three arguments, those are used. Without, JAX finds them by itself on Cloud TPU, under Slurm, Open MPI and
    Kubernetes, and is asked to only where there are signs of more than one process: a laptop, a notebook, a single TPU
    VM or a shell inside somebody's allocation train alone. The second call does nothing.

    Args:
      coordinator_address: "HOST:PORT" of process 0, where it will listen.
      num_processes: of all hosts together.
      process_id: 0 to num_processes - 1.

    Raises:
      UserError: for some arguments without the others, impossible ones, or if the processes do not find each other.
    """
    given = {"--coordinator": coordinator_address, "--num-processes": num_processes, "--process-id": process_id}
    if coordinator_address is None or num_processes is None or process_id is None:
        missing = [name for name, value in given.items() if value is None]
        if len(missing) < len(given):
            raise UserError(f"{' and '.join(missing)} missing: {', '.join(given)} go together")
        cluster = None if jax.distributed.is_initialized() else _cluster(os.environ)
        if cluster is not None:
            _connect(f"{cluster} was found, but JAX cannot join its processes", "pass " + ", ".join(given))
        return
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator={coordinator_address} is not HOST:PORT, a port being 1 to 65535")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process-id={process_id} is not one of 0 to --num-processes={num_processes} - 1")
    if num_processes > 1 and not jax.distributed.is_initialized():
        if process_id:
            _await_listener(host, int(port))
        else:
            _check_free(int(port))
        _connect(
            f"process {process_id} cannot join the others at {coordinator_address}",
            "can the hosts reach one another?",
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
        )


def _check_free(port: int) -> None:
    """JAX itself would join any process that listens there, such as another run."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(f"port {port} of --coordinator cannot be used ({error.strerror}): take another") from None


def _await_listener(host: str, port: int, seconds: float = 300.0, patience: float = 10.0) -> None:
    """Waits until process 0 listens: JAX waits as long, but then aborts with the stack of its C++ code.

    Args:
      host: of process 0.
      port: where it will listen.
      seconds: after which no one will.
      patience: seconds after which who listens, and answers nothing that JAX would, is somebody else.
    """
    end, heard = time.monotonic() + seconds, math.inf
    while True:
        try:
            with socket.create_connection((host.strip("[]"), port), timeout=min(5.0, patience)) as connection:
                heard = min(heard, time.monotonic())
                if _is_coordinator(connection):
                    return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"nothing listens at --coordinator={host}:{port} ({error}): start process 0") from None
        if time.monotonic() > heard + patience:
            raise UserError(f"what listens at --coordinator={host}:{port} is no training: take another port")
        time.sleep(0.5)


def _is_coordinator(connection: socket.socket) -> bool:
    """Whether the other side speaks HTTP/2, as JAX's service does: there each begins with its settings (RFC 9113)."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    with connection.makefile("rb") as answer:
        return answer.read(9)[3:4] == b"\4"


def _connect(what: str, remedy: str, **arguments: Any) -> None:
    try:
        jax.distributed.initialize(**arguments)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{what} ({next(iter(str(error).splitlines()), '')}): {remedy}") from None


def _cluster(environment: Mapping[str, str]) -> str | None:
    """What says that this is one process of several, or None.

    JAX's own test is not enough: it takes any pod for a Kubernetes job, asks the metadata server of Google's cloud
    wherever there is a TPU, and under Slurm believes the allocation, where a shell in it is one process.
    """
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1 and "SLURM_PROCID" in environment:
        return "a Slurm step"
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if _is_tpu_slice(environment):
        return "a TPU slice"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if importlib.util.find_spec("kubernetes"):
            return "a Kubernetes job"
        logging.warning("pod %s of a job trains alone: jax[k8s] is missing", environment["JOB_COMPLETION_INDEX"])
    return None


def _is_tpu_slice(environment: Mapping[str, str]) -> bool:
    """Whether this host's TPUs belong to a slice of several hosts, or can be asked about it."""
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu") or not importlib.util.find_spec("libtpu"):
        return False
    if _number(environment, "MEGASCALE_NUM_SLICES") > 1:
        return True
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts is not None:
        return "," in hosts
    if "TPU_SKIP_MDS_QUERY" in environment or not glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"):
        return False
    # A TPU VM of the Compute Engine says nothing in its environment; its metadata server, which JAX asks, knows.
    with contextlib.suppress(OSError):
        return pathlib.Path("/sys/class/dmi/id/product_name").read_text().startswith("Google")
    return False


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def is_primary() -> bool:
    """Whether this process is the one that writes, logs and draws for all."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come here; `name` tells one place from another."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def process0_first(name: str) -> Iterator[None]:
    """Lets process 0 through the block first: what it makes there, the others find."""
    if not is_primary():
        wait_for_all(name)
    yield
    if is_primary():
        wait_for_all(name)


def gather_arrays(array: np.ndarray) -> np.ndarray:
    """Stacks the arrays, equal in shape and of at most 32 bits, that the processes pass: [processes, ...]."""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(jax.process_count(), *array.shape)


def gather_lists(mine: list[Any]) -> list[Any]:
    """Joins what the processes made of every `process_count`-th element each, in the order of all elements.

    Args:
      mine: JSON values for the elements process_index, process_index + process_count, ...
    """
    count = jax.process_count()
    if count == 1:
        return mine
    data = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    sizes = gather_arrays(np.array([data.size], np.int32))[:, 0]
    texts = gather_arrays(np.pad(data, (0, sizes.max() - data.size)))
    parts = [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]
    return [parts[index % count][index // count] for index in range(sum(map(len, parts)))]


@contextlib.contextmanager
def abort_together() -> Iterator[None]:
    """In a training of several processes, makes an error in one of them end all, at once and with one line each.

    A process that left in the ordinary way would wait for the others, which wait for it in a collective: five minutes,
    until JAX aborts them all. So it leaves without waiting; the others see the connection break, and leave with the
    status RESTART. Alone, errors are raised as usual.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, UserError):
            leave(str(error), 2)
        if isinstance(error, KeyboardInterrupt):
            leave("interrupted", 130)
        if _is_connection_error(error):
            leave(f"lost another process ({_first_line(error)}): start all of them again to go on", RESTART)
        traceback.print_exc()
        leave(f"{type(error).__name__}: {_first_line(error)}", 1)


def _is_connection_error(error: BaseException) -> bool:
    """Whether a collective failed; one that fails as it is started, and not later, raises a ValueError."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" not in text and (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in text)


def say(message: str) -> None:
    """Prints a line that names this process; it may quote another program."""
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"tfx-jax: {who}: {printable(message)}", file=sys.stderr, flush=True)


def leave(message: str, status: int) -> NoReturn:
    """Prints a line that names this process, and ends it without waiting for any other."""
    say(message)
    if jax.process_count() > 1 and is_primary():
        time.sleep(2)  # JAX aborts the others when process 0 is gone; they may have to say the same
    sys.stdout.flush()
    os._exit(status)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def check_agreement(describe: Callable[[], Mapping[str, str]]) -> None:
    """Compares what all processes were started with; alone, a process agrees and does not even look.

    Args:
      describe: returns, by what each part is called, what it is; the same parts in every process.

    Raises:
      UserError: in every process, if one has another part than process 0; the message names both.
    """
    if jax.process_count() == 1:
        return
    parts = describe()
    mine = np.array([zlib.crc32(part.encode()) for part in parts.values()], np.uint32)
    others = gather_arrays(mine)
    for name, values in zip(parts, others.T, strict=True):
        different = np.flatnonzero(values != values[0])
        if different.size:
            who = f"process {different[0]}" if different.size == 1 else f"processes {', '.join(map(str, different))}"
            raise UserError(f"{name} of {who} is not that of process 0: start all with the same")


@functools.cache
def library() -> str:
    """Describes the code that runs: every source file of the library, and the versions of what it stands on."""
    digest = hashlib.sha256(platform.python_version().encode())
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    folder = pathlib.Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
