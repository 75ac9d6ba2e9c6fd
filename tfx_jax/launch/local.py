"""Runs several CPU processes on this machine, to rehearse a run on a cluster."""

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

SUMMARY = "several CPU processes on this machine, as a rehearsal"

# Wrapper program: makes Linux kill the process when its parent, whose pid is the first argument, dies without being
# able to (SIGKILL, out of memory), and then becomes the command. `preexec_fn` of `subprocess` is not safe beside
# threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_PATIENCE = 30.0
"""Seconds for which a process may stay stopped: after 50 to 100, JAX aborts the processes that wait for it."""


def add_options(parser: Parser) -> None:
    """Adds the flags of this target."""
    parser.add_argument(
        "-n", "--num-processes", type=at_least_one, required=True, metavar="N", help="number of processes"
    )
    parser.add_argument(
        "--devices-per-process",
        type=at_least_one,
        default=1,
        metavar="N",
        help="simulated CPU devices per process; %(default)s by default",
    )
    add_grace_option(
        parser, default=60, meaning="seconds for which the other processes may save and exit after one has failed"
    )


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans `num_processes` commands, which differ only in `--process-id`."""
    if command[0] != "train":
        raise UserError(f"launch local supports the verb train only: run tfx-jax {command[0]} without launch")
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices_per_process)}
    commands = with_process_flags([sys.executable, "-m", "tfx_jax", *command], options.num_processes)
    lines = [
        "#!/usr/bin/env bash",
        "# tfx-jax launch also prefixes output lines, forwards signals, and ends all processes when one fails.",
        f"export {' '.join(f'{name}={value}' for name, value in environment.items())}",
        *(f"{shlex.join(process_command)} &" for process_command in commands),
        "wait",
    ]
    start = functools.partial(supervise, commands, environment, grace=options.grace)
    return Plan("\n".join(lines) + "\n", sys.executable, start)


def with_process_flags(command: Sequence[str], num_processes: int) -> list[list[str]]:
    """Returns the command for each process, with the flags by which the processes find each other."""
    with socket.socket() as probe:
        # The port is free again until process 0 starts; meanwhile the system hands out others.
        probe.bind(("127.0.0.1", 0))  # port 0: the system chooses a free port
        host, port = probe.getsockname()
        address = f"{host}:{port}"
    return [
        [*command, f"--coordinator={address}", f"--num-processes={num_processes}", f"--process-id={index}"]
        for index in range(num_processes)
    ]


def supervise(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, *, grace: float = 60.0
) -> int:
    """Runs commands side by side, prefixes each output line with the process index, and ends them together.

    SIGTERM, SIGINT and SIGHUP are forwarded to all processes, so that all save and exit. On Linux no process outlives
    this one, even if it is killed.

    Args:
      commands: one command per process.
      environment: additional environment variables.
      grace: seconds after which the other processes are killed once one has failed and they have got SIGTERM.

    Returns:
      0 if all succeed; else the exit status of the first that failed, 128 + N if signal N killed it.
    """
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    with _pass_on_signals(processes) as received:
        for index, command in enumerate(commands):
            processes.append(_start(index, command, environment or {}, ended))
            for signum in received:  # signals that arrived before this process started
                processes[-1].send_signal(signum)
        status, timeout = 0, None  # after `timeout` seconds without an exit, all processes are killed; None: never
        running = len(processes)
        while running:
            try:
                index, code = ended.get(timeout=timeout)
            except queue.Empty:
                timeout = None
                for process in processes:
                    process.kill()
                continue
            running -= 1
            if code and not status:
                status = code if code > 0 else 128 - code
                if running and not received:  # after a signal, all save without a time limit
                    print(
                        f"process {index} exited with status {status}: ending the other processes",
                        file=sys.stderr,
                        flush=True,
                    )
                    timeout = grace
                    for process in processes:
                        process.terminate()
    sys.stdout.flush()  # raises if the reader is gone; the command line reports it
    return status


@contextlib.contextmanager
def _pass_on_signals(processes: list[subprocess.Popen[str]]) -> Iterator[list[signal.Signals]]:
    """Forwards SIGTERM, SIGINT and SIGHUP to the processes; yields the list of received signals."""
    received: list[signal.Signals] = []

    def pass_on(signum: int, _: object) -> None:
        # `train` handles SIGTERM and SIGINT here; a lost terminal (SIGHUP) is forwarded as SIGTERM.
        received.append(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        for process in processes:
            process.send_signal(received[-1])

    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in handled}
    for signum, handler in before.items():
        if handler != signal.SIG_IGN:  # ignored under nohup
            signal.signal(signum, pass_on)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _start(
    index: int, command: Sequence[str], environment: Mapping[str, str], ended: queue.SimpleQueue[tuple[int, int]]
) -> subprocess.Popen[str]:
    """Starts a process, threads that copy its output, and a thread that puts (index, exit code) into `ended`."""
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
        # The terminal sends Ctrl-C to our process group. A process in it would get the signal twice, since it is also
        # forwarded, and a second Ctrl-C means "exit without saving".
        process_group=0,
    )
    pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    copies = [threading.Thread(target=_copy, args=(f"[{index}] ", *pipe), daemon=True) for pipe in pipes]

    def report() -> None:
        """Waits until the process and its output have ended, and reports its exit code."""
        if sys.platform == "linux":
            _kill_if_it_stays_stopped(index, process)
        code = process.wait()
        for copy in copies:
            copy.join(timeout=1.0)  # prints its output before our message; a grandchild may keep the pipe open
        ended.put((index, code))

    for thread in (*copies, threading.Thread(target=report, daemon=True)):
        thread.start()
    return process


def _kill_if_it_stays_stopped(index: int, process: subprocess.Popen[str]) -> None:
    """Waits until the process ends. If it is stopped (SIGSTOP), prints a message, and kills it if it stays stopped."""
    wait_for = functools.partial(os.waitid, os.P_PID, process.pid)  # with WNOWAIT, `process.wait` still gets the status
    with contextlib.suppress(ChildProcessError):  # it has ended and been waited for
        while True:
            state = wait_for(os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            if state is None or state.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
                return
            message = (
                f"process {index} is stopped: run kill -CONT {process.pid} to continue it, or all processes end in "
                f"{_PATIENCE:g} s"
            )
            print(message, file=sys.stderr, flush=True)
            stopped_seconds = 0.0
            while wait_for(os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                if stopped_seconds >= _PATIENCE:  # counts intervals: this process may have been stopped, too
                    process.kill()
                    break
                time.sleep(0.1)
                stopped_seconds += 0.1


def _copy(prefix: str, pipe: IO[str], stream: IO[str]) -> None:
    """Copies lines from a pipe to a stream with a prefix."""
    with pipe:
        for line in pipe:
            try:
                stream.write(prefix + line.rstrip("\n") + "\n")  # one write per line: other threads write, too
                stream.flush()
            except OSError:
                # The reader is gone: ask all processes to save and exit, and drain the pipe so that they can print.
                os.kill(os.getpid(), signal.SIGTERM)
