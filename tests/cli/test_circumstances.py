"""What users meet (folders that cannot be, experiment files with mistakes, impossible numbers): one line, status 2."""

import os
import pathlib
import re
import sys
import threading

import pytest

from tfx_jax import cli
from tfx_jax.cli import main
from tfx_jax.cli import train as verb
from tfx_jax.training.loop import Result

TRAIN = ["train", "--config=transformer_demo:test", "--config.num_steps=2"]


@pytest.fixture
def fails(tmp_path, monkeypatch, capfd):
    """`fails(arguments)`: the one line that a command ends with; run in an empty folder, which stays as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFX_JAX_TRACEBACK", raising=False)

    def run(arguments):
        before = sorted(path.name for path in tmp_path.iterdir())
        assert main(arguments) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line.removeprefix(f"tfx-jax {arguments[0]}: ")

    return run


@pytest.mark.parametrize("verb", [TRAIN, ["translate"], ["predict"], ["average"]])
def test_folders_that_cannot_be(fails, verb, tmp_path):
    (tmp_path / "file").touch()
    assert fails([*verb, "--workdir="]).startswith("argument --workdir: must not be empty: name a folder; see tfx-jax")
    assert fails([*verb, f"--workdir={'x' * 300}"]).startswith("x" * 300)
    for name in ("file", "file/below"):
        assert fails([*verb, f"--workdir={name}"]).startswith(f"{name} ")


def test_a_folder_of_somebody_else(fails, tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: pathlib.Path(path).name != "closed")  # root may write anywhere
    line = "closed is not writable: use another workdir, or change its permissions"
    assert fails([*TRAIN, "--workdir=closed"]) == line


@pytest.mark.parametrize(("store", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_stores_whose_client_is_missing(fails, store, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    line = fails([*TRAIN, f"--workdir={store}://bucket/x"])
    assert line.startswith(f"{store}://bucket/x cannot be reached (")
    assert package in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('def get_config(variant=""):\n    retur 3\n', "mine.py, line 2: invalid syntax"),
        ('def get_config(variant=""):\n    return 1 / 0\n', "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("import nothing_like_this\n", "mine.py, line 1: ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def get_config():\n    return 3\n", "mine.py: TypeError: get_config() takes 0 positional arguments"),
        ("x = '\xe9'\n", "mine.py, line 1: (unicode error) 'utf-8' codec can't decode"),
    ],
)
def test_experiment_files_with_mistakes(fails, tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text, encoding="latin-1")
    assert fails(["train", "--config=mine.py:x", "--workdir=w"]).startswith(message)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("seed=-1", "config.seed must be at least 0, got -1"),
        ("seed=100000000000000000000000", "config.seed must be at most 4294967295, got 100000000000000000000000"),
        (
            "task.data.tokens_per_batch=1000000000000",
            "config.task.data.tokens_per_batch must be at most 2147483647, got 10+",
        ),
        (
            "optimizer.warmup_steps=3000000000",
            "config.optimizer.warmup_steps must be at most 2147483647, got 3000000000",
        ),
        ("optimizer.peak_learning_rate=nan", "config.optimizer.peak_learning_rate must be at least 0, got nan"),
        ("optimizer.epsilon=inf", "config.optimizer.epsilon must be finite, got inf"),
        ("task.decoding.length_penalty=nan", "config.task.decoding.length_penalty must be at least 0, got nan"),
    ],
)
def test_numbers_that_are_none(fails, flag, message):
    assert re.fullmatch(message, fails([*TRAIN, "--workdir=w", f"--config.{flag}"]))


@pytest.mark.parametrize("port", ["0", "65536", "99999", "x", ""])
def test_ports_that_are_none(fails, port):
    flags = [f"--coordinator=localhost:{port}", "--num-processes=2", "--process-id=0"]
    line = f"--coordinator=localhost:{port} must be HOST:PORT with a port from 1 to 65535"
    assert fails([*TRAIN, "--workdir=w", *flags]) == line


@pytest.mark.parametrize("arguments", [["generate", "--model=w", "--batch=--"], ["translate", "--workdir=--"]])
def test_two_dashes_are_no_value(fails, arguments):
    assert fails(arguments).startswith(f'argument {arguments[-1].partition("=")[0]}: "--" is not a value; see tfx-jax')


def test_whoever_develops_sees_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFX_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="must not be empty: name a folder"):
        main([*TRAIN, "--workdir="])


def test_what_nobody_thought_of_is_one_line_too(fails, monkeypatch):
    def run(arguments):
        raise PermissionError(13, "Permission denied", "a\x1b[2Jb")

    monkeypatch.setattr("tfx_jax.cli.experiments.run", run)
    line = "a\\x1b[2Jb: Permission denied; set TFX_JAX_TRACEBACK=1 to see the traceback"
    assert fails(["experiments"]) == line


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--beam=100000000000", 'must be a whole number from 1 to 2,147,483,647, got "100000000000"'),
        ("--beam=10001", "must be at most 10,000 beams, got 10001"),
        ("--length-penalty=nan", 'must be a finite number of at least 0, got "nan"'),
        ("--alpha=-5", 'must be a finite number of at least 0, got "-5"'),
        ("--alpha=x", 'must be a finite number of at least 0, got "x"'),
    ],
)
def test_flags_of_a_search(fails, flag, message):
    assert message in fails(["translate", "--workdir=w", flag])
    assert message in fails(["generate", "--model=w", flag])


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand pages more")])
def test_memory_that_does_not_suffice(fails, monkeypatch, error):
    def run(arguments):
        raise error

    monkeypatch.setattr("tfx_jax.cli.experiments.run", run)
    line = fails(["experiments"])
    assert line.startswith("out of memory (")
    assert line.endswith("): use a smaller batch or shorter inputs")
    monkeypatch.setenv("TFX_JAX_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["experiments"])


def test_streams_that_are_closed(fails, monkeypatch, capfd):
    read = []
    monkeypatch.setattr("tfx_jax.cli.experiments.run", lambda arguments: read.append(sys.stdin.read()) or 0)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["experiments"]) == 0
    assert read == [""]
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["experiments"]) == 2
    assert capfd.readouterr().err == "tfx-jax experiments: standard output is closed\n"


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_only_a_process_alone_is_ended_whatever_its_threads_do(monkeypatch, is_one_of_several):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: is_one_of_several)
    before = set(threading.enumerate())
    cli._end_within(60, status=2)
    timers = set(threading.enumerate()) - before
    assert [timer.daemon for timer in timers] == ([] if is_one_of_several else [True])
    for timer in timers:
        timer.cancel()


def test_train_says_on_a_terminal_at_once_what_it_does(monkeypatch, capsys, tmp_path):
    lines = []

    def train(config, workdir, **options):
        lines.extend(capsys.readouterr().err.splitlines())
        return Result(1, [], None)

    monkeypatch.setattr(verb, "train", train)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert main([*TRAIN, f"--workdir={tmp_path}"]) == 0
        assert bool(lines) == is_terminal
    first, second = lines
    assert first == f"training transformer_demo:test in {tmp_path}"
    assert re.fullmatch(r"reading the data, to train on \d+ x cpu", second)
