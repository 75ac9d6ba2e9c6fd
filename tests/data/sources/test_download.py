"""Downloads against a server that breaks off, forgets and lies; the bytes it sent are counted."""

import bz2
import errno
import gzip
import io
import pathlib
import shutil
import tarfile
import zipfile

import numpy as np
import pytest

from tests.data.statmt import answer, archive, checksums_of, serve
from tfx_jax.data.sources.download import fetch, unpack
from tfx_jax.errors import UserError

BODY = np.random.default_rng(0).bytes(1_000_000)
OTHER = np.random.default_rng(1).bytes(1_000_000)
CHECKSUM = checksums_of({"file": BODY})["file"]


@pytest.fixture
def server():
    with serve({"/file.tgz": BODY}) as server:
        yield server


def get(server, folder, checksum=CHECKSUM):
    path = folder / "deep" / "file.tgz"
    fetch(f"{server.url}/file.tgz", path, checksum, first_pause=0.01)
    assert [child.name for child in path.parent.iterdir()] == ["file.tgz"]  # nothing else stays
    return path


def ranges(server):
    return [asked for _, asked, _ in server.requests]


def partial_of(folder):
    (folder / "deep").mkdir()
    return folder / "deep" / "file.tgz.partial"


@pytest.mark.parametrize("checksum", [CHECKSUM, None])
def test_fetches_once(server, tmp_path, checksum):
    assert get(server, tmp_path, checksum).read_bytes() == BODY
    assert get(server, tmp_path, checksum).read_bytes() == BODY
    assert server.sent("/file.tgz") == [len(BODY)]


@pytest.mark.parametrize("checksum", [CHECKSUM, None])
def test_goes_on_where_the_connection_broke(server, tmp_path, capfd, checksum):
    server.breaks["/file.tgz"] = [300_001, 0, 500_000]
    assert get(server, tmp_path, checksum).read_bytes() == BODY
    assert server.sent("/file.tgz") == [300_001, 0, 500_000, 199_999]  # each byte once
    assert ranges(server) == [None, "bytes=300001-", "bytes=300001-", "bytes=800001-"]
    assert "the connection broke after 300,001 of 1,000,000 bytes; retrying in 0.01 s" in capfd.readouterr().err


def test_goes_on_behind_a_redirection(server, tmp_path):
    server.files["/moved.tgz"] = server.files.pop("/file.tgz")
    server.redirects["/file.tgz"] = f"{server.url}/moved.tgz"
    server.breaks["/moved.tgz"] = [600_000]
    assert get(server, tmp_path, None).read_bytes() == BODY
    assert server.sent("/moved.tgz") == [600_000, 400_000]


def test_goes_on_with_what_an_earlier_process_left(server, tmp_path):
    partial_of(tmp_path).write_bytes(BODY[:700_000])  # its validator is lost, but the checksum will tell
    assert get(server, tmp_path).read_bytes() == BODY
    assert server.sent("/file.tgz") == [300_000]


def test_what_nothing_vouches_for_is_fetched_anew(server, tmp_path):
    partial_of(tmp_path).write_bytes(OTHER[:700_000])
    assert get(server, tmp_path, None).read_bytes() == BODY
    assert ranges(server) == [None]


@pytest.mark.parametrize("checksum", [CHECKSUM, None])
def test_a_file_that_changed_on_the_server_is_fetched_anew(server, tmp_path, checksum):
    server.files["/file.tgz"] = OTHER
    server.breaks["/file.tgz"] = [400_000]
    with pytest.raises(KeyboardInterrupt):
        fetch(f"{server.url}/file.tgz", tmp_path / "deep" / "file.tgz", checksum, first_pause=_Interrupt())
    server.files["/file.tgz"] = BODY
    assert get(server, tmp_path, checksum).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=400000-"]
    assert server.sent("/file.tgz") == [400_000, 1_000_000]


class _Interrupt(float):
    """A pause in which somebody presses Ctrl-C."""

    def __mul__(self, _):
        raise KeyboardInterrupt


def test_a_server_without_ranges_starts_anew(server, tmp_path):
    server.resumes = False
    server.breaks["/file.tgz"] = [300_000]
    assert get(server, tmp_path).read_bytes() == BODY
    assert server.sent("/file.tgz") == [300_000, 1_000_000]


def test_more_than_there_should_be_is_thrown_away(server, tmp_path):
    partial_of(tmp_path).write_bytes(BODY + b"x")
    with pytest.raises(UserError, match=r"had 1,000,001 bytes, not 1,000,000, and was deleted"):
        get(server, tmp_path)
    assert get(server, tmp_path).read_bytes() == BODY


def test_a_whole_partial_file_needs_no_server(tmp_path):
    partial_of(tmp_path).write_bytes(BODY)
    with serve({}) as server:
        assert get(server, tmp_path).read_bytes() == BODY
        assert server.requests == []


def test_without_a_checksum_a_whole_partial_file_is_fetched_again(server, tmp_path):
    partial = partial_of(tmp_path)
    partial.write_bytes(BODY)
    partial.with_name("file.tgz.validator").write_text("W/nonsense")
    assert get(server, tmp_path, None).read_bytes() == BODY


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, status):
    server.statuses = [status, status]
    assert get(server, tmp_path).read_bytes() == BODY
    assert server.sent("/file.tgz") == [0, 0, len(BODY)]


def test_a_server_that_stays_down_costs_one_line(server, tmp_path):
    server.statuses = [503] * 100
    with pytest.raises(UserError, match=r"cannot fetch http.*/file.tgz \(the server answers 503.*--base-url.*again"):
        get(server, tmp_path)
    assert len(server.requests) == 6


def test_no_network_costs_one_line(tmp_path):
    with serve({}) as server:
        pass
    with pytest.raises(UserError, match=r"cannot fetch http.*refused.*check the network") as caught:
        get(server, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_not_asked_for_twice(server, tmp_path):
    del server.files["/file.tgz"]
    with pytest.raises(UserError, match="answers 404 Not Found; name a mirror"):
        get(server, tmp_path)
    assert len(server.requests) == 1


def test_a_corrupt_file_is_deleted_and_fetched_again(server, tmp_path):
    server.files["/file.tgz"] = BODY[:500_000] + b"?" + BODY[500_001:]
    path = tmp_path / "deep" / "file.tgz"
    with pytest.raises(
        UserError, match=rf"file.tgz.partial, from {server.url}/file.tgz, had the SHA-256 .* deleted: run"
    ):
        get(server, tmp_path)
    assert list(path.parent.iterdir()) == []
    server.files["/file.tgz"] = BODY
    assert get(server, tmp_path).read_bytes() == BODY
    path.write_bytes(BODY[:-1])  # a bad disk, or a file that was put there by hand
    with pytest.raises(
        UserError, match="had 999,999 bytes, not 1,000,000, and was deleted: run the same command again"
    ):
        get(server, tmp_path)
    assert get(server, tmp_path).read_bytes() == BODY


def test_another_size_is_noticed_before_it_is_fetched(server, tmp_path):
    server.files["/file.tgz"] = BODY * 2
    with pytest.raises(UserError, match="has 2,000,000 bytes where TFDS registered 1,000,000"):
        get(server, tmp_path)


def head(*lines, status="200 OK"):
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines, "")).encode("latin-1")


def fails(url, path, checksum=CHECKSUM):
    """The one line that a download costs; none of it is for the terminal to obey."""
    with pytest.raises(UserError) as caught:
        fetch(url, path, checksum, first_pause=0.001)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("lines", "checksum", "whose"),
    [
        ([], CHECKSUM, "TFDS registered"),
        (["Transfer-Encoding: chunked"], CHECKSUM, "TFDS registered"),
        (["Transfer-Encoding: chunked", "Content-Length: 1000000"], CHECKSUM, "TFDS registered"),
        (["Transfer-Encoding: chunked", "Content-Length: 1000000"], None, "it announced"),
    ],
)
def test_an_endless_file_does_not_fill_the_disk(tmp_path, lines, checksum, whose):
    most, sent = [0], [0]

    def reply(_):
        yield head(*lines)
        for _ in range(1_000):  # the end of this test if nothing else ends it
            yield b"10000\r\n" + bytes(1 << 16) + b"\r\n" if lines else bytes(1 << 16)
            sent[0] += 1 << 16
            most[0] = max([most[0], *(path.stat().st_size for path in tmp_path.iterdir())])

    with answer(reply) as (url, requests):
        message = fails(url, tmp_path / "file.tgz", checksum)
    assert f"file.tgz sends more than the 1,000,000 bytes that {whose}: it is another file; name a mirror" in message
    assert most[0] <= 1_000_000
    assert sent[0] < 60_000_000
    assert len(requests) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", ["abc", "-1", "1e6", "1_000", "9" * 5_000, "\x1b[2J", "\xb2"])
def test_a_length_that_is_none_costs_one_line(tmp_path, length):
    with answer(lambda _: [head(f"Content-Length: {length}"), BODY]) as (url, requests):
        assert "file.tgz: the server says Content-Length: " in fails(url, tmp_path / "file.tgz")
    assert len(requests) == 1
    assert list(tmp_path.iterdir()) == []


JUNK = ['"\x1b]0;owned\x07"', '"a\r\n b"', '"\xe9"', f'"{"x" * 1_000}"', 'W/"a"', "yesterday", '"a" "b"']


@pytest.mark.parametrize("name", ["ETag", "Last-Modified"])
@pytest.mark.parametrize("junk", JUNK)
def test_a_validator_that_is_none_is_not_sent_back(tmp_path, name, junk):
    def reply(request):
        if "Range:" in request:
            yield head(f"Content-Range: bytes 1000-999999/{len(BODY)}", status="206 Partial Content") + BODY[1_000:]
        else:
            yield head(f"{name}: {junk}", f"Content-Length: {len(BODY)}") + BODY[:1_000]

    with answer(reply) as (url, requests):
        fetch(url, tmp_path / "file.tgz", CHECKSUM, first_pause=0.001)
    assert (tmp_path / "file.tgz").read_bytes() == BODY
    assert "If-Range" not in "".join(requests)


@pytest.mark.parametrize("content", [b"\xff\xfe", '"日本"'.encode(), b'"a\r\nX: y"', b"", b'"half'])
def test_a_damaged_validator_is_none(server, tmp_path, content):
    partial = partial_of(tmp_path)
    partial.write_bytes(BODY[:700_000])
    partial.with_name("file.tgz.validator").write_bytes(content)
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == ["bytes=700000-"]


@pytest.mark.parametrize("name", ["file.tgz", "file.tgz.partial", "file.tgz.validator"])
def test_a_folder_in_the_way_is_named(server, tmp_path, name):
    (tmp_path / name).mkdir()
    message = fails(f"{server.url}/file.tgz", tmp_path / "file.tgz")
    assert message.endswith(
        f"/{name} is a folder, where a file is to be written: remove it and run the same command again"
    )
    assert server.requests == []


def test_a_server_that_refuses_every_range_is_asked_twice(tmp_path):
    (tmp_path / "file.tgz.partial").write_bytes(BODY[:9])
    with answer(lambda _: [head("Content-Length: 0", status="416 Range Not Satisfiable")]) as (url, requests):
        assert "the server answers 416" in fails(url, tmp_path / "file.tgz")
    assert ["Range:" in request for request in requests] == [True, False]


def test_a_server_that_never_comes_further_is_left(tmp_path):
    """It starts again each time and breaks off here or there: something comes, but not more than before."""
    sizes = iter([600, 500] * 1_000)
    with answer(lambda _: [head(f"Content-Length: {len(BODY)}"), BODY[: next(sizes)]]) as (url, requests):
        assert "the connection broke after 500 of 1,000,000 bytes" in fails(url, tmp_path / "file.tgz")
    assert len(requests) == 6


@pytest.mark.parametrize(
    "said",
    [
        head("Content-Length: 0", status="404 \x1b[2J\x1b]0;owned\x07gone"),
        head("Content-Length: 0", status="503 \x1b[2J"),
        head("Location: file:///\x1b[2J", status="302 Found"),
        head("Location: http://a..b/", status="302 Found"),
        b"\x1b[2J\r\n\r\n",
    ],
)
def test_what_a_server_says_is_not_for_the_terminal(tmp_path, capfd, said):
    with answer(lambda _: [said]) as (url, _):
        fails(url, tmp_path / "file.tgz")
    assert "\x1b" not in capfd.readouterr().err


def test_unpacks_what_tfds_needs(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("a/b", b"zip")
    contents = {
        "x.tgz": archive({"a/b": b"tar"}),
        "x.zip": packed.getvalue(),
        "x.de.gz": gzip.compress(b"gz"),
        "x": b"-",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        unpack(tmp_path / name, tmp_path / "out" / name)
    assert (tmp_path / "out" / "x.tgz" / "a" / "b").read_bytes() == b"tar"
    assert (tmp_path / "out" / "x.zip" / "a" / "b").read_bytes() == b"zip"
    assert (tmp_path / "out" / "x.de.gz").read_bytes() == b"gz"
    assert (tmp_path / "out" / "x").read_bytes() == b"-"


def test_half_an_extraction_is_done_again(tmp_path):
    path, partial = tmp_path / "x.tgz", tmp_path / "out.partial"
    path.write_bytes(archive({"a/b": b"tar"}))
    (partial / "a").mkdir(parents=True)
    (partial / "a" / "c").write_bytes(b"left over")
    unpack(path, tmp_path / "out")
    assert [str(child.relative_to(tmp_path / "out")) for child in (tmp_path / "out").rglob("*")] == ["a", "a/b"]
    path.unlink()
    unpack(path, tmp_path / "out")  # what is unpacked needs its archive no more


def _link(name, target):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content", [archive({"../outside": b"x"}, "w"), _link("a", "../../outside"), _link("a", "/etc")]
)
def test_nothing_is_written_outside(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.tar is not safe to unpack"):
        unpack(tmp_path / "x.tar", tmp_path / "deep" / "out")
    assert {path.name for path in tmp_path.rglob("*")} == {"x.tar", "deep"}
    assert not pathlib.Path("outside").exists()


def _zip(content, method=zipfile.ZIP_DEFLATED):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as file:
        file.writestr("a", content)
    return packed.getvalue()


ARCHIVES = {
    "x.tgz": archive({"a": BODY}),
    "x.tar.bz2": archive({"a": BODY[:9_000]}, "w:bz2"),
    "x.tar.xz": archive({"a": BODY}, "w:xz"),
    "x.zip": _zip(BODY),
    "x.gz": gzip.compress(BODY),
    "x.bz2": bz2.compress(BODY[:9_000]),
}


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[: len(data) // 2] + bytes(99) + data[len(data) // 2 + 99 :],
        lambda data: data[:4] + b"?" * 50,
        lambda data: b"not an archive",
        lambda data: b"",
    ],
    ids=["cut", "overwritten", "head", "other", "empty"],
)
def test_a_damaged_archive_is_deleted(tmp_path, name, damage):
    path = tmp_path / name
    path.write_bytes(damage(ARCHIVES[name]))
    if name == "x.gz" and not path.read_bytes():
        return  # an empty file is what gzip makes of nothing
    with pytest.raises(UserError, match=rf"{name} is damaged .* was deleted: run the same command again"):
        unpack(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_zip_whose_end_points_before_its_beginning_is_deleted(tmp_path):
    content = bytearray(_zip(b"a" * 1_000))
    content[-6:-2] = (1 << 30).to_bytes(4, "little")  # where the list of members begins
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.zip is damaged .* was deleted"):
        unpack(tmp_path / "x.zip", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_only_others_can_unpack_is_kept(tmp_path):
    content = bytearray(_zip(b"secret", zipfile.ZIP_STORED))
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + offset] |= 1  # says that it is encrypted
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.zip cannot be unpacked \(.*encrypted.*\): unpack it to .*/out by other"):
        unpack(tmp_path / "x.zip", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"x"), lambda path: path.symlink_to("elsewhere")])
def test_whatever_is_in_the_way_of_an_extraction_is_removed(tmp_path, make):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x.tgz").write_bytes(archive({"a": b"tar"}))
    make(tmp_path / "out.partial")
    unpack(tmp_path / "x.tgz", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == b"tar"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_full_disk_keeps_the_archive(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(BODY))
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gz"]
