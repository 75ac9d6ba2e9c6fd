"""Attention maps of every kind of text model: those that the module itself returns, with their tokens."""

import jax
import numpy as np
import pytest
from flax import nnx

import tfx_jax
from tests.nn.programs import draw
from tests.training.test_predictor import opened
from tfx_jax.errors import UserError
from tfx_jax.models import (
    Bert,
    BertConfig,
    ElmoConfig,
    GPTConfig,
    Seq2VecConfig,
    T5Config,
    TransformerConfig,
    ViTConfig,
)
from tfx_jax.tasks.events import EventClassificationConfig, EventData
from tfx_jax.tasks.text.bidirectional_language_modeling import BidirectionalLanguageModelConfig
from tfx_jax.tasks.text.classification import ClassificationConfig, LabeledData
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.parsing import ParsingConfig, TreeData
from tfx_jax.tasks.text.question_answering import QuestionAnsweringConfig, QuestionData
from tfx_jax.tasks.text.tagging import TaggedData, TaggingConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.tasks.vision.image_classification import ImageClassificationConfig, ImageData
from tfx_jax.training import LoadedModel
from tfx_jax.training.predictor import load_from_run
from tfx_jax.training.reporting.attention_picture import _draw
from tfx_jax.training.reporting.attention_plot import plot_attention

ENCODERS = {
    "classes": (BertConfig, ClassificationConfig, LabeledData),
    "tags": (BertConfig, TaggingConfig, TaggedData),
    "questions": (BertConfig, QuestionAnsweringConfig, QuestionData),
}
PAIRS = {
    "trees": (TransformerConfig, ParsingConfig, TreeData),
    "text to text": (T5Config, TextToTextConfig, LabeledData),
}


@pytest.mark.parametrize(
    "name", ["tags", *(pytest.param(name, marks=pytest.mark.slow) for name in ("classes", "questions"))]
)
def test_encoders_attend_from_and_to_the_tokens_of_their_input(name, tmp_path):
    run, params = opened(ENCODERS[name], tmp_path)
    texts = ("who runs", "the dog runs") if name == "questions" else ("the dog runs",)
    maps, source, target = tfx_jax.attention(load_from_run(run, params), *texts)
    pieces = [run.task.tokenizer.encode(text) for text in texts]
    special = [1, 1] if len(texts) == 2 else [1]  # [SEP] after each
    ids = [run.task.tokenizer.cls_id]
    for text_ids in pieces:
        ids += [*text_ids, run.task.tokenizer.sep_id]
    assert (source, target) == (run.task.tokenizer.pieces(ids), [])
    assert len(source) == 1 + sum(map(len, pieces)) + len(special)
    segments = np.repeat([0, 1], [len(pieces[0]) + 2, len(source) - len(pieces[0]) - 2])
    expected = maps_of(run, params, np.array([ids]), segments[None])
    assert [*maps] == [*expected]
    for key, weights in maps.items():
        np.testing.assert_allclose(weights, expected[key][0], atol=1e-5)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    plot_attention(maps, source, target)
    example = run.task.attention_example(run.trained(params))
    assert example.source
    _draw(example)


def test_a_language_model_attends_to_what_it_read(tmp_path):
    run, params = opened((GPTConfig, LanguageModelConfig, TextData), tmp_path)
    loaded = load_from_run(run, params)
    maps, source, target = tfx_jax.attention(loaded, "the dog runs")
    ids = run.task.tokenizer.encode("the dog runs")
    assert (source, target) == ([], run.task.tokenizer.pieces(ids))
    expected = maps_of(run, params, np.array([ids]))
    for key, weights in maps.items():
        np.testing.assert_allclose(weights, expected[key][0], atol=1e-5)
        assert not np.triu(weights, 1).any()
    plot_attention(maps, source, target)
    _draw(run.task.attention_example(run.trained(params)))
    without_task = LoadedModel(loaded.model, loaded.tokenizer)  # as from a Hugging Face folder
    np.testing.assert_array_equal(
        tfx_jax.attention(without_task, "the dog runs").maps["decoder/0/self"], maps["decoder/0/self"]
    )
    with pytest.raises(UserError, match="a language model reads one text: pass no target"):
        tfx_jax.attention(loaded, "the dog", "runs")
    with pytest.raises(UserError, match="the text has no tokens"):
        tfx_jax.attention(loaded, "")
    num_tokens, limit = len(run.task.tokenizer.encode("dog " * 99)), run.config.model.max_length
    for model in (loaded, without_task):
        with pytest.raises(
            UserError, match=rf"^the text has {num_tokens} tokens, but the model takes {limit}: shorten it"
        ):
            tfx_jax.attention(model, "dog " * 99)
    for texts, name in ((([1],), "source"), (("a", 3), "target")):
        with pytest.raises(UserError, match=f"^{name} must be a text, got "):
            tfx_jax.attention(loaded, *texts)


def test_models_of_images_and_events_take_what_they_read(tmp_path):
    run, params = opened((ViTConfig, ImageClassificationConfig, ImageData), tmp_path)
    loaded, image = load_from_run(run, params), run.task.rows("validation")[0].image
    np.testing.assert_array_equal(tfx_jax.attention(loaded, image).image, image)
    with pytest.raises(UserError, match=r"^target is a caption, but this model classifies images: leave it out$"):
        tfx_jax.attention(loaded, image, "a dog")
    with pytest.raises(UserError, match=r"^source must be an image, an array \[Y, X, C\] of uint8, got 'dog\.png'$"):
        tfx_jax.attention(loaded, "dog.png")
    run, params = opened((Seq2VecConfig, EventClassificationConfig, EventData), tmp_path)
    with pytest.raises(UserError, match="does not read text: there are no maps to draw"):
        tfx_jax.attention(load_from_run(run, params), "a", "b")


@pytest.mark.slow
def maps_of(run, params, *inputs):
    """The maps that the module returns for its inputs."""
    call = jax.jit(lambda params, *inputs: nnx.merge(run.graphdef, params)(*inputs, return_attention=True)[1])
    return call(params, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_what_a_model_writes_attends_to_its_input(name, tmp_path):
    run, params = opened(PAIRS[name], tmp_path)
    model = run.trained(params)
    maps, source, target = run.task.attention(model, "the dog runs")
    assert {"encoder/0/self", "decoder/0/self", "decoder/0/cross"} <= maps.keys()
    assert maps["decoder/0/cross"].shape[1:] == (len(target), len(source))
    assert source[-1] == target[-1] == "</s>"
    plot_attention(maps, source, target)
    if name == "text to text":
        assert run.task.attention(model, "the dog runs", "a cat").target[:-1] == run.task.tokenizer.pieces(
            run.task.tokenizer.encode("a cat")
        )
        with pytest.raises(UserError, match="--source must be text, but has 1 TABs"):
            run.task.attention(model, "a\tb")
    else:
        with pytest.raises(
            UserError, match="attention is drawn for the tree that the model itself predicts: pass no target"
        ):
            run.task.attention(model, "the dog runs", "a")
    assert run.task.attention_example(model) is None or _draw(run.task.attention_example(model))


def test_a_module_alone_is_refused_with_a_line():
    with pytest.raises(UserError, match=r"^a Bert has no tokenizer: pass the result of tfx_jax\.load, or LoadedModel"):
        tfx_jax.attention(Bert.__new__(Bert), "a")


def test_models_without_maps_say_so(tmp_path):
    run, params = opened((ElmoConfig, BidirectionalLanguageModelConfig, TextData), tmp_path)
    with pytest.raises(UserError, match="does not read"):
        tfx_jax.attention(load_from_run(run, params), "the dog runs")
    config = BertConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, max_length=8)
    with pytest.raises(UserError, match="Bert does not read text: there are no maps to draw"):
        tfx_jax.attention(LoadedModel(draw(lambda: Bert(config, rngs=nnx.Rngs(0)))), "a")
