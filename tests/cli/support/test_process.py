"""The process of a command: UTF-8 whatever the locale, streams that cannot end it, variables of JAX."""

import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from tfx_jax import cli
from tfx_jax.cli.support import process
from tfx_jax.errors import UserError

# A verb of its own in place of one that would take seconds to import.
SHOWING = """
import os, sys, types
from tfx_jax.cli import main
def run(argv):
    print(f"größe 日本 {argv}")
    print("größe 日本", file=sys.stderr)
    with open(argv[0], "w") as file:
        file.write("日本")
    return 0
sys.modules["tfx_jax.cli.average"] = types.SimpleNamespace(run=run)
sys.exit(main())
"""


def start(arguments, *, code=SHOWING, shell="", options=(), **environment):
    """Runs a program; `shell` is what a shell puts behind it, such as a redirection."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as program:
        program.write(code)
        program.flush()
        command = ["bash", "-c", f'exec "$@" {shell}', "bash", sys.executable, *options, program.name, *arguments]
        env |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
        return subprocess.run(command, env=env, capture_output=True, check=False, timeout=120)


LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "C", "PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "cp1252:strict"},
    {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("environment", LOCALES, ids=str)
def test_everything_is_utf8_whatever_the_locale(tmp_path, environment):
    path = tmp_path / "größe"
    found = start(["average", str(path)], **environment)
    assert found.stderr.decode() == "größe 日本\n"
    assert found.stdout.decode() == f"größe 日本 ['{path}']\n"
    assert path.read_bytes().decode() == "日本"
    assert found.returncode == 0


def test_utf8_mode_is_asked_for_once():
    """Where it is switched off for good, the command goes on without."""
    code = SHOWING.replace('open(argv[0], "w")', 'open(argv[0], "w", encoding="utf-8")')
    found = start(["average", "/dev/null"], code=code, options=["-X", "utf8=0"], LC_ALL="C", PYTHONCOERCECLOCALE="0")
    assert found.stdout.decode() == "größe 日本 ['/dev/null']\n"


@pytest.mark.parametrize("argument", ["--source=cat \udcff", "\udcc3", "--config.x=\ud83d"])
@pytest.mark.parametrize("verb", ["attend", "train", "generate", "experiments"])
def test_arguments_that_are_no_text(capfd, verb, argument):
    assert cli.main([verb, argument]) == 2
    escaped = argument.encode("unicode_escape").decode()
    line = f"tfx-jax {verb}: the argument {escaped} is not UTF-8: write it in UTF-8\n"
    assert capfd.readouterr().err == line


@pytest.mark.parametrize("shell", ["2>/dev/full", "2>&-", "2>&- <&-", "2> >(exec 0<&-)"])
def test_standard_error_that_cannot_be_written(tmp_path, shell):
    code = """
import logging, sys, types
from tfx_jax.cli import main
def run(argv):
    import rich.console
    for _ in range(3):
        print("x" * 100_000, file=sys.stderr, flush=True)
        logging.warning("x")
        rich.console.Console(file=sys.stderr).print("x")
    with open(argv[0], "w") as file:
        assert file.fileno() > 2
        print(file.fileno(), file=sys.__stderr__)
    print("done")
    return 0
sys.modules["tfx_jax.cli.average"] = types.SimpleNamespace(run=run)
sys.exit(main())
"""
    found = start(["average", str(tmp_path / "file")], code=code, shell=shell)
    assert (found.returncode, found.stdout) == (0, b"done\n"), found.stderr
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        (">/dev/full", "tfx-jax average: cannot write to standard output: No space left on device\n"),
        (">&-", "tfx-jax average: standard output is closed\n"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("size", [1, 100_000])  # more than a buffer holds
def test_standard_output_that_cannot_be_written(shell, message, unbuffered, size):
    code = SHOWING.replace("def run(argv):", f"def run(argv):\n    print('x' * {size})")
    found = start(["average", "/dev/null"], code=code, shell=shell, PYTHONUNBUFFERED=unbuffered)
    assert found.stderr.decode().endswith(message)
    assert len(found.stderr.decode().splitlines()) <= 2
    assert found.returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["average", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_that_cannot_be_written(arguments, unbuffered):
    code = SHOWING.replace("def run(argv):", "def run(argv):\n    print('usage')\n    sys.exit(0)")
    found = start(arguments, code=code, shell=">/dev/full", PYTHONUNBUFFERED=unbuffered)
    program = "tfx-jax average" if unbuffered and "average" in arguments else "tfx-jax"
    assert found.stderr.decode() == f"{program}: cannot write to standard output: No space left on device\n"
    assert found.returncode == 2


def test_what_is_written_in_part_is_written_to_its_end(tmp_path):
    """To a pipe that is full at first."""
    reading, writing = os.pipe()
    reader = subprocess.Popen(["wc", "-c"], stdin=reading, stdout=subprocess.PIPE)
    os.close(reading)
    stream = process.unfailing(writing)
    stream.write("日" * 500_000)
    stream.close()
    os.close(writing)
    assert int(reader.communicate()[0]) == 1_500_000


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_ENABLE_X64", "perhaps"),
        pytest.param("JAX_DEFAULT_MATMUL_PRECISION", "x", marks=pytest.mark.slow),
        pytest.param("JAX_NUM_CPU_DEVICES", "many", marks=pytest.mark.slow),
        pytest.param("JAX_NUMPY_DTYPE_PROMOTION", "x", marks=pytest.mark.slow),
        ("JAX_PLATFORMS", "bogus"),
        ("JAX_COMPILATION_CACHE_DIR", "/dev/full"),
    ],
)
def test_variables_that_jax_refuses(variable, value):
    code = """
import sys
from tfx_jax.cli import main
sys.exit(main())
"""
    verb = ["bench", "attention", "--function=dense"] if variable == "JAX_PLATFORMS" else ["average", "--workdir=w"]
    found = start(verb, code=code, **{variable: value})
    lines = found.stderr.decode().splitlines()
    assert found.returncode == 2, lines
    assert len(lines) == 1
    assert value in lines[0]
    assert "correct or unset" in lines[0]
    assert variable.lower() in lines[0].lower()


@pytest.mark.slow
def test_options_of_jax_for_other_programs_are_put_back():
    code = """
import jax
from tfx_jax.cli.support.options import set_up_program
set_up_program()
print(jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion)
print((jax.numpy.ones(2) + 1).sum())
"""
    variables = {
        "JAX_ENABLE_X64": "1",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_TRANSFER_GUARD": "disallow",
        "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": "disallow_explicit",
    }
    found = start([], code=code, **variables, JAX_PLATFORMS="cpu")
    assert found.stdout.decode() == "False standard allow\n4.0\n", found.stderr.decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [((32, 32), None), ((32, 255), None), ((32, 256), 256), ((64, 1 << 20), 4_096), ((1 << 19, 1 << 20), 1 << 19)],
)
def test_limit_of_open_files(monkeypatch, before, after):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    if after is None:
        with pytest.raises(
            UserError, match=rf"^the limit of open files is {before[1]}, but .*: run ulimit -n 4096 first"
        ):
            process.check_file_limit()
    else:
        process.check_file_limit()
        assert set_to == ([] if after == before[0] else [(after, before[1])])


def test_streams_of_others_stay_as_they_are():
    class Notebook:
        encoding = "latin-1"

    process.use_utf8(None, Notebook())
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    process.use_utf8(stream)
    stream.write("日本 \udcff")
    stream.flush()
    assert stream.buffer.getvalue() == "日本 \\udcff".encode()


@pytest.mark.slow
def test_a_closed_session_saves(tmp_path):
    """SIGHUP, and no one who reads standard error any more: saved, status 129."""
    command = [
        sys.executable,
        "-m",
        "tfx_jax",
        "train",
        "--config=transformer_demo:test",
        f"--workdir={tmp_path / 'w'}",
    ]
    options = {"num_steps": 100_000, "checkpoint_every": 100_000, "model.num_layers": 1, "task.data.tokenizer": "words"}
    flags = [f"--config.{name}={value}" for name, value in options.items()]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as training:
        assert any(line.startswith("step ") for line in training.stderr)
        training.send_signal(signal.SIGHUP)
        training.stderr.close()
        assert training.wait(200) == 129
    assert [path.name.isdigit() for path in (tmp_path / "w/checkpoints").iterdir()] == [True]


WAITING = """
import hashlib, os, signal, sys
from tfx_jax.cli.support.process import end_on_signals
{before}
end_on_signals("plan")
{after}
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1 << 25)  # C code that runs no instruction of Python, as XLA's compiler
"""


@pytest.mark.parametrize(
    ("signals", "before", "after", "status", "line"),
    [
        (["SIGTERM"], "", "", 143, "tfx-jax plan: terminated\n"),
        (["SIGINT", "SIGINT"], "", "", 130, ""),
        (["SIGTERM"], "", "signal.signal(signal.SIGTERM, signal.SIG_DFL)", -signal.SIGTERM, ""),
        (["SIGTERM", "SIGKILL"], "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "", -signal.SIGKILL, ""),
        (["SIGTERM", "SIGKILL"], "", "signal.signal(signal.SIGTERM, lambda *_: None)", -signal.SIGKILL, ""),
    ],
)
def test_signals_end_a_command_that_compiles(signals, before, after, status, line):
    program = [sys.executable, "-c", WAITING.format(before=before, after=after)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout.readline() == "ready\n"
        for name in signals:
            time.sleep(0.2)  # two signals of one number could become one, and SIGKILL would be first
            command.send_signal(getattr(signal, name))
        _, err = command.communicate(timeout=30)
    assert (command.returncode, err) == (status, line)


def test_a_forked_process_ends_by_a_signal_of_its_own():
    fork = """
pid = os.fork()
if pid == 0:
    signal.raise_signal(signal.SIGTERM)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
sys.exit(7)
"""
    # Newer versions of Python warn of forks beside threads.
    program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", WAITING.format(before="", after=fork)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (7, "")
