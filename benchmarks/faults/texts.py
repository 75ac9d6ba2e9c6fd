"""Forms of a text: byte order marks, line ends, normalization, lone surrogates, control characters, invalid UTF-8.

They are given to standard input of the verbs and to readers of data files. There must be one answer for each line. A
form of the same text must give the same answers, and invalid UTF-8 must be rejected in one line.
"""

import functools
import json
import pathlib
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.faults.campaign import Trial
from benchmarks.faults.command import Ended, call, fresh, judge, shown
from benchmarks.faults.subjects import training
from tfx_jax.data.sources import read_columns, read_pairs, read_questions, read_tagged, read_trees
from tfx_jax.errors import UserError

VERBS = (  # verb, name of the training (see `subjects`), flags
    ("translate", "translation", []),
    ("predict", "labels", ["--json"]),
    ("generate", "language", ["--max-new-tokens=2", "--temperature=0"]),
)
LINES = ("the dog barks .", "how many glasses of milk did they drink ?", "a café über 日本 の 犬")

SAME: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda data: data,
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "a byte order mark and CRLF": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
    "no last line end": lambda data: data.removesuffix(b"\n"),
}
"""Changes of the bytes of a file that keep its text, by name."""

OTHER: dict[str, Callable[[str], str]] = {
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFKC": lambda text: unicodedata.normalize("NFKC", text),
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    **{
        f"U+{code:04X} for spaces": lambda text, code=code: text.replace(" ", chr(code))
        for code in (0x09, 0x0B, 0x0C, 0x1C, 0x1E, 0x85, 0xA0, 0x2028, 0x2029, 0x3000, 0x200B)
    },
    **{
        f"U+{code:04X} in words": lambda text, code=code: text.replace("o", f"o{chr(code)}")
        for code in (
            0x00,
            0x01,
            0x07,
            0x0D,
            0x1B,
            0x7F,
            0xAD,
            0x200D,
            0x202E,
            0xFEFF,
            0xFFFD,
            0xFFFF,
            0x1F600,
            0x10FFFF,
        )
    },
    "30 marks on each letter": lambda text: text.replace("a", "a" + "\u0301" * 30),
    "a very long line": lambda text: text.replace(" ", " dog " * 3_000, 1),
    "nothing visible": lambda _: "\u200b\u00ad\u2060",
}
"""Changes of a line that may change its meaning, but keep it one line of text, by name."""

BROKEN: dict[str, bytes] = {
    "Latin-1": "a café".encode("latin-1"),
    "UTF-16": "a café".encode("utf-16"),
    "half a character": b"a caf\xc3",
    "half a pair": b"a \xed\xa0\xbd",
    "an overlong form": b"a \xc0\x80",
    "above U+10FFFF": b"a \xf5\x80\x80\x80",
}
"""Bytes that are not UTF-8, by name."""


def _pairs(path: str) -> list[Any]:
    """Reads the lines of a file as pairs of each line with itself."""
    pairs = read_pairs(path, path)
    return [pairs[number] for number in range(len(pairs))]


def _questions(lines: list[str]) -> bytes:
    """Returns a file in SQuAD's format whose questions are the lines."""
    questions = [
        {"id": str(i), "question": line, "answers": [{"text": "dog", "answer_start": 4}]}
        for i, line in enumerate(lines)
    ]
    return json.dumps(
        {"data": [{"paragraphs": [{"context": "the dog barks", "qas": questions}]}]}, ensure_ascii=False
    ).encode()


# By name of a file: (function from lines without TABs and quotes to the file's bytes, reader of the file).
FILES: dict[str, tuple[Callable[[list[str]], bytes], Callable[[str], Any]]] = {
    "a.tsv": (
        lambda lines: "".join(["text\tlabel\n", *(f"{line}\tx\n" for line in lines)]).encode(),
        lambda path: [row for _, row in read_columns(path, ["text", "label"])],
    ),
    "a.csv": (
        lambda lines: "".join(["text,label\n", *(f'"{line}",x\n' for line in lines)]).encode(),
        lambda path: [row for _, row in read_columns(path, ["text", "label"])],
    ),
    "a.jsonl": (
        lambda lines: "".join(
            f"{json.dumps({'text': line, 'label': 'x'}, ensure_ascii=False)}\n" for line in lines
        ).encode(),
        lambda path: [row for _, row in read_columns(path, ["text", "label"])],
    ),
    "a.en": (lambda lines: "".join(f"{line}\n" for line in lines).encode(), lambda path: _pairs(path)),
    "a.json": (_questions, read_questions),
    "a.conll": (
        lambda lines: "".join(f"{line.replace(' ', '') or 'x'}\tO\n\n" for line in lines).encode(),
        lambda path: list(read_tagged(path)),
    ),
    "a.mrg": (
        lambda lines: "".join(f"(S (N {line.replace(' ', '') or 'x'}))\n" for line in lines).encode(),
        lambda path: list(read_trees(path)),
    ),
}


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models; returns the function that makes a trial."""
    here, workdirs = folder / "here", {name: training(name, folder.parent) for _, name, _ in VERBS}

    @functools.cache
    def answer(command: tuple[str, ...], plain: bytes) -> bytes:
        """Returns the output of a command for the unchanged text."""
        return call(command, plain).out

    def attempt(random: np.random.Generator) -> Trial:
        fresh(here)
        if random.random() < 0.5:
            return _file(random)
        verb, name, flags = VERBS[int(random.integers(len(VERBS)))]
        command = [verb, f"--workdir={workdirs[name]}", *flags]
        plain, data, form_name, is_same = form(random, lambda lines: "".join(f"{line}\n" for line in lines).encode())
        what = f"{form_name} to {shown(command)}"
        ended = call(command, data)
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        if is_same is None and ended.status == 0:
            return Trial(what, "silent", "what is no UTF-8 was answered")
        return judge(
            ended,
            what,
            lambda: ended.out == answer(tuple(command), plain) if is_same else ended.out.count(b"\n") == count,
        )

    return attempt


def form(random: np.random.Generator, write: Callable[[list[str]], bytes]) -> tuple[bytes, bytes, str, bool | None]:
    """Samples a form of `LINES`.

    Args:
      random: random number generator.
      write: returns the bytes of a file with these lines.

    Returns:
      (bytes of the unchanged text, bytes of the form, name of the form, whether both have the same text or None if the
      form is not text).
    """
    lines: list[str] = list(LINES)
    index, kind = int(random.integers(len(lines))), random.random()
    plain = write(lines)
    if kind < 0.35:
        name = list(SAME)[int(random.integers(len(SAME)))]
        return plain, SAME[name](plain), name, True
    if kind < 0.75:
        name = list(OTHER)[int(random.integers(len(OTHER)))]
        lines[index] = OTHER[name](lines[index])
        return plain, write(lines), f"line {index + 1} with {name}", False
    name = list(BROKEN)[int(random.integers(len(BROKEN)))]
    lines[index] = "XX"
    return plain, write(lines).replace(b"XX", BROKEN[name]), f"line {index + 1} in {name}", None


def _file(random: np.random.Generator) -> Trial:
    """Makes a trial with a file of data and its reader."""
    name = list(FILES)[int(random.integers(len(FILES)))]
    write, read = FILES[name]
    if name.endswith(("jsonl", "json")) and random.random() < 0.2:
        lone_surrogate = ("\\ud83d", "\\ude00\\ud83d")[int(random.integers(2))].encode()
        data = write(["the XX", "the dog"]).replace(b"XX", lone_surrogate)
        plain, form_name, is_same = b"", "half a pair", None
    else:
        plain, data, form_name, is_same = form(random, write)
    pathlib.Path(name).write_bytes(data)
    what = f"{form_name} in {name}"
    try:
        result = read(name)
        repr(result)
    except UserError as error:
        ended = Ended(2, b"", f"tfx-jax read: {error}\n")
        return judge(ended, what) if not is_same else Trial(what, "silent", f"refused: {error}")
    if is_same is None:
        return Trial(what, "silent", f"what is no text was read as {str(result)[:200]!r}")
    json.dumps(str(result), ensure_ascii=False).encode()  # a lone surrogate raises here
    pathlib.Path(name).write_bytes(plain)
    expected = read(name)
    # A line without visible text may be left out.
    count = len(expected) - ("nothing visible" in form_name and len(result) < len(expected))
    is_same = str(result) == str(expected) if is_same else len(result) == count
    return Trial(what, "same" if is_same else "silent", str(result)[:300])
