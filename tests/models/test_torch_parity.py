"""The same numbers as PyTorch's own modules with the same weights."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted
from tfx_jax.models import Transformer, TransformerConfig
from tfx_jax.nn import MultiHeadAttention

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

B, S, T, D, N, F, L, V = 3, 7, 5, 24, 4, 40, 3, 31


def _randomize(module):
    """Draws every parameter, the biases and gains too, which PyTorch starts at 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))
    return module


def _array(tensor):
    return tensor.detach().numpy()


def _linear(weight, bias):
    return {"kernel": _array(weight).T, "bias": _array(bias)}


def _norm(norm):
    return {"scale": _array(norm.weight), "bias": _array(norm.bias)}


def _attention(module):
    """PyTorch keeps heads merged, and the three input projections in one matrix unless their widths differ."""
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    params = {
        name: {"kernel": _array(weight).T.reshape(weight.shape[1], N, -1), "bias": _array(bias).reshape(N, -1)}
        for name, weight, bias in zip(("query", "key", "value"), weights, module.in_proj_bias.chunk(3), strict=True)
    }
    out = _linear(module.out_proj.weight, module.out_proj.bias)
    return params | {"out": out | {"kernel": out["kernel"].reshape(N, -1, module.embed_dim)}}


def _layer(layer):
    up, down = _linear(layer.linear1.weight, layer.linear1.bias), _linear(layer.linear2.weight, layer.linear2.bias)
    feed_forward = {"up": up["kernel"], "up_bias": up["bias"], "down": down["kernel"], "down_bias": down["bias"]}
    sublayers = {"self_attention": _attention(layer.self_attn)}
    if hasattr(layer, "multihead_attn"):
        sublayers["cross_attention"] = _attention(layer.multihead_attn)
    sublayers["feed_forward"] = feed_forward
    norms = [getattr(layer, f"norm{index + 1}") for index in range(len(sublayers))]
    return sublayers | {f"{name}_residual": {"norm": _norm(norm)} for name, norm in zip(sublayers, norms, strict=True)}


def _stack(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(_layer, layers))


def _with_params(make_module, params):
    """Our module with these parameters: all of them, and none missing."""
    graphdef, abstract = nnx.split(nnx.eval_shape(make_module))
    shapes = jax.tree.map(np.shape, params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(abstract))
    return nnx.merge(graphdef, jax.tree.map(jax.device_put, params))


@pytest.mark.parametrize(("d_key_input", "d_value_input"), [(D, D), (10, 14)])
def test_multi_head_attention(d_key_input, d_value_input):
    theirs = _randomize(torch.nn.MultiheadAttention(D, N, kdim=d_key_input, vdim=d_value_input, batch_first=True))
    sizes = {"d_key_input": d_key_input, "d_value_input": d_value_input, "use_bias": True}
    ours = _with_params(lambda: MultiHeadAttention(D, N, **sizes, rngs=nnx.Rngs(0)), _attention(theirs))
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(B, *sizes)) for sizes in ((T, D), (S, d_key_input), (S, d_value_input))]
    inputs = [x.astype(np.float32) for x in inputs]
    may_attend = rng.random((T, S)) < 0.7
    may_attend[:, 0] = True
    want, want_weights = theirs(
        *map(torch.from_numpy, inputs), attn_mask=torch.from_numpy(~may_attend), average_attn_weights=False
    )
    mask = may_attend[None, None]
    out, weights = jitted(lambda layer, *inputs: layer(*inputs, mask=mask, return_weights=True))(ours, *inputs)
    np.testing.assert_allclose(out, _array(want), atol=1e-5)
    np.testing.assert_allclose(weights, _array(want_weights), atol=1e-6)


def _torch_stacks(pre_norm):
    """The two stacks of `torch.nn.Transformer`, the final normalization only where there is one in the paper's sense.

    Nested tensors, an optimization of evaluation, are off: asked for without success, PyTorch warns of them.
    """
    options = {"dim_feedforward": F, "dropout": 0.0, "batch_first": True, "norm_first": pre_norm}
    encoder_layer = torch.nn.TransformerEncoderLayer(D, N, **options)
    encoder = torch.nn.TransformerEncoder(encoder_layer, L, torch.nn.LayerNorm(D), enable_nested_tensor=False)
    model = torch.nn.Transformer(D, N, num_decoder_layers=L, custom_encoder=encoder, **options)
    if not pre_norm:  # PyTorch normalizes what is normalized already
        model.encoder.norm = model.decoder.norm = None
    return _randomize(model)


def _torch_logits(model, table, source, target):
    """Everything around the stacks by hand: scaled embeddings, sinusoids, shifted target, tied output."""

    def embed(tokens):
        rates = np.exp(-math.log(10_000) * np.arange(0, D, 2) / D)
        angles = np.arange(tokens.shape[1])[:, None] * rates
        positions = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(-1, D).astype(np.float32)
        return torch.from_numpy(table[tokens] * np.float32(math.sqrt(D)) + positions)

    inputs = np.concatenate([np.ones((B, 1), int), target[:, :-1]], axis=1)
    padding = torch.from_numpy(source == 0)
    hidden = model(
        embed(source),
        embed(inputs),
        tgt_mask=torch.triu(torch.ones(T, T, dtype=torch.bool), 1),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    return _array(hidden) @ table.T


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_transformer(pre_norm):
    theirs = _torch_stacks(pre_norm)
    rng = np.random.default_rng(1)
    table = rng.normal(0, D**-0.5, (V, D)).astype(np.float32)
    params = {
        "embedding": {"table": table},
        "encoder_layers": _stack(theirs.encoder.layers),
        "decoder_layers": _stack(theirs.decoder.layers),
    }
    if pre_norm:
        params |= {"encoder_norm": _norm(theirs.encoder.norm), "decoder_norm": _norm(theirs.decoder.norm)}
    config = TransformerConfig(
        vocab_size=V, num_layers=L, d_model=D, num_heads=N, d_ff=F, pre_norm=pre_norm, attention_bias=True
    )
    ours = _with_params(lambda: Transformer(config, rngs=nnx.Rngs(0)), params)

    source, target = rng.integers(3, V, (B, S)), rng.integers(3, V, (B, T))
    source[1, 4:] = source[2, 1:] = 0
    logits = jitted(lambda model, *texts: model(*texts))(ours, source, target)
    np.testing.assert_allclose(logits, _torch_logits(theirs, table, source, target), atol=1e-5)
