"""The picture of attention that each evaluation leaves in TensorBoard, and trainings that have none."""

import contextlib
import io
import sys
import types

import numpy as np
import pytest

from tests.training.tiny import pictures
from tfx_jax.errors import UserError
from tfx_jax.models import Seq2SeqConfig
from tfx_jax.tasks import prediction
from tfx_jax.tasks.prediction import PairAttention, drawable_pair
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant
from tfx_jax.training.loop import train
from tfx_jax.training.reporting.attention_picture import write_attention
from tfx_jax.training.reporting.progress import Progress

PAIR = PairAttention({"decoder/0/cross": np.full((2, 3, 4), 0.25, np.float32)}, list("abcd"), list("xyz"))


@pytest.fixture
def said():
    return io.StringIO()


@pytest.fixture
def progress(tmp_path, said):
    with contextlib.closing(Progress(tmp_path, last_done_step=0, num_steps=1, stream=said)) as shown:
        yield shown


def example(found):
    def attention_example(model):
        if isinstance(found, Exception):
            raise found
        return found

    return types.SimpleNamespace(attention_example=attention_example)


@pytest.mark.slow
def test_each_evaluation_of_a_training_leaves_one_of_the_same_pair(tmp_path, monkeypatch):
    traced = []
    maps_of = prediction._attention_maps

    def remember(model, batch):
        traced.append({name: tokens.shape for name, tokens in batch.items()})
        return maps_of(model, batch)

    monkeypatch.setattr(prediction, "_attention_maps", remember)
    config = tiny_variant(ExperimentConfig(Seq2SeqConfig(pad_id=0, start_id=1, eos_id=2), TranslationConfig()))
    config.num_steps, config.eval_every, config.optimizer.warmup_steps, config.mesh.data = 2, 1, 1, 1
    config.task.decoding.beam_size, config.task.decoding.extra_length = 1, 0
    train(config, tmp_path)
    (first, before), (second, after) = pictures(tmp_path)
    assert (first, second) == (1, 2)
    assert before.size == after.size
    assert 0.5e6 < np.prod(before.size) <= 1e6
    assert np.any(np.asarray(before) != np.asarray(after))
    assert len(traced) == 1  # no evaluation but the first compiles


def test_the_last_layer_is_drawn_under_the_mean_of_its_heads(progress, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "tfx_jax.training.reporting.attention_plot.plot_attention",
        lambda maps, *tokens, lead_layer: drawn.append((sorted(maps), tokens, lead_layer)),
    )
    maps = {
        f"decoder/{layer}/{kind}": PAIR.maps["decoder/0/cross"] for layer in (0, 10, 2) for kind in ("self", "cross")
    }
    write_attention(example(PAIR._replace(maps=maps)), None, progress, 1)
    assert drawn == [(["decoder/10/cross"], (list("abcd"), list("xyz")), 10)]


@pytest.mark.parametrize("found", [None, UserError("has no attention")])
def test_a_model_without_maps_is_trained_in_silence(found, progress, tmp_path, said):
    write_attention(example(found), None, progress, 1)
    assert pictures(tmp_path) == []
    assert said.getvalue() == ""


def test_nothing_is_drawn_without_matplotlib(progress, tmp_path, monkeypatch, said):
    write_attention(example(PAIR), None, progress, 1)
    for name in [
        name for name in sys.modules if name.startswith(("matplotlib", "tfx_jax.training.reporting.attention_plot"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_attention(example(PAIR), None, progress, 2)
    assert [step for step, _ in pictures(tmp_path)] == [1]
    assert said.getvalue() == ""


def test_what_cannot_be_drawn_is_said_and_stops_nothing(progress, said):
    strange = PAIR._replace(target=["x"])
    write_attention(example(strange), None, progress, 1)
    assert said.getvalue().startswith("no picture of attention: map 'decoder/0/cross' has shape [2, 3, 4]")


def test_the_pair_is_the_first_that_is_neither_long_nor_empty():
    pairs = [("", "a b c d"), ("a b c d", 25 * "x "), ("a b c d", 24 * "x "), ("a b c d", "e f g h")]
    assert drawable_pair(iter(pairs), str.split) == pairs[2]
    assert drawable_pair(100 * [("", "")] + pairs, str.split) is None
