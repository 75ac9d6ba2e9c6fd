"""Latent attention in float64 NumPy, head by head: the latents are six features of the keys, and the values."""

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import float64, per_query_head, softmax_over, visible
from tfx_jax.functional import latent_attention
from tfx_jax.functional.attention.signature import check_heads

KEY_UP = (np.random.default_rng(16).normal(size=(4, 6, 5)) / 2).astype(np.float32)


def latent_weights(query, key, *, bias=0.0, mask=True, is_causal=False, scale=None):
    """Keys are three features beside products of the six others."""
    seen = visible(query, key, mask, is_causal)
    query, key = float64(query, key)
    key, scale = per_query_head(key, query.shape[2]), 8**-0.5 if scale is None else scale
    logits = np.zeros(seen.shape)
    for row, n in np.ndindex(seen.shape[:2]):
        keys = np.concatenate([key[row, :, n, :3], key[row, :, n, 2:] @ KEY_UP[n].astype(np.float64)], axis=-1)
        logits[row, n] = scale * query[row, :, n] @ keys.T
    return softmax_over(logits + np.asarray(bias, np.float64), seen)


def _latent(query, key, value, *arguments, **options):
    check_heads(query, key, value)
    n, u = query.shape[2], value.shape[-1]
    latent = jnp.concatenate([jnp.asarray(key)[..., 2:], value], axis=-1)
    key_up = np.concatenate([KEY_UP, np.zeros((4, u, 5), np.float32)], axis=1)
    value_up = np.concatenate(
        [np.zeros((n, 6, u), np.float32), np.broadcast_to(np.eye(u, dtype=np.float32), (n, u, u))], 1
    )
    parameters = {"key_up": jnp.asarray(key_up), "value_up": jnp.asarray(value_up)}
    return latent_attention(query, key[..., :3], latent, *arguments, **parameters, **options)


CASES = (Case("latent", _latent, latent_weights),)
