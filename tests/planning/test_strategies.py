"""What each strategy exchanges on eight v5e that are not there, and the memory it takes: libtpu's own programs."""

import importlib.metadata

import pytest

from tests.training.configs import default_config
from tfx_jax.models import GPTConfig, TransformerConfig
from tfx_jax.nn.moe import ExpertsConfig
from tfx_jax.planning import plan as planning
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.translation import PairData, TranslationConfig
from tfx_jax.training.config import MeshConfig

pytestmark = pytest.mark.aot

# Small enough to compile in seconds; large enough that matrices of a layer are gathered and their gradients scattered.
WIDTH, VOCABULARY, LENGTH, ROWS = 256, 512, 32, 64
SIZES = {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_heads": 8, "dropout_rate": 0.0, "dtype": "bfloat16"}
LAYER = 12 * WIDTH**2  # parameters of its matrices
TABLE = VOCABULARY * WIDTH  # of the embedding, whose gradients are exchanged at either end of the model
ACTIVATIONS = ROWS * LENGTH * WIDTH * 2  # bytes in bfloat16 on all devices

# GiB of temporary buffers, by the release of libtpu: a change that costs memory is to be seen.
MEMORY = {"0.0.42.1": {"none": 1.348, "full": 0.520}, "0.0.52": {"none": 0.573, "full": 0.272}}


@pytest.fixture
def planned(tpu_devices, monkeypatch):
    """`planned(config, data=8)`: the plan, and all exchanges of the program."""
    programs = []
    read = planning.read_program
    monkeypatch.setattr(planning, "read_program", lambda text: programs.append(read(text)) or programs[-1])

    def plan(config, **mesh):
        config.mesh = MeshConfig(**mesh)
        config.task.data.max_length, config.task.data.tokens_per_batch = LENGTH, ROWS * LENGTH
        plan = planning.plan_training(config, tpu_devices("v5e:2x4"))
        assert plan.error is None
        return plan, programs[-1].collectives

    return plan


def decoder():
    """A GPT of two layers."""
    config = default_config((GPTConfig, LanguageModelConfig, TextData))
    config.model = GPTConfig(num_layers=2, max_length=LENGTH, attention_dropout_rate=0.0, **SIZES)
    return config


def of_layers(exchanges, kind):
    """Those inside the loop over layers; once each for both layers."""
    found = [exchange for exchange in exchanges if exchange.kind == kind and "while/body" in exchange.source]
    assert {exchange.count for exchange in found} <= {1, 2}  # 1: of all layers at once
    return found


def num_bytes(exchanges):
    return sum(exchange.count * exchange.num_bytes for exchange in exchanges)


def test_data_parallelism_sums_gradients_and_nothing_else(planned):
    plan, exchanges = planned(decoder(), data=8)
    assert {exchange.kind for exchange in exchanges} == {"all-reduce"}
    assert {len(exchange.devices) for exchange in exchanges} == {8}
    assert 4 * plan.num_params <= num_bytes(exchanges) <= 4 * (plan.num_params + TABLE) + 1000  # in float32


def test_fsdp_gathers_a_layer_twice_and_scatters_its_gradient(planned):
    plan, exchanges = planned(decoder(), data=1, fsdp=8)
    assert {exchange.kind for exchange in exchanges} == {"all-gather", "reduce-scatter", "all-reduce"}
    gathered = of_layers(exchanges, "all-gather")
    assert num_bytes(gathered) == 2 * 2 * LAYER * 2  # forward and backward, two layers, bfloat16
    assert num_bytes([x for x in exchanges if x.kind == "all-gather"]) - num_bytes(gathered) == VOCABULARY * WIDTH * 2
    scattered = 8 * num_bytes([x for x in exchanges if x.kind == "reduce-scatter"])
    assert 0.75 * 2 * LAYER * 2 <= scattered <= 4 * plan.num_params
    # What is too small to be divided, and what libtpu does not scatter.
    assert num_bytes([x for x in exchanges if x.kind == "all-reduce"]) <= plan.num_params


def test_tensor_parallelism_sums_activations_twice_in_each_sublayer(planned):
    plan, exchanges = planned(decoder(), data=2, tensor=4)
    assert {exchange.kind for exchange in exchanges} == {"all-reduce"}
    sums = [exchange for exchange in of_layers(exchanges, "all-reduce") if len(exchange.devices) == 4]
    assert [exchange.num_bytes for exchange in sums] == [ACTIVATIONS // 2] * 4  # two sublayers, forward and backward
    gradients = [exchange for exchange in exchanges if len(exchange.devices) == 2]
    divided = 4 * (2 * LAYER + TABLE) / 4  # in float32; the others are whole
    assert divided <= num_bytes(gradients) <= divided + TABLE + 4 * (plan.num_params - 2 * LAYER - TABLE)


def test_sequence_parallelism_passes_keys_and_values_around(planned):
    config = default_config((TransformerConfig, TranslationConfig, PairData))
    config.model = TransformerConfig(num_layers=1, d_ff=4 * WIDTH, **SIZES)
    plan, exchanges = planned(config, data=2, sequence=4)
    assert {exchange.kind for exchange in exchanges} == {"all-reduce", "collective-permute", "all-gather", "all-to-all"}
    sorted_ids = [exchange for exchange in exchanges if exchange.kind in ("all-gather", "all-to-all")]
    assert max(exchange.num_bytes for exchange in sorted_ids) == ROWS // 2 * LENGTH * 4  # padding moves behind sources
    in_rings = [exchange for exchange in exchanges if exchange.source.endswith("ppermute")]
    assert {(len(exchange.devices), exchange.count) for exchange in in_rings} == {(4, 4)}  # as many turns as devices
    forward = [x for x in in_rings if "transpose(" not in x.source and x.num_bytes > 1000]  # without masks
    assert [exchange.num_bytes for exchange in forward] == [ACTIVATIONS // 8] * 6  # of the encoder, the decoder twice
    sums = [exchange for exchange in exchanges if exchange.kind == "all-reduce"]
    assert 4 * plan.num_params <= num_bytes(sums) <= 4 * (plan.num_params + TABLE) + 1000


def test_expert_parallelism_sends_tokens_to_their_experts_and_their_answers_back(planned):
    config = decoder()
    config.model.experts = ExpertsConfig(num_experts=8, every=1, capacity_factor=1.0)
    _, exchanges = planned(config, data=2, expert=4)
    assert {exchange.kind for exchange in exchanges} == {"all-to-all", "all-reduce"}
    sent = of_layers(exchanges, "all-to-all")
    assert {len(exchange.devices) for exchange in sent} == {4}
    # As many places as tokens: there and back, forward and backward, in two layers.
    assert num_bytes(sent) == 2 * 4 * ACTIVATIONS // 8
    sums = [exchange for exchange in exchanges if exchange.kind == "all-reduce"]
    of_experts = [exchange for exchange in sums if len(exchange.devices) == 2]
    assert num_bytes(of_experts) >= 4 * 2 * 8 * 2 * 4 * WIDTH**2 // 4  # a device's share of the experts, in float32


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_memory_is_what_it_was(tpu_devices, remat):
    version = importlib.metadata.version("libtpu")
    if version not in MEMORY:
        pytest.skip(f"the memory of programs is known for libtpu {', '.join(MEMORY)}, not for {version}")
    config = decoder()
    sizes = SIZES | {"vocab_size": 8192, "dropout_rate": 0.1}
    config.model = GPTConfig(num_layers=2, max_length=512, remat=remat, **sizes)
    config.task.data.max_length, config.task.data.tokens_per_batch = 512, 16 * 512
    plan = planning.plan_training(config, tpu_devices("v5e:1x1"))
    assert plan.temporary_bytes / 2**30 == pytest.approx(MEMORY[version][remat], rel=0.05)
