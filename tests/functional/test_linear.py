"""Linear maps of one precision and of two, and their gradients, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import linear, linear_logits

B, T, D, N, H, V = 2, 3, 4, 2, 5, 7
# The function, the shapes of its arguments, and what it computes.
CASES = {
    "matrix": (linear, [(B, T, D), (D, V), (V,)], "BTD,DV->BTV"),
    "to heads": (linear, [(B, T, D), (D, N, H), (N, H)], "BTD,DNH->BTNH"),
    "from heads": (functools.partial(linear, num_axes=2), [(B, T, N, H), (N, H, D), (D,)], "BTNH,NHD->BTD"),
    "one vector": (linear, [(D,), (D, V), (V,)], "D,DV->V"),
    "logits": (linear_logits, [(B, T, D), (V, D)], "BTD,VD->BTV"),
}


def draw(shapes, dtype):
    """What is multiplied in that dtype, parameters in float32."""
    rng = np.random.default_rng(0)
    x, *params = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return jnp.asarray(x, dtype), *params


def oracle(equation, x, kernel, bias=0.0):
    return np.einsum(equation, *(np.asarray(part, np.float64) for part in (x, kernel))) + np.float64(bias)


@functools.cache
def value_and_gradients(case, dtype):
    """The value and the gradients of its sum, each number of which counts another whole number of times."""
    function, shapes, equation = CASES[case]
    arguments = draw(shapes, dtype)
    counts = np.arange(oracle(equation, *arguments).size).reshape(oracle(equation, *arguments).shape) % 5 - 2.0

    def total(*arguments):
        value = function(*arguments)
        return (value.astype(jnp.float32) * counts.astype(np.float32)).sum(), value

    found = jax.jit(jax.grad(total, argnums=range(len(arguments)), has_aux=True))(*arguments)
    return arguments, counts, *jax.device_get(found)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_values(case, dtype):
    arguments, _, _, value = value_and_gradients(case, dtype)
    assert value.dtype == (np.float32 if case == "logits" else dtype)
    want = oracle(CASES[case][2], *arguments)
    np.testing.assert_allclose(value.astype(np.float64), want, atol=1e-5 if dtype == np.float32 else 0.06)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_parameters_are_those_of_float64_whatever_is_multiplied(case, dtype):
    """The numbers of `x` and what comes from above are exact in bfloat16, so no rounding is left but that of sums."""
    (x, kernel, *_), counts, gradients, _ = value_and_gradients(case, dtype)
    inputs, outputs = CASES[case][2].split("->")
    of_x, of_kernel = inputs.split(",")
    want = np.einsum(f"{of_x},{outputs}->{of_kernel}", np.asarray(x, np.float64), counts)
    assert {gradient.dtype for gradient in gradients[1:]} == {np.dtype(np.float32)}
    np.testing.assert_allclose(gradients[1], want, rtol=1e-5, atol=1e-5)
    if len(gradients) == 3:
        np.testing.assert_array_equal(gradients[2], counts.sum(axis=tuple(range(counts.ndim - gradients[2].ndim))))
    want = np.einsum(f"{outputs},{of_kernel}->{of_x}", counts, np.asarray(kernel, np.float64))
    assert gradients[0].dtype == dtype
    np.testing.assert_allclose(gradients[0].astype(np.float64), want, atol=1e-5 if dtype == np.float32 else 0.2)


def test_many_tokens_of_bfloat16_are_counted_in_float32():
    """4,097 ones: bfloat16 would make that 4,096."""
    ones, params = jnp.ones((4097, 1), jnp.bfloat16), (np.ones((1, 1), np.float32), np.ones(1, np.float32))
    gradients = jax.jit(jax.grad(lambda params: linear(ones, *params).astype(jnp.float32).sum()))(params)
    assert jax.tree.map(lambda gradient: gradient.item(), gradients) == (4097, 4097)


def test_one_precision_has_derivatives_of_every_kind():
    x, kernel, bias = draw([(T, D), (D, V), (V,)], np.float32)
    hessian = jax.jit(jax.jacfwd(jax.grad(lambda kernel: jnp.square(linear(x, kernel, bias)).sum())))(kernel)
    want = 2 * np.einsum("TD,TE->DE", x, x)
    np.testing.assert_allclose(hessian[:, 0, :, 0], want, rtol=1e-5, atol=1e-5)
