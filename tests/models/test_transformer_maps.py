"""`return_attention=True`: every map, in evaluation and training, under jit and grad; and nothing of it when off."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted, params_of

B, L, N, S, T, V = 2, 3, 2, 6, 5, 23
SOURCE = np.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGET = np.array([[5, 21, 13, 6, 2], [7, 7, 2, 0, 0]])


def _scores(model, *, return_attention):
    return model(SOURCE, TARGET, return_attention=return_attention)


_with_maps = jitted(lambda model: _scores(model, return_attention=True))
_without_maps = jitted(lambda model: _scores(model, return_attention=False))


def test_keys_and_shapes(make_model):
    _, maps = _with_maps(make_model())
    shapes = {"encoder/{}/self": (B, N, S, S), "decoder/{}/self": (B, N, T, T), "decoder/{}/cross": (B, N, T, S)}
    want = {name.format(index): shape for name, shape in shapes.items() for index in range(L)}
    assert {name: weights.shape for name, weights in maps.items()} == want
    chex.assert_type(list(maps.values()), jnp.float32)


def test_rows_are_distributions_over_what_may_be_seen(make_model):
    _, maps = _with_maps(make_model())
    for name, weights in maps.items():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5, err_msg=name)
        if name.startswith("decoder") and name.endswith("self"):
            assert not np.triu(weights, 1).any(), f"{name} looks ahead"
            assert (weights > 0).sum() == B * N * T * (T + 1) // 2
        else:
            assert not weights[1, ..., 4:].any(), f"{name} looks at padding"
            assert (weights[1, ..., :4] > 0).all()


def test_maps_of_different_layers_and_heads_differ(make_model):
    _, maps = _with_maps(make_model())
    flattened = [np.asarray(weights[:, head]) for weights in maps.values() for head in range(N)]
    assert len({weights.tobytes() for weights in flattened}) == len(flattened)


def test_source_of_only_padding_has_empty_maps(make_model):
    _, maps = jitted(lambda model: model(np.zeros_like(SOURCE), TARGET, return_attention=True))(make_model())
    for index in range(L):
        assert not maps[f"encoder/{index}/self"].any()
        assert not maps[f"decoder/{index}/cross"].any()
        np.testing.assert_allclose(maps[f"decoder/{index}/self"].sum(-1), 1, atol=1e-5)


def test_encode_gives_its_own_maps(make_model):
    encode = jitted(lambda model: model.encode(SOURCE, return_attention=True))
    _, maps = encode(make_model())
    _, everything = _with_maps(make_model())
    assert sorted(maps) == [f"encoder/{index}/self" for index in range(L)]
    for name, weights in maps.items():
        np.testing.assert_allclose(weights, everything[name], atol=1e-6)
    assert jax.eval_shape(lambda model: model.encode(SOURCE), make_model())[1] == {}


def _train(model, seed):
    """The loss and the maps as auxiliary output, with dropout."""
    logits, maps = model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=jax.random.key(seed)), return_attention=True)
    return jnp.square(logits).sum(), maps


DROPOUT = {"dropout_rate": 0.2, "attention_dropout_rate": 0.2}


def test_maps_in_training_are_the_weights_before_dropout(make_model):
    """So rows still sum to 1."""
    _, maps = jitted(_train)(make_model(**DROPOUT), 0)
    assert len(maps) == 3 * L
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_maps_come_out_of_a_gradient_in_training(make_model):
    gradients, maps = jitted(jax.grad(_train, has_aux=True))(make_model(**DROPOUT), 0)
    chex.assert_tree_all_finite(params_of(gradients))
    assert len(maps) == 3 * L
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_a_map_can_be_differentiated(make_model):
    def sharpness(model):
        return jnp.square(_scores(model, return_attention=True)[1]["decoder/1/cross"]).sum()

    gradients = params_of(jitted(jax.grad(sharpness))(make_model()))
    per_layer = np.abs(gradients["decoder_layers"]["cross_attention"]["query"]["kernel"]).max((1, 2, 3))
    assert per_layer[1] > 0
    assert not per_layer[2], "a later layer cannot have changed the map"


@pytest.mark.parametrize("pre_norm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_asking_for_maps_does_not_change_the_logits(make_model, pre_norm):
    model = make_model(pre_norm=pre_norm)
    np.testing.assert_allclose(_with_maps(model)[0], _without_maps(model), atol=1e-6)


def test_compiled_program_has_no_maps_when_off(make_model):
    """No output but the logits, and no buffer in which a scan would collect the maps of all layers."""
    on, off = (
        jax.jit(functools.partial(_scores, return_attention=wanted)).lower(make_model()).compile()
        for wanted in (True, False)
    )
    stacks = [f"f32[{L},{B},{N},{sizes}]" for sizes in (f"{S},{S}", f"{T},{T}", f"{T},{S}")]
    assert all(stack in on.as_text() for stack in stacks)
    assert not any(stack in off.as_text() for stack in stacks)
    assert off.memory_analysis().output_size_in_bytes == 4 * B * T * V
