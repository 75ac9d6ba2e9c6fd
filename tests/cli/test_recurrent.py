"""What the commands do with recurrent translation: alignments, and lines that no model should fall over."""

import io
import sys
import types

import numpy as np
import pytest

from tfx_jax.cli import main
from tfx_jax.models import Seq2SeqConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run

pytestmark = pytest.mark.slow


MODELS = {variant: {"variant": variant} for variant in ("bahdanau", "luong", "fixed")}
MODELS |= {alignment: {"alignment": alignment, "window": 2} for alignment in ("local-m", "local-p")}
MODELS |= {"coverage": {"variant": "bahdanau", "coverage": 1.0}}


@pytest.fixture(scope="module", params=MODELS)
def workdir(request, tmp_path_factory):
    """The workdir of a training of one step."""
    folder = tmp_path_factory.mktemp(request.param) / request.param
    config = tiny_variant(ExperimentConfig(Seq2SeqConfig(**MODELS[request.param]), TranslationConfig()))
    config.num_steps, config.mesh.data = 1, 1
    train(config, folder)
    return folder


def test_attend_draws_the_alignment_or_says_that_there_is_none(workdir, tmp_path, capsys):
    source, picture = "ken broke the bicycle .", tmp_path / "alignment.png"
    status = main(["attend", f"--workdir={workdir}", f"--source={source}", f"--output={picture}"])
    if workdir.name == "fixed":
        assert status
        assert capsys.readouterr().err.splitlines()[-1].count('variant="fixed" has no attention')
        return
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    run = load_run(workdir)
    maps, across, down = run.task.attention(run.trained(load_params(workdir)), source, "x y")
    (weights,) = maps.values()
    assert weights.shape == (1, len(down), len(across))  # the source across, the target down
    if workdir.name == "local-p":  # what a Gaussian leaves
        assert (weights.sum(axis=-1) < 1).all()
        assert ((weights > 0).sum(axis=-1) <= 5).all()
        assert weights.any()
        return
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    if workdir.name == "local-m":
        distance = np.arange(len(down))[:, None] - np.arange(len(across))
        np.testing.assert_array_equal(weights[0] > 0, np.abs(distance) <= 2)


def test_a_training_goes_on_with_coverage(workdir, tmp_path, capfd):
    """As See et al. (2017) do, section 5: all that was trained is taken, and coverage begins without effect."""
    if workdir.name != "bahdanau":
        pytest.skip("one that has an additive score, and no coverage, is enough")
    tiny = tiny_variant(ExperimentConfig(Seq2SeqConfig(), TranslationConfig()))
    tiny.model.coverage, tiny.num_steps, tiny.mesh.data, tiny.init_from = 1.0, 1, 1, str(workdir)
    train(tiny, tmp_path / "covering")
    said = capfd.readouterr()
    assert "drawn: attention/b_score, attention/w_coverage, auxiliary_loss, coverage_loss" in said.out + said.err
    model = load_run(tmp_path / "covering").config.model
    assert (model.variant, model.coverage) == ("bahdanau", 1.0)
    # Whoever does not say gets what was trained.
    tiny.model.coverage, tiny.init_from = None, str(tmp_path / "covering")
    assert adopt_pretrained_config(tiny).model.coverage == 1.0


def test_evaluate_scores_it(workdir, capsys):
    assert main(["evaluate", f"--workdir={workdir}"]) == 0
    assert "BLEU" in capsys.readouterr().out


def test_empty_lines_and_unknown_characters_are_lines(workdir, monkeypatch, capsys):
    text = "\n☃ 𓀀\n   \nken\n".encode()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text)))
    assert main(["translate", f"--workdir={workdir}", "--beam=2"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 5
    assert lines[0] == lines[2] == ""
