"""A task whose examples are trees of arrays, through the whole trainer."""

import dataclasses
import json
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.tiny import whole_state
from tfx_jax.data.batching.batches import BatchSpec, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.sources.splits import Splits
from tfx_jax.tasks.loss import LossOutput, Metric
from tfx_jax.tasks.task import EvalResult, MetricInfo
from tfx_jax.training import config as configs
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.loop import train

D = 3


def make_examples(seed, count=70):
    """Stereo frames with where they are, a few tags, and the number that a linear model could tell of them."""
    random = np.random.default_rng(seed)
    examples = []
    for length in random.integers(1, 9, count):
        frames = random.normal(size=(length, 2, D)).astype(np.float32)
        tags = random.integers(0, 5, random.integers(0, 3)).astype(np.int32)
        sound = {"frames": frames, "is_inside": np.ones(length, bool)}
        label = np.float32(frames.sum(axis=(0, 1)) @ np.arange(D) + tags.sum())
        examples.append({"inputs": {"sound": sound, "tags": tags}, "label": np.asarray(label)})
    return ExampleList(examples, by="inputs/sound/frames")


class Linear(nnx.Module):
    def __init__(self):
        self.weight, self.tag = nnx.Param(jnp.zeros(D)), nnx.Param(jnp.zeros(1))

    def __call__(self, inputs):
        sound, tags = inputs["sound"], inputs["tags"]
        frames = jnp.where(sound["is_inside"][..., None, None], sound["frames"], 0).sum(axis=(1, 2))
        return frames @ self.weight[...] + self.tag[0] * jnp.where(tags >= 0, tags, 0).sum(axis=1)


@dataclasses.dataclass
class LinearConfig:
    kind: ClassVar[str] = "linear"
    vocab_size: int = 0
    d_model: int = D
    dtype: str = "float32"

    def validate(self):
        pass


@dataclasses.dataclass
class RegressionData:
    max_length: int = 8
    tokens_per_batch: int = 128


@dataclasses.dataclass
class RegressionConfig:
    data: RegressionData = dataclasses.field(default_factory=RegressionData)

    def validate(self, model):
        pass

    def splits(self):
        return Splits(lambda split: True, lambda split: make_examples(99))

    def setup(self, model, splits, artifacts):
        return Regression(self, model, splits)


@dataclasses.dataclass
class Regression:
    config: RegressionConfig
    model_config: Any
    splits: Any
    metrics = (MetricInfo("error", "error", is_loss=True),)
    unit = "example"

    def make_model(self, *, rngs):
        return Linear()

    @property
    def spec(self):
        data = self.config.data
        pad_values = {"inputs/tags": -1, "inputs/sound/frames": 1000}  # that must not be read
        return BatchSpec((4, data.max_length), data.tokens_per_batch, pad_values, {"inputs/tags": 2})

    def train_data(self, options):
        return train_batches(lambda epoch: make_examples((options.seed, epoch)), self.spec, options)

    def loss(self, model, batch, rngs):
        is_example = batch["inputs"]["sound"]["is_inside"].any(axis=1)
        loss = jnp.where(is_example, (model(batch["inputs"]) - batch["label"]) ** 2, 0).sum()
        count = is_example.sum().astype(jnp.float32)
        return LossOutput(loss, count, {}, count)

    def evaluate(self, model, split="validation"):
        examples = self.splits[split]
        error = model.sum_metrics(self.predict_error, examples, self.spec)["error"].mean
        return EvalResult({"error": error}, f"error {error}")

    def predict_error(self, model, batch):
        output = self.loss(model, batch, None)
        return {"error": Metric(output.loss, output.weight)}


def make_config(num_steps):
    config = ExperimentConfig(model=LinearConfig(), task=RegressionConfig(), num_steps=num_steps)
    config.mesh.data, config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 8, 0.4, 1
    return config


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """Of a training that went on, and one that was interrupted in the middle of an epoch."""
    with pytest.MonkeyPatch.context() as patch:
        # A file may name nothing outside the library.
        patch.setattr(configs, "_class", lambda path, *_: globals()[path.rpartition(".")[2]])
        folders = [tmp_path_factory.mktemp(name) for name in ("whole", "resumed")]
        train(make_config(20), folders[0])
        for num_steps in (8, 20):
            result = train(make_config(num_steps), folders[1])
    return folders, result


@pytest.mark.slow
def test_a_training_on_eight_devices_learns_and_resumes_to_the_last_bit(workdirs):
    assert jax.device_count() == 8
    folders, result = workdirs
    (step, state, extra), (again, resumed, resumed_extra) = map(whole_state, folders)
    assert step == again == 20
    chex.assert_trees_all_equal(resumed, state)
    assert json.dumps(resumed_extra["data"]) == json.dumps(extra["data"])
    assert result.evaluations[0]["step"] == 8
    assert result.evaluations[-1]["error"] < 0.5 * result.evaluations[0]["error"]


def test_the_interruption_was_in_the_middle_of_an_epoch():
    task = RegressionConfig().setup(LinearConfig(), None, None)
    iterator = iter(task.train_data(LoaderOptions(seed=0, batch_multiple=8)))
    for _ in range(8):
        next(iterator)
    state = iterator.get_state()
    iterator.close()
    assert state["portion"] > 0
    assert state["batch"] > 0


def test_evaluation_equals_numpy(workdirs):
    folders, result = workdirs
    params = load_params(folders[0])
    examples, errors = make_examples(99), []
    for index in range(len(examples)):
        inputs = examples[index]["inputs"]
        found = inputs["sound"]["frames"].sum(axis=(0, 1)) @ params["weight"] + params["tag"][0] * inputs["tags"].sum()
        errors.append((found - examples[index]["label"]) ** 2)
    np.testing.assert_allclose(result.evaluations[-1]["error"], np.mean(errors), rtol=1e-4)
