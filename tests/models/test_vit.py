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

from tests.nn.programs import count_draws, draw, jitted, normal, params_of
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
IMAGES, WIDE = normal(0, 2, 12, 12, 2), normal(1, 2, 8, 20, 2)

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention", "interpolate"])


@functools.cache
def make_vit(cls, attention_fn=functional.dot_product_attention, **overrides):
    """A model of that class, the same parameters each time."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: cls(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))


def _oracle(model, image):
    """The sequence, pooled and attention maps of one image, patch by patch and head by head."""
    params = params_of(model, np.float64)
    image = np.asarray(image, np.float64)

    def norm(x, p):
        centerd = x - x.mean(-1, keepdims=True)
        return centerd / np.sqrt((centerd**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

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


def test_equals_the_equations_in_float64():
    model = make_vit(ViT)
    output, maps = _run(model, IMAGES, return_attention=True)
    assert list(maps) == [f"encoder/{layer}/self" for layer in range(3)]
    for row in range(2):
        sequence, pooled, weights = _oracle(model, IMAGES[row])
        np.testing.assert_allclose(output.sequence[row], sequence, atol=5e-5)
        np.testing.assert_allclose(output.pooled[row], pooled, atol=5e-5)
        np.testing.assert_allclose(np.concatenate([w[row] for w in maps.values()]), weights, atol=1e-5)


def test_a_classifier_looks_at_the_class_token():
    model = make_vit(ViTClassifier)
    assert model.vit.pooler is None
    (logits, maps), body = jitted(lambda model: (model(IMAGES, return_attention=True), model.vit(IMAGES)))(model)
    head = params_of(model.classifier)
    np.testing.assert_allclose(logits, body.sequence[:, 0] @ head["kernel"] + head["bias"], atol=1e-5)
    assert maps["encoder/2/self"].shape == (2, 2, 10, 10)
    np.testing.assert_array_equal(_run(model, IMAGES).shape, (2, 5))


def test_every_parameter_has_a_gradient():
    def total(model):
        output = model(WIDE, interpolate=True)
        return jnp.sin(3 * output.sequence).sum() + output.pooled.sum()

    for path, leaf in jax.tree_util.tree_leaves_with_path(params_of(jitted(jax.grad(total))(make_vit(ViT)))):
        name, size = jax.tree_util.keystr(path), np.abs(leaf).max()
        # What is added to all the keys of a query alike changes no weight.
        assert size < 1e-4 if name.endswith("['key']['bias']") else size > 1e-3, (name, size)


def test_images_of_another_size_have_interpolated_positions():
    model = make_vit(ViTClassifier)
    with pytest.raises(
        ValueError, match=r"images of \(8, 20\) pixels, but the model's are \(12, 12\): resize them, or"
    ):
        jax.eval_shape(model, WIDE)
    # An image of 4 x 40 pixels with the same ten patches, in the same order, and ten positions.
    line = WIDE.reshape(2, 2, 4, 20, 2).transpose(0, 2, 1, 3, 4).reshape(2, 4, 40, 2)

    @jitted
    def run(model):
        patches = model.vit.patches(line), model.vit.patches(WIDE)
        wide, maps = model(WIDE, interpolate=True, return_attention=True)
        return patches, wide, maps, model(line, interpolate=True)

    patches, wide, maps, other = run(model)
    assert maps["encoder/0/self"].shape == (2, 2, 11, 11)
    np.testing.assert_allclose(*patches, atol=1e-5)
    assert np.abs(wide - other).max() > 1e-3


def test_images_of_the_size_of_the_model_have_its_positions():
    model = make_vit(ViTClassifier)
    np.testing.assert_array_equal(_run(model, IMAGES, interpolate=True), _run(model, IMAGES))


def _interpolate(cases, method):
    """Of many tables and grids, as one program: patches [rows, columns, D] of each, and its class token."""

    @jitted
    def run(tables):
        grids = [(old, new) for _, old, new in cases]
        return [interpolate_positions(t, *g, method=method) for t, g in zip(tables, grids, strict=True)]

    found = run([table for table, _, _ in cases])
    return [(t[1:].reshape(*new, -1), t[0]) for t, (_, _, new) in zip(found, cases, strict=True)]


def _table(patches, class_token=7.0):
    rows = patches.reshape(-1, patches.shape[-1])
    return np.concatenate([np.full_like(rows[:1], class_token), rows])


def _grids(rng, smallest, largest):
    return tuple(int(size) for size in rng.integers(smallest, largest, 2))


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_interpolation_of_the_same_grid_changes_nothing(method):
    table = normal(2, 13, 3)
    same = jitted(lambda table: interpolate_positions(table, (3, 4), (3, 4), method=method))
    np.testing.assert_array_equal(same(table), table)


def test_bilinear_interpolation_is_numpys_along_either_axis():
    rng, cases, expected = np.random.default_rng(3), [], []
    for _ in range(30):
        old, new = _grids(rng, 1, 9), _grids(rng, 1, 12)
        want = rng.normal(size=(*old, 2)).astype(np.float32)
        cases.append((_table(want), old, new))
        for axis in (0, 1):
            # Both ends of a side are 0 and 1, a patch is known at its center.
            places = (np.arange(new[axis]) + 0.5) / new[axis]
            known = (np.arange(old[axis]) + 0.5) / old[axis]
            want = np.apply_along_axis(lambda line, x=places, xs=known: np.interp(x, xs, line), axis, want)
        expected.append(want)
    for (got, class_token), want in zip(_interpolate(cases, "bilinear"), expected, strict=True):
        np.testing.assert_array_equal(class_token, 7.0)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_bicubic_interpolation_of_a_mirrored_shifted_or_transposed_grid():
    rng, cases = np.random.default_rng(4), []
    for _ in range(20):
        old, new = _grids(rng, 1, 9), _grids(rng, 1, 9)
        patches = rng.normal(size=(*old, 2)).astype(np.float32)
        cases += [(_table(each), old, new) for each in (patches, patches + 5, patches[::-1])]
        cases.append((_table(patches.swapaxes(0, 1)), old[::-1], new[::-1]))
    found = [patches for patches, _ in _interpolate(cases, "bicubic")]
    for got, shifted, mirrored, transposed in zip(*(found[index::4] for index in range(4)), strict=True):
        np.testing.assert_allclose(shifted, got + 5, atol=1e-5)
        np.testing.assert_allclose(mirrored, got[::-1], atol=1e-5)
        np.testing.assert_allclose(transposed, got.swapaxes(0, 1), atol=1e-5)


def test_bicubic_interpolation_of_halves_has_the_weights_of_keys():
    """With half as many, new points lie half way between old ones 0 and 1, 2 and 3, 4 and 5."""
    line = np.zeros((6, 1, 2), np.float32)
    line[2] = 1.0
    [(got, _)] = _interpolate([(_table(line), (6, 1), (3, 1))], "bicubic")
    np.testing.assert_allclose(got[:, 0, 0], [-0.09375, 0.59375, 0.0], atol=1e-6)


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate"])
def test_each_dropout_draws_from_the_stream(rate):
    model = make_vit(ViTClassifier, **{rate: 0.3})
    run = jitted(lambda model, seed: model(IMAGES, rngs=nnx.Rngs(dropout=jax.random.key(seed))))
    first, again, other = (run(model, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    plain = _run(make_vit(ViTClassifier), IMAGES)
    assert min(np.abs(first - x).max() for x in (other, plain)) > 0.01


def test_dropout_needs_a_stream_and_a_rate():
    dropping = make_vit(ViTClassifier, dropout_rate=0.3, attention_dropout_rate=0.3)
    drop = lambda model: model(IMAGES, rngs=nnx.Rngs(dropout=0))  # noqa: E731
    assert count_draws(dropping, IMAGES) == count_draws(drop, make_vit(ViTClassifier)) == 0
    # The sum of patches and positions; of each layer its sublayers and its attention.
    assert count_draws(drop, dropping) == 1 + 3 * (2 + 1)


def test_another_attention():
    other = functools.partial(functional.sliding_window_attention, window=10)
    got = _run(make_vit(ViTClassifier, attention_fn=other), IMAGES)
    np.testing.assert_allclose(got, _run(make_vit(ViTClassifier), IMAGES), atol=1e-5)


def test_bfloat16_is_near_and_its_logits_float32():
    want, got = (_run(make_vit(ViTClassifier, dtype=dtype), IMAGES) for dtype in ("float32", "bfloat16"))
    assert got.dtype == jnp.float32
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()
    assert jax.eval_shape(make_vit(ViT, dtype="bfloat16"), IMAGES).sequence.dtype == jnp.bfloat16


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
    alone = dataclasses.replace(config, has_pooler=False)
    for cls, sizes, want in ((ViT, alone, body), (ViTClassifier, config, classifier)):
        abstract = nnx.eval_shape(lambda cls=cls, sizes=sizes: cls(sizes, rngs=nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == want


def test_default_is_b_16_and_its_classifier_starts_at_zero():
    assert ViTConfig() == ViTConfig.published("ViT-B/16")
    assert ViTConfig.published("ViT-H/14", image_size=518).image_size == 518

    @jitted
    def start():
        model = ViTClassifier(CONFIG, rngs=nnx.Rngs(0))
        return model(IMAGES), model.vit(IMAGES).sequence

    logits, sequence = start()
    np.testing.assert_array_equal(logits, 0)
    assert np.std(sequence[0] - sequence[1]) > 0.1


def test_refusals():
    def build(**overrides):
        return nnx.eval_shape(lambda: ViTClassifier(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match="no published ViT is called 'ViT-G/14'; there are ViT-B/16"):
        ViTConfig.published("ViT-G/14")
    with pytest.raises(ValueError, match=r"activation must be .* or .*, got 'tanh'"):
        build(activation="tanh")
    with pytest.raises(ValueError, match="image_size=12 is not divisible by patch_size=5"):
        build(patch_size=5)
    with pytest.raises(ValueError, match="needs labels"):
        build(labels=())
    with pytest.raises(ValueError, match="images must have num_channels=2 channels, got 3"):
        jax.eval_shape(make_vit(ViT), np.ones((1, 12, 12, 3), np.float32))
    with pytest.raises(ValueError, match=r"images of \(12, 14\) pixels do not divide into patches"):
        jax.eval_shape(lambda: make_vit(ViT)(np.ones((1, 12, 14, 2), np.float32), interpolate=True))
    table = np.ones((10, 2), np.float32)
    with pytest.raises(ValueError, match=r"10 positions, but a class token and \(2, 4\) patches need 9"):
        interpolate_positions(table, (2, 4), (3, 3))
    with pytest.raises(ValueError, match="method must be one of bicubic, bilinear, got 'nearest'"):
        interpolate_positions(table, (3, 3), (2, 2), method="nearest")
