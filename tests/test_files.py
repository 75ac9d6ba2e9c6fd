"""Files from elsewhere: regular, bounded, and JSON that text can hold."""

import os
import signal
import socket

import pytest

from tfx_jax.errors import UserError
from tfx_jax.files import check_no_links, check_tree, open_regular, parse_json, read_small_file


@pytest.fixture(autouse=True)
def _ends_in_time():
    """Opening a pipe without a writer waits forever: here, for ten seconds."""

    def fail(*_):
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def hostile(path, kind):
    """Makes something that is no file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # its name may have 107 bytes at most
    elif kind == "link to a pipe":
        os.mkfifo(path.with_name(f"{path.name}-pipe"))
        path.symlink_to(f"{path.name}-pipe")
    else:
        path.symlink_to({"link to a device": "/dev/zero", "link to itself": path.name, "link to nowhere": "none"}[kind])


KINDS = ("pipe", "socket", "link to a pipe", "link to a device")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [read_small_file, open_regular])
def test_only_files_are_opened(tmp_path, monkeypatch, kind, read):
    monkeypatch.chdir(tmp_path)
    hostile(tmp_path / "x", kind)
    with pytest.raises(UserError, match=r"/x is a pipe, a device or a socket, not a file: replace it with a file$"):
        read(tmp_path / "x")


def test_a_pipe_that_takes_the_place_of_a_file_meanwhile(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "x")
    monkeypatch.setattr("tfx_jax.files.check_regular", lambda path: None)
    with pytest.raises(UserError, match="is a pipe"):
        read_small_file(tmp_path / "x")


def test_what_cannot_be_opened_is_an_error_of_the_system(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_small_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "x")
    hostile(tmp_path / "x", "link to itself")
    with pytest.raises(OSError, match="symbolic links"):
        read_small_file(tmp_path / "x")


def test_a_read_is_bounded(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    assert read_small_file(tmp_path / "link", 3) == b"abc"
    with pytest.raises(UserError, match="x has 3 bytes; such a file may have at most 2"):
        read_small_file(tmp_path / "x", 2)
    os.truncate(tmp_path / "x", 1 << 40)  # without a block on the disk
    with pytest.raises(UserError, match="x has 1,099,511,627,776 bytes"):
        read_small_file(tmp_path / "x")


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux has files that do not say their size")
def test_a_file_that_says_it_is_empty_is_bounded_too():
    with pytest.raises(UserError, match="/proc/self/maps has 11 bytes"):
        read_small_file("/proc/self/maps", 10)


def test_the_tree_that_another_library_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "4" / "d").mkdir(parents=True)
    (tmp_path / "4" / "circle").symlink_to("e")
    (tmp_path / "4" / "e").mkdir()
    (tmp_path / "4" / "e" / "circle").symlink_to("../e")
    (tmp_path / "4" / "link").symlink_to("d")
    os.truncate(os.open(tmp_path / "4" / "d" / "data", os.O_CREAT | os.O_WRONLY), 1_000)
    check_tree(tmp_path, data_folder="d", max_bytes=999)
    check_tree(tmp_path / "none", data_folder="d")
    check_tree("gs://bucket/none", data_folder="d")
    (tmp_path / "4" / "metrics").write_bytes(bytes(1_000))
    with pytest.raises(UserError, match=r"4/metrics has 1,000 bytes; such a file may have at most 999"):
        check_tree(tmp_path, data_folder="d", max_bytes=999)
    (tmp_path / "4" / "metrics").unlink()
    messages = dict.fromkeys(KINDS, "is a pipe, a device or a socket") | {
        "link to itself": "cannot read",
        "link to nowhere": "is a broken link: delete it",
    }
    for kind, message in messages.items():
        hostile(tmp_path / "4" / "d" / "x", kind)
        with pytest.raises(UserError, match=message):
            check_tree(tmp_path, data_folder="d")
        (tmp_path / "4" / "d" / "x").unlink()


@pytest.mark.parametrize("target", ["/", "..", "../..", "../../.."])
def test_a_link_to_a_folder_around_a_tree_is_not_followed(tmp_path, target):
    """It would have all files of a disk read."""
    folder = tmp_path / "around" / "4"
    (folder / "d").mkdir(parents=True)
    (tmp_path / "around" / "large").write_bytes(bytes(1_000))
    (folder / "d" / "x").symlink_to(target)
    with pytest.raises(UserError, match=r"4/d/x is a link to /.*, a folder that contains it: delete the link"):
        check_tree(folder, data_folder="d", max_bytes=999)


def test_links_that_would_be_written_through(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    check_no_links(tmp_path / "run", ["checkpoints"])  # the workdir itself may be a link
    (tmp_path / "elsewhere" / "checkpoints").symlink_to(tmp_path)
    (tmp_path / "elsewhere" / "other").symlink_to(tmp_path)
    with pytest.raises(
        UserError, match=r"run/checkpoints is a symbolic link, and tfx_jax does not write through links: rep"
    ):
        check_no_links(tmp_path / "run", ["tensorboard", "checkpoints"])
    check_no_links(tmp_path / "run", ["tensorboard"])
    check_no_links("gs://bucket/run", ["checkpoints"])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (rb'["\ud83d\ude00", "\\ud83d", "\u00e9"]', ["😀", r"\ud83d", "é"]),
        ("[1]", [1]),
    ],
)
def test_json(text, values):
    assert parse_json(text) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (rb'{"a": ["\ud83d"]}', r'^a string has "\\ud83d", half of a surrogate pair: delete it'),
        (rb'{"\uDE00\uD83D": 1}', r'^a string has "\\ude00", half of a surrogate pair: delete it'),
        (rb'"\\\ud83d"', "half of a surrogate pair"),
        (b"[" * 100_000, "^the JSON is nested deeper than Python can read, some thousand levels: write it with fewer$"),
        (b'"\xff"', "can't decode byte 0xff"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_no_json(text, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_json(text)
    assert not isinstance(raised.value, UserError)
