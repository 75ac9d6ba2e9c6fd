"""DeepSeek-V2 and V3 in Hugging Face folders: what `tfx_jax.models.hf.llama` does not have.

This is latent attention, whose folders have the rotary features of a head last, as pairs of neighbors, and experts in
groups. Layers that predict further tokens are refused: their tensors have no place.
"""

import dataclasses
import math
from typing import Any

from tfx_jax.errors import UserError
from tfx_jax.models.hf.folder import Fields
from tfx_jax.models.hf.names import Row, linear, vector
from tfx_jax.models.llama import LlamaConfig
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions
from tfx_jax.nn.moe import ExpertsConfig

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"


def read_options(architecture: str, fields: Fields, config: LlamaConfig) -> dict[str, Any]:
    """Returns the options of a configuration that differ from those of other relatives of Llama.

    Args:
      architecture: `V2` or `V3`.
      fields: the fields of config.json.
      config: the configuration that is read from them so far.

    Raises:
      UserError: for an option that the model does not support.
    """
    num_heads, is_v3 = config.num_heads, architecture == V3
    fields.require(attention_bias=False, rope_interleave=True, moe_layer_freq=1, num_key_value_heads=num_heads)
    fields.require(scoring_func="sigmoid" if is_v3 else "softmax", **({} if is_v3 else {"norm_topk_prob": False}))
    rope_size, d_ff = fields.get("qk_rope_head_dim", 64), fields.get("moe_intermediate_size", 2048 if is_v3 else 1407)
    if is_v3:  # transformers replaces the other's
        fields.require(head_dim=rope_size)
    options = AttentionOptions(
        rope_size=rope_size,
        latent_size=fields.get("kv_lora_rank", 512),
        value_size=fields.get("v_head_dim", 128),
    )
    has_groups = (
        fields.choose("topk_method", _TOP_K_METHODS[architecture], "noaux_tc" if is_v3 else "greedy") == "groups"
    )
    balancing: dict[str, Any] = {"load_balancing": 0.0001, "router_z_loss": 0.0} if is_v3 else {}  # V3, section 4.2
    experts = ExpertsConfig(
        num_experts=fields.get("n_routed_experts", 256 if is_v3 else 64),
        every=1,
        experts_per_token=fields.get("num_experts_per_tok", 8),
        is_normalized=is_v3 and fields.get("norm_topk_prob", True),
        d_ff=None if d_ff == config.d_ff else d_ff,
        router_scores="sigmoid" if is_v3 else "softmax",
        use_correction_bias=is_v3,
        num_expert_groups=fields.get("n_group", 8 if is_v3 else 1) if has_groups else 1,
        groups_per_token=fields.get("topk_group", 4 if is_v3 else 1) if has_groups else 1,
        group_choices=2 if is_v3 else 1,
        weight_scale=float(fields.get("routed_scaling_factor", 2.5 if is_v3 else 1.0)),
        shared_d_ff=d_ff * fields.get("n_shared_experts", 1 if is_v3 else 2),
        **balancing,
    )
    d_k = rope_size + fields.get("qk_nope_head_dim", 128)
    return {
        "d_k": d_k,
        "num_kv_heads": 1,
        "query_rank": fields.optional("q_lora_rank", int),
        "use_value_norm": True,
        "attention": AttentionConfig("latent", options),
        "experts": experts,
        "num_dense_layers": fields.get("first_k_dense_replace", 3 if is_v3 else 0),
        **_scaled_logits(fields, config, d_k),
    }


# Whether a token chooses among the experts of some groups, by the name of the method in config.json.
_TOP_K_METHODS = {
    V2: {"greedy": "all", "group_limited_greedy": "groups"},
    V3: {"noaux_tc": "groups"},
}


def _scaled_logits(fields: Fields, config: LlamaConfig, d_k: int) -> dict[str, Any]:
    """Returns the options of YaRN's factor of the logits, "mscale", which here is part of the scale of the logits."""
    parameters = fields.rotary()
    factors = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not any(factors):
        return {}
    if config.rotary.scaling != "yarn" or factors[0] != factors[1] or not isinstance(factors[0], (int, float)):
        raise UserError(
            f"rope_parameters: mscale is {factors[0]!r} and mscale_all_dim {factors[1]!r}, but only equal ones of YaRN "
            "are supported"
        )
    factor = 0.1 * factors[0] * math.log(config.rotary.factor) + 1
    return {"attention_scale": d_k**-0.5 * factor * factor}


def write_options(architecture: str, config: LlamaConfig, values: dict[str, Any]) -> None:
    """Adds the fields of config.json that `read_options` reads to `values`, which has the others.

    Raises:
      ValueError: if the attention is another one.
    """
    if config.attention.name != "latent":
        raise ValueError(f"DeepSeek has latent attention, got {config.attention.name}")
    sizes, experts = config.attention.head_sizes(config.head_size), config.experts
    d_ff = config.d_ff if experts.d_ff is None else experts.d_ff
    values |= {
        "num_key_value_heads": config.num_heads,
        "head_dim": sizes.key,
        "qk_rope_head_dim": sizes.key,
        "qk_nope_head_dim": config.head_size - sizes.key,
        "kv_lora_rank": sizes.value,
        "v_head_dim": sizes.output,
        "q_lora_rank": config.query_rank,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": d_ff,
        "norm_topk_prob": experts.has_normalized_weights,
        "n_group": experts.num_expert_groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.weight_scale,
        "n_shared_experts": experts.shared_d_ff // d_ff,
        "first_k_dense_replace": config.num_dense_layers,
    }
    if architecture == V2:
        values["topk_method"] = "greedy" if experts.num_expert_groups == 1 else "group_limited_greedy"
    else:
        values["num_nextn_predict_layers"] = 0
    usual_scale = config.head_size**-0.5
    if config.attention_scale not in (None, usual_scale):
        factor = math.sqrt(config.attention_scale / usual_scale)
        mscale = round((factor - 1) / (0.1 * math.log(config.rotary.factor)), 9)
        values["rope_parameters"] |= {"mscale": mscale, "mscale_all_dim": mscale}


def attention_rows(config: LlamaConfig, attention: str, path: str, tensor: str) -> list[Row]:
    """Returns the rows of the attention at `path`; `tensor` is the start of the names of the layer's tensors."""
    del attention  # all layers have the same
    tensor = f"{tensor}.self_attn"
    sizes, heads, d_k = config.attention.head_sizes(config.head_size), range(config.num_heads), config.head_size
    content = d_k - sizes.key  # features of a query without a position, which come first in a folder
    halves = [*range(0, sizes.key, 2), *range(1, sizes.key, 2)]  # pairs of neighbors as pairs of halves
    query = [head * d_k + index for head in heads for index in (*(content + half for half in halves), *range(content))]
    shared, up = f"{tensor}.kv_a_proj_with_mqa.weight", content + sizes.output

    def part(row: Row, outputs: Any, num_outputs: int, **options: Any) -> Row:
        """Returns a row with some of the outputs of a tensor."""
        outputs = outputs if isinstance(outputs, range) else tuple(outputs)
        return dataclasses.replace(row, outputs=outputs, num_outputs=num_outputs, **options)

    def part_of_heads(name: str, start: int, stop: int) -> Row:
        """Returns the row of a matrix of each head, some outputs of which are those of a head in the tensor."""
        outputs = [head * up + index for head in heads for index in range(start, stop)]
        row = linear(f"{path}/attention_fn/{name}", f"{tensor}.kv_b_proj.weight")
        return part(row, outputs, up * len(heads), is_per_head=True)

    name = "q_proj" if config.query_rank is None else "q_b_proj"
    rows = [
        part(linear(f"{path}/query/kernel", f"{tensor}.{name}.weight"), query, d_k * len(heads)),
        part(linear(f"{path}/value/kernel", shared), range(sizes.value), sizes.value + sizes.key),
        part(linear(f"{path}/key/kernel", shared), [sizes.value + half for half in halves], sizes.value + sizes.key),
        vector(f"{path}/value_norm/scale", f"{tensor}.kv_a_layernorm.weight"),
        part_of_heads("key_up", 0, content),
        part_of_heads("value_up", content, up),
        linear(f"{path}/out/kernel", f"{tensor}.o_proj.weight", 2),
    ]
    if config.query_rank is not None:
        rows += [
            linear(f"{path}/query_down/kernel", f"{tensor}.q_a_proj.weight"),
            vector(f"{path}/query_rank_norm/scale", f"{tensor}.q_a_layernorm.weight"),
        ]
    return rows
