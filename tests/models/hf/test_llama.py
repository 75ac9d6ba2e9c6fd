"""Llama and its relatives against transformers, with random weights."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.hf.folders import (
    LEFT_OUT,
    assert_comes_back,
    assert_refused,
    assert_same,
    change_config,
    padded_on,
    redrawn,
)
from tests.nn.programs import draw, jitted, started
from tfx_jax.functional import greedy_search
from tfx_jax.models import Llama, LlamaBody, LlamaClassifier, LlamaConfig, hf
from tfx_jax.models.hf.folder import Fields
from tfx_jax.models.hf.llama import ARCHITECTURES, BODIES, CLASSIFIERS
from tfx_jax.models.llama import NormOfEachHead
from tfx_jax.nn import AttentionConfig, AttentionOptions, RotaryConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, T, V = 3, 11, 97
TOKENS = np.random.default_rng(0).integers(3, V, (B, T))
SIZES = {
    "vocab_size": V,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS = {**YARN, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GRANITE = {"embedding_multiplier": 12, "attention_multiplier": 0.7, "residual_multiplier": 0.22, "logits_scaling": 1.5}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
DEEPSEEK |= {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
DEEPSEEK |= {"num_hidden_layers": 2, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
ONE_GROUP = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
MSCALE = {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}
QWEN3_NEXT = {**MOE, "head_dim": 16, "shared_expert_intermediate_size": 28, "linear_num_key_heads": 2}
QWEN3_NEXT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
# Names of architectures without "ForCausalLM", and what differs from SIZES.
FOLDERS = {
    "Llama": {},
    "Llama heads of another size": {"head_dim": 16, "attention_bias": True},
    "Llama tied": {"tie_word_embeddings": True},
    "Llama llama3": {"rope_parameters": LLAMA3},
    "Llama yarn": {"rope_parameters": YARN},
    "Llama yarn with two factors": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "Llama linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "Mistral": {"sliding_window": 4},
    "Mistral without window": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 20},
    "Gemma3": {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Olmo2": {},
    "SmolLM3": {},
    "Phi3": {"sliding_window": None},
    "Phi3 half": {"rope_parameters": HALF},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral window": {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 4},
    "Qwen3Moe": {**MOE, "head_dim": 16, "norm_topk_prob": False},
    "Qwen3Moe every second": {**MOE, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 28},
    "Qwen2Moe every second": {
        **MOE,
        "shared_expert_intermediate_size": 28,
        "decoder_sparse_step": 2,
        "qkv_bias": False,
    },
    "GptOss": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 4},
    "GptOss yarn": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": GPT_OSS, "swiglu_limit": 0.5},
    "Granite": GRANITE,
    "Granite without multipliers": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "StableLm": {"use_qkv_bias": True},
    "StableLm norms of heads": {"qk_layernorm": True, "rope_parameters": HALF, "tie_word_embeddings": True},
    "StableLm parallel": {"use_parallel_residual": True},
    "StableLm 2": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    "DeepseekV2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "DeepseekV2 one group": {**DEEPSEEK, **ONE_GROUP, **MSCALE},
    "DeepseekV3": {**DEEPSEEK, "num_hidden_layers": 5, "first_k_dense_replace": 2},
    "DeepseekV3 one group": {**DEEPSEEK, **ONE_GROUP, **MSCALE, "norm_topk_prob": False},
    "Qwen3Next": QWEN3_NEXT,
    "Qwen3Next dense networks": {
        **QWEN3_NEXT,
        "num_experts": 0,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2,
    },
    "StableLm whole heads": {"rope_parameters": {**HALF, "partial_rotary_factor": 1.0}},
}


@pytest.fixture(scope="module", params=FOLDERS)
def theirs(request):
    torch.manual_seed(0)
    name = request.param.split()[0]
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")(
        **SIZES | FOLDERS[request.param]
    )
    return redrawn(getattr(transformers, f"{name}ForCausalLM")(config))


def logits_of(model, tokens=TOKENS, **options):
    with torch.no_grad():
        options = {name: torch.tensor(value) for name, value in options.items()}
        return model(torch.tensor(tokens), **options).logits.numpy()


def test_logits(theirs, ours):
    want = logits_of(theirs)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(jitted(lambda model: model(TOKENS))(ours), want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(theirs, ours, side):
    token_mask, positions = padded_on(side, (B, T))
    want = logits_of(theirs, attention_mask=token_mask.astype(int), position_ids=positions)
    got = jitted(lambda model, token_mask: model(TOKENS, token_mask=token_mask))(ours, token_mask)
    np.testing.assert_allclose(got[token_mask], want[token_mask], atol=1e-4 * np.abs(want).max())


def test_greedy_generation(theirs, ours):
    """Of prompts of three lengths, padded on the left."""
    lengths = np.array([6, 1, 3])
    mask = np.arange(6)[None] >= 6 - lengths[:, None]
    prompts = np.where(mask, TOKENS[:, :6], 0)
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor(prompts), attention_mask=torch.tensor(mask).long(), max_new_tokens=20, do_sample=False
        )[:, 6:].numpy()

    @jitted
    def search(model):
        step_fn, cache, start = started(model.decoder(), prompts, mask, max_length=21)
        return greedy_search(step_fn, cache, start, max_length=21, eos_id=2, pad_id=-1)[0]

    got = np.asarray(search(ours))
    np.testing.assert_array_equal(np.where(got < 0, 0, got)[:, : found.shape[1]], found)
    assert len(np.unique(got)) > 3


def test_what_we_save_they_load(theirs, ours, tmp_path):
    hf.save(ours, tmp_path)  # as a Llama where that is the same function
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tensors, want = again.state_dict(), theirs.state_dict()
    if type(theirs).__name__ != "Phi3ForCausalLM":  # which has joined matrices
        assert tensors.keys() == want.keys()
        assert all(torch.equal(tensors[name], want[name]) for name in want)
    want = logits_of(theirs)  # ours come back without "eager", which rounds otherwise
    np.testing.assert_allclose(logits_of(again), want, atol=1e-5 * np.abs(want).max())


def test_a_granite_comes_back_bit_for_bit(tmp_path):
    """With the scale of the attention logits that a model has which does not name one."""
    config = LlamaConfig(
        V, 64, 2, 32, 4, num_kv_heads=2, d_ff=48, embedding_scale=12.0, residual_scale=0.22, logits_divisor=3.0
    )
    model = draw(lambda: Llama(config, rngs=nnx.Rngs(0)))
    hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    assert again.config == dataclasses.replace(config, attention_scale=8**-0.5)
    assert_comes_back(again, tmp_path)
    assert_same(again, model)


@pytest.mark.parametrize("divisor", [0, -1.0])
def test_logits_are_not_divided_by_zero(tmp_path, divisor):
    net = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES | GRANITE))
    net.save_pretrained(tmp_path)
    change_config(tmp_path, logits_scaling=divisor)
    assert_refused(tmp_path, r"config.json: logits_divisor must be above 0, got")


@pytest.mark.parametrize(
    ("folder", "fields", "message"),
    [
        (
            "Gemma3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters: sliding_attention is {'rope_type': 'linear', 'factor': 2.0}, but only a rope_theta is",
        ),
        (
            "Gemma3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 2 entries for num_hidden",
        ),
        (
            "Gemma3",
            {"layer_types": ["sliding_attention", "chunked"] * 2},
            "layer_types is 'chunked', but only sliding_",
        ),
        (
            "Gemma3",
            {"layer_types": LEFT_OUT, "sliding_window_pattern": 0},
            "sliding_window_pattern is 0: need a number",
        ),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "rope_parameters: sliding_attention is {'type': 'linear', 'factor': 2.0}, but only a rope_theta is",
        ),
        (
            "Gemma3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters has no full_attention and no sliding_attention, as a Gemma 3 needs",
        ),
        ("Gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0, not above 0"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: need a number above 0"),
        (
            "SmolLM3",
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4, "use_sliding_window": False},
            "layer_types has sliding_attention, but use_sliding_window is false",
        ),
        ("GptOss", {"head_dim": 7}, "rotary positions rotate pairs of features, but a head has 7: set an even size"),
        ("Llama", {"rope_scaling": YARN}, "rope_parameters and rope_scaling differ: leave one of them out"),
        ("StableLm", {"head_dim": 16}, "head_dim is 16, but only 8 is supported"),
        (
            "StableLm",
            {"rope_parameters": {"partial_rotary_factor": 0.4}},
            "is 0.4, which is no even number of a head's",
        ),
        ("Phi3", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "is 0.4, which is no even number of a head's"),
        (
            "Llama",
            {"partial_rotary_factor": 0.5},
            "is 0.5, but only Phi3ForCausalLM, StableLmForCausalLM, Qwen3NextForCausalLM have it",
        ),
    ],
)
def test_options_that_are_refused(tmp_path, folder, fields, message):
    net = getattr(transformers, f"{folder}ForCausalLM")
    net(net.config_class(**SIZES | {"pad_token_id": 0})).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
            "mscale is 1.0 and mscale_all_dim 0.7, but",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.7}}, "mscale is None and"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but only 'sigmoid' is supported"),
        ({"attention_bias": True}, "attention_bias is True, but only False is supported"),
        ({"rope_interleave": False}, "rope_interleave is False, but only True is supported"),
        ({"head_dim": 8}, "head_dim is 8, but only 4 is supported"),
        ({"topk_method": "random"}, "topk_method is 'random', but only noaux_tc are supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', but only noaux_tc are supported"),
        ({"topk_group": 1}, r"config.json: experts: 1 groups of 2 experts are too few for 3 experts of a token"),
        ({"num_hidden_layers": 1}, "there is a tensor model.layers.1.* for which the model has no place"),
    ],
)
def test_deepseeks_that_are_refused(tmp_path, fields, message):
    """The last is how layers that predict more tokens look: they follow those of the model."""
    config = transformers.DeepseekV3Config(**SIZES | DEEPSEEK)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        ({"attention_bias": True}, "attention_bias is True, but only False is supported"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types is 'sliding_attention', but only linear_attention, full",
        ),
        ({"linear_num_key_heads": 3}, "recurrent.num_key_heads=3 does not divide recurrent.num_heads=4"),
        (
            {"num_hidden_layers": 2, "layer_types": LEFT_OUT},
            "there is a tensor model.layers.2.* the model has no place",
        ),
    ],
)
def test_qwen3_nexts_that_are_refused(tmp_path, fields, message):
    config = transformers.Qwen3NextConfig(**SIZES | QWEN3_NEXT)
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)


def test_without_kinds_of_layers_every_fourth_of_a_qwen3_next_has_dense_attention(tmp_path):
    config = transformers.Qwen3NextConfig(**SIZES | QWEN3_NEXT)
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    change_config(tmp_path, layer_types=LEFT_OUT)
    assert hf.load(tmp_path).config.attention.names == ["gated_delta_rule"] * 3 + ["dense"]


@pytest.mark.parametrize(
    ("name", "options", "attention"),
    [
        ("Mistral", {}, "window,dense"),
        ("Phi3", {}, "window"),
        ("Qwen3Moe", {**MOE, "use_sliding_window": True}, "window"),
    ],
)
def test_kinds_of_layers_count_where_transformers_reads_them(tmp_path, name, options, attention):
    """transformers makes a Ministral of a Mistral with kinds, and ignores those of the others."""
    config = getattr(transformers, f"{name}Config")(**SIZES | {"sliding_window": 4, **options})
    redrawn(getattr(transformers, f"{name}ForCausalLM")(config)).save_pretrained(tmp_path)
    change_config(tmp_path, layer_types=["sliding_attention", "full_attention"] * 2)
    ours = hf.load(tmp_path)
    assert ours.config.attention.name == attention
    want = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    np.testing.assert_allclose(jitted(lambda model: model(TOKENS))(ours), want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Gemma", {"hidden_act": "relu", "hidden_activation": "silu"}),
        ("Gemma", {"hidden_act": "gelu"}),
        ("Mistral", {"rope_local_base_freq": 50.0, "use_sliding_window": False, "layer_types": LEFT_OUT}),
        ("SmolLM3", {"use_sliding_window": LEFT_OUT, "layer_types": LEFT_OUT}),
        ("Gemma3", {"attn_logit_softcapping": 0.5}),
        ("Gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}),
    ],
)
def test_fields_that_only_some_architectures_read(tmp_path, name, fields):
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")
    net = redrawn(getattr(transformers, f"{name}ForCausalLM")(config(**SIZES | {"sliding_window": 4})))
    net.save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    want = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    got = jitted(lambda model: model(TOKENS))(hf.load(tmp_path))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_a_rotary_key_is_no_larger_than_a_query():
    config = LlamaConfig(V, 64, 1, 32, 4, attention=AttentionConfig("latent", AttentionOptions(rope_size=9)))
    with pytest.raises(ValueError, match="rope_size=9 must be at most the size of a head, d_k=8"):
        Llama(config, rngs=nnx.Rngs(0))


def test_without_a_share_a_stablelm_rotates_a_quarter_of_a_head(tmp_path):
    transformers.StableLmForCausalLM(transformers.StableLmConfig(**SIZES)).save_pretrained(tmp_path)
    change_config(tmp_path, rope_parameters=LEFT_OUT, partial_rotary_factor=LEFT_OUT)
    assert hf.load(tmp_path).config.rotary == RotaryConfig(fraction=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_kind": "layer", "norm_scale_offset": 1.0}, "norm_scale_offset=1.0 is for RMS norms"),
        ({"is_parallel": True, "norms": "both"}, "is_parallel is for norms='pre', got norms='both'"),
        ({"attention_soft_cap": 0.0}, "attention_soft_cap must be above 0, or None for no cap, got 0.0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be above 0, or None for no cap, got -1.0"),
    ],
)
def test_norms_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**options).validate()


def test_norms_of_each_head_with_an_offset():
    """Scales of their own, to which RMS norms add 1."""
    config = LlamaConfig(V, 64, 1, 32, 4, norm_scale_offset=1.0, qk_norm="each")
    norm = draw(lambda: NormOfEachHead(config, 4, config.head_size))
    x = np.random.default_rng(1).normal(size=(B, T, 4, 8)).astype(np.float32)
    scales = np.asarray(norm.scale[...], np.float64)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-5) * (1 + scales)
    np.testing.assert_allclose(jitted(lambda norm: norm(x))(norm), want, atol=1e-5)


@pytest.mark.parametrize("multiplier", [0.0, 1e-200])
def test_a_scale_that_has_no_inverse_square_is_saved(tmp_path, multiplier):
    """Gemma's folders have the inverse square of the scale."""
    config = LlamaConfig(V, 64, 1, 32, 4, num_kv_heads=2, d_ff=48, attention_scale=multiplier)
    assert_comes_back(draw(lambda: Llama(config, rngs=nnx.Rngs(0))), tmp_path)


@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 32}])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize(
    "parameters",
    [
        {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"},
        LLAMA3,
        YARN,
        {**YARN, "factor": None},
    ],
)
def test_lengths_and_factors_of_rotary_positions(name, parameters, beside):
    """Those that are missing, and those beside "rope_parameters"."""
    if name == "Gemma3":
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "default"}}
    values = {"max_position_embeddings": 64, "head_dim": 32, "rope_parameters": parameters, **beside}
    kind = "full_attention" if name == "Gemma3" else None
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config").from_dict(copy.deepcopy(values))
    rope_type = (config.rope_parameters[kind] if kind else config.rope_parameters)["rope_type"]
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    want, factor = compute(config, "cpu", layer_type=kind)
    ours = hf.FAMILIES[f"{name}ForCausalLM"].read_config(Fields(values, "config.json")).rotary
    got = ours.frequencies(32)
    np.testing.assert_allclose(got[0], want, rtol=1e-5)
    assert got[1] == pytest.approx(factor)


SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [1.0, 4.0, 6.0, 9.0]
BY_LENGTH = {
    "Llama": {
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
    "Phi3": {
        "max_position_embeddings": 32,
        "original_max_position_embeddings": 8,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG},
    },
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_positions_that_depend_on_the_length(name, tmp_path):
    """The frequencies change after eight tokens: of texts that are read at once, and of each prefix in decoding."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | BY_LENGTH[name])
    theirs = redrawn(getattr(transformers, f"{name}ForCausalLM")(config))
    theirs.save_pretrained(tmp_path)
    ours = hf.load(tmp_path)
    assert ours.config.max_length == 32
    wants = [logits_of(theirs, TOKENS[:, :length]) for length in range(5, T + 1)]
    mask = np.arange(T)[None] < np.array([5, 8, T])[:, None]

    @jitted
    def run(model):
        step_fn, cache, token = started(model.decoder(), TOKENS[:, :5], max_length=T - 4)
        steps = []
        for t in range(5, T + 1):
            out, cache = step_fn(token, cache)
            steps.append(out)
            token = jnp.asarray(TOKENS[:, min(t, T - 1)])
        return model(TOKENS), model(TOKENS[:, :8]), model(TOKENS, token_mask=mask), steps

    long, short, padded, steps = run(ours)
    close = functools.partial(np.testing.assert_allclose, atol=1e-4 * np.abs(wants[-1]).max())
    close(long, wants[-1])
    close(short, wants[3])
    assert np.abs(wants[-1][:, :8] - wants[3]).max() > 1e-2  # of the same tokens in a longer text
    for row, length in enumerate(mask.sum(axis=1)):
        close(padded[row, :length], wants[length - 5][row])
    for step, want in zip(steps, wants, strict=True):
        close(step, want[:, -1])
    again = tmp_path / "again"
    hf.save(ours, again)
    close(logits_of(transformers.AutoModelForCausalLM.from_pretrained(again).eval()), wants[-1])
    assert hf.load(again).config == ours.config


@pytest.mark.parametrize("architecture", [*BODIES, *CLASSIFIERS])
def test_bodies_and_classifiers(architecture, tmp_path):
    """Of texts alone, and with padding on either side."""
    torch.manual_seed(0)
    cls, base = getattr(transformers, architecture), (BODIES | CLASSIFIERS)[architecture]
    name = base.removesuffix("ForCausalLM")
    kind = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")
    net = redrawn(cls(kind(**SIZES | FOLDERS[name], num_labels=4)))
    net.save_pretrained(tmp_path)
    ours = hf.load(tmp_path)
    masks = np.stack([np.ones((B, T), bool), *(padded_on(side, (B, T))[0] for side in ("left", "right"))])
    run = jitted(lambda model, mask: model(TOKENS, token_mask=mask))
    for mask in masks:
        got = run(ours, mask)
        for row in range(B):
            with torch.no_grad():
                output = net(torch.tensor(TOKENS[row, mask[row]][None]))
            want = output[0][0].numpy()
            own = got[row, mask[row]] if architecture in BODIES else got[row]
            np.testing.assert_allclose(own, want, atol=1e-4 * np.abs(want).max())
    hf.save(ours, tmp_path / "ours", fields={"architectures": [architecture]})
    again = hf.load(tmp_path / "ours")
    assert again.config == ours.config
    assert_same(again, ours)
    theirs, info = cls.from_pretrained(tmp_path / "ours", output_loading_info=True, attn_implementation="eager")
    assert not any(info.values())
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
def test_a_body_is_read_from_a_folder_with_a_head(architecture, tmp_path):
    cls = hf.FAMILIES[architecture].model
    config = LlamaConfig(V, 64, 2, 32, 4, num_kv_heads=2, d_ff=48, labels=("a", "b"))
    model = draw(lambda: cls(config, rngs=nnx.Rngs(0)))
    hf.save(model, tmp_path)
    body = hf.load(tmp_path, architecture="LlamaModel")
    llama = getattr(model, "llama", model)
    for name in ("embedding", "decoder_layers", "norm"):
        assert_same(getattr(body.llama, name), getattr(llama, name))


def test_a_classifier_needs_labels():
    with pytest.raises(ValueError, match="a classifier needs labels, got none"):
        LlamaClassifier(LlamaConfig(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("cls", [LlamaBody, LlamaClassifier])
def test_too_many_tokens(cls):
    model = draw(lambda: cls(LlamaConfig(V, T - 1, 1, 8, 2, d_ff=8, labels=("a",)), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=f"a sequence must have at most max_length={T - 1} tokens, got {T}"):
        model(TOKENS)


def test_every_architecture_is_compared():
    assert {f"{name.split()[0]}ForCausalLM" for name in FOLDERS} == set(ARCHITECTURES)


def test_steps_equal_teacher_forcing(ours):
    @jitted
    def both(model):
        step_fn, cache, token = started(model.decoder(), TOKENS[:, :4], max_length=7)
        logits = []
        for t in range(4, T):
            out, cache = step_fn(token, cache)
            logits.append(out)
            token = jnp.asarray(TOKENS[:, t])
        return jnp.stack(logits, axis=1), model(TOKENS)[:, 3:-1]

    got, want = jax.device_get(both(ours))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
