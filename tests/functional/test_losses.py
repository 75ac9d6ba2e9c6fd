"""Label-smoothed cross entropy against the formulation with an explicit target distribution, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import label_smoothed_cross_entropy, symmetric_kl_divergence, z_loss

B, T, V = 2, 5, 7
SMOOTHINGS = [0.0, 0.1, 0.4]


# `smoothing` stays a number that is not traced: it is checked.
_loss = jax.jit(label_smoothed_cross_entropy, static_argnames="smoothing")


@functools.partial(jax.jit, static_argnames="smoothing")
def _loss_and_gradient(logits, targets, weights, smoothing):
    def total(logits):
        return (weights * label_smoothed_cross_entropy(logits, targets, smoothing=smoothing)).sum()

    return jax.value_and_grad(total)(logits)


def _batch(*shape, num_classes=V, seed=0, scale=3.0):
    random = np.random.default_rng(seed)
    logits = scale * random.normal(size=(*shape, num_classes))
    return logits.astype(np.float32), random.integers(0, num_classes, shape)


def _smoothed(targets, num_classes, smoothing):
    """The distribution q: (1 - e) on the target, and e spread over all classes, the target included."""
    q = np.full((*np.shape(targets), num_classes), smoothing / num_classes)
    for index in np.ndindex(np.shape(targets)):
        q[*index, np.asarray(targets)[index]] += 1 - smoothing
    return q


def _probabilities(logits):
    logits = np.asarray(logits, np.float64)
    unnormalized = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return unnormalized / unnormalized.sum(axis=-1, keepdims=True)


def _oracle(logits, targets, smoothing):
    return -(_smoothed(targets, logits.shape[-1], smoothing) * np.log(_probabilities(logits))).sum(axis=-1)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("shape", [(), (T,), (B, T)])
def test_equals_the_one_hot_formulation(shape, smoothing):
    logits, targets = _batch(*shape)
    loss = _loss(logits, targets, smoothing=smoothing)
    assert (loss.shape, loss.dtype) == (shape, jnp.float32)
    np.testing.assert_allclose(loss, _oracle(logits, targets, smoothing), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=V, max_size=V),
    target=st.integers(0, V - 1),
    smoothing=st.sampled_from([0.001, 0.1, 0.99]),
    shift=st.floats(-100, 100, width=32),
)
def test_any_logits(logits, target, smoothing, shift):
    logits, target = np.array(logits, np.float32), np.array(target)
    loss = _loss(logits, target, smoothing=smoothing)
    np.testing.assert_allclose(loss, _oracle(logits, target, smoothing), rtol=1e-5, atol=1e-4)
    shifted = _loss(logits + np.float32(shift), target, smoothing=smoothing)
    np.testing.assert_allclose(shifted, loss, atol=2e-4)


@pytest.mark.parity
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_equals_torch(smoothing):
    torch = pytest.importorskip("torch")
    logits, targets = _batch(30)
    theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none")
    want = theirs(torch.from_numpy(np.array(logits)), torch.from_numpy(np.array(targets, np.int64)))
    loss = _loss(logits, targets, smoothing=smoothing)
    np.testing.assert_allclose(loss, want.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_gradient_is_softmax_minus_target_distribution(smoothing):
    logits, targets = _batch(B, T)
    weights = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)
    _, gradient = _loss_and_gradient(logits, targets, weights, smoothing)
    want = _probabilities(logits) - _smoothed(targets, V, smoothing)
    np.testing.assert_allclose(gradient, np.asarray(weights, np.float64)[..., None] * want, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.01, 0.1, 0.4])
def test_minimum_is_the_entropy_of_the_target_distribution(smoothing):
    q = _smoothed(np.array([2]), V, smoothing)
    entropy = -(q * np.log(q)).sum()
    best = np.log(q).astype(np.float32)
    loss, gradient = _loss_and_gradient(best, np.array([2]), np.ones(1, np.float32), smoothing)
    np.testing.assert_allclose(loss, entropy, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    others = best + _batch(100, seed=2)[0]
    worse = np.asarray(_loss(others, np.full(100, 2), smoothing=smoothing))
    assert (worse > float(loss) - 1e-6).all()


def test_without_smoothing_the_minimum_is_zero():
    logits = np.array([[0, 200, 0]], np.float32)
    np.testing.assert_array_equal(_loss(logits, np.array([1])), 0)


@pytest.mark.parametrize("differentiate", [False, True])
def test_no_one_hot_matrix_is_made(differentiate):
    """Beyond inputs and outputs, the compiled program needs a fraction of one array of the logits' size."""
    logits, targets = _batch(8, 16, num_classes=5000)

    def loss(logits, targets):
        return label_smoothed_cross_entropy(logits, targets, smoothing=0.1).mean()

    function = jax.value_and_grad(loss) if differentiate else loss
    memory = jax.jit(function).lower(logits, targets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * logits.nbytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    logits, targets = _batch(B, T)
    half = logits.astype(dtype)
    loss = _loss(half, targets, smoothing=0.1)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, _oracle(half.astype(np.float32), targets, 0.1), rtol=1e-5)


def test_float64_is_float64_throughout():
    with jax.enable_x64(True):
        logits, targets = np.random.default_rng(3).normal(size=(B, T, V)), np.ones((B, T), int)
        loss = _loss(logits, targets, smoothing=0.1)
        assert loss.dtype == jnp.float64
        np.testing.assert_allclose(loss, _oracle(logits, targets, 0.1), rtol=1e-13)


def test_huge_logits_stay_finite():
    logits, targets = _batch(B, T, scale=1e30)
    weights = np.full((B, T), 1 / (B * T), np.float32)
    loss, gradient = _loss_and_gradient(logits, targets, weights, 0.1)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("wrong", [V, 10 * V, -1, -100])
def test_target_outside_the_vocabulary_is_nan(wrong):
    """A marker such as torch's -100 for "ignore" must not be trained on as if it were a class."""
    logits, targets = _batch(T)
    targets[2] = wrong
    loss = _loss(logits, targets, smoothing=0.1)
    np.testing.assert_array_equal(np.isnan(loss), np.arange(T) == 2)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_out_of_range(smoothing):
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\), got"):
        label_smoothed_cross_entropy(*_batch(T), smoothing=smoothing)


def test_shapes_that_do_not_fit():
    logits, targets = _batch(B, T)
    with pytest.raises(ValueError, match=r"targets must have the shape of logits .* \(2, 5\), got \(5,\)"):
        label_smoothed_cross_entropy(logits, targets[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_z_loss_is_the_squared_log_normalizer(dtype):
    logits, _ = _batch(B, T)
    logits = (5 * logits).astype(dtype)
    logits[0, 0] = [1e4] + [0] * (V - 1)
    loss = np.asarray(jax.jit(z_loss)(logits))
    assert loss.dtype == np.float32
    expected = np.log(np.exp(logits[1:].astype(np.float64)).sum(-1)) ** 2
    np.testing.assert_allclose(loss[1:], expected, rtol=2e-6, atol=1e-6)
    assert np.isfinite(loss).all()


def test_z_loss_beside_the_cross_entropy_is_no_second_pass():
    """The compiled program, backward pass included, computes no more exponentials and touches no more memory."""
    logits, targets = _batch(8, 16, num_classes=5000)

    def cost(weight):
        def loss(logits):
            total = label_smoothed_cross_entropy(logits, targets, smoothing=0.1)
            return (total + weight * z_loss(logits) if weight else total).sum()

        return jax.jit(jax.value_and_grad(loss)).lower(logits).compile().cost_analysis()

    plain, both = cost(0.0), cost(1e-4)
    assert both["transcendentals"] == plain["transcendentals"]
    assert both["bytes accessed"] < 1.01 * plain["bytes accessed"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_divergence_is_the_mean_of_both_directions(dtype):
    logits, others = (_batch(B, T, seed=seed)[0].astype(dtype) for seed in range(2))
    others[0, 0] = logits[0, 0] + 3
    p, q = _probabilities(logits), _probabilities(others)
    want = ((p * np.log(p / q)).sum(-1) + (q * np.log(q / p)).sum(-1)) / 2
    divergence = jax.jit(symmetric_kl_divergence)(logits, others)
    assert divergence.dtype == np.float32
    np.testing.assert_allclose(divergence, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(symmetric_kl_divergence)(logits, logits), 0)


def test_divergence_wants_two_of_a_shape():
    logits, _ = _batch(B, T)
    with pytest.raises(ValueError, match=r"the same shape, got \(2, 5, 7\) and \(5, 7\)"):
        symmetric_kl_divergence(logits, logits[0])
