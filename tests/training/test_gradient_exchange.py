"""How TPUs that are not there would exchange gradients."""

import re

import pytest

from tests.training.configs import default_config
from tfx_jax.models import GPTConfig
from tfx_jax.planning import plan
from tfx_jax.planning.programs import collectives
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.training.config import tiny_variant


def compiled_step(devices, monkeypatch, **sizes):
    """The program of a GPT of two layers, which has every kind of parameter: matrices, offsets, gains, tables."""
    config = tiny_variant(default_config((GPTConfig, LanguageModelConfig, TextData)))
    for name, size in ({"num_layers": 2, "dtype": "bfloat16"} | sizes).items():
        setattr(config.model, name, size)
    programs = []
    monkeypatch.setattr(plan, "read_program", lambda text: programs.append(text) or plan.Program([], [], []))
    assert plan.plan_training(config, devices).fits
    return programs[0]


@pytest.mark.aot
def test_gradients_are_summed_in_float32_where_the_model_computes_in_bfloat16(tpu_devices, monkeypatch):
    program = compiled_step(tpu_devices("v5e:2x4"), monkeypatch)
    sums = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(", program)
    assert sums
    assert {dtype for result in sums for dtype in re.findall(r"(\w+)\[", result)} <= {"f32", "s32", "u32"}
    assert "bf16" in program


@pytest.mark.aot
def test_gradients_of_unrolled_layers_are_exchanged_while_others_are_computed(tpu_devices, monkeypatch):
    """All but the last two, one of each layer: exchanges take turns, and no other computation is left for these.

    So it is with both libtpu 0.0.42.1 and 0.0.52. Each of the two layers has four matrices of 512 x 512 and two of
    512 x 2,048; the table's gradient is exchanged for inputs and for outputs.
    """
    program = compiled_step(tpu_devices("v5e:2x4"), monkeypatch, unroll=True, d_model=512, d_ff=2048)
    matrices = [exchange for exchange in collectives(program) if exchange.num_bytes >= 4 * 512 * 512]
    assert sorted(x.num_bytes for x in matrices) == 8 * [4 * 512**2] + 2 * [4 * 512 * 1000] + 4 * [4 * 512 * 2048]
    assert [x.num_bytes for x in matrices if not x.is_async] == 2 * [4 * 512 * 2048]
