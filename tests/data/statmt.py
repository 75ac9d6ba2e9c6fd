"""A stand-in for statmt.org: an HTTP server that can break off, and small archives with the real names and layouts."""

import contextlib
import gzip
import hashlib
import http.server
import io
import re
import socketserver
import tarfile
import time

from tests.serving import serving
from tfx_jax.data.sources.download import Checksum

EUROPARL = "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz"
CRAWL = "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz"
NEWS = "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz"
DEV = "http://data.statmt.org/wmt19/translation-task/dev.tgz"
UNITED_NATIONS = "http://www.statmt.org/wmt13/training-parallel-un.tgz"
GIGA = "http://www.statmt.org/wmt10/training-giga-fren.tar"


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, by path, and notes every request as [path, Range header, body bytes sent]."""

    daemon_threads = True
    resumes = True  # whether it knows Range
    bytes_per_second = float("inf")

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.requests = []
        self.breaks = {}  # path: after how many body bytes each of the next connections breaks
        self.redirects = {}
        self.statuses = []  # what the next requests are answered instead
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def sent(self, path):
        return [count for name, _, count in self.requests if name == path]

    def handle_error(self, request, client_address):
        pass  # clients of these tests hang up


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, asked = self.server, self.headers["Range"]
        request = [self.path, asked, 0]
        server.requests.append(request)
        if self.path in server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects[self.path])
            self.end_headers()
            return
        if server.statuses or self.path not in server.files:
            self.send_error(server.statuses.pop(0) if server.statuses else 404)
            return
        body = server.files[self.path]
        tag = f'"{hashlib.md5(body).hexdigest()}"'
        start = 0
        if asked and server.resumes and self.headers["If-Range"] in (None, tag):
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
        if start >= len(body) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", tag)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        end = min(len(body), start + server.breaks[self.path].pop(0)) if server.breaks.get(self.path) else len(body)
        for at in range(start, end, 1 << 14):
            block = body[at : min(at + (1 << 14), end)]
            request[2] += len(block)  # first: a client that has the last block may look at once
            self.wfile.write(block)
            if server.bytes_per_second < float("inf"):
                time.sleep(len(block) / server.bytes_per_second)


def serve(files):
    return serving(Server(files))


@contextlib.contextmanager
def answer(reply):
    """A server of which every byte is chosen: `reply(request)` gives the blocks that it sends, then it hangs up."""
    requests = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            requests.append(b"".join(iter(self.rfile.readline, b"\r\n")).decode())
            with contextlib.suppress(OSError):  # clients of these tests hang up
                for block in reply(requests[-1]):
                    self.request.sendall(block)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/file.tgz", requests


def path_of(url):
    return "/" + url.split("/", 3)[3]


def checksums_of(archives):
    return {url: Checksum(len(body), hashlib.sha256(body).hexdigest()) for url, body in archives.items()}


def archive(members, mode="w:gz"):
    """The bytes of a tar archive that holds `members`, by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def pairs_of(subset, language, count):
    """Sentence pairs that name where they come from; every seventh of Common Crawl lacks a side, as some do."""
    words = {"de": "Größe", "fr": "à côté"}[language]
    line = "" if subset == "newstest2014" else "\r"  # within a sentence, where a line is not read as Python reads it
    pairs = [(f"{subset} {words} {index}{line} zwei", f"{subset} size {index} <b>&amp;") for index in range(count)]
    if subset == "commoncrawl":
        pairs[::7] = [("", english) for _, english in pairs[::7]]
    return pairs


def with_members(packed, members):
    """The archive with more in it, in front."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        held = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
    return archive({**members, **held})


# How many pairs each part of the archives holds.
SIZES = {"europarl": 60, "commoncrawl": 50, "news": 20, "newstest2013": 9, "newstest2014": 7, "un": 11, "giga": 13}


def expected_pairs(language):
    """What TFDS's builder should find in the archives: every pair with both sides."""
    train = ["europarl", "commoncrawl", "news", *(["un", "giga"] if language == "fr" else [])]
    parts = {"train": train, "validation": ["newstest2013"], "test": ["newstest2014"]}
    return {
        split: sorted(pair for subset in subsets for pair in pairs_of(subset, language, SIZES[subset]) if all(pair))
        for split, subsets in parts.items()
    }


def archives(sizes=SIZES):
    """Address: bytes, of everything that de-en and fr-en of WMT14 need."""
    europarl, crawl, news, dev = {}, {}, {}, {}
    for foreign in ("de", "fr"):
        pair = f"{foreign}-en"
        europarl |= _both(f"training/europarl-v7.{pair}.{{}}", "europarl", foreign, sizes)
        crawl |= _both(f"commoncrawl.{pair}.{{}}", "commoncrawl", foreign, sizes)
        news |= _both(f"training/news-commentary-v9.{pair}.{{}}", "news", foreign, sizes)
        dev |= _both("dev/newstest2013.{}", "newstest2013", foreign, sizes)  # the English side is one for all languages
        for side, name in enumerate((f"src.{foreign}", "ref.en")):
            dev[f"dev/newstest2014-{foreign}en-{name}.sgm"] = _sgm("newstest2014", foreign, sizes, side)
    giga = _both("giga-fren.release2.fixed.{}.gz", "giga", "fr", sizes)
    return {
        EUROPARL: archive(europarl),
        CRAWL: archive(crawl),
        NEWS: archive(news),
        DEV: archive(dev),
        UNITED_NATIONS: archive(_both("un/undoc.2000.fr-en.{}", "un", "fr", sizes)),
        GIGA: archive({name: gzip.compress(content) for name, content in giga.items()}, "w"),
    }


def _both(name, subset, language, sizes):
    """The two files of a parallel text, a sentence a line."""
    pairs = pairs_of(subset, language, sizes[subset])
    return {
        name.format(code): "".join(f"{pair[side]}\n" for pair in pairs).encode()
        for side, code in enumerate((language, "en"))
    }


def _sgm(subset, language, sizes, side):
    """One side of a test set in the markup of the conference."""
    pairs = pairs_of(subset, language, sizes[subset])
    rows = (f'<seg id="{number}">{pair[side]}</seg>\n' for number, pair in enumerate(pairs, start=1))
    kind = ("srcset", "refset")[side]
    return f'<{kind} setid="{subset}">\n<doc>\n<p>\n{"".join(rows)}</p>\n</doc>\n</{kind}>\n'.encode()
