"""`tfx-jax export`: what it writes, and what it refuses."""

import json

import numpy as np
import pytest
from flax import nnx

from tests.training.configs import default_config
from tfx_jax.cli import export, main
from tfx_jax.models import GPT, GPTConfig, ViTConfig, hf
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


def test_an_output_that_exists_is_kept(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["export", "--model=gpt2", "--output=gs://bucket/out"]) == 2
    assert "gs://bucket/out is in a store, but export needs local folders" in capsys.readouterr().err
    for output in (tmp_path, tmp_path / "file"):
        assert main(["export", "--model=gpt2", f"--output={output}"]) == 2
        assert f"--output={output} exists and is not an empty folder" in capsys.readouterr().err
