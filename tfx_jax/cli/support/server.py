"""The HTTP application of `tfx-jax serve`, and the server that runs it. Needs Starlette and uvicorn."""

import asyncio
import contextlib
import ipaddress
import json
import math
import pathlib
import resource
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tfx_jax.cli.support.model_worker import BusyError, Job, ModelWorker
from tfx_jax.errors import UserError, check_text, one_line
from tfx_jax.generation import Sampling, Transcriber
from tfx_jax.training import LoadedModel

MAX_BODY = 16 * 2**20  # bytes of an uploaded file
MAX_JSON = 2 * 2**20  # bytes of a JSON body
MAX_CHARACTERS = 20_000  # of a text
MAX_ATTENDED = 2_000  # characters of a text whose attention is drawn
MAX_INPUTS = 64  # of a request
READ_SECONDS = 10.0  # until a request has arrived; until a client reads more of a full buffer
SHUTDOWN_SECONDS = 30.0  # from a signal until the process ends, the last five for the model's thread
MAX_CONNECTIONS = 512
_MODEL_PATH = "/v1/models/{model}"
_CSP = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; frame-src 'self' about:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


class _RequestError(Exception):
    """A request that is refused with a status and a message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def make_app(
    model: LoadedModel,
    name: str,
    *,
    transcriber: Transcriber | None = None,
    max_tokens: int = 512,
    hosts: frozenset[str] | None = frozenset({"127.0.0.1", "localhost", "[::1]"}),
    allowed_hosts: Sequence[str] = (),
) -> tuple[Any, ModelWorker]:
    """Returns the application and the worker that it uses, which the caller closes.

    Args:
      model: the model to serve.
      name: its name, for the page and for answers.
      transcriber: what transcribes, if the model is a Whisper.
      max_tokens: most new tokens that a request may ask for.
      hosts: host names, without port, that requests may address; None accepts IP addresses and this machine's name.
      allowed_hosts: more hosts, with or without port, that requests may address and the pages that send them may have.

    Raises:
      UserError: if the model neither predicts nor generates.
    """
    worker = ModelWorker(model, transcriber)
    app = _App(worker, name, max_tokens)
    return _Guard(app.starlette, hosts, app.observe, allowed_hosts), worker


def run_server(app: Any, worker: ModelWorker, listener: socket.socket, name: str) -> None:
    """Serves until SIGINT or SIGTERM, then answers the requests that have begun, for `SHUTDOWN_SECONDS` at most."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(SHUTDOWN_SECONDS) - 5,
    )
    host, port = listener.getsockname()[:2]
    print(f"serving {name} on http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C ends it)", flush=True)
    server = _Server(config)
    server.run(sockets=[listener])
    num_left = worker.close(max(server.deadline - time.monotonic(), 0.0))
    num_dropped = max(server.num_dropped, num_left)
    print(f"dropped requests: {num_dropped}" if num_dropped else "all requests are answered", file=sys.stderr)


class _Server(uvicorn.Server):
    """A server whose process ends with status 0 after a signal.

    Attributes:
      deadline: time of `time.monotonic` at which the process shall have ended.
      num_dropped: number of requests that the shutdown did not wait for.
    """

    deadline = 0.0
    num_dropped = 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the requests that have begun, and counts those that last too long."""
        self.deadline = time.monotonic() + SHUTDOWN_SECONDS
        await super().shutdown(sockets)
        self.num_dropped = sum(not task.done() for task in self.server_state.tasks)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM by a graceful shutdown."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes connections whose client sends or reads too slowly."""

    _waiting: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._waiting, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _expect_reading(self, num_unread: int | None = None) -> None:
        """Gives the client a limited time to read some of the full buffer, `num_unread` bytes when last seen."""
        num_left = self.transport.get_write_buffer_size()
        if num_unread is not None and num_left >= num_unread:
            self.transport.abort()
        else:
            self._writing = self.loop.call_later(READ_SECONDS, self._expect_reading, num_left)

    def _expect_request(self) -> None:
        """Gives the client a limited time for the headers of a request, if none is being answered."""
        cycle: Any = self.cycle  # None before the first request
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        elif not is_answering and self._waiting is None:
            self._waiting = self.loop.call_later(READ_SECONDS, self.transport.abort)


class _Guard:
    """Refuses requests for other hosts and from other sites, and adds headers and metrics; wraps an application."""

    def __init__(
        self,
        app: Any,
        hosts: frozenset[str] | None,
        observe: Callable[[str, int, float], None],
        allowed: Sequence[str] = (),
    ):
        self._app, self._hosts, self._observe = app, hosts, observe
        self._allowed = frozenset(host.lower() for host in allowed)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def send_with_headers(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] += [(key.lower().encode(), value.encode()) for key, value in _HEADERS.items()]
            await send(message)

        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        problem = self._problem(headers, is_page=(scope["method"], scope["path"]) == ("GET", "/"))
        app = self._app if problem is None else _error(*problem)
        try:
            await app(scope, receive, send_with_headers)
        finally:
            self._observe(scope["path"], status, time.monotonic() - start)

    def _problem(self, headers: dict[str, str], *, is_page: bool) -> tuple[int, str] | None:
        """Returns (status, message) for a request that is refused, otherwise None."""
        host = headers.get("host", "").lower()
        if not self._is_known(host):
            return 421, f"the header Host names {host[:80]!r}, which is not this server; see --allowed-host"
        origins = {f"{scheme}://{name}" for scheme in ("http", "https") for name in (host, *self._allowed)}
        is_foreign = "origin" in headers and headers["origin"].lower() not in origins
        is_link = is_page and headers.get("sec-fetch-mode") == "navigate"  # links to the page are harmless
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link:
            is_foreign = True
        return (403, "requests from other sites are refused") if is_foreign else None

    def _is_known(self, host: str) -> bool:
        """Returns whether a value of the header Host is a name of this server."""
        name, colon, port = host.rpartition(":")
        if not colon or not port.isdecimal():
            name = host
        if not self._allowed.isdisjoint((name, host)):
            return True
        if self._hosts is not None:
            return name in self._hosts
        if name in ("localhost", socket.gethostname().lower()):
            return True
        with contextlib.suppress(ValueError):  # no site can take over an address, unlike a name
            ipaddress.ip_address(name.strip("[]"))
            return True
        return False


class _App:
    """Endpoints and metrics of one model."""

    def __init__(self, worker: ModelWorker, name: str, max_tokens: int):
        self._worker, self._name, self._max_tokens = worker, name, max_tokens
        if worker.max_positions is not None:
            self._max_tokens = min(max_tokens, worker.max_positions - 1)
        self._has_chat = False
        if worker.generates:
            with contextlib.suppress(UserError):  # the model has no template, or jinja2 is missing
                _ = worker.model.chat_template
                self._has_chat = True
        self._counts: dict[tuple[str, int], int] = {}
        self._seconds: dict[str, float] = {}
        posts = {
            "/predict": (self._predict, not worker.generates),
            "/attention": (self._attend, True),
            "/v1/completions": (self._complete, worker.generates),
            "/v1/chat/completions": (self._chat, self._has_chat),
        }
        schemas = request_schemas(worker, self._max_tokens)
        self._schemas = {path: schema for path, schema in schemas.items() if posts[path][1]}
        gets = {
            "/": self._page,
            "/health": self._health,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/v1/models": self._models,
            _MODEL_PATH: self._model,
        }
        self._paths = {*gets, *(path for path, (_, is_offered) in posts.items() if is_offered)}
        routes = [Route(path.replace("}", ":path}"), endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        routes += [
            Route(path, _answering(endpoint), methods=["POST"])
            for path, (endpoint, is_offered) in posts.items()
            if is_offered
        ]
        handlers: Any = {404: self._not_found, 405: self._not_found}
        self.starlette = Starlette(routes=routes, exception_handlers=handlers)

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Counts a request for the metrics."""
        path = _MODEL_PATH if path.startswith("/v1/models/") else path
        path = path if path in self._paths else "other"
        self._counts[path, status] = self._counts.get((path, status), 0) + 1
        self._seconds[path] = self._seconds.get(path, 0.0) + seconds

    async def _not_found(self, request: Request, error: Any) -> Response:
        offered = ", ".join(sorted(self._paths))
        message = f"{request.method} is not offered at this path; this model has {offered}"
        return _error(error.status_code, message, error.headers)  # for 405, Allow

    async def _page(self, request: Request) -> Response:
        worker = self._worker
        settings = {
            "name": self._name,
            "generates": worker.generates,
            "inputs": worker.inputs,
            "suffixes": worker.suffixes,
            "maxTokens": self._max_tokens,
            "maxBody": MAX_BODY,
            "maxSeconds": worker.max_seconds,
        }
        data = json.dumps(settings, ensure_ascii=False).replace("<", "\\u003c")
        template = pathlib.Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        policy = f"camera=(), geolocation=(), microphone=({'self' if worker.max_seconds else ''})"
        headers = {"Content-Security-Policy": _CSP, "Permissions-Policy": policy}
        return HTMLResponse(template.replace("DATA", data), headers=headers)

    async def _health(self, request: Request) -> Response:
        is_well = self._worker.is_alive
        return JSONResponse({"status": "ok" if is_well else "the model's thread ended"}, 200 if is_well else 503)

    async def _metrics(self, request: Request) -> Response:
        worker = self._worker
        lines = ["# TYPE tfx_jax_requests_total counter"]
        for (path, status), count in sorted(self._counts.items()):
            lines.append(f'tfx_jax_requests_total{{path="{path}",status="{status}"}} {count}')
        lines.append("# TYPE tfx_jax_request_seconds summary")
        for path, seconds in sorted(self._seconds.items()):
            count = sum(number for (other, _), number in self._counts.items() if other == path)
            lines.append(f'tfx_jax_request_seconds_sum{{path="{path}"}} {seconds:.6f}')
            lines.append(f'tfx_jax_request_seconds_count{{path="{path}"}} {count}')
        unit = 1 if sys.platform == "darwin" else 1_024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        for name, kind, value in (
            ("tfx_jax_waiting_requests", "gauge", worker.num_waiting),
            ("tfx_jax_batches_total", "counter", worker.num_batches),
            ("tfx_jax_batched_requests_total", "counter", worker.num_inputs),
            ("tfx_jax_generated_tokens_total", "counter", worker.num_tokens),
            ("tfx_jax_peak_memory_bytes", "gauge", peak),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        paths: dict[str, Any] = {
            path: {"post": {"requestBody": {"required": True, "content": _content(schema)}}}
            for path, schema in self._schemas.items()
        }
        for path in self._paths - set(paths):
            paths[path] = {"get": {}}
        model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        paths[_MODEL_PATH]["get"] = {"parameters": [model]}
        for operations in paths.values():
            for operation in operations.values():
                operation["responses"] = {"200": {"description": "the answer"}, "default": {"description": "an error"}}
        info = {"title": f"tfx-jax serve: {self._name}", "version": "1"}
        return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["model"] != self._name:
            return _error(404, f"there is no model of this name; this server has {self._name!r}")
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        """Returns the description of the model."""
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "tfx_jax"}

    async def _predict(self, request: Request) -> Response:
        if self._worker.suffixes:
            inputs: Any = [await _file(request)]
        else:
            inputs = (await self._read(request))["inputs"]
            for number, row in enumerate(inputs, 1):
                for text in [row] if isinstance(row, str) else row:
                    check_text(text, f"input {number}")
        predictions = await self._answer(request, Job("predict", inputs))
        return JSONResponse({"predictions": _without_nan(predictions)})

    async def _attend(self, request: Request) -> Response:
        if self._worker.suffixes:
            source: Any = (await _file(request), None)
        else:
            body = await self._read(request)
            source = body["source"], body.get("target")
            for name, text in zip(("source", "target"), source, strict=True):
                check_text(text or "", name)
        return JSONResponse(await self._answer(request, Job("attend", source)))

    async def _complete(self, request: Request) -> Response:
        body = await self._read(request)
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        if body.get("stream") and len(prompts) > 1:
            raise _RequestError(400, "stream is for one prompt: send one, or leave stream out")
        for number, prompt in enumerate(prompts, 1):
            check_text(prompt, f"prompt {number}")
        return await self._generate(request, body, prompts, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request)
        messages = [message | {"content": _text_of(message["content"])} for message in body["messages"]]
        for number, message in enumerate(messages, 1):
            check_text(message["content"], f"message {number}")
        return await self._generate(request, body, messages, is_chat=True)

    async def _generate(self, request: Request, body: dict[str, Any], inputs: Any, *, is_chat: bool) -> Response:
        """Answers an OpenAI-style request."""
        stop = body.get("stop") or []
        length = body.get("max_completion_tokens", body.get("max_tokens"))
        default_length = self._max_tokens if is_chat else min(16, self._max_tokens)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        job = Job(
            "generate",
            inputs,
            sampling=Sampling(**{name: body[name] for name in names if name in body}),
            max_tokens=default_length if length is None else length,
            stop=[stop] if isinstance(stop, str) else stop,
            seed=body.get("seed"),
            is_chat=is_chat,
        )
        shape = _Shape(self._name, is_chat)
        with _unavailable_if_busy():
            self._worker.check_accepts()  # before the prompts are tokenized
        await asyncio.to_thread(self._fit, job, is_default=is_chat and length is None)
        if body.get("stream"):
            return self._stream(job, shape, has_usage=body.get("stream_options", {}).get("include_usage", False))
        outputs = await self._answer(request, job)
        choices = [shape.choice(index, text, reason) for index, (text, _, reason, _) in enumerate(outputs)]
        return JSONResponse(shape.document(choices) | {"usage": _usage(outputs)})

    def _fit(self, job: Job, *, is_default: bool) -> None:
        """Lowers a default of `max_tokens` to what fits after the prompt; raises UserError for too long a prompt."""
        room, prompts = self._worker.max_input_length, self._worker.encode(job)
        longest = max(map(len, prompts))
        if is_default and self._worker.max_positions is not None and longest > (room(job.max_tokens) or 0):
            num_free = max(self._worker.max_positions - longest, 1)
            job.max_tokens = num_free - num_free % 64 or num_free  # few lengths, and so few compiled programs
        limit = room(job.max_tokens)
        for number, ids in enumerate(prompts, 1):
            if limit is not None and len(ids) > limit:
                name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
                count = "a new token" if is_default else f"max_tokens={job.max_tokens}"
                raise UserError(
                    f"{name} has {len(ids):,} tokens: with {count} the model has room for {max(limit, 0):,}"
                )

    def _stream(self, job: Job, shape: "_Shape", *, has_usage: bool) -> Response:
        """Streams a text as server-sent events; its request ends when the client is gone."""
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def put(text: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the shutdown did not wait
                loop.call_soon_threadsafe(parts.put_nowait, text)

        job.on_text = put
        job.result.add_done_callback(lambda _: put(None))
        with _unavailable_if_busy():
            self._worker.submit(job)

        def event(value: Any) -> str:
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        def part(text: str, reason: str | None) -> str:
            usage = {"usage": None} if has_usage else {}
            return event(shape.document([shape.part(text, reason)], is_part=True) | usage)

        async def events() -> AsyncIterator[str]:
            while (text := await parts.get()) is not None:
                yield part(text, None)
            if error := job.result.exception():
                if isinstance(error, UserError):
                    yield event(_error_body(400, str(error)))
                else:
                    yield event(_error_body(500, "the server failed to answer"))
            else:
                outputs = job.result.result()
                yield part("", outputs[0][2])
                if has_usage:
                    yield event(shape.document([], is_part=True) | {"usage": _usage(outputs)})
            yield "data: [DONE]\n\n"

        return _Stream(job, events())

    async def _answer(self, request: Request, job: Job) -> Any:
        """Returns the result of a request; stops waiting when the client is gone."""
        with _unavailable_if_busy():  # also if the worker ends while the request waits
            future = asyncio.wrap_future(self._worker.submit(job).result)
            try:
                while not future.done():
                    await asyncio.wait([future], timeout=1.0)
                    if not future.done() and await request.is_disconnected():
                        raise ClientDisconnect
                return future.result()
            finally:
                job.is_cancelled = True

    async def _read(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object of a request, checked by the schema of its path, without fields that are null."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise _RequestError(415, "the header Content-Type must be application/json")
        content = await _body(request, MAX_JSON)
        try:
            value = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _RequestError(400, f"the body is not JSON: {one_line(error)}") from None
        if problem := violation(value, self._schemas[request.url.path], "the body"):
            raise _RequestError(400, problem)
        return {name: field for name, field in value.items() if field is not None}


class _Stream(StreamingResponse):
    """Server-sent events of a request, which is cancelled as soon as the response ends, even before its first part."""

    def __init__(self, job: Job, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.is_cancelled = True


class _Shape:
    """The documents of an OpenAI-style answer."""

    def __init__(self, name: str, is_chat: bool):
        self._is_chat = is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
        }
        self._is_first = True

    def document(self, choices: list[Any], *, is_part: bool = False) -> dict[str, Any]:
        """Returns a document with these choices."""
        fields = dict(self._fields)
        if is_part and self._is_chat:
            fields["object"] = "chat.completion.chunk"
        return fields | {"choices": choices}

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """Returns a whole text."""
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def part(self, text: str, reason: str | None) -> dict[str, Any]:
        """Returns a part of a streamed text."""
        delta = ({"role": "assistant"} if self._is_first else {}) | ({"content": text} if text else {})
        self._is_first = False
        content = {"delta": delta} if self._is_chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def request_schemas(worker: ModelWorker, max_tokens: int) -> dict[str, Any]:
    """Returns the JSON schema of the requests of each path; for files {}, as their bytes are the body."""
    text = {"type": "string", "maxLength": MAX_CHARACTERS}
    row: Any = text
    if len(worker.inputs) > 1:
        row = {"type": "array", "items": text, "minItems": len(worker.inputs), "maxItems": len(worker.inputs)}
    short = {"type": "string", "minLength": 1, "maxLength": MAX_ATTENDED}
    predict = _object({"inputs": {"type": "array", "items": row, "minItems": 1, "maxItems": MAX_INPUTS}}, "inputs")
    attend = _object({"source": short, "target": {"anyOf": [short, {"type": "null"}]}}, "source")
    count = {"type": "integer", "minimum": 1, "maximum": max_tokens}
    stop = {"type": "string", "minLength": 1, "maxLength": 100}
    neutral = {"type": "number", "minimum": 0, "maximum": 0}
    common: dict[str, Any] = {
        "model": {"type": "string"},
        "user": {"type": "string"},
        "n": {"type": "integer", "minimum": 1, "maximum": 1},
        "presence_penalty": neutral,
        "frequency_penalty": neutral,
        "stream": {"type": "boolean"},
        "stream_options": _object({"include_usage": {"type": ["boolean", "null"]}}),
        "max_tokens": count,
        "max_completion_tokens": count,
        "temperature": {"type": "number", "minimum": 0, "maximum": 10},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    }
    common = {name: schema | {"type": [schema["type"], "null"]} for name, schema in common.items()}
    common["stop"] = {"anyOf": [{"type": "null"}, stop, {"type": "array", "items": stop, "maxItems": 4}]}
    prompts = {"anyOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_INPUTS}]}
    part = _object({"type": {"enum": ["text"]}, "text": text}, "type", "text")
    content = {"anyOf": [text, {"type": "array", "items": part, "minItems": 1, "maxItems": 100}]}
    message = _object({"role": {"enum": ["system", "user", "assistant"]}, "content": content}, "role", "content")
    messages = {"type": "array", "items": message, "minItems": 1, "maxItems": 1_000}
    if not worker.generates:
        return {"/predict": {} if worker.suffixes else predict, "/attention": {} if worker.suffixes else attend}
    return {
        "/attention": attend,
        "/v1/completions": _object({"prompt": prompts} | common, "prompt"),
        "/v1/chat/completions": _object({"messages": messages} | common, "messages"),
    }


_TYPES: dict[str, Any] = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
}


def violation(value: Any, schema: dict[str, Any], where: str) -> str | None:
    """Returns how a value violates a schema of `request_schemas`, in one line, or None if it does not."""
    if "anyOf" in schema:
        problems = [violation(value, option, where) for option in schema["anyOf"]]
        return None if None in problems else " or ".join(dict.fromkeys(problem for problem in problems if problem))
    if "enum" in schema:
        is_listed = any(type(value) is type(option) and value == option for option in schema["enum"])
        return None if is_listed else f"{where} must be one of {schema['enum']}"
    kind = schema["type"]
    if isinstance(kind, list):  # [type, "null"]
        kind = kind[0]
        if value is None:
            return None
    if not _is_of_type(value, kind):
        return f"{where} must be of the type {kind}"
    for name, holds in _BOUNDS.items():
        if name in schema and not holds(value, schema[name]):
            return f"{where} violates {name} {schema[name]:,}"
    if kind == "array":
        checks = (violation(item, schema["items"], f"{where}[{index}]") for index, item in enumerate(value))
        return next((problem for problem in checks if problem), None)
    if kind != "object":
        return None
    if missing := [name for name in schema["required"] if name not in value]:
        return f"{where} lacks {missing[0]!r}"
    # Clients send fields without a value, such as "logprobs": null.
    if unknown := sorted(name for name in set(value) - set(schema["properties"]) if value[name] is not None):
        return f"{where} has {unknown[0][:80]!r}, which is not supported; use {', '.join(schema['properties'])}"
    where = "" if where == "the body" else f"{where}."
    known = [name for name in value if name in schema["properties"]]
    checks = (violation(value[name], schema["properties"][name], f"{where}{name}") for name in known)
    return next((problem for problem in checks if problem), None)


def _is_of_type(value: Any, kind: str) -> bool:
    """Returns whether a value has a type of JSON Schema."""
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Returns the schema of an object without other properties."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the media type of a path's requests with its schema, {} for files."""
    if schema:
        return {"application/json": {"schema": schema}}
    return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _answering(endpoint: Any) -> Any:
    """Turns the errors of an endpoint into answers."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except _RequestError as error:
            return _error(error.status, str(error))
        except UserError as error:
            return _error(400, str(error))
        except ClientDisconnect:
            return _error(499, "the client is gone")
        except Exception:  # the worker has printed its traceback
            return _error(500, "the server failed to answer; its terminal says why")

    return answer


async def _file(request: Request) -> bytes:
    """Returns the bytes of an uploaded file; a type that forms can send is refused, as any site may send forms."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith(("image/", "audio/")) and kind != "application/octet-stream":
        raise _RequestError(415, "the header Content-Type must be application/octet-stream, image/... or audio/...")
    if not (content := await _body(request, MAX_BODY)):
        raise _RequestError(400, "the body must be the file, but is empty")
    return content


@contextlib.contextmanager
def _unavailable_if_busy() -> Iterator[None]:
    """Turns the worker's refusal of a request into status 503."""
    try:
        yield
    except BusyError as error:
        raise _RequestError(503, str(error)) from None


async def _body(request: Request, limit: int) -> bytes:
    """Returns the body of a request that is neither too large nor too slow."""
    length = request.headers.get("content-length", "0")
    content = bytearray()
    try:
        if not length.isdecimal() or int(length[:20]) > limit:
            raise _RequestError(413, f"the body has at most {limit:,} bytes")
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    raise _RequestError(413, f"the body has at most {limit:,} bytes")
    except TimeoutError:
        raise _RequestError(408, f"the body did not arrive within {READ_SECONDS:g} seconds") from None
    return bytes(content)


def _text_of(content: str | list[dict[str, str]]) -> str:
    """Returns the text of a message, which may be in several parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _usage(outputs: Sequence[Any]) -> dict[str, int]:
    """Returns the numbers of tokens of texts (text, number of new tokens, reason, number of tokens of the prompt)."""
    num_read, num_written = sum(output[3] for output in outputs), sum(output[1] for output in outputs)
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}


def _without_nan(value: Any) -> Any:
    """Replaces floats that JSON lacks, NaN and infinite ones, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _error_body(status: int, message: str) -> dict[str, Any]:
    """Returns an error in the form of OpenAI's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an error; the connection ends where a body may remain unread."""
    headers = dict(headers or {})
    headers |= {"Connection": "close"} if status in (403, 408, 413, 415, 421) else {}
    headers |= {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse(_error_body(status, message), status, headers=headers)
