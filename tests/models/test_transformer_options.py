"""What a Transformer may have that the paper's has not, most of it Marian's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import count_draws, jitted, params_of, started
from tfx_jax.functional import sinusoidal_positions
from tfx_jax.models import Transformer, TransformerConfig

V, T = 23, 5
SOURCE = np.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGET = np.array([[5, 21, 13, 6, 2], [7, 7, 2, 0, 0]])
MARIAN = {"activation": "swish", "interleaved_sinusoids": False, "logits_bias": True, "layer_norm_epsilon": 1e-5}


def test_other_special_tokens_change_nothing_but_names(make_model, forward):
    swap = np.arange(V)
    swap[[0, 1, 20, 22]] = 20, 22, 0, 1
    model, other = make_model(), make_model(pad_id=20, start_id=22)
    graphdef, params = nnx.graphdef(other), params_of(other)
    params["embedding"]["table"] = params["embedding"]["table"][np.argsort(swap)]
    got = forward(nnx.merge(graphdef, params), swap[SOURCE], swap[TARGET])
    np.testing.assert_allclose(got[..., swap], forward(model, SOURCE, TARGET), atol=1e-5)
    assert np.abs(got - forward(nnx.merge(nnx.graphdef(model), params), swap[SOURCE], swap[TARGET])).max() > 1e-2


def test_order_of_the_sinusoids(make_model):
    """Features in another order are the same as weights in another order, which the first look-up has here."""
    order = np.concatenate([np.arange(0, 12, 2), np.arange(1, 12, 2)])
    tokens = np.array([[3, 3, 3, 3]])
    models = [make_model(interleaved_sinusoids=kind) for kind in (True, False)]

    @jitted
    def run(models):
        plain, other = (model.embed(tokens, jnp.arange(4)) for model in models)
        return plain, other, models[0].embedding(tokens), sinusoidal_positions(jnp.arange(4), 12)

    plain, other, table, sinusoids = run(models)
    np.testing.assert_allclose((plain - table)[..., order], other - table, atol=1e-6)
    np.testing.assert_allclose(other - table, sinusoids[None][..., order], atol=1e-5)


def test_offsets_of_the_logits(make_model, forward):
    model = make_model(logits_bias=True)
    bias = np.asarray(model.logits_bias)
    assert bias.shape == (V,)
    without = nnx.clone(model)
    without.logits_bias[...] = jax.device_put(np.zeros(V, np.float32))
    got, want = (forward(each, SOURCE, TARGET) for each in (model, without))
    np.testing.assert_allclose(got - want, np.broadcast_to(bias, got.shape), atol=1e-5)


def test_embedding_without_a_scale(make_model):
    models = [make_model(scale_embedding=kind) for kind in (True, False)]
    run = jitted(
        lambda models: [(m.embedding(SOURCE), m.embedding.attend(np.ones((1, 12), np.float32))) for m in models]
    )
    (scaled, logits), (plain, same_logits) = run(models)
    np.testing.assert_allclose(plain * 12**0.5, scaled, rtol=1e-6)
    np.testing.assert_array_equal(same_logits, logits)


@pytest.mark.parametrize("activation", ["gelu", "swish", pytest.param("gelu_tanh", marks=pytest.mark.slow)])
def test_activations_differ(make_model, forward, activation):
    got, relu = (forward(make_model(activation=kind), SOURCE, TARGET) for kind in (activation, "relu"))
    assert np.abs(got - relu).max() > 1e-2


def test_number_of_decoder_layers(make_model, forward):
    """Two layers of the decoder that add nothing, of a model with pre-norm, might as well not be there."""
    deep, shallow = make_model(pre_norm=True), make_model(pre_norm=True, num_decoder_layers=1)
    params, fewer = params_of(deep), params_of(shallow)
    assert all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(fewer["decoder_layers"]))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(fewer["encoder_layers"]))
    layers = params["decoder_layers"]
    adds = [layers[name]["out"][part] for name in ("self_attention", "cross_attention") for part in ("kernel", "bias")]
    for leaf in (*adds, layers["feed_forward"]["down"], layers["feed_forward"]["down_bias"]):
        leaf[1:] = 0
    first = params | {"decoder_layers": jax.tree.map(lambda leaf: leaf[:1], layers)}
    got = forward(nnx.merge(nnx.graphdef(shallow), first), SOURCE, TARGET)
    np.testing.assert_allclose(got, forward(nnx.merge(nnx.graphdef(deep), params), SOURCE, TARGET), atol=1e-5)


def test_dropout_of_hidden_units(make_model, forward):
    drop = lambda model: model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=0))  # noqa: E731
    model = make_model(activation_dropout_rate=0.4)
    assert np.abs(jitted(drop)(model) - forward(make_model(), SOURCE, TARGET)).max() > 1e-2
    assert count_draws(model, SOURCE, TARGET) == 0, "no stream"
    assert count_draws(drop, model) == 3 + 3, "one network in each layer"


def test_every_step_of_marian_equals_teacher_forcing(make_model, forward):
    model = make_model(**MARIAN, num_decoder_layers=2, pad_id=22, start_id=22, eos_id=0)

    @jitted
    def by_steps(model):
        step_fn, cache, _ = started(model.decoder(), SOURCE, max_length=T)
        inputs = np.concatenate([np.full_like(TARGET[:, :1], 22), TARGET[:, :-1]], axis=1)
        _, logits = jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, inputs.T)
        return logits.swapaxes(0, 1)

    np.testing.assert_allclose(by_steps(model), forward(model, SOURCE, TARGET), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"activation": "tanh"}, 'activation must be "relu" or'), ({"start_id": 23}, "start_id=23 must be in 0 .. 22")],
)
def test_refuses_what_it_does_not_know(overrides, message):
    config = TransformerConfig(vocab_size=V, **overrides)
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
