"""The same numbers as published packages in PyTorch, with random inputs.

constraints/oracles.txt has their versions, docs/attention.md the largest errors.
"""

import functools
import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from tfx_jax import functional

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

B, T, N, H, U = 2, 23, 4, 8, 6


def _normal(*shape, seed=0):
    return np.random.default_rng(sum(shape) + seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = _normal(B, T, N, H), _normal(B, T, N, H, seed=1), _normal(B, T, N, U)
GATE = _normal(B, T, N)


def _tensors(*arrays):
    """As [B, N, T, H], the layout of most packages."""
    return [torch.tensor(np.asarray(x)).swapaxes(1, 2) for x in arrays]


def _equals(function, want, *, query=QUERY, key=KEY, value=VALUE, **options):
    """Compares with `want`, a tensor [B, T, N, U], at the places where it is a number."""
    got = np.asarray(jax.jit(functools.partial(function, **options))(query, key, value))
    want = want.detach().numpy()
    np.testing.assert_allclose(np.where(np.isnan(want), np.nan, got), want, atol=5e-6, rtol=0)


def _flash_linear_attention(name):
    """The plain functions of flash-linear-attention, from their file: its packages import Triton."""
    spec = importlib.util.find_spec("fla")
    if spec is None or spec.origin is None:
        pytest.skip("needs flash-linear-attention")
    path = pathlib.Path(spec.origin).parent / "ops" / name / "naive.py"
    module_spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_gated_linear_attention_is_that_of_its_authors():
    gate = _normal(B, T, N, H, seed=2)
    log_decay = torch.nn.functional.logsigmoid(torch.tensor(gate)) / 4
    reference = _flash_linear_attention("gla").naive_recurrent_gla
    want, _ = reference(*map(torch.tensor, (QUERY, KEY, VALUE)), log_decay)
    _equals(functional.gated_linear_attention, want, gate=gate, temperature=4.0, block_size=8)


def test_the_delta_rule_is_that_of_its_authors():
    tensors = [torch.nn.functional.normalize(x, dim=-1) for x in _tensors(QUERY, KEY)]
    beta = torch.sigmoid(torch.tensor(GATE)).swapaxes(1, 2)
    want, _ = _flash_linear_attention("delta_rule").delta_rule_recurrence(*tensors, *_tensors(VALUE), beta)
    _equals(functional.delta_rule, want.swapaxes(1, 2), beta=GATE, block_size=8)


def test_forgetting_attention_is_that_of_flash_linear_attention():
    log_gate = torch.nn.functional.logsigmoid(torch.tensor(GATE))
    want = _flash_linear_attention("forgetting_attn").naive_forgetting_attn(
        *map(torch.tensor, (QUERY, KEY[:, :, :2], VALUE[:, :, :2])), log_gate
    )
    _equals(functional.forgetting_attention, want, key=KEY[:, :, :2], value=VALUE[:, :, :2], gate=GATE)


@pytest.mark.parametrize("sees_itself", [False, True])
def test_stick_breaking_attention_is_that_of_flash_linear_attention(sees_itself):
    want, _ = _flash_linear_attention("stickbreaking_attn").naive_stickbreaking_attn(
        *map(torch.tensor, (QUERY, KEY, VALUE)), attend_current=sees_itself
    )
    mask = np.tri(T, k=0 if sees_itself else -1, dtype=bool)[None, None]
    _equals(functional.stick_breaking_attention, want, mask=mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_topk_attention_is_that_of_x_transformers(is_causal):
    attend = pytest.importorskip("x_transformers.attend").Attend(sparse_topk=4, causal=is_causal)
    want, _ = attend(*_tensors(QUERY, KEY, VALUE))
    _equals(functional.topk_attention, want.swapaxes(1, 2), num_keys=4, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_talking_heads_attention_is_that_of_x_transformers(is_causal):
    """Which adds the mixed logits to the logits."""
    attend = pytest.importorskip("x_transformers.attend").Attend(
        heads=N, pre_talking_heads=True, post_talking_heads=True, causal=is_causal
    )
    logits_mix, weights_mix, bias = _normal(N, N), _normal(N, N, seed=1), _normal(N, T, T)
    with torch.no_grad():
        attend.pre_softmax_talking_heads.weight.copy_(torch.tensor(logits_mix.T - np.eye(N))[..., None, None])
        attend.post_softmax_talking_heads.weight.copy_(torch.tensor(weights_mix.T)[..., None, None])
    want, _ = attend(*_tensors(QUERY, KEY, VALUE), attn_bias=torch.tensor(bias))
    mixes = {"logits_mix": logits_mix, "weights_mix": weights_mix}
    _equals(
        functional.talking_heads_attention,
        want.swapaxes(1, 2),
        bias=bias[None],
        is_causal=is_causal,
        **mixes,
    )


def test_induced_attention_is_two_layers_of_perceiver_pytorch():
    """Latents attend to tokens, for keys and for values, and queries to the results."""
    perceiver = pytest.importorskip("perceiver_pytorch.perceiver_pytorch")
    layer = perceiver.Attention(N * H, 2 * N * H, heads=N, dim_head=H)
    layer.to_q = layer.to_kv = layer.to_out = torch.nn.Identity()
    value, inducing = _normal(B, T, N, H, seed=2), _normal(N, 5, H)
    flat = [torch.tensor(x.reshape(B, T, N * H)) for x in (QUERY, KEY, value)]
    points = torch.tensor(inducing.swapaxes(0, 1).reshape(1, 5, N * H)).expand(B, -1, -1)
    induced = [layer(points, torch.cat([flat[1], x], dim=-1)) for x in flat[1:]]
    want = layer(flat[0], torch.cat(induced, dim=-1)).reshape(B, T, N, H)
    _equals(functional.induced_attention, want, value=value, inducing=inducing)


def test_sinkhorn_attention_is_that_of_the_package():
    """With its logits of blocks before the ReLU, the logarithm and the noise that it adds, and values equal to keys.

    Version 0.11.4 passes sorted keys where sorted values belong.
    """
    package = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    size, length = 4, 20
    layer = package.SinkhornAttention(size, N * H, H, N, length, non_permutative=False, sinkhorn_iter=8)

    def sort_net(query, key, topk):
        means = [x.reshape(B * N, -1, size, H).mean(dim=2) for x in (query, key)]
        return package.sinkhorn_sorting_operator(torch.einsum("bih,bjh->bij", *means) * H**-0.5 / 0.75, 8)

    layer.sort_net.forward = sort_net
    query, key = QUERY[:, :length], KEY[:, :length]
    want = layer(*_tensors(query, key, key)).swapaxes(1, 2)
    _equals(functional.sinkhorn_attention, want, query=query, key=key, value=key, block_size=size)


@pytest.mark.parametrize("branches", [(0, 1, 2), (1, 2)], ids=["all", "without compression"])
def test_native_sparse_attention_is_that_of_the_package(branches):
    """With a linear compression, no rotation, no memory, and one query head for each key head.

    Its last feature makes the logits of the package's memory tokens small enough. For more query heads it chooses by
    means of logits, the paper and we by sums of weights. A query that ends a block does not read the block's
    compressed key in the package, and does in the paper and here.
    """
    package = pytest.importorskip("native_sparse_attention_pytorch")
    size, num_blocks, window = 4, 3, 5
    mixes, positions = _normal(2, size), _normal(size, H)
    mix = torch.nn.Linear(size, 1, bias=False)

    class Compression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = mix

        def forward(self, blocks):  # [B, N, blocks, size, H]
            return self.mix(blocks.swapaxes(-1, -2))[..., 0]

    layer = package.SparseAttention(
        N * H,
        H,
        N,
        sliding_window_size=window - 1,
        compress_block_size=size,
        compress_block_sliding_stride=size,
        selection_block_size=size,
        num_selected_blocks=num_blocks - 1,
        causal=True,
        norm=False,
        compress_mlp=Compression(),
    )
    query, key, value, gate = QUERY.copy(), KEY, _normal(B, T, N, H, seed=2), _normal(B, T, N, 3)
    query[..., -1] = 1
    gate = np.where(np.isin(np.arange(3), branches), gate, -np.inf).astype(np.float32)
    with torch.no_grad():
        layer.k_compress.mix.weight.copy_(torch.tensor(mixes[:1]))
        layer.v_compress.mix.weight.copy_(torch.tensor(mixes[1:]))
        layer.k_intrablock_positions.copy_(torch.tensor(positions).expand(N, -1, -1))
        layer.compress_mem_kv[0, ..., -1] = -1e9
    layer.to_qkv.forward = lambda x: torch.tensor(np.concatenate([query, key, value], axis=2).reshape(B, T, -1))
    layer.rotary_emb.rotate_queries_with_cached_keys = lambda query, key: (query, key)
    layer.to_strategy_combine.forward = lambda x: torch.sigmoid(torch.tensor(gate)).swapaxes(1, 2)
    layer.combine_heads = torch.nn.Identity()
    want = layer(torch.zeros(B, T, N * H)).reshape(B, T, N, H).detach()
    if 0 in branches:
        want[:, size - 1 :: size] = torch.nan
    options = {"key_mix": mixes[0], "value_mix": mixes[1], "key_positions": positions, "gate": gate}
    options |= {"num_blocks": num_blocks, "window": window}
    _equals(functional.native_sparse_attention, want, query=query, key=key, value=value, **options)


def test_cosine_attention_is_that_of_swin_transformer_v2():
    """Within a window of 3 x 3 patches, with its bias, and a temperature below the least."""
    modeling = pytest.importorskip("transformers.models.swinv2.modeling_swinv2")
    layer = modeling.Swinv2SelfAttention(modeling.Swinv2Config(), N * H, N, 3)
    tau, table = np.float32([0.1, 1, 0.001, 0.3]), _normal(25, N)
    with torch.no_grad():
        layer.logit_scale.copy_(torch.tensor(-np.log(tau)[:, None, None]))
    layer.continuous_position_bias_mlp.forward = lambda coordinates: torch.tensor(table)
    query, key, value = QUERY[:, :9], KEY[:, :9], _normal(B, 9, N, H)
    for name, x in (("query", query), ("key", key), ("value", value)):
        getattr(layer, name).forward = lambda _, x=x: torch.tensor(x.reshape(B, 9, N * H))
    (want,) = layer(torch.zeros(B, 9, N * H))
    bias = 16 / (1 + np.exp(-table[np.asarray(layer.relative_position_index)])).transpose(2, 0, 1)[None]
    options = {"tau_scale": tau, "bias": bias.astype(np.float32)}
    _equals(functional.cosine_attention, want.reshape(B, 9, N, H), query=query, key=key, value=value, **options)


def test_nystrom_attention_is_that_of_nystromformer():
    """Without its convolution, and with the coefficient that it calls "exact", for each matrix of a batch by itself."""
    modeling = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    sizes = {"hidden_size": N * H, "num_attention_heads": N, "num_landmarks": 5, "segment_means_seq_len": 20}
    layer = modeling.NystromformerSelfAttention(modeling.NystromformerConfig(**sizes)).eval()
    layer.init_option, layer.conv_kernel_size = "exact", None
    query, key, value = QUERY[:, :20], KEY[:, :20], _normal(B, 20, N, H)
    for name, x in (("query", query), ("key", key), ("value", value)):
        getattr(layer, name).forward = lambda _, x=x: torch.tensor(x.reshape(B, 20, N * H))
    want = layer(torch.zeros(B, 20, N * H))[0].reshape(B, 20, N, H)
    _equals(functional.nystrom_attention, want, query=query, key=key, value=value, num_landmarks=5)
