"""Learning rates and optimizers against their papers' formulas in float64 NumPy."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tfx_jax.models import Llama, LlamaConfig
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import averaged_params, inverse_sqrt_schedule, learning_rate, make_optimizer
from tfx_jax.training.train_setup import hidden_matrices


def equation_3(step, d_model, warmup_steps):
    """Vaswani et al. (2017), equation 3; steps count from 1."""
    step = np.asarray(step, np.float64)
    return d_model**-0.5 * np.minimum(step**-0.5, step * warmup_steps**-1.5)


@pytest.mark.parametrize("d_model", [128, 512, 1024, 33])
@pytest.mark.parametrize("warmup_steps", [1, 400, 4_000, 16_000])
def test_schedule_is_equation_3(d_model, warmup_steps):
    steps = np.concatenate([np.arange(1, 50), np.geomspace(1, 3e6, 400).astype(int), [warmup_steps, 100_000]])
    schedule = learning_rate(OptimizerConfig(warmup_steps=warmup_steps), d_model)
    rates = jax.jit(schedule)((steps - 1).astype(np.int32))  # the counter is 0 at the first update
    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates, equation_3(steps, d_model, warmup_steps), rtol=5e-7)


def test_peak_of_the_base_model():
    """At the 4000th update: 6.9877e-4 = (512 * 4000)^-0.5, and lower on both sides."""
    schedule = learning_rate(OptimizerConfig(), d_model=512)
    before, peak, after, first = jax.jit(schedule)(np.array([3_999, 4_000, 4_001, 1]) - 1).tolist()
    assert peak == pytest.approx(6.9877e-4, abs=5e-9)
    assert before < peak > after
    assert first == pytest.approx(peak / 4_000, rel=1e-6)


def test_peak_of_ones_own():
    schedule = learning_rate(OptimizerConfig(warmup_steps=100, peak_learning_rate=2e-3), d_model=512)
    rates = jax.jit(schedule)(np.array([1, 50, 100, 400]) - 1).tolist()
    assert rates == pytest.approx([2e-5, 1e-3, 2e-3, 1e-3], rel=1e-6)
    peak_of_zero = learning_rate(OptimizerConfig(peak_learning_rate=0.0), d_model=512)
    assert jax.jit(peak_of_zero)(3_999) == 0.0


def test_schedule_is_the_same_when_jitted():
    schedule = inverse_sqrt_schedule(0.5, 10)
    counts = np.arange(40)
    np.testing.assert_allclose(jax.jit(schedule)(counts), schedule(counts), rtol=2e-7)


def numpy_adam(weights, grads, rates, b1, b2, epsilon):
    """Kingma and Ba (2015), algorithm 1, in float64."""
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        mean = b1 * mean + (1 - b1) * grad
        square = b2 * square + (1 - b2) * grad**2
        weights = weights - rate * (mean / (1 - b1**step)) / (np.sqrt(square / (1 - b2**step)) + epsilon)
    return weights


def updated(config, params, grads, matrices=None):
    """The parameters after an update with each of the gradients."""
    optimizer = make_optimizer(config, d_model=16, matrices=matrices)
    params, *grads = jax.tree.map(np.float32, [params, *grads])

    @jax.jit
    def step(params, state, grad):
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return jax.device_get(params)


@pytest.mark.parametrize("settings", [{}, {"b1": 0.8, "b2": 0.95, "epsilon": 0.1}])
def test_adam_equals_float64_numpy(settings):
    """Seven updates, over the peak of the schedule; by default with the paper's 0.9, 0.98 and 1e-9."""
    config = OptimizerConfig(warmup_steps=3, **settings)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(4, 3))
    grads = rng.normal(size=(7, 4, 3)) * 10.0 ** rng.integers(-4, 3, (7, 4, 3))
    expected = numpy_adam(
        weights,
        grads,
        equation_3(np.arange(1, 8), 16, 3),
        b1=settings.get("b1", 0.9),
        b2=settings.get("b2", 0.98),
        epsilon=settings.get("epsilon", 1e-9),
    )
    params = updated(config, {"weights": weights}, [{"weights": grad} for grad in grads])
    assert np.abs(expected - weights).max() > 0.1
    np.testing.assert_allclose(params["weights"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_lion_and_sgd_equal_float64_numpy(name):
    """Algorithm 2 of Chen et al. (2023), and gradient descent with momentum; biases do not decay."""
    config = OptimizerConfig(name=name, b1=0.8, b2=0.95, warmup_steps=3, peak_learning_rate=0.1)
    config.weight_decay = 0.3 if name == "lion" else 0.0
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 3)) for name in ("up", "bias")}
    grads = [{name: rng.normal(size=(4, 3)) for name in params} for _ in range(5)]
    rates = jax.jit(learning_rate(config, 16))(np.arange(5)).tolist()
    found = updated(config, params, grads)
    for key, weights in params.items():
        moment, decay = np.zeros((4, 3)), config.weight_decay * (key == "up")
        for rate, grad in zip(rates, (grads[step][key] for step in range(5)), strict=True):
            if name == "lion":
                change, moment = np.sign(0.8 * moment + 0.2 * grad), 0.95 * moment + 0.05 * grad
            else:
                change = moment = 0.8 * moment + grad
            weights = weights - rate * (change + decay * weights)
        np.testing.assert_allclose(found[key], weights, rtol=1e-5, atol=1e-6)


def newton_schulz(matrix):
    """Five steps of Jordan's iteration, which drives the singular values toward 1."""
    wide = matrix if len(matrix) <= len(matrix.T) else matrix.T
    wide = wide / np.linalg.norm(wide)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if wide.shape == matrix.shape else wide.T


def test_muon_equals_float64_numpy():
    """Stacks of matrices with several input or output axes; what is no hidden matrix gets AdamW."""
    config = OptimizerConfig(name="muon", b1=0.8, b2=0.95, weight_decay=0.3, warmup_steps=3, peak_learning_rate=0.1)
    shapes = {"query": (2, 6, 2, 2), "out": (2, 2, 2, 3), "table": (5, 4), "bias": (3,)}
    matrices = {"query": (1, 2), "out": (2, 1)}
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(4)]
    rates = jax.jit(learning_rate(config, 16))(np.arange(4)).tolist()
    found = updated(config, params, grads, matrices)
    for name, num_rows in (("query", 6), ("out", 4)):
        for layer in range(2):
            values = params[name][layer].reshape(num_rows, -1)
            moment = np.zeros_like(values)
            for step, rate in enumerate(rates, 1):
                grad = grads[step - 1][name][layer].reshape(num_rows, -1)
                moment = 0.8 * moment + 0.2 * grad
                ahead = 0.8 * moment / (1 - 0.8 ** (step + 1)) + 0.2 * grad / (1 - 0.8**step)  # Nesterov
                change = 0.2 * max(values.shape) ** 0.5 * newton_schulz(ahead)
                values = values - rate * (change + 0.3 * values)
            np.testing.assert_allclose(found[name][layer].reshape(num_rows, -1), values, rtol=1e-4, atol=1e-5)
    adamw = dataclasses.replace(config, name="adamw")
    others = ("table", "bias")
    expected = updated(
        adamw, {name: params[name] for name in others}, [{name: g[name] for name in others} for g in grads]
    )
    for name in others:
        np.testing.assert_array_equal(found[name], expected[name])


def test_schedule_free_equals_float64_numpy():
    """Equations 3 to 5 of Defazio et al. (2024), with AdamW's step from z and its decay at y."""
    config = OptimizerConfig("schedule_free", "constant", warmup_steps=3, peak_learning_rate=0.1, b1=0.8, b2=0.95)
    config.weight_decay, config.clip_norm = 0.3, 1e9  # clipping that changes nothing
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=(4, 3)), rng.normal(size=(6, 4, 3))
    optimizer = make_optimizer(config, d_model=16)
    params = {"up": np.float32(start)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    average = iterate = y = start
    square, total = np.zeros((4, 3)), 0.0
    for step, grad in enumerate(grads, 1):
        updates, state = update({"up": np.float32(grad)}, state, params)
        params = optax.apply_updates(params, updates)
        rate = 0.1 * min(step / 3, 1)
        square = 0.95 * square + 0.05 * grad**2
        direction = grad / (np.sqrt(square / (1 - 0.95**step)) + config.epsilon)
        iterate = iterate - rate * (direction + 0.3 * y)
        total += rate**2
        average = average + rate**2 / total * (iterate - average)
        y = 0.2 * iterate + 0.8 * average
    np.testing.assert_allclose(params["up"], y, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(averaged_params(config, state, params)["up"], average, rtol=1e-4, atol=1e-6)


def test_muon_gets_the_matrices_of_layers():
    model = nnx.eval_shape(
        lambda: Llama(LlamaConfig(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
    )
    matrices = {path.removeprefix("decoder_layers/"): axes for path, axes in hidden_matrices(model).items()}
    assert matrices == {
        "self_attention/query/kernel": (1, 2),
        "self_attention/key/kernel": (1, 2),
        "self_attention/value/kernel": (1, 2),
        "self_attention/out/kernel": (2, 1),
        "feed_forward/gate": (1, 1),
        "feed_forward/up": (1, 1),
        "feed_forward/down": (1, 1),
    }


def test_default_keeps_the_state_of_plain_adam():
    """Or checkpoints of before there was a choice could not be read."""
    params = {"weights": np.ones(3, np.float32)}
    found, expected = (
        jax.eval_shape(optimizer.init, params)
        for optimizer in (make_optimizer(OptimizerConfig(), 16), optax.adam(optax.constant_schedule(1.0)))
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_adamw_decays_weights_but_neither_biases_nor_gains():
    config = OptimizerConfig(name="adamw", weight_decay=0.3, warmup_steps=3, peak_learning_rate=0.1)
    names = ("up", "up_bias", "scale", "bias")
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 3)) for name in names}
    grads = [{name: rng.normal(size=(4, 3)) for name in names} for _ in range(5)]
    rates = jax.jit(learning_rate(config, 16))(np.arange(5)).tolist()
    found = updated(config, params, grads)
    for name in names:
        values = params[name]
        for last, _ in enumerate(grads):
            adam = [
                numpy_adam(np.zeros((4, 3)), [g[name] for g in grads[:n]], rates[:n], 0.9, 0.98, 1e-9)
                for n in (last, last + 1)
            ]
            values = values + (adam[1] - adam[0]) - rates[last] * (0.3 if name == "up" else 0.0) * values
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_clipping_is_by_the_norm_over_all_parameters(name):
    rng = np.random.default_rng(1)
    params = {"a": rng.normal(size=3), "b": rng.normal(size=(2, 2))}
    grads = [{"a": scale * rng.normal(size=3), "b": scale * rng.normal(size=(2, 2))} for scale in (0.01, 100.0, 1.0)]
    norms = [np.sqrt(sum(np.square(leaf).sum() for leaf in grad.values())) for grad in grads]
    assert norms[0] < 0.5 < norms[2] < norms[1]
    config = OptimizerConfig(name=name, warmup_steps=3, peak_learning_rate=0.1, clip_norm=0.5)
    found = updated(config, params, grads)
    rates = jax.jit(learning_rate(config, 16))(np.arange(3)).tolist()
    for leaf, start in params.items():
        clipped = [grad[leaf] * min(1.0, 0.5 / norm) for grad, norm in zip(grads, norms, strict=True)]
        expected = numpy_adam(start, clipped, rates, 0.9, 0.98, 1e-9)
        np.testing.assert_allclose(found[leaf], expected, rtol=1e-5, atol=1e-6)


def test_learning_rate_of_adafactor_is_the_paper_s():
    """Shazeer and Stern (2018), section 9: min(1e-6 t, 1 / sqrt(t)), relative to the parameters."""
    steps = np.array([1, 100, 9_999, 10_000, 10_001, 500_000])
    schedule = learning_rate(OptimizerConfig(name="adafactor", warmup_steps=10_000), d_model=512)
    np.testing.assert_allclose(jax.jit(schedule)(steps - 1), np.minimum(1e-6 * steps, steps**-0.5), rtol=1e-6)


def numpy_adafactor(weights, grads, rates, weight_decay=0.0):
    """Shazeer and Stern (2018), algorithms 4 (matrices) and 5, in float64."""
    row = column = square = 0.0
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        decay = 1 - step**-0.8
        squares = grad**2 + 1e-30
        if grad.ndim == 2:
            row = decay * row + (1 - decay) * squares.mean(axis=1, keepdims=True)
            column = decay * column + (1 - decay) * squares.mean(axis=0, keepdims=True)
            square = row * column / row.mean()
        else:
            square = decay * square + (1 - decay) * squares
        update = grad / np.sqrt(square)
        update = update / max(1.0, np.sqrt(np.mean(update**2)))
        scale = max(1e-3, np.sqrt(np.mean(weights**2)))
        weights = weights - rate * scale * update - rate * weight_decay * weights
    return weights


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_adafactor_equals_float64_numpy_layer_by_layer(weight_decay):
    """Matrices of a stack of layers are factored one by one, as if they were not stacked."""
    rng = np.random.default_rng(2)
    shapes = {"up": (40, 33), "bias": (40,)}

    def draw(scale):
        stacked = {name: scale * rng.normal(size=(3, *shape)) for name, shape in shapes.items()}
        return {"encoder_layers": stacked, "table": scale * rng.normal(size=(50, 40))}

    params, grads = draw(0.1), [draw(10.0**power) for power in (0, -3, 1, 0)]
    for layer in range(3):  # of very different gradients
        for grad in grads:
            grad["encoder_layers"] = {name: leaf * 10.0**layer for name, leaf in grad["encoder_layers"].items()}
    config = OptimizerConfig(name="adafactor", warmup_steps=2, weight_decay=weight_decay, peak_learning_rate=0.1)
    rates = jax.jit(learning_rate(config, 16))(np.arange(4)).tolist()
    found = updated(config, params, grads)
    expected = numpy_adafactor(params["table"], [grad["table"] for grad in grads], rates, weight_decay)
    np.testing.assert_allclose(found["table"], expected, rtol=1e-5, atol=1e-6)
    for name, decayed in (("up", weight_decay), ("bias", 0.0)):
        for layer in range(3):
            expected = numpy_adafactor(
                params["encoder_layers"][name][layer],
                [grad["encoder_layers"][name][layer] for grad in grads],
                rates,
                decayed,
            )
            np.testing.assert_allclose(found["encoder_layers"][name][layer], expected, rtol=1e-5, atol=1e-6)


def test_adafactor_keeps_a_fraction_of_adam_s_moments():
    """Of the base model, from shapes alone."""
    shapes = nnx.eval_shape(lambda: Transformer(TransformerConfig(), rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(shapes))

    def size(name):
        state = jax.eval_shape(make_optimizer(OptimizerConfig(name=name), 512).init, params)
        return sum(leaf.size for leaf in jax.tree.leaves(state))

    assert size("adam") == pytest.approx(2 * sum(leaf.size for leaf in jax.tree.leaves(params)), abs=10)
    assert size("adafactor") < 0.02 * size("adam")


def test_unknown_optimizer():
    with pytest.raises(ValueError, match=r'optimizer must be "adam", .*, "muon" or "schedule_free", got .x.$'):
        make_optimizer(OptimizerConfig(name="x"), 16)


@pytest.mark.parametrize(("schedule", "final_fraction"), [("cosine", 0.1), ("cosine", 0.0), ("linear", 0.25)])
def test_schedules_that_end_with_the_training(schedule, final_fraction):
    config = OptimizerConfig(schedule=schedule, final_fraction=final_fraction, warmup_steps=10, peak_learning_rate=2e-3)
    rate = learning_rate(config, 16, num_steps=110)
    found, late = np.split(jax.jit(rate)(np.array([*range(110), 10_000])), [110])
    left = (110 - np.arange(10, 111)) / 100
    shape = left if schedule == "linear" else (1 - np.cos(np.pi * left)) / 2
    np.testing.assert_allclose(found[:10], 2e-3 * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[9:], 2e-3 * (final_fraction + (1 - final_fraction) * shape), rtol=1e-5, atol=1e-9)
    assert late == pytest.approx(2e-3 * final_fraction, abs=1e-9)


def test_one_step_of_warm_up_is_none():
    rate = learning_rate(OptimizerConfig(schedule="linear", warmup_steps=1, peak_learning_rate=1.0), 16, num_steps=5)
    assert jax.jit(rate)(np.arange(5)).round(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(("schedule", "num_steps"), [("cosine", None), ("step", 10)])
def test_a_schedule_that_is_none(schedule, num_steps):
    with pytest.raises(ValueError, match=f"schedule='{schedule}' with num_steps={num_steps}"):
        learning_rate(OptimizerConfig(schedule=schedule, peak_learning_rate=1.0), 16, num_steps)


def test_adafactor_finds_stacks_inside_other_parameters():
    """As in a BERT below its head: the same updates as those of the body alone."""
    rng = np.random.default_rng(0)
    body = {"encoder_layers": {"up": rng.normal(size=(3, 40, 64))}, "embedding": {"table": rng.normal(size=(64, 40))}}
    body = jax.tree.map(lambda array: array.astype(np.float32), body)
    nested = {"bert": body, "head": {"kernel": np.ones((40, 2), np.float32)}}
    optimizer = make_optimizer(OptimizerConfig(name="adafactor", warmup_steps=2), 40)

    def update(params):
        updates, _ = jax.jit(optimizer.update)(params, jax.jit(optimizer.init)(params), params)
        return updates

    chex.assert_trees_all_equal(update(nested)["bert"], update(body))


def test_a_schedule_that_does_not_exist_names_those_that_do():
    message = 'schedule must be "inverse_sqrt", "constant" or, with num_steps, "cosine" or "linear", got'
    with pytest.raises(ValueError, match=message):
        learning_rate(OptimizerConfig(schedule="x"), 8, 10)
