"""Folders that are damaged, hostile or hold something else: each is refused with one line, and nothing is executed."""

import dataclasses
import functools
import json
import os
import pathlib
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
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
)
from tests.nn.programs import draw, jitted
from tfx_jax.errors import UserError
from tfx_jax.models import GPT, BertClassifier, BertConfig, GPTConfig, Llama, LlamaConfig, hf

CONFIG = GPTConfig(vocab_size=11, max_length=8, num_layers=2, d_model=4, num_heads=2)
TOKENS = np.arange(8)[None]


@functools.cache
def make_model(config=CONFIG):
    return draw(lambda: GPT(config, rngs=nnx.Rngs(0)), stddev=1.0, mean=lambda name: 0.0)


@functools.cache
def make_llama():
    config = LlamaConfig(vocab_size=11, max_length=8, num_layers=1, d_model=8, num_heads=2, d_ff=8)
    return draw(lambda: Llama(config, rngs=nnx.Rngs(0)))


_forward = jitted(lambda model: model(TOKENS))


@pytest.fixture
def folder(tmp_path):
    hf.save(make_model(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "config",
    [CONFIG, GPTConfig(vocab_size=11, max_length=8, num_layers=1, d_model=4, num_heads=1, d_ff=8, pre_norm=True)],
)
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, config):
    assert_comes_back(make_model(config), tmp_path)


def test_others_may_read_what_is_saved(tmp_path):
    """As the umask says, like any other file."""
    (tmp_path / "any").touch()
    hf.save(make_model(CONFIG), tmp_path)
    modes = {(tmp_path / name).stat().st_mode for name in ("any", "config.json", "model.safetensors")}
    assert len(modes) == 1


def test_gpt_is_told_from_gpt_2(tmp_path):
    model = make_model(GPTConfig(vocab_size=11, max_length=8, num_layers=2, d_model=4, num_heads=2, pre_norm=False))
    hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    assert not again.config.pre_norm
    assert_same(again, model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 10**7}, r"config.json asks for 10,000,000 layers, but there are 28 tensors"),
        ({"n_layer": 10**30}, r"configuration.num_layers must be at most 2147483647, got 10+$"),
        ({"n_layer": -1}, r"config.json: the model's configuration.num_layers must be at least 1, got -1"),
        ({"n_head": 0}, r"config.json: the model's configuration.num_heads must be at least 1, got 0"),
        ({"attn_pdrop": 7.0}, r"configuration.attention_dropout_rate must be in \[0, 1\), got 7.0"),
        ({"layer_norm_epsilon": float("nan")}, r"config.json: layer_norm_epsilon is nan, not a number"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_made(folder, fields, message):
    change_config(folder, **fields)
    assert_refused(folder, message)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            '"longrope" needs short_factor, long_factor and original_max_position',
        ),
        (LONGROPE | {"original_max_position_embeddings": 0}, "embeddings above 0: fetch config.json again$"),
        (LONGROPE | {"long_factor": ["a", "b"]}, '"longrope" needs short_factor, long_factor and original'),
        (
            {"rope_type": "dynamic", "factor": "2"},
            "rope_parameters: factor is '2', not a number: fetch config.json again",
        ),
        ({"rope_type": "linear", "rope_theta": [1]}, r"rope_parameters: rope_theta is \[1\], not a number"),
        ({"rope_type": ["linear"]}, r"rope_type is \['linear'\], but only"),
        ({"full_attention": None}, "rope_parameters: None is not an object"),
        ({"full_attention": {}, "sliding_attention": [1]}, r"rope_parameters: \[1\] is not an object"),
    ],
)
def test_damaged_rotary_positions_are_refused(tmp_path, parameters, message):
    hf.save(make_llama(), tmp_path)
    change_config(tmp_path, rope_parameters=parameters)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("count", [-1, 10**9])
def test_labels_that_nobody_has_are_not_made(tmp_path, count):
    config = BertConfig(11, 2, 8, num_layers=1, d_model=4, num_heads=2, labels=("a", "b"))
    hf.save(draw(lambda: BertClassifier(config, rngs=nnx.Rngs(0))), tmp_path)
    change_config(tmp_path, id2label=LEFT_OUT, label2id=LEFT_OUT, num_labels=count)
    assert_refused(tmp_path, rf"num_labels is {count:,}, not in 0 to 1,000,000")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_or_a_device_is_not_read(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert_refused(folder, f"{name} is a pipe, a device or a socket, not a file")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert_refused(folder, f"{name} is a pipe, a device or a socket, not a file")


def test_a_description_is_small_and_not_deep(folder):
    with (folder / "config.json").open("wb") as file:
        file.truncate(300 << 20)  # of no blocks on the disk
    assert_refused(folder, r"config.json has 314,572,800 bytes; such a file may have at most 268,435,456")
    (folder / "config.json").write_text("[" * 200_000)
    assert_refused(folder, r"config.json cannot be read")


@pytest.mark.parametrize("pre_norm", [True, False])
def test_offsets_that_a_gpt_lacks_are_saved_as_zeros(tmp_path, pre_norm):
    config = dataclasses.replace(CONFIG, pre_norm=pre_norm, use_bias=False)
    model = make_model(config)
    hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    assert again.config == dataclasses.replace(config, use_bias=True)
    before, after = (dict(nnx.to_flat_state(nnx.state(each))) for each in (model, again))
    assert before.keys() < after.keys()
    for path, param in after.items():
        np.testing.assert_array_equal(param, before[path] if path in before else np.zeros(param.shape))


def test_offsets_of_zero_change_nothing(tmp_path):
    model = make_model(dataclasses.replace(CONFIG, use_bias=False))
    hf.save(model, tmp_path)
    np.testing.assert_array_equal(_forward(hf.load(tmp_path)), _forward(model))


def test_loads_several_files_by_their_index(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    files = {name: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_same(hf.load(folder), make_model())
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert_refused(folder, r"names model-00002-of-00003.safetensors, which does not exist")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_become_float32(folder, dtype):
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    change_tensors(folder, lambda tensors: tensors.update({name: t.astype(kind) for name, t in tensors.items()}))
    for leaf, want in zip(jax.tree.leaves(hf.load(folder)), jax.tree.leaves(make_model()), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, np.asarray(want).astype(kind).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", jnp.float32])
def test_stores_in_the_dtype_asked_for(tmp_path, dtype):
    hf.save(make_model(), tmp_path, dtype=dtype)
    kind = jnp.dtype(dtype)
    assert {tensor.dtype for tensor in safetensors.numpy.load_file(tmp_path / "model.safetensors").values()} == {kind}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == kind.name
    for leaf, want in zip(jax.tree.leaves(hf.load(tmp_path)), jax.tree.leaves(make_model()), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, np.asarray(want).astype(kind).astype(np.float32))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float64", "complex64", "bf16", None])
def test_other_dtypes_are_not_stored(tmp_path, dtype):
    shown = repr(dtype) if dtype == "bf16" else dtype
    with pytest.raises(UserError, match=f"^dtype must be float32, float16 or bfloat16, got {shown}$"):
        hf.save(make_model(), tmp_path / "new", dtype=dtype)
    assert not (tmp_path / "new").exists()


def test_more_fields_do_not_change_the_model(tmp_path):
    hf.save(make_model(), tmp_path, fields={"bos_token_id": 3, "n_layer": 7, "dtype": "float64"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bos_token_id"], config["n_layer"], config["dtype"]) == (3, 2, "float32")
    assert_same(hf.load(tmp_path), make_model())


def test_values_that_a_dtype_lacks(folder, tmp_path):
    model = hf.load(folder)
    model.norm.bias[...] = jax.device_put(np.array([0.0, 65_504.0, -np.inf, np.nan], np.float32))
    hf.save(model, tmp_path, dtype="float16", allow_nonfinite=True)
    np.testing.assert_array_equal(hf.load(tmp_path, allow_nonfinite=True).norm.bias[...], model.norm.bias[...])
    model.norm.bias[...] = jax.device_put(np.array([0.0, 65_520.0, 0.0, 0.0], np.float32))
    with pytest.raises(UserError, match=r"ln_f\.bias has values that are too large for float16: use bfloat16 or"):
        hf.save(model, tmp_path / "new", dtype="float16")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", np.nan), ("bfloat16", -np.inf)]
    + [
        pytest.param(dtype, value, marks=pytest.mark.slow)
        for dtype, value in (("float32", np.inf), ("float32", -np.inf), ("bfloat16", np.nan), ("bfloat16", np.inf))
    ],
)
def test_values_that_are_no_numbers_are_refused_by_the_name_of_their_tensor(folder, tmp_path, value, dtype):
    place = tmp_path / "place"
    for name, tensor in safetensors.numpy.load_file(folder / "model.safetensors").items():
        hf.save(make_model(), place, dtype=dtype)
        last = (-1,) * tensor.ndim
        change_tensors(place, lambda tensors, name=name, last=last: tensors[name].__setitem__(last, value))
        assert_refused(
            place,
            rf"place: {name} has values that are NaN or infinite: take another copy of the model, or load it anyway",
        )
    loaded = hf.load(place, allow_nonfinite=True)
    with pytest.raises(UserError, match=rf"not written to .*other: {name} has values that are NaN or infinite"):
        hf.save(loaded, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_tensors_that_are_no_numbers_are_counted(folder):
    """One that holds three of our parameters is one."""

    def spoil(tensors):
        for name in ("ln_f.weight", "h.1.attn.c_attn.weight", "wte.weight"):
            tensors[f"transformer.{name}"][:] = np.nan

    change_tensors(folder, spoil)
    assert_refused(folder, r"transformer\.\S+ has values that are NaN or infinite, and 2 more have: take")


def test_what_a_model_does_not_read_may_be_anything(folder):
    """Masks are constants of older folders, with -inf in some."""
    change_tensors(folder, lambda tensors: tensors.update({"transformer.h.0.attn.bias": np.full((1, 1), -np.inf)}))
    assert_same(hf.load(folder), make_model())


def test_computes_in_the_dtype_asked_for(folder):
    model = hf.load(folder, dtype="bfloat16")
    assert model.config.dtype == "bfloat16"
    assert model.decoder_layers.feed_forward.up.dtype == jnp.float32
    assert 0 < np.abs(_forward(model) - _forward(make_model())).max() < 0.5


def test_names_without_prefix_and_copies_of_tied_weights_are_fine(folder):
    """As the first GPT-2 was published: a bare body, with its constant masks."""

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["wte.weight"]
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.float32))
            tensors[f"h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)

    change_tensors(folder, change)
    assert_same(hf.load(folder), make_model())


def test_missing_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.pop("transformer.h.1.ln_2.bias"))
    assert_refused(folder, r"model: the tensor transformer\.h\.1\.ln_2\.bias is missing$")


def test_tensor_of_another_shape(folder):
    change_tensors(folder, lambda tensors: tensors.update({"transformer.wpe.weight": np.zeros((9, 4), np.float32)}))
    assert_refused(folder, r"transformer\.wpe\.weight has shape \[9, 4\], but \[8, 4\] is needed$")


def test_tensor_that_has_no_place(folder):
    change_tensors(folder, lambda tensors: tensors.update({"transformer.h.2.ln_1.bias": np.zeros(4, np.float32)}))
    assert_refused(folder, r"there is a tensor transformer\.h\.2\.ln_1\.bias, for which the model has no place$")


@pytest.mark.parametrize("size", [0, 4, 100, 2_000])
def test_cut_short(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(folder, r"model\.safetensors is damaged or cut short \(.*\): fetch it again$")


def test_file_that_may_not_be_read(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tfx_jax.models.hf.folder.safetensors.safe_open", refuse)  # a superuser may read any
    assert_refused(folder, r"model\.safetensors may not be read: change its permissions$")


@pytest.mark.parametrize("place", [0, 8, 20])
def test_damaged_header(folder, place):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    assert_refused(folder, r"model\.safetensors is damaged or cut short")


@pytest.mark.parametrize(("dtype", "fewer"), [("F8_E4M3", 4), ("I8", 4), ("I32", 1), ("BOOL", 4)])
def test_weights_that_are_no_floats_are_named(folder, dtype, fewer):
    path = folder / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8 : 8 + size]), path.read_bytes()[8 + size :]
    changed = b""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        if name == "transformer.wpe.weight":
            entry["dtype"], stop = dtype, start + (stop - start) // fewer
        entry["data_offsets"] = [len(changed), len(changed) + stop - start]
        changed += data[start:stop]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + changed)
    assert_refused(
        folder, rf"wpe\.weight has the dtype {dtype}, which is not read: take a folder whose weights are not"
    )


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 3, ""])
def test_index_that_points_elsewhere(folder, file):
    (folder / "model.safetensors").replace(folder.parent / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": file}}))
    assert_refused(folder, r"index\.json names .*, which is not a \.safetensors file beside it$")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_a_map(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert_refused(folder, "it has no weight_map: fetch the folder again$")


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_pickles_are_not_opened(folder):
    (folder / "model.safetensors").unlink()
    proof = folder / "executed"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(proof)))
    assert_refused(folder, r"has its weights as pytorch_model\.bin only, a pickle, which could run any code")
    assert not proof.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())  # it would have worked
    assert proof.exists()


def test_code_of_the_folder_is_not_run(folder):
    """Hugging Face's way to bring a class of one's own along."""
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert_same(hf.load(folder), make_model())
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            r"the architecture \['FalconForCausalLM'\] is not supported; there are",
        ),
        ({"architectures": None, "model_type": "mamba"}, r"the architecture \['mamba'\] is not supported"),
        ({"architectures": 3}, "the architecture 3 is not supported"),
        ({"architectures": [["BertModel"]]}, r"the architecture \[\['BertModel'\]\] is not supported"),
        (
            {"activation_function": "hard_swish"},
            "activation_function is 'hard_swish', but only gelu_new, .* are supported",
        ),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True, but only False is supported",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights is False, but only True is supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"embd_pdrop": 0.5}, "embd_pdrop is 0.5, but only 0.1 is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is "),
        ({"n_layer": "two"}, "n_layer is 'two', not of type int"),
        ({"n_layer": True}, "n_layer is True, not of type int"),
        ({"n_head": 3}, "d_model=4 is not divisible by num_heads=3"),
        ({"n_head": 0}, "config.json: "),
        ({"num_attention_heads": 4}, "num_attention_heads is 4, but only 2 is supported"),
        ({"n_layer": 0}, "num_layers must be at least 1, got 0"),
        ({"n_embd": -4}, "config.json: "),
        ({"n_layer": 3}, r"the tensor transformer\.h\.2\..* is missing"),
        ({"n_inner": 17}, r"has shape \[4, 16\], but \[4, 17\] is needed"),
    ],
)
def test_configurations_that_we_do_not_have(folder, fields, match):
    change_config(folder, **fields)
    assert_refused(folder, match)


def test_a_model_type_is_enough(folder):
    change_config(folder, architectures=None)
    assert_same(hf.load(folder), make_model())


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_config_that_is_no_object(folder, content):
    (folder / "config.json").write_text(content)
    assert_refused(folder, r"config\.json (cannot be read|holds a list)")


def test_what_is_not_there(tmp_path):
    assert_refused(tmp_path / "nothing", r"nothing/config\.json does not exist")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert_refused(tmp_path, r"has no model\.safetensors and no model\.safetensors\.index\.json$")


def test_saving_keeps_what_is_beside_and_says_what_it_cannot_do(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    hf.save(make_model(), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ValueError, match="needs d_k = d_model / num_heads"):
        hf.save(make_model(GPTConfig(11, 8, 1, 4, 2, d_k=3)), tmp_path)
    with pytest.raises(ValueError, match="str has no form in Hugging Face's folders"):
        hf.save("model", tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        hf.save(make_model(), file)
    assert_same(hf.load(tmp_path), make_model())
