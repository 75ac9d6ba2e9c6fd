"""Attention rollout, against a sum over all paths from an input to an output."""

import itertools

import jax
import numpy as np
import pytest

from tfx_jax.functional import attention_rollout

B, N, T, LAYERS = 2, 3, 4, 3


def test_sums_the_paths_from_each_input_to_each_output():
    """Each step of a path stays where it is, with 1/2, or goes where a head chosen at random attends."""
    maps = np.random.default_rng(0).dirichlet(np.ones(T), (LAYERS, B, N, T)).astype(np.float32)
    wanted = np.zeros((B, T, T))
    for row, output, *between in itertools.product(range(B), *[range(T)] * (LAYERS + 1)):
        share, place = 1.0, output
        for layer, below in zip(maps[::-1], between, strict=True):  # the last layer is nearest to the output
            attended = sum(float(layer[row, head, place, below]) for head in range(N)) / N
            share *= (attended + (place == below)) / 2
            place = below
        wanted[row, output, place] += share
    found = jax.jit(attention_rollout)(list(maps))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(np.asarray(found).sum(axis=-1), 1, atol=1e-6)


def test_refuses_what_has_no_path():
    with pytest.raises(ValueError, match=r"^maps must have the attention weights of at least one layer, got none$"):
        attention_rollout([])
    cross = np.zeros((B, N, T, T + 1), np.float32)
    with pytest.raises(ValueError, match=r"^rollout needs self-attention, .* got a map of shape \(2, 3, 4, 5\)$"):
        attention_rollout([cross])
