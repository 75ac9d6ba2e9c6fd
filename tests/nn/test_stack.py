"""A scanned stack is the loop over its layers: values, gradients, extras and dropout."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import initial, jitted, normal, params_of
from tfx_jax.functional import dropout, orthogonal_features
from tfx_jax.nn import scan_layers, stack_layers, unstack_layers
from tfx_jax.nn.recurrent import CELLS, BidirectionalLayer, RecurrentLayer
from tfx_jax.nn.stack import map_layers

L, B, D, F = 3, 2, 4, 5


class Layer(nnx.Module):
    """x + tanh(x W) V, with dropout inside."""

    def __init__(self, rngs):
        init = nnx.initializers.normal(0.5)
        self.up = nnx.Param(init(rngs.params(), (D, F)))
        self.down = nnx.Param(init(rngs.params(), (F, D)))
        self.activation_fn = jnp.tanh

    def __call__(self, x, rngs=None):
        hidden = self.activation_fn(x @ self.up[...])
        hidden = dropout(hidden, 0.5, None if rngs is None else rngs.dropout())
        return x + hidden @ self.down[...], {"hidden": hidden}


def _run(layer, x, rngs):
    return layer(x, rngs)


X = normal(1, B, D)


def _make(num_layers=L):
    return stack_layers(Layer, num_layers, nnx.Rngs(0))


@functools.cache
def _stack(num_layers=L):
    return initial(lambda: _make(num_layers))


@jitted
def _scan_and_loop(layers, x):
    """Outputs and hidden units of both."""
    out, extras = scan_layers(_run, layers, x, None)
    return (out, extras["hidden"]), _loop(layers, x)


def _loop(layers, x):
    extras = []
    for layer in unstack_layers(layers):
        x, extra = layer(x)
        extras.append(extra["hidden"])
    return x, jnp.stack(extras)


def test_parameters_have_a_layer_axis_and_differ():
    layers, params = _stack(), params_of(_stack())
    chex.assert_shape([params["up"], params["down"]], [(L, D, F), (L, F, D)])
    distances = np.abs(params["up"][:, None] - params["up"][None]).max((2, 3))
    assert (distances + np.eye(L) > 0.1).all()
    assert layers.activation_fn is jnp.tanh
    chex.assert_trees_all_equal(params_of(initial(_make)), params)


@pytest.mark.parametrize("num_layers", [1, L])
def test_scan_equals_the_loop(num_layers):
    (out, hidden), (want, want_hidden) = _scan_and_loop(_stack(num_layers), X)
    chex.assert_shape(hidden, (num_layers, B, F))
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(hidden, want_hidden, atol=1e-6)


def test_gradients_equal_those_of_the_loop():
    def loss(run):
        return lambda layers, x: jnp.square(run(layers, x)[0]).sum()

    scan, unrolled = (
        loss(lambda layers, x, unroll=unroll: scan_layers(_run, layers, x, None, unroll=unroll))
        for unroll in (False, True)
    )
    functions = (scan, unrolled, loss(_loop))
    *found, looped = jitted(lambda *args: [jax.grad(function, (0, 1))(*args) for function in functions])(_stack(), X)
    for gradients in found:
        chex.assert_trees_all_close(jax.tree.leaves(gradients), jax.tree.leaves(looped), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unroll", [False, True])
def test_unrolled_layers_are_no_loop(unroll):
    def loss(layers, x):
        return jnp.square(scan_layers(_run, layers, x, None, unroll=unroll)[0]).sum()

    program = jax.jit(jax.grad(loss)).lower(nnx.eval_shape(_make), X).as_text()
    assert ("while" in program) is not unroll


def test_unstacked_layers_stack_again():
    parts = jitted(unstack_layers)(_stack())
    assert len(parts) == L
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *map(params_of, parts))
    chex.assert_trees_all_equal(stacked, params_of(_stack()))


def test_layers_drop_differently_and_reproducibly():
    @jitted
    def hidden(layers, seed):
        ones = jax.tree.map(jnp.ones_like, layers)
        return scan_layers(_run, ones, jnp.ones((B, D)), nnx.Rngs(dropout=jax.random.key(seed)))[1]["hidden"]

    first, again, other = ((hidden(_stack(), seed) == 0).reshape(L, -1) for seed in (0, 0, 1))
    assert len({row.tobytes() for row in first}) == L, "every layer has a mask of its own"
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_layer_is_traced_once_whatever_the_depth():
    traces = []

    def run(layer, x, rngs):
        traces.append(x.shape)
        return layer(x, rngs)

    jax.eval_shape(lambda layers: scan_layers(run, layers, X, None), nnx.eval_shape(lambda: _make(7)))
    assert traces == [(B, D)]


def test_extra_may_be_nothing():
    run = jitted(lambda layers, x: scan_layers(lambda layer, x, rngs: (layer(x)[0], None), layers, x, None))
    out, extras = run(_stack(), X)
    assert extras is None
    np.testing.assert_allclose(out, _scan_and_loop(_stack(), X)[1][0], atol=1e-6)


class Wide(nnx.Module):
    """Another layer with more hidden units, that adds what it is given and counts."""

    def __init__(self, rngs):
        init = nnx.initializers.normal(0.5)
        self.up = nnx.Param(init(rngs.params(), (D, 2 * F)))
        self.down = nnx.Param(init(rngs.params(), (2 * F, D)))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, rngs=None):
        if rngs is not None:
            self.calls[...] += 1
        hidden = dropout(jnp.sin(x @ self.up[...]), 0.5, None if rngs is None else rngs.dropout())
        return x + hidden @ self.down[...], {"hidden": hidden[..., :F]}


@functools.cache
def _pattern():
    """Layer, Layer, Wide, Layer, Layer, Wide."""
    return initial(lambda: stack_layers([Layer, Layer, Wide], 6, nnx.Rngs(0)))


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_layers_of_different_kinds_take_turns(remat):
    given = normal(2, 6, B, D)

    @jitted
    def run(layers, x, given):
        def with_given(layer, x, rngs, given):
            x, extra = layer(x + given, rngs)
            return x, extra | {"kind": jnp.float32(isinstance(layer, Wide))}

        def scanned(x):
            out, extras = scan_layers(with_given, layers, x, None, inputs=given, remat=remat)
            return jnp.square(out).sum(), (out, extras)

        def looped(x):
            extras = []
            for index, layer in enumerate(unstack_layers(layers)):
                x, extra = with_given(layer, x, None, given[index])
                extras.append(extra)
            return jnp.square(x).sum(), (x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *extras))

        return [jax.value_and_grad(function, has_aux=True)(x) for function in (scanned, looped)]

    found, want = run(_pattern(), X, given)
    chex.assert_trees_all_close(found, want, rtol=1e-5, atol=1e-5)
    assert found[0][1][1]["kind"].tolist() == [0, 0, 1, 0, 0, 1]


def test_layers_of_different_kinds_drop_differently_and_keep_their_state():
    graphdef, params, state = nnx.split(_pattern(), nnx.Param, nnx.BatchStat)

    @jitted
    def run(params, state):
        layers = nnx.merge(graphdef, params, state)
        _, extras = scan_layers(_run, layers, X, nnx.Rngs(dropout=0))
        return extras["hidden"], layers.layers[2].calls[...]

    hidden, calls = run(params, state)
    assert len({row.tobytes() for row in (hidden == 0).reshape(6, -1)}) == 6
    np.testing.assert_array_equal(calls, [1, 1])


def test_map_layers_answers_for_each_layer_in_its_order():
    found = jitted(lambda layers: map_layers(lambda layer: layer.up[...].sum(), layers))(_pattern())
    want = jitted(lambda layers: [layer.up[...].sum() for layer in unstack_layers(layers)])(_pattern())
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_a_pattern_has_to_come_out_even():
    with pytest.raises(ValueError, match="num_layers=4 must be a multiple of 3, the layers of the pattern"):
        stack_layers([Layer, Layer, Wide], 4, nnx.Rngs(0))


def test_no_layers():
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        _make(0)


@functools.cache
def _gradient(remat):
    """Of the mean squares of the output and the extras, with dropout, in the parameters and the input."""

    def loss(layers, x):
        out, extras = scan_layers(_run, layers, x, nnx.Rngs(dropout=2), remat=remat)
        return jnp.square(out).mean() + jnp.square(extras["hidden"]).mean()

    return jitted(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialization_changes_neither_values_nor_gradients(remat):
    stack = _stack()  # other tests have it in float32
    with jax.enable_x64(True):
        layers = jax.tree.map(np.float64, stack)
        found, expected = (jax.tree.leaves(_gradient(how)(layers, np.float64(X))) for how in (remat, "none"))
        assert found[-1].dtype == jnp.float64
        chex.assert_trees_all_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rematerialization_keeps_less_for_the_backward_pass():
    """A layer that keeps its input alone; then also two products with weights; then their activations as well."""

    def run(layer, x, rngs):
        return x + jnp.tanh(jnp.sin(x @ layer.up[...])) @ layer.down[...], None

    def temporary(remat):
        def loss(layers, x):
            return jnp.square(scan_layers(run, layers, x, None, remat=remat)[0]).sum()

        like = jax.ShapeDtypeStruct((1024, D), jnp.float32)
        program = jax.jit(jax.grad(loss)).lower(nnx.eval_shape(lambda: _make(16)), like)
        return program.compile().memory_analysis().temp_size_in_bytes

    one_input, one_hidden = 16 * 1024 * D * 4, 16 * 1024 * F * 4
    full, dots, none = temporary("full"), temporary("dots"), temporary("none")
    assert one_input <= full < one_input + 0.5 * one_hidden
    assert 0.9 * one_hidden < dots - full
    assert 0.9 * one_hidden < none - dots


def test_unknown_rematerialization():
    with pytest.raises(ValueError, match='remat must be "none", "full" or "dots", got \'some\''):
        scan_layers(_run, nnx.eval_shape(_make), X, None, remat="some")


class Counting(nnx.Module):
    """Adds what it has seen up, beside a parameter."""

    def __init__(self, rngs):
        self.weight = nnx.Param(nnx.initializers.normal(0.5)(rngs.params(), (D, D)))
        self.seen = nnx.BatchStat(jnp.zeros(D))

    def __call__(self, x, rngs=None):
        if rngs is not None:
            self.seen[...] += x.sum(axis=0)
        return jnp.tanh(x @ self.weight[...]), None


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_each_layer_keeps_what_it_has_seen_in_training_and_nothing_in_evaluation(remat):
    layers = initial(lambda: stack_layers(Counting, L, nnx.Rngs(0)))
    graphdef, params, model_state = nnx.split(layers, nnx.Param, nnx.BatchStat)

    @functools.partial(jax.jit, static_argnums=2)
    def after(params, model_state, is_training):
        layers = nnx.merge(graphdef, params, model_state)
        out, _ = scan_layers(_run, layers, X, nnx.Rngs(dropout=jax.random.key(0)) if is_training else None, remat=remat)
        return out, layers.seen[...]

    x, expected = np.asarray(X, np.float64), []
    for weight in np.asarray(params["weight"][...], np.float64):
        expected.append(x.sum(axis=0))
        x = np.tanh(x @ weight)
    out, seen = after(params, model_state, True)
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    assert not np.asarray(after(params, model_state, False)[1]).any()


@pytest.mark.parametrize(
    "make_layer",
    [
        lambda rngs: RecurrentLayer(CELLS["gru"], 8, 8, rngs=rngs),
        lambda rngs: BidirectionalLayer(CELLS["lstm"], 8, rngs=rngs),
        lambda rngs: nnx.Dict(projection=nnx.Param(orthogonal_features(rngs.params(), 12, 4))),
    ],
    ids=["gru", "lstm", "favor"],
)
def test_layers_drawn_together_decompose_one_matrix_at_a_time(make_layer):
    """As many batches of matrices at once as a CPU has cores never end; see `orthogonal_of_normal`."""
    program = jax.jit(lambda rng: nnx.state(stack_layers(make_layer, 3, nnx.Rngs(params=rng))))
    text = program.lower(jax.random.key(0)).as_text()
    assert set(re.findall(r'@lapack_\w+_ffi.*num_batch_dims = "(\d+)"', text)) == {"0"}
