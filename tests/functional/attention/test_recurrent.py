"""Recurrent attention: parallel, chunked and recurrent form agree, with each other and with PyTorch's references."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import mixed
from tests.functional.attention.oracles.favor import favor_weights, linear_weights
from tests.functional.attention.oracles.recurrent import PARAMETERS, WEIGHTS, attend
from tfx_jax import functional
from tfx_jax.functional.attention import SPECS
from tfx_jax.functional.attention.spec import RecurrentDecoding

B, T, N, K, H, U = 2, 13, 4, 2, 8, 6
NAMES = pytest.mark.parametrize("name", WEIGHTS)
PROJECTION = np.random.default_rng(0).normal(size=(24, H)).astype(np.float32)


def _inputs(length=T, num_key_heads=K, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, length, N, H), (B, length, num_key_heads, H), (B, length, num_key_heads, U)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def _told(decoding, inputs, parameters, num_read, mask=None):
    """Outputs of the tokens after the first `num_read`, one at a time."""
    query, key, value = inputs
    per_token = {name: x for name, x in parameters.items() if x.ndim > 2}
    fixed = {name: x for name, x in parameters.items() if x.ndim <= 2}
    before = {name: x[:, :num_read] for name, x in per_token.items()}
    state = decoding.read(key[:, :num_read], value[:, :num_read], mask, **before, **fixed)

    def step(state, token):
        query, key, value, gates = jax.tree.map(lambda x: x[:, None], token)
        out, state = decoding.step(state, query, key, value, **gates, **fixed)
        return state, out[:, 0]

    after = jax.tree.map(lambda x: x[:, num_read:].swapaxes(0, 1), (query, key, value, per_token))
    state, out = jax.lax.scan(step, state, after)
    return out.swapaxes(0, 1), state


def _decoding(name, options):
    return functional.recurrent_decoding(SPECS[name].function, **{"block_size": 4} | options)


@NAMES
def test_parallel_chunked_and_recurrent_form_agree(name):
    """The parallel form is one chunk; that of a token is the recurrence of the scan."""
    inputs = _inputs()
    parameters = PARAMETERS[name](inputs[1])
    options = {name: parameters.pop(name) for name in ("temperature",) if name in parameters}
    sizes = (16, 4, 1)
    run = jax.jit(
        lambda *x: (
            [attend(name, *x, block_size=size) for size in sizes],
            [_told(_decoding(name, options), x, parameters, num_read)[0] for num_read in (0, 5)],
        )
    )
    want = mixed(WEIGHTS[name](*inputs[:2]), inputs[2])
    forms, (told, after) = run(*inputs)
    for out in (*forms, told):
        np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(after, want[:, 5:], atol=1e-5)


@NAMES
def test_gradients_of_values_gates_and_parameters_are_those_of_the_recurrence(name):
    inputs = _inputs(length=7)
    parameters = PARAMETERS[name](inputs[1])
    options = {name: parameters.pop(name) for name in ("temperature",) if name in parameters}
    cotangent = np.random.default_rng(1).normal(size=(B, 7, N, U)).astype(np.float32)
    function = functools.partial(SPECS[name].function, block_size=4, **options)

    def chunked(inputs, parameters):
        return (function(*inputs, **parameters) * cotangent).sum()

    def recurrent(inputs, parameters):
        return (_told(_decoding(name, options), inputs, parameters, 0)[0] * cotangent).sum()

    got, want = jax.jit(lambda *x: [jax.grad(form, argnums=(0, 1))(*x) for form in (chunked, recurrent)])(
        inputs, parameters
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("name", [*WEIGHTS, "linear", "favor"])
def test_a_state_read_with_padding_is_that_of_the_tokens(name):
    _, key, value = _inputs()
    parameters = PARAMETERS[name](key) if name in WEIGHTS else {}
    options = {name: parameters.pop(name) for name in ("temperature",) if name in parameters}
    decoding = SPECS[name].decoding(**options)
    places = np.array([1, 2, 5, 7])
    mask = np.zeros((B, 1, 1, 9), bool)
    mask[..., places] = True
    key[:, :9], value[:, :9] = (np.where(mask[:, 0, 0, :, None, None], x[:, :9], np.nan) for x in (key, value))

    def state(columns, mask):
        gates = {name: x[:, columns] if x.ndim > 2 else x for name, x in parameters.items()}
        return decoding.read(key[:, columns], value[:, columns], mask, **gates)

    got, want = jax.jit(lambda: (state(np.arange(9), mask), state(places, None)))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, want)
    assert sum(x.size for x in jax.tree.leaves(got)) == sum(
        x.size for x in jax.tree.leaves(jax.eval_shape(lambda: state(np.arange(0), None)))
    )


@pytest.mark.parametrize("name", [*WEIGHTS, "linear"])
def test_padding_may_hold_anything(name):
    """Also NaN, which 0 times it would pass on."""
    query, key, value = _inputs()
    parameters = PARAMETERS[name](key) if name in WEIGHTS else {}
    function = functools.partial(SPECS[name].function, is_causal=True, block_size=4, **parameters)
    mask = np.ones((B, 1, 1, T), bool)
    mask[..., [0, 3]] = False
    hidden = ~mask[:, 0, 0, :, None, None]
    attend = jax.jit(lambda key, value: function(query, key, value, mask=mask))
    want = attend(key, value)
    np.testing.assert_array_equal(attend(np.where(hidden, np.nan, key), np.where(hidden, np.nan, value)), want)


@pytest.mark.parametrize("name", ["linear", "favor"])
def test_sums_of_features_decode_as_they_are_trained(name):
    inputs = _inputs()
    options = {"seed": 3, "num_features": 24} if name == "favor" else {}
    projection = functional.orthogonal_features(jax.random.key(3), 24, H)
    decoding_by_function = {
        "linear": functional.recurrent_decoding(functional.linear_attention),
        "favor": functional.recurrent_decoding(functools.partial(functional.favor_attention, projection=projection)),
    }[name]
    decodings = (SPECS[name].decoding(**options), 0), (decoding_by_function, 5)
    run = jax.jit(lambda *x: [_told(decoding, x, {}, num_read)[0] for decoding, num_read in decodings])
    oracle = functools.partial(favor_weights, projection=projection) if name == "favor" else linear_weights
    want = mixed(oracle(*inputs[:2], is_causal=True), inputs[2])
    told, after = run(*inputs)
    np.testing.assert_allclose(told, want, atol=1e-5)
    np.testing.assert_allclose(after, want[:, 5:], atol=1e-5)


def test_a_slow_decay_keeps_its_digits_after_a_fast_one():
    """Differences of sums of logarithms would have an error of one in a hundred here."""
    length = 32
    gate = np.full((1, length, 1, 1), 5.0, np.float32)
    gate[:, : length // 2] = -1e5
    key = value = np.ones((1, length, 1, 1), np.float32)
    attend = jax.jit(functools.partial(functional.gated_linear_attention, temperature=1.0))
    got = np.asarray(attend(key, key, value, gate=gate)).ravel()[length // 2 :]
    decay = 1 / (1 + np.exp(-5.0))
    want = np.cumsum(decay ** np.arange(length // 2)) + decay ** np.arange(1, length // 2 + 1)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_decay_of_zero_forgets_all_before():
    """Whose logarithm is infinite, and whose gradient is a number all the same."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 9, 2, 4))
    attend = jax.jit(lambda value: functional.retention(query, key, value, decay=jnp.zeros(2), scale=1.0, block_size=4))
    want = jnp.einsum("BTNH,BTNH,BTNU->BTNU", query, key, value)
    np.testing.assert_allclose(attend(value), want, atol=1e-6)
    assert np.isfinite(jax.grad(lambda value: attend(value).sum())(value)).all()


def test_a_delta_rule_answers_with_the_newest_value_of_a_key():
    """Of repeated keys the inverse of a chunk has entries of order one, which a series of powers would not find."""
    key = np.ones((1, 64, 1, 8), np.float32)
    value = np.random.default_rng(0).normal(size=(1, 64, 1, 3)).astype(np.float32)
    beta = np.full((1, 64, 1), 50.0, np.float32)
    got = jax.jit(functools.partial(functional.delta_rule, scale=1.0))(key, key, value, beta=beta)
    np.testing.assert_allclose(got, value, atol=1e-4)


@NAMES
def test_errors_say_what_to_do(name):
    query, key, value = _inputs()
    label = {
        "gated_linear": "gated linear",
        "state_space_duality": "state space",
        "kimi_delta": "Kimi delta",
    }.get(name, name.replace("_", " "))
    call = functools.partial(jax.eval_shape, functools.partial(attend, name), query, key, value)
    with pytest.raises(ValueError, match=f"^{label} attention is causal only.*pass is_causal=True"):
        functools.partial(attend, name)(query, key, value, is_causal=False)
    with pytest.raises(ValueError, match=f"^{label} attention takes no bias"):
        call(np.zeros((1, 1, 1, T), np.float32))
    with pytest.raises(ValueError, match=r"no weights to drop, got dropout_rate=0\.1; drop the output"):
        attend(name, query, key, value, dropout_rate=0.1)
    with pytest.raises(ValueError, match="block_size must be a power of two, got 12"):
        attend(name, query, key, value, block_size=12)


def test_gates_and_parameters_of_another_shape_are_refused():
    query, key, value = _inputs()
    with pytest.raises(ValueError, match=r"decay must have shape \(2,\) for keys of 2 heads, got \(4,\)"):
        functional.retention(query, key, value, decay=jnp.ones(4))
    with pytest.raises(ValueError, match=r"beta must have shape \(2, 13, 2\), one gate for each key, got \(2, 13, 4\)"):
        functional.delta_rule(query, key, value, beta=jnp.ones((B, T, N)))
    with pytest.raises(ValueError, match=r"gate must have shape \(2, 13, 2, 8\)"):
        functional.gated_linear_attention(query, key, value, gate=jnp.ones((B, T, K)))
    zeros = {"beta": jnp.zeros((B, T, K)), "dt": jnp.zeros((B, T, K)), "log_rate_scale": jnp.zeros(K)}
    with pytest.raises(ValueError, match=r"dt_bias must have shape \(2,\) for keys of 2 heads, got \(3,\)"):
        functional.gated_delta_rule(query, key, value, **zeros, dt_bias=jnp.zeros(3))


def test_every_attention_with_a_state_has_public_decoding():
    """And says so in its docstring."""
    for spec in SPECS.values():
        decoding = spec.decoding(**spec.example(T)) if spec.decoding else None
        if isinstance(decoding, RecurrentDecoding):
            options = {"projection": PROJECTION} if spec.name == "favor" else {}
            function = functional.favor_attention if spec.name == "favor" else spec.function
            assert callable(functional.recurrent_decoding(function, is_causal=True, **options).step)
            assert "`recurrent_decoding` decodes with" in " ".join(function.__doc__.split()), spec.name


def test_errors_of_decoding_say_what_to_do():
    decoding, (query, key, value) = functional.recurrent_decoding, _inputs()
    with pytest.raises(ValueError, match="chunked_attention has no state of constant size: keep its keys and values"):
        decoding(functional.chunked_attention)
    with pytest.raises(ValueError, match="delta_rule decodes causally only: pass is_causal=True or leave it out"):
        decoding(functional.delta_rule, is_causal=False)
    with pytest.raises(ValueError, match="state of delta_rule does not depend on beta: pass gates and parameters to"):
        decoding(functools.partial(functional.delta_rule, beta=jnp.zeros((B, T, K))))
    with pytest.raises(ValueError, match="favor_attention also needs projection: pass it here"):
        decoding(functional.favor_attention)
    read, step = decoding(functional.delta_rule)
    beta = jnp.zeros((B, T, K))
    with pytest.raises(ValueError, match="delta_rule also needs beta, in `read` and in `step`"):
        read(key, value)
    with pytest.raises(ValueError, match=r"beta must have shape \(2, 13, 2\), got \(2, 13\)"):
        read(key, value, beta=beta[..., 0])
    with pytest.raises(ValueError, match=r"mask must be a padding mask, .* got shape \(1, 1, 13, 13\)"):
        read(key, value, functional.causal_mask(T), beta=beta)
    with pytest.raises(ValueError, match=r"step takes one token: .* got \(2, 13, 4, 8\) and \(2, 13, 2, 8\)"):
        step(jnp.zeros((B, K, H, U)), query, key, value, beta=beta)


@pytest.mark.slow
def test_optimized_programs_of_channel_decays_and_grouped_queries_run():
    """In a separate process: the gradient of a decay that is broadcast over rows crashed it (jaxlib 0.10.2)."""
    code = """
import jax
from tfx_jax.functional import gated_linear_attention

query, key = (jax.random.normal(jax.random.key(heads), (1, 256, heads, 64)) for heads in (8, 4))
gradients = jax.jit(jax.grad(lambda q, k: gated_linear_attention(q, k, k, gate=k, block_size=16).sum(), argnums=(0, 1)))
for _ in range(5):
    jax.block_until_ready(gradients(query, key))
"""
    environment = {name: x for name, x in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
