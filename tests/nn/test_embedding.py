"""Embeddings at both ends of a model, and learned positions."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.nn import Embedding, LearnedPositions

V, D = 7, 4


def test_looks_up_and_scales_by_the_root_of_the_width():
    embedding = Embedding(V, D, rngs=nnx.Rngs(0))
    table = np.asarray(embedding.table[...])
    tokens = jnp.array([[0, 6, 2], [2, 2, 5]])
    np.testing.assert_allclose(embedding(tokens), table[np.asarray(tokens)] * math.sqrt(D), rtol=1e-6)


def test_scores_tokens_with_the_unscaled_table():
    embedding = Embedding(V, D, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, D))
    want = np.asarray(x, np.float64) @ np.asarray(embedding.table[...], np.float64).T
    np.testing.assert_allclose(embedding.attend(x), want, atol=1e-6)


def test_starts_with_unit_variance_of_vectors_and_logits():
    embedding = Embedding(4_000, 64, rngs=nnx.Rngs(0))
    vectors = embedding(jnp.arange(4_000))
    np.testing.assert_allclose([vectors.mean(), vectors.std()], [0, 1], atol=0.01)
    logits = embedding.attend(jax.random.normal(jax.random.key(1), (50, 64)))  # as layer normalisation leaves them
    np.testing.assert_allclose(logits.std(), 1, atol=0.03)


def test_gradient_of_the_shared_table_is_the_sum_over_its_uses():
    embedding = Embedding(V, D, rngs=nnx.Rngs(0))
    tokens = jnp.array([1, 1, 3])

    def loss(reader, writer):
        return jnp.square(writer.attend(reader(tokens))).sum()

    read, written = jax.grad(loss, argnums=(0, 1))(embedding, embedding)
    together = jax.grad(lambda embedding: loss(embedding, embedding))(embedding)
    np.testing.assert_allclose(together.table[...], read.table[...] + written.table[...], rtol=1e-5)
    assert not read.table[...][jnp.array([0, 2, 4, 5, 6])].any(), "tokens that were not read have no gradient"
    assert read.table[...][1].any()


def test_bfloat16_table_stays_float32_and_so_do_logits():
    embedding, half = (Embedding(V, D, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in (jnp.float32, jnp.bfloat16))
    tokens = jnp.arange(V)
    chex.assert_type(
        [half.table[...], half(tokens), half.attend(half(tokens))], [jnp.float32, jnp.bfloat16, jnp.float32]
    )
    np.testing.assert_allclose(half.attend(half(tokens)), embedding.attend(embedding(tokens)), atol=0.03)


def test_token_outside_the_vocabulary_is_not_a_number():
    assert jnp.isnan(Embedding(V, D, rngs=nnx.Rngs(0))(jnp.array([V]))).all()


def test_learned_positions():
    positions = LearnedPositions(5, D, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(positions(jnp.array([3, 0])), positions.table[...][jnp.array([3, 0])])
    with pytest.raises(ValueError, match="6 positions, but the table of learned positions has 5"):
        positions(jnp.arange(6))
