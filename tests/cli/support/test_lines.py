"""Lines from files, pipes and terminals: how they are grouped, what a terminal shows, and that none is lost."""

import fcntl
import gzip
import io
import itertools
import os
import resource
import threading
import time

import pytest

from tfx_jax.cli.support.lines import LineReader, count_lines, open_readers
from tfx_jax.errors import UserError

TEXT = "a\n\nünd\r\nlast".encode()
LINES = ["a", "", "ünd", "last"]


class Screen(io.StringIO):
    def isatty(self):
        return True


def taken(reader, max_lines=100):
    """All chunks."""
    return list(iter(lambda: reader.take(max_lines), []))


@pytest.fixture
def pipe():
    """Both ends, the reading one as Python has standard input."""
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as sink:
        yield stream, sink


@pytest.fixture
def terminal():
    """A terminal, and the program's standard input."""
    master, slave = os.openpty()
    with open(slave, "rb") as stream, open(master, "wb", buffering=0) as keyboard:
        yield keyboard, stream


@pytest.mark.parametrize("max_lines", [1, 3, 4, 100])
def test_chunks_of_a_file_are_full(tmp_path, max_lines):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    want = [LINES[start : start + max_lines] for start in range(0, 4, max_lines)]
    with path.open("rb") as file:
        assert taken(LineReader(file), max_lines) == want
    assert taken(LineReader(io.BytesIO(TEXT)), max_lines) == want


@pytest.mark.parametrize("max_lines", [1, 3, 4, 100])
def test_a_packed_file_has_the_lines_of_the_plain_one(tmp_path, max_lines):
    files = [tmp_path / "text", tmp_path / "text.gz"]
    files[0].write_bytes(TEXT)
    files[1].write_bytes(gzip.compress(TEXT))
    plain, packed = (taken(reader, max_lines) for reader in open_readers(map(str, files)))
    assert packed == plain == [LINES[start : start + max_lines] for start in range(0, 4, max_lines)]


def test_a_damaged_packed_file_is_named(tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(TEXT)
    with pytest.raises(UserError, match=r"^.*text\.gz is not a whole gzip file"):
        [taken(reader) for reader in open_readers([str(path)])]


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n", b"a", b"a\n", b"a\r\r\n", b"\ra\n", b"x" * 200_000 + b"\ny"])
def test_lines_are_those_that_iteration_gives(data):
    want = [line.rstrip(b"\r\n").decode() for line in io.BytesIO(data)]
    assert [*itertools.chain(*taken(LineReader(io.BytesIO(data))))] == want


def test_a_long_line_costs_time_in_proportion():
    """A thousand blocks: joined again with each, they would be 33 GB to copy."""
    start = time.process_time()
    (chunk,) = taken(LineReader(io.BytesIO(b"x" * (1_000 << 16))))
    assert len(chunk[0]) == 1_000 << 16
    assert time.process_time() - start < 5


def test_line_that_is_not_utf_8_is_named_after_those_before_it_are_given():
    reader = LineReader(io.BytesIO(b"a\nb\n\xff\nc\n"))
    assert reader.take(100) == ["a", "b"]
    with pytest.raises(UserError, match=r"^standard input, line 3: not UTF-8"):
        reader.take(100)


def test_a_pause_ends_a_chunk(pipe):
    """The reader waits for a line, not for more than there are; half a line is no line."""
    stream, sink = pipe
    reader = LineReader(stream)
    sink.write(b"one\ntwo\nthr")
    assert reader.take(100) == ["one", "two"]
    sink.write(b"ee\n")
    assert reader.take(100) == ["three"]
    sink.write(b"four")
    sink.close()
    assert reader.take(100) == ["four"]
    assert reader.take(100) == []


def test_a_pipe_that_is_written_fast_gives_full_chunks(pipe):
    stream, sink = pipe
    lines = [f"line {number}" for number in range(50_000)]  # ten times what a pipe holds

    def write():
        sink.write("".join(f"{line}\n" for line in lines).encode())
        sink.close()

    writer = threading.Thread(target=write)
    writer.start()
    chunks = taken(LineReader(stream, pause=10.0), 2_048)  # a busy machine may keep the writer from writing for a while
    writer.join()
    assert [*itertools.chain(*chunks)] == lines
    assert {len(chunk) for chunk in chunks[:-1]} == {2_048}


def test_a_process_may_have_many_open_files(pipe):
    """`select.select` raises ValueError for a descriptor from 1024 on."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY and hard_limit < 2_048:
        pytest.skip("the system allows few open files")
    stream, sink = pipe
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 2_048), hard_limit))
    try:
        with open(fcntl.fcntl(stream.fileno(), fcntl.F_DUPFD, 1_024), "rb") as copy:
            reader = LineReader(copy)
            sink.write(b"one\ntwo\n")
            assert reader.take(100) == ["one", "two"]
            sink.close()
            assert reader.take(100) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def test_lines_that_are_left_over_are_given_before_more_is_read(pipe):
    stream, sink = pipe
    reader = LineReader(stream)
    sink.write(b"1\n2\n3\n")
    assert [reader.take(2), reader.take(2)] == [["1", "2"], ["3"]]


def test_a_person_is_asked_for_each_line_and_ends_with_control_d(terminal):
    (keyboard, stream), shown = terminal, Screen()
    reader = LineReader(stream, screen=shown)
    assert reader.is_terminal
    for line in ("first", "second"):
        keyboard.write(f"{line}\n".encode())
        assert reader.take(2_048) == [line]
    assert shown.getvalue() == "> > "
    keyboard.write(b"\x04")
    assert reader.take(2_048) == []
    assert shown.getvalue() == "> > > \n"
    assert reader.take(2_048) == []  # without waiting for a second Ctrl-D


def test_no_prompt_where_nobody_would_see_it(terminal):
    (keyboard, stream), shown = terminal, io.StringIO()
    keyboard.write(b"first\n\x04")
    assert taken(LineReader(stream, screen=shown)) == [["first"]]
    assert shown.getvalue() == ""


def test_lines_of_a_file_are_counted_from_where_it_stands(tmp_path, pipe):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    with path.open("rb") as file:
        assert count_lines(file) == 4
        assert file.read() == TEXT
        file.seek(2)
        assert count_lines(file) == 3
    path.write_bytes(TEXT + b"\n")
    with path.open("rb") as file:
        assert count_lines(file) == 4
    assert count_lines(pipe[0]) is None
    assert count_lines(io.BytesIO(TEXT)) is None
