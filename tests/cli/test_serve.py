"""`tfx-jax serve` on a small GPT, by Starlette's client and by sockets."""

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import os
import pathlib
import queue
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import jsonschema
import numpy as np
import PIL.Image
import pytest
import scipy.io.wavfile
import tokenizers
from flax import nnx

import tfx_jax
from tests.cli.small_gpt import save_small_gpt
from tests.models.hf.small_whisper import save_small_whisper
from tfx_jax.cli import main, serve
from tfx_jax.errors import UserError
from tfx_jax.models import Bert, BertConfig, hf

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn serves; it comes with the extra `serve`")
testclient = pytest.importorskip("starlette.testclient", reason="Starlette comes with the extra `serve`")

from starlette.responses import HTMLResponse, Response  # noqa: E402

from tfx_jax.cli.support import model_worker, server  # noqa: E402
from tfx_jax.cli.support.model_worker import BusyError, Job, ModelWorker, StoppedError  # noqa: E402
from tfx_jax.data.tokenizers import hf_tokenizer  # noqa: E402
from tfx_jax.data.tokenizers.streaming import TextStream  # noqa: E402
from tfx_jax.generation import Sampling, Transcriber  # noqa: E402

HOST = "http://127.0.0.1:8000"


def small_gpt(folder, draw_model):
    save_small_gpt(folder, draw_model)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}a:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, draw_model):
    return small_gpt(tmp_path_factory.mktemp("gpt"), draw_model)


@pytest.fixture(scope="module")
def model(folder):
    return tfx_jax.load(folder)


@pytest.fixture(scope="module")
def client(model):
    app, worker = server.make_app(model, "small <gpt>", max_tokens=32)
    with testclient.TestClient(app, base_url=HOST) as client:
        yield client
    worker.close()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    save_small_whisper(folder)
    return folder


def message_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.compiles(60, "programs of generation for several options")
def test_completions_are_those_of_generate(client, model):
    texts = ["the cat", "日本 a dog"]
    body = {"prompt": texts, "max_tokens": 24, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    found = [choice["text"] for choice in answer["choices"]]
    assert found == tfx_jax.generate(model, texts, max_new_tokens=24, temperature=0)
    assert answer["usage"]["prompt_tokens"] == len("the cat") + len("日本 a dog".encode())
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    drawn = client.post("/v1/completions", json=body | {"temperature": 0.7, "seed": 5}).json()
    expected = tfx_jax.generate(model, texts, max_new_tokens=24, temperature=0.7, seed=5)
    assert [choice["text"] for choice in drawn["choices"]] == expected
    stop = found[0][3:5]
    stopped = client.post("/v1/completions", json=body | {"prompt": texts[0], "stop": stop}).json()["choices"][0]
    assert stopped["text"] == found[0][: found[0].index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.compiles(30, "a program of generation, twice")
def test_spaces_of_whole_words_are_those_of_generate(tmp_path, draw_model):
    save_small_gpt(tmp_path, draw_model)
    vocabulary = {"<|endoftext|>": 0} | {f"▁w{index}": index for index in range(1, 257)}
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    pipeline.pre_tokenizer, pipeline.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    model = tfx_jax.load(tmp_path)
    worker = ModelWorker(model)
    job = Job("generate", ["w7", "w7 "], sampling=Sampling(temperature=0), max_tokens=4)
    answers = worker.submit(job).result.result(timeout=120)
    worker.close()
    texts = [text for text, *_ in answers]
    assert texts == tfx_jax.generate(model, ["w7", "w7 "], max_new_tokens=4, temperature=0)
    assert [text[0] for text in texts] == [" ", "w"]


@pytest.mark.slow
@pytest.mark.compiles(60, "programs of generation")
def test_streams_and_chat(client, model):
    pytest.importorskip("jinja2", reason="templates need jinja2")
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    expected = tfx_jax.generate(model, messages, max_new_tokens=12, temperature=0)
    assert whole == {"role": "assistant", "content": expected}
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events]
    assert parts[0]["delta"]["role"] == "assistant"
    assert "".join(part["delta"].get("content", "") for part in parts) == expected
    assert [part["finish_reason"] for part in parts][-1] == "length"
    assert len(parts) > 3
    long = {"prompt": "x" * 63, "max_tokens": 9, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as response:
        assert "with max_tokens=9 the model has room for 55" in response.read().decode()
    for prompt, name in ((long["prompt"], "the prompt"), (["x", long["prompt"]], "prompt 2")):
        message = message_of(client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9}), 400)
        assert message == f"{name} has 63 tokens: with max_tokens=9 the model has room for 55"


@pytest.mark.slow
@pytest.mark.compiles(40, "programs of generation")
def test_requests_of_one_batch_keep_their_own_limits_and_stops(model):
    """And a bad one among them spoils no other."""
    worker = ModelWorker(model)
    jobs = [Job("generate", [text], max_tokens=length, stop=stop) for text, length, stop in BATCH]
    for job in jobs:
        job.sampling = job.sampling.__class__(temperature=0)
    answers = worker._generate(jobs)
    for (text, length, stop), ((found, *_),) in zip(BATCH, answers, strict=True):
        assert found == tfx_jax.generate(model, text, max_new_tokens=length, stop=stop, temperature=0)
    bad = Job("generate", ["x" * 64], sampling=jobs[0].sampling, max_tokens=16)
    good = Job("generate", ["the cat"], sampling=jobs[0].sampling, max_tokens=16)
    worker._answer([bad, good])
    assert "prompt 1 has 64 tokens" in str(bad.result.exception())
    assert good.result.result()[0][0] == answers[0][0][0]
    worker.close()
    assert not worker.is_alive


BATCH = [("the cat", 16, []), ("a", 9, []), ("日本", 13, []), ("the cat", 12, ["zzz"])]


@pytest.mark.slow
@pytest.mark.compiles(30, "maps of attention")
def test_attention_is_the_page_of_attend(client):
    page = client.post("/attention", json={"source": "the cat"}).json()["html"]
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert "".join(data["tokens"]["target"]) == "theĠcat"
    assert [entry["heads"] for entry in data["maps"]] == [2]


def test_page_requests_nothing_from_elsewhere_and_names_the_model(client):
    response = client.get("/")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["permissions-policy"] == "camera=(), geolocation=(), microphone=()"
    assert not re.search(r"https?:|src=|<link|@import|url\(", response.text)
    assert '"name": "small \\u003cgpt>"' in response.text
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "small <gpt>"
    assert 'tfx_jax_requests_total{path="/health",status="200"} ' in client.get("/metrics").text


VALUES = [
    {},
    [],
    None,
    {"prompt": "a", "max_tokens": 33},
    {"prompt": "a", "max_tokens": True},
    {"prompt": "a", "max_tokens": 1.5},
    {"prompt": "a" * 20_001},
    {"prompt": []},
    {"prompt": ["a", 3]},
    {"prompt": "a", "logprobs": 5},
    {"prompt": "a", "n": 2},
    {"prompt": "a", "top_p": 0},
    {"prompt": "a", "stop": ""},
    {"prompt": "a", "seed": -1},
    {"prompt": "a", "temperature": "hot"},
]


def test_schema_refuses_what_the_server_refuses(client):
    """By an independent implementation of JSON Schema."""
    paths = client.get("/openapi.json").json()["paths"]
    content = paths["/v1/completions"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    for value in VALUES:
        assert list(jsonschema.Draft202012Validator(schema).iter_errors(value)), value
        headers = {"Content-Type": "application/json"}
        message_of(client.post("/v1/completions", content=json.dumps(value), headers=headers), 400)
    for value in ({"prompt": "a", "stop": None, "n": 1, "top_p": 1, "user": "me"}, {"prompt": ["a", "b"]}):
        jsonschema.validate(value, schema)
        assert server.violation(value, schema, "the body") is None


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Host": "evil.example"}, 421, "which is not this server"),
        ({"Host": "127.0.0.1.evil.example:8000"}, 421, "which is not this server"),
        ({"Origin": "http://evil.example"}, 403, "other sites"),
        ({"Origin": "null"}, 403, "other sites"),
        ({"Origin": "http://127.0.0.1:9000"}, 403, "other sites"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "other sites"),
        ({"Content-Type": "text/plain"}, 415, "application/json"),
        ({"Content-Length": "1000000001"}, 413, "at most 2,097,152 bytes"),
    ],
)
def test_hostile_headers(client, headers, status, message):
    content = json.dumps({"prompt": "a"})
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"} | headers)
    assert message in message_of(response, status)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"9" * 5_000]
)
def test_wrong_json_costs_one_line(client, content):
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert "\n" not in message_of(response, 400)


def call(app, path, body=None):
    """Sends a request whose client is gone as soon as it has sent it; returns what it would have received."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": headers}
    scope |= {"http_version": "1.1", "query_string": b"", "root_path": "", "asgi": {"spec_version": "2.3"}}
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent = []

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/../../etc/passwd", "//etc/passwd", "/v1/..", "/x", "/v1/models/../../etc/passwd"])
def test_paths_lead_to_no_file(client, path):
    """As the server receives them: clients would shorten them."""
    start, content = call(client.app, path)
    assert start["status"] == 404
    assert json.loads(content["body"])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("PUT", "/health", "GET, HEAD"), ("GET", "/v1/completions", "POST")]
)
def test_methods_that_are_offered_are_named(client, method, path, allowed):
    response = client.request(method, path)
    assert "is not offered at this path" in message_of(response, 405)
    assert ", ".join(sorted(response.headers["Allow"].split(", "))) == allowed


def test_model_is_described_by_its_name(client):
    entry = client.get("/v1/models/small%20%3Cgpt%3E").json()
    assert [entry] == client.get("/v1/models").json()["data"]
    assert "this server has 'small <gpt>'" in message_of(client.get("/v1/models/x"), 404)
    assert 'path="/v1/models/{model}",status="404"' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("headers", "is_page", "status"),
    [
        ({"host": "Api.example:81", "origin": "https://api.example:81", "sec-fetch-site": "same-origin"}, False, None),
        ({"host": "127.0.0.1:8000", "origin": "https://api.example"}, False, None),  # a proxy that changes Host
        ({"host": "b.example:8443"}, False, None),
        ({"host": "b.example"}, False, 421),
        ({"host": "127.0.0.1:8000", "origin": "https://b.example"}, False, 403),
        ({"host": "127.0.0.1:8000", "origin": "http://["}, False, 403),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True, None),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False, 403),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, True, 403),
    ],
)
def test_allowed_hosts_and_links_to_the_page(headers, is_page, status):
    guard = server._Guard(None, frozenset({"127.0.0.1"}), lambda *_: None, ["api.Example", "b.example:8443"])
    problem = guard._problem(headers, is_page=is_page)
    assert (problem and problem[0]) == status


@pytest.fixture
def jobs(monkeypatch):
    """Requests that the worker receives, and answers by a constant."""
    submitted = []

    def submit(self, job):
        submitted.append(job)
        job.result.set_result([("text", 4, "length", 7)])
        return job

    monkeypatch.setattr(ModelWorker, "submit", submit)
    return submitted


@pytest.mark.parametrize(("num_read", "num_new"), [(50, 128), (136, 64), (137, 63), (199, 1)])
def test_a_chat_may_have_what_fits_in_few_lengths(num_read, num_new):
    worker = types.SimpleNamespace(
        max_positions=200, max_input_length=lambda count: 200 - count, encode=lambda job: [[0] * num_read]
    )
    job = Job("generate", [], max_tokens=512)
    server._App._fit(types.SimpleNamespace(_worker=worker), job, is_default=True)
    assert job.max_tokens == num_new


def test_chats_of_openai_clients(client, jobs):
    pytest.importorskip("jinja2", reason="templates need jinja2")
    names = ("max_tokens", "n", "stop", "seed", "temperature", "top_p", "stream", "stream_options", "user")
    body = dict.fromkeys(names) | {"presence_penalty": 0, "frequency_penalty": 0.0}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    for content in ("hello", parts, "x" * 40):
        body["messages"] = [{"role": "user", "content": content}]
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert [job.inputs[0]["content"] for job in jobs] == ["hello", "hello", "x" * 40]
    assert [job.max_tokens for job in jobs] == [32, 32, 64 - len("u:" + "x" * 40 + " a:")]
    body["messages"] = [{"role": "user", "content": "x" * 70, "name": None}]
    message = message_of(client.post("/v1/chat/completions", json=body | {"logprobs": None}), 400)
    assert message == "the prompt has 75 tokens: with a new token the model has room for 63"
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": None})
    assert jobs[-1].max_tokens == 16
    streamed = {"prompt": "a", "stream": True, "stream_options": {"include_usage": None}}
    assert '"usage"' not in client.post("/v1/completions", json=streamed).text
    for name in ("presence_penalty", "n"):
        assert name in message_of(client.post("/v1/chat/completions", json=body | {name: 2}), 400)


def test_streams_count_tokens_on_request(client, jobs):
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    events = client.post("/v1/completions", json=body).text.split("\n\n")
    *parts, last = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert [part["usage"] for part in parts] == [None]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    body = {"prompt": "x" * 63, "stream": True, "max_tokens": 9}
    assert "the prompt has 63 tokens" in message_of(client.post("/v1/completions", json=body), 400)


def test_failures_are_server_errors(client, monkeypatch):
    for error, status in ((RuntimeError("secret"), 500), (BusyError(), 503)):
        monkeypatch.setattr(ModelWorker, "submit", Mock(side_effect=error))
        response = client.post("/v1/completions", json={"prompt": "a"})
        assert "secret" not in message_of(response, status)
        assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("is_stream", [True, False])
def test_requests_of_vanished_clients_are_cancelled(client, monkeypatch, is_stream):
    submitted = []
    monkeypatch.setattr(ModelWorker, "submit", lambda self, job: submitted.append(job) or job)
    call(client.app, "/v1/completions", {"prompt": "a", "stream": is_stream})
    assert [job.is_cancelled for job in submitted] == [True]


def test_clients_that_read_some_of_a_full_buffer_have_more_time():
    protocol = Mock()
    protocol.transport.get_write_buffer_size.return_value = 7
    server._Protocol._expect_reading(protocol, 8)
    protocol.loop.call_later.assert_called_once_with(server.READ_SECONDS, protocol._expect_reading, 7)
    protocol.transport.abort.assert_not_called()
    server._Protocol._expect_reading(protocol, 7)
    protocol.transport.abort.assert_called_once_with()


SHUTDOWN = """
import asyncio, os, signal, socket, sys
from unittest.mock import Mock
from starlette.responses import Response
from tfx_jax.cli.support import server

seconds, num_left = float(sys.argv[1]), int(sys.argv[2])
server.SHUTDOWN_SECONDS = 6.0
worker = Mock(**{"close.return_value": num_left})

async def app(scope, receive, send):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(seconds)
    await Response()(scope, receive, send)

listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
client.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
server.run_server(app, worker, listener, "x")
print(worker.close.call_args.args[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "num_left", "message"),
    [(0, 0, "all requests are answered"), (0, 3, "dropped requests: 3"), (60, 0, "dropped requests: 1")],
)
def test_shutdown_has_one_deadline_and_counts_what_it_drops(seconds, num_left, message):
    """Six seconds, of which the worker has what requests leave, at least almost five."""
    command = [sys.executable, "-c", SHUTDOWN, str(seconds), str(num_left)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == message
    remaining = float(done.stdout.split()[-1])
    assert 4 < remaining < 5 if seconds else 5 < remaining < 6


def test_numbers_that_json_lacks_are_null():
    assert server._without_nan([{"p": {"a": float("nan"), "b": 0.5}, "t": (float("inf"), 1, "x")}]) == [
        {"p": {"a": None, "b": 0.5}, "t": [None, 1, "x"]}
    ]


def test_models_without_a_template_offer_no_chat(model, monkeypatch):
    monkeypatch.setattr(type(model), "chat_template", property(Mock(side_effect=UserError("there is none"))))
    app, worker = server.make_app(model, "x")
    with testclient.TestClient(app, base_url=HOST) as client:
        assert "is not offered" in message_of(client.post("/v1/chat/completions", json={}), 404)
        assert "/v1/chat/completions" not in client.get("/openapi.json").json()["paths"]
    worker.close()


def test_a_whisper_is_loaded_once(folder, whisper, monkeypatch):
    assert not serve._is_whisper(str(folder))
    load, served = Mock(wraps=hf.load), Mock()
    monkeypatch.setattr(hf, "load", load)
    monkeypatch.setattr(server, "run_server", served)
    assert main(["serve", f"--model={whisper}", "--port=0"]) == 0
    app, worker = served.call_args.args[:2]
    assert (worker.suffixes, worker.max_seconds) == ((".wav",), 1)
    assert (
        testclient.TestClient(app, base_url=HOST).get("/").headers["permissions-policy"].endswith("microphone=(self)")
    )
    worker.close()
    load.assert_called_once()


def test_clients_see_no_paths(folder, monkeypatch):
    for workdir, source, expected in (
        ("/home/me/runs/topics/", None, "topics"),
        ("gs://bucket/runs/topics", None, "topics"),
        (None, str(folder), folder.name),
        (None, "openai/gpt2", "openai/gpt2"),
    ):
        assert serve._name(argparse.Namespace(workdir=workdir, model=source)) == expected
    monkeypatch.chdir(folder)
    assert serve._name(argparse.Namespace(workdir=".", model=None)) == folder.name


def test_clients_see_no_path_of_a_template_that_refuses(folder, tmp_path):
    pytest.importorskip("jinja2", reason="templates need jinja2")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    app, worker = server.make_app(tfx_jax.load(tmp_path), "model")
    with testclient.TestClient(app, base_url=HOST) as client:
        response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    worker.close()
    assert message_of(response, 400) == "the chat template refuses the conversation: roles must alternate"


def test_other_addresses_are_served_on_request_only():
    guard = server._Guard(None, None, lambda *_: None)
    assert guard._is_known("192.168.1.7:8000")
    assert guard._is_known("[::1]:8000")
    assert not guard._is_known("evil.example:8000")
    assert not server._Guard(None, frozenset({"localhost"}), lambda *_: None)._is_known("192.168.1.7:8000")


def test_mistakes_cost_one_line(capsys, monkeypatch, tmp_path, draw_model):
    def fails(*arguments):
        assert main(["serve", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "exactly one of --model" in fails()
    assert "must be at most 65,535" in fails("--model=x", "--port=70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen on 127.0.0.1" in fails("--model=x", f"--port={taken.getsockname()[1]}")
    config = BertConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, d_ff=16)
    encoder = tfx_jax.training.LoadedModel(draw_model(lambda: Bert(config, rngs=nnx.Rngs(0))))
    with pytest.raises(tfx_jax.training.predictor.UserError, match="has no task that takes text or files"):
        ModelWorker(encoder)
    monkeypatch.delitem(sys.modules, "tfx_jax.cli.support.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert re.search(r'serve needs Starlette and uvicorn .*: pip install "tfx-jax\[serve\] @ ', fails("--model=x"))


# ---- The command itself, in a process


@contextlib.contextmanager
def served(*arguments):
    """Runs the command on a free port; yields (process, port)."""
    command = [sys.executable, "-m", "tfx_jax", "serve", "--port=0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert "serving" in line, process.stderr.read()
        yield process, int(re.search(r":(\d+)/", line)[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def post(port, path, body, timeout=120):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        is_file = isinstance(body, bytes)
        kind = "application/octet-stream" if is_file else "application/json"
        connection.request("POST", path, body if is_file else json.dumps(body), {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def memory_of(process):
    """Resident memory of a process in bytes."""
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def load_test(folder, model, num_requests, num_clients=64):
    """Sends requests by that many clients; returns figures, after checking that every answer is that of Python."""
    prompts = [f"text {number} " + "ab" * (number % 7) for number in range(32)]
    lengths = (5, 9, 12)
    keys = [(prompt, length) for prompt in prompts for length in lengths]
    expected = {
        (prompt, length): text
        for length in lengths
        for prompt, text in zip(
            prompts, tfx_jax.generate(model, prompts, max_new_tokens=length, temperature=0), strict=True
        )
    }
    with served(f"--model={folder}") as (process, port):
        body = {"temperature": 0}

        def ask(number):
            prompt, length = keys[number % len(keys)]
            start = time.monotonic()
            status, answer = post(port, "/v1/completions", body | {"prompt": prompt, "max_tokens": length})
            is_right = status == 200 and answer["choices"][0]["text"] == expected[prompt, length]
            return status, is_right, time.monotonic() - start

        with ThreadPoolExecutor(num_clients) as pool:
            list(pool.map(ask, range(32 * num_clients)))  # compiles all shapes of batches
            before, start = memory_of(process), time.monotonic()
            results = list(pool.map(ask, range(num_requests)))
            seconds, after = time.monotonic() - start, memory_of(process)
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
    times = np.array([result[2] for result in results])
    return {
        "requests": len(results),
        "lost": sum(result[0] != 200 for result in results),
        "wrong": sum(not result[1] for result in results),
        "per second": len(results) / seconds,
        "median seconds": float(np.median(times)),
        "99th percentile": float(np.quantile(times, 0.99)),
        "memory before MB": before / 1e6,
        "memory growth MB": (after - before) / 1e6,
        "exit": status,
    }


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
def test_load_of_64_clients(folder, model):
    """TFX_JAX_LOAD=10000 sends that many requests."""
    figures = load_test(folder, model, int(os.environ.get("TFX_JAX_LOAD", "600")))
    print(figures)
    assert (figures["lost"], figures["wrong"], figures["exit"]) == (0, 0, 0)
    assert figures["memory growth MB"] < 100


@pytest.mark.slow
def test_hostile_clients_leave_the_server_well(folder, model):
    with served(f"--model={folder}") as (process, port):
        post(port, "/v1/completions", {"prompt": "the cat", "max_tokens": 16, "temperature": 0})
        before = memory_of(process)

        with socket.create_connection(("127.0.0.1", port)) as huge:  # chunked, so that no length warns the server
            headers = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            huge.sendall(f"{headers}Transfer-Encoding: chunked\r\n\r\n".encode())
            sent, part = 0, b"100000\r\n" + b"x" * 2**20 + b"\r\n"
            with contextlib.suppress(ConnectionError):
                for _ in range(1_000):
                    huge.sendall(part)
                    sent += len(part)
        assert sent < 1e9
        assert memory_of(process) - before < 100e6

        lorises = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        for loris in lorises:
            loris.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localh")
        start = time.monotonic()
        expected = tfx_jax.generate(model, "the cat", max_new_tokens=16, temperature=0)
        body = {"prompt": "the cat", "max_tokens": 16, "temperature": 0}
        assert post(port, "/v1/completions", body)[1]["choices"][0]["text"] == expected  # meanwhile
        for loris in lorises:
            loris.settimeout(30)
            with contextlib.suppress(ConnectionError):
                assert loris.recv(1_000) == b""
            loris.close()
        assert 5 < time.monotonic() - start < 25

        def raw_answer(content):
            """Sends bytes over a new connection; returns [head, body] of the answer, in lower case."""
            with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
                raw.sendall(content)
                raw.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: raw.recv(1_000), b"")).decode().lower().split("\r\n\r\n")

        # The server answers these itself, before our application: a line of plain text.
        with contextlib.ExitStack() as stack:
            head, line = raw_answer(b"no HTTP\r\n\r\n")
            assert "400" in head.partition("\r\n")[0]
            assert ("content-type: text/plain" in head, line.strip().count("\n")) == (True, 0)
            for _ in range(512):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            head, line = raw_answer(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert "503" in head.partition("\r\n")[0]
            assert ("content-type: text/plain" in head, line.strip().count("\n")) == (True, 0)

        def num_tokens():
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("GET", "/metrics")
                metrics = connection.getresponse().read().decode()
            return int(re.search(r"^tfx_jax_generated_tokens_total (\d+)", metrics, re.MULTILINE)[1])

        long = body | {"max_tokens": 48}
        num_whole = post(port, "/v1/completions", long)[1]["usage"]["completion_tokens"]
        num_before = num_tokens()
        for _ in range(20):  # clients that vanish while their text is streamed
            with socket.create_connection(("127.0.0.1", port)) as gone:
                content = json.dumps(long | {"stream": True}).encode()
                gone.sendall(f"{headers}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                gone.recv(20)
        assert post(port, "/v1/completions", body)[1]["choices"][0]["text"] == expected
        assert num_tokens() - num_before < 20 * num_whole

        # A signal while a request is answered: it is answered.
        answers = []
        late = threading.Thread(target=lambda: answers.append(post(port, "/v1/completions", body | {"max_tokens": 40})))
        late.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        late.join()
        assert answers[0][0] == 200


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
def test_clients_that_do_not_read_are_dropped(folder, model):
    """Each asks for 10 MB, more than all buffers hold; meanwhile others are answered, and memory is bounded."""
    expected = tfx_jax.generate(model, "the cat", max_new_tokens=16, temperature=0)
    body = {"prompt": "the cat", "max_tokens": 16, "temperature": 0}
    with served(f"--model={folder}") as (process, port), contextlib.ExitStack() as stack:
        post(port, "/v1/completions", body)

        def num_files():
            return len(os.listdir(f"/proc/{process.pid}/fd"))

        memory_before, files_before = memory_of(process), num_files()
        clients = [stack.enter_context(socket.socket()) for _ in range(40)]
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", port))
            client.sendall(1_000 * b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while num_files() < files_before + len(clients):
            time.sleep(0.01)
        start = time.monotonic()
        while num_files() > files_before:
            assert post(port, "/v1/completions", body)[1]["choices"][0]["text"] == expected
            assert memory_of(process) - memory_before < 100e6
            assert time.monotonic() - start < 60
        assert time.monotonic() - start > 5
        for client in clients:  # what the kernel holds of the answers, and the end
            client.settimeout(60)
            num_bytes = 0
            with contextlib.suppress(ConnectionError):
                while part := client.recv(2**20):
                    num_bytes += len(part)
            assert num_bytes < 9e6


# ---- The page in a browser, and the commands of docs/serving.md

SEND = """
<script>
const result = {};
const send = () => fetch("/result", { method: "POST", body: JSON.stringify(result) });
const until = async test => { while (!test()) await new Promise(resolve => setTimeout(resolve, 10)); };
</script>
"""

STEPS = """
<script>
// The frame of the attention tells its width: its own page is closed to this one.
const ask = window.fetch;
window.fetch = async (...given) => {
  const response = await ask(...given);
  if (given[0] !== "/attention") return response;
  const answer = await response.json();
  const tell = "<script>setTimeout(() => parent.postMessage([element('said').textContent, " +
    "document.documentElement.scrollWidth, self.origin], '*'), 500)</" + "script></html>";
  answer.html = answer.html.replace("</html>", tell);
  return { ok: true, json: async () => answer };
};
let told = null;
window.addEventListener("message", event => told = event.data);
(async () => {
  result.title = document.title;
  result.hidden = element("record").hidden;
  result.colors = getComputedStyle(document.body).backgroundColor;
  element("input0").value = "the cat";
  element("tokens").value = 12;
  element("go").click();
  await until(() => element("stop").hidden && element("answer").textContent);
  result.text = element("answer").textContent;
  element("attend").click();
  await until(() => told);
  result.told = told;
  Object.assign(result, { width: document.documentElement.scrollWidth,
    frame: document.querySelector("iframe").clientWidth });
  element("tokens").value = 999;
  element("form").noValidate = true;
  element("go").click();
  await until(() => element("answer").classList.contains("bad"));
  result.error = element("answer").textContent;
})().catch(error => { result.failure = String(error.stack); }).finally(send);
</script></html>
"""


def in_browser(app, steps, folder, *options, path="/"):
    """Opens the page, its headers included, with steps added that send a result, and returns that."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("there is no Chromium to open the page with")
    results = queue.Queue()

    async def with_steps(scope, receive, send):
        if scope["path"] == "/result":
            message = await receive()
            content = message["body"]
            while message.get("more_body"):
                message = await receive()
                content += message["body"]
            results.put(json.loads(content))
            await Response()(scope, receive, send)
        elif scope["path"] == "/frame":  # windows of Chromium have at least 500 pixels
            frame = '<iframe src="/" style="width:420px;height:900px;border:0"></iframe>'
            await HTMLResponse(frame)(scope, receive, send)
        elif scope["path"] == "/":

            async def send_more(message):
                if message["type"] == "http.response.start":
                    headers = [header for header in message["headers"] if header[0] != b"content-length"]
                    message = message | {"headers": headers}
                elif message["type"] == "http.response.body":
                    message = message | {"body": message["body"].replace(b"</html>", (SEND + steps).encode())}
                await send(message)

            await app(scope, receive, send_more)
        else:
            await app(scope, receive, send)

    config = uvicorn.Config(with_steps, port=0, http=server._Protocol, lifespan="off", log_level="error")
    listener = socket.create_server(("127.0.0.1", 0))
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
    thread.start()
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command += [f"--user-data-dir={folder}", "--window-size=1400,1000", *options]
    command += [f"http://127.0.0.1:{listener.getsockname()[1]}{path}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        result = results.get(timeout=180)
    finally:
        process.terminate()
        process.wait()
        runner.should_exit = True
        thread.join()
    assert "failure" not in result, result["failure"]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_a_browser_of_a_narrow_window(model, tmp_path, scheme):
    """The page as it is served, its content security policy included, with a script that uses it."""
    options = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    app, worker = server.make_app(model, "small <gpt>", max_tokens=32)
    with contextlib.closing(worker):
        result = in_browser(app, STEPS, tmp_path, *options, path="/frame")
    assert result["title"] == "small <gpt>"
    assert result["colors"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 26)"}[scheme]
    expected = tfx_jax.generate(model, "the cat", max_new_tokens=12, temperature=0)
    assert result["text"] == expected
    assert result["width"] <= 420
    said, width, origin = result["told"]
    assert said.startswith("Point at a token or a cell")
    assert width <= result["frame"]
    assert origin == "null"  # the frame cannot call the server
    assert result["error"] == "max_tokens violates maximum 32"
    assert result["hidden"]


RECORD = """
<script>
const recorded = async seconds => {
  say("");
  element("record").click();
  if (seconds) {
    await until(() => recorder?.state === "recording");
    await new Promise(resolve => setTimeout(resolve, 1000 * seconds));
    element("record").click();
  }
  await until(() => element("stop").hidden && element("answer").textContent.length > 1);
  return { text: element("answer").textContent, bytes: file && [...new Uint8Array(await file.arrayBuffer())] };
};
(async () => {
  const devices = navigator.mediaDevices;
  result.record = element("record").innerText;
  result.seconds = data.maxSeconds;
  result.stopped = await recorded(0.5);
  result.full = await recorded(null);
  result.label = element("record").innerText;
  devices.getUserMedia = () => Promise.reject(new DOMException("Permission denied", "NotAllowedError"));
  result.refused = await recorded(null);
})().catch(error => { result.failure = String(error.stack); }).finally(send);
</script></html>
"""


@pytest.mark.slow
def test_recording_in_a_browser(whisper, tmp_path):
    """By a simulated microphone that plays a tone; the model reads one second."""
    tone = np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000) * np.tile(np.repeat([1, 0.1], 6_000), 4)
    scipy.io.wavfile.write(tmp_path / "tone.wav", 48_000, np.int16(20_000 * tone))
    devices = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    transcriber = Transcriber.load(whisper)
    app, worker = server.make_app(tfx_jax.load(whisper), "small", transcriber=transcriber)
    with contextlib.closing(worker):
        sound = f"--use-file-for-fake-audio-capture={tmp_path / 'tone.wav'}"
        result = in_browser(app, RECORD, tmp_path / "profile", *devices, sound)
    assert (result["record"], result["label"], result["seconds"]) == ("record", "record", 1)
    for name, low, high in (("stopped", 2_000, 15_000), ("full", 12_000, 16_000)):
        rate, samples = scipy.io.wavfile.read(io.BytesIO(bytes(result[name]["bytes"])))
        assert (rate, samples.dtype, samples.ndim) == (16_000, np.int16, 1)
        assert low <= len(samples) <= high
        spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
        assert abs(spectrum.argmax() * rate / len(samples) - 440) < 10
        assert result[name]["text"] == transcriber(samples / np.float32(32_768))
    assert result["refused"]["text"] == "nothing was recorded: Permission denied"


@pytest.mark.slow
def test_transcripts_are_those_of_the_command(whisper, tmp_path, capfd):
    files = [str(tmp_path / f"{number}.wav") for number in range(3)]
    for number, file in enumerate(files):
        sound = np.random.default_rng(number).normal(0, 8_000, 4_000 * (number + 1)).clip(-32_768, 32_767)
        scipy.io.wavfile.write(file, 8_000, sound.astype(np.int16))
    assert main(["transcribe", f"--model={whisper}", *files]) == 2  # the last lasts 1.5 seconds
    expected = capfd.readouterr().out.splitlines()
    with served(f"--model={whisper}") as (_, port):
        answers = [post(port, "/predict", pathlib.Path(file).read_bytes()) for file in files]
    found = [answer["predictions"] for status, answer in answers if status == 200]
    assert found == [[{"transcript": text}] for text in expected[:2]]
    assert expected[0] != expected[1]
    assert answers[2][0] == 400
    assert "24,000 samples, but at most 16,000 are read" in answers[2][1]["error"]["message"]


def commands(name, port):
    """Commands of the page's block of this name, with another port."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^```sh {name}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = text.replace("\\\n", " ").splitlines()
    return [line.replace("localhost:8000", f"127.0.0.1:{port}") for line in lines]


def shell(command, folder):
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, check=True).stdout.decode()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_commands_of_the_page_for_a_language_model(folder, model, tmp_path):
    pytest.importorskip("jinja2", reason="templates need jinja2")
    with served(f"--model={folder}") as (_, port):
        whole, streamed, reply = (shell(command, tmp_path) for command in commands("generate", port))
    expected = tfx_jax.generate(model, "Once upon", max_new_tokens=20, temperature=0)
    assert json.loads(whole)["choices"][0]["text"] == expected
    assert streamed.endswith("data: [DONE]\n\n")
    assert json.loads(reply)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.slow
@pytest.mark.compiles(150, "two trainings")
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("experiment", ["bert_banking77", "vit_digits", "captioning_shapes", "conformer_fsdd"])
def test_answers_are_those_of_the_command(tmp_path, capfd, experiment):
    """By the commands of the page, for texts and for a file."""
    workdir = tmp_path / "run"
    assert main(["train", f"--config={experiment}:test", f"--workdir={workdir}"]) == 0
    PIL.Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(tmp_path / "cat.png")
    PIL.Image.effect_noise((48, 48), 80).convert("RGB").save(tmp_path / "shapes.png")
    scipy.io.wavfile.write(tmp_path / "cat.wav", 1_000, np.int16(9_000 * np.sin(np.arange(600) ** 1.5 / 9)))
    (tmp_path / "texts.txt").write_text("The market fell.\nThey won.\n")
    name = {"bert_banking77": "texts.txt", "conformer_fsdd": "cat.wav", "vit_digits": "cat.png"}
    name = name.get(experiment, "shapes.png")
    capfd.readouterr()
    assert main(["predict", f"--workdir={workdir}", "--json", str(tmp_path / name)]) == 0
    expected = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    is_text = name == "texts.txt"
    with served(f"--workdir={workdir}") as (_, port):
        (command,) = commands("predict" if is_text else "file", port)
        command = command.replace("cat.png", name)
        found = json.loads(shell(command, tmp_path))["predictions"]
        broken = shell(command.replace(f"@{name}", "@texts.txt"), tmp_path)
    assert len(found) == len(expected)
    for answer, wanted in zip(found, expected, strict=True):
        assert wanted.pop("file", None) == (None if is_text else str(tmp_path / name))
        assert answer == {key: approximately(value) for key, value in wanted.items()}
    if not is_text:
        assert "the file cannot be read as a" in json.loads(broken)["error"]["message"]


def approximately(value):
    return pytest.approx(value, abs=1e-6) if isinstance(value, dict) else value


# ---- The worker alone


@contextlib.contextmanager
def paused_worker(model):
    """Yields a worker whose thread waits inside `pause` until `release` is set, and both."""
    worker, release, entered = ModelWorker(model), threading.Event(), threading.Event()
    worker._pause = lambda batch: (entered.set(), release.wait(60)) and [None]
    job = worker.submit(Job("pause", [], seed=0))
    assert entered.wait(60)
    try:
        yield worker, release
    finally:
        release.set()
        worker.close()
        assert job.result.done()


def greedy(text, max_tokens=9, **options):
    return Job("generate", [text], sampling=Sampling(temperature=0), max_tokens=max_tokens, **options)


def test_full_queue_raises_busy_error_and_ignores_cancelled_requests(model, monkeypatch):
    monkeypatch.setattr(model_worker, "MAX_WAITING", 2)
    with paused_worker(model) as (worker, _):
        jobs = [worker.submit(greedy("a")) for _ in range(2)]
        with pytest.raises(BusyError):
            worker.submit(greedy("a"))
        jobs[0].is_cancelled = True
        assert worker.num_waiting == 1
        worker.submit(greedy("a", is_cancelled=True))
        worker.submit(greedy("a", is_cancelled=True))
        assert jobs[0].result.cancelled()
        for job in jobs:
            job.is_cancelled = True


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_not_tokenized_for_a_full_queue(client, monkeypatch, stream):
    monkeypatch.setattr(model_worker, "MAX_WAITING", 0)
    encoded = []
    monkeypatch.setattr(ModelWorker, "encode", lambda self, job: encoded.append(job))
    response = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert message_of(response, 503) == "too many requests wait: try again later"
    assert not encoded


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_worker_fails_its_requests_and_refuses_others(model):
    def die(batch):
        raise SystemExit

    with paused_worker(model) as (worker, release):
        worker._predict = die
        jobs = [worker.submit(Job("predict", ["a"])), worker.submit(greedy("a"))]
        release.set()
        for job in jobs:
            assert isinstance(job.result.exception(timeout=60), StoppedError)
        worker._thread.join(60)
        assert not worker.is_alive
        with pytest.raises(StoppedError):
            worker.submit(greedy("a"))


def test_error_is_set_although_stderr_is_broken(model, monkeypatch):
    class Broken:
        def write(self, text):
            raise BrokenPipeError

    def fail(batch):
        raise RuntimeError("out of memory")

    with paused_worker(model) as (worker, release):
        monkeypatch.setattr(sys, "stderr", Broken())
        worker._predict = fail
        job = worker.submit(Job("predict", ["a"]))
        release.set()
        assert "out of memory" in str(job.result.exception(timeout=60))
        assert worker.is_alive


def test_close_cancels_what_remains_after_its_deadline(model):
    with paused_worker(model) as (worker, _):
        jobs = [worker.submit(greedy("a")) for _ in range(3)]
        start = time.monotonic()
        assert worker.close(0.1) == 4  # the running one too
        assert time.monotonic() - start < 30
        assert all(isinstance(job.result.exception(timeout=1), StoppedError) for job in jobs)


@pytest.mark.slow
@pytest.mark.compiles(40, "programs of generation")
def test_too_long_prompt_among_good_ones_leaves_one_batch(model):
    """And requests that do not fit together, though each fits alone, are two batches."""
    texts = ["the cat", "a", "日本"]
    with paused_worker(model) as (worker, release):
        bad = worker.submit(greedy("x" * 60))
        jobs = [worker.submit(greedy(text)) for text in texts]
        release.set()
        answers = [job.result.result(timeout=120)[0][0] for job in jobs]
        assert "prompt 1 has 60 tokens" in str(bad.result.exception(timeout=1))
        assert answers == [tfx_jax.generate(model, text, max_new_tokens=9, temperature=0) for text in texts]
    assert (worker.num_batches, worker.num_inputs) == (2, 4)  # with the pause
    with paused_worker(model) as (worker, release):
        long, short = worker.submit(greedy("x" * 50)), worker.submit(greedy("the", 16))
        release.set()
        assert long.result.result(timeout=120)[0][1] == 9
        assert short.result.result(timeout=120)[0][1] == 16
    assert (worker.num_batches, worker.num_inputs) == (3, 3)


@pytest.mark.slow
@pytest.mark.compiles(40, "programs of generation")
def test_request_with_many_prompts_is_split_into_programs(model, monkeypatch):
    monkeypatch.setattr(model_worker, "MAX_BATCH_TOKENS", 2 * (16 + 16))
    texts = ["a", "the cat", "日本", "b", "c"]
    worker, sizes = ModelWorker(model), []
    observe = type(worker._rows).__call__
    monkeypatch.setattr(type(worker._rows), "__call__", lambda rows, t: (sizes.append(len(t)), observe(rows, t))[1])
    sampling = Sampling(temperature=0.7)
    job = worker.submit(Job("generate", texts, sampling=sampling, max_tokens=9, seed=5))
    answer = job.result.result(timeout=120)
    worker.close()
    assert set(sizes) == {1, 2}
    expected = tfx_jax.generate(model, texts, max_new_tokens=9, temperature=0.7, seed=5)
    assert [text for text, *_ in answer] == expected


@pytest.mark.slow
@pytest.mark.compiles(40, "programs of generation")
def test_temperatures_share_one_program_and_one_decoder(model, traced_searches):
    worker, programs = ModelWorker(model), []
    for temperature in (0.3, 0.7, 1.0):
        sampling = Sampling(temperature=temperature)
        before = len(traced_searches)
        job = worker.submit(Job("generate", ["the cat"], sampling=sampling, max_tokens=9, seed=5))
        found = job.result.result(timeout=120)[0][0]
        programs += traced_searches[before:]
        assert found == tfx_jax.generate(model, "the cat", max_new_tokens=9, temperature=temperature, seed=5)
    worker.close()
    assert len(programs) == 1


@pytest.mark.parametrize("stop", [[], ["n't"], ["zz"]])
@pytest.mark.parametrize("cleans_up", [False, True])
def test_streamed_text_is_the_whole_text(cleans_up, stop):
    """Also for tokenizers that remove spaces before punctuation, and where EOS is an ordinary token."""
    text = "it is , it does n't . I 'm  ' s here ! so"
    parts = []
    jobs = [
        Job("generate", ["a"], max_tokens=60, stop=stop, on_text=parts.append),
        Job("generate", [""], on_text=parts),
    ]
    tokenizer = Letters(cleans_up)
    rows, ids = model_worker._Rows(), [ord(letter) for letter in text]
    rows.start(jobs, [False, True], [None, None], tokenizer, [3])
    num_seen = 0
    for token in ids[:-1]:  # the program does not show the last token
        num_seen += 1
        is_finished = rows(np.array([token, 65]))
        assert is_finished[1]
        if is_finished[0]:
            break
    else:
        rows(np.array([3, -1]))
        num_seen += 1
    whole, _, reason = rows.finish(0, ids[:num_seen])
    assert "".join(parts) == whole
    expected = tokenizer.clean_up(text)
    assert whole == (expected[: expected.index("n't")] if stop == ["n't"] else expected)
    assert reason == "stop"
    assert rows.finish(1, [65]) == ("", 0, "stop")
    assert len(parts) > 4


class Letters:
    """A tokenizer of characters."""

    def __init__(self, cleans_up):
        self._cleans_up = cleans_up

    def stream(self, context=()):
        return TextStream(lambda ids: "".join(map(chr, ids)), context)

    def clean_up(self, text):
        return hf_tokenizer._clean_up(text) if self._cleans_up else text


def test_attention_of_too_many_tokens_is_refused(model, monkeypatch):
    monkeypatch.setattr(model_worker, "MAX_ATTENTION_WEIGHTS", 2 * 6**2)
    worker = ModelWorker(model)
    job = worker.submit(Job("attend", ("the cat", None)))
    assert "the text has 7 tokens, but the attention maps of this model are drawn for at most 6" in str(
        job.result.exception(timeout=60)
    )
    worker.close()


def test_retry_streams_no_text_twice_and_counts_each_request_once(model):
    with paused_worker(model) as (worker, release):
        jobs, calls = [greedy("a", on_text=str), greedy("b"), greedy("c")], []

        def fail_once(batch):
            calls.append(len(batch))
            if len(batch) > 1:
                batch[0].has_streamed = True
                raise RuntimeError("out of memory")
            return [job.inputs for job in batch]

        worker._generate = fail_once
        for job in jobs:
            worker.submit(job)
        release.set()
        assert "out of memory" in str(jobs[0].result.exception(timeout=60))
        assert [job.result.result(timeout=60) for job in jobs[1:]] == [["b"], ["c"]]
    assert calls == [3, 1, 1]
    assert (worker.num_batches, worker.num_inputs) == (3, 3)  # with the pause
