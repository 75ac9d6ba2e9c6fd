"""What is special to the local attention of Luong et al. (2015): places, Gaussians, and what they learn from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.additive import additive_weights
from tests.functional.attention.oracles.aligned import aligned_weights, predicted_position
from tests.functional.attention.oracles.dense import dense_weights, mixed
from tfx_jax.functional import additive_attention, aligned_attention, aligned_position, dot_product_attention

B, T, S, N, K, H, U, F = 2, 5, 9, 4, 2, 3, 6, 7


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = _normal(0, B, T, N, H), _normal(1, B, S, K, H), _normal(2, B, S, K, U)
POSITION = np.random.default_rng(3).uniform(0, S, (B, N, T)).astype(np.float32)
W, V = _normal(4, H, F), _normal(5, F)
MASK = np.arange(S) < np.array([S, 4])[:, None, None, None]

_attend = jax.jit(
    functools.partial(aligned_attention, return_weights=True),
    static_argnames=("window", "sigma", "attention_fn", "scale"),
)


@pytest.mark.parametrize("sigma", [None, 1.0])
def test_each_query_and_head_has_a_place_of_its_own(sigma):
    out, weights = _attend(QUERY, KEY, VALUE, mask=MASK, position=POSITION, window=2, sigma=sigma)
    want = aligned_weights(QUERY, KEY, mask=MASK, position=POSITION, window=2, sigma=sigma)
    np.testing.assert_allclose(weights, want, atol=1e-6)
    np.testing.assert_allclose(out, mixed(want, VALUE), atol=1e-5)
    assert (want.sum(axis=-1) == 0).any()  # the second row has four keys, and some places are behind them


def test_the_borders_of_a_window_are_in_it():
    """Both of them, of a whole number; of a half there are but four keys in reach."""
    place = np.array([[[4.0, 4.5, 0.0, 10.0, 10.5]]], np.float32)
    _, weights = _attend(QUERY, KEY, VALUE, position=place, window=2)
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(weights)[0, 0]]
    assert seen == [[2, 3, 4, 5, 6], [3, 4, 5, 6], [0, 1, 2], [8], []]


def test_padding_in_front_of_keys_has_no_position():
    padded = [np.pad(x, ((0, 0), (3, 0), (0, 0), (0, 0))) for x in (KEY, VALUE)]
    seen = np.arange(S + 3)[None, None, None] >= 3
    places = np.maximum(np.arange(S + 3) - 3, -1)[None]
    options = {"position": POSITION, "window": 2, "sigma": 1.0}
    out, weights = _attend(QUERY, *padded, mask=seen, key_position=places, **options)
    want = aligned_weights(QUERY, KEY, **options)
    np.testing.assert_allclose(np.asarray(weights)[..., 3:], want, atol=1e-6)
    np.testing.assert_allclose(out, mixed(want, VALUE), atol=1e-5)


def test_what_an_attention_has_bound_itself_stays():
    """Its scale, above all, and any other score."""
    unscaled = functools.partial(dot_product_attention, scale=1.0)
    additive = functools.partial(additive_attention, w_query=W, w_key=W, v=V)
    options = {"position": POSITION, "window": 3, "sigma": 1.5}
    own = {"scale": 1.0}
    _, weights = _attend(QUERY, KEY, VALUE, attention_fn=unscaled, **options)
    np.testing.assert_allclose(weights, aligned_weights(QUERY, KEY, **options, **own), atol=1e-6)
    _, weights = _attend(QUERY, KEY, VALUE, scale=0.3, **options)
    np.testing.assert_allclose(weights, aligned_weights(QUERY, KEY, **options, scale=0.3), atol=1e-6)
    _, weights = _attend(QUERY, KEY, VALUE, attention_fn=additive, **options)
    scores = np.log(additive_weights(QUERY, KEY, w_query=W, w_key=W, v=V))
    np.testing.assert_allclose(weights, aligned_weights(QUERY, KEY, **options, scores=scores), atol=1e-6)


def test_a_wide_window_and_a_wide_gaussian_are_dense_attention():
    _, weights = _attend(QUERY, KEY, VALUE, position=POSITION, window=S, sigma=1e4)
    np.testing.assert_allclose(weights, dense_weights(QUERY, KEY), atol=1e-6)


def test_predicted_places_are_those_of_the_formula():
    length = np.array([9, 4])[:, None, None]
    got = jax.jit(aligned_position)(QUERY, length, w=W, v=V)
    want = predicted_position(QUERY, np.broadcast_to(length, (B, T, N)), w=W, v=V)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert want.min() > 0 and (want < length).all()  # noqa: PT018
    assert np.ptp(want[0]) > 3  # they are not all the middle
    half = jax.eval_shape(aligned_position, QUERY.astype(jnp.bfloat16), length, w=W, v=V)
    assert half.dtype == jnp.float32


def test_the_prediction_learns_from_the_gaussian():
    """Gradients of W and v are those of differences of the formula."""
    length = np.full((B, N, T), S, np.float32)
    cotangent = _normal(6, B, T, N, U)

    def loss(parameters):
        place = aligned_position(QUERY.swapaxes(1, 2), length, **parameters)
        return (aligned_attention(QUERY, KEY, VALUE, position=place, window=20, sigma=2.0) * cotangent).sum()

    def oracle(parameters):
        place = predicted_position(QUERY.swapaxes(1, 2), length, **parameters)
        return (mixed(aligned_weights(QUERY, KEY, position=place, window=20, sigma=2.0), VALUE) * cotangent).sum()

    parameters = {"w": W, "v": V}
    gradients = jax.jit(jax.grad(loss))(parameters)
    for name, direction in {"w": _normal(7, H, F), "v": _normal(8, F)}.items():
        moved = [np.float64(parameters[name]) + step * np.float64(direction) for step in (1e-6, -1e-6)]
        ends = [oracle(parameters | {name: end}) for end in moved]
        got = np.vdot(gradients[name], direction)
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-6, rtol=1e-3, err_msg=name)


def test_dropout_keeps_the_mean_and_leaves_the_weights():
    options = {"position": POSITION, "window": 3, "sigma": 1.5}
    attend = jax.jit(
        lambda rng: aligned_attention(
            QUERY, KEY, VALUE, dropout_rate=0.5, dropout_rng=rng, return_weights=True, **options
        )
    )
    many, weights = jax.jit(jax.vmap(attend))(jax.random.split(jax.random.key(0), 4000))
    plain, undropped = _attend(QUERY, KEY, VALUE, **options)
    np.testing.assert_allclose(weights[0], undropped, atol=1e-6)
    many = np.asarray(many)
    errors = np.abs(many.mean(axis=0) - plain) / (many.std(axis=0) / np.sqrt(len(many)) + 1e-6)
    assert errors.max() < 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": -1}, "window must be at least 0 .* got window=-1 and sigma=None"),
        ({"sigma": 0.0}, "sigma above 0, got window=2 and sigma=0.0"),
        ({"position": POSITION[0]}, r"position must be broadcastable to \(2, 4, 5\), got shape \(4, 5\)"),
        ({"position": POSITION[..., :3]}, r"position must be broadcastable to \(2, 4, 5\), got shape \(2, 4, 3\)"),
        ({"key_position": np.zeros((B, T), np.int32)}, r"key_position .* \(2, 9\), got shape \(2, 5\)"),
        ({"mask": np.ones((B, 1, 1, S), np.float32)}, "mask must be boolean"),
    ],
)
def test_errors(changed, message):
    arguments = {"position": POSITION, "window": 2} | changed
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(aligned_attention, QUERY, KEY, VALUE, **options), **arrays)
