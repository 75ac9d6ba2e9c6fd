"""In which precision devices sum gradients."""

import re

import pytest

from tests.training.configs import default_config
from tfx_jax.bench import plan
from tfx_jax.models import GPTConfig
from tfx_jax.tasks.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text_data import TextData
from tfx_jax.training.config import tiny_variant


@pytest.mark.aot
def test_a_tpu_sums_gradients_in_float32_where_it_computes_in_bfloat16(tpu_devices, monkeypatch):
    """Those of a GPT, which has every kind of parameter: matrices, offsets, gains, tables."""
    config = tiny_variant(default_config((GPTConfig, LanguageModelConfig, TextData)))
    config.model.num_layers, config.model.dtype = 2, "bfloat16"
    programs = []
    monkeypatch.setattr(plan, "read_program", lambda text: programs.append(text) or plan.Program([], []))
    assert plan.plan_training(config, tpu_devices("v5e:2x4")).fits
    sums = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(", programs[0])
    assert sums
    assert {dtype for result in sums for dtype in re.findall(r"(\w+)\[", result)} <= {"f32", "s32", "u32"}
    assert "bf16" in programs[0]
