"""The Vision Transformer against its equations in float64 NumPy, the published sizes, and positions for other sizes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from tfx_jax import functional
from tfx_jax.models import ViT, ViTClassifier, ViTConfig
from tfx_jax.models.vit import interpolate_positions

CONFIG = ViTConfig(
    image_size=12,
    patch_size=4,
    num_channels=2,
    num_layers=3,
    d_model=12,
    num_heads=2,
    d_ff=20,
    labels=("a", "b", "c", "d", "e"),
)
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 12, 2)), jnp.float32)
WIDE = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 20, 2)), jnp.float32)

_run = jax.jit(
    lambda model, *args, **options: model(*args, **options), static_argnames=("return_attention", "interpolate")
)


@pytest.fixture(scope="module")
def make(draw_model):
    @functools.cache
    def make(cls, attention_fn=functional.dot_product_attention, **overrides):
        config = dataclasses.replace(CONFIG, **overrides)
        return draw_model(lambda: cls(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))

    return make


def _oracle(model, image):
    """The sequence, pooled and attention maps of one image, patch by patch and head by head."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model)))
    image = np.asarray(image, np.float64)

    def norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    rows = [params["class_token"]]
    for top in range(0, 12, 4):
        for left in range(0, 12, 4):
            row = params["patches"]["bias"].copy()
            for dy, dx, channel in np.ndindex(4, 4, 2):
                row += image[top + dy, left + dx, channel] * params["patches"]["kernel"][channel, dy, dx]
            rows.append(row)
    x, maps = np.stack(rows) + params["positions"]["table"], []
    for index in range(3):
        p = jax.tree.map(lambda leaf, index=index: leaf[index], params["encoder_layers"])
        attention, feed_forward = p["self_attention"], p["feed_forward"]
        y = norm(x, p["self_attention_residual"]["norm"])
        x = x + attention["out"]["bias"]
        for head in range(2):
            query, key, value = (
                y @ attention[name]["kernel"][:, head] + attention[name]["bias"][head]
                for name in ("query", "key", "value")
            )
            weights = np.exp(query @ key.T / math.sqrt(6))
            maps.append(weights / weights.sum(-1, keepdims=True))
            x = x + maps[-1] @ value @ attention["out"]["kernel"][head]
        y = norm(x, p["feed_forward_residual"]["norm"]) @ feed_forward["up"] + feed_forward["up_bias"]
        x = x + y * (1 + erf(y / math.sqrt(2))) / 2 @ feed_forward["down"] + feed_forward["down_bias"]
    x = norm(x, params["norm"])
    return x, np.tanh(x[0] @ params["pooler"]["kernel"] + params["pooler"]["bias"]), np.stack(maps)


def test_equals_the_equations_in_float64(make):
    model = make(ViT)
    output, maps = _run(model, IMAGES, return_attention=True)
    assert list(maps) == [f"encoder/{layer}/self" for layer in range(3)]
    for row in range(2):
        sequence, pooled, weights = _oracle(model, IMAGES[row])
        np.testing.assert_allclose(output.sequence[row], sequence, atol=5e-5)
        np.testing.assert_allclose(output.pooled[row], pooled, atol=5e-5)
        np.testing.assert_allclose(np.concatenate([w[row] for w in maps.values()]), weights, atol=1e-5)


def test_a_classifier_looks_at_the_class_token(make):
    model = make(ViTClassifier)
    assert model.vit.pooler is None
    logits, maps = _run(model, IMAGES, return_attention=True)
    first = model.vit(IMAGES).sequence[:, 0]
    want = first @ model.classifier.kernel[...] + model.classifier.bias[...][None]
    np.testing.assert_allclose(logits, want, atol=1e-5)
    assert maps["encoder/2/self"].shape == (2, 2, 10, 10)
    np.testing.assert_array_equal(_run(model, IMAGES).shape, (2, 5))


def test_every_parameter_has_a_gradient(make):
    graphdef, params = nnx.split(make(ViT))

    @jax.jit
    @jax.grad
    def grad(params):
        output = nnx.merge(graphdef, params)(WIDE, interpolate=True)
        return jnp.sin(3 * output.sequence).sum() + output.pooled.sum()

    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grad(params))):
        name, size = jax.tree_util.keystr(path), np.abs(leaf).max()
        # What is added to all the keys of a query alike changes no weight.
        assert size < 1e-4 if name.endswith("['key']['bias']") else size > 1e-3, (name, size)


def test_images_of_another_size_have_interpolated_positions(make):
    model = make(ViTClassifier)
    with pytest.raises(ValueError, match=r"images of \(8, 20\) pixels, but the model's are \(12, 12\): resize, or"):
        model(WIDE)
    graphdef, params = nnx.split(make(ViTClassifier))
    moved = nnx.merge(graphdef, params)
    moved.vit.positions.table = nnx.Param(interpolate_positions(model.vit.positions.table[...], (3, 3), (2, 5)))
    logits, maps = _run(model, WIDE, interpolate=True, return_attention=True)
    assert maps["encoder/0/self"].shape == (2, 2, 11, 11)
    # An image of 4 x 40 pixels with the same ten patches, in the same order, and ten positions.
    line = np.asarray(WIDE).reshape(2, 2, 4, 20, 2).transpose(0, 2, 1, 3, 4).reshape(2, 4, 40, 2)
    patches = moved.vit.patches(jnp.asarray(line))
    np.testing.assert_allclose(patches, moved.vit.patches(WIDE), atol=1e-5)
    assert np.abs(logits - _run(model, jnp.asarray(line), interpolate=True)).max() > 1e-3
    np.testing.assert_array_equal(_run(model, IMAGES, interpolate=True), _run(model, IMAGES))


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_interpolation_of_the_same_grid_changes_nothing(method):
    table = jnp.asarray(np.random.default_rng(2).normal(size=(13, 3)), jnp.float32)
    np.testing.assert_array_equal(interpolate_positions(table, (3, 4), (3, 4), method=method), table)


def test_bilinear_interpolation_is_numpys_along_either_axis():
    rng = np.random.default_rng(3)
    for _ in range(30):
        old, new = rng.integers(1, 9, 2), rng.integers(1, 12, 2)
        table = rng.normal(size=(1 + old.prod(), 2)).astype(np.float32)
        want = table[1:].reshape(*old, 2)
        for axis in (0, 1):
            # Both ends of a side are 0 and 1, a patch is known at its centre.
            places = (np.arange(new[axis]) + 0.5) / new[axis]
            known = (np.arange(old[axis]) + 0.5) / old[axis]
            want = np.apply_along_axis(lambda line, x=places, xs=known: np.interp(x, xs, line), axis, want)
        got = interpolate_positions(jnp.asarray(table), tuple(old), tuple(new), method="bilinear")
        np.testing.assert_array_equal(got[0], table[0])
        np.testing.assert_allclose(got[1:].reshape(*new, 2), want, atol=1e-5)


def test_bicubic_interpolation():
    """Constants stay, a mirrored or transposed grid gives the mirror image, and halves have Keys's weights."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        old, new = (tuple(int(n) for n in rng.integers(1, 9, 2)) for _ in range(2))
        patches = rng.normal(size=(*old, 2)).astype(np.float32)

        def resize(patches, new):
            table = np.concatenate([[[7.0, 7.0]], patches.reshape(-1, 2)]).astype(np.float32)
            return np.asarray(interpolate_positions(jnp.asarray(table), patches.shape[:2], new))[1:].reshape(*new, 2)

        got = resize(patches, new)
        np.testing.assert_allclose(resize(patches + 5, new), got + 5, atol=1e-5)
        np.testing.assert_allclose(resize(patches[::-1], new), got[::-1], atol=1e-5)
        np.testing.assert_allclose(resize(patches.swapaxes(0, 1), new[::-1]), got.swapaxes(0, 1), atol=1e-5)
    line = np.zeros((6, 1, 2), np.float32)
    line[2] = 1.0
    # With half as many, new points lie half way between old ones 0 and 1, 2 and 3, 4 and 5.
    np.testing.assert_allclose(resize(line, (3, 1))[:, 0, 0], [-0.09375, 0.59375, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("rates", "is_random"), [({}, False), ({"dropout_rate": 0.3}, True), ({"attention_dropout_rate": 0.3}, True)]
)
def test_dropout_needs_a_stream_and_a_rate(make, rates, is_random):
    model = make(ViTClassifier, **rates)
    evaluated, first, again, other = jax.jit(
        lambda model: [model(IMAGES, rngs=seed if seed is None else nnx.Rngs(dropout=seed)) for seed in (None, 0, 0, 1)]
    )(model)
    np.testing.assert_array_equal(first, again)
    assert (np.abs(first - other).max() > 0.01) == (np.abs(first - evaluated).max() > 0.01) == is_random


def test_another_attention(make):
    other = functools.partial(functional.sliding_window_attention, window=10)
    got = _run(make(ViTClassifier, attention_fn=other), IMAGES)
    np.testing.assert_allclose(got, _run(make(ViTClassifier), IMAGES), atol=1e-5)


def test_bfloat16_is_near_and_its_logits_float32(make):
    want, got = (_run(make(ViTClassifier, dtype=dtype), IMAGES) for dtype in ("float32", "bfloat16"))
    assert got.dtype == jnp.float32
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()
    assert _run(make(ViT, dtype="bfloat16"), IMAGES).sequence.dtype == jnp.bfloat16


# The paper's table 1 says 86M, 307M and 632M. Of the body alone, and of a classifier of the 1,000 classes of ImageNet.
@pytest.mark.parametrize(
    ("name", "body", "classifier"),
    [
        ("ViT-B/16", 85_798_656, 86_567_656),
        ("ViT-B/32", 87_455_232, 88_224_232),
        ("ViT-L/16", 303_301_632, 304_326_632),
        ("ViT-L/32", 305_510_400, 306_535_400),
        ("ViT-H/14", 630_764_800, 632_045_800),
    ],
)
def test_published_sizes(name, body, classifier):
    config = ViTConfig.published(name)
    for cls, want in ((functools.partial(ViT, use_pooler=False), body), (ViTClassifier, classifier)):
        abstract = nnx.eval_shape(lambda cls=cls: cls(config, rngs=nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == want


def test_default_is_b_16_and_its_classifier_starts_at_zero():
    assert ViTConfig() == ViTConfig.published("ViT-B/16")
    assert ViTConfig.published("ViT-H/14", image_size=518).image_size == 518
    model = ViTClassifier(CONFIG, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(model(IMAGES), 0)
    sequence = model.vit(IMAGES).sequence
    assert np.std(sequence[0] - sequence[1]) > 0.1


def test_refusals(make):
    def build(**overrides):
        return nnx.eval_shape(lambda: ViTClassifier(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match="no published ViT is called 'ViT-G/14'; there are ViT-B/16"):
        ViTConfig.published("ViT-G/14")
    with pytest.raises(ValueError, match="activation='tanh' is none of relu, gelu"):
        build(activation="tanh")
    with pytest.raises(ValueError, match=r"images of \(12, 12\) pixels do not divide into patches of patch_size=5"):
        build(patch_size=5)
    with pytest.raises(ValueError, match="needs labels"):
        build(labels=())
    with pytest.raises(ValueError, match="images of 3 channels, but the model has num_channels=2"):
        make(ViT)(jnp.ones((1, 12, 12, 3)))
    with pytest.raises(ValueError, match=r"images of \(12, 14\) pixels do not divide into patches"):
        make(ViT)(jnp.ones((1, 12, 14, 2)), interpolate=True)
    table = jnp.ones((10, 2))
    with pytest.raises(ValueError, match=r"10 positions, but a class token and \(2, 4\) patches need 9"):
        interpolate_positions(table, (2, 4), (3, 3))
    with pytest.raises(ValueError, match="method='nearest' is none of bicubic, bilinear"):
        interpolate_positions(table, (3, 3), (2, 2), method="nearest")
