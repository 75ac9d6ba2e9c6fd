"""A training on paper: what is read from the program, what is predicted, what would fit."""

import dataclasses
import math
import re

import jax
import pytest

from tests.training.configs import default_config
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.models import GPTConfig, TransformerConfig
from tfx_jax.planning.chips import CHIPS
from tfx_jax.planning.plan import (
    Plan,
    _record_failure,
    _set_times,
    alternatives,
    plan_step,
    plan_training,
    variants,
)
from tfx_jax.planning.programs import Collective, Kernel, Operation, Program
from tfx_jax.planning.topologies import TOPOLOGIES
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.translation import PairData, TranslationConfig
from tfx_jax.training.config import MeshConfig, tiny_variant
from tfx_jax.training.reporting.meter import peak_flops


def tiny(classes=(TransformerConfig, TranslationConfig, PairData), **mesh):
    config = tiny_variant(default_config(classes))
    config.mesh = MeshConfig(**mesh)
    return config


def test_simulated_devices_have_a_program_and_no_prediction():
    plan = plan_training(tiny(), jax.devices())
    assert plan.compiles
    assert plan.fits
    assert plan.mesh == {"data": 8}
    assert plan.collectives.keys() == {"all-reduce"}
    # Every gradient leaves a device once on its way around the ring and once on its way back.
    assert plan.collectives["all-reduce"]["bytes"] >= 2 * 7 / 8 * 4 * plan.num_params
    assert plan.peak_bytes > plan.argument_bytes > 3 * 4 * plan.num_params
    assert (plan.predicted_step_seconds, plan.predicted_mfu, plan.bound) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "array", "num_axes", "unit"),
    [("vit_digits:test", "image", 1, "image"), ("captioning_shapes:test", "caption", 2, "token")],
)
def test_rates_count_images_or_positions_of_sequences_not_rows_of_pixels(name, array, num_axes, unit):
    plan = plan_step(load_config_file(name, []), jax.devices()[:1]).plan
    assert len(plan.batch["image"]) == 4
    assert (plan.tokens, plan.unit) == (math.prod(plan.batch[array][:num_axes]), unit)


def test_the_vocabulary_has_to_be_said():
    config = tiny()
    config.model.vocab_size = 0
    with pytest.raises(UserError, match=r"config\.model\.vocab_size=0 is derived from the data"):
        plan_training(config, jax.devices())


def test_rows_that_devices_cannot_share_are_one_line():
    config = tiny()
    config.task.data.tokens_per_batch = config.task.data.max_length
    with pytest.raises(UserError, match="cannot hold 8 rows"):
        plan_training(config, jax.devices())


def known(**fields):
    """A plan for two devices of a v5e whose program is known."""
    given = {"fits": True, "model_flops": 197_000_000_000, "tokens": 1000, "memory_bytes": 2**34}
    return Plan({"data": 2}, 2, "TPU v5 lite", 1, {"x": (1, 1)}, (1, 1), **given | fields)


def test_exchanges_add_to_what_is_computed_unless_they_are_hidden():
    seconds = {"memory": 1e-4, "network": 4e-3, "compute": 5e-4, "cycles": 2e-3}
    assert known(seconds=seconds).predicted_step_seconds == pytest.approx(6e-3)
    assert known(seconds=seconds, async_share=0.75).predicted_step_seconds == pytest.approx(4e-3)  # its network
    assert known(seconds=seconds | {"network": 1e-3}, async_share=1.0).predicted_step_seconds == pytest.approx(2e-3)
    assert known(seconds=seconds).predicted_mfu == pytest.approx(197e9 / (2 * 197e12 * 6e-3))
    assert known(seconds=seconds).bound == "network"


def test_without_estimates_no_step_is_faster_than_what_it_waits_for():
    seconds = {"memory": 1e-4, "network": 4e-4, "compute": 5e-4}
    assert known(seconds=seconds).predicted_step_seconds == pytest.approx(5e-4)
    assert known(seconds=seconds).predicted_mfu == pytest.approx(1.0)
    assert known(seconds=seconds, fits=False).predicted_step_seconds is None


def test_kernels_add_to_what_the_compiler_expects():
    program = Program(
        [], [Operation("mul", 1_500_000)], [Kernel("splash", 197 * 10**9, 1), Kernel("copy", 0, 819 * 10**6)]
    )
    plan = known()
    _set_times(plan, program, CHIPS["TPU v5 lite"], 0, 1)
    assert plan.seconds["cycles"] == pytest.approx(1e-3)
    assert plan.seconds["kernels"] == pytest.approx(2 * (1e-3 + 1e-3))  # at half of the peak, and of the bandwidth
    assert plan.predicted_step_seconds == pytest.approx(5e-3)
    assert [source for source, _ in plan.operations] == ["splash", "copy", "mul"]
    assert not plan.is_bound


def test_gpus_of_a_node_are_near():
    exchanges = [Collective("all-to-all", devices, 10**9, 1, False, "") for devices in ((0, 3), (3, 4))]
    plan = dataclasses.replace(known(), device_kind="NVIDIA H100 80GB HBM3", num_devices=8, hosts=(2, 2))
    _set_times(plan, Program(exchanges, [], []), CHIPS[plan.device_kind], 3350, 1)
    assert plan.seconds == pytest.approx(
        {"memory": 2e-9, "network": 0.5 / 450 + 0.5 / 50, "compute": 197 / 8 / 989.4e3}
    )
    assert plan.is_bound


@pytest.mark.parametrize(("share", "expected"), [(None, 0.75), ("0.9", 0.9)])
def test_jax_takes_a_part_of_the_memory_of_a_gpu(monkeypatch, share, expected):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if share is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    gpu, tpu = CHIPS["NVIDIA H200"], CHIPS["TPU v4"]
    assert gpu.program_memory == round(expected * gpu.memory)
    assert tpu.program_memory == tpu.memory


def test_what_would_fit_is_tried_from_cheap_to_dear():
    config = tiny((GPTConfig, LanguageModelConfig, TextData))
    flags = [flags for flags, _ in alternatives(config, 8)]
    full = "--config.model.remat=full"
    assert flags == [
        full,
        *(f"{full} --config.accumulate={count}" for count in (2, 4, 8)),
        f"{full} --config.mesh.fsdp=8",
    ]
    changed = dict(alternatives(config, 8))
    assert changed[flags[-1]].mesh == dataclasses.replace(config.mesh, fsdp=8)
    assert changed[flags[2]].accumulate == 4
    assert config.model.remat == "none"


def test_a_search_tries_each_mesh_once_with_each_rematerialization():
    found = [flags for flags, _ in variants(tiny(), 8)]
    assert len(found) == len(set(found)) == 2 * 4  # fsdp 1 and 8, tensor 2 and 4
    assert all("fsdp=8 --config.mesh.tensor=4" not in flags for flags in found)


@pytest.mark.parametrize(
    ("message", "error", "compiles"),
    [
        (
            "Ran out of memory in memory space hbm. Used 17.04G of 15.75G hbm.",
            "needs 17.04GiB, but a device has 15.75GiB",
            True,
        ),
        ("memory required for HLO temporaries (44.83G) exceeds available HBM (15.75G).", "needs 44.83GiB", True),
        ("INTERNAL: Mosaic failed to compile TPU kernel\nmore", "^INTERNAL: Mosaic .* kernel more$", False),
    ],
)
def test_why_there_is_no_program_is_one_line(message, error, compiles):
    plan = known(fits=False)
    _record_failure(plan, message)
    assert re.search(error, plan.error)
    assert plan.compiles is compiles
    assert (plan.peak_bytes > plan.memory_bytes) is compiles


@pytest.mark.aot
def test_a_slice_that_is_not_there_has_memory_exchanges_and_a_prediction(tpu_devices):
    plan = plan_training(tiny(), tpu_devices("v5e:2x4"))
    assert plan.device_kind == "TPU v5 lite"
    assert plan.hosts == (2, 2)
    assert plan.fits
    assert plan.collectives.keys() == {"all-reduce"}
    assert plan.seconds.keys() == {"memory", "network", "compute", "cycles"}
    assert 0 < plan.seconds["compute"] < plan.predicted_step_seconds < 1
    assert 0 < plan.predicted_mfu < 1
    assert len(plan.operations) == 5
    assert any(source.startswith("tfx_jax/") for source, _ in plan.operations)
    jax.clear_caches()  # the kept program, if there is one, is of devices whose programs JAX cannot read
    assert plan_training(tiny(), tpu_devices("v5e:2x4")) == plan


@pytest.mark.aot
def test_gpus_that_are_not_there_have_memory_exchanges_and_a_bound(gpu_devices):
    plan = plan_training(tiny(), gpu_devices("h100:1x2x4"))
    assert plan.device_kind == "NVIDIA H100 80GB HBM3"
    assert plan.hosts == (2, 2)
    assert plan.fits
    assert plan.collectives.keys() == {"all-reduce"}
    # Every gradient leaves a device once on its way around the ring and once on its way back.
    assert plan.collectives["all-reduce"]["bytes"] >= 2 * 7 / 8 * 4 * plan.num_params
    assert plan.is_bound
    assert plan.predicted_step_seconds == max(plan.seconds.values())
    assert plan.seconds.keys() == {"memory", "network", "compute"}


@pytest.mark.aot
def test_a_model_that_is_too_large_says_so_and_how_large_it_is(tpu_devices):
    config = tiny((GPTConfig, LanguageModelConfig, TextData))
    config.model = GPTConfig.published("gpt2-xl", num_layers=4, vocab_size=2000, d_ff=200_000)
    config.task.data.max_length, config.task.data.tokens_per_batch = 64, 64
    plan = plan_training(config, tpu_devices("v5e:1x1"))
    assert plan.compiles
    assert not plan.fits
    assert plan.peak_bytes > plan.memory_bytes
    assert plan.predicted_step_seconds is None


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_every_gpu_has_published_speeds(gpu_devices, kind):
    device = gpu_devices(f"{kind}:1x1x1")[0]
    assert device.device_kind in CHIPS
    assert peak_flops([device.device_kind]) is not None


@pytest.mark.aot
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_generation_has_published_speeds(tpu_devices, generation):
    device = tpu_devices(next(name for name in TOPOLOGIES if name.startswith(generation) and "2x2" in name))[0]
    assert device.device_kind in CHIPS
    assert peak_flops([device.device_kind]) is not None
