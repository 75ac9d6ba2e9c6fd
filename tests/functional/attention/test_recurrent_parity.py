"""The same numbers as the PyTorch code of transformers, which needs no kernels, with random weights."""

import functools
import types

import jax
import numpy as np
import pytest

from tfx_jax import functional

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, T, N, H, U = 2, 75, 3, 16, 8


def _normal(*shape, seed=0):
    return np.random.default_rng(sum(shape) + seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = _normal(B, T, N, H), _normal(B, T, N, H, seed=1), _normal(B, T, N, U)
BETA, DT = _normal(B, T, N), _normal(B, T, N, seed=1)
LOG_RATE, DT_BIAS = _normal(N), _normal(N, seed=1)


def _softplus(x):
    return np.logaddexp(0, x)


def _attend(function, **options):
    return np.asarray(jax.jit(functools.partial(function, block_size=16))(QUERY, KEY, VALUE, **options))


def _equals(got, want):
    np.testing.assert_allclose(got, np.asarray(want.detach()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_gated_delta_rule_is_that_of_qwen3_next(form):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    reference = getattr(modeling, f"torch_{form}_gated_delta_rule")
    decay = -np.exp(LOG_RATE) * _softplus(DT + DT_BIAS)
    tensors = [torch.tensor(x) for x in (QUERY, KEY, VALUE, decay, 1 / (1 + np.exp(-BETA)))]
    want, _ = reference(*tensors, use_qk_l2norm_in_kernel=True)
    got = _attend(functional.gated_delta_rule, beta=BETA, dt=DT, log_rate_scale=LOG_RATE, dt_bias=DT_BIAS)
    _equals(got, want)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_kimi_delta_attention_is_that_of_kimi_linear(form):
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    reference = getattr(modeling, f"{form}_kimi_delta_attention")
    dt, dt_bias = _normal(B, T, N, H, seed=2), _normal(N, H)
    decay = -np.exp(LOG_RATE)[:, None] * _softplus(dt + dt_bias)
    tensors = [torch.tensor(x) for x in (QUERY, KEY, VALUE, decay, 1 / (1 + np.exp(-BETA)))]
    want, _ = reference(*tensors, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)
    got = _attend(functional.kimi_delta_attention, beta=BETA, dt=dt, log_rate_scale=LOG_RATE, dt_bias=dt_bias)
    _equals(got, want)


def test_state_space_duality_is_that_of_mamba2():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    value, dt, key, query = (torch.tensor(x) for x in (VALUE, DT, KEY, QUERY))
    rate, bias = torch.tensor(-np.exp(LOG_RATE)), torch.tensor(DT_BIAS)
    want = modeling.mamba2_chunk_scan(value, dt, rate, key, query, 32, dt_bias=bias, dt_softplus=True)
    got = _attend(functional.state_space_duality, dt=DT, log_rate_scale=LOG_RATE, dt_bias=DT_BIAS)
    _equals(got, want)


def test_retention_is_the_lightning_attention_of_minimax():
    """Between its projections, and before its norm and its gate."""
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = modeling.MiniMaxConfig(
        hidden_size=N * H, num_attention_heads=N, num_hidden_layers=3, head_dim=H, block_size=32
    )
    layer, value = modeling.MiniMaxLightningAttention(config, layer_idx=1), _normal(B, T, N, H, seed=2)
    slopes = np.asarray(layer.slope_rate).ravel()
    qkv = torch.tensor(np.concatenate([QUERY / H, KEY, value], axis=-1).reshape(B, T, -1))
    identity, open_gate = torch.nn.Identity(), lambda x: torch.full_like(x, torch.inf)
    modules = types.SimpleNamespace(
        qkv_proj=lambda x: qkv, act_fn=identity, norm=identity, out_proj=identity, output_gate=open_gate
    )
    names = (
        "block_size",
        "num_attention_heads",
        "head_dim",
        "query_decay",
        "key_decay",
        "diagonal_decay",
        "slope_rate",
    )
    vars(modules).update({name: getattr(layer, name) for name in names})
    hidden = torch.zeros(B, T, N * H)
    want, _ = modeling.MiniMaxLightningAttention.forward(modules, hidden, None, None)
    attend = jax.jit(functools.partial(functional.retention, scale=1 / H, block_size=16))
    got = np.asarray(attend(QUERY, KEY, value, decay=np.exp(-slopes)))
    _equals(got.reshape(B, T, -1), want)
