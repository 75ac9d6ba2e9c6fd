"""`tfx-jax convert`: the same model, one clean folder, and no one's files lost."""

import json

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tfx_jax.cli import main
from tfx_jax.cli.support import progress
from tfx_jax.models import GPT, GPTConfig, hf
from tfx_jax.models.hf import llama, marian, t5
from tfx_jax.models.hf.encoders import ENCODERS
from tfx_jax.models.hf.folder import Fields

CONFIG = GPTConfig(vocab_size=11, max_length=8, num_layers=2, d_model=4, num_heads=2)
NUM_PARAMETERS = 11 * 4 + 8 * 4 + 2 * (2 * 8 + 4 * (4 * 4 + 4) + 4 * 16 + 16 + 16 * 4 + 4) + 8
TOKENIZER = {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\n", "tokenizer_config.json": '{"pad_token": "a"}'}


def make_model(model_class=GPT, config=CONFIG):
    """A model whose parameters are drawn without a program."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(np.float32)), params)
    return nnx.merge(graphdef, drawn)


@pytest.fixture
def source(tmp_path):
    """A folder in the shape of an old one: three files, bfloat16, names without prefix, and more than is needed."""
    folder = tmp_path / "source"
    hf.save(make_model(), folder, dtype="bfloat16")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), ml_dtypes.bfloat16))
    files = {name: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": 3, "_name_or_path": "x", "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "evil.py"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in TOKENIZER.items():
        (folder / name).write_text(content)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    (folder / "evil.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("a card")
    return folder


def weights_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def leaves(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def refused(capfd, arguments, message):
    capfd.readouterr()
    assert main(["convert", *arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_the_model_is_the_same(source, tmp_path, capfd, dtype):
    output = tmp_path / "some" / "output"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    flags = [] if dtype == "float32" else [f"--dtype={dtype}"]
    assert main(["convert", f"--model={source}", f"--output={output}", "--json", *flags]) == 0
    out, err = capfd.readouterr()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    names = {"config.json", "model.safetensors", "generation_config.json", "README.md", *TOKENIZER}
    assert {path.name for path in output.iterdir()} == names
    for name in (*TOKENIZER, "generation_config.json", "README.md"):
        assert (output / name).read_bytes() == before[name]

    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    assert {tensor.dtype for tensor in weights_of(output).values()} == {np.dtype(kind)}
    old, new = hf.load(source), hf.load(output)
    assert new.config == old.config == CONFIG
    for a, b in zip(leaves(old), leaves(new), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(kind).astype(np.float32), b)
        assert np.abs(a).max() > 0.5

    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == dtype
    assert config["bos_token_id"] == 3
    assert not {"_name_or_path", "torch_dtype", "auto_map"} & config.keys()

    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["architecture"] == "GPT2LMHeadModel"
    assert found["parameters"] == NUM_PARAMETERS
    assert found["dtype"] == dtype
    assert found["bytes_before"] == sum(len(data) for name, data in before.items() if name.endswith(".safetensors"))
    assert found["bytes_after"] == (output / "model.safetensors").stat().st_size
    assert found["output"] == str(output)
    assert set(found["files"]) == names
    assert found["left_out"] == ["h.0.attn.bias"]
    assert err.splitlines()[2].endswith("or parts of another architecture): h.0.attn.bias")
    assert f"GPT2LMHeadModel: {NUM_PARAMETERS:,} parameters; {found['bytes_before']:,} bytes before, " in err
    assert (
        f"{found['bytes_after']:,} as {dtype}\n{output}: config.json, model.safetensors, tokenizer_config.json" in err
    )


SIZES = {
    "gpt2": {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 9},
    "openai-gpt": {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 9},
    "bert": {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12},
    "big_bird": {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12},
    "longformer": {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12}
    | {"pad_token_id": 1},
    "vit": {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12},
    "t5": {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2},
    "marian": {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "encoder_layers": 1, "decoder_layers": 2}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 12, "decoder_start_token_id": 12},
}
MODEL_TYPES = {"GPT2": "gpt2", "OpenAI": "openai-gpt", "Bert": "bert", "ViT": "vit", "Marian": "marian"}
MODEL_TYPES |= {name: encoder.MODEL_TYPE for encoder in ENCODERS for name in encoder.HEADS}
SIZES |= {
    encoder.MODEL_TYPE: {encoder.fields.get(name, name): value for name, value in SIZES["bert"].items()}
    for encoder in ENCODERS
}
MODEL_TYPES |= {name: name.partition("T5")[0].lower() + "t5" for name in t5.ARCHITECTURES}
SIZES |= {kind: SIZES["t5"] for kind in t5.MODEL_TYPES}
MODEL_TYPES |= {architecture: kind for kind, architecture in marian.MODEL_TYPES.items()}
MODEL_TYPES |= {name: MODEL_TYPES[body] for name, body in marian.CLASSIFIERS.items()}
SIZES |= {kind: {**SIZES["marian"], "pad_token_id": 1} for kind in marian.MODEL_TYPES if kind != "marian"}
SIZES["deit"] = SIZES["vit"]
_TOWERS = {"text_config": {**SIZES["vit"], "vocab_size": 13}, "vision_config": {**SIZES["vit"], "image_size": 32}}
SIZES |= {"clip": {**_TOWERS, "projection_dim": 6}, "siglip": _TOWERS}
SIZES |= {
    f"{name}_model": {**SIZES["vit"], "projection_dim": 6, "projection_size": 6}
    for name in ("clip_text", "clip_vision", "siglip_text", "siglip_vision")
}
SIZES["whisper"] = SIZES["marian"] | {"num_mel_bins": 3, "max_source_positions": 5, "max_target_positions": 7}
SIZES["modernbert"] = SIZES["bert"] | {"num_hidden_layers": 4}
MODEL_TYPES |= {
    "DeiT": "deit",
    "ModernBert": "modernbert",
    "BigBird": "big_bird",
    "Longformer": "longformer",
    "Whisper": "whisper",
    "CLIPModel": "clip",
    "CLIPText": "clip_text_model",
    "CLIPVision": "clip_vision_model",
    "SiglipModel": "siglip",
    "SiglipText": "siglip_text_model",
    "SiglipVision": "siglip_vision_model",
}
MODEL_TYPES |= {architecture: kind for kind, architecture in llama.MODEL_TYPES.items()}
MODEL_TYPES |= {name: MODEL_TYPES[body] for name, body in (llama.BODIES | llama.CLASSIFIERS).items()}
SIZES |= {
    kind: {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    | {"intermediate_size": 12}
    | {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    for kind in llama.MODEL_TYPES
}
DEEPSEEK = {"num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}
DEEPSEEK |= {"qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3, "kv_lora_rank": 5, "q_lora_rank": 7}
SIZES |= {kind: SIZES[kind] | DEEPSEEK for kind in ("deepseek_v2", "deepseek_v3")}
SIZES["deepseek_v2"] |= {"topk_method": "group_limited_greedy"}
SIZES["qwen3_next"] |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 3, "head_dim": 8}
SIZES["qwen3_next"] |= {"linear_value_head_dim": 5, "shared_expert_intermediate_size": 6}
SIZES["stablelm"] |= {"hidden_size": 16}  # a quarter of a head's features is a pair


# A body with one of several heads, an encoder with a decoder, and images; GPT-2 is what the other tests convert.
QUICK = {"BertForSequenceClassification", "T5ForConditionalGeneration", "ViTForImageClassification"}


@pytest.mark.compiles(25, "the initializers of a layer with biases, whose shapes all differ")
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in hf.FAMILIES]
)
def test_every_architecture(tmp_path, capfd, architecture):
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    model_type = next(kind for name, kind in MODEL_TYPES.items() if architecture.startswith(name))
    own = {"vocab_size": 13, "id2label": {"0": "no", "1": "perhaps", "2": "yes"}, "image_size": 32, "tied": "knot"}
    values = {"architectures": [architecture], "model_type": model_type, **own, **SIZES[model_type]}
    (source / "config.json").write_text(json.dumps(values))
    family = hf.FAMILIES[architecture]
    config = family.read_config(Fields(values, source / "config.json"))
    model = make_model(family.model, config)
    hf.save(model, source, fields=values)
    assert main(["convert", f"--model={source}", f"--output={output}", "--dtype=bfloat16", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["left_out"] == []
    assert found["architecture"] == architecture.replace("T5WithLMHeadModel", "T5ForConditionalGeneration")
    assert found["parameters"] == sum(tensor.size for tensor in weights_of(output).values())
    shrunk = found["bytes_before"] - found["bytes_after"]
    assert abs(shrunk - 2 * found["parameters"]) < 10 * len(weights_of(output))  # but for the header
    new = hf.load(output)
    assert new.config == hf.load(source).config
    for got, want in zip(leaves(new), leaves(model), strict=True):
        np.testing.assert_array_equal(got, np.asarray(want).astype(ml_dtypes.bfloat16).astype(np.float32))
    config = json.loads((output / "config.json").read_text())
    assert config["tied"] == "knot"
    assert config["id2label"] == own["id2label"]


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
    ],
    ids=["linear", "llama3"],
)
def test_old_spellings_of_rotary_positions_are_replaced(tmp_path, capfd, scaling):
    """Published folders have "rope_theta" and "rope_scaling", where transformers 5 writes "rope_parameters"."""
    source, output = tmp_path / "source", tmp_path / "output"
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 13, "tied": "knot"}
    values |= {**SIZES["llama"], "rope_theta": 500.0, "rope_scaling": scaling}
    family = hf.FAMILIES["LlamaForCausalLM"]
    hf.save(make_model(family.model, family.read_config(Fields(values, "config.json"))), source)
    (source / "config.json").write_text(json.dumps(values))
    assert main(["convert", f"--model={source}", f"--output={output}"]) == 0
    rotary = hf.load(output).config.rotary
    assert rotary == hf.load(source).config.rotary
    assert (rotary.base, rotary.scaling, rotary.factor) == (
        500.0,
        scaling.get("rope_type", "linear"),
        scaling["factor"],
    )
    config = json.loads((output / "config.json").read_text())
    assert config["tied"] == "knot"
    assert not {"rope_theta", "rope_scaling"} & config.keys()


def test_the_name_of_a_tensor_is_printed_and_not_obeyed(source, tmp_path, capfd):
    index = source / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] | {"\x1b[2J\n": "model-9.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    safetensors.numpy.save_file({"\x1b[2J\n": np.zeros(1, np.float32)}, source / "model-9.safetensors")
    refused(capfd, [f"--model={source}", f"--output={tmp_path}/o"], r"a tensor \x1b[2J\n, for which the model has no")


def test_a_large_folder_shows_how_far_it_is(source, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(progress._BETWEEN, False, 0.0)  # as if an array took half a minute
    assert main(["convert", f"--model={source}", f"--output={tmp_path / 'output'}"]) == 0
    lines = [line.partition(", ETA")[0] for line in capfd.readouterr().err.splitlines() if line.startswith("read ")]
    whole = f"read {NUM_PARAMETERS:,} of {NUM_PARAMETERS:,} parameters"
    assert (lines.count(whole), lines[-1]) == (1, f"{whole} again")
    assert len(lines) == 2 * len(leaves(hf.load(source)))


def test_without_json_standard_output_is_empty(source, tmp_path, capfd):
    assert main(["convert", f"--model={source}", f"--output={tmp_path}/output"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[1].endswith("verified by reading it back")


def test_converting_what_was_converted_changes_nothing(source, tmp_path, capfd):
    for before, after in (("source", "one"), ("one", "two")):
        assert main(["convert", f"--model={tmp_path / before}", f"--output={tmp_path / after}"]) == 0
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()


def test_a_folder_without_a_card_gets_one_that_says_what_is_known(source, tmp_path, capfd):
    (source / "README.md").unlink()
    for before, after, flags in (
        ("source", "one", []),
        ("one", "two", []),
        ("two", "three", ["--dtype=bfloat16"]),
    ):
        assert main(["convert", f"--model={tmp_path / before}", f"--output={tmp_path / after}", *flags]) == 0
    one, two, three = ((tmp_path / name / "README.md").read_text() for name in ("one", "two", "three"))
    assert one == two
    assert three == one.replace("parameters, float32.", "parameters, bfloat16.") != one
    card = huggingface_hub.ModelCard(one)
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["jax", "tfx_jax"]}
    assert card.data.to_dict() == expected  # no license, no language, no model of the hub
    assert card.text.strip().startswith(
        f"# one\n\nWeights: `GPT2LMHeadModel`, {NUM_PARAMETERS:,} parameters, float32.\n"
    )
    assert "\n`tfx-jax convert --model=source --output=one`, tfx_jax " in card.text
    assert str(tmp_path) not in one


def test_a_card_that_is_no_text_is_not_copied(source, tmp_path, capfd):
    (source / "README.md").write_bytes(b"\xff")
    assert main(["convert", f"--model={source}", f"--output={tmp_path}/output"]) == 0
    assert "A folder without a model card" in (tmp_path / "output" / "README.md").read_text()


def test_the_folder_it_reads_is_not_written(source, tmp_path, capfd):
    (tmp_path / "link").symlink_to(source)
    for same in (source, tmp_path / "link", source / ".." / "source"):
        for more in ([], ["--overwrite"]):
            refused(capfd, [f"--model={source}", f"--output={same}", *more], "is the folder that --model reads")
    assert not (source / "model.safetensors").exists()


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", "config.json", "vocab.json"]
    + ["README.md"],
)
def test_another_model_is_overwritten_on_demand_only(source, tmp_path, capfd, name):
    output = tmp_path / "output"
    output.mkdir()
    (output / name).write_text("precious")
    arguments = [f"--model={source}", f"--output={output}"]
    refused(capfd, arguments, f"already contains {name}: name another folder, or add --overwrite")
    assert [path.name for path in output.iterdir()] == [name]
    assert (output / name).read_text() == "precious"
    (output / "tokenizer.json").write_text("of another model")
    (output / "model.safetensors.index.json").write_text("of another model")
    (output / "notes.txt").write_text("mine")
    assert main(["convert", *arguments, "--overwrite"]) == 0
    left = {path.name for path in output.iterdir()}
    assert {"notes.txt", "model.safetensors", "config.json", *TOKENIZER} <= left
    assert not {"tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"} & left
    assert hf.load(output).config == CONFIG


def test_values_beyond_float16_are_refused(tmp_path, capfd):
    source, output = tmp_path / "source", tmp_path / "output"
    model = make_model()
    model.norm.scale[...] = jnp.array([1.0, 70_000.0, jnp.inf, 0.0])
    hf.save(model, source, allow_nonfinite=True)
    arguments = [f"--model={source}", f"--output={output}", "--allow-nonfinite"]
    refused(
        capfd, [*arguments, "--dtype=float16"], "ln_f.weight has values that are too large for float16: use bfloat16"
    )
    assert not output.exists()
    assert main(["convert", *arguments, "--dtype=bfloat16"]) == 0
    found = weights_of(output)["transformer.ln_f.weight"].astype(np.float32)
    assert found.tolist() == [1.0, 70_144.0, np.inf, 0.0]


def test_a_training_that_went_wrong_can_be_converted(tmp_path, capfd):
    """On demand: not a number is the same as not a number."""
    model = make_model()
    model.norm.bias[...] = jnp.full(4, jnp.nan)
    hf.save(model, tmp_path / "source", allow_nonfinite=True)
    for dtype in ("float32", "float16", "bfloat16"):
        arguments = [f"--model={tmp_path}/source", f"--output={tmp_path}/{dtype}", f"--dtype={dtype}"]
        refused(capfd, arguments, "source: transformer.ln_f.bias has values that are NaN or infinite: take another")
        assert not (tmp_path / dtype).exists()
        assert main(["convert", *arguments, "--allow-nonfinite"]) == 0
        assert jnp.isnan(hf.load(tmp_path / dtype, allow_nonfinite=True).norm.bias[...]).all()


def test_what_does_not_read_back_is_an_error(source, tmp_path, capfd, monkeypatch):
    save = hf.save

    def flip(model, path, **options):
        save(model, path, **options)
        data = bytearray((path / "model.safetensors").read_bytes())
        data[-2] ^= 1
        (path / "model.safetensors").write_bytes(data)

    monkeypatch.setattr(hf, "save", flip)
    refused(capfd, [f"--model={source}", f"--output={tmp_path}/output"], "differs from the model when read back")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output=out"], "give exactly one of --model=FOLDER and --workdir=FOLDER"),
        (["--model=./nowhere", "--output=out"], "nowhere/config.json does not exist"),
        (
            ["--model=nowhere", "--output=out"],
            "there is no folder nowhere here, and the hub's model of that name cannot",
        ),
        (["--model=nowhere", "--output=out", "--dtype=int8"], "argument --dtype: invalid choice: 'int8'"),
        (
            ["--model=gs://bucket/gpt2", "--output=out"],
            "gs://bucket/gpt2 is in a store, but convert needs local folders",
        ),
        (
            ["--model=nowhere", "--output=gs://bucket/gpt2"],
            "gs://bucket/gpt2 is in a store, but convert needs local folders",
        ),
        (["--model=nowhere", "--output=out", "--over"], "unrecognized arguments: --over"),
    ],
)
def test_mistakes_cost_one_line(capfd, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused(capfd, arguments, message)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be(source, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    refused(capfd, [f"--model={source}", f"--output={tmp_path}/file"], "file is a file: name a folder")
    refused(capfd, [f"--model={source}", f"--output={tmp_path}/file/below"], "cannot write to")


@pytest.mark.compiles(40, "a text is generated and logits are computed outside of one program")
@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_transformers_reads_what_was_converted(source, tmp_path, capfd, dtype):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    assert main(["convert", f"--model={source}", f"--output={tmp_path}/output", f"--dtype={dtype}"]) == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "output", output_loading_info=True)
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert not any(info.values())
    assert theirs.dtype == getattr(torch, dtype)
    tokens = np.arange(8)[np.newaxis]
    with torch.no_grad():
        logits = theirs.float()(torch.tensor(tokens)).logits.numpy()
    ours = hf.load(tmp_path / "output")(jnp.asarray(tokens))
    np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-4 * np.abs(logits).max())
