"""BigBird and Longformer as folders, without torch: they come back as they were, and a training starts from them."""

import dataclasses
import json

import pytest
from flax import nnx

from tests.models.hf.folders import assert_comes_back
from tests.nn.programs import draw
from tfx_jax.models import Bert, BertClassifier, BertConfig, BertMaskedLM, BertTagger, hf
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.tasks.text.classification import ClassificationConfig
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.init_from import adopt_pretrained_config

SIZES = BertConfig(41, 2, 30, num_layers=2, d_model=12, num_heads=3, d_ff=20)
BIGBIRD = AttentionOptions(
    block_size=2,
    num_global_blocks=1,
    num_last_global_blocks=1,
    num_window_blocks=3,
    num_random_blocks=0,
    first_block_times=4,
    dense_length=22,
)
CONFIGS = {
    "big_bird": dataclasses.replace(SIZES, attention=AttentionConfig("bigbird", BIGBIRD)),
    "longformer": dataclasses.replace(
        SIZES,
        attention=AttentionConfig("window", AttentionOptions(window=3)),
        max_global_tokens=64,
        sep_id=2,
        first_position=2,
    ),
}


def make(model, kind):
    has_labels = model in (BertClassifier, BertTagger)
    config = dataclasses.replace(CONFIGS[kind], **{"labels": ("a", "b")} if has_labels else {})
    return draw(lambda: model(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("kind", "model", "architecture"),
    [
        ("big_bird", Bert, "BigBirdModel"),
        ("big_bird", BertMaskedLM, "BigBirdForMaskedLM"),
        ("longformer", BertClassifier, "LongformerForSequenceClassification"),
        ("longformer", BertTagger, "LongformerForTokenClassification"),
    ],
)
def test_they_come_back(kind, model, architecture, tmp_path):
    made = make(model, kind)
    assert_comes_back(made, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["architectures"], fields["model_type"]) == ([architecture], kind)


def test_a_training_has_their_attention_unless_it_names_another(tmp_path):
    for kind, config in CONFIGS.items():
        hf.save(make(BertMaskedLM, kind), tmp_path / kind)
        experiment = ExperimentConfig(BertConfig(), ClassificationConfig(), init_from=str(tmp_path / kind))
        model = adopt_pretrained_config(experiment).model
        assert (model.attention, model.max_global_tokens) == (config.attention, config.max_global_tokens)
        assert (model.first_position, model.max_length) == (config.first_position, 30)
        named = AttentionConfig("window", AttentionOptions(window=9))
        experiment.model.attention = named
        assert adopt_pretrained_config(experiment).model.attention == named


def test_no_folder_says_half_a_longformer(tmp_path):
    """Its window without its global tokens, or the other way round its positions."""
    for values in ({"max_global_tokens": 0, "first_position": 0}, {"first_position": 0}):
        config = dataclasses.replace(CONFIGS["longformer"], **values)
        model = draw(lambda config=config: Bert(config, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match="no Hugging Face architecture supports window attention with window=3"):
            hf.save(model, tmp_path)
