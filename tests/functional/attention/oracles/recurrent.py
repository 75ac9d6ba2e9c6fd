"""Recurrent attention in float64 NumPy, token by token: the state of unit vectors as values gives the weights.

Gates are functions of the keys here, linear ones with fixed coefficients, so that gradients pass through them and each
text has its own wherever it is in a row.
"""

import functools

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import EVERYTHING, Case
from tests.functional.attention.oracles.dense import float64, numbers_of
from tfx_jax.functional.attention import SPECS

TAKES = EVERYTHING - {"bias", "mask"}
_random = np.random.default_rng(11)
_TO_GATES = (_random.normal(size=(8, 8)) / 2).astype(np.float32)
_TO_BETA = (_random.normal(size=8) / 2).astype(np.float32)
_RATES = np.float32([-0.5, 0.25, 0.75, -1.0])
_BIASES = (np.round(8 * _random.normal(size=(4, 8))) / 8).astype(np.float32)
DECAY = np.float32([0.75, 0.9375, 0.5, 0.25])


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def softplus(x):
    return np.logaddexp(0, x)


def unit(x):
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def recurrent_weights(
    query, key, decay, beta=None, *, scale, mask=True, is_causal=True, has_delta_rule=False, is_unit=False
):
    """Weights, [B, N, T, S], of a state that decays by `decay`, [B, S, K, H or 1], and writes with strength `beta`."""
    assert is_causal
    query, key = float64(query, key)
    if is_unit:
        query, key = unit(query), unit(key)
    (b, t, n, h), (s, k) = query.shape, key.shape[1:3]
    seen = np.broadcast_to(mask, (b, 1, 1, s))[:, 0, 0]
    weights = np.zeros((b, n, t, s))
    for row, head in np.ndindex(b, n):
        of, state = head * k // n, np.zeros((h, s))
        for i in range(s):
            if seen[row, i]:
                k_i, strength = key[row, i, of], 1.0 if beta is None else beta[row, i, of]
                state = state * decay[row, i, of][:, None]
                written = np.eye(s)[i]
                if has_delta_rule:
                    written = written - k_i @ state
                state = state + strength * np.outer(k_i, written)
            if i >= s - t:
                weights[row, head, i - s + t] = scale * query[row, i - s + t, head] @ state
    return weights


def retention_weights(query, key, **options):
    decay = np.broadcast_to(np.float64(DECAY)[: key.shape[2], None], (*key.shape[:3], 1))
    return recurrent_weights(query, key, decay, scale=query.shape[-1] ** -0.5, **options)


def gated_linear_weights(query, key, *, temperature=4.0, **options):
    decay = sigmoid(float64(key)[0] @ _TO_GATES) ** (1 / temperature)
    return recurrent_weights(query, key, decay, scale=query.shape[-1] ** -0.5, **options)


def _decay(dt, bias):
    """exp(-rate softplus(dt + bias)) with a rate for each head."""
    step = softplus(dt + bias)
    rate = np.exp(np.float64(_RATES[: dt.shape[2]]))
    return np.exp(-step * rate.reshape(-1, *(1,) * (dt.ndim - 3))), step


def state_space_weights(query, key, **options):
    decay, step = _decay(float64(key)[0] @ _TO_GATES[:, 3], _BIASES[: key.shape[2], 0])
    return recurrent_weights(query, key, decay[..., None], step, scale=1.0, **options)


def delta_weights(query, key, *, decay=None, **options):
    decay = np.ones((*key.shape[:3], 1)) if decay is None else decay
    beta = sigmoid(float64(key)[0] @ _TO_BETA)
    delta = {"has_delta_rule": True, "is_unit": True}
    return recurrent_weights(query, key, decay, beta, scale=query.shape[-1] ** -0.5, **delta, **options)


def gated_delta_weights(query, key, **options):
    decay, _ = _decay(float64(key)[0] @ _TO_GATES[:, 3], _BIASES[: key.shape[2], 0])
    return delta_weights(query, key, decay=decay[..., None], **options)


def kimi_delta_weights(query, key, **options):
    decay, _ = _decay(float64(key)[0] @ _TO_GATES, _BIASES[: key.shape[2]])
    return delta_weights(query, key, decay=decay, **options)


def _per_head(key):
    return {"log_rate_scale": jnp.asarray(_RATES[: key.shape[2]]), "dt_bias": jnp.asarray(_BIASES[: key.shape[2], 0])}


PARAMETERS = {
    "retention": lambda key: {"decay": jnp.asarray(DECAY[: key.shape[2]])},
    "gated_linear": lambda key: {"gate": key @ _TO_GATES, "temperature": 4.0},
    "state_space_duality": lambda key: {"dt": key @ _TO_GATES[:, 3], **_per_head(key)},
    "delta_rule": lambda key: {"beta": key @ _TO_BETA},
    "gated_delta_rule": lambda key: {"beta": key @ _TO_BETA, "dt": key @ _TO_GATES[:, 3], **_per_head(key)},
    "kimi_delta": lambda key: {
        "beta": key @ _TO_BETA,
        "dt": key @ _TO_GATES,
        **_per_head(key),
        "dt_bias": jnp.asarray(_BIASES[: key.shape[2]]),
    },
}
"""Gates and parameters of an attention for its keys, in float32 at least."""


def attend(name, query, key, *arguments, block_size=4, **options):
    """The attention called `name` with the gates of these keys."""
    parameters = PARAMETERS[name](numbers_of(key))
    return SPECS[name].function(query, key, *arguments, block_size=block_size, **parameters, **options)


WEIGHTS = {
    "retention": retention_weights,
    "gated_linear": gated_linear_weights,
    "state_space_duality": state_space_weights,
    "delta_rule": delta_weights,
    "gated_delta_rule": gated_delta_weights,
    "kimi_delta": kimi_delta_weights,
}
CASES = tuple(
    Case(name, functools.partial(attend, name), oracle, takes=TAKES, is_lean=True, is_distribution=False)
    for name, oracle in WEIGHTS.items()
)
