"""SAN-CTC against its equations in float64 NumPy, and what must not change its output."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import count_draws, draw, jitted, normal, params_of
from tfx_jax.models import SanCTC, SanCTCConfig

CONFIG = SanCTCConfig(
    vocab_size=7, num_features=5, subsampling=3, num_layers=2, d_model=12, num_heads=2, d_ff=20, dropout_rate=0.0
)
FRAMES = normal(0, 3, 11, 5)
NUM_FRAMES = np.array([11, 7, 0], np.int32)
NUM_STEPS = [4, 3, 0]

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])


@functools.cache
def make_model(**overrides):
    """The same parameters each time."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: SanCTC(config, rngs=nnx.Rngs(0)))


def _oracle(model, frames):
    """Logits and attention maps of one row without padding: step by step, head by head."""
    params = params_of(model, np.float64)

    def norm(x, p):
        centerd = x - x.mean(-1, keepdims=True)
        return centerd / np.sqrt((centerd**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    rows = []
    for step in range(math.ceil(len(frames) / 3)):
        some = frames[3 * step : 3 * step + 3].ravel()
        row = params["frames"]["bias"] + np.append(some, np.zeros(15 - len(some))) @ params["frames"]["kernel"]
        angles = [step / 10_000 ** (2 * pair / 12) for pair in range(6)]
        rows.append(row + np.array([wave(angle) for angle in angles for wave in (math.sin, math.cos)]))
    x, maps = np.stack(rows), []
    for index in range(2):
        p = jax.tree.map(lambda leaf, index=index: leaf[index], params["encoder_layers"])
        attention, feed_forward = p["self_attention"], p["feed_forward"]
        y = norm(x, p["self_attention_residual"]["norm"])
        for head in range(2):
            query, key, value = (y @ attention[name]["kernel"][:, head] for name in ("query", "key", "value"))
            weights = np.exp(query @ key.T / math.sqrt(6))
            maps.append(weights / weights.sum(-1, keepdims=True))
            x = x + maps[-1] @ value @ attention["out"]["kernel"][head]
        y = norm(x, p["feed_forward_residual"]["norm"]) @ feed_forward["up"] + feed_forward["up_bias"]
        x = x + np.maximum(y, 0) @ feed_forward["down"] + feed_forward["down_bias"]
    classifier = params["classifier"]
    return norm(x, params["norm"]) @ classifier["kernel"] + classifier["bias"], np.stack(maps)


def test_equals_the_equations_in_float64():
    """A row that is full and one that is not, neither of whole steps."""
    logits, maps = _run(make_model(), FRAMES, NUM_FRAMES, return_attention=True)
    assert logits.shape == (3, 4, 7)
    assert logits.dtype == np.float32
    assert list(maps) == ["encoder/0/self", "encoder/1/self"]
    for row, (length, steps) in enumerate(zip(NUM_FRAMES[:2], NUM_STEPS, strict=False)):
        expected, weights = _oracle(make_model(), FRAMES[row, :length].astype(np.float64))
        np.testing.assert_allclose(logits[row, :steps], expected, atol=5e-5)
        found = np.concatenate([w[row] for w in maps.values()])[:, :steps]
        np.testing.assert_allclose(found[..., :steps], weights, atol=1e-5)
        assert not found[..., steps:].any()


def test_padding_changes_nothing():
    """Neither what stands there, not a bit, nor how much of it there is, nor the other rows."""
    logits = _run(make_model(), FRAMES, NUM_FRAMES)
    assert np.isfinite(logits).all()
    changed = np.where(np.arange(11)[:, None] < NUM_FRAMES[:, None, None], FRAMES, np.float32(np.nan))
    longer = _run(make_model(), np.pad(changed, ((0, 0), (0, 5), (0, 0)), constant_values=9), NUM_FRAMES)
    alone = _run(make_model(), FRAMES[1:2, :7], NUM_FRAMES[1:2])
    changed = _run(make_model(), changed, NUM_FRAMES)
    assert longer.shape == (3, 6, 7)
    for row, steps in enumerate(NUM_STEPS):
        np.testing.assert_array_equal(changed[row, :steps], logits[row, :steps])
        np.testing.assert_allclose(longer[row, :steps], logits[row, :steps], atol=1e-5)
    np.testing.assert_allclose(alone[0], logits[1, :3], atol=1e-5)


def test_every_frame_is_heard_everywhere():
    """The gradient of any step's logits reaches all frames that exist, and no other."""

    def at(frames, row, step):
        return make_model()(frames, NUM_FRAMES)[row, step].var()

    heard = np.abs(jitted(jax.grad(at))(FRAMES, 1, 0)).max(axis=-1) > 1e-6
    np.testing.assert_array_equal(heard, (np.arange(11) < np.array([[0], [7], [0]])))


def test_dropout_draws_and_half_precision_gives_float32():
    model = make_model(dropout_rate=0.5, attention_dropout_rate=0.5, dtype="bfloat16")

    def run(seed):
        return model(FRAMES, NUM_FRAMES, rngs=nnx.Rngs(dropout=jax.random.key(seed)))

    assert count_draws(run, 0) == 1 + 2 * 3
    assert count_draws(lambda: model(FRAMES, NUM_FRAMES)) == 0
    found = jax.eval_shape(run, 0)
    assert (found.shape, found.dtype) == ((3, 4, 7), np.float32)


def test_parameters_by_hand():
    layer = 4 * 12 * 12 + 12 * 20 + 20 + 20 * 12 + 12 + 4 * 12
    expected = (15 * 12 + 12) + 2 * layer + 2 * 12 + (12 * 7 + 7)
    assert sum(leaf.size for leaf in jax.tree.leaves(params_of(make_model()))) == expected


def test_sizes_that_contradict():
    with pytest.raises(ValueError, match=r"^d_model=12 is not divisible by num_heads=5"):
        dataclasses.replace(CONFIG, num_heads=5).validate()
    with pytest.raises(ValueError, match=r"^d_model=15 must be even"):
        dataclasses.replace(CONFIG, d_model=15, num_heads=3).validate()
    with pytest.raises(ValueError, match=r"^frames must have num_features=5 features, got 4"):
        make_model()(FRAMES[..., :4], NUM_FRAMES)
