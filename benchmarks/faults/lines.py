"""Lines of arbitrary characters as input of the verbs that read lines, which must write one line for each.

A trial is one command with `LINES` lines.
"""

import pathlib
from collections.abc import Callable

import numpy as np

from benchmarks.faults.campaign import Trial
from benchmarks.faults.command import call, fresh, judge, shown
from benchmarks.faults.subjects import training

LINES = 1_000
VERBS = (  # verb, name of the training (see `subjects`), flags
    ("translate", "translation", []),
    ("predict", "translation", ["--json"]),
    ("predict", "labels", []),
    ("generate", "language", ["--max-new-tokens=2", "--batch=500", "--temperature=0"]),
)
_WORDS = ["the", "dog", "'s", "barks", "how", "many", "glasses", "of", "milk", "?", ".", ",", "3", "A"]
_ODD = [
    chr(code) for code in (0, 1, 7, 8, 9, 11, 12, 13, 27, 28, 29, 30, 31, 127, 133, 160, 173, 0x2028, 0x2029, 0x202E)
]
_ODD += [
    "\ufeff",
    "\ufffd",
    "\u0301" * 20,
    "👩‍👩‍👧",
    "日本語",
    "<pad>",
    "</s>",
    "<|endoftext|>",
    "[MASK]",
    "▁",
    "\\n",
    '"',
    "Ａ",
    "ﬁ",
]


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models; returns the function that makes a trial."""
    here, workdirs = folder / "here", {name: training(name, folder.parent) for _, name, _ in VERBS}

    def attempt(random: np.random.Generator) -> Trial:
        verb, name, flags = VERBS[int(random.integers(len(VERBS)))]
        command = [verb, f"--workdir={workdirs[name]}", *flags]
        lines = [line(random) for _ in range(LINES)]
        ends = ("\n", "\r\n")[int(random.integers(2))]
        text = ends.join(lines) + ends * int(random.integers(2))
        fresh(here)
        (here / "lines").write_text(text, newline="")
        ended = call(command, text.encode())
        num_lines = text.count("\n") + (bool(text) and not text.endswith("\n"))  # the last one may have no line end
        return judge(ended, f"{LINES} lines to {shown(command)}", lambda: ended.out.count(b"\n") == num_lines)

    return attempt


def line(random: np.random.Generator) -> str:
    """Returns a random line of 0 to 60 words, odd characters and arbitrary characters of Unicode."""
    parts: list[str] = []
    for _ in range(int(random.choice([0, 1, 3, 8, 20, 60], p=[0.05, 0.2, 0.3, 0.3, 0.1, 0.05]))):
        kind = random.random()
        if kind < 0.5:
            parts.append(_WORDS[int(random.integers(len(_WORDS)))])
        elif kind < 0.75:
            parts.append(_ODD[int(random.integers(len(_ODD)))])
        else:
            code = int(random.integers(0x110000))
            parts.append("?" if 0xD800 <= code < 0xE000 or code == 10 else chr(code))  # no surrogates, no line end
    return ("", " ")[int(random.integers(2))].join(parts)
