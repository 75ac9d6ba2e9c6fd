"""Loading in other forms than float32 on one device: bfloat16 as it is stored, and shards of a mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.models.hf.folders import assert_same
from tests.nn.programs import jitted
from tfx_jax.errors import UserError
from tfx_jax.models import GPT, GPTConfig, Llama, LlamaConfig, hf
from tfx_jax.models.hf import names
from tfx_jax.training.sharding import make_mesh, state_shardings

SIZES = {"vocab_size": 24, "max_length": 8, "num_layers": 2, "d_model": 16, "num_heads": 4}
TOKENS = np.arange(16).reshape(2, 8)


def make_gpt():
    return GPT(GPTConfig(**SIZES), rngs=nnx.Rngs(0))


def make_llama():
    return Llama(LlamaConfig(**SIZES, num_kv_heads=2, d_ff=24, qk_norm="head"), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [make_llama, pytest.param(make_gpt, marks=pytest.mark.slow)])
def test_parameters_stay_bfloat16_with_equal_outputs(make, tmp_path, draw_model):
    hf.save(draw_model(make), tmp_path, dtype=jnp.bfloat16)
    wide, kept = (hf.load(tmp_path, dtype=jnp.bfloat16, keep_bfloat16=keep) for keep in (False, True))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(wide, nnx.Param))} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(kept, nnx.Param))} == {"bfloat16"}
    forward = jitted(lambda model: model(TOKENS))
    np.testing.assert_array_equal(forward(kept), forward(wide))


def test_float32_is_not_rounded(tmp_path, draw_model):
    model = draw_model(make_gpt)
    hf.save(model, tmp_path)
    assert_same(hf.load(tmp_path, dtype=jnp.bfloat16, keep_bfloat16=True), model)


def test_a_mesh_gets_its_shards_without_the_whole(tmp_path, draw_model, monkeypatch):
    """Shardings and values are as expected, and no buffer is larger than the largest shard."""
    hf.save(draw_model(make_llama), tmp_path)
    whole, sizes = hf.load(tmp_path), []
    empty = names._empty
    monkeypatch.setattr(names, "_empty", lambda shape, dtype: sizes.append(np.prod(shape)) or empty(shape, dtype))
    mesh = make_mesh(fsdp=2, tensor=2, data=jax.device_count() // 4)
    sharded = hf.load(tmp_path, shardings=lambda params: state_shardings(params, mesh))
    assert_same(sharded, whole)
    params = nnx.to_pure_dict(nnx.state(sharded, nnx.Param))
    expected = state_shardings(params, mesh)
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    shards = {shard.data.size for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards}
    assert max(sizes) == max(shards) < max(leaf.size for leaf in jax.tree.leaves(params))


def test_stacks_are_cut_anywhere(tmp_path, draw_model):
    """Also along layers, where each entry is a tensor."""
    hf.save(draw_model(make_gpt), tmp_path)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def shard(params):
        return jax.tree.map(
            lambda leaf: NamedSharding(mesh, PartitionSpec("x" if leaf.shape[0] % 2 == 0 else None)), params
        )

    assert_same(hf.load(tmp_path, shardings=shard), hf.load(tmp_path))


def rewrite(folder, change):
    """Rewrites the header of the weights."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8:end]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def test_tensors_may_begin_anywhere(tmp_path, draw_model):
    model = draw_model(make_gpt)
    hf.save(model, tmp_path)
    lengths = set()
    for padding in range(4):
        rewrite(tmp_path, lambda header, padding=padding: header | {"__metadata__": {"format": "p" * (2 + padding)}})
        lengths.add(int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") % 4)
        assert_same(hf.load(tmp_path), model)
    assert len(lengths) == 4


def test_a_dtype_that_is_not_read_is_named(tmp_path, draw_model):
    """The place of another tensor's values makes the header valid: eight bits instead of 32, and four times as many."""
    hf.save(draw_model(make_gpt), tmp_path)
    name = "transformer.ln_f.bias"

    def change(header):
        start, _ = header[name]["data_offsets"]
        values = {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [start, start + 16]}
        rest = {"dtype": "U8", "shape": [48], "data_offsets": [start + 16, start + 64]}
        return header | {name: values, "transformer.h.0.attn.bias": rest}  # the second is one that is ignored

    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=r"has the dtype F8_E4M3"):
        hf.load(tmp_path)


@pytest.mark.parametrize("others", [(), ("transformer.wpe.weight",)])
def test_a_nonfinite_shard_of_another_process_is_refused_by_all(tmp_path, draw_model, monkeypatch, others):
    """Otherwise the others wait forever for the process that stopped; here another process is made up."""
    hf.save(draw_model(make_gpt), tmp_path)
    stored = sorted(safetensors.numpy.load_file(tmp_path / "model.safetensors"))

    def gathered(flags):
        monkeypatch.undo()
        assert len(flags) == len(stored)
        return np.stack([flags, np.array([name in others for name in stored])])

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    shard = lambda params: jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)  # noqa: E731
    monkeypatch.setattr(hf.multihost_utils, "process_allgather", gathered)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    if not others:
        assert hf.load(tmp_path, shardings=shard)
        return
    with pytest.raises(UserError, match="wpe"):
        hf.load(tmp_path, shardings=shard)


@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        ({"suppress_tokens": [3], "begin_suppress_tokens": [4]}, ["suppress_tokens", "begin_suppress_tokens"]),
        ({"bad_words_ids": [[3], [4, 5]]}, ["bad_words_ids"]),
        ({"bad_words_ids": [[9]], "pad_token_id": 9, "suppress_tokens": None}, []),
    ],
)
def test_forbidden_tokens_are_told_of_where_they_are_not_used(tmp_path, caplog, fields, unused):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], **fields}))
    assert hf.output_ids(tmp_path) == ((1, 2), ())
    file = tmp_path / "generation_config.json"
    told = [f"{file}: {name} is not used, so these tokens may be generated" for name in unused]
    assert [record.getMessage() for record in caplog.records] == told
