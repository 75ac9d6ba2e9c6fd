"""Plain English in README, docs, docstrings, comments, help and errors: phrases to avoid, and what to write instead.

Add what readers stumble over. Files that need such a phrase are in `EXCEPTIONS`.
"""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
KINDS = ("*.py", "*.md", "*.toml", "*.html", "Makefile", ".ci/*", ".github/*")

PHRASES = {
    r"\banew\b": "again",
    r"\bnobody\b(?!/)": "no one",
    r"\bwhoever\b": "the user, callers, readers",
    r"\bdearest (tests?|lines?|operations?|first)\b": "slowest, most expensive",
    r"\bas ever\b": "as before, as usual",
    r"\bin vain\b": "without success",
    r"\bpassed over\b": "skipped",
    r"\bgo(es)? on with (a|an|the|one|it|them|text|prompts)\b": "continues, resumes",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(a|the) person (reads|types|sees|who|would)\b": "a user",
    r"\b(is|are) told of\b": "is logged, is reported",
    r"\bwhat is told\b": "what is logged",
    r"[Dd]raws the parameters": "initializes the parameters",
    r"^\s*\"\"\"Takes what `": "(delete the docstring)",
    r"^\s*\"\"\"See `[^`]+`\.\"\"\"$": "(delete the docstring)",
    r"\bwhat there is\b": "what exists, a list",
    r"\bstands? for itself\b": "is self-contained",
    r"\b(was|were) wanted\b": "the target was",
    r"\btold in one line\b": "the message is one line",
    r"\bgoes on where (it|they) (was|were|stopped)\b": "resumes where",
    r"\bearns its place\b": "is worth its cost",
    r"\b[Aa] pod on paper\b": "planning a TPU pod without one",
    r"\bwhose product one believes\b": "the reference product",
    r"\bwhat we lack\b": "what is not supported",
    r"leave_mean|learns_by_itself": "record_masked_mean, has_running_statistics",
}
BRITISH = (
    r"\b\w*(normalis|initialis|tokenis|utilis|materialis|recognis|summaris|linearis|quantis[ae]|optimis[ae])\w*"
    r"|\w*colour\w*|\w*(l|L)abelled\w*|\bgrey\b|\w*neighbour\w*|\bcentres?\b|\bbehaviour\b|\blearnt\b|\bspelt\b"
)
EXCEPTIONS = ("tests/test_prose.py",)
KEPT = "# a seed: not respelled"  # data would change


def _files():
    listed = subprocess.run(["git", "ls-files", *KINDS], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if name not in EXCEPTIONS and (ROOT / name).is_file()]


def _found(pattern):
    """Lines that a pattern matches, as file:line: text."""
    for name in _files():
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line) and not line.endswith(KEPT):
                yield f"{name}:{number}: {line.strip()[:100]}"


@pytest.mark.parametrize(("phrase", "instead"), PHRASES.items())
def test_phrases_are_plain(phrase, instead):
    found = list(_found(re.compile(phrase)))
    assert not found, f"write {instead!r} instead:\n" + "\n".join(found)


def test_spelling_is_american():
    found = list(_found(re.compile(BRITISH, re.IGNORECASE)))
    assert not found, "\n".join(found)


def test_the_phrases_match_what_they_are_for():
    assert re.search(next(iter(PHRASES)), "read anew each time")
    assert re.search(BRITISH, "the normalised vectors", re.IGNORECASE)
    assert not re.search(BRITISH, "centered, normalized, a neighbor and colors", re.IGNORECASE)
