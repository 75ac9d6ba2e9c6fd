"""The loss of a language model with a memory: as of the whole text, whatever segments it is read in."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted
from tfx_jax.models.transformer_xl import TransformerXL, TransformerXLConfig
from tfx_jax.tasks.text.recurrent_language_modeling import recurrent_language_model_loss

V, B, T, SEGMENTS = 23, 3, 5, 3
CONFIG = TransformerXLConfig(V, memory_length=SEGMENTS * T, num_layers=2, d_model=8, num_heads=2, d_ff=12)
TEXT = np.random.default_rng(0).integers(0, V, (B, SEGMENTS * T + 1)).astype(np.int32)


@pytest.fixture(scope="module")
def model(draw_model):
    return draw_model(lambda: TransformerXL(CONFIG, rngs=nnx.Rngs(0)))


def segment(number, begins=(False,) * B):
    weights = np.ones((B, T), np.float32)
    weights[1, 2] = 0
    start = number * T
    tokens = {"inputs": TEXT[:, start : start + T], "targets": TEXT[:, start + 1 : start + T + 1]}
    return tokens | {"weights": weights, "begins": np.array(begins)}


@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 0.01)], ids=["plain", "options"])
def test_segments_are_scored_as_the_whole_text(model, options, expected_loss, assert_losses):
    smoothing, z_loss_weight = options
    loss = jax.jit(
        functools.partial(recurrent_language_model_loss, label_smoothing=smoothing, z_loss_weight=z_loss_weight),
        static_argnums=2,
    )
    logits = jitted(lambda model: model(TEXT[:, :-1])[0])(model)
    carry = jax.jit(lambda: CONFIG.init_memories(B))()
    for number in range(SEGMENTS):
        batch = segment(number)
        output = loss(model, batch, None, carry)
        part = logits[:, number * T : (number + 1) * T]
        expected = expected_loss(part, batch["targets"], batch["weights"], *options)
        assert expected.weight == B * T - 1
        carry = output.carry
        assert_losses(output._replace(carry=None), expected)
    np.testing.assert_array_equal(carry.lengths, SEGMENTS * T)


def test_a_row_that_begins_remembers_nothing(model):
    loss = jax.jit(recurrent_language_model_loss, static_argnums=2)
    carry = loss(model, segment(0), None, None).carry
    batch = segment(1, begins=(False, True, False))
    carried, begun = (loss(model, batch, None, memories) for memories in (carry, None))
    np.testing.assert_array_equal(carried.carry.lengths, [2 * T, T, 2 * T])
    # Of the first layer, memories are the embeddings; of the second, what was seen tells.
    inputs, fresh = (np.asarray(output.carry.inputs)[:, 1, -T:] for output in (carried, begun))
    np.testing.assert_allclose(inputs[1], fresh[1], rtol=1e-5, atol=1e-5)
    assert np.abs(inputs[[0, 2]] - fresh[[0, 2]]).max(axis=(1, 2)).min() > 1e-3
