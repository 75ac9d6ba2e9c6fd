"""Exported models in a process that cannot import tfx_jax: the same tokens, the same outputs."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import Sampling
from tfx_jax.generation.text import Generator
from tfx_jax.models import (
    GPT,
    T5,
    Bert,
    BertClassifier,
    BertConfig,
    Clip,
    ClipConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    T5Config,
    Transformer,
    TransformerConfig,
    ViTClassifier,
    ViTConfig,
    exported_run,
)
from tfx_jax.models.clip import TowerConfig
from tfx_jax.models.export import export, export_onnx
from tfx_jax.nn import AttentionConfig, AttentionOptions

pytest.importorskip("flatbuffers")
V, PROMPTS = 29, [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
SIZES = {"vocab_size": V, "d_model": 16, "num_heads": 2, "num_layers": 2}

ALONE = """
import json, sys
sys.modules["tfx_jax"] = sys.modules["flax"] = None  # imports fail
sys.path.insert(0, sys.argv[1])
from run import ExportedModel
model = ExportedModel(sys.argv[1] + "/model.npz")
print(json.dumps({}))
"""


def run_alone(folder, expression):
    """The value of an expression of `model` in a process with JAX and NumPy."""
    command = [sys.executable, "-c", ALONE.replace("{}", expression, 1), str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


WINDOW = AttentionConfig(name="window", options=AttentionOptions(window=4))


def make_gpt():
    return GPT(GPTConfig(**SIZES, max_length=2_000), rngs=nnx.Rngs(0))


def make_llama(**options):
    options |= {"num_kv_heads": 1, "d_ff": 24, "max_length": 2_000}
    return Llama(LlamaConfig(**SIZES, **options), rngs=nnx.Rngs(0))


def make_t5():
    return T5(T5Config(**SIZES, d_k=8, d_ff=24), rngs=nnx.Rngs(0))


def make_transformer():
    return Transformer(TransformerConfig(**SIZES, d_ff=24, start_id=0), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "int8"),
    [
        (make_llama, False),
        pytest.param(make_gpt, False, marks=pytest.mark.slow),
        pytest.param(make_gpt, True, marks=pytest.mark.slow),
        pytest.param(lambda: make_llama(attention=WINDOW), False, marks=pytest.mark.slow),
        pytest.param(make_t5, False, marks=pytest.mark.slow),
        pytest.param(make_transformer, False, marks=pytest.mark.slow),
    ],
)
def test_a_decoder_generates_the_same_tokens(make, int8, tmp_path, draw_model):
    """Of several batches and lengths, up to an end."""
    model = draw_model(make)
    batches = [PROMPTS, [list(range(1, 12))]]
    options = {"max_new_tokens": 7, "search": Sampling(temperature=0), "first_ids": [8, 21]}
    first = Generator(model, int8=int8, **options)(PROMPTS)
    eos_id = first[0][3]
    generator = Generator(model, eos_ids=[eos_id], int8=int8, **options)
    export(model, tmp_path, eos_ids=[eos_id], first_ids=[8, 21], int8=int8)
    expected = [generator(prompts) for prompts in batches]
    assert run_alone(tmp_path, f"[model.generate(prompts, 7) for prompts in {batches}]") == expected
    assert expected[0] != first
    readme = (tmp_path / "README.md").read_text()
    assert "for cpu, cuda, tpu" in readme
    assert readme.count("\n") == 11


def make_bert():
    config = BertConfig(**SIZES, d_ff=24, max_length=2_000, labels=("a", "b", "c"))
    return BertClassifier(config, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_classifier_is_one_call(tmp_path, draw_model):
    model = draw_model(make_bert)
    export(model, tmp_path)
    found = run_alone(tmp_path, f"model({PROMPTS})['outputs'].tolist()")
    tokens, token_mask = np.zeros((3, 5), np.int32), np.zeros((3, 5), bool)
    for row, ids in enumerate(PROMPTS):
        tokens[row, : len(ids)], token_mask[row, : len(ids)] = ids, True
    expected = jitted(lambda model, tokens, mask: model(tokens, token_mask=mask))(model, tokens, token_mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def make_vit():
    sizes = {"image_size": 8, "patch_size": 4, "d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 24}
    return ViTClassifier(ViTConfig(**sizes, labels=("a", "b", "c")), rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_images_are_one_call(tmp_path, draw_model):
    model = draw_model(make_vit)
    export(model, tmp_path)
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    found = run_alone(tmp_path, f"model({images.tolist()})['outputs'].tolist()")
    np.testing.assert_allclose(found, jitted(lambda model, x: model(x))(model, images), rtol=1e-5, atol=1e-5)


def make_body():
    return Bert(BertConfig(**SIZES, d_ff=24, max_length=64), rngs=nnx.Rngs(0))


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # of the converter
@pytest.mark.compiles(200, "jax2onnx evaluates constants one by one")
@pytest.mark.parametrize("make", [make_bert, make_body, make_vit])
def test_onnx_runtime_computes_the_same(make, tmp_path, draw_model):
    """Of several batches and lengths, and with padding on both sides."""
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = draw_model(make)
    export_onnx(model, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    call = jitted(lambda model, inputs, mask: model(inputs) if mask is None else model(inputs, token_mask=mask))
    for batch, length, max_padding in [(3, 5, 0), (1, 1, 0), (2, 17, 6), (4, 64, 63)]:
        mask = np.arange(length) < length - rng.integers(max_padding + 1, size=(batch, 1))
        mask[1::2] = mask[1::2, ::-1]  # every second row has its padding in front
        if make is make_vit:
            mask, inputs = None, {"images": rng.random((batch, 8, 8, 3), np.float32)}
        else:
            inputs = {"tokens": rng.integers(V, size=(batch, length), dtype=np.int32), "token_mask": mask}
        expected = call(model, next(iter(inputs.values())), mask)
        expected = expected._asdict() if make is make_body else {"outputs": expected}
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(None, inputs), strict=True))
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            # Vectors of padding are arbitrary.
            exists = mask if name == "sequence" else ...
            expected_values = np.asarray(array)[exists]
            assert np.std(expected_values) > 0.01
            tolerance = 1e-4 * np.abs(expected_values).max()
            np.testing.assert_allclose(found[name][exists], expected_values, rtol=0, atol=tolerance)


def test_what_has_no_onnx(tmp_path, monkeypatch):
    def abstract(make):
        return nnx.eval_shape(make)

    with pytest.raises(UserError, match="GPT generates, but only encoders and classifiers can be exported to ONNX"):
        export_onnx(abstract(make_gpt), tmp_path)
    config = BertConfig(**SIZES, d_ff=24, dtype="bfloat16")
    with pytest.raises(UserError, match="Bert computes in bfloat16, but only float32 can be exported to ONNX"):
        export_onnx(abstract(lambda: Bert(config, rngs=nnx.Rngs(0))), tmp_path)
    with pytest.raises(UserError, match="gs://bucket/out is not a local folder: export to one, and copy it"):
        export_onnx(None, "gs://bucket/out")
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(UserError, match=r"ONNX needs jax2onnx \(.*\): pip install \"tfx-jax\[onnx\] @ "):
        export_onnx(abstract(make_body), tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_exported(tmp_path, draw_model):
    with pytest.raises(UserError, match="cannot be exported for any batch and length: ") as caught:
        export(draw_model(lambda: make_gpt_with("lsh", num_buckets=4, chunk_size=4)), tmp_path)
    assert "\n" not in str(caught.value)
    config = ClipConfig(vocab_size=V, image_size=8, patch_size=4, text=TowerConfig(1, 8, 2), image=TowerConfig(1, 8, 2))
    with pytest.raises(UserError, match="Clip reads images and tokens, but only models that read one of them"):
        export(nnx.eval_shape(lambda: Clip(config, rngs=nnx.Rngs(0))), tmp_path)
    with pytest.raises(UserError, match="gs://bucket/out is not a local folder: export to one, and copy it"):
        export(None, "gs://bucket/out")


@pytest.mark.parametrize(
    ("inputs", "arguments"), [("tokens", []), ("tokens", ["3", "x"]), ("tokens", ["-1"]), ("images", ["3"])]
)
def test_the_usage_is_printed_for_what_run_does_not_read(inputs, arguments):
    model = types.SimpleNamespace(settings={"inputs": inputs, "programs": ["call"]})
    with pytest.raises(SystemExit, match=r"python run\.py 464"):
        exported_run.main(model, arguments)


@pytest.mark.parametrize("row", [[1, 5], [-1], [2**40], [2**70], [1.7], [True]])
def test_rows_have_ids_of_the_vocabulary(row):
    """Outputs of other ids are NaN, and the next token would be 0."""
    model = types.SimpleNamespace(settings={"vocab_size": 5, "max_length": None})
    with pytest.raises(ValueError, match=r"a row has an id outside 0 \.\. 4, or one that is no integer"):
        exported_run.ExportedModel._padded_rows(model, [[2], row])


def test_rows_fit_into_the_model():
    model = types.SimpleNamespace(settings={"vocab_size": 5, "max_length": 3})
    assert exported_run.ExportedModel._padded_rows(model, [[2] * 3])[0].shape == (1, 3)
    with pytest.raises(ValueError, match="a row has 4 tokens, but the model reads 3"):
        exported_run.ExportedModel._padded_rows(model, [[2] * 4])


@pytest.mark.parametrize("count", [0, -1])
def test_at_least_one_token_is_generated(count):
    with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1, got {count}"):
        exported_run.ExportedModel.generate(types.SimpleNamespace(), [[1]], count)


def test_int8_is_for_models_that_generate(tmp_path):
    config = BertConfig(vocab_size=9, max_length=16, num_layers=1, d_model=8, num_heads=2, labels=("a", "b"))
    model = nnx.eval_shape(lambda: BertClassifier(config, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="BertClassifier does not generate, but only decoders get int8 weights"):
        export(model, tmp_path / "out", int8=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [[], [[]], [[1], []]])
def test_rows_have_tokens(rows):
    with pytest.raises(ValueError, match="a row has no tokens: pass rows with at least one token each"):
        exported_run._padded(rows)


def make_gpt_with(attention, **options):
    attention = AttentionConfig(name=attention, options=AttentionOptions(**options))
    return GPT(GPTConfig(**SIZES, max_length=64, attention=attention), rngs=nnx.Rngs(0))
