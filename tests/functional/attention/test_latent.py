"""Latent attention: both forms, decoding from the latent cache, and DeepSeek-V3 in PyTorch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import latent_attention, rotary_embedding

B, T, N, R, D, C, U = 2, 9, 4, 6, 5, 7, 3
RANDOM = np.random.default_rng(0)
QUERY, KEY, LATENT, KEY_UP, VALUE_UP = (
    RANDOM.normal(size=shape).astype(np.float32)
    for shape in ((B, T, N, R + D), (B, T, 2, R), (B, T, 2, C), (N, C, D), (N, C, U))
)
attend = functools.partial(latent_attention, key_up=KEY_UP, value_up=VALUE_UP)


def test_the_absorbed_form_equals_the_expanded_one():
    """Values, weights and gradients, with a bias, a mask, segments and causality."""
    ids = np.repeat([[1, 1, 1, 1, 2, 2, 2, 2, 0]], B, axis=0)
    bias = RANDOM.normal(size=(1, N, T, T)).astype(np.float32)
    mask = RANDOM.random((B, 1, 1, T)) < 0.8

    @functools.partial(jax.jit, static_argnames="absorbed")
    def run(arrays, parameters, absorbed):
        def loss(arrays, parameters):
            options = {"is_causal": True, "segment_ids": ids, "return_weights": True, "absorbed": absorbed}
            out, weights = latent_attention(*arrays, bias, mask, **parameters, **options)
            return (out**2).sum() + (weights**2).sum(), (out, weights)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(arrays, parameters)

    forms = [
        run((QUERY, KEY, LATENT), {"key_up": KEY_UP, "value_up": VALUE_UP}, absorbed=absorbed)
        for absorbed in (False, True)
    ]
    chex.assert_trees_all_close(*forms, rtol=1e-4, atol=1e-4)
    assert forms[0][1][0].shape == (B, T, N, U)


def test_decoding_from_the_latent_cache_equals_the_whole_text():
    """Each token reads R + C numbers of those before it, whatever the number of heads."""
    want = jax.jit(functools.partial(attend, is_causal=True))(QUERY, KEY, LATENT)
    step = jax.jit(attend)
    room = np.arange(T)[None, None, None]
    for t in range(T):
        cache = (np.where(np.arange(T)[:, None, None] <= t, x, 9) for x in (KEY, LATENT))
        out = step(QUERY[:, t : t + 1], *cache, None, np.broadcast_to(room <= t, (B, 1, 1, T)))
        np.testing.assert_allclose(out[:, 0], want[:, t], atol=1e-5)


@pytest.mark.parity
def test_latent_attention_is_that_of_deepseek_v3():
    """Whose queries hold the rotary features last, as pairs of neighbors."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=16,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=None,
        kv_lora_rank=C,
        qk_rope_head_dim=R,
        qk_nope_head_dim=D,
        v_head_dim=U,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = modeling.DeepseekV3Attention(config, layer_idx=0)
    layer.o_proj.forward = lambda x: x
    x = torch.randn(B, T, 16)
    place = torch.arange(T)[None]
    future = torch.full((T, T), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x, modeling.DeepseekV3RotaryEmbedding(config)(x, place), future)[0].reshape(B, T, N, U).numpy()
        query = layer.q_proj(x).reshape(B, T, N, D + R).numpy()
        latent, key = layer.kv_a_proj_with_mqa(x).split([C, R], dim=-1)
        latent = layer.kv_a_layernorm(latent)[:, :, None].numpy()
        up = layer.kv_b_proj.weight.reshape(N, D + U, C).swapaxes(1, 2).numpy()
    halves = np.arange(R).reshape(-1, 2).T.ravel()  # from pairs of neighbors to pairs of halves

    @jax.jit
    def both(query, key, latent):
        places = np.arange(T)
        rotated = rotary_embedding(query[..., D:][..., halves], places)
        query = jnp.concatenate([rotated, query[..., :D]], axis=-1)
        key = rotary_embedding(key[..., halves], places)
        options = {"key_up": up[..., :D], "value_up": up[..., D:], "is_causal": True}
        return [latent_attention(query, key, latent, absorbed=absorbed, **options) for absorbed in (False, True)]

    for out in both(query, key.numpy()[:, :, None], latent):
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_errors_say_what_fits():
    with pytest.raises(ValueError, match="rotary keys must be at most as wide as the queries, H=5, got R=6"):
        attend(QUERY[..., :5], KEY, LATENT)
    with pytest.raises(ValueError, match=r"key_up must have shape \[N, C, H - R\] = \(4, 7, 5\), got \(4, 7, 3\)"):
        latent_attention(QUERY, KEY, LATENT, key_up=VALUE_UP, value_up=VALUE_UP)
    with pytest.raises(ValueError, match=r"value_up must have shape \[N, C, U\] with N, C = \(4, 7\), got \(2, 7, 3\)"):
        attend(QUERY, KEY, LATENT, value_up=VALUE_UP[:2])
