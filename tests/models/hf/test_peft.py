"""Low-rank adapters against PEFT, on nets of transformers with random weights: theirs read here, ours read there."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.hf.folders import assert_refused, redrawn
from tests.nn.programs import jitted, normal
from tfx_jax.models import hf
from tfx_jax.nn import LoraConfig, adapt, merged
from tfx_jax.nn.lora import adapters_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

B, T, V = 3, 9, 97
TOKENS = np.random.default_rng(0).integers(3, V, (B, T))
LLAMA = {"vocab_size": V, "max_position_embeddings": 32, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
GPT = {"vocab_size": V, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
DEEPSEEK = LLAMA | {"num_key_value_heads": 4, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 20, "topk_group": 1, "kv_lora_rank": 12, "q_lora_rank": 10}
DEEPSEEK |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1}
BERT = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# A class, its sizes, the modules that PEFT adapts, and our targets.
NETS = {
    "Llama": ("LlamaForCausalLM", LLAMA, ["q_proj", "v_proj", "down_proj"], "query|value|down"),
    "Phi3": ("Phi3ForCausalLM", LLAMA, ["qkv_proj", "gate_up_proj"], "query|value|gate"),
    "Mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 3}, ["q_proj", "o_proj"], "query|out"),
    "DeepSeek": ("DeepseekV3ForCausalLM", DEEPSEEK, ["q_b_proj", "kv_a_proj_with_mqa"], "query|key|value"),
    "GPT2": ("GPT2LMHeadModel", GPT, ["c_attn", "c_fc"], "query|key|feed_forward/up"),
    "Bert": (
        "BertForSequenceClassification",
        BERT | {"num_labels": 4},
        ["query", "intermediate.dense"],
        "query|value|out",
    ),
}


@pytest.fixture(scope="module", params=NETS)
def net(request):
    return NETS[request.param]


@pytest.fixture(scope="module")
def theirs(net):
    torch.manual_seed(0)
    cls = getattr(transformers, net[0])
    return redrawn(cls(cls.config_class(**net[1], attn_implementation="eager")))


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def redraw_magnitudes(adapted):
    """Draws the magnitudes of DoRA, which start with the norms that the columns have anyway."""
    generator = torch.Generator().manual_seed(1)
    for name, param in adapted.named_parameters():
        if "lora_magnitude_vector" in name:
            param.data *= 1 + 0.3 * torch.randn(param.shape, generator=generator)


def adapted_copy(ours, config):
    """Returns a copy of our model with adapters that change its outputs."""
    model = nnx.clone(ours)
    adapt(model, config, seed=1)
    for number, adapter in enumerate(adapters_of(model).values()):
        adapter.b[...] = jax.device_put(normal(number, *adapter.b.shape) * np.float32(0.3))
        if adapter.magnitude is not None:
            adapter.magnitude[...] *= 1 + np.float32(0.3) * normal(number, *adapter.magnitude.shape)
    return model


def ours_of(model):
    result = jitted(lambda model: model(TOKENS))(model)
    return np.asarray(result[0] if isinstance(result, tuple) else result)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.compiles(40, "PEFT and we start adapters eagerly")
def test_what_peft_saves_we_merge(net, theirs, their_folder, tmp_path, use_dora):
    again = type(theirs).from_pretrained(their_folder, attn_implementation="eager")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=net[2],
        init_lora_weights=False,
        use_rslora=True,
        rank_pattern={net[2][0]: 2},
        fan_in_fan_out="GPT2" in net[0],
        use_dora=use_dora,
    )
    adapted = peft.get_peft_model(again, config).eval()
    redraw_magnitudes(adapted)
    adapted.save_pretrained(tmp_path)
    want = logits_of(adapted)
    assert np.abs(want - logits_of(theirs)).max() > 1e-2
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(their_folder)}))
    np.testing.assert_allclose(ours_of(hf.load(tmp_path)), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.compiles(60, "adapters are drawn eagerly")
def test_what_we_save_peft_reads(net, theirs, ours, their_folder, tmp_path, use_dora):
    model = adapted_copy(ours, LoraConfig(4, 6.0, net[3], use_dora))
    want = ours_of(model)
    assert np.abs(want - ours_of(ours)).max() > 1e-2
    np.testing.assert_allclose(ours_of(merged(model)), want, atol=1e-5 * np.abs(want).max())
    hf.save_adapter(model, tmp_path, base=str(their_folder))
    again = type(theirs).from_pretrained(their_folder, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    np.testing.assert_allclose(logits_of(adapted), want, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(ours_of(hf.load(tmp_path)), want, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(logits_of(adapted.merge_and_unload()), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("net", ["Llama", "GPT2"], indirect=True)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.compiles(60, "adapters are drawn eagerly")
def test_gradients_of_adapters_are_those_of_peft(net, theirs, ours, their_folder, tmp_path, use_dora):
    model = adapted_copy(ours, LoraConfig(4, 6.0, "query|down", use_dora))
    hf.save_adapter(model, tmp_path, base=str(their_folder))
    again = type(theirs).from_pretrained(their_folder, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(again, tmp_path, is_trainable=True).eval()
    weights = normal(7, B, T, V)
    (adapted(torch.tensor(TOKENS)).logits * torch.tensor(np.asarray(weights))).sum().backward()
    want = {name: param.grad.numpy() for name, param in adapted.named_parameters() if param.grad is not None}
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    total = jitted(lambda params: (nnx.merge(graphdef, params, others)(TOKENS) * weights).sum())
    gradients = nnx.merge(graphdef, jitted(jax.grad(total))(params), others)
    modules = (
        {"query": ("c_attn", "attn"), "down": ("c_proj", "mlp")}
        if "GPT" in net[0]
        else {"query": ("q_proj", "self_attn"), "down": ("down_proj", "mlp")}
    )
    for path, gradient in adapters_of(gradients).items():
        our_name = "query" if "query" in path else "down"
        module, owner = modules[our_name]
        for layer in range(2):
            of_layer = {
                name.split(".lora_")[1]: grad
                for name, grad in want.items()
                if f".{layer}.{owner}.{module}.lora" in name
            }
            assert len(of_layer) == 2 + use_dora
            a, b = of_layer["A.default.weight"].T, of_layer["B.default.weight"].T
            ours_a, ours_b = gradient.a[layer].reshape(a.shape), gradient.b[layer].reshape(4, -1)
            num_outputs = ours_b.shape[1]  # the query is the first part of GPT-2's c_attn
            pairs = [(ours_a, a), (ours_b, b[:, :num_outputs])]
            if use_dora:
                magnitude = of_layer["magnitude_vector.default.weight"].reshape(-1)
                pairs.append((gradient.magnitude[layer].reshape(-1), magnitude[:num_outputs]))
            for result, expected in pairs:
                assert np.abs(expected).max() > 1e-3
                np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which also changed the matrices below"),
        ({"init_lora_weights": "olora", "target_modules": ["c_proj"]}, "init_lora_weights is 'olora', which also"),
        ({"modules_to_save": ["wte"]}, "replaces transformer.wte.weight but not .* they are one shared parameter"),
    ],
)
def test_what_peft_changed_outside_of_the_adapter_is_refused(tmp_path, options, message):
    """Some starts change the frozen matrices, and a trained embedding is no longer the output layer."""
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
    net.save_pretrained(tmp_path / "base")
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, **options}
    peft.get_peft_model(net, peft.LoraConfig(r=2, **options)).save_pretrained(tmp_path / "adapter")
    change = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    change["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(change))
    assert_refused(tmp_path / "adapter", message)


def test_a_trained_embedding_that_is_also_the_output_layer_is_merged(tmp_path):
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
    net.save_pretrained(tmp_path / "base")
    net = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")  # which PEFT names as the base
    config = peft.LoraConfig(
        target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte", "lm_head"], ensure_weight_tying=True
    )
    adapted = peft.get_peft_model(net, config)
    with torch.no_grad():
        next(param for name, param in adapted.named_parameters() if "wte.modules_to_save" in name).mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    np.testing.assert_allclose(ours_of(hf.load(tmp_path / "adapter")), logits_of(adapted.eval()), atol=1e-4)
