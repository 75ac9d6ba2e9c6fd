"""Short causal convolutions against a loop over tokens in float64, whatever padding and texts are beside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.programs import normal
from tfx_jax.functional import last_tokens, short_convolution

B, T, N, H, W = 3, 9, 2, 3, 4
X, KERNEL, PAST = normal(0, B, T, N, H), normal(1, W, N, H), normal(2, B, W - 1, N, H)
# The first row is whole, the second has padding in front and inside, the third has nothing but padding.
MASK = np.ones((B, T), bool)
MASK[1, [0, 1, 4, 5]] = False
MASK[2] = False
IDS = np.array([[1, 1, 1, 1, 2, 3, 3, 0, 0], [5, 5, 5, 5, 5, 5, 4, 4, 4], [0, 0, 0, 0, 0, 0, 0, 0, 0]])


def _oracle(x, kernel, past, mask, ids):
    """y_t, token by token: each text has its own list of what was read, which padding is never put on."""
    out = np.zeros(x.shape)
    for row, tokens in enumerate(x.astype(np.float64)):
        read = {}
        for t, token in enumerate(tokens):
            if not mask[row, t] or ids[row, t] == 0:
                continue
            text = read.setdefault(ids[row, t], list(past[row].astype(np.float64)))
            text.append(token)
            out[row, t] = sum(text[-1 - j] * kernel[W - 1 - j].astype(np.float64) for j in range(W))
    return out


NOTHING = np.zeros_like(PAST)
CASES = {
    "alone": ({}, {}),
    "past": ({"past": PAST}, {"past": PAST}),
    "padding": ({"token_mask": MASK}, {"mask": MASK}),
    "padding and past": ({"token_mask": MASK, "past": PAST}, {"mask": MASK, "past": PAST}),
    "texts": ({"segment_ids": IDS}, {"ids": IDS}),
    "texts and padding": ({"segment_ids": IDS, "token_mask": MASK}, {"ids": IDS, "mask": MASK}),
}


def test_equals_a_loop_over_tokens_and_padding_may_hold_anything():
    every = {"past": NOTHING, "mask": np.ones((B, T), bool), "ids": np.ones((B, T), int)}
    dirty = {}
    for name, (options, _) in CASES.items():
        visible = options.get("token_mask", np.ones((B, T), bool)) & (options.get("segment_ids", np.ones((B, T))) != 0)
        dirty[name] = np.where(visible[..., None, None], X, np.nan)

    @jax.jit
    def run(dirty):
        return {name: short_convolution(dirty[name], jnp.asarray(KERNEL), **CASES[name][0]) for name in CASES}

    for name, got in run(dirty).items():
        want = _oracle(X, KERNEL, **every | CASES[name][1])
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=name)


def test_gradients_are_those_of_the_same_tokens_without_padding():
    places = np.flatnonzero(MASK[1])
    target = normal(3, 1, len(places), N, H)

    def padded(x, kernel):
        x = jnp.zeros((1, T, N, H)).at[:, places].set(x)
        return (short_convolution(x, kernel, token_mask=MASK[1:2])[:, places] * target).sum()

    def plain(x, kernel):
        return (short_convolution(x, kernel) * target).sum()

    got, want = jax.jit(lambda x, k: [jax.grad(f, (0, 1))(x, k) for f in (padded, plain)])(X[1:2, places], KERNEL)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_parts_after_each_other_equal_the_whole():
    @jax.jit
    def run(x, kernel):
        outs, past = [], None
        for start, stop in ((0, 2), (2, 3), (3, T)):
            part, mask = x[:, start:stop], MASK[:, start:stop]
            outs.append(short_convolution(part, kernel, past, token_mask=mask))
            past = last_tokens(part, W - 1, past, token_mask=mask)
        return jnp.concatenate(outs, axis=1), short_convolution(x, kernel, token_mask=MASK)

    np.testing.assert_allclose(*run(X, KERNEL), atol=1e-6)


def test_last_tokens_are_those_that_exist():
    got = np.asarray(jax.jit(functools.partial(last_tokens, count=W - 1, token_mask=MASK))(X, past=PAST))
    for row in range(B):
        want = np.concatenate([PAST[row], X[row][MASK[row]]])[-(W - 1) :]
        np.testing.assert_array_equal(got[row], want)


def test_a_sum_in_half_precision_is_rounded_once():
    x, kernel = X.astype(jnp.bfloat16), jnp.asarray(KERNEL)
    got = jax.jit(short_convolution)(x, kernel)
    assert got.dtype == jnp.bfloat16
    want = _oracle(np.asarray(x), KERNEL, NOTHING, np.ones((B, T), bool), np.ones((B, T), int))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


def test_a_past_of_packed_texts_is_refused():
    with pytest.raises(ValueError, match="takes either past or segment_ids, got both"):
        short_convolution(X, KERNEL, PAST, segment_ids=IDS)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"past must be \(.*\), the \d tokens before x, got"):
        short_convolution(X, KERNEL, X[:, :W])  # a token too many
    with pytest.raises(ValueError, match=r"kernel must be \[W, \*features\] with the features \(.*\) of x, got"):
        short_convolution(X, KERNEL[..., :1])
    with pytest.raises(ValueError, match="past must be"):
        last_tokens(X, W - 1, X[:, : W - 2])


@pytest.mark.parity
def test_equals_the_convolution_of_qwen3_next():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, kernel, state = (torch.tensor(a.reshape(*a.shape[:-2], N * H)).mT for a in (X, KERNEL, PAST))
    want = modeling.causal_conv1d_fn(x, kernel, None, "silu").mT.numpy().reshape(X.shape)
    silu = jax.jit(lambda x, past=None: jax.nn.silu(short_convolution(x, KERNEL, past)))
    np.testing.assert_allclose(silu(X), want, atol=1e-6)
    # One token after the tokens of a state, which their function keeps with as many tokens as the kernel has rows.
    state = torch.nn.functional.pad(state, (1, 0))
    want = modeling.causal_conv1d_update(x[..., :1], state, kernel, None, "silu").mT.numpy().reshape(B, 1, N, H)
    np.testing.assert_allclose(silu(X[:, :1], PAST), want, atol=1e-6)
