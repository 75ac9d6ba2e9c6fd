"""Linformer, induced attention and the dense Synthesizer: what they are in special cases, and their errors."""

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.synthesizer import DENSE
from tfx_jax.functional import dense_synthesizer_attention, induced_attention, linformer_attention

B, T, N, H = 2, 6, 4, 8
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(3))
EYE = np.eye(T, dtype=np.float32)


def test_linformer_with_projections_that_change_nothing_is_dense_attention():
    attend = jax.jit(lambda *x: linformer_attention(*x, key_projection=EYE, value_projection=EYE))
    np.testing.assert_allclose(attend(QUERY, KEY, VALUE), mixed(dense_weights(QUERY, KEY), VALUE), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("one_kv_head", [False, True])
def test_linformer_is_that_of_the_package(one_kv_head):
    torch = pytest.importorskip("torch")
    linformer = pytest.importorskip("linformer")
    torch.manual_seed(0)
    layer = linformer.LinformerSelfAttention(N * H, T + 2, k=3, heads=N, one_kv_head=one_kv_head)
    layer.to_out, x = torch.nn.Identity(), torch.tensor(QUERY.reshape(B, T, N * H))
    heads = [project(x).detach().numpy().reshape(B, T, -1, H) for project in (layer.to_q, layer.to_k, layer.to_v)]
    projections = {
        "key_projection": layer.proj_k.detach().numpy().T,
        "value_projection": layer.proj_v.detach().numpy().T,
    }
    got = jax.jit(lambda *x: linformer_attention(*x, **projections))(*heads)
    np.testing.assert_allclose(got, layer(x).detach().numpy().reshape(got.shape), atol=1e-6)


def test_errors_say_what_fits():
    inducing = np.ones((N, 3, H), np.float32)
    arrays = QUERY, KEY, VALUE
    for call, message in {
        lambda: linformer_attention(
            *arrays, key_projection=EYE, value_projection=EYE[1:]
        ): r"must both have shape \[M, L\]",
        lambda: linformer_attention(
            *arrays, key_projection=EYE[:, 1:], value_projection=EYE[:, 1:]
        ): "at most max_length=5 keys, got 6",
        lambda: linformer_attention(
            *arrays, key_projection=EYE, value_projection=EYE, is_causal=True
        ): "has no causal form, because projected keys are means that include future",
        lambda: induced_attention(*arrays, inducing=inducing[1:]): r"N, H = \(4, 8\), got \(3, 3, 8\)",
        lambda: induced_attention(*arrays, EYE[None, None], inducing=inducing): "induced attention takes no bias",
        lambda: induced_attention(
            *arrays, inducing=inducing, is_causal=True
        ): "has no causal form, because inducing points",
        lambda: dense_synthesizer_attention(
            *arrays, **DENSE | {"logits": DENSE["logits"][..., :5], "logits_bias": DENSE["logits_bias"][..., :5]}
        ): "at most max_length=5 tokens, the size of the logits, got 6",
        lambda: dense_synthesizer_attention(
            *arrays, **DENSE | {"hidden_bias": DENSE["hidden_bias"][1:]}
        ): r"hidden_bias must have shape \(4, 8\), got \(3, 8\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
