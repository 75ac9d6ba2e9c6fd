"""Folders of PEFT without torch: what is merged, from the formula in NumPy, and what is refused."""

import json

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.models.hf.folders import assert_refused
from tests.nn.programs import draw
from tfx_jax.errors import UserError
from tfx_jax.models import GPT, BertConfig, BertMaskedLM, BertPretraining, GPTConfig, hf
from tfx_jax.models.hf.folder import write_folder

D, RANK = 6, 2
A, B = (
    np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    for seed, shape in ((0, (RANK, D)), (1, (D, RANK)))
)
PREFIX = "base_model.model.transformer.h.0.attn.c_proj"
TENSORS = {f"{PREFIX}.lora_A.weight": A, f"{PREFIX}.lora_B.weight": B}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 3, "fan_in_fan_out": True, "rank_pattern": {"c_proj": RANK}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = GPTConfig(vocab_size=11, max_length=8, num_layers=2, d_model=D, num_heads=2)
    folder = tmp_path_factory.mktemp("base")
    hf.save(draw(lambda: GPT(config, rngs=nnx.Rngs(0))), folder)
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    config = CONFIG | {"base_model_name_or_path": str(base)}
    write_folder(tmp_path, config, TENSORS, names=("adapter_config.json", "adapter_model.safetensors"))
    return tmp_path


def change(adapter, **fields):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def kernels_of(model):
    return np.asarray(model.decoder_layers.self_attention.out.kernel[...]).reshape(2, D, D)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 3 / 2), ({"use_rslora": True}, 3 / 2**0.5), ({"alpha_pattern": {"h.0.attn.c_proj": 5.0}}, 5 / 2)],
)
def test_an_adapter_is_added_to_its_matrix_alone(base, adapter, fields, scale):
    change(adapter, **fields)
    before, after = kernels_of(hf.load(base)), kernels_of(hf.load(adapter))
    np.testing.assert_allclose(after[0], before[0] + scale * (B @ A).T, atol=1e-6)
    np.testing.assert_array_equal(after[1], before[1])
    assert hf.load_config(adapter) == hf.load_config(base)


def test_dora_scales_the_columns_of_the_sum(base, adapter):
    magnitude = np.linspace(0.5, 2, D, dtype=np.float32)
    tensors = TENSORS | {f"{PREFIX}.lora_magnitude_vector": magnitude}
    safetensors.numpy.save_file(tensors, adapter / "adapter_model.safetensors")
    change(adapter, use_dora=True)
    before, after = kernels_of(hf.load(base)), kernels_of(hf.load(adapter))
    total = np.float64(before[0]) + 1.5 * np.float64(B @ A).T
    want = magnitude * total / np.sqrt((total**2).sum(axis=0))
    np.testing.assert_allclose(after[0], want, atol=1e-6)
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', but only 'LORA' is supported"),
        ({"use_dora": True}, r"lora_magnitude_vector \(\) does not fit .*c_proj.weight with use_dora=True"),
        ({"bias": "all"}, "bias is 'all', but only 'none' is supported"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path: write there where the model is"),
        ({"r": "two", "rank_pattern": {}}, "r is 'two', not of type int"),
        ({"rank_pattern": {"(": 3}}, r"'\(' is no regular expression \(missing \)"),
        ({"alpha_pattern": {"*": 3}}, r"'\*' is no regular expression \(nothing to repeat"),
    ],
)
def test_other_adapters_are_refused(adapter, fields, message):
    change(adapter, **fields)
    assert_refused(adapter, message)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{PREFIX}.lora_A.weight": A}, r"lora_A \(2, 6\) and lora_B \(\) do not fit"),
        ({**TENSORS, f"{PREFIX}.lora_B.weight": B[:5]}, r"lora_A \(2, 6\) and lora_B \(5, 2\) do not fit"),
        ({"base_model.model.x.lora_A.weight": A}, r"has no tensor x\.weight for base_model\.model\.x\.lora_A\.weight"),
        (
            {"base_model.model.x.lora_embedding_A": A},
            "lora_embedding_A is not supported, but only adapters of matrices",
        ),
        (
            {**TENSORS, f"{PREFIX}.lora_magnitude_vector": A[0]},
            r"lora_magnitude_vector \(6,\) does not fit .*c_proj.weight with use_dora=False",
        ),
        ({"base_model.model.x.weight": A}, r"there is a tensor x\.weight, for which the model has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(adapter, tensors, message):
    safetensors.numpy.save_file(tensors, adapter / "adapter_model.safetensors")
    assert_refused(adapter, message)


def test_a_trained_head_is_not_lost(tmp_path):
    """An adapter of a classifier below which the folder of a masked language model lies, as of a `BertForMaskedLM`."""
    config = BertConfig(vocab_size=11, max_length=8, num_layers=1, d_model=D, num_heads=2)
    hf.save(draw(lambda: BertMaskedLM(config, rngs=nnx.Rngs(0))), tmp_path / "base")
    prefix = "base_model.model.bert.encoder.layer.0.attention.self.query"
    tensors = {f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}
    head = {"base_model.model.classifier.weight": A[:2], "base_model.model.classifier.bias": A[0, :2]}
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "base_model_name_or_path": str(tmp_path / "base")}
    names = ("adapter_config.json", "adapter_model.safetensors")
    write_folder(tmp_path, values | {"task_type": "SEQ_CLS"}, tensors | head, names=names)
    assert_refused(tmp_path, r"the adapter has classifier\.bias, for which the model has no place: load it as the arch")
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert isinstance(hf.load(tmp_path), BertMaskedLM)
    hf.save(draw(lambda: BertPretraining(config, rngs=nnx.Rngs(0))), tmp_path / "base")  # which has a pooler, too
    safetensors.numpy.save_file(tensors | head, tmp_path / "adapter_model.safetensors")
    for keep_bfloat16 in (False, True):
        options = {"architecture": "BertForSequenceClassification", "keep_bfloat16": keep_bfloat16}
        classifier = hf.load(tmp_path, **options).classifier
        np.testing.assert_array_equal(classifier.kernel[...], A[:2].T)
        np.testing.assert_array_equal(classifier.bias[...], A[0, :2])


def test_missing_and_damaged_weights_are_refused(adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:30])
    assert_refused(adapter, "is damaged or cut short")
    path.unlink()
    assert_refused(
        adapter, r"adapter_model\.safetensors does not exist: an adapter's folder must contain both it and adapter"
    )


def test_a_model_without_adapters_is_not_saved_as_one(base, tmp_path):
    with pytest.raises(ValueError, match="the model has no adapters: train with config"):
        hf.save_adapter(hf.load(base), tmp_path / "out", base=str(base))
    with pytest.raises(UserError, match="does not exist"):
        hf.load(tmp_path / "out")
