"""Llama and its relatives in Hugging Face folders.

These are Mistral, Mixtral, Qwen (with experts too), Gemma, OLMo 2, SmolLM3, Phi-3, gpt-oss, Granite and StableLM, and
those of `_EXTENSIONS`.
"""

import dataclasses
import math
from typing import Any

from tfx_jax.errors import UserError
from tfx_jax.models.hf import deepseek, qwen3_next
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field, classifier_fields, shortest_pattern
from tfx_jax.models.hf.names import Row, linear, norm, table, under, vector
from tfx_jax.models.llama import Llama as Llama
from tfx_jax.models.llama import LlamaBody as LlamaBody
from tfx_jax.models.llama import LlamaClassifier as LlamaClassifier
from tfx_jax.models.llama import LlamaConfig
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions, RotaryConfig
from tfx_jax.nn.moe import ExpertsConfig

# Options of each architecture that config.json does not contain.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"use_qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": "head"},
    "GemmaForCausalLM": {"norm_scale_offset": 1.0},
    "Gemma2ForCausalLM": {"norm_scale_offset": 1.0, "norms": "both"},
    "Gemma3ForCausalLM": {"norm_scale_offset": 1.0, "norms": "both", "qk_norm": "head"},
    "Olmo2ForCausalLM": {"norms": "output", "qk_norm": "all"},
    "SmolLM3ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "MixtralForCausalLM": {},
    "Qwen2MoeForCausalLM": {},
    "Qwen3MoeForCausalLM": {"qk_norm": "head"},
    "GptOssForCausalLM": {"use_sinks": True, "use_ff_bias": True, "ff_gate_offset": 1.0, "activation": "quick_gelu"},
    "GraniteForCausalLM": {},
    "StableLmForCausalLM": {"norm_kind": "layer"},
    deepseek.V2: {},
    deepseek.V3: {},
    qwen3_next.NAME: {"norm_scale_offset": 1.0, "qk_norm": "head", "use_output_gate": True},
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "qwen3_next": qwen3_next.NAME,
}
# Classifiers, and the architecture that each has below its head.
CLASSIFIERS = {
    name.replace("Gemma3", "Gemma3Text").replace("ForCausalLM", "ForSequenceClassification"): name
    for name in ARCHITECTURES
    if name != "GraniteForCausalLM"
}
# The same without an output layer.
BODIES = {name.replace("Gemma3", "Gemma3Text").replace("ForCausalLM", "Model"): name for name in ARCHITECTURES}
IGNORED = (r"lm_head\.weight", r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
COPIES = ((r"lm_head\.weight", "model.embed_tokens.weight"),)
_WITHOUT_WINDOWS = ("LlamaForCausalLM", "GemmaForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM")
_WITHOUT_WINDOWS += ("StableLmForCausalLM", deepseek.V2, deepseek.V3, qwen3_next.NAME)
# Modules with what only some architectures have, in `read_options`, `write_options` and `attention_rows`.
_EXTENSIONS = {deepseek.V2: deepseek, deepseek.V3: deepseek, qwen3_next.NAME: qwen3_next}
# transformers reads "use_sliding_window", false by default.
_WITH_WINDOW_SWITCH = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
_WITH_WINDOW_SWITCH += ("SmolLM3ForCausalLM",)
# Every layer has the window, and transformers does not read "layer_types".
_WITHOUT_LAYER_TYPES = ("Phi3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM")
# Values of absent fields, as in transformers, if they are not those of Llama.
_QWEN = {"vocab_size": 151_936, "max_position_embeddings": 32_768}
_GEMMA = {"vocab_size": 256_000, "max_position_embeddings": 8192, "head_dim": 256}
_GEMMA2 = {"hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}
_GEMMA2 |= {"intermediate_size": 9216, "sliding_window": 4096}
_MISTRAL = {"intermediate_size": 14_336, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
_SMALL = {"hidden_size": 2048, "num_attention_heads": 16}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {**_MISTRAL, "sliding_window": 4096},
    "MixtralForCausalLM": {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "Qwen2ForCausalLM": {**_QWEN, "intermediate_size": 22_016, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {**_QWEN, "intermediate_size": 22_016, "num_key_value_heads": 32, "sliding_window": 4096}
    | {"head_dim": 128},
    "Qwen2MoeForCausalLM": {**_QWEN, **_SMALL, "num_hidden_layers": 24, "intermediate_size": 5632}
    | {"num_key_value_heads": 16, "sliding_window": 4096},
    "Qwen3MoeForCausalLM": {**_QWEN, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 6144}
    | {"num_key_value_heads": 4, "sliding_window": 4096},
    qwen3_next.NAME: {**_QWEN, **_SMALL, "num_hidden_layers": 48, "intermediate_size": 5632, "num_key_value_heads": 2},
    "GemmaForCausalLM": {**_GEMMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "intermediate_size": 24_576},
    "Gemma2ForCausalLM": {**_GEMMA, **_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": {**_GEMMA, **_GEMMA2, "vocab_size": 262_208, "max_position_embeddings": 131_072}
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "Olmo2ForCausalLM": {"vocab_size": 50_304, "rms_norm_eps": 1e-5},
    "SmolLM3ForCausalLM": {**_SMALL, "vocab_size": 128_256, "max_position_embeddings": 32_768}
    | {"num_hidden_layers": 36, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    "Phi3ForCausalLM": {"vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 4096},
    "GptOssForCausalLM": {"vocab_size": 201_088, "hidden_size": 2880, "num_hidden_layers": 36, "head_dim": 64}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131_072, "attention_bias": True, "sliding_window": 128, "rope_theta": 150_000.0},
    "StableLmForCausalLM": {"vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912}
    | {"max_position_embeddings": 4096},
    deepseek.V2: {"vocab_size": 102_400, "q_lora_rank": 1536},
    deepseek.V3: {"vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
    | {"intermediate_size": 18_432, "max_position_embeddings": 4096, "q_lora_rank": 1536},
}
# "rope_parameters" of a gpt-oss without them.
_GPT_OSS_ROTARY = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_PAD_IDS = {"Phi3ForCausalLM": 32_000, "SmolLM3ForCausalLM": 128_004}  # defaults of transformers
# Sizes if config.json has none: experts, experts of a token, hidden units of an expert and of the shared network.
_QWEN_EXPERTS = {"Qwen2MoeForCausalLM": (60, 4, 1408, 5632), "Qwen3MoeForCausalLM": (128, 8, 768, 0)}
_QWEN_EXPERTS |= {qwen3_next.NAME: (512, 10, 512, 512)}
# Architectures with mixtures of experts.
_SPARSE = ("MixtralForCausalLM", "GptOssForCausalLM", *_QWEN_EXPERTS)
_LATER_GEMMAS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
_GEMMAS = ("GemmaForCausalLM", *_LATER_GEMMAS)
# Our names of Granite's multipliers, each 1 by default.
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
# Architectures that can rotate a share of the features, and that share if config.json has none.
_FRACTIONS = {"Phi3ForCausalLM": 1.0, "StableLmForCausalLM": 0.25, qwen3_next.NAME: 0.25}
# Our names of rotary scalings by their names in config.json.
_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_SCALINGS |= {"dynamic": "dynamic", "longrope": "longrope"}
# Our names of the numbers of rotary scalings by their names in config.json.
_ROTARY_NUMBERS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_max_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}
# Numbers of YaRN that give the attention factor of a folder without one.
_YARN_SCALES = ("mscale", "mscale_all_dim")


def read_config(architecture: str, fields: Fields) -> LlamaConfig:
    """Returns the configuration for the fields of a folder's config.json.

    Raises:
      UserError: for an option that the model does not support.
    """
    fields = fields.with_defaults(_DEFAULTS.get(architecture, {}))
    fields.require(mlp_bias=False, pretraining_tp=1)
    if architecture == "GptOssForCausalLM":
        fields.require(swiglu_alpha=1.702)
    if fields.get("use_bidirectional_attention", False):
        raise UserError("use_bidirectional_attention is true, but this library has only the causal form of this model")
    is_gemma = architecture in _GEMMAS
    num_heads, d_model = fields.get("num_attention_heads", 32), fields.get("hidden_size", 4096)
    d_k = fields.optional("head_dim", int)
    num_layers = fields.get("num_hidden_layers", 32)
    has_bias = fields.get("attention_bias", False)
    options = dict(ARCHITECTURES[architecture])
    if architecture == "StableLmForCausalLM":
        fields.require(head_dim=d_model // max(num_heads, 1))
        options["use_qkv_bias"] = fields.get("use_qkv_bias", False)
        options["qk_norm"] = "each" if fields.get("qk_layernorm", False) else "none"
        options["is_parallel"] = fields.get("use_parallel_residual", False)
    if architecture == "Qwen2MoeForCausalLM":
        options["use_qkv_bias"] = fields.get("qkv_bias", True)
    if "use_qkv_bias" not in options:
        options |= {"use_qkv_bias": has_bias, "use_out_bias": has_bias}
    if is_gemma:
        options["embedding_scale"] = math.sqrt(d_model)
    if architecture in _LATER_GEMMAS:
        scalar = float(fields.get("query_pre_attn_scalar", 256))
        if scalar <= 0:
            raise UserError(f"query_pre_attn_scalar is {scalar}, not above 0")
        options["attention_scale"] = scalar**-0.5
        if architecture.startswith("Gemma2"):  # of others transformers stores it and does not use it
            options["attention_soft_cap"] = fields.optional("attn_logit_softcapping", float)
        options["logits_soft_cap"] = fields.optional("final_logit_softcapping", float)
    if architecture == "GraniteForCausalLM":
        options |= {ours: float(fields.get(theirs, 1.0)) for ours, theirs in _MULTIPLIERS.items()}
    if architecture == "SmolLM3ForCausalLM":
        options["no_rotary_every"] = _no_rotary_every(fields, num_layers)
    if architecture == "GptOssForCausalLM":
        options["ff_limit"] = fields.get("swiglu_limit", 7.0)
    else:
        options["activation"] = fields.choose(*_activation(architecture))
    d_ff = fields.get("intermediate_size", 11_008)
    rotary, window_base = _rotary(architecture, fields)
    if rotary.fraction != 1.0 and architecture not in _FRACTIONS:
        raise UserError(f"partial_rotary_factor is {rotary.fraction}, but only {', '.join(_FRACTIONS)} have it")
    # transformers gives an odd number of features other frequencies than ours.
    if rotary.fraction != 1.0 and int(rotary.fraction * (d_k or d_model / max(num_heads, 1))) % 2:
        raise UserError(f"partial_rotary_factor is {rotary.fraction}, which is no even number of a head's features")
    config = LlamaConfig(
        vocab_size=fields.get("vocab_size", 32_000),
        max_length=_max_length(fields, rotary),
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=fields.optional("num_key_value_heads", int),
        d_k=None if d_k is not None and d_k * num_heads == d_model else d_k,
        d_ff=d_ff,
        experts=_experts(architecture, fields, d_ff),
        norm_epsilon=fields.get(*_norm_epsilon(architecture)),
        is_tied=fields.get("tie_word_embeddings", is_gemma),
        rotary=rotary,
        window_rotary_base=window_base,
        attention=_attention(architecture, fields, num_layers),
        dropout_rate=0.0,
        attention_dropout_rate=float(fields.get("attention_dropout", 0.0)),
        **options,
    )
    if architecture not in _EXTENSIONS:
        return config
    options = _EXTENSIONS[architecture].read_options(architecture, fields, config)
    return dataclasses.replace(config, **options)


def _max_length(fields: Fields, rotary: RotaryConfig) -> int:
    """Returns the length of the longest text, in tokens; "dynamic" scaling extends that of config.json."""
    length = fields.get("max_position_embeddings", 2048)
    return round(length * rotary.factor) if rotary.scaling == "dynamic" else length


def _activation(architecture: str) -> tuple[str, dict[str, str], str]:
    """Returns the name of the activation's field in config.json, our names of its values, and its default."""
    if architecture == "GemmaForCausalLM":
        # Its first folders have "gelu" and mean the tanh approximation.
        return "hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh"
    if architecture in _LATER_GEMMAS:
        return "hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"
    return "hidden_act", ACTIVATIONS, "silu"


def _norm_epsilon(architecture: str) -> tuple[str, float]:
    """Returns the name of the epsilon of norms in config.json, and its value if it is missing."""
    return ("layer_norm_eps", 1e-5) if architecture == "StableLmForCausalLM" else ("rms_norm_eps", 1e-6)


def _no_rotary_every(fields: Fields, num_layers: int) -> int:
    """Returns n if every n-th layer has no rotary positions, checking that "no_rope_layers" says the same."""
    layers = fields.get("no_rope_layers", [])
    every = fields.get("no_rope_layer_interval", 4)
    if every < 1:
        raise UserError(f"no_rope_layer_interval is {every}: need a number above 0")
    expected = [int((index + 1) % every != 0) for index in range(num_layers)]  # 1 for layers with rotary positions
    if layers and layers != expected:
        raise UserError("no_rope_layers is not every no_rope_layer_interval-th layer")
    return every


def _experts(architecture: str, fields: Fields, d_ff: int) -> ExpertsConfig:
    """Reads which layers have experts, and their sizes; `d_ff` is the width of other feed-forward networks."""
    if architecture not in _SPARSE:
        return ExpertsConfig(every=1)
    if architecture in _QWEN_EXPERTS:
        fields.require(mlp_only_layers=[])
        num_experts, experts_per_token, own_d_ff, shared_d_ff = _QWEN_EXPERTS[architecture]
        own_d_ff = fields.get("moe_intermediate_size", own_d_ff)
        return ExpertsConfig(
            num_experts=fields.get("num_experts", fields.get("num_local_experts", num_experts)),
            every=fields.get("decoder_sparse_step", 1),
            experts_per_token=fields.get("num_experts_per_tok", experts_per_token),
            is_normalized=fields.get("norm_topk_prob", architecture == qwen3_next.NAME),
            d_ff=None if own_d_ff == d_ff else own_d_ff,
            shared_d_ff=fields.get("shared_expert_intermediate_size", shared_d_ff) if shared_d_ff else 0,
            use_shared_gate=shared_d_ff > 0,
        )
    is_gpt_oss = architecture == "GptOssForCausalLM"
    return ExpertsConfig(
        num_experts=fields.get("num_local_experts", 128 if is_gpt_oss else 8),
        every=1,
        experts_per_token=fields.get("num_experts_per_tok", 4 if is_gpt_oss else 2),
        is_normalized=True,
        use_router_bias=is_gpt_oss,
    )


def _rotary(architecture: str, fields: Fields) -> tuple[RotaryConfig, float | None]:
    """Returns the rotary positions, and the rotary base of window layers, or None if it is the same."""
    parameters = fields.rotary() or (_GPT_OSS_ROTARY if architecture == "GptOssForCausalLM" else {})
    is_by_layer = architecture == "Gemma3ForCausalLM"  # a set of parameters for each kind of layer
    window_base = fields.optional("rope_local_base_freq", float) if is_by_layer else None
    # The original length beside "rope_parameters" has precedence, but not over those of a kind of layer.
    original = None if is_by_layer else fields.optional("original_max_position_embeddings", int)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        window = _rotary_values(parameters.get("sliding_attention") or {})
        if window.get("rope_type", window.get("type", "default")) != "default" or "partial_rotary_factor" in window:
            raise UserError(f"rope_parameters: sliding_attention is {window!r:.80}, but only a rope_theta is supported")
        parameters, window_base = parameters.get("full_attention", {}), window.get("rope_theta", window_base)
    elif is_by_layer and fields.get("rope_parameters", {}):  # transformers ignores them
        raise UserError("rope_parameters has no full_attention and no sliding_attention, as a Gemma 3 needs")
    parameters = _rotary_values(parameters)
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = "longrope" if scaling == "su" else scaling  # the name in the first folders of Phi-3
    if not isinstance(scaling, str) or scaling not in _SCALINGS:
        raise UserError(f"rope_parameters: rope_type is {scaling!r}, but only {', '.join(_SCALINGS)} are supported")
    base = parameters.get("rope_theta", fields.get("rope_theta", 10_000.0))
    fraction = fields.get("partial_rotary_factor", _FRACTIONS.get(architecture, 1.0))
    fraction = parameters.get("partial_rotary_factor", fraction)
    values: dict[str, Any] = {"base": float(base), "fraction": float(fraction), "scaling": _SCALINGS[scaling]}
    if scaling == "yarn":
        values["is_truncated"] = bool(parameters.get("truncate", True))
    if scaling != "default":
        values |= {ours: parameters[theirs] for theirs, ours in _ROTARY_NUMBERS.items() if theirs in parameters}
        length = fields.get("max_position_embeddings", 2048)
        if scaling == "dynamic":
            values["original_max_length"] = length
        elif scaling != "linear":
            values["original_max_length"] = original or values.get("original_max_length", length)
        if scaling == "longrope":
            factors: list[Any] = [parameters.get(f"{name}_factor") for name in ("short", "long")]
            if not all(map(_is_numbers, factors)) or values["original_max_length"] <= 0:
                raise UserError(
                    'rope_parameters: "longrope" needs short_factor, long_factor and original_max_position_embeddings '
                    "above 0: fetch config.json again"
                )
            values["factor"] = values.get("factor", length / values["original_max_length"])
            values["short_factors"], values["long_factors"] = (tuple(map(float, numbers)) for numbers in factors)
        elif scaling == "yarn":
            values["factor"] = values.get("factor", length / max(values["original_max_length"], 1))
            scales: list[Any] = [parameters.get(name) for name in _YARN_SCALES]
            if all(scales):
                growth = 0.1 * math.log(max(values["factor"], 1.0))
                values.setdefault("attention_factor", (growth * scales[0] + 1) / (growth * scales[1] + 1))
    return RotaryConfig(**values), window_base


def _rotary_values(parameters: Any) -> dict[str, Any]:
    """Returns the fields of "rope_parameters" that are not null; raises UserError if a number is something else."""
    if not isinstance(parameters, dict):
        raise UserError(f"rope_parameters: {parameters!r:.80} is not an object: fetch config.json again")
    values = {name: value for name, value in parameters.items() if value is not None}
    for name in ("rope_theta", "partial_rotary_factor", *_YARN_SCALES, *_ROTARY_NUMBERS):
        if name in values and not _is_numbers([values[name]]):
            raise UserError(f"rope_parameters: {name} is {values[name]!r:.80}, not a number: fetch config.json again")
    return values


def _is_numbers(values: Any) -> bool:
    """Returns whether `values` is a list of finite numbers."""
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _attention(architecture: str, fields: Fields, num_layers: int) -> AttentionConfig:
    """Reads which layers have window attention.

    "sliding_window" counts the token itself; our `window` counts only the tokens before it, so it is one less.
    """
    if architecture in _WITHOUT_WINDOWS:
        return AttentionConfig()
    window = fields.optional("sliding_window", int)
    is_used = architecture not in _WITH_WINDOW_SWITCH or fields.get("use_sliding_window", False)
    if window is None or not is_used:
        if architecture == "SmolLM3ForCausalLM" and window and "sliding_attention" in fields.get("layer_types", []):
            raise UserError("layer_types has sliding_attention, but use_sliding_window is false")
        return AttentionConfig()
    types = _layer_types(architecture, fields, num_layers)
    if "sliding_attention" not in types:
        return AttentionConfig()
    kinds = {"sliding_attention": "window", "full_attention": "dense"}
    names = shortest_pattern([fields.chosen("layer_types", kind, kinds) for kind in types])
    return AttentionConfig(",".join(names), AttentionOptions(window=window - 1))


def _layer_types(architecture: str, fields: Fields, num_layers: int) -> list[str]:
    """Returns the kind of each layer: "layer_types" or, in older folders, what transformers computes without it."""
    types = fields.get("layer_types", [])
    if types and architecture not in _WITHOUT_LAYER_TYPES:
        if len(types) != num_layers:
            raise UserError(f"layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
        return types
    first = fields.get("max_window_layers", 28)  # of a Qwen2Moe, one more than the last
    every = fields.get("sliding_window_pattern", 6) if architecture == "Gemma3ForCausalLM" else 2
    if every < 1:
        raise UserError(f"sliding_window_pattern is {every}: need a number above 0")
    has_window = {
        **dict.fromkeys(("MistralForCausalLM", *_WITHOUT_LAYER_TYPES), lambda index: True),
        **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM"), lambda index: index >= first),
        "Qwen2MoeForCausalLM": lambda index: index % 2 == 0 and index < first,
        "SmolLM3ForCausalLM": lambda index: (index + 1) % _no_rotary_every(fields, num_layers) == 0,
    }.get(architecture, lambda index: (index + 1) % every != 0)  # Gemma 2 and 3, gpt-oss
    return [("sliding_attention" if has_window(index) else "full_attention") for index in range(num_layers)]


def write_config(architecture: str, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a configuration. Options that they cannot express are lost; see `fits`."""
    values: dict[str, Any] = {
        "model_type": next(kind for kind, name in MODEL_TYPES.items() if name == architecture),
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": (
            config.rotary.original_max_length if config.rotary.scaling == "dynamic" else config.max_length
        ),
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.d_ff,
        _activation(architecture)[0]: activation_field(
            "swish" if architecture == "GptOssForCausalLM" else config.activation
        ),
        _norm_epsilon(architecture)[0]: config.norm_epsilon,
        "tie_word_embeddings": config.is_tied,
        "attention_dropout": config.attention_dropout_rate,
        "attention_bias": config.use_out_bias,
        "rope_parameters": _rope_parameters(config, _FRACTIONS.get(architecture, 1.0)),
    }
    if architecture == "StableLmForCausalLM":
        values |= {"use_qkv_bias": config.use_qkv_bias, "qk_layernorm": config.qk_norm != "none"}
        values["use_parallel_residual"] = config.is_parallel
    if architecture == "GraniteForCausalLM":
        scaled = dataclasses.replace(config, attention_scale=_attention_scale(config))
        values |= {theirs: getattr(scaled, ours) for ours, theirs in _MULTIPLIERS.items()}
    if architecture in _LATER_GEMMAS and config.attention_scale is not None:
        values["query_pre_attn_scalar"] = round(config.attention_scale**-2)
    values |= {"attn_logit_softcapping": config.attention_soft_cap, "final_logit_softcapping": config.logits_soft_cap}
    if config.rotary.scaling == "longrope":
        values["original_max_position_embeddings"] = config.rotary.original_max_length
    if config.vocab_size <= _PAD_IDS.get(architecture, 0):
        values["pad_token_id"] = 0
    experts = config.experts
    if architecture in _QWEN_EXPERTS:
        values |= {"num_experts": experts.num_experts, "decoder_sparse_step": experts.every}
        values |= {"moe_intermediate_size": config.d_ff if experts.d_ff is None else experts.d_ff}
        values |= {"norm_topk_prob": experts.has_normalized_weights}
        values |= {"shared_expert_intermediate_size": experts.shared_d_ff} if experts.shared_d_ff else {}
        values |= {"qkv_bias": config.use_qkv_bias} if architecture == "Qwen2MoeForCausalLM" else {}
    elif architecture in _SPARSE:
        values["num_local_experts"] = experts.num_experts
    if architecture in _SPARSE:
        values["num_experts_per_tok"] = experts.experts_per_token
    if architecture == "GptOssForCausalLM":
        values["swiglu_limit"] = config.ff_limit
    if architecture in _EXTENSIONS:
        _EXTENSIONS[architecture].write_options(architecture, config, values)
    if config.no_rotary_every:
        values["no_rope_layer_interval"] = config.no_rotary_every
    if "window" in config.attention.names:
        kinds = {"window": "sliding_attention", "dense": "full_attention"}
        names = config.attention.names * (config.num_layers // len(config.attention.names))
        values |= {
            "sliding_window": config.attention.options.window + 1,
            "use_sliding_window": True,
            "layer_types": [kinds[name] for name in names],
        }
    else:
        values["sliding_window"] = None
    return values


def _rope_parameters(config: LlamaConfig, default_fraction: float) -> dict[str, Any]:
    """Returns the field "rope_parameters", the inverse of `_rotary`."""
    rotary = config.rotary
    scaling = next(theirs for theirs, ours in _SCALINGS.items() if ours == rotary.scaling)
    values: dict[str, Any] = {"rope_type": scaling, "rope_theta": rotary.base}
    if rotary.fraction != default_fraction:
        values["partial_rotary_factor"] = rotary.fraction
    if rotary.scaling != "none":
        values["factor"] = rotary.factor
    if rotary.scaling in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = rotary.original_max_length
    if rotary.scaling == "llama3":
        values |= {"low_freq_factor": rotary.low_frequency_factor, "high_freq_factor": rotary.high_frequency_factor}
    if rotary.scaling == "yarn":
        values |= {"beta_fast": rotary.beta_fast, "beta_slow": rotary.beta_slow}
        values |= {} if rotary.is_truncated else {"truncate": False}
        values |= {} if rotary.attention_factor is None else {"attention_factor": rotary.attention_factor}
    if rotary.scaling == "longrope":
        values |= {"short_factor": [*rotary.short_factors], "long_factor": [*rotary.long_factors]}
        values |= {} if rotary.attention_factor is None else {"attention_factor": rotary.attention_factor}
    if config.window_rotary_base is None:
        return values
    return {
        "full_attention": values,
        "sliding_attention": {"rope_type": "default", "rope_theta": config.window_rotary_base},
    }


def write_body_config(architecture: str, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json for one of `BODIES`."""
    return {**write_config(BODIES[architecture], config), "architectures": [architecture]}


def body_rows(architecture: str, config: LlamaConfig) -> list[Row]:
    """Returns the table of names of one of `BODIES`, whose tensors have no prefix."""
    body = rows(BODIES[architecture], dataclasses.replace(config, is_tied=True))
    body = [dataclasses.replace(row, tensor=row.tensor.removeprefix("model.")) for row in body]
    return under("llama", "", body)


def read_classifier_config(architecture: str, fields: Fields) -> LlamaConfig:
    """Returns the configuration for the fields of a folder with one of `CLASSIFIERS`."""
    config = read_config(CLASSIFIERS[architecture], fields)
    return dataclasses.replace(config, **fields.classifier_options())


def write_classifier_config(architecture: str, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json for one of `CLASSIFIERS`."""
    body = write_config(CLASSIFIERS[architecture], config)
    return {**body, "architectures": [architecture], **classifier_fields(config)}


def classifier_rows(architecture: str, config: LlamaConfig) -> list[Row]:
    """Returns the table of names of one of `CLASSIFIERS`."""
    body = rows(CLASSIFIERS[architecture], dataclasses.replace(config, is_tied=True))
    return [*under("llama", "", body), linear("classifier/kernel", "score.weight")]


def fits(architecture: str, config: LlamaConfig) -> bool:
    """Returns whether a folder can express a configuration: writing and then reading it gives an equal one."""
    try:
        fields = Fields(write_config(architecture, config), architecture)
        return _normalized(read_config(architecture, fields)) == _normalized(config)
    except (UserError, ValueError, KeyError, ArithmeticError):
        return False


def _attention_scale(config: LlamaConfig) -> float:
    """Returns the factor of the logits; 1 / sqrt(head size) by default."""
    return config.head_size**-0.5 if config.attention_scale is None else config.attention_scale


def _normalized(config: LlamaConfig) -> LlamaConfig:
    """Returns the configuration with the values of `read_config` for options that do not change the outputs."""
    experts = ExpertsConfig(every=1)
    if config.experts.num_experts:
        of_training = ("capacity_factor", "num_groups", "load_balancing", "router_z_loss")
        experts = dataclasses.replace(
            config.experts,
            is_normalized=config.experts.has_normalized_weights,
            d_ff=None if config.experts.d_ff == config.d_ff else config.experts.d_ff,
            **{name: getattr(experts, name) for name in of_training},
        )
    return dataclasses.replace(
        config,
        experts=experts,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        d_k=None if config.head_size * config.num_heads == config.d_model else config.d_k,
        attention_scale=_attention_scale(config),
        labels=(),
        problem_type=None,
        dropout_rate=0.0,
        dtype="float32",
        remat="none",
        unroll=False,
    )


def rows(architecture: str, config: LlamaConfig) -> list[Row]:
    """Returns the table of names, with separate rows for each layer of the pattern that the layers repeat."""
    layers: list[Row] = []
    for stack, indices, period in config.stacks:
        for kind, index in enumerate(indices[:period]):
            path = stack if period == 1 else f"{stack}/layers/{kind}"
            of_kind = _layer_rows(architecture, config, path, index)
            layers += [dataclasses.replace(row, first_layer=index, layer_step=period) for row in of_kind]
    output = [] if config.is_tied else [table("output_embedding/table", "lm_head.weight")]
    return [
        table("embedding/table", "model.embed_tokens.weight"),
        *layers,
        *_norm_rows(config, "norm", "model.norm"),
        *output,
    ]


def _norm_rows(config: LlamaConfig, path: str, tensor: str) -> list[Row]:
    """Returns the rows of a norm, which has a bias if it is a layer norm."""
    return norm(path, tensor) if config.norm_kind == "layer" else [vector(f"{path}/scale", f"{tensor}.weight")]


def _expert_rows(architecture: str, config: LlamaConfig, path: str, tensor: str) -> list[Row]:
    """Returns the rows of the router, the experts and the shared network of a layer.

    In gpt-oss one tensor holds all experts, in other architectures each expert has its own tensors.
    """
    if architecture == "GptOssForCausalLM":
        tensor = f"{tensor}.mlp"
        stacked: dict[str, Any] = {"num_batch_axes": 1}
        rows = [
            linear(f"{path}/router", f"{tensor}.router.weight"),
            vector(f"{path}/router_bias", f"{tensor}.router.bias"),
            Row(f"{path}/experts/down", f"{tensor}.experts.down_proj", 1, **stacked),
            vector(f"{path}/experts/down_bias", f"{tensor}.experts.down_proj_bias", **stacked),
        ]
        for index, name in enumerate(("up", "gate")):
            half = {**stacked, "part": (index, 2), "is_interleaved": True}
            rows.append(Row(f"{path}/experts/{name}", f"{tensor}.experts.gate_up_proj", 1, **half))
            rows.append(vector(f"{path}/experts/{name}_bias", f"{tensor}.experts.gate_up_proj_bias", **half))
        return rows
    names = {"up": "gate_proj", "gate": "up_proj", "down": "down_proj"}
    tensor = f"{tensor}.mlp"
    if architecture == "MixtralForCausalLM":
        names = {"up": "w1", "gate": "w3", "down": "w2"}
        tensor = tensor.replace(".mlp", ".block_sparse_moe")
    networks = {"experts": "experts.{}"}
    if config.experts.shared_d_ff:
        networks["shared"] = "shared_expert" if architecture in _QWEN_EXPERTS else "shared_experts"
    bias = [vector(f"{path}/correction_bias", f"{tensor}.gate.e_score_correction_bias")]
    gate = [linear(f"{path}/shared_gate/kernel", f"{tensor}.shared_expert_gate.weight")]
    return [
        linear(f"{path}/router", f"{tensor}.gate.weight"),
        *(bias if config.experts.use_correction_bias else []),
        *(gate if config.experts.use_shared_gate else []),
        *(
            linear(f"{path}/{our}/{matrix}", f"{tensor}.{theirs}.{name}.weight")
            for our, theirs in networks.items()
            for matrix, name in names.items()
        ),
    ]


def _layer_rows(architecture: str, config: LlamaConfig, path: str, index: int) -> list[Row]:
    """Returns the rows of the layers at `path`, the first of which is layer `index` of the model."""
    tensor, attention, feed_forward = "model.layers.{}", f"{path}/self_attention", f"{path}/feed_forward"
    if architecture in _EXTENSIONS:
        name = config.attention.names[index % len(config.attention.names)]
        rows = _EXTENSIONS[architecture].attention_rows(config, name, attention, tensor)
    else:
        rows = _attention_rows(architecture, config, attention, f"{tensor}.self_attn")
    if config.has_experts(index):
        rows += _expert_rows(architecture, config, feed_forward, tensor)
    else:
        rows.append(linear(f"{feed_forward}/down", f"{tensor}.mlp.down_proj.weight"))
        # The activation is applied to their gate and to our up.
        for half, (name, theirs) in enumerate((("up", "gate_proj"), ("gate", "up_proj"))):
            row = linear(f"{feed_forward}/{name}", f"{tensor}.mlp.{theirs}.weight")
            if architecture == "Phi3ForCausalLM":  # one matrix for both
                outputs = range(half * config.d_ff, (half + 1) * config.d_ff)
                row = linear(f"{feed_forward}/{name}", f"{tensor}.mlp.gate_up_proj.weight")
                row = dataclasses.replace(row, outputs=outputs, num_outputs=2 * config.d_ff)
            rows.append(row)
    output_norms = {
        "self_attention_residual": "post_attention_layernorm",
        "feed_forward_residual": "post_feedforward_layernorm",
    }
    input_norms = {"self_attention_residual": "input_layernorm"}
    if not config.is_parallel:
        input_norms["feed_forward_residual"] = (
            "pre_feedforward_layernorm" if config.norms == "both" else "post_attention_layernorm"
        )
    if config.norms != "output":
        for branch, name in input_norms.items():
            rows += _norm_rows(config, f"{path}/{branch}/norm", f"{tensor}.{name}")
    if config.norms != "pre":
        for branch, name in output_norms.items():
            rows += _norm_rows(config, f"{path}/{branch}/output_norm", f"{tensor}.{name}")
    return rows


def _attention_rows(architecture: str, config: LlamaConfig, path: str, tensor: str) -> list[Row]:
    """Returns the rows of the attention at `path`; `tensor` is the start of the tensors' names."""
    rows = [linear(f"{path}/out/kernel", f"{tensor}.o_proj.weight", 2)]
    sizes = {"query": config.num_heads, "key": config.num_kv_heads or config.num_heads}
    sizes["value"] = sizes["key"]
    if architecture == "Phi3ForCausalLM":  # one matrix for query, key and value
        total, start = sum(sizes.values()) * config.head_size, 0
        for name, heads in sizes.items():
            stop = start + heads * config.head_size
            row = linear(f"{path}/{name}/kernel", f"{tensor}.qkv_proj.weight")
            rows.append(dataclasses.replace(row, outputs=range(start, stop), num_outputs=total))
            start = stop
    else:
        rows += [linear(f"{path}/{name}/kernel", f"{tensor}.{name[0]}_proj.weight") for name in sizes]
        if config.use_qkv_bias:
            rows += [vector(f"{path}/{name}/bias", f"{tensor}.{name[0]}_proj.bias") for name in sizes]
    if config.use_sinks:
        rows.append(vector(f"{path}/sinks", f"{tensor}.sinks"))
    if config.use_out_bias:
        rows.append(vector(f"{path}/out/bias", f"{tensor}.o_proj.bias"))
    if config.qk_norm != "none":
        their_norm = "layernorm.norms.{}" if config.qk_norm == "each" else "norm"
        rows += [
            vector(f"{path}/{name}_norm/scale", f"{tensor}.{name[0]}_{their_norm}.weight") for name in ("query", "key")
        ]
    return rows
