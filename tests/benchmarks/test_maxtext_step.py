"""The benchmark beside MaxText: both sides have the same sizes, and ours is compiled and read, with a small model."""

import dataclasses
import importlib.util
import re

import jax
import pytest
from flax import nnx

from benchmarks import maxtext_step
from tfx_jax.models import Llama
from tfx_jax.planning.measure import without_compilation_cache


def test_the_arguments_of_maxtext_describe_a_model_of_our_size():
    values = dict(argument.split("=", 1) for argument in maxtext_step.maxtext_arguments(16))
    vocabulary, layers, width, heads, key_heads, head, hidden = (
        int(values[name])
        for name in (
            "vocab_size",
            "base_num_decoder_layers",
            "base_emb_dim",
            "base_num_query_heads",
            "base_num_kv_heads",
            "head_dim",
            "base_mlp_dim",
        )
    )
    of_layer = 2 * width * (heads + key_heads) * head + 3 * width * hidden + 2 * width
    model = nnx.eval_shape(lambda: Llama(maxtext_step.MODEL, rngs=nnx.Rngs(0)))
    ours = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert 2 * vocabulary * width + layers * of_layer + width == ours == 134_105_856
    tokens = 16 * int(values["per_device_batch_size"]) * int(values["max_target_length"])
    assert maxtext_step.config_of(16).task.data.tokens_per_batch == tokens


@pytest.mark.skipif(importlib.util.find_spec("maxtext") is not None, reason="MaxText is here")
def test_a_missing_maxtext_is_one_line(capsys):
    assert maxtext_step.main([]) == 1
    assert capsys.readouterr() == ("", "MaxText is not installed: pip install maxtext, or --only=tfx_jax\n")


@pytest.mark.aot
@pytest.mark.slow
def test_a_step_of_a_small_model_is_compiled_and_read(monkeypatch, tpu_devices):
    tpu_devices(maxtext_step.TOPOLOGY)  # skips where there is no compiler
    small = dataclasses.replace(maxtext_step.MODEL, vocab_size=256, d_model=128, num_heads=2, num_kv_heads=2, d_ff=128)
    monkeypatch.setattr(maxtext_step, "MODEL", small)
    with jax.default_matmul_precision("default"), without_compilation_cache():
        found = {form: maxtext_step.compiled(f"tfx_jax, loop, {form}") for form in ("all recomputed", "products kept")}
    assert found["all recomputed"].plan.temporary_bytes < found["products kept"].plan.temporary_bytes
    for compiled in found.values():
        assert compiled.plan.num_devices == 16
        assert re.fullmatch(r"\| step \| \d+\.\d \| \d+% \| \d\.\d\d \| \d+ \|", maxtext_step.row("step", compiled))
