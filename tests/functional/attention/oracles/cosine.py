"""Equation 2 of Swin Transformer V2 (Liu et al., 2022) in float64 NumPy, pair by pair."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.additive import weights_of
from tfx_jax.functional import cosine_attention

TAU = np.float32([0.5, 0.001, 0.125, 2])  # the second is below the paper's least


def cosine_weights(query, key, *, tau=TAU, **options):
    """cos(q, k) / max(tau, 0.01) of every head."""
    tau = np.where(tau < 0.01, 0.01, np.asarray(tau, np.float64))
    return weights_of(lambda n, q, k: q @ k / np.sqrt((q @ q) * (k @ k)) / tau[n], query, key, **options)


CASES = (Case("cosine", functools.partial(cosine_attention, tau_scale=jnp.asarray(TAU)), cosine_weights),)
