"""Fetches large files and unpacks archives so that an interruption at any moment costs little and damages nothing.

A file is fetched under the name `NAME.partial`, goes on where it stopped, and takes its own name only when its size and
SHA-256 are right. An archive is unpacked in a folder of such a name. What has its own name is therefore complete.
"""

import bz2
import collections
import gzip
import hashlib
import http.client
import os
import pathlib
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tfx_jax.errors import UserError

_BLOCK = 1 << 18  # bytes read at a time
_PATIENCE = 60.0  # seconds without a byte after which a connection counts as lost
_ATTEMPTS = 6  # in a row that bring nothing
_PASSING = (408, 429, 500, 502, 503, 504)  # HTTP errors that may be gone in a moment
RUN_AGAIN = "run the same command again"


class Checksum(NamedTuple):
    """What a file must be."""

    size: int  # bytes
    sha256: str  # hexadecimal


class _ConnectionLostError(Exception):
    """An attempt failed in a way that the next one may not."""


def fetch(url: str, path: pathlib.Path, checksum: Checksum | None = None, *, first_pause: float = 1.0) -> None:
    """Downloads a file, or what is missing of it, unless it is there and right.

    A lost connection is taken up again where it broke, if the server can (HTTP Range, guarded by If-Range); pauses
    between attempts double. Progress goes to stderr.

    Args:
      url: http or https.
      path: where the file goes; folders are made. Beside it stand `NAME.partial` and `NAME.validator` meanwhile.
      checksum: what it must be; None takes what comes, which the log then names.
      first_pause: seconds before the second attempt.

    Raises:
      UserError: if the server cannot be reached or has not the file, or the file is not what it must be: then it is
        deleted, so that the next call fetches it anew.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        _complete(url, partial, checksum, first_pause, _Meter(path.name))
        _verify(url, partial, checksum)
        partial.replace(path)
        _validator_of(partial).unlink(missing_ok=True)
    elif checksum is not None:
        _verify(url, path, checksum)


def _complete(url: str, partial: pathlib.Path, checksum: Checksum | None, pause: float, meter: "_Meter") -> None:
    """Fetches until the file is whole; failures are counted from the last attempt that brought something."""
    failures = 0
    while checksum is None or _size(partial) < checksum.size:
        before = _size(partial)
        try:
            _append(url, partial, checksum, meter)
            return
        except _ConnectionLostError as error:
            failures = failures + 1 if _size(partial) <= before else 1
            if failures >= _ATTEMPTS:
                raise UserError(
                    f"cannot fetch {url} ({error}): check the network, or name a mirror with --base-url, "
                    f"then {RUN_AGAIN}; it goes on from here"
                ) from None
            wait = pause * 2 ** (failures - 1)
            meter.note(f"{partial.stem}: {error}; going on in {wait:g} s")
            time.sleep(wait)


def _append(url: str, partial: pathlib.Path, checksum: Checksum | None, meter: "_Meter") -> None:
    """One attempt: asks for what is missing and writes what comes."""
    headers, start = _range(partial, checksum)
    with _open(urllib.request.Request(url, headers=headers), url) as response:
        resumed = response.status == 206 and (response.headers["Content-Range"] or "").startswith(f"bytes {start}-")
        if not resumed:
            start = 0
            _begin_anew(partial, response)
        length, expected = response.headers["Content-Length"], checksum and checksum.size
        total = start + int(length) if length is not None else expected
        if checksum is not None and total != expected:
            raise UserError(
                f"{url} has {total:,} bytes where TFDS registered {checksum.size:,}: "
                "it is another file now; name a mirror with --base-url"
            )
        done = start
        with partial.open("ab") as file:
            for block in _blocks(response):
                file.write(block)
                done += len(block)
                meter.show(done, total)
        if total is not None and done < total:
            raise _ConnectionLostError(f"the connection broke after {done:,} of {total:,} bytes")


def _range(partial: pathlib.Path, checksum: Checksum | None) -> tuple[dict[str, str], int]:
    """The headers that ask for the rest, and where it starts. A validator or a checksum must vouch for what is here."""
    start, validator = _size(partial), _validator_of(partial)
    if not start or (checksum is None and not validator.exists()):
        return {}, 0
    headers = {"Range": f"bytes={start}-"}
    if validator.exists():
        headers["If-Range"] = validator.read_text()
    return headers, start


def _begin_anew(partial: pathlib.Path, response: http.client.HTTPResponse) -> None:
    """Forgets what is there, then notes what identifies the file that comes: never the one beside the other."""
    partial.unlink(missing_ok=True)
    tag = response.headers["ETag"] or ""
    # A weak ETag promises no equal bytes, and If-Range may not hold one.
    identity = tag if tag.startswith('"') else response.headers["Last-Modified"]
    validator = _validator_of(partial)
    validator.unlink(missing_ok=True)
    if identity:
        note = validator.with_name(validator.name + ".partial")
        note.write_text(identity)
        note.replace(validator)


def _open(request: urllib.request.Request, url: str) -> http.client.HTTPResponse:
    try:
        return urllib.request.urlopen(request, timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # what lies here is as long as the file or longer, so it is another one
            request.headers.clear()
            return _open(request, url)
        if error.code in _PASSING:
            raise _ConnectionLostError(f"the server answers {error.code} {error.reason}") from None
        raise UserError(
            f"{url}: the server answers {error.code} {error.reason}; name a mirror with --base-url"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _ConnectionLostError(str(reason) or type(reason).__name__) from None


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Reads to the end. Only errors of the connection are turned into a loss: the disk has its own."""
    while True:
        try:
            block = response.read1(_BLOCK)  # what has come, so that no more than that is lost
        except (OSError, http.client.HTTPException) as error:
            raise _ConnectionLostError(str(error) or type(error).__name__) from None
        if not block:
            return
        yield block


def _verify(url: str, path: pathlib.Path, checksum: Checksum | None) -> None:
    with path.open("rb") as file:
        found = Checksum(_size(path), hashlib.file_digest(file, "sha256").hexdigest())
    if checksum is None:
        print(f"no checksum is registered for {url}; this file's SHA-256 is {found.sha256}", file=sys.stderr)
    elif found != checksum:
        path.unlink()
        _validator_of(path).unlink(missing_ok=True)
        what = f"{found.size:,} bytes" if found.size != checksum.size else f"the SHA-256 {found.sha256}"
        right = f"{checksum.size:,}" if found.size != checksum.size else checksum.sha256
        raise UserError(f"{path}, from {url}, had {what}, not {right}, and was deleted: {RUN_AGAIN} to fetch it anew")


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _validator_of(partial: pathlib.Path) -> pathlib.Path:
    return partial.with_name(partial.name.removesuffix(".partial") + ".validator")


class _Meter:
    """How far a download is: one line that moves on a terminal, elsewhere a line each half minute."""

    def __init__(self, name: str):
        self._name = name
        self._moves = sys.stderr.isatty()
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=50)
        self._next = 0.0

    def note(self, text: str) -> None:
        print(f"\r{text}\x1b[K" if self._moves else text, file=sys.stderr)

    def show(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now < self._next and done != total:
            return
        self._next = now + (0.2 if self._moves else 30.0)
        self._seen.append((now, done))
        seconds, size = now - self._seen[0][0], done - self._seen[0][1]
        speed = f"  {size / seconds / 1e6:.1f} MB/s" if seconds and size > 0 else ""
        line = f"{self._name}  {done / 1e6:,.1f}{f' of {total / 1e6:,.1f}' if total else ''} MB{speed}"
        if self._moves:
            print(f"\r{line}\x1b[K", end="\n" if done == total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr)


def unpacked_name(name: str) -> str:
    """What an archive or a compressed file is called when unpacked: an archive's folder keeps the whole name.

    >>> unpacked_name("news.de-en.tsv.gz"), unpacked_name("dev.tgz"), unpacked_name("plain.txt")
    ('news.de-en.tsv', 'dev.tgz', 'plain.txt')
    """
    return name if _is_tar(name) or name.endswith(".zip") else name.removesuffix(".gz").removesuffix(".bz2")


def unpack(archive: pathlib.Path, target: pathlib.Path) -> None:
    """Unpacks a tar or zip archive into the folder `target`, or a .gz or .bz2 file into the file `target`.

    Raises:
      UserError: if a member would be written outside of `target`, or the archive is damaged; it is deleted then.
    """
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _unpack(archive, partial)
    except tarfile.FilterError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{archive} is not safe to unpack ({error}): it is not the file it should be") from None
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error) as error:
        archive.unlink()
        why = str(error).partition(":\n")[0]  # tarfile adds what each of its methods thinks
        raise UserError(f"{archive} is damaged ({why}) and was deleted: {RUN_AGAIN} to fetch it anew") from None
    os.replace(partial, target)


def _unpack(archive: pathlib.Path, target: pathlib.Path) -> None:
    name = archive.name
    if _is_tar(name):
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    elif name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(target)  # drops .. and leading slashes itself
    else:
        opener = {".gz": gzip.open, ".bz2": bz2.open}.get(archive.suffix, open)
        with opener(archive, "rb") as source, target.open("wb") as plain:
            shutil.copyfileobj(source, plain, _BLOCK)


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz"))
