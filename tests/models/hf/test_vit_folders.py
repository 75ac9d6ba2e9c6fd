"""Folders of Vision Transformers without transformers: bit for bit there and back, and what is refused."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.models.hf.folders import assert_comes_back, assert_refused, assert_same, change_config, change_tensors
from tests.nn.programs import draw
from tfx_jax.models import ViT, ViTClassifier, ViTConfig, hf

CONFIG = ViTConfig(
    image_size=12,
    patch_size=4,
    num_channels=2,
    num_layers=2,
    d_model=8,
    num_heads=2,
    d_ff=20,
    dropout_rate=0.3,
    attention_dropout_rate=0.2,
    activation="gelu_tanh",
    layer_norm_epsilon=1e-5,
    labels=("cat", "dog", "いぬ"),
    problem_type="multi_label_classification",
)


@functools.cache
def make_vit(cls, **overrides):
    config = dataclasses.replace(CONFIG, **overrides)
    if cls is ViT:  # whose folder says nothing of classes
        config = dataclasses.replace(config, labels=ViTConfig().labels, problem_type=None)
    return draw(lambda: cls(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("cls", [ViT, ViTClassifier])
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, cls):
    assert_comes_back(make_vit(cls), tmp_path)


@pytest.mark.parametrize(
    ("cls", "has_head", "architecture"),
    [
        (ViT, False, "DeiTModel"),
        (ViTClassifier, False, "DeiTForImageClassification"),
        (ViTClassifier, True, "DeiTForImageClassificationWithTeacher"),
    ],
)
def test_with_a_distillation_token_it_is_a_deit(tmp_path, cls, has_head, architecture):
    model = make_vit(cls, distillation_token=True, distillation_head=has_head)
    assert_comes_back(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]


def test_a_distillation_head_without_a_token_is_refused():
    with pytest.raises(ValueError, match="distillation_head=True needs distillation_token=True"):
        dataclasses.replace(CONFIG, distillation_head=True).validate()


def test_tensors_are_those_of_a_convolution(tmp_path):
    model = make_vit(ViTClassifier)
    hf.save(model, tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    kernel = tensors["vit.embeddings.patch_embeddings.projection.weight"]
    assert kernel.shape == (8, 2, 4, 4)
    np.testing.assert_array_equal(kernel, np.moveaxis(np.asarray(model.vit.patches.kernel[...]), -1, 0))
    assert tensors["vit.embeddings.cls_token"].shape == (1, 1, 8)
    assert tensors["vit.embeddings.position_embeddings"].shape == (1, 10, 8)
    assert {name for name in tensors if not name.startswith("vit.")} == {"classifier.weight", "classifier.bias"}


def test_a_body_is_read_out_of_a_classifier_with_a_pooler(tmp_path):
    classifier = make_vit(ViTClassifier)
    hf.save(classifier, tmp_path)
    alone = hf.load(tmp_path, architecture="ViTModel")
    assert alone.pooler is None
    assert_comes_back(alone, tmp_path / "alone")
    pooler = {"vit.pooler.dense.weight": np.eye(8), "vit.pooler.dense.bias": np.ones(8)}
    more = {"vit.embeddings.mask_token": np.zeros((1, 1, 8))}
    change_tensors(tmp_path, lambda tensors: tensors.update(pooler | more))
    assert_same(hf.load(tmp_path), classifier)
    body = hf.load(tmp_path, architecture="ViTModel")
    np.testing.assert_array_equal(body.pooler.kernel[...], np.eye(8))
    np.testing.assert_array_equal(body.class_token[...], classifier.vit.class_token[...])


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (ViTClassifier, {"qkv_bias": False}, "qkv_bias is False, but only True is supported"),
        (ViTClassifier, {"hidden_act": "hard_swish"}, "hidden_act is 'hard_swish', but only"),
        (ViTClassifier, {"image_size": [12, 12]}, r"image_size is \[12, 12\], not of type int"),
        (ViTClassifier, {"image_size": 13}, "image_size=13 is not divisible by patch_size=4"),
        (ViTClassifier, {"image_size": 16}, r"position_embeddings has shape \[1, 10, 8\], but \[1, 17, 8\] is needed"),
        (ViTClassifier, {"patch_size": 3}, r"has shape .*, but .* is needed"),
        (ViTClassifier, {"id2label": {"0": "cat"}}, r"classifier\.weight has shape \[3, 8\], but \[1, 8\] is needed"),
        (ViT, {"pooler_act": "relu"}, "pooler_act is 'relu', but only 'tanh'"),
        (ViT, {"pooler_output_size": 4}, "pooler_output_size is 4, but only 8"),
    ],
)
def test_refusals(tmp_path, cls, fields, message):
    hf.save(make_vit(cls), tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)
