"""Starting from the parameters of another model: memory, and folders without a head."""

import pathlib
import re
import shutil
import types
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx

from tests.nn.programs import draw
from tests.tiers import slow_but
from tfx_jax import models
from tfx_jax.arrays import leaves_by_path
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.models import hf
from tfx_jax.tasks import ClassificationConfig
from tfx_jax.training.checkpoint.base import initial_params
from tfx_jax.training.config import ExperimentConfig, save_config
from tfx_jax.training.init_from import adopt_pretrained_config, init_from_state
from tfx_jax.training.loop import train
from tfx_jax.training.step import SkipState, TrainState


def test_a_state_is_let_go_before_that_of_another_model_is_made(monkeypatch):
    """Two states may not fit into memory."""
    old = []
    array = jax.device_put

    def first_state():
        drawn = {"a": array(np.zeros(3, np.float32)), "b": array(np.zeros(2, np.float32))}
        moments = {"a": array(np.ones(3, np.float32))}
        average = {name: array(np.zeros(leaf.shape, np.float32)) for name, leaf in drawn.items()}
        old.extend(map(weakref.ref, [drawn["a"], moments["a"], *average.values()]))
        return TrainState(array(0), drawn, moments, SkipState(array(0), array(0)), {}, None, average)

    def init_optimizer(params):
        assert not any(reference() is not None for reference in old)
        return {"new": params["a"]}

    monkeypatch.setattr("tfx_jax.training.init_from.initial_params", lambda *_: {"a": np.arange(3.0)})
    training: Any = types.SimpleNamespace(first_state=first_state, init_optimizer=init_optimizer)
    state, _, message = init_from_state(training, "./other")
    assert message == "starts from ./other: 1 of 2 arrays; randomly initialized: b"
    np.testing.assert_array_equal(state.params["a"], [0, 1, 2])
    np.testing.assert_array_equal(state.params["b"], [0, 0])
    np.testing.assert_array_equal(state.opt_state["new"], [0, 1, 2])
    np.testing.assert_array_equal(state.ema["a"], [0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("Bert", "BertClassifier"), ("ViT", "ViTClassifier")])
def test_a_folder_without_a_head_starts_a_classifier(name, head, tmp_path):
    config = getattr(models, f"{name}Config")()
    config.tiny(max_length=8)
    config.labels = ("a", "b")
    hf.save(nnx.jit(lambda: getattr(models, name)(config, rngs=nnx.Rngs(0)))(), tmp_path)
    classifier = nnx.eval_shape(lambda: getattr(models, head)(config, rngs=nnx.Rngs(0)))
    expected = leaves_by_path(nnx.to_pure_dict(nnx.state(classifier))).keys()
    missing = expected - leaves_by_path(initial_params(epath.Path(tmp_path), lambda _: {})).keys()
    assert {path.split("/")[0] for path in missing} == {"classifier"}


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_a_classifier_says_what_it_was_trained_on_not_what_it_started_from(problem_type, tmp_path):
    config = models.BertConfig(labels=("a", "b", "c"), problem_type=problem_type)
    config.tiny(max_length=8)
    hf.save(draw(lambda: models.BertClassifier(config, rngs=nnx.Rngs(0))), tmp_path)
    assert hf.load_config(tmp_path).problem_type == problem_type
    experiment = ExperimentConfig(models.BertConfig(), ClassificationConfig(), init_from=str(tmp_path))
    adopted = adopt_pretrained_config(experiment).model
    assert (adopted.problem_type, adopted.d_model) == (None, config.d_model)


def test_a_run_needs_its_initial_model_no_more(tmp_path, monkeypatch):
    """Its folder may be gone, or the hub out of reach, when it is resumed."""
    model = models.BertConfig(labels=("a", "b", "c"))
    model.tiny(max_length=8)
    hf.save(draw(lambda: models.BertClassifier(model, rngs=nnx.Rngs(0))), tmp_path / "initial")
    experiment = ExperimentConfig(models.BertConfig(), ClassificationConfig(), init_from=str(tmp_path / "initial"))
    adopted = adopt_pretrained_config(experiment, tmp_path / "run")
    (tmp_path / "run").mkdir()
    save_config(adopted, epath.Path(tmp_path / "run"))
    shutil.rmtree(tmp_path / "initial")
    with pytest.raises(UserError, match="initial"):  # without a checkpoint it is needed
        adopt_pretrained_config(experiment, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "3" / "file").write_text("x")
    assert adopt_pretrained_config(experiment, tmp_path / "run") == adopted


EXPERIMENTS = sorted(path.stem for path in (pathlib.Path(__file__).parents[2] / "experiments").glob("*.py"))


@pytest.mark.compiles(200, "two trainings of any model")
@pytest.mark.parametrize("name", slow_but(EXPERIMENTS, "recall"))
def test_every_experiment_starts_from_a_run_of_its_own(name, tmp_path, capfd):
    """With a tokenizer or without one."""
    config = load_config_file(f"{name}:test")
    config.num_steps, config.eval_every, config.patience = 1, 0, 0
    train(config, tmp_path / "first")
    config.init_from = str(tmp_path / "first")
    train(config, tmp_path / "second")
    found = re.search(r"starts from .*/first: (\d+) of (\d+) arrays", capfd.readouterr().err)
    assert found[1] == found[2]
