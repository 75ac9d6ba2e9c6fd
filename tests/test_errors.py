"""Text from elsewhere in a message: one line, nothing that a terminal obeys, all that can be read."""

import contextlib
import logging
import sys
import types

import pytest

from tfx_jax.cli import main
from tfx_jax.cli.support import lines, options
from tfx_jax.cli.support.progress import Progress
from tfx_jax.data.sources import download
from tfx_jax.data.sources.prepare import Archives, Prepared
from tfx_jax.errors import UserError, printable
from tfx_jax.tasks.events import EventShare
from tfx_jax.training.reporting import progress as training

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\u2028\u202e\u200b\x9b31m\udcff\0"


def test_nothing_that_a_terminal_obeys_is_left():
    assert printable(HOSTILE) == (r"\x1b[2J\x1b]0;owned\x07\r\n\u2028\u202e\u200b\x9b31m\udcff\x00")
    for code in [*range(0x250), *range(0x2000, 0x2070), 0xD800, 0xFEFF, 0xE0041]:
        assert printable(chr(code)).isprintable()


@pytest.mark.parametrize("text", ["", "runs/größe", "日本語 ▁x", "C:\\new\\table", "'\"{}"])
def test_what_can_be_read_stays(text):
    assert printable(text) == text
    assert str(UserError(text)) == text


def _train(tmp_path, monkeypatch):
    progress = training.Progress(tmp_path, last_done_step=0, num_steps=1)
    progress.message(HOSTILE)
    progress.close()


def _log(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())  # which is put back
    options.set_up_program()
    logging.StreamHandler().handle(logging.getLogger("hub").makeRecord("hub", 30, "", 0, "%s", (HOSTILE,), None))


def _prepare(tmp_path, monkeypatch):
    monkeypatch.setattr("tfx_jax.cli.prepare.prepare", lambda *_, **__: Prepared("a/b", tmp_path, {HOSTILE: 3}))
    main(["prepare", "a/b"])


def _list_events(tmp_path, monkeypatch):
    task = types.SimpleNamespace(event_attention=lambda *_: (0.5, 1, [EventShare(HOSTILE, 2.0, 0.0, (0.25,))]))
    run = types.SimpleNamespace(task=task, trained=lambda params: params)
    monkeypatch.setattr("tfx_jax.cli.attend.load_model", lambda *_: (run, {}))
    main(["attend", "--workdir=w", "--row=1"])


@pytest.mark.parametrize(
    "show",
    [
        lambda *_: Progress()._write(HOSTILE),
        _train,
        _log,
        lambda *_: download._Meter("a").note(HOSTILE),
        lambda *_: download._Meter(HOSTILE).show(1, 2),
        lambda path, _: download._verify(HOSTILE, path / "file", None),
        lambda path, _: Archives(path, None, {}, 1.0)._unpack(path / HOSTILE[:-1]),
        _prepare,
        _list_events,
    ],
)
def test_no_foreign_text_is_shown_as_it_is(show, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    with contextlib.suppress(UserError, FileNotFoundError):
        show(tmp_path, monkeypatch)
    told = "".join(capfd.readouterr())
    assert r"\x1b[2J\x1b]0;owned\x07\r" in told
    assert all(line.replace("\t", "").isprintable() for line in told.split("\n"))
    assert told.count("\n") < 3


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_obeys_no_answer(is_terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(isatty=lambda: is_terminal))
    escaped = "\\x1b[2Ja\\r\\x9b31m\t\u200d\n"
    assert lines.shown("\x1b[2Ja\r\x9b31m\t\u200d\n") == (escaped if is_terminal else "\x1b[2Ja\r\x9b31m\t\u200d\n")


def test_long_text_is_cut():
    assert printable("x" * 101, 100) == "x" * 97 + "..."
    assert printable("x" * 100, 100) == "x" * 100
    assert len(printable("\x1b" * 100, 100)) == 100


JOB = ["--", "train", "--workdir=/w"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", f"--model=/nowhere/{HOSTILE[:-1]}", "--output=/nowhere/out"],
        ["launch", HOSTILE, *JOB],
        ["launch", "slurm", f"--name={HOSTILE}", "--gpus-per-node=1", "--time=1", *JOB],
        ["launch", "slurm", f"--sbatch=--x={HOSTILE}", "--gpus-per-node=1", "--time=1", *JOB],
        ["launch", "jobset", f"--name={HOSTILE}", "--image=i", "--accelerator=a", "--topology=4x4", *JOB],
        ["launch", "xpk", "--name=n", "--image=i", "--cluster=c", "--tpu-type=v5p-8", "--", "train", f"--x={HOSTILE}"],
        ["launch", "tpu-vm", "--name=n", "--zone=z", f"--source={HOSTILE[:-1]}", *JOB],
        ["launch", "local", "-n", "2", "--", HOSTILE],
    ],
)
def test_a_message_is_one_line_whatever_it_quotes(arguments, capfd):
    assert str(UserError(f"{HOSTILE}: {UserError(HOSTILE)}")).isprintable()
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err[:-1].isprintable()
    assert r"\x1b[2J" in err
