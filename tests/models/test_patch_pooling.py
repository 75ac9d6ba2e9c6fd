"""Attention pooling against its equations in float64 NumPy, patch by patch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import count_draws, draw, initial, jitted, normal, params_of
from tfx_jax.models import PatchPooling, PatchPoolingConfig

CONFIG = PatchPoolingConfig(12, 4, 2, d_model=7, d_ff=5, labels=("a", "b", "c", "d"))
IMAGES = normal(0, 3, 12, 12, 2)

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])


@functools.cache
def make_model(**overrides):
    """The same parameters each time."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: PatchPooling(config, rngs=nnx.Rngs(0)))


def oracle(model, image):
    """Logits and weights of one image: equations 7 and 8 of Ilse et al. (2018)."""
    p = params_of(model, np.float64)
    patches = []
    for top in range(0, 12, 4):
        for left in range(0, 12, 4):
            patch = p["patches"]["bias"] + p["positions"]["table"][len(patches)]
            for y, x, channel in np.ndindex(4, 4, 2):
                patch = patch + image[top + y, left + x, channel] * p["patches"]["kernel"][channel, y, x]
            patches.append(np.maximum(patch, 0))
    scores = np.array([p["query"] @ np.tanh(p["key"].T @ patch) for patch in patches])
    weights = np.exp(scores) / np.exp(scores).sum()
    pooled = sum(weight * patch for weight, patch in zip(weights, patches, strict=True))
    return pooled @ p["classifier"]["kernel"] + p["classifier"]["bias"], weights


def test_equals_the_equations_in_float64():
    logits, maps = _run(make_model(), IMAGES, return_attention=True)
    assert (logits.shape, logits.dtype) == ((3, 4), np.float32)
    assert {name: weights.shape for name, weights in maps.items()} == {"pool/0/cross": (3, 1, 1, 9)}
    np.testing.assert_array_equal(_run(make_model(), IMAGES), logits)
    for row in range(3):
        want, weights = oracle(make_model(), IMAGES[row])
        np.testing.assert_allclose(logits[row], want, rtol=1e-5, atol=5e-5)
        np.testing.assert_allclose(maps["pool/0/cross"][row, 0, 0], weights, atol=1e-5)
        assert weights.max() > 2 * weights.min()


def test_it_starts_as_the_mean_and_the_query_has_a_gradient():
    model = initial(lambda: PatchPooling(CONFIG, rngs=nnx.Rngs(0)))
    _, maps = _run(model, IMAGES, return_attention=True)
    np.testing.assert_allclose(maps["pool/0/cross"], np.full((3, 1, 1, 9), 1 / 9), atol=1e-6)
    grads = params_of(jitted(jax.grad(lambda model: model(IMAGES)[:, 1].sum()))(model))
    assert np.abs(grads["query"]).min() > 0


def test_every_parameter_has_a_gradient():
    grads = jitted(jax.grad(lambda model: jnp.sin(3 * model(IMAGES)).sum()))(make_model())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params_of(grads)):
        assert np.abs(leaf).max() > 1e-3, path


def test_parameters_are_those_counted_by_hand():
    def count(config):
        model = nnx.eval_shape(lambda: PatchPooling(config, rngs=nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))

    assert count(CONFIG) == (4 * 4 * 2 * 7 + 7) + 9 * 7 + (7 * 5 + 5) + (7 * 4 + 4)
    assert count(PatchPoolingConfig()) == (6 * 6 * 3 * 500 + 500) + 64 * 500 + (500 * 128 + 128) + (500 * 2 + 2)


def test_dropout_needs_a_stream_and_a_rate():
    dropping = make_model(dropout_rate=0.3)
    run = lambda model: model(IMAGES, rngs=nnx.Rngs(dropout=0))  # noqa: E731
    assert count_draws(dropping, IMAGES) == count_draws(run, make_model()) == 0
    assert count_draws(run, dropping) == 1
    assert np.abs(jitted(run)(dropping) - _run(make_model(), IMAGES)).max() > 0.01


def test_bfloat16_is_near_and_its_logits_and_weights_float32():
    want = _run(make_model(), IMAGES)
    got, maps = _run(make_model(dtype="bfloat16"), IMAGES, return_attention=True)
    assert got.dtype == maps["pool/0/cross"].dtype == np.float32
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_refusals():
    def build(**overrides):
        return nnx.eval_shape(lambda: PatchPooling(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match=r"^image_size=12 is not divisible by patch_size=5"):
        build(patch_size=5)
    with pytest.raises(ValueError, match="needs labels"):
        build(labels=())
    for shape in ((8, 12, 2), (12, 16, 2), (12, 12, 3)):
        with pytest.raises(ValueError, match=r"^images must have image_size=12 rows and columns and num_channels=2"):
            jax.eval_shape(make_model(), np.ones((1, *shape), np.float32))
