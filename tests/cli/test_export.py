"""`tfx-jax export`: what it writes, and what it refuses."""

import json
import re

import numpy as np
import pytest
from flax import nnx

from tests.training.configs import default_config
from tfx_jax.cli import export, main
from tfx_jax.models import GPT, BertClassifier, BertConfig, GPTConfig, ViTConfig, hf
from tfx_jax.tasks.vision.image_classification import ImageClassificationConfig, ImageData
from tfx_jax.training.config import tiny_variant, validate
from tfx_jax.training.run import make_run


@pytest.mark.slow
def test_a_folder_is_exported_with_its_ends(tmp_path, draw_model, capsys):
    pytest.importorskip("flatbuffers")
    config = GPTConfig(vocab_size=9, max_length=16, num_layers=1, d_model=8, num_heads=2)
    hf.save(
        draw_model(lambda: GPT(config, rngs=nnx.Rngs(0))),
        tmp_path / "gpt",
        fields={"eos_token_id": 3, "forced_bos_token_id": 4},
    )
    assert main(["export", f"--model={tmp_path / 'gpt'}", f"--output={tmp_path / 'out'}"]) == 0
    assert "for cpu, cuda, tpu), run.py, README.md" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.npz", "run.py"]
    with np.load(tmp_path / "out" / "model.npz") as stored:
        settings = json.loads(stored["settings"].tobytes())
    assert [settings[name] for name in ("eos_ids", "first_ids", "max_length", "model")] == [[3], [4], 16, "GPT"]


def test_a_run_without_a_tokenizer_is_exported(tmp_path, draw_model, monkeypatch, capsys):
    pytest.importorskip("flatbuffers")
    classes = (ViTConfig, ImageClassificationConfig, ImageData)
    run = make_run(validate(tiny_variant(default_config(classes))), tmp_path)
    params = nnx.to_pure_dict(nnx.state(draw_model(run.make_model)))
    monkeypatch.setattr(export, "load_model", lambda arguments, dtype: (run, params))
    assert main(["export", "--workdir=w", f"--output={tmp_path / 'out'}"]) == 0
    with np.load(tmp_path / "out" / "model.npz") as stored:
        settings = json.loads(stored["settings"].tobytes())
    assert (settings["eos_ids"], settings["inputs"]) == ([], "images")


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # of the converter
@pytest.mark.compiles(200, "jax2onnx evaluates constants one by one")
def test_a_classifier_is_written_as_onnx(tmp_path, draw_model, capsys):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    config = BertConfig(vocab_size=9, max_length=16, num_layers=1, d_model=8, num_heads=2, labels=("a", "b", "c"))
    hf.save(draw_model(lambda: BertClassifier(config, rngs=nnx.Rngs(0))), tmp_path / "bert")
    assert main(["export", "--format=onnx", f"--model={tmp_path / 'bert'}", f"--output={tmp_path / 'out'}"]) == 0
    assert "out: model.onnx (" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.onnx"]
    readme = (tmp_path / "out" / "README.md").read_text()
    assert (
        "any, up to 16 tokens. Inputs: `tokens` int32 [b, t], `token_mask` bool [b, t]. Outputs: `outputs` float32 "
        in readme
    )
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    feed = re.search(r"session.run\(None, (\{.*\})\)", readme)[1]
    (logits,) = session.run(None, eval(feed, {"np": np}))  # what the README says
    assert logits.shape == (1, 3)


@pytest.mark.parametrize("option", ["--int8", "--dtype=bfloat16"])
def test_onnx_is_for_float32(tmp_path, option, capsys):
    assert main(["export", "--model=gpt2", "--format=onnx", f"--output={tmp_path / 'out'}", option]) == 2
    assert "--format=onnx is for float32: leave out --int8 and --dtype" in capsys.readouterr().err


def test_an_output_that_exists_is_kept(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["export", "--model=gpt2", "--output=gs://bucket/out"]) == 2
    assert "gs://bucket/out is in a store, but export needs local folders" in capsys.readouterr().err
    for output in (tmp_path, tmp_path / "file"):
        assert main(["export", "--model=gpt2", f"--output={output}"]) == 2
        assert f"--output={output} exists and is not an empty folder" in capsys.readouterr().err
