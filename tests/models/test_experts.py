"""Models with mixtures of experts in their layers; how they are decoded: test_attention_cores.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import draw, jitted, started
from tfx_jax.models import GPT, T5, GPTConfig, Llama, LlamaConfig, T5Config, Transformer, TransformerConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions, ExpertsConfig, MixtureOfExperts, StepMetric, unstack_layers

SIZES = {"num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 8, "dropout_rate": 0.0}
TEXTS = np.array([[5, 6, 4, 2, 0, 0], [9, 4, 7, 8, 3, 2]], np.int32)  # ten tokens, padding in front of the second row
EXISTS = TEXTS != 0
CALLS = {
    "transformer": (Transformer, TransformerConfig(13, **SIZES), lambda model, rngs: model(TEXTS, TEXTS, rngs=rngs)),
    "t5": (T5, T5Config(13, d_k=4, **SIZES), lambda model, rngs: model(TEXTS, TEXTS, rngs=rngs)),
    "gpt": (
        GPT,
        GPTConfig(13, max_length=6, attention_dropout_rate=0.0, **SIZES),
        lambda model, rngs: model(TEXTS, token_mask=jnp.asarray(EXISTS), rngs=rngs),
    ),
    "packed gpt": (
        GPT,
        GPTConfig(13, max_length=6, attention_dropout_rate=0.0, **SIZES),
        lambda model, rngs: model(TEXTS, segment_ids=jnp.asarray(EXISTS, jnp.int32), rngs=rngs),
    ),
}


def dropped_tokens(name, experts):
    """The share of tokens that each mixture of a model drops in a step of training."""
    model_class, config, call = CALLS[name]

    @jax.jit
    def run():
        model = model_class(dataclasses.replace(config, experts=experts), rngs=nnx.Rngs(params=0))
        call(model, nnx.Rngs(dropout=1))
        found = nnx.to_flat_state(nnx.state(model, StepMetric))
        return [leaf[...] for path, leaf in found if path[-1] == "dropped_tokens"]

    return np.concatenate(run())


@pytest.mark.parametrize("name", CALLS)
def test_padding_takes_no_place_at_an_expert(name):
    """A decoder reads one token more of a text that ends before its row does: its start."""
    all_fit = dropped_tokens(name, ExpertsConfig(num_experts=1, every=1, capacity_factor=11 / 12))
    np.testing.assert_array_equal(all_fit, 0)
    two_less = dropped_tokens(name, ExpertsConfig(num_experts=1, every=1, capacity_factor=8 / 12))
    assert sorted(two_less) == pytest.approx([2 / 10] * 2 + [3 / 11] * (len(two_less) - 2))


@pytest.mark.parametrize("every", [1, 2])
def test_every_so_many_feed_forward_networks_are_mixtures(every):
    experts = ExpertsConfig(num_experts=3, every=every, experts_per_token=2)
    config = dataclasses.replace(CALLS["transformer"][1], experts=experts)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    for stack in (model.encoder_layers, model.decoder_layers):
        layers = jax.eval_shape(unstack_layers, stack)
        kinds = [isinstance(layer.feed_forward, MixtureOfExperts) for layer in layers]
        assert kinds == [index % every == every - 1 for index in range(2)]


def llama_config(**options):
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "vocab_size": 13, "max_length": 6, "d_k": 4}
    return LlamaConfig(**sizes, **options)


@pytest.mark.parametrize(
    ("num_layers", "num_dense", "every", "attention", "no_rotary_every", "periods"),
    [
        (5, 0, 1, "dense", 0, [1]),
        (7, 3, 1, "dense", 0, [1, 1]),
        (7, 3, 2, "dense", 0, [1, 2]),
        (6, 3, 2, "dense", 0, [4, 2]),  # the fourth layer has experts too
        (8, 2, 1, "window,dense", 0, [2, 2]),
        (7, 2, 1, "window,dense", 4, [3, 4]),
        (2, 1, 1, "window,dense", 0, [2]),
        (4, 4, 1, "dense", 0, [1]),
        (3, 4, 2, "dense", 0, [1]),
    ],
)
def test_first_layers_without_experts_are_a_stack_of_their_own(
    num_layers, num_dense, every, attention, no_rotary_every, periods
):
    config = llama_config(
        num_layers=num_layers,
        num_dense_layers=num_dense,
        experts=ExpertsConfig(num_experts=2, every=every),
        attention=AttentionConfig(attention, AttentionOptions(**({"window": 2} if "window" in attention else {}))),
        no_rotary_every=no_rotary_every,
    )
    assert [period for _, _, period in config.stacks] == periods
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    layers = [layer for stack in model.stacks for layer in jax.eval_shape(unstack_layers, stack)]
    assert len(layers) == num_layers
    for index, layer in enumerate(layers):
        has_experts = index >= num_dense and (index + 1) % every == 0
        assert isinstance(layer.feed_forward, MixtureOfExperts) == has_experts
        has_rotary = not no_rotary_every or (index + 1) % no_rotary_every != 0
        assert (layer.self_attention.rotary is not None) == has_rotary


def test_depth_does_not_lengthen_the_program():
    def program(num_layers):
        config = llama_config(num_layers=num_layers, num_dense_layers=1, experts=ExpertsConfig(num_experts=2, every=1))
        model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
        return str(jax.make_jaxpr(lambda model: model(TEXTS))(model)).count("dot_general")

    assert program(3) == program(12) > 0


def test_first_layers_come_first():
    """In the forward pass, in maps of the attention and in decoding: against calls of the layers one by one."""
    experts = ExpertsConfig(num_experts=3, every=1, experts_per_token=2)
    config = llama_config(num_layers=5, num_dense_layers=2, experts=experts)
    model = draw(lambda: Llama(config, rngs=nnx.Rngs(0)))

    @jitted
    def run(model):
        logits, maps = model(TEXTS, return_attention=True)
        x = model.embed(TEXTS, np.arange(6)[None])
        expected_maps = []
        for stack in (model.first_layers, model.decoder_layers):
            for layer in unstack_layers(stack):
                x, extras = layer(x, positions=np.arange(6)[None], is_causal=True, return_weights=True)
                expected_maps.append(extras["self"])
        expected = model.output().attend(model.last_norm(x))
        step, cache, _ = started(model.decoder(), TEXTS[:, :3], max_length=3)
        steps = []
        for index in range(2, 5):
            scores, cache = step(TEXTS[:, index], cache)
            steps.append(scores)
        return logits, maps, jnp.stack(steps, axis=1), expected, expected_maps

    logits, maps, steps, expected, expected_maps = jax.device_get(run(model))
    largest = np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, atol=1e-5 * largest)
    np.testing.assert_allclose(steps, expected[:, 2:5], atol=1e-5 * largest)
    assert list(maps) == [f"decoder/{index}/self" for index in range(5)]
    np.testing.assert_allclose(list(maps.values()), expected_maps, atol=1e-6)
