"""Resumable downloads of large files and safe unpacking of archives.

A file is downloaded as `NAME.partial`, resumed after an interruption, and renamed only when its size and SHA-256 are
right. An archive is unpacked into a folder `NAME.partial` and then renamed. A file or folder with its final name is
therefore complete.

Servers are not trusted: no more bytes are written than registered, and their messages are made safe to print.
"""

import bz2
import collections
import contextlib
import errno
import gzip
import hashlib
import http.client
import lzma
import os
import pathlib
import re
import shutil
import struct
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfx_jax.errors import UserError, printable

_BLOCK = 1 << 18  # bytes read at a time
_TIMEOUT = 60.0  # seconds without a byte after which a connection counts as lost
_ATTEMPTS = 6  # consecutive attempts without progress before giving up
_TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP errors that are retried
# Exceptions of the unpacking modules for damaged archives. An OSError of the disk has an errno other than EINVAL, which
# comes from zipfile's seeking to a negative position.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, struct.error)
_DAMAGE += (OSError, EOFError, ValueError, LookupError, ArithmeticError)
RUN_AGAIN = "run the same command again"
# Values allowed in If-Range: a strong ETag, or the date of Last-Modified (RFC 9110, sections 8.8.3 and 5.6.7).
_VALIDATOR = re.compile(
    r'"[\x21\x23-\x7e]{0,200}"|[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT'
)


class Checksum(NamedTuple):
    """Expected size and hash of a file."""

    size: int  # bytes
    sha256: str  # hexadecimal


class _ConnectionLostError(Exception):
    """An attempt failed with an error that is worth a retry."""

    def __str__(self) -> str:
        return printable(super().__str__(), 200)


def fetch(url: str, path: pathlib.Path, checksum: Checksum | None = None, *, first_pause: float = 1.0) -> None:
    """Downloads a file, or the missing rest of it; an existing file is only verified.

    Lost connections are resumed if the server supports it (HTTP Range, guarded by If-Range). Pauses between attempts
    double. Progress is printed to stderr.

    Args:
      url: http or https.
      path: path of the file; missing folders are created. During the download there are also `NAME.partial` and
        `NAME.validator`.
      checksum: expected size and hash. None accepts any file of any size, and prints its hash.
      first_pause: seconds before the second attempt.

    Raises:
      UserError: if the server cannot be reached or does not have the file, or the file is wrong. A wrong file is
        deleted, so that the next call downloads it again.
      OSError: if the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    for file in (path, partial, _validator_of(partial)):
        if file.is_dir() and not path.is_file():
            raise UserError(f"{file} is a folder, where a file is to be written: remove it and {RUN_AGAIN}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _complete(url, partial, checksum, first_pause, _Meter(path.name))
        _verify(url, partial, checksum)
        partial.replace(path)
        _validator_of(partial).unlink(missing_ok=True)
    elif checksum is not None:
        _verify(url, path, checksum)


def _complete(url: str, partial: pathlib.Path, checksum: Checksum | None, pause: float, meter: "_Meter") -> None:
    """Downloads the missing rest of a file, with retries.

    Args:
      url: address of the file.
      partial: path of the file during the download.
      checksum: expected size and hash, if known.
      pause: seconds before the second attempt; doubled for each further one.
      meter: shows the progress.

    Raises:
      UserError: after `_ATTEMPTS` consecutive attempts without progress.
    """
    failures = 0
    largest_size = _size(partial)
    while checksum is None or _size(partial) < checksum.size:
        try:
            _append(url, partial, checksum, meter)
            return
        except _ConnectionLostError as error:
            failures = 1 if _size(partial) > largest_size else failures + 1
            largest_size = max(largest_size, _size(partial))
            if failures >= _ATTEMPTS:
                raise UserError(
                    f"cannot fetch {url} ({error}): check the network, or name a mirror with --base-url, "
                    f"then {RUN_AGAIN}; it continues from here"
                ) from None
            wait = pause * 2 ** (failures - 1)
            meter.note(f"{partial.stem}: {error}; retrying in {wait:g} s")
            time.sleep(wait)


def _append(url: str, partial: pathlib.Path, checksum: Checksum | None, meter: "_Meter") -> None:
    """Makes one attempt: requests the missing bytes and appends them to the file.

    Raises:
      _ConnectionLostError: if another attempt may succeed.
      UserError: if the server does not have the file, or has another one.
    """
    headers, start = _range(partial, checksum)
    with _open(urllib.request.Request(url, headers=headers), url) as response:
        # Status 206 means partial content. Otherwise the server sends the whole file.
        resumed = response.status == 206 and (response.headers["Content-Range"] or "").startswith(f"bytes {start}-")
        if not resumed:
            start = 0
            _restart(partial, response)
        total = _total(url, response, start, checksum)
        done = start
        with partial.open("ab") as file:
            for block in _blocks(response):
                done += len(block)
                if total is not None and done > total:
                    break
                file.write(block)
                meter.show(done, total)
    if total is not None and done > total:
        partial.unlink()
        _validator_of(partial).unlink(missing_ok=True)
        whose = "it announced" if checksum is None else "TFDS registered"
        raise UserError(
            f"{url} sends more than the {total:,} bytes that {whose}: it is another file; name a mirror with --base-url"
        )
    if total is not None and done < total:
        raise _ConnectionLostError(f"the connection broke after {done:,} of {total:,} bytes")


def _total(url: str, response: http.client.HTTPResponse, start: int, checksum: Checksum | None) -> int | None:
    """Returns the size of the file from the server, which must equal the registered one if any; None if unknown."""
    length = response.headers["Content-Length"]
    if length is None:
        return None if checksum is None else checksum.size
    if not re.fullmatch("[0-9]{1,18}", length):
        raise UserError(
            f"{url}: the server says Content-Length: {printable(length, 100)}, which is no length; "
            "name a mirror with --base-url"
        )
    total = start + int(length)
    if checksum is not None and total != checksum.size:
        raise UserError(
            f"{url} has {total:,} bytes where TFDS registered {checksum.size:,}: "
            "the file has changed; name a mirror with --base-url"
        )
    return total


def _range(partial: pathlib.Path, checksum: Checksum | None) -> tuple[dict[str, str], int]:
    """Returns (headers that request the missing bytes, index of the first missing byte).

    A partial file without validator or checksum is not resumed, because the server's file may have changed.
    """
    start = _size(partial)
    identity = None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        identity = _VALIDATOR.fullmatch(_validator_of(partial).read_text("ascii"))
    if not start or (checksum is None and identity is None):
        return {}, 0
    headers = {"Range": f"bytes={start}-"}
    if identity:
        headers["If-Range"] = identity.group()  # makes the server send the whole file if it has changed
    return headers, start


def _restart(partial: pathlib.Path, response: http.client.HTTPResponse) -> None:
    """Deletes the partial file and then stores the validator of the new one, so that the two never mismatch."""
    partial.unlink(missing_ok=True)
    # A weak ETag does not guarantee equal bytes, and is not allowed in If-Range.
    candidates = (response.headers[name] or "" for name in ("ETag", "Last-Modified"))
    identity = next(filter(_VALIDATOR.fullmatch, candidates), None)
    validator = _validator_of(partial)
    validator.unlink(missing_ok=True)
    if identity:
        note = validator.with_name(validator.name + ".partial")
        note.write_text(identity)
        note.replace(validator)


def _open(request: urllib.request.Request, url: str) -> http.client.HTTPResponse:
    """Sends a request; raises _ConnectionLostError for errors worth a retry, otherwise UserError."""
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        # Range not satisfiable: the partial file is not shorter than the server's file, so it belongs to another one.
        # Request the whole file.
        if error.code == 416 and request.has_header("Range"):
            return _open(urllib.request.Request(url), url)
        answer = f"the server answers {error.code} {printable(str(error.reason), 200)}"
        if error.code in _TRANSIENT:
            raise _ConnectionLostError(answer) from None
        raise UserError(f"{url}: {answer}; name a mirror with --base-url") from None
    except UnicodeError as error:  # in the name of the host or of a host in a redirect
        raise UserError(
            f"{url}, or a redirect from it, has an invalid host name ({error}); name a mirror with --base-url"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _ConnectionLostError(str(reason) or type(reason).__name__) from None


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yields the response's bytes; turns errors of the connection, but not of the disk, into _ConnectionLostError."""
    while True:
        try:
            block = response.read1(_BLOCK)  # returns available bytes, so that an interruption loses few
        except (OSError, http.client.HTTPException) as error:
            raise _ConnectionLostError(str(error) or type(error).__name__) from None
        if not block:
            return
        yield block


def _verify(url: str, path: pathlib.Path, checksum: Checksum | None) -> None:
    """Compares a file with its checksum; deletes it and raises UserError if it differs. Prints an unknown checksum."""
    with path.open("rb") as file:
        actual = Checksum(_size(path), hashlib.file_digest(file, "sha256").hexdigest())
    if checksum is None:
        print(
            f"no checksum is registered for {printable(url)}; this file's SHA-256 is {actual.sha256}", file=sys.stderr
        )
    elif actual != checksum:
        path.unlink()
        _validator_of(path).unlink(missing_ok=True)
        had = f"{actual.size:,} bytes" if actual.size != checksum.size else f"the SHA-256 {actual.sha256}"
        expected = f"{checksum.size:,}" if actual.size != checksum.size else checksum.sha256
        raise UserError(
            f"{path}, from {url}, had {had}, not {expected}, and was deleted: {RUN_AGAIN} to fetch it again"
        )


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _validator_of(partial: pathlib.Path) -> pathlib.Path:
    return partial.with_name(partial.name.removesuffix(".partial") + ".validator")


class _Meter:
    """Progress of a download: one updated line on a terminal, elsewhere a new line every half minute."""

    def __init__(self, name: str):
        self._name = printable(name)
        self._is_terminal = sys.stderr.isatty()
        self._history: collections.deque[tuple[float, int]] = collections.deque(maxlen=50)  # (seconds, bytes so far)
        self._next_time = 0.0  # time.monotonic() before which nothing is printed

    def note(self, text: str) -> None:
        """Prints a message."""
        text = printable(text)
        print(f"\r{text}\x1b[K" if self._is_terminal else text, file=sys.stderr)  # "\x1b[K" clears the rest of the line

    def show(self, done: int, total: int | None) -> None:
        """Prints the progress if it is time to: bytes so far, total (None if unknown) and recent speed."""
        now = time.monotonic()
        if now < self._next_time and done != total:
            return
        self._next_time = now + (0.2 if self._is_terminal else 30.0)
        self._history.append((now, done))
        start_time, start_size = self._history[0]
        seconds, size = now - start_time, done - start_size
        speed = f"  {size / seconds / 1e6:.1f} MB/s" if seconds and size > 0 else ""
        line = f"{self._name}  {done / 1e6:,.1f}{f' of {total / 1e6:,.1f}' if total else ''} MB{speed}"
        if self._is_terminal:
            print(f"\r{line}\x1b[K", end="\n" if done == total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr)


def unpacked_name(name: str) -> str:
    """Returns the name of an unpacked file; the folder of an unpacked archive keeps the archive's name.

    >>> unpacked_name("news.de-en.tsv.gz"), unpacked_name("dev.tgz"), unpacked_name("plain.txt")
    ('news.de-en.tsv', 'dev.tgz', 'plain.txt')
    """
    return name if _is_tar(name) or name.endswith(".zip") else name.removesuffix(".gz").removesuffix(".bz2")


def unpack(archive: pathlib.Path, target: pathlib.Path) -> None:
    """Unpacks a tar or zip archive into the folder `target`, or a .gz or .bz2 file into the file `target`.

    Raises:
      UserError: if a member would be written outside `target`, Python cannot unpack the archive, or it is damaged; a
        damaged archive is deleted.
      OSError: if the files cannot be written.
    """
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    _remove(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _unpack(archive, partial)
    except BaseException as error:
        _remove(partial)
        if isinstance(error, tarfile.FilterError):
            raise UserError(
                f"{archive} is not safe to unpack ({error}): it cannot be the right file; delete it"
            ) from None
        if isinstance(error, RuntimeError):  # a password, or an unknown compression method
            raise UserError(f"{archive} cannot be unpacked ({error}): unpack it to {target} by other means") from None
        if not isinstance(error, _DAMAGE) or getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        archive.unlink()
        why = str(error).partition(":\n")[0]  # without the details of each of tarfile's methods
        raise UserError(f"{archive} is damaged ({why}) and was deleted: {RUN_AGAIN} to fetch it again") from None
    os.replace(partial, target)


def _remove(path: pathlib.Path) -> None:
    """Deletes a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unpack(archive: pathlib.Path, target: pathlib.Path) -> None:
    """Unpacks an archive without checks; see `unpack`."""
    name = archive.name
    if _is_tar(name):
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
            file: Any = tar.fileobj
            while file.read(_BLOCK):  # to the end of the stream, so that gzip verifies its checksum
                pass
    elif name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(target)  # removes ".." and leading slashes itself
    else:
        opener = {".gz": gzip.open, ".bz2": bz2.open}.get(archive.suffix, open)
        with opener(archive, "rb") as source, target.open("wb") as plain:
            shutil.copyfileobj(source, plain, _BLOCK)


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz"))
