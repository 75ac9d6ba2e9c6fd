"""Processes of a distributed run: initialization, agreement, collective file access, and joint exit.

With one process, all functions return at once.
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
"""Exit status of a process that hung or lost another process: EX_TEMPFAIL. Restarting all processes resumes the run."""


def initialize_from_env(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes of a run; call it before any device is used.

    If the three arguments are given, they are used. Otherwise JAX finds the processes on Cloud TPU, under Slurm, Open
    MPI and Kubernetes, but only if there are signs of more than one process: a laptop, a notebook, a single TPU VM or a
    shell inside a Slurm allocation trains as one process. A second call does nothing.

    Args:
      coordinator_address: "HOST:PORT" where process 0 will listen.
      num_processes: total number of processes on all hosts.
      process_id: index of this process, 0 to num_processes - 1.

    Raises:
      UserError: if only some arguments are given, they are invalid, or the processes do not find each other.
    """
    flags = {"--coordinator": coordinator_address, "--num-processes": num_processes, "--process-id": process_id}
    if coordinator_address is None or num_processes is None or process_id is None:
        missing = [name for name, value in flags.items() if value is None]
        if len(missing) < len(flags):
            raise UserError(f"{' and '.join(missing)} missing: {', '.join(flags)} must be given together")
        cluster = None if jax.distributed.is_initialized() else _cluster(os.environ)
        if cluster is not None:
            _connect(f"{cluster} was found, but JAX cannot join its processes", "pass " + ", ".join(flags))
        return
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator={coordinator_address} must be HOST:PORT with a port from 1 to 65535")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process-id={process_id} must be at least 0 and below --num-processes={num_processes}")
    if num_processes > 1 and not jax.distributed.is_initialized():
        if process_id:
            _await_listener(host, int(port))
        else:
            _check_free(int(port))
        _connect(
            f"process {process_id} cannot join the others at {coordinator_address}",
            "check that the hosts can reach one another",
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
        )


def _check_free(port: int) -> None:
    """Raises UserError if the port is in use: JAX would join any process that listens there, such as another run."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(f"port {port} of --coordinator cannot be used ({error.strerror}): use another") from None


def _await_listener(host: str, port: int, timeout: float = 300.0, answer_timeout: float = 10.0) -> None:
    """Waits until process 0 listens. JAX itself would also wait 5 minutes, but then abort with a C++ stack trace.

    Args:
      host: host of process 0.
      port: port on which it will listen.
      timeout: seconds after which waiting fails.
      answer_timeout: seconds from the first connection after which a listener that does not answer like JAX's service
        counts as another program.

    Raises:
      UserError: if nothing listens in time, or another program does.
    """
    deadline = time.monotonic() + timeout
    first_connected_at = math.inf
    address = (host.strip("[]"), port)  # an IPv6 address is in brackets before the port
    while True:
        try:
            with socket.create_connection(address, timeout=min(5.0, answer_timeout)) as connection:
                first_connected_at = min(first_connected_at, time.monotonic())
                if _is_coordinator(connection):
                    return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"nothing listens at --coordinator={host}:{port} ({error}): start process 0") from None
        if time.monotonic() > first_connected_at + answer_timeout:
            raise UserError(f"another program listens at --coordinator={host}:{port}: use another port")
        time.sleep(0.5)


def _is_coordinator(connection: socket.socket) -> bool:
    """Returns whether the peer speaks HTTP/2, like JAX's service: a connection starts with settings (RFC 9113)."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\4\0\0\0\0\0"  # a frame: length 0 (3 bytes), type 4 (settings), flags 0, stream 0 (4 bytes)
    connection.sendall(preface + settings)
    with connection.makefile("rb") as answer:
        frame_header = answer.read(9)
    return frame_header[3:4] == b"\4"


def _connect(problem: str, remedy: str, **arguments: Any) -> None:
    """Initializes JAX's distributed service; raises UserError with `problem` and `remedy` if that fails."""
    try:
        jax.distributed.initialize(**arguments)
    except (ValueError, RuntimeError, OSError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{problem} ({reason}): {remedy}" if reason else f"{problem}: {remedy}") from None


def _cluster(environment: Mapping[str, str]) -> str | None:
    """Returns the name of the system whose variables show that this is one process of several, or None.

    JAX's own detection is not enough: it takes any pod for a Kubernetes job, asks Google's metadata server on any host
    with a TPU, and under Slurm trusts the allocation, although a shell in it is one process.
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
        logging.warning(
            "pod %s of a job trains without the other pods: install jax[k8s]", environment["JOB_COMPLETION_INDEX"]
        )
    return None


def has_tpu() -> bool:
    """Returns whether this machine has the device files of a TPU."""
    return bool(glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"))


def _is_tpu_slice(environment: Mapping[str, str]) -> bool:
    """Returns whether this host's TPUs belong to a slice of several hosts, or JAX can find out."""
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu") or not importlib.util.find_spec("libtpu"):
        return False
    if _number(environment, "MEGASCALE_NUM_SLICES") > 1:
        return True
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts is not None:
        return "," in hosts
    if "TPU_SKIP_MDS_QUERY" in environment or not has_tpu():
        return False
    # Compute Engine sets no environment variable on a TPU VM; JAX asks its metadata server.
    with contextlib.suppress(OSError):
        return pathlib.Path("/sys/class/dmi/id/product_name").read_text().startswith("Google")
    return False


def _number(environment: Mapping[str, str], name: str) -> int:
    """Returns the whole number in a variable; 0 if the variable is not set or has another value."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def is_primary() -> bool:
    """Returns whether this is process 0, which writes, logs and plots for all processes."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Waits until every process has called this with the same `name`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def process0_first(name: str) -> Iterator[None]:
    """Runs the block in process 0 first; the other processes then find the files it created."""
    if not is_primary():
        wait_for_all(name)
    yield
    if is_primary():
        wait_for_all(name)


def gather_arrays(array: np.ndarray) -> np.ndarray:
    """Stacks the arrays of all processes, equal in shape and of at most 32 bits: [processes, ...]."""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(jax.process_count(), *array.shape)


def gather_lists(local: list[Any]) -> list[Any]:
    """Merges the lists of all processes, each of which has every `process_count`-th element.

    Args:
      local: JSON values of the elements process_index, process_index + process_count, ...

    Returns:
      The values of all elements in order, in every process.
    """
    count = jax.process_count()
    if count == 1:
        return local
    # Arrays of all processes must have one shape: the texts are padded to the longest.
    data = np.frombuffer(json.dumps(local).encode(), np.uint8)
    sizes = gather_arrays(np.array([data.size], np.int32))[:, 0]
    texts = gather_arrays(np.pad(data, (0, sizes.max() - data.size)))
    parts = [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]
    # Element `index` was number `index // count` in the list of process `index % count`.
    return [parts[index % count][index // count] for index in range(sum(map(len, parts)))]


@contextlib.contextmanager
def abort_together() -> Iterator[None]:
    """Makes an error in one of several processes end all of them at once, each with one line.

    A process that exits normally would wait for the others, which wait for it in a collective, until JAX aborts them
    all after five minutes. So it exits without waiting. The others lose the connection and exit with status RESTART.
    With one process, errors are raised as usual.
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
            leave(f"lost another process ({_first_line(error)}): restart all processes to resume", RESTART)
        traceback.print_exc()
        leave(f"{type(error).__name__}: {_first_line(error)}", 1)


_LOST_CONNECTION = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")


def _is_connection_error(error: BaseException) -> bool:
    """Returns whether a collective failed because another process is gone, so that a restart can help.

    Gloo and NCCL name themselves; one of Gloo that fails at its start raises a ValueError. TPUs and the coordination
    service report one of the statuses of a lost connection. Other errors, such as those of the compiler, would recur.
    """
    text = str(error)
    if "Gloo" in text or "NCCL" in text:
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and text.startswith(_LOST_CONNECTION)


def say(message: str) -> None:
    """Prints a message to stderr, after the index of this process."""
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"tfx-jax: {who}: {printable(message)}", file=sys.stderr, flush=True)


def leave(message: str, status: int) -> NoReturn:
    """Prints a message and exits without waiting for any other process."""
    say(message)
    if jax.process_count() > 1 and is_primary():
        time.sleep(2)  # JAX aborts the others when process 0 exits; lets them print their messages first
    sys.stdout.flush()
    os._exit(status)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def check_agreement(describe: Callable[[], Mapping[str, str]]) -> None:
    """Checks that all processes were started with the same code, data and files; does nothing with one process.

    Args:
      describe: returns a description of each compared part by the name of the part; all processes have the same names.

    Raises:
      UserError: in every process, if a part differs from that of process 0; the message names the part and processes.
    """
    if jax.process_count() == 1:
        return
    parts = describe()
    own_checksums = np.array([zlib.crc32(part.encode()) for part in parts.values()], np.uint32)
    checksums = gather_arrays(own_checksums)  # [processes, parts]
    for name, values in zip(parts, checksums.T, strict=True):
        different = np.flatnonzero(values != values[0])
        if different.size:
            who = f"process {different[0]}" if different.size == 1 else f"processes {', '.join(map(str, different))}"
            raise UserError(f"{name} of {who} differs from that of process 0: start all processes with the same")


@functools.cache
def library() -> str:
    """Returns a hash of every source file of the library and the versions of its dependencies."""
    digest = hashlib.sha256(platform.python_version().encode())
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    folder = pathlib.Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
