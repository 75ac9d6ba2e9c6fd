"""Mixtures of heads: the norm of differences, shared values of pairs, and PyTorch's Differential Transformer."""

import functools

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights
from tests.functional.attention.oracles.head_mixtures import LAMBDAS, differential_weights
from tfx_jax.functional import differential_attention, forgetting_attention, talking_heads_attention

B, T, S, N, K, H, U = 2, 5, 7, 8, 4, 8, 3
PARAMETERS = {"lambda_query": LAMBDAS[0], "lambda_key": LAMBDAS[1]}


def _inputs(num_keys=S, size=U):
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, num_keys, K, H), (B, num_keys, K, size)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def test_differences_of_grouped_queries_are_normalized_in_pairs():
    query, key, value = _inputs()
    norm_scale = np.random.default_rng(1).normal(size=2 * U).astype(np.float32)
    attend = functools.partial(differential_attention, lambda_init=0.25, **PARAMETERS)
    got = jax.jit(functools.partial(attend, norm_scale=norm_scale))(query, key, value)
    maps = differential_weights(query, key, lambda_init=0.25)
    for n in range(0, N, 2):
        pair = n // 2 // (N // K)  # of values, which two pairs of queries share
        values = np.concatenate([value[:, :, 2 * pair], value[:, :, 2 * pair + 1]], axis=-1).astype(np.float64)
        out = np.einsum("bts,bsu->btu", maps[:, n], values)
        out = out / np.sqrt(np.square(out).mean(axis=-1, keepdims=True) + 1e-5) * norm_scale * 0.75
        np.testing.assert_allclose(got[:, :, n], out[..., :U], atol=1e-5)
        np.testing.assert_allclose(got[:, :, n + 1], out[..., U:], atol=1e-5)


@pytest.mark.parity
def test_differential_attention_is_that_of_diffllama():
    """Whose second half of the heads is our second of each pair."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = modeling.DiffLlamaConfig(
        hidden_size=N * H, num_attention_heads=N, num_key_value_heads=N, attn_implementation="eager"
    )
    layer = modeling.DiffLlamaAttention(config, layer_idx=2)
    random = np.random.default_rng(2)
    query, key, value = (random.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(3))
    with torch.no_grad():
        for number, index in ((1, 0), (2, 1)):
            getattr(layer, f"lambda_q{number}").copy_(torch.tensor(LAMBDAS[0][index]))
            getattr(layer, f"lambda_k{number}").copy_(torch.tensor(LAMBDAS[1][index]))
    tensors = [torch.tensor(x.reshape(B, T, -1)) for x in (query, key, value)]
    for name, tensor in zip(("q_proj", "k_proj", "v_proj"), tensors, strict=True):
        getattr(layer, name).forward = lambda x, tensor=tensor: tensor
    layer.o_proj.forward = lambda x: x
    cos, sin = torch.ones(1, T, H), torch.zeros(1, T, H)
    want = layer(torch.zeros(B, T, N * H), (cos, sin), None)[0].detach().numpy()
    order = np.arange(N).reshape(2, N // 2).T.ravel()  # pairs are n and n + N / 2 there
    attend = functools.partial(differential_attention, lambda_init=layer.lambda_init, epsilon=config.rms_norm_eps)
    norm_scale = np.ones(2 * H, np.float32)
    got = jax.jit(functools.partial(attend, norm_scale=norm_scale, **PARAMETERS))(
        query[:, :, order], key[:, :, order], value[:, :, order]
    )
    np.testing.assert_allclose(np.asarray(got).reshape(B, T, -1), want.reshape(B, T, -1), atol=1e-5)


def test_gates_that_forget_nothing_leave_dense_attention():
    query, key, _ = _inputs()
    gate = np.full((B, S, N), 99.0, np.float32)
    attend = jax.jit(functools.partial(forgetting_attention, return_weights=True))
    _, weights = attend(query, key, key, gate=gate)
    np.testing.assert_allclose(weights, dense_weights(query, key, is_causal=True), atol=1e-5)


@pytest.mark.parametrize("logit", [-1e4, -1e9, -np.inf])
def test_a_gate_that_forgets_everything_does_so_and_no_more(logit):
    """The gates of the tokens after it keep their digits, and those of another text of the row are not in any sum."""
    query, key, value = (x[:1] for x in _inputs(num_keys=T))
    gate = np.random.default_rng(1).normal(size=(1, T, N)).astype(np.float32)
    gate[:, 1] = logit
    ids = np.array([[1, 1, 2, 2, 2]])

    @jax.jit
    def attend(query, key, value, gate, ids):
        return forgetting_attention(query, key, value, gate=gate, segment_ids=ids, return_weights=True)

    _, together = attend(query, key, value, gate, np.ones_like(ids))
    _, apart = attend(query, key, value, gate, ids)
    _, alone = attend(query, key, value, np.where(np.arange(T)[:, None] == 1, 0, gate), ids)
    np.testing.assert_array_equal(apart[..., 2:, :], alone[..., 2:, :])
    _, from_there = attend(query, key, value, gate, np.array([[0, 1, 1, 1, 1]]))
    np.testing.assert_allclose(together[..., 1:, :], from_there[..., 1:, :], atol=1e-6)


def test_errors_say_what_to_do():
    query, key, value = _inputs()
    with pytest.raises(
        ValueError, match="needs even numbers of query and key heads, got 3 query heads and 1 key heads"
    ):
        differential_attention(query[:, :, :3], key[:, :, :1], value[:, :, :1], **PARAMETERS)
    with pytest.raises(ValueError, match=r"lambda_key must have shape \(2, 8\), got \(8,\)"):
        differential_attention(query, key, value, **PARAMETERS | {"lambda_key": LAMBDAS[1][0]})
    with pytest.raises(ValueError, match=r"norm_scale must have shape \(6,\), got \(3,\)"):
        differential_attention(query, key, value, norm_scale=np.ones(3, np.float32), **PARAMETERS)
    mix = np.eye(N, dtype=np.float32)
    with pytest.raises(ValueError, match=r"weights_mix must have shape \[N, N\] = \(8, 8\), got \(7, 8\)"):
        talking_heads_attention(query, key, value, logits_mix=mix, weights_mix=mix[1:])
    gate = np.zeros((B, S, N), np.float32)
    with pytest.raises(ValueError, match=r"forgetting attention is causal only.*pass is_causal=True"):
        forgetting_attention(query, key, value, gate=gate, is_causal=False)
    with pytest.raises(ValueError, match=r"gate must have shape \[B, S, N\] = \(2, 7, 8\), got \(2, 7, 4\)"):
        forgetting_attention(query, key, value, gate=gate[..., :4])
