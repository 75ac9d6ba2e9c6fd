"""Folders of BERT without transformers: what is saved is loaded bit for bit, what cannot be expressed is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.models import Bert, BertConfig, hf
from tfx_jax.models.hf.bert import HEADS

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
LABELS = {"labels": ("O", "B-PER", "ひと"), "problem_type": "single_label_classification"}


@pytest.fixture(scope="module")
def make(draw_model):
    def make(architecture, **overrides):
        config = dataclasses.replace(CONFIG, **overrides)
        return draw_model(lambda: HEADS[architecture][0](config, rngs=nnx.Rngs(0)))

    return make


def assert_same(model, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(other)))


def change_config(folder, drop=(), **fields):
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in drop}))


def change_tensors(folder, change):
    tensors = change(safetensors.numpy.load_file(folder / "model.safetensors"))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("architecture", HEADS)
def test_what_was_saved_is_loaded_bit_for_bit(make, tmp_path, architecture):
    model = make(architecture, **LABELS if "Classification" in architecture else {})
    hf.save(model, tmp_path / "first")
    again = hf.load(tmp_path / "first")
    assert type(again) is type(model) is HEADS[architecture][0]
    assert again.config == model.config
    assert_same(again, model)
    hf.save(again, tmp_path / "second")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert json.loads((tmp_path / "first/config.json").read_text())["architectures"] == [architecture]


def test_names_are_those_of_transformers(make, tmp_path):
    """A body alone has no prefix; behind a head it has one, which the head has not."""
    heads = {
        "BertModel": set(),
        "BertForSequenceClassification": {"classifier.weight", "classifier.bias"},
        "BertForQuestionAnswering": {"qa_outputs.weight", "qa_outputs.bias"},
        "BertForNextSentencePrediction": {"cls.seq_relationship.weight", "cls.seq_relationship.bias"},
    }
    for architecture, head in heads.items():
        hf.save(make(architecture), tmp_path)
        names = set(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
        prefix = "" if architecture == "BertModel" else "bert."
        assert head <= names
        assert all(name.startswith(prefix) for name in names - head)
        assert {f"{prefix}embeddings.LayerNorm.weight", f"{prefix}encoder.layer.1.output.dense.bias"} <= names
        assert (f"{prefix}pooler.dense.weight" in names) == (architecture != "BertForQuestionAnswering")
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as tensors:
        assert tensors.get_slice("bert.encoder.layer.0.intermediate.dense.weight").get_shape() == [20, 8]


def test_a_body_is_read_out_of_any_folder(make, tmp_path):
    model = make("BertForPreTraining")
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


def test_a_pretrained_body_below_a_new_head_is_saved(make, tmp_path):
    hf.save(make("BertForPreTraining"), tmp_path / "pretrained")
    pretrained = hf.load(tmp_path / "pretrained")
    config = dataclasses.replace(pretrained.config, labels=("good", "bad", "neither"))
    classifier = HEADS["BertForSequenceClassification"][0](config, rngs=nnx.Rngs(1))
    classifier.take_body(pretrained)
    hf.save(classifier, tmp_path / "tuned")
    again = hf.load(tmp_path / "tuned")
    assert again.config.labels == ("good", "bad", "neither")
    assert_same(again.bert, pretrained.bert)
    assert_same(again.classifier, classifier.classifier)


def test_old_names_buffers_and_copies(make, tmp_path):
    model = make("BertForMaskedLM")
    hf.save(model, tmp_path)

    def age(tensors):
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        assert len(old.keys() - tensors.keys()) == 2 * (1 + 2 * 2 + 1)
        old["bert.embeddings.position_ids"] = np.arange(9)[None]
        old["cls.predictions.decoder.weight"] = np.zeros((13, 8), np.float32)
        old["cls.predictions.decoder.bias"] = np.zeros(13, np.float32)
        old |= {"bert.pooler.dense.weight": np.zeros((8, 8)), "bert.pooler.dense.bias": np.zeros(8)}
        return old | {"cls.seq_relationship.weight": np.zeros((2, 8)), "cls.seq_relationship.bias": np.zeros(2)}

    change_tensors(tmp_path, age)
    assert_same(hf.load(tmp_path), model)


def test_a_tensor_under_both_names_is_refused(make, tmp_path):
    hf.save(make("BertModel"), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors | {"embeddings.LayerNorm.gamma": np.ones(8, np.float32)})
    with pytest.raises(UserError, match=r"has a tensor embeddings\.LayerNorm\.\w+ and another, embeddings"):
        hf.load(tmp_path)


@pytest.mark.parametrize("name", ["encoder.layer.0.adapter.weight", "encoder.layer.2.output.dense.bias", "cls.more"])
def test_an_unknown_tensor_is_refused(make, tmp_path, name):
    hf.save(make("BertModel"), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors | {name: np.ones(8, np.float32)})
    with pytest.raises(UserError, match=f"there is a tensor {name}, for which the model has no place"):
        hf.load(tmp_path)


def test_labels_where_the_folder_has_none(make, tmp_path):
    hf.save(make("BertForTokenClassification"), tmp_path)
    change_config(tmp_path, drop=("id2label", "label2id"))
    assert hf.load(tmp_path).config.labels == ("LABEL_0", "LABEL_1")
    change_config(tmp_path, num_labels=3)
    with pytest.raises(UserError, match=r"classifier.weight has shape \[2, 8\], but \[3, 8\] is needed"):
        hf.load(tmp_path)
    hf.save(make("BertForTokenClassification", **LABELS), tmp_path)
    change_config(tmp_path, drop=("id2label", "label2id"), num_labels=3)
    assert hf.load(tmp_path).config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("id2label", [{"0": "a", "2": "b"}, {"0": "a", "1": 1}, {"x": "a", "1": "b"}])
def test_labels_with_gaps_are_refused(make, tmp_path, id2label):
    hf.save(make("BertForTokenClassification"), tmp_path)
    change_config(tmp_path, id2label=id2label)
    with pytest.raises(UserError, match=r"config.json: id2label is .*, but has to name the classes 0 to 1"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_decoder": True}, "is_decoder is True, but only False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but only 'absolute'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu', but only gelu_new, "),
        ({"num_attention_heads": 3}, "d_model=8 is not divisible by num_heads=3"),
        ({"hidden_size": "8"}, "hidden_size is '8', not of type int"),
        ({"vocab_size": 14}, r"embeddings.word_embeddings.weight has shape \[13, 8\], but \[14, 8\] is needed"),
        ({"num_hidden_layers": 3}, "the tensor bert.encoder.layer.2.* is missing"),
        ({"num_hidden_layers": 1}, "there is a tensor bert.encoder.layer.1.* for which the model has no place"),
    ],
)
def test_refusals(make, tmp_path, fields, message):
    hf.save(make("BertForMaskedLM"), tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(UserError, match=message) as caught:
        hf.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_only_tied_outputs_have_to_be_tied(make, tmp_path):
    hf.save(make("BertForTokenClassification"), tmp_path)
    change_config(tmp_path, tie_word_embeddings=False, hidden_dropout_prob=0)
    assert hf.load(tmp_path).config.dropout_rate == 0.0


def test_defaults_are_those_of_the_base_model(make, tmp_path):
    hf.save(make("BertModel"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match=r"has shape \[13, 8\], but \[30522, 768\] is needed"):
        hf.load(tmp_path)


def test_a_body_without_a_pooler_has_no_folder(tmp_path):
    model = Bert(CONFIG, use_pooler=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="either the model or a folder with a BertModel has no pooler/bias"):
        hf.save(model, tmp_path)


def test_computes_in_bfloat16(make, tmp_path):
    hf.save(make("BertModel"), tmp_path)
    model = hf.load(tmp_path, dtype=jnp.bfloat16)
    assert model.config.dtype == "bfloat16"
    assert model(jnp.ones((1, 4), int)).sequence.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
