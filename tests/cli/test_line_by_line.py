"""`translate` and `generate` answer who types, or writes slowly, at once: with stand-ins for the models, quickly."""

import contextlib
import io
import os
import select
import sys
import threading
import types

import pytest

from tfx_jax.cli import generate, main, predict, translate
from tfx_jax.errors import UserError
from tfx_jax.generation import GeneratedText
from tfx_jax.models import T5

PATIENCE = 60.0  # seconds; a test that would wait for ever fails then


class Dialogue:
    """A verb that runs in a thread, with what is typed to it and what it answers."""

    def __init__(self, arguments, keyboard, answers):
        self._keyboard, self._answers, self._received = keyboard, answers, b""
        self.status = None
        self._thread = threading.Thread(target=self._run, args=(arguments,), daemon=True)
        self._thread.start()

    def _run(self, arguments):
        with sys.stdout:  # closed also when this fails, so that its reader does not wait
            self.status = main(arguments)

    def write(self, text):
        self._keyboard.write(text.encode())

    def read_line(self):
        """The next line of the answer, or "" at its end."""
        while b"\n" not in self._received:
            assert select.select([self._answers], [], [], PATIENCE)[0], "no answer"
            if not (data := os.read(self._answers, 1 << 16)):
                return ""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return f"{line.decode()}\n"

    def end(self):
        """Types Ctrl-D, or closes the pipe; returns the exit status."""
        self._keyboard.write(b"\x04") if self._keyboard.isatty() else self._keyboard.close()
        assert self.read_line() == ""
        self._thread.join(PATIENCE)
        return self.status


@pytest.fixture(params=["terminal", "pipe"])
def dialogue(request, monkeypatch):
    """Starts a verb whose standard input is a terminal or a pipe."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            writing, reading = os.openpty() if request.param == "terminal" else reversed(os.pipe())
            answers, standard_output = os.pipe()
            stack.callback(os.close, answers)
            monkeypatch.setattr(sys, "stdin", stack.enter_context(open(reading)))
            monkeypatch.setattr(sys, "stdout", stack.enter_context(open(standard_output, "w", encoding="utf-8")))
            keyboard = stack.enter_context(open(writing, "wb", buffering=0))
            return Dialogue(arguments, keyboard, answers)

        yield start


@pytest.fixture
def chunks(monkeypatch):
    """Stands in for all models; lists the lines that were answered together."""
    seen = []

    def refuse_bad(lines):
        if "bad" in lines:
            raise UserError("one has no answer")

    class Task:
        tokenizer = types.SimpleNamespace(unk_id=None)

        def translator(self, graphdef, *, on_batch, **_):
            def translator(params, lines):
                refuse_bad(lines)
                seen.append(list(lines))
                if on_batch is not None:
                    on_batch(len(lines))
                return [line.upper() for line in lines]

            translator.decoder = lambda params: params
            return translator

    class Generator:
        continues_prompts = False

        def __init__(self, model, tokenizer, **_):
            pass

        def __call__(self, prompts, *, seed, first):
            assert (seed, first) == (7, sum(map(len, seen)))
            refuse_bad(prompts)
            seen.append(list(prompts))
            return [GeneratedText(prompt.upper(), len(prompt)) for prompt in prompts]

    monkeypatch.setattr(translate, "load_model", lambda *_: (types.SimpleNamespace(task=Task(), graphdef=None), None))
    monkeypatch.setattr(translate, "set_up_program", lambda: None)

    class Model:
        inputs, suffixes = ("text", "context"), ()

        def predict(self, inputs):
            return [{"answer": (text + " " + context).upper().strip()} for text, context in inputs]

    monkeypatch.setattr(predict, "load_model", lambda *_: (types.SimpleNamespace(task=None), None))
    monkeypatch.setattr(predict, "load_from_run", lambda *_, **__: Model())
    monkeypatch.setattr(predict, "set_up_program", lambda: None)
    monkeypatch.setattr(generate, "set_up_program", lambda: None)
    monkeypatch.setattr(generate, "load_folder_tokenizer", lambda _: None)
    monkeypatch.setattr(generate, "load_generating_folder", lambda *_: (T5.__new__(T5), (), ()))
    monkeypatch.setattr(generate, "TextGenerator", Generator)
    return seen


VERBS = [("translate", "--workdir=w"), ("generate", "--model=./m", "--seed=7")]


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_each_line_is_answered_before_the_next_is_written(dialogue, chunks, arguments):
    talk = dialogue(*arguments)
    for line in ("first", "", "second"):
        talk.write(f"{line}\n")
        assert talk.read_line() == f"{line.upper()}\n"
    talk.write("a\nb\nc\n")
    assert [talk.read_line() for _ in "abc"] == ["A\n", "B\n", "C\n"]
    assert talk.end() == 0
    assert chunks[:3] == [["first"], [""], ["second"]]


@pytest.mark.parametrize(("arguments", "size"), [(VERBS[0], 2_048), (VERBS[1], 8)], ids=["translate", "generate"])
def test_lines_of_a_file_are_answered_many_at_a_time_and_in_order(
    monkeypatch, capfd, tmp_path, chunks, arguments, size
):
    lines = [f"line {number}" for number in range(5_000)]
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines))
    with (tmp_path / "text").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(list(arguments)) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == [line.upper() for line in lines]
    assert err == ""  # soon done, so that nothing is said of it
    assert [len(chunk) for chunk in chunks] == [size] * (5_000 // size) + [5_000 % size] * bool(5_000 % size)


def test_mistakes_in_what_is_written_are_one_line(monkeypatch, capfd, chunks):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"fine\n\xff\n")))
    assert main(["translate", "--workdir=w"]) == 2
    assert capfd.readouterr().err == "tfx-jax translate: standard input, line 2: not UTF-8 (invalid start byte)\n"


@pytest.mark.parametrize(
    ("arguments", "ending", "message"),
    [
        (("translate", "--workdir=w"), "", "one has no answer"),
        (("generate", "--model=./m", "--seed=7"), "", "one has no answer"),
        (
            ("predict", "--workdir=w"),
            "\tc",
            "standard input, line 6: expected text, TAB, context, but the line has 0 TABs",
        ),
    ],
    ids=["translate", "generate", "predict"],
)
def test_a_line_without_an_answer_costs_none_before_it(monkeypatch, capfd, chunks, arguments, ending, message):
    lines = [f"{letter}{ending}\n" for letter in "vwxyz"]
    text = "".join([*lines, "bad\n", *lines])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(list(arguments)) == 2
    expected = "".join(f"{letter}{' C' * bool(ending)}\n" for letter in "VWXYZ")
    assert capfd.readouterr() == (expected, f"tfx-jax {arguments[0]}: {message}\n")


@pytest.mark.usefixtures("chunks")
def test_a_blank_line_has_blank_parts(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\tb\n\n \t\n  \nc\td\n")))
    assert main(["predict", "--workdir=w"]) == 0
    assert capfd.readouterr() == ("A B\n\n\n\nC D\n", "")


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_files_are_answered_one_after_the_other(monkeypatch, capfd, tmp_path, chunks, arguments):
    monkeypatch.setattr(translate, "read_inputs", lambda task, path: None)
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_text("x\ny\n")
    files[1].write_text("z")
    assert main([*arguments, *map(str, files)]) == 0
    assert capfd.readouterr().out == "X\nY\nZ\n"
    assert main([*arguments, "none"]) == 2
    assert "none cannot be read: No such file" in capfd.readouterr().err
