"""Heads that a new task adds to a pretrained model: adapters leave them trainable and freeze all else."""

import dataclasses
import inspect
import typing

import jax
import numpy as np
import pytest
from flax import nnx

from tests.tiers import slow_but
from tfx_jax import models
from tfx_jax.arrays import leaves_by_path
from tfx_jax.nn import Frozen, LoraConfig, adapt

# The attributes of each model that depend on the task; other models have none.
HEADS = {
    "BertClassifier": {"norm", "classifier"},
    "BertMaskedLM": {"masked_lm"},
    "BertMultipleChoice": {"classifier"},
    "BertNextSentence": {"next_sentence"},
    "BertPretraining": {"masked_lm", "next_sentence"},
    "BertQuestionAnswering": {"span"},
    "BertReplacedTokens": {"dense", "is_replaced"},
    "BertTagger": {"dense", "norm", "classifier"},
    "Conformer": {"classifier"},
    "DecomposableAttention": {"classifier"},
    "ElmoTagger": {"words", "lstm", "mix", "classifier"},
    "Esim": {"classifier"},
    "LlamaClassifier": {"classifier"},
    "LongEncoder": {"classifier"},
    "PatchPooling": {"classifier"},
    "SanCTC": {"classifier"},
    "Seq2Vec": {"classifier"},
    "T5Classifier": {"dense", "classifier"},
    "T5Tagger": {"classifier"},
    "TransformerClassifier": {"dense", "classifier"},
    "ViTClassifier": {"classifier", "distillation_classifier"},
}
# These ignore `labels`.
BODIES = {"Bert", "Elmo", "ElmoLanguageModel", "Llama", "LlamaBody", "T5", "T5Encoder", "Transformer", "ViT"}
CLASSES = [name for name in models.__all__ if not name.endswith("Config")]
ADAPTED = [name for name in CLASSES if name not in ("Captioner", "Seq2Seq")]  # those have no matrices for adapters
# Options with which a head has all its modules.
OPTIONS = {"BertTagger": {"head_norm": True}, "BertClassifier": {"head_norm": True}}
OPTIONS["ViTClassifier"] = {"distillation_token": True, "distillation_head": True}


def made(name, num_classes, lora=None):
    """Makes a tiny model without values, with adapters if `lora` is given."""
    cls = getattr(models, name)
    config_class = typing.get_type_hints(cls.__init__)["config"]
    config = config_class()
    if hasattr(config, "tiny"):
        config.tiny(max_length=8)
    options = dict(OPTIONS.get(name, {}))
    if hasattr(config, "labels"):
        options["labels"] = tuple(map(str, range(num_classes)))
    if name == "Seq2Vec":
        options["num_classes"] = num_classes
    config = dataclasses.replace(config, **options)

    def make():
        model = cls(config, rngs=nnx.Rngs(0))
        if lora is not None:
            adapt(model, lora)
        return model

    return nnx.eval_shape(make)


def test_each_model_names_its_heads():
    named = {name: set(heads) for name in CLASSES if (heads := getattr(getattr(models, name), "heads", ()))}
    assert named == HEADS


@pytest.mark.parametrize("name", CLASSES)
def test_each_model_checks_its_configuration(name, monkeypatch):
    config_class = typing.get_type_hints(getattr(models, name).__init__)["config"]
    if not hasattr(config_class, "validate"):
        pytest.skip("its fields fit together whatever they are")

    def refuse(config):
        raise ValueError("checked")

    monkeypatch.setattr(config_class, "validate", refuse)
    with pytest.raises(ValueError, match=r"^checked"):
        made(name, 3)


def _token_arguments(cls):
    """Of each argument that a model's call needs, whether it is token ids [batch, length]."""
    parameters = inspect.signature(cls.__call__).parameters.values()
    needed = [
        parameter for parameter in parameters if parameter.default is parameter.empty and parameter.name != "self"
    ]
    return {
        one.name: getattr(one.annotation, "dim_str", "") in ("B T", "B S", "N T") and "Int" in str(one.annotation)
        for one in needed
    }


@pytest.mark.parametrize("name", CLASSES)
def test_each_model_refuses_token_ids_without_a_batch(name):
    """Seq2Vec reads numbers of variables, which are no tokens."""
    is_ids = _token_arguments(getattr(models, name))
    if not any(is_ids.values()) or name == "Seq2Vec":
        pytest.skip("reads no tokens")
    model = made(name, 3)
    shapes = {"images": (2, model.config.image_size, model.config.image_size, 3)} if "images" in is_ids else {}
    if name == "Whisper":
        shapes["source"] = (2, model.config.num_frames, model.config.num_bands)
    arguments = [
        jax.ShapeDtypeStruct((6,), np.int32) if is_token else jax.ShapeDtypeStruct(shapes[argument], np.float32)
        for argument, is_token in is_ids.items()
    ]
    with pytest.raises(ValueError, match=r"must be an array of token ids \[B, T\], got shape \(6,\): for a single"):
        jax.eval_shape(lambda model, *arguments: model(*arguments), model, *arguments)


def test_each_model_of_classes_has_a_head():
    configs = {name: typing.get_type_hints(getattr(models, name).__init__)["config"] for name in CLASSES}
    classifiers = {name for name, config in configs.items() if "labels" in {x.name for x in dataclasses.fields(config)}}
    assert classifiers - set(HEADS) == BODIES


@pytest.mark.parametrize("name", slow_but(ADAPTED, "BertClassifier", "LlamaClassifier", "ViTClassifier"))
def test_adapters_freeze_all_but_the_heads(name):
    heads = HEADS.get(name, set())
    model = made(name, 3, LoraConfig(2, targets="."))
    trained, frozen = (leaves_by_path(nnx.to_pure_dict(nnx.state(model, kind))) for kind in (nnx.Param, Frozen))
    assert {path.split("/")[0] for path in trained if "_adapter/" not in path} == heads
    assert not {path.split("/")[0] for path in frozen} & heads
    # What has another size for another task cannot come from a checkpoint.
    others = leaves_by_path(nnx.to_pure_dict(nnx.state(made(name, 4))))
    assert all(others[path].shape == leaf.shape for path, leaf in frozen.items())
