"""The processes of `tfx-jax launch local`: numbered lines, one exit status, no one left behind, nothing unsaved."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tfx_jax.cli import main
from tfx_jax.launch import local
from tfx_jax.launch.local import supervise, with_process_flags

ROOT = pathlib.Path(__file__).parents[2]

# Says that it is up, then waits; SIGTERM and SIGINT make it "save" and leave as a training does.
TRAINING = """
import pathlib, signal, sys, time
def save(signum, _):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(128 + signum)
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited without success"
        time.sleep(0.02)


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_process_flags():
    one, two = (with_process_flags(["run", "x y"], 2) for _ in range(2))
    assert len(one) == 2
    for index, command in enumerate(one):
        assert command[:2] == ["run", "x y"]
        assert command[3:] == ["--num-processes=2", f"--process-id={index}"]
    assert one[0][2] == one[1][2]
    assert re.fullmatch(r"--coordinator=127\.0\.0\.1:[1-9]\d*", one[0][2])
    assert one[0][2] != two[0][2]


def test_lines_are_numbered_and_streams_kept_apart(capfd):
    code = "import sys; print('out', sys.argv[1:]); print('no newline', end='', file=sys.stderr)"
    assert supervise([python(code, argument) for argument in ("a\nb", "$c")]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] out ['a\\nb']", "[1] out ['$c']"]
    assert sorted(err.splitlines()) == ["[0] no newline", "[1] no newline"]


def test_environment_and_process_group(capfd):
    """The terminal sends Ctrl-C to a whole process group: ours passes it on, and once is enough."""
    code = "import os; print(os.environ['JAX_PLATFORMS'], os.environ['HOME'], os.getpgid(0), sep=',')"
    assert supervise([python(code)], {"JAX_PLATFORMS": "cpu"}) == 0
    platform, home, group = capfd.readouterr().out.removeprefix("[0] ").strip().split(",")
    assert (platform, home) == ("cpu", os.environ["HOME"])
    assert int(group) != os.getpgid(0)


@pytest.mark.parametrize(("end", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137)])
def test_first_failure_ends_the_others(end, status, tmp_path, capfd):
    up = tmp_path / "up"
    fails = f"import os, pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n{end}"
    assert supervise([python(TRAINING, up), python(fails, up)]) == status
    out, err = capfd.readouterr()
    assert out == "[0] saved\n"
    assert f"process 1 exited with status {status}: ending the other processes" in err


def test_what_does_not_end_is_killed(tmp_path):
    up = tmp_path / "up"
    stubborn = "import pathlib, signal, sys, time; signal.signal(15, signal.SIG_IGN); pathlib.Path(sys.argv[1]).touch()"
    fails = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit(3)"
    began = time.monotonic()
    assert supervise([python(f"{stubborn}; time.sleep(60)", up), python(fails, up)], grace=0.3) == 3
    assert time.monotonic() - began < 30


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no one sees it")
@pytest.mark.parametrize("goes_on", [True, False])
def test_one_that_is_stopped_is_named_and_no_other_waits_for_it_for_ever(goes_on, tmp_path, capfd):
    up, pid = tmp_path / "up", tmp_path / "pid"
    stops = "import os, pathlib, sys, time\nwhile not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
    stops += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\nos.kill(os.getpid(), 19)\nsys.exit(6)"
    heard = []

    def let_go_on():
        wait_for(lambda: "is stopped" in "".join(heard))
        os.kill(int(pid.read_text()), signal.SIGCONT)

    write = sys.stderr.write
    seconds = 30 if goes_on else 0.3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_PATIENCE", seconds)
        patch.setattr(sys.stderr, "write", lambda text: (heard.append(text), write(text))[1])
        if goes_on:
            threading.Thread(target=let_go_on, daemon=True).start()
        commands = [python(TRAINING, up), python(stops, pid, up)]
        assert supervise(commands) == (6 if goes_on else 137)
    out, err = capfd.readouterr()
    assert out == "[0] saved\n"
    assert (
        f"process 1 is stopped: run kill -CONT {pid.read_text()} to continue it, or all processes end in {seconds} s\n"
        in err
    )
    assert err.count("is stopped") == 1


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)],
    ids=lambda value: str(value),
)
def test_signals_reach_all_and_all_save(signum, status, tmp_path, capfd):
    up = [tmp_path / f"up-{index}" for index in range(3)]

    def ask():
        wait_for(lambda: all(path.exists() for path in up))
        os.kill(os.getpid(), signum)

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    asks = threading.Thread(target=ask)
    asks.start()
    assert supervise([python(TRAINING, path) for path in up]) == status
    asks.join()
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] saved", "[1] saved", "[2] saved"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_who_was_told_saves_as_long_as_it_needs(signum, tmp_path, capfd):
    """`grace` is for those that a failure of another leaves behind."""
    up = [tmp_path / "up-0", tmp_path / "up-1"]
    slow = TRAINING.replace("0.2", "0.8")

    def ask():
        wait_for(lambda: all(path.exists() for path in up))
        os.kill(os.getpid(), signum)

    asks = threading.Thread(target=ask)
    asks.start()
    assert supervise([python(TRAINING, up[0]), python(slow, up[1])], grace=0.1) == 128 + signum
    asks.join()
    assert capfd.readouterr().out == "[0] saved\n[1] saved\n"


def test_nohup_is_respected():
    ends_if_told = "import os, signal, time; signal.signal(15, lambda *_: os._exit(9)); os.kill(os.getppid(), 1)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert supervise([python(f"{ends_if_told}; time.sleep(0.3)")]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_reader_that_leaves_makes_all_save(tmp_path):
    """`launch ... | head -n 1` and a closed terminal: no one is left to tell, but the training is not lost."""
    talks = TRAINING.replace("time.sleep(60)", "\nwhile True: print('step', flush=True); time.sleep(0.02)").replace(
        'print("saved", flush=True)', 'pathlib.Path(sys.argv[1] + ".saved").touch()'
    )
    code = (
        "import sys; from tfx_jax.launch.local import supervise\n"
        f"print(supervise([[sys.executable, '-c', {talks!r}, path] for path in sys.argv[1:]]))"
    )
    up = [tmp_path / "up-0", tmp_path / "up-1"]
    with subprocess.Popen(python(code, *up), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().endswith("step\n")
        wait_for(lambda: all(path.exists() for path in up))
        launcher.stdout.close()
        launcher.wait(timeout=30)
    assert all(path.with_suffix(".saved").exists() for path in up)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they end when they next print")
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path):
    """Not even who ignores SIGTERM and says nothing."""
    silent = "import os, pathlib, signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
    silent += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(60)"
    code = (
        "import sys; from tfx_jax.launch.local import supervise\n"
        f"supervise([[sys.executable, '-c', {silent!r}, path] for path in sys.argv[1:]])"
    )
    up = [tmp_path / "up-0", tmp_path / "up-1"]
    with subprocess.Popen(python(code, *up)) as launcher:
        wait_for(lambda: all(path.exists() and path.read_text() for path in up))
        launcher.kill()
    pids = [int(path.read_text()) for path in up]
    try:
        wait_for(lambda: not any(map(_runs, pids)))
    finally:
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)


def _runs(pid):
    """Whether a process is there and no zombie, which no one may be there to bury."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tfx_jax.training.sharding.distributed") is None, reason="train takes no --coordinator yet"
)
def test_two_processes_train_one_model(tmp_path, capfd):
    train = ["train", f"--config={ROOT}/experiments/transformer_demo.py:test", f"--workdir={tmp_path}/run"]
    assert main(["launch", "local", "-n", "2", "--", *train]) == 0
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert "[0]" in "".join(capfd.readouterr())
