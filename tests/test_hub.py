"""Models and data sets by their names on the hub, which is a server of ours here: nothing leaves the machine."""

import base64
import functools
import hashlib
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from unittest import mock

import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
from flax import nnx

from tfx_jax import hub as hub_module
from tfx_jax.cli import main
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.data.tokenizers.train import train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.hub import dataset_files, local_folder
from tfx_jax.models import GPT, GPTConfig, hf
from tfx_jax.nn import LoraConfig, adapt
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.run import tokenizer_folder

ROOT = pathlib.Path(__file__).parents[1]
COMMIT = "0" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """What `huggingface_hub` asks of the hub: which files a model has, and their contents."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        folders, asked = self.server.folders, self.server.asked
        path = re.sub("^(/api/models|/api/datasets|/datasets)?/", "", self.path.partition("?")[0])
        name, _, rest = path.partition("/revision/" if "/revision/" in path else "/resolve/")
        if name.partition("/tree/")[0] not in folders:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in name:
            files = sorted(folders[name.partition("/tree/")[0]].iterdir())
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT} for file in files]
            self._answer(200, json.dumps(tree).encode(), {})
        elif "/revision/" in path:
            self.server.revisions.append(urllib.parse.unquote(rest))
            names = [file.name for file in folders[name].iterdir()]
            siblings = [{"rfilename": file} for file in [*names, "onnx/model.safetensors"]]
            self._answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), {})
        else:
            file = rest.partition("/")[2]
            asked.add(file)
            data = (folders[name] / file).read_bytes()
            self._answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":  # of the model card
            assert json.loads(body)["content"].startswith("---\n")
            self._answer(200, b'{"errors": [], "warnings": []}', {})
        elif self.headers["Authorization"] != "Bearer hf_right":
            self._answer(401, b'{"error": "Invalid username or password."}', {})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, json.dumps({"url": f"http://{self.headers['Host']}/jane/mine"}).encode(), {})
        elif self.path == "/api/models/jane/mine/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer(200, json.dumps({"files": modes}).encode(), {})
        elif self.path == "/api/models/jane/mine/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = {"commitUrl": f"http://{self.headers['Host']}/jane/mine/commit/{COMMIT}", "commitOid": COMMIT}
            self._answer(200, json.dumps({**commit, "success": True}).encode(), {})
        else:
            self._answer(404, b"{}", {})

    def _answer(self, status, data, headers):
        self.server.count += 1
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT and its tokenizer, beside what must not be fetched."""
    folder = tmp_path_factory.mktemp("gpt")
    tokenizer = train_or_load_folder(folder, lambda: ["to be or not to be"], kind="bpe", vocab_size=300, family="gpt")
    config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, d_model=8, num_heads=2, max_length=32)
    hf.save(GPT(config, rngs=nnx.Rngs(0)), folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folders, server.asked = {"someone/tiny": folder, "tiny": folder}, set()
        server.count, server.revisions = 0, []
        server.created, server.uploaded = [], {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _reach(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield server
        server.shutdown()


def _reach(monkeypatch, endpoint, cache):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    download = functools.partial(huggingface_hub.snapshot_download, endpoint=endpoint, cache_dir=cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    cached = functools.partial(huggingface_hub.try_to_load_from_cache, cache_dir=cache)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    hub_module._download.cache_clear()
    hub_module._download_dataset.cache_clear()


@pytest.mark.parametrize("name", ["tiny", "someone/tiny"])
def test_a_name_is_downloaded_and_read(hub, folder, name):
    model = hf.load(name)
    for got, want in zip(
        nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(nnx.state(hf.load(folder))), strict=True
    ):
        np.testing.assert_array_equal(got[1][...], want[1][...], err_msg=str(got[0]))
    assert load_folder_tokenizer(name).encode("to be") == load_folder_tokenizer(folder).encode("to be")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.asked
    assert not {file for file in hub.asked if file.endswith((".bin", ".py")) or "/" in file}


def test_an_adapter_is_downloaded_with_its_weights(hub, folder, tmp_path):
    model = hf.load(folder)
    adapt(model, LoraConfig(rank=2))
    hub.folders["someone/adapter"] = tmp_path / "served"
    hf.save_adapter(model, tmp_path / "served", base=str(folder))
    assert hf.load("someone/adapter") is not None
    assert {"adapter_config.json", "adapter_model.safetensors"} <= hub.asked


def test_verbs_take_a_name(hub, tmp_path, capsys):
    assert main(["convert", "--model=tiny", f"--output={tmp_path / 'out'}"]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().err
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_the_card_of_a_converted_model_is_the_hubs_or_names_it(hub, folder, tmp_path, monkeypatch, capsys):
    assert main(["convert", "--model=someone/tiny", "--output=out"]) == 0
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.license) == ("someone/tiny", None)
    with_card = shutil.copytree(folder, tmp_path / "served")
    (with_card / "README.md").write_text("---\nlicense: mit\n---\nSmall.\n")
    hub.folders["someone/licensed"] = with_card
    assert main(["convert", "--model=someone/licensed", "--output=licensed"]) == 0
    assert (tmp_path / "licensed" / "README.md").read_text() == "---\nlicense: mit\n---\nSmall.\n"
    (tmp_path / "someone").mkdir()
    shutil.copytree(folder, tmp_path / "someone" / "tiny")  # is read now, and is not the hub's
    assert main(["convert", "--model=someone/tiny", "--output=local"]) == 0
    assert huggingface_hub.ModelCard.load(tmp_path / "local" / "README.md").data.base_model is None


@pytest.fixture
def upload(hub, folder, monkeypatch, capsys):
    """Converts and uploads a folder with a token; returns the exit status and what was printed."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")

    def upload(*flags, token="hf_right", name="jane/mine"):
        monkeypatch.setenv("HF_TOKEN", token)
        status = main(["convert", f"--model={folder}", "--output=out", "--overwrite", f"--push={name}", *flags])
        return status, capsys.readouterr()

    return upload


def test_a_folder_is_uploaded(hub, upload, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    status, printed = upload("--json")
    assert status == 0, printed.err
    url = f"http://127.0.0.1:{hub.server_port}/jane/mine"
    assert f"\nuploaded to {url}\n" in printed.err
    result = json.loads(printed.out)
    assert result["url"] == url
    (created,) = hub.created
    assert (created["organization"], created["name"]) == ("jane", "mine")
    assert created.get("visibility") == "private" or created.get("private") is True  # newer and older clients
    assert hub.uploaded.keys() == set(result["files"]) >= {"README.md", "config.json", "model.safetensors"}
    assert hub.uploaded == {name: (tmp_path / "out" / name).read_bytes() for name in result["files"]}


def test_what_cannot_be_uploaded_is_one_line(hub, upload, tmp_path, monkeypatch):
    for name in ("mine", "a/b/c", "../b"):
        status, printed = upload(name=name)
        assert (status, printed.err) == (
            2,
            f"tfx-jax convert: --push={name} must be OWNER/NAME, such as jane/my-model\n",
        )
    assert not (tmp_path / "out").exists()
    status, printed = upload(token="hf_wrong")
    assert (status, hub.uploaded) == (2, {})
    line = printed.err.splitlines()[-1]
    assert re.fullmatch(
        r"tfx-jax convert: out is written, but cannot be uploaded to jane/mine \(.*401.*\): check .*", line
    )
    assert (tmp_path / "out" / "model.safetensors").exists()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    status, printed = upload()
    assert (status, "cannot be uploaded to jane/mine (" in printed.err.splitlines()[-1]) == (2, True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    status, printed = upload()
    assert (status, printed.err.count("\n")) == (2, 1)
    assert "--push needs a token of the Hugging Face hub: log in with `hf auth login`, or set HF_TOKEN" in printed.err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    status, printed = upload()
    assert (status, "--push needs the Hugging Face hub, which HF_HUB_OFFLINE switches off" in printed.err) == (2, True)


@pytest.mark.slow
def test_a_folder_is_uploaded_to_the_endpoint_of_the_environment(hub, folder, tmp_path):
    (tmp_path / "home").mkdir()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_right", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tfx_jax", "convert", f"--model={folder}", "--output=out", "--push=jane/mine"],
        cwd=tmp_path,
        env={**os.environ, **environment, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hub.uploaded["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_the_hub_is_asked_once_for_all_that_a_training_starts_from(hub):
    tokenizer_folder("tiny")
    asked = hub.count
    assert asked
    config = ExperimentConfig(GPTConfig(), LanguageModelConfig(), init_from="tiny")
    assert adopt_pretrained_config(config).model.d_model == 8
    assert (tokenizer_folder("tiny") / "tokenizer.json").exists()
    assert hub.count == asked


def test_a_path_is_never_asked_for(hub):
    with pytest.raises(UserError, match=r"tiny/config.json does not exist"):
        hf.load(pathlib.Path("tiny"))
    assert hub.count == 0


def test_a_folder_of_that_name_is_meant_first(hub, tmp_path):
    (tmp_path / "tiny").mkdir()
    assert str(local_folder("tiny")) == "tiny"
    assert hub.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/tiny", "./tiny", "a/b/tiny", "../tiny", "two words", "a--b", ""])
def test_what_is_no_name_is_a_path(hub, path):
    assert str(local_folder(path)) in (path, path.removeprefix("./") or ".")
    assert hub.count == 0


def test_a_folder_in_a_store_that_cannot_be_read_is_one_line(capsys):
    """s3fs is none of our packages, and no test installs it."""
    assert main(["generate", "--model=s3://bucket/gpt2"]) == 2
    assert re.fullmatch(
        r"tfx-jax \w+: s3://bucket/gpt2 cannot be reached \(.*s3fs.*\): install the missing package\n",
        capsys.readouterr().err,
    )
    assert main(["generate", "--model=https://hub/gpt2"]) == 2
    assert "https://hub/gpt2 cannot be read: name a local folder or one in a store (gs://" in capsys.readouterr().err


def test_a_name_that_nobody_has_is_one_line(hub, capsys):
    assert main(["convert", "--model=nobody/none", "--output=out"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "tfx-jax convert: there is no folder nobody/none here, and the Hugging Face hub shows no model"
    )
    assert said.count("\n") == 1


def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    _reach(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"no folder gpt2 here, .* cannot be downloaded .*: download it on a machine"
    ) as raised:
        hf.load("gpt2")
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no folder gpt2 here, .* cannot be downloaded"):
        load_folder_tokenizer("gpt2")


class ProxyRefusalError(Exception):
    """Errors of the HTTP library are neither OSError nor ValueError."""


def test_errors_of_any_class_are_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=ProxyRefusalError("403 Forbidden")))
    with pytest.raises(UserError, match=r"no folder someone/behind_a_proxy here, .*\(403 Forbidden\)"):
        hf.load("someone/behind_a_proxy")
    with pytest.raises(UserError, match=r"the data set someone/behind_a_proxy cannot be downloaded \(403 Forbidden\)"):
        dataset_files("hf://datasets/someone/behind_a_proxy/c.txt")


@pytest.fixture
def data_set(hub, tmp_path):
    """A data set of three files on the hub."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, text in {"train-1.txt": "one\n", "train-0.txt": "zero\n", "test.txt": "test\n"}.items():
        (folder / name).write_text(text)
    hub.folders["someone/texts"] = folder


def test_files_of_a_data_set_are_downloaded(hub, data_set):
    data = TextData("files", "elsewhere", "hf://datasets/someone/texts/train-*.txt", documents="lines")
    assert list(data.load("train")) == ["zero", "one"]
    assert hub.asked == {"train-0.txt", "train-1.txt"}
    count = hub.count
    assert list(data.load("train")) == ["zero", "one"]
    assert hub.count == count
    data.train_file = "hf://datasets/someone/texts@main/test.txt, hf://datasets/someone/texts/train-1.txt"
    assert list(data.load("train")) == ["test", "one"]


@pytest.mark.parametrize("revision", ["~parquet", "refs/convert/parquet"])
def test_files_that_the_hub_converted_are_downloaded(hub, data_set, revision):
    (file,) = dataset_files(f"hf://datasets/someone/texts@{revision}/test.txt")
    assert file.read_text() == "test\n"
    assert set(hub.revisions) == {"refs/convert/parquet"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://datasets/someone/texts", "hf://datasets/someone/texts names no file: write hf://datasets/OWNER"),
        ("hf://datasets/someone/texts/x-*.txt", r"the data set someone/texts has no file x-\*\.txt: see https"),
        ("hf://datasets/nobody/none/a.txt", "the Hugging Face hub shows no data set nobody/none: if it is gated"),
    ],
)
def test_data_sets_that_are_not_there_are_one_line(hub, data_set, url, message):
    with pytest.raises(UserError, match=message) as raised:
        TextData("files", "", url).load("train")
    assert "\n" not in str(raised.value)


def test_a_data_set_without_a_network_is_one_line(tmp_path, monkeypatch):
    _reach(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(UserError, match=r"the data set a/b cannot be downloaded \(.*\): download it on a machine"):
        dataset_files("hf://datasets/a/b/c.txt")
