"""Several CPU processes on this machine: a cluster to rehearse with."""

import argparse
import contextlib
import functools
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.errors import UserError
from tfx_jax.launch.plan import Plan, add_grace_option

SUMMARY = "several CPU processes on this machine"

# Linux kills the program that this becomes when the process that started it, the first argument, dies of SIGKILL or of
# the memory's end, which it cannot pass on. What `subprocess` could run instead is not safe beside threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_PATIENCE = 30.0
"""Seconds that a process may be stopped: after 50 to 100, JAX aborts those that wait for it, with a stack."""


def add_options(parser: Parser) -> None:
    """Adds what this target asks for."""
    parser.add_argument(
        "-n", "--num-processes", type=at_least_one, required=True, metavar="N", help="number of processes"
    )
    parser.add_argument(
        "--devices-per-process", type=at_least_one, default=1, metavar="N", help="CPU devices that JAX simulates (1)"
    )
    add_grace_option(parser, 60, "how long the others may go on after one has failed")


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans one process for each number, which differ in `--process-id` alone."""
    if command[0] != "train":
        raise UserError(f"launch local starts train, the one verb of many processes; run tfx-jax {command[0]} alone")
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices_per_process)}
    commands = with_process_flags([sys.executable, "-m", "tfx_jax", *command], options.num_processes)
    lines = [
        "#!/usr/bin/env bash",
        "# tfx-jax launch also numbers their lines, passes signals on, and ends all when one fails.",
        f"export {' '.join(f'{name}={value}' for name, value in environment.items())}",
        *(f"{shlex.join(each)} &" for each in commands),
        "wait",
    ]
    start = functools.partial(supervise, commands, environment, grace=options.grace)
    return Plan("\n".join(lines) + "\n", sys.executable, start)


def with_process_flags(command: Sequence[str], num_processes: int) -> list[list[str]]:
    """The command once for each process, with the flags by which the processes find each other."""
    with socket.socket() as free:
        # Nothing holds the port between now and the start of process 0; the system gives out others meanwhile.
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        [*command, f"--coordinator={address}", f"--num-processes={num_processes}", f"--process-id={index}"]
        for index in range(num_processes)
    ]


def supervise(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, *, grace: float = 60.0
) -> int:
    """Runs commands side by side, puts a number before every line they print, and ends them together.

    SIGTERM, SIGINT and the loss of the terminal are passed on to all, so that all save and leave. On Linux none
    outlives this process, whatever kills it.

    Args:
      commands: one for each process.
      environment: variables to add to ours.
      grace: once one has failed, the others get SIGTERM, and SIGKILL after as many seconds in which none ended.

    Returns:
      0 if all succeed; else the exit status of the first that failed, 128 + N if it died of signal N.
    """
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    with _pass_on_signals(processes) as received:
        for index, command in enumerate(commands):
            processes.append(_start(index, command, environment or {}, ended))
            for signum in received:  # it came before this process was there to get it
                processes[-1].send_signal(signum)
        status, wait = 0, None
        running = len(processes)
        while running:
            try:
                index, code = ended.get(timeout=wait)
            except queue.Empty:
                wait = None
                for process in processes:
                    process.kill()
                continue
            running -= 1
            if code and not status:
                status = code if code > 0 else 128 - code
                if running and not received:  # else all have been told, and save as long as they need
                    print(f"process {index} left with status {status}: ending the others", file=sys.stderr, flush=True)
                    wait = grace
                    for process in processes:
                        process.terminate()
    sys.stdout.flush()  # raises if the reader is gone, which the command line reports
    return status


@contextlib.contextmanager
def _pass_on_signals(processes: list[subprocess.Popen[str]]) -> Iterator[list[signal.Signals]]:
    """Sends every signal that asks us to stop to the processes; yields the list of those that came."""
    received: list[signal.Signals] = []

    def pass_on(signum: int, _: object) -> None:
        # A training knows SIGTERM and SIGINT only. A lost terminal means to save, too.
        received.append(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        for process in processes:
            process.send_signal(received[-1])

    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in asking}
    for signum, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(signum, pass_on)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _start(
    index: int, command: Sequence[str], environment: Mapping[str, str], ended: queue.SimpleQueue[tuple[int, int]]
) -> subprocess.Popen[str]:
    """Starts a process, and threads that print its lines and report its end."""
    if sys.platform == "linux":
        command = [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # The terminal's Ctrl-C goes to our process group; with ours passed on it would arrive twice, which means
        # "do not even save".
        process_group=0,
    )
    pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    copies = [threading.Thread(target=_copy, args=(f"[{index}] ", *pipe), daemon=True) for pipe in pipes]

    def report() -> None:
        if sys.platform == "linux":
            _kill_if_it_stays_stopped(index, process)
        code = process.wait()
        for copy in copies:
            copy.join(timeout=1.0)  # what it said comes before what we say of it; a grandchild may hold the pipe longer
        ended.put((index, code))

    for thread in (*copies, threading.Thread(target=report, daemon=True)):
        thread.start()
    return process


def _kill_if_it_stays_stopped(index: int, process: subprocess.Popen[str]) -> None:
    """Returns when it has ended; a process that is stopped (SIGSTOP) is named, and killed if no one lets it go on."""
    stopped = functools.partial(os.waitid, os.P_PID, process.pid)
    with contextlib.suppress(ChildProcessError):  # it has ended, and somebody has seen it
        while True:
            found = stopped(os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            if found is None or found.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
                return
            told = f"process {index} is stopped: kill -CONT {process.pid} lets it go on, or all end in {_PATIENCE:g} s"
            print(told, file=sys.stderr, flush=True)
            quiet = 0.0
            while stopped(os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                if quiet >= _PATIENCE:  # ticks, not the clock: we may have been stopped, too
                    process.kill()
                    break
                time.sleep(0.1)
                quiet += 0.1


def _copy(prefix: str, pipe: IO[str], stream: IO[str]) -> None:
    with pipe:
        for line in pipe:
            try:
                stream.write(prefix + line.rstrip("\n") + "\n")  # in one piece: others write, too
                stream.flush()
            except OSError:
                # Whoever read us is gone: ask all to save and leave, and empty the pipe, or they could not even say so.
                os.kill(os.getpid(), signal.SIGTERM)
