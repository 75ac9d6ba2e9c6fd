"""What a config.json means without a field: the same as to transformers, whose defaults fill the whole file."""

import copy
import json
from typing import Any

import pytest

from tfx_jax.errors import UserError
from tfx_jax.models import hf
from tfx_jax.models.hf.folder import Fields

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

LINEAR = {"rope_type": "linear", "factor": 2.0}
# Files with few fields, as older versions and other programs write them.
FILES: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 5},
    {"use_sliding_window": True, "sliding_window": 4},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    {"sliding_window": None},
    {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    {"rope_theta": 77.0},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 77.0},
    {"rope_theta": 77.0, "rope_local_base_freq": 5.0, "rope_scaling": LINEAR},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}, "rope_scaling": LINEAR},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    {"encoder_attention_heads": 8},
    {"hidden_activation": "relu"},
    {"tie_word_embeddings": True},
]


def read(architecture: str, values: dict[str, Any]) -> Any:
    """Our configuration, or None where it is refused."""
    try:
        config = hf.FAMILIES[architecture].read_config(Fields(values, "config.json"))
    except UserError:
        return None
    if hasattr(config, "num_kv_heads"):
        config.num_kv_heads = config.num_kv_heads or config.num_heads
    if hasattr(config, "num_decoder_layers"):
        config.num_decoder_layers = config.num_decoder_layers or config.num_layers
    return config


@pytest.mark.parametrize("architecture", hf.FAMILIES)
def test_absent_fields_mean_what_they_mean_to_transformers(architecture: str):
    former = "T5WithLMHeadModel"  # another name, which transformers no longer has
    kind = getattr(transformers, architecture.replace(former, "T5ForConditionalGeneration")).config_class
    whole = kind().to_dict()
    known = {*whole, "sliding_window_pattern"}
    if "full_attention" in (whole.get("rope_parameters") or {}):  # a set for each kind of layer
        known.remove("rope_parameters")
    if "rope_parameters" in whole:
        known |= {"rope_theta", "rope_local_base_freq"}
        known |= set() if architecture.startswith("Phi3") else {"rope_scaling"}  # a Phi-3 has other scalings
    for values in FILES:
        if not values.keys() <= known:
            continue
        whole = json.loads(json.dumps(kind(**copy.deepcopy(values)).to_dict()))
        short = read(architecture, values)
        assert short is None or short == read(architecture, whole), values


@pytest.mark.parametrize(
    ("architecture", "field"),
    [("DeepseekV3ForCausalLM", "norm_topk_prob"), ("T5ForConditionalGeneration", "scale_decoder_outputs")],
)
def test_null_is_false(architecture: str, field: str):
    """Both are true by default."""
    assert read(architecture, {field: None}) == read(architecture, {field: False}) != read(architecture, {})
