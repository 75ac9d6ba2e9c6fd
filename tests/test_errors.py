"""Text from elsewhere in a message: one line, nothing that a terminal obeys, all that can be read."""

import pytest

from tfx_jax.cli import main
from tfx_jax.errors import UserError, printable

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\u2028\u202e\u200b\x9b31m\udcff\0"


def test_nothing_that_a_terminal_obeys_is_left():
    assert printable(HOSTILE) == (r"\x1b[2J\x1b]0;owned\x07\r\n\u2028\u202e\u200b\x9b31m\udcff\x00")
    for code in [*range(0x250), *range(0x2000, 0x2070), 0xD800, 0xFEFF, 0xE0041]:
        assert printable(chr(code)).isprintable()


@pytest.mark.parametrize("text", ["", "runs/größe", "日本語 ▁x", "C:\\new\\table", "'\"{}"])
def test_what_can_be_read_stays(text):
    assert printable(text) == text
    assert str(UserError(text)) == text


def test_long_text_is_cut():
    assert printable("x" * 101, 100) == "x" * 97 + "..."
    assert printable("x" * 100, 100) == "x" * 100
    assert len(printable("\x1b" * 100, 100)) == 100


def test_a_message_is_one_line_whatever_it_quotes(capfd):
    assert str(UserError(f"{HOSTILE}: {UserError(HOSTILE)}")).isprintable()
    assert main(["convert", f"--model=/nowhere/{HOSTILE[:-1]}", "--output=/nowhere/out"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err[:-1].isprintable()
    assert r"\x1b[2J" in err
