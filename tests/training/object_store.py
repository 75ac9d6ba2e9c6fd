"""A stand-in for Google's object store: of its JSON API what gcsfs, tensorstore and google-cloud-storage ask for."""

import base64
import contextlib
import email.message
import http.server
import json
import re
import socket
import threading
import time
import urllib.parse

from tests.serving import serving


class Server(http.server.ThreadingHTTPServer):
    """Keeps `objects`, by name, of one bucket.

    Attributes:
      fails: what requests are answered instead: a status, or nothing for as many seconds; None if all is well.
      fails_at: from the first request on that names this.
    """

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.uploads: dict[str, str] = {}
        self.requests: list[str] = []
        self.fails: int | float | None = None
        self.fails_at = ""
        self.lock = threading.RLock()
        self.connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # clients of these tests hang up

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self):
        """Also hangs up: a client keeps its connections, and would ask this server instead of the next one there."""
        super().server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def put(self, name, content, if_generation=None):
        """The new object's resource; None where the name has not the generation that it should have."""
        with self.lock:
            before = self.objects.get(name, (b"", 0))[1]
            if if_generation is not None and int(if_generation) != before:
                return None
            self.objects[name] = content, time.time_ns()
            return self.resource(name)

    def resource(self, name):
        import google_crc32c  # which comes with gcsfs: pytest reads this file without, too

        content, generation = self.objects[name]
        quoted = urllib.parse.quote(name, safe="")
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(generation / 1e9))
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "bucket",
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": when,
            "updated": when,
            "crc32c": base64.b64encode(google_crc32c.Checksum(content).digest()).decode(),
            "mediaLink": f"{self.url}/download/storage/v1/b/bucket/o/{quoted}?alt=media",
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: the next waits 40 ms otherwise

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _dispatch(self):
        length = self.headers["Content-Length"]
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(length or 0))
        parts = urllib.parse.urlsplit(self.path)
        query = {name: values[-1] for name, values in urllib.parse.parse_qs(parts.query).items()}
        self.server.requests.append(f"{self.command} {urllib.parse.unquote(self.path)}")
        if self.server.fails is not None and self.server.fails_at in self.server.requests[-1]:
            self.server.fails_at = ""
            return self._fail(self.server.fails)
        path = parts.path.removeprefix("/download").removeprefix("/upload")
        bucket, _, name = path.removeprefix("/storage/v1/b/").partition("/o")
        name = urllib.parse.unquote(name.removeprefix("/"))
        with self.server.lock:
            if parts.path.startswith("/upload"):
                return self._upload(query, content)
            if self.command == "POST":
                source, how, target = re.split("/(rewriteTo/b/bucket|moveTo)/o/", name)
                return self._copy(source, target, is_moved=how == "moveTo")
            if "/o" not in path:
                return self._answer(200 if bucket == "bucket" else 404, {"kind": "storage#bucket", "name": bucket})
            if not name:
                return self._list(query)
            return self._object(name, query)

    def _fail(self, how):
        if isinstance(how, int):
            return self._answer(how, {"error": {"code": how, "message": "made to\nfail"}})
        time.sleep(how)
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _dispatch  # noqa: N815  names that are asked for

    def _object(self, name, query):
        if name not in self.server.objects:
            return self._answer(404, {"error": {"code": 404, "message": "Not Found"}})
        content, generation = self.server.objects[name]
        if self.command == "DELETE":
            del self.server.objects[name]
            return self._answer(204)
        if query.get("alt") != "media":
            return self._answer(200, self.server.resource(name))
        headers = {"X_Goog_Generation": str(generation), "Content_Type": "application/octet-stream"}
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            return self._answer(304, **headers)
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
            return self._answer(412)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"] or "")
        if asked is None:
            return self._answer(200, content, **headers)
        start = int(asked[1]) if asked[1] else max(0, len(content) - int(asked[2]))
        end = min(int(asked[2]) + 1, len(content)) if asked[1] and asked[2] else len(content)
        if start >= len(content):
            return self._answer(416, Content_Range=f"bytes */{len(content)}")
        return self._answer(206, content[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(content)}", **headers)

    def _list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, prefixes = [], set()
        for name in sorted(self.server.objects):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if "endOffset" in query and name >= query["endOffset"]:
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.server.resource(name))
        self._answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def _upload(self, query, content):
        kind, name = query.get("uploadType"), query.get("name")
        if kind == "resumable" and self.command == "POST":
            name = name or json.loads(content)["name"]
            key = str(len(self.server.uploads))
            self.server.uploads[key] = name
            return self._answer(200, Location=f"{self.server.url}/upload/storage/v1/b/bucket/o?upload_id={key}")
        if "upload_id" in query:
            name = self.server.uploads[query["upload_id"]]
        elif kind == "multipart":
            head = email.message.Message()
            head["Content-Type"] = self.headers["Content-Type"]
            boundary = head.get_param("boundary").encode()
            said, content = (
                re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in content.split(b"--" + boundary)[1:3]
            )
            name, content = json.loads(said)["name"], content.removesuffix(b"\n").removesuffix(b"\r")
        made = self.server.put(name, content, query.get("ifGenerationMatch"))
        return self._answer(412, {"error": {"code": 412}}) if made is None else self._answer(200, made)

    def _copy(self, source, target, *, is_moved):
        if source not in self.server.objects:
            return self._answer(404)
        made = self.server.put(target, self.server.objects[source][0])
        if is_moved:
            del self.server.objects[source]
        self._answer(200, made if is_moved else {"done": True, "resource": made})


def serve(port=0):
    return serving(Server(port))
