"""Folders of BERT without transformers: what is saved is loaded bit for bit, what cannot be expressed is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.models.hf.folders import (
    LEFT_OUT,
    assert_comes_back,
    assert_refused,
    assert_same,
    change_config,
    change_tensors,
    rename_norms_as_of_old,
)
from tests.nn.programs import draw
from tfx_jax.errors import UserError
from tfx_jax.models import Bert, BertConfig, hf
from tfx_jax.models.hf import modernbert
from tfx_jax.models.hf.bert import HEADS
from tfx_jax.models.hf.encoders import ENCODERS
from tfx_jax.models.hf.folder import Fields

CONFIG = BertConfig(
    vocab_size=13,
    num_segments=3,
    max_length=9,
    num_layers=2,
    d_model=8,
    num_heads=2,
    d_ff=20,
    dropout_rate=0.3,
    attention_dropout_rate=0.2,
    head_dropout_rate=0.4,
    activation="relu",
    layer_norm_epsilon=1e-6,
)
SIZES = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
SIZES |= {"max_position_embeddings": 11, "embedding_size": 6}
LABELS = {"labels": ("O", "B-PER", "ひと"), "problem_type": "single_label_classification"}


@functools.cache
def make_bert(architecture, seed=0, **overrides):
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: HEADS[architecture][0](config, rngs=nnx.Rngs(0)), seed=seed)


@pytest.mark.parametrize("architecture", HEADS)
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, architecture):
    assert_comes_back(make_bert(architecture, **LABELS if "Classification" in architecture else {}), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.MODEL_TYPE)
def test_relatives_come_back_under_their_names(tmp_path, encoder, is_tied):
    for architecture, (cls, _) in encoder.HEADS.items():
        if not is_tied and "ForMaskedLM" not in architecture:
            continue
        values = {encoder.fields.get(name, name): value for name, value in SIZES.items()}
        values |= {"architectures": [architecture], "tie_word_embeddings": is_tied}
        config = encoder.read_config(architecture, Fields(values, tmp_path))
        model = draw(lambda cls=cls, config=config: cls(config, rngs=nnx.Rngs(0)))
        hf.save(model, tmp_path, fields=values)
        again = hf.load(tmp_path)
        assert type(again) is cls
        assert again.config == config
        assert_same(again, model)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == encoder.MODEL_TYPE


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("roberta", {"pad_token_id": 0}, "pad_token_id is 0, but only 1 is supported"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu', but only 'gelu' is supported"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups is 2, but only 1 is supported"),
        ("albert", {"inner_group_num": 2}, "inner_group_num is 2, but only 1 is supported"),
        ("distilbert", {"activation": "tanh"}, "activation is 'tanh', but only gelu_new, "),
        ("distilbert", {"n_heads": "2"}, "n_heads is '2', not of type int"),
        ("distilbert", {"n_heads": 2, "num_attention_heads": 4}, "num_attention_heads is 4, but only 2 is supported"),
    ],
)
def test_relatives_that_differ_are_refused(tmp_path, model_type, fields, message):
    encoder = next(encoder for encoder in ENCODERS if model_type == encoder.MODEL_TYPE)
    architecture = next(name for name in encoder.HEADS if "ForMaskedLM" in name)
    with pytest.raises(UserError, match=message):
        encoder.read_config(architecture, Fields(fields, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4, 5])
def test_modernbert_comes_back(tmp_path, num_layers):
    """Layers but the first repeat in threes, or all differ."""
    fields = Fields({**SIZES, "num_hidden_layers": num_layers, "local_attention": 4}, tmp_path)
    for architecture, (cls, _) in modernbert.HEADS.items():
        config = modernbert.read_config(architecture, fields)
        assert config.attention.name == ("window,window,dense" if num_layers == 4 else "window,window,dense,window")
        assert_comes_back(draw(lambda cls=cls, config=config: cls(config, rngs=nnx.Rngs(0))), tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_bias": True}, "norm_bias is True, but only False is supported"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, but only 0.0 is supported"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1 and global_attn_every_n_layers 3: too few"),
        ({"layer_types": ["sliding_attention"] * 22}, "the first of 22 layers must see all"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only the default rope_type is supported"),
        ({"rope_parameters": {"sliding_attention": {"type": "linear"}}}, "only the default rope_type is supported"),
        ({"rope_parameters": {"full_attention": None}}, "only the default rope_type is supported"),
        ({"rope_parameters": {"full_attention": [1]}}, "only the default rope_type is supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": None}}}, "whose rope_theta is no number"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": "x"}}}, "whose rope_theta is no number"),
        ({"layer_types": ["full_attention"] * 21 + ["chunked"]}, "layer_types is 'chunked', but only full_attention, "),
        ({"sliding_window": 7, "local_attention": 16}, "sliding_window is 7, but only 8 is supported"),
    ],
)
def test_a_modernbert_that_differs_is_refused(tmp_path, fields, message):
    with pytest.raises(UserError, match=f"^{tmp_path}: .*{message}"):
        modernbert.read_config("ModernBertForMaskedLM", Fields(fields, tmp_path))


def test_names_are_those_of_transformers(tmp_path):
    """A body alone has no prefix; behind a head it has one, which the head has not."""
    heads = {
        "BertModel": set(),
        "BertForSequenceClassification": {"classifier.weight", "classifier.bias"},
        "BertForQuestionAnswering": {"qa_outputs.weight", "qa_outputs.bias"},
        "BertForNextSentencePrediction": {"cls.seq_relationship.weight", "cls.seq_relationship.bias"},
    }
    for architecture, head in heads.items():
        hf.save(make_bert(architecture), tmp_path)
        names = set(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
        prefix = "" if architecture == "BertModel" else "bert."
        assert head <= names
        assert all(name.startswith(prefix) for name in names - head)
        assert {f"{prefix}embeddings.LayerNorm.weight", f"{prefix}encoder.layer.1.output.dense.bias"} <= names
        assert (f"{prefix}pooler.dense.weight" in names) == (architecture != "BertForQuestionAnswering")
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as tensors:
        assert tensors.get_slice("bert.encoder.layer.0.intermediate.dense.weight").get_shape() == [20, 8]


def test_a_body_is_read_out_of_any_folder(tmp_path):
    model = make_bert("BertForPreTraining")
    hf.save(model, tmp_path)
    assert_same(hf.load(tmp_path, architecture="BertModel"), model.bert)
    assert_same(hf.load(tmp_path, architecture="BertForPreTraining"), model)
    masked_lm = hf.load(tmp_path, architecture="BertForMaskedLM")
    assert_same(masked_lm.masked_lm, model.masked_lm)
    assert masked_lm.bert.pooler is None
    with pytest.raises(UserError, match=r"the tensor classifier\.weight is missing"):
        hf.load(tmp_path, architecture="BertForTokenClassification")
    with pytest.raises(UserError, match=r"the architecture \['BertFor'\] is not supported"):
        hf.load(tmp_path, architecture="BertFor")


def test_a_pretrained_body_below_a_new_head_is_saved(tmp_path):
    hf.save(make_bert("BertForPreTraining"), tmp_path / "pretrained")
    pretrained = hf.load(tmp_path / "pretrained")
    labels = ("good", "bad", "neither")
    classifier = nnx.clone(make_bert("BertForSequenceClassification", seed=1, labels=labels))
    classifier.load_encoder(pretrained)
    hf.save(classifier, tmp_path / "tuned")
    again = hf.load(tmp_path / "tuned")
    assert again.config.labels == labels
    assert_same(again.bert, pretrained.bert)
    assert_same(again.classifier, classifier.classifier)


def test_old_names_buffers_and_copies(tmp_path):
    model = make_bert("BertForMaskedLM")
    hf.save(model, tmp_path)

    def age(tensors):
        names = set(tensors)
        rename_norms_as_of_old(tensors)
        assert len(tensors.keys() - names) == 2 * (1 + 2 * 2 + 1)
        tensors["bert.embeddings.position_ids"] = np.arange(9)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
        tensors |= {"bert.pooler.dense.weight": np.zeros((8, 8)), "bert.pooler.dense.bias": np.zeros(8)}
        tensors |= {"cls.seq_relationship.weight": np.zeros((2, 8)), "cls.seq_relationship.bias": np.zeros(2)}

    change_tensors(tmp_path, age)
    assert_same(hf.load(tmp_path), model)


def test_a_tensor_under_both_names_is_refused(tmp_path):
    hf.save(make_bert("BertModel"), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"embeddings.LayerNorm.gamma": np.ones(8, np.float32)}))
    assert_refused(tmp_path, r"has a tensor embeddings\.LayerNorm\.\w+ and another, embeddings")


@pytest.mark.parametrize("name", ["encoder.layer.0.adapter.weight", "encoder.layer.2.output.dense.bias", "cls.more"])
def test_an_unknown_tensor_is_refused(tmp_path, name):
    hf.save(make_bert("BertModel"), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    with pytest.raises(UserError, match=f"there is a tensor {name}, for which the model has no place"):
        hf.load(tmp_path)


def test_labels_where_the_folder_has_none(tmp_path):
    hf.save(make_bert("BertForTokenClassification"), tmp_path)
    change_config(tmp_path, id2label=LEFT_OUT, label2id=LEFT_OUT)
    assert hf.load(tmp_path).config.labels == ("LABEL_0", "LABEL_1")
    change_config(tmp_path, num_labels=3)
    assert_refused(tmp_path, r"classifier.weight has shape \[2, 8\], but \[3, 8\] is needed")
    hf.save(make_bert("BertForTokenClassification", **LABELS), tmp_path)
    change_config(tmp_path, id2label=LEFT_OUT, label2id=LEFT_OUT, num_labels=3)
    assert hf.load(tmp_path).config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("id2label", [{"0": "a", "2": "b"}, {"0": "a", "1": 1}, {"x": "a", "1": "b"}])
def test_labels_with_gaps_are_refused(tmp_path, id2label):
    hf.save(make_bert("BertForTokenClassification"), tmp_path)
    change_config(tmp_path, id2label=id2label)
    assert_refused(tmp_path, r"config.json: id2label is .*, but has to name the classes 0 to 1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_decoder": True}, "is_decoder is True, but only False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but only 'absolute'"),
        ({"tie_word_embeddings": False}, "the tensor cls.predictions.decoder.* is missing"),
        ({"hidden_act": "hard_swish"}, "hidden_act is 'hard_swish', but only gelu_new, "),
        ({"num_attention_heads": 3}, "d_model=8 is not divisible by num_heads=3"),
        ({"hidden_size": "8"}, "hidden_size is '8', not of type int"),
        ({"vocab_size": 14}, r"embeddings.word_embeddings.weight has shape \[13, 8\], but \[14, 8\] is needed"),
        ({"num_hidden_layers": 3}, "the tensor bert.encoder.layer.2.* is missing"),
        ({"num_hidden_layers": 1}, "there is a tensor bert.encoder.layer.1.* for which the model has no place"),
    ],
)
def test_refusals(tmp_path, fields, message):
    hf.save(make_bert("BertForMaskedLM"), tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)


def test_only_tied_outputs_have_to_be_tied(tmp_path):
    hf.save(make_bert("BertForTokenClassification"), tmp_path)
    change_config(tmp_path, tie_word_embeddings=False, hidden_dropout_prob=0)
    assert hf.load(tmp_path).config.dropout_rate == 0.0


def test_defaults_are_those_of_the_base_model(tmp_path):
    hf.save(make_bert("BertModel"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert_refused(tmp_path, r"has shape \[13, 8\], but \[30522, 768\] is needed")


@pytest.mark.parametrize("has_pooler", [True, False])
def test_a_body_with_and_without_a_pooler(tmp_path, has_pooler):
    config = dataclasses.replace(CONFIG, has_pooler=has_pooler)
    assert_comes_back(draw(lambda: Bert(config, rngs=nnx.Rngs(0))), tmp_path)
    assert hf.load_config(tmp_path) == config


def test_computes_in_bfloat16(tmp_path):
    hf.save(make_bert("BertModel"), tmp_path)
    model = hf.load(tmp_path, dtype=jnp.bfloat16)
    assert model.config.dtype == "bfloat16"
    assert jax.eval_shape(model, np.ones((1, 4), int)).sequence.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_a_model_with_shared_layers_may_have_more_layers_than_tensors(tmp_path):
    sizes = {"vocab_size": 11, "max_length": 8, "num_layers": 60, "d_model": 8, "num_heads": 2, "d_ff": 8}
    config = BertConfig(**sizes, embedding_size=4, share_layers=True)
    model = draw(lambda: Bert(config, rngs=nnx.Rngs(0)))
    hf.save(model, tmp_path)
    assert len(safetensors.numpy.load_file(tmp_path / "model.safetensors")) < config.num_layers
    assert_same(hf.load(tmp_path), model)
