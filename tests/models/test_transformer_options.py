"""What a Transformer may have that the paper's has not, most of it Marian's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.functional import sinusoidal_positions
from tfx_jax.models import Transformer, TransformerConfig

V, T = 23, 5
SOURCE = jnp.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGET = jnp.array([[5, 21, 13, 6, 2], [7, 7, 2, 0, 0]])
MARIAN = {"activation": "swish", "interleaved_sinusoids": False, "logits_bias": True, "layer_norm_epsilon": 1e-5}

_forward = jax.jit(lambda model, source, target: model(source, target))


def test_other_special_tokens_change_nothing_but_names(make_model):
    swap = np.arange(V)
    swap[[0, 1, 20, 22]] = 20, 22, 0, 1
    model, other = make_model(), make_model(pad_id=20, start_id=22)
    graphdef, params = nnx.split(other)
    params["embedding"]["table"][...] = params["embedding"]["table"][...][np.argsort(swap)]
    got = _forward(nnx.merge(graphdef, params), swap[SOURCE], swap[TARGET])
    np.testing.assert_allclose(got[..., swap], _forward(model, SOURCE, TARGET), atol=1e-5)
    assert jnp.abs(got - _forward(nnx.merge(nnx.graphdef(model), params), swap[SOURCE], swap[TARGET])).max() > 1e-2


def test_order_of_the_sinusoids(make_model):
    """Features in another order are the same as weights in another order, which the first look-up has here."""
    order = np.concatenate([np.arange(0, 12, 2), np.arange(1, 12, 2)])
    tokens = jnp.array([[3, 3, 3, 3]])
    plain, other = (make_model(interleaved_sinusoids=kind)._embed(tokens, jnp.arange(4), None, None) for kind in (1, 0))
    table = make_model().embedding(tokens)
    np.testing.assert_allclose((plain - table)[..., order], other - table, atol=1e-6)
    np.testing.assert_allclose(other - table, sinusoidal_positions(jnp.arange(4), 12)[None][..., order], atol=1e-5)


def test_offsets_of_the_logits(make_model):
    model = make_model(logits_bias=True)
    bias = model.logits_bias[...]
    assert bias.shape == (V,)
    without = nnx.clone(model)
    without.logits_bias[...] = jnp.zeros(V)
    got, want = (_forward(each, SOURCE, TARGET) for each in (model, without))
    np.testing.assert_allclose(got - want, jnp.broadcast_to(bias, got.shape), atol=1e-5)


def test_embedding_without_a_scale(make_model):
    plain, other = make_model(), make_model(scale_embedding=False)
    np.testing.assert_allclose(other.embedding(SOURCE) * 12**0.5, plain.embedding(SOURCE), rtol=1e-6)
    np.testing.assert_array_equal(other.embedding.attend(jnp.ones((1, 12))), plain.embedding.attend(jnp.ones((1, 12))))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swish"])
def test_activations_differ(make_model, activation):
    got, relu = (_forward(make_model(activation=kind), SOURCE, TARGET) for kind in (activation, "relu"))
    assert jnp.abs(got - relu).max() > 1e-2


def test_number_of_decoder_layers(make_model):
    """Two layers of the decoder that add nothing, of a model with pre-norm, might as well not be there."""
    deep, shallow = make_model(pre_norm=True), make_model(pre_norm=True, num_decoder_layers=1)
    params, fewer = nnx.to_pure_dict(nnx.state(deep)), nnx.to_pure_dict(nnx.state(shallow))
    assert all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(fewer["decoder_layers"]))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(fewer["encoder_layers"]))
    layers = params["decoder_layers"]
    for sublayer, names in (("self_attention", ["out"]), ("cross_attention", ["out"])):
        for name in names:
            layers[sublayer][name] = jax.tree.map(lambda leaf: leaf.at[1:].set(0), layers[sublayer][name])
    for name in ("down", "down_bias"):
        layers["feed_forward"][name] = layers["feed_forward"][name].at[1:].set(0)
    first = params | {"decoder_layers": jax.tree.map(lambda leaf: leaf[:1], layers)}
    got = _forward(nnx.merge(nnx.graphdef(shallow), first), SOURCE, TARGET)
    np.testing.assert_allclose(got, _forward(nnx.merge(nnx.graphdef(deep), params), SOURCE, TARGET), atol=1e-5)


def test_dropout_of_hidden_units(make_model):
    train = jax.jit(lambda model, rng: model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=rng)))
    plain = _forward(make_model(), SOURCE, TARGET)
    model = make_model(activation_dropout_rate=0.4)
    np.testing.assert_array_equal(_forward(model, SOURCE, TARGET), plain)
    assert jnp.abs(train(model, jax.random.key(0)) - plain).max() > 1e-2


def test_every_step_of_marian_equals_teacher_forcing(make_model):
    model = make_model(**MARIAN, num_decoder_layers=2, pad_id=22, start_id=22, eos_id=0)

    @jax.jit
    def by_steps(model):
        step_fn, cache = model.start_decoding(SOURCE, max_length=T)
        inputs = jnp.concatenate([jnp.full_like(TARGET[:, :1], 22), TARGET[:, :-1]], axis=1)
        _, logits = jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, inputs.T)
        return logits.swapaxes(0, 1)

    np.testing.assert_allclose(by_steps(model), _forward(model, SOURCE, TARGET), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"activation": "tanh"}, "activation='tanh' is none of relu"), ({"start_id": 23}, "start_id=23 is no token")],
)
def test_refuses_what_it_does_not_know(overrides, message):
    config = TransformerConfig(vocab_size=V, **overrides)
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
