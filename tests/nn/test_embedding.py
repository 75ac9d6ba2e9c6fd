"""Embeddings at both ends of a model, and learned positions."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import draw, initial, jitted, normal
from tfx_jax.nn import Embedding, LearnedPositions

V, D = 7, 4

_look_up = jitted(lambda embedding, tokens: embedding(tokens))
_score = jitted(lambda embedding, x: embedding.attend(x))


def _embedding(**options):
    return draw(lambda: Embedding(V, D, **options, rngs=nnx.Rngs(0)))


def test_looks_up_and_scales_when_asked():
    plain, tokens = _embedding(), np.array([[0, 6, 2]])
    np.testing.assert_array_equal(_look_up(plain, tokens), np.asarray(plain.table)[tokens])
    embedding, tokens = _embedding(scale=math.sqrt(D)), np.array([[0, 6, 2], [2, 2, 5]])
    want = np.asarray(embedding.table)[tokens] * math.sqrt(D)
    np.testing.assert_allclose(_look_up(embedding, tokens), want, rtol=1e-6)


def test_scores_tokens_with_the_unscaled_table():
    embedding, x = _embedding(), normal(1, 2, 3, D)
    want = np.float64(x) @ np.asarray(embedding.table, np.float64).T
    np.testing.assert_allclose(_score(embedding, x), want, atol=1e-6)


def test_starts_with_unit_variance_of_vectors_and_logits():
    embedding = initial(lambda: Embedding(4_000, 64, scale=8.0, rngs=nnx.Rngs(0)))
    vectors = _look_up(embedding, np.arange(4_000))
    np.testing.assert_allclose([vectors.mean(), vectors.std()], [0, 1], atol=0.01)
    logits = _score(embedding, normal(1, 50, 64))  # as layer normalization leaves them
    np.testing.assert_allclose(logits.std(), 1, atol=0.03)


def test_gradient_of_the_shared_table_is_the_sum_over_its_uses():
    tokens = np.array([1, 1, 3])

    def loss(reader, writer):
        return jnp.square(writer.attend(reader(tokens))).sum()

    @jitted
    def gradients(embedding):
        apart = jax.grad(loss, argnums=(0, 1))(embedding, embedding)
        return *apart, jax.grad(lambda embedding: loss(embedding, embedding))(embedding)

    read, written, together = (np.asarray(gradient.table) for gradient in gradients(_embedding()))
    np.testing.assert_allclose(together, read + written, rtol=1e-5)
    assert not read[[0, 2, 4, 5, 6]].any(), "tokens that were not read have no gradient"
    assert read[1].any()


def test_bfloat16_table_stays_float32_and_so_do_logits():
    @jitted
    def run(embedding):
        vectors = embedding(np.arange(V))
        return vectors, embedding.attend(vectors)

    half = _embedding(dtype=jnp.bfloat16)
    (vectors, logits), (_, want) = run(half), run(_embedding())
    chex.assert_type([half.table[...], vectors, logits], [jnp.float32, jnp.bfloat16, jnp.float32])
    np.testing.assert_allclose(logits, want, atol=0.03)


def test_token_outside_the_vocabulary_is_not_a_number():
    assert np.isnan(_look_up(_embedding(), np.array([V]))).all()


def test_learned_positions():
    positions = draw(lambda: LearnedPositions(5, D, rngs=nnx.Rngs(0)))
    places = np.array([3, 0])
    np.testing.assert_array_equal(_look_up(positions, places), np.asarray(positions.table)[places])
    with pytest.raises(ValueError, match="at most 5 tokens, the size of the table of learned positions, got 6"):
        jax.eval_shape(positions, np.arange(6))
