"""Models with mixtures of experts in their layers; how they are decoded: test_attention_cores.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.models import GPT, T5, GPTConfig, T5Config, Transformer, TransformerConfig
from tfx_jax.nn import ExpertsConfig, MixtureOfExperts, StepMetric, unstack_layers

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
