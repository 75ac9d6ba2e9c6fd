"""Files of text: what is read, and the one line a user gets for each kind of broken or hostile file."""

import gzip
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.data.sources import lines
from tfx_jax.errors import UserError


def _write(path, content):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _lines(path):
    return list(lines.read_lines(path))


_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"), max_size=12)


@pytest.mark.parametrize("content", ["x y\nz\n", "x y\nz", "x y\r\nz\r\n", "\ufeffx y\nz\n"])
def test_line_ends_and_byte_order_mark_are_not_text(tmp_path, content):
    assert _lines(_write(tmp_path / "lines", content)) == ["x y", "z"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_whole_text_keeps_its_line_ends(tmp_path, suffix):
    path = _write(tmp_path / f"text{suffix}", "\ufeffein\r\n\n 猫\n\u2028x")
    assert lines.read_text(path, 1_000) == "ein\r\n\n 猫\n\u2028x"
    with pytest.raises(UserError, match=r"lines, line 2: not UTF-8"):
        lines.read_text(_write(tmp_path / "lines", b"ok\n\xff"), 1_000)


def test_only_newlines_end_a_line(tmp_path):
    # str.splitlines would cut at each of these, and the two sides would no longer match.
    line = "a\u2028b\x0bc\x0cd\x85e\rf\x1cg"
    assert _lines(_write(tmp_path / "lines", line + "\nz\n")) == [line, "z"]


def test_white_space_inside_a_line_is_kept(tmp_path):
    assert _lines(_write(tmp_path / "lines", "  a  b \n\t\n")) == ["  a  b ", "\t"]


@given(written=st.lists(_LINE, min_size=1, max_size=30), block=st.sampled_from([1, 5, 1000]))
@settings(deadline=None, max_examples=100)
def test_any_text_comes_back(tmp_path_factory, written, block):
    path = _write(tmp_path_factory.mktemp("text") / "lines", "".join(line + "\n" for line in written))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BLOCK_BYTES", block)
        assert _lines(path) == [line.rstrip("\r") for line in written]
        assert "".join(lines.read_lines(path, keep_ends=True)) == "".join(line + "\n" for line in written)
        data, number = b"", 1
        for found in lines.read_blocks(path):
            assert found.first_line == number
            data, number = data + found.data, number + found.data.count(b"\n")
        assert data == path.read_bytes()


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"no\.txt does not exist$"):
        _lines(tmp_path / "no.txt")


def test_directory(tmp_path):
    with pytest.raises(UserError, match="is a directory, not a text file"):
        _lines(tmp_path)


def test_other_system_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*: File name too long"):
        _lines(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_empty_file(tmp_path, content, suffix):
    with pytest.raises(UserError, match=r"lines(\.gz)? is empty$"):
        _lines(_write(tmp_path / f"lines{suffix}", content))


@pytest.mark.parametrize("block", [1, 7, 1 << 24])
@pytest.mark.parametrize("broken", [b"caf\xe9", b"\xe3\x81", b"\xff"])
def test_invalid_utf8_names_file_and_line(tmp_path, monkeypatch, broken, block):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", block)
    for content in (b"ok\n\nna\xc3\xafve\n" + broken + b"\nok\n", b"ok\nok\n\n" + broken):
        with pytest.raises(UserError, match=r"lines, line 4: not UTF-8 \(.*\); convert the file"):
            _lines(_write(tmp_path / "lines", content))


def test_not_really_gzip(tmp_path):
    path = tmp_path / "lines.gz"
    whole = gzip.compress(b"a line\n" * 1000)
    for content in (b"a line\n", whole[:-9], whole[:12] + b"\xff\xff" + whole[14:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"lines\.gz is not a whole gzip file \(.*\); a plain text must not"):
            _lines(path)


def _bomb(path, part, count):
    """A gzip file of a few kilobytes that unpacks to `count` megabytes of a byte."""
    path.write_bytes(gzip.compress(part * (1 << 20)) * count)
    return path


def test_a_line_that_never_ends_takes_little_memory(tmp_path):
    path = _bomb(tmp_path / "lines.gz", b"\0", 2_000)
    assert path.stat().st_size < 3 << 20
    tracemalloc.start()
    with pytest.raises(UserError, match=r"lines\.gz, line 1: longer than 16,777,216 bytes: break it into lines$"):
        _lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("block", [1, 5, 1_000])
def test_the_bound_on_a_line_names_the_line(tmp_path, monkeypatch, block):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", block)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1_000)
    long = "x" * 1_000
    assert _lines(_write(tmp_path / "fits", f"a\n{long}\nb")) == ["a", long, "b"]
    for content in (f"a\nb\n{long}x\nc\n", f"a\nb\n{long}x"):
        with pytest.raises(UserError, match="lines, line 3: longer than 1,000 bytes"):
            _lines(_write(tmp_path / "lines", content))


def test_what_unpacks_to_more_than_any_text_is_refused(tmp_path, monkeypatch):
    path = _bomb(tmp_path / "lines.gz", b"\n", 12)
    assert sum(1 for _ in lines.read_lines(path)) == 12 << 20  # small enough to bear
    monkeypatch.setattr(lines, "_MAX_SMALL", 10 << 20)
    with pytest.raises(UserError, match=r"lines\.gz unpacks to more than 200 times its size.*unpack it yourself$"):
        sum(1 for _ in lines.read_lines(path))


def test_a_damaged_archive_is_told_after_the_lines_before_the_damage(tmp_path):
    """As a stream is read: no one may take what came before for all of it."""
    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"".join(b"line %d\n" % number for number in range(2_000_000)))[:-20])
    with pytest.raises(UserError, match=r"lines\.gz is not a whole gzip file"):
        sum(1 for _ in lines.read_lines(path))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(UserError, match="lines is a pipe, a device or a socket, not a file"):
        _lines(tmp_path / "lines")


def test_a_text_that_is_read_whole_has_a_bound(tmp_path):
    path = _write(tmp_path / "text.gz", "abc\n" * 250)
    assert lines.read_text(path, 1_000) == "abc\n" * 250
    with pytest.raises(
        UserError, match=r"text\.gz has more than 999 bytes, the limit for files that are read as a whole: split"
    ):
        lines.read_text(path, 999)
