"""T5 in Hugging Face folders, and against transformers."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.models import T5, T5Config, hf

V, T = 41, 19
SIZES = {"vocab_size": V, "num_layers": 3, "num_decoder_layers": 2, "d_model": 12, "num_heads": 3, "d_k": 5, "d_ff": 20}
SIZES |= {"num_buckets": 8, "max_distance": 12, "dropout_rate": 0.2, "norm_epsilon": 1e-5}
VERSIONS = {
    "1.0": {},
    "1.1": {"activation": "gelu_tanh", "is_gated": True, "is_tied": False},
    "other": {
        "activation": "swish",
        "is_gated": True,
        "num_decoder_layers": None,
        "pad_id": 3,
        "start_id": 5,
        "eos_id": 4,
    },
}


@functools.cache
def make_model(version):
    config = T5Config(**SIZES | VERSIONS[version])
    graphdef, params = nnx.split(nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return jnp.asarray(rng.normal(mean, 0.2, leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params)))


@pytest.fixture(params=list(VERSIONS))
def saved(request, tmp_path):
    model = make_model(request.param)
    hf.save(model, tmp_path)
    return model, tmp_path


def texts(config):
    """Sources with padding behind, in front and nowhere; targets."""
    rng = np.random.default_rng(1)
    source, target = rng.integers(6, V, (3, 23)), rng.integers(6, V, (3, T))
    source[0, 15:] = source[1, :6] = config.pad_id
    return source, target


def change(folder, **fields):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "left out"}))


def change_tensors(folder, edit):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def test_what_is_saved_is_loaded(saved):
    model, folder = saved
    loaded = hf.load(folder)
    assert loaded.config == model.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, model))
    assert hf.load(folder, dtype="bfloat16").config.dtype == "bfloat16"


def test_the_names_of_older_folders(saved):
    """The architecture of the first release, and copies of the embedding under its other names."""
    model, folder = saved

    def add_copies(tensors):
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", *(["lm_head"] if model.config.is_tied else [])):
            tensors[f"{name}.weight"] = tensors["shared.weight"]
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((8, 3), np.float32)

    change_tensors(folder, add_copies)
    change(folder, architectures=["T5WithLMHeadModel"])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), hf.load(folder), model))


def test_what_transformers_5_says_of_version_1_1(tmp_path):
    hf.save(make_model("1.1"), tmp_path)
    change(tmp_path, tie_word_embeddings=True, scale_decoder_outputs=False, dense_act_fn="gelu_new", is_gated_act=True)
    assert hf.load(tmp_path).config == make_model("1.1").config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj is 'gated-tanh', but only relu, gelu, "),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is False, but only True is supported"),
        ({"is_decoder": True}, "is_decoder is True, but only False is supported"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu', but only 'relu' is supported"),
        ({"scale_decoder_outputs": True, "tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"tie_word_embeddings": False}, "the tensor lm_head.weight is missing"),
        (
            {"feed_forward_proj": "gated-gelu"},
            "there is a tensor decoder.block.0.layer.2.DenseReluDense.wi.weight, for",
        ),
        ({"num_decoder_layers": 1}, "there is a tensor decoder.block.1.layer.0.SelfAttention.k.weight, for which"),
        ({"num_decoder_layers": "left out"}, "the tensor decoder.block.2.layer.0.layer_norm.weight is missing"),
        ({"d_kv": 4}, r"q.weight has shape \[15, 12\], but \[12, 12\] is needed"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id is \[1, 2\], not of type int"),
        ({"decoder_start_token_id": V}, "start_id=41 is no token of a vocabulary of 41"),
    ],
)
def test_refuses_what_differs(tmp_path, fields, message):
    hf.save(make_model("1.0"), tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(UserError, match=message) as caught:
        hf.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_refuses_to_save_what_has_no_name(tmp_path):
    config = T5Config(**SIZES, activation="gelu", is_gated=True)
    model = nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="no feed-forward layer with gelu and is_gated=True"):
        hf.save(model, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("version", VERSIONS)
def test_their_net_of_our_folder_says_the_same(tmp_path, version):
    """Logits and attention maps, from our parameters and then from theirs."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = make_model(version)
    hf.save(model, tmp_path)
    net, info = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    c, (source, target) = model.config, texts(model.config)
    inputs = np.concatenate([np.full((3, 1), c.start_id), target[:, :-1]], axis=1)

    def their_answer(net):
        with torch.no_grad():
            return net.eval()(
                input_ids=torch.tensor(source),
                attention_mask=torch.tensor(source != c.pad_id).long(),
                decoder_input_ids=torch.tensor(inputs),
                output_attentions=True,
            )

    forward = jax.jit(lambda model: model(jnp.asarray(source), jnp.asarray(target), return_attention=True))
    answer, (logits, maps) = their_answer(net), forward(model)
    np.testing.assert_allclose(logits, answer.logits, atol=1e-5)
    theirs = {f"encoder/{index}/self": weights for index, weights in enumerate(answer.encoder_attentions)}
    theirs |= {f"decoder/{index}/self": weights for index, weights in enumerate(answer.decoder_attentions)}
    theirs |= {f"decoder/{index}/cross": weights for index, weights in enumerate(answer.cross_attentions)}
    assert theirs.keys() == maps.keys()
    for name, weights in theirs.items():
        np.testing.assert_allclose(maps[name], weights, atol=1e-5, err_msg=name)
    assert abs(answer.logits).max() > 0.3

    net.save_pretrained(tmp_path / "theirs")
    again = hf.load(tmp_path / "theirs")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(again), nnx.state(model)))
    hf.save(again, tmp_path / "ours")
    reloaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(their_answer(reloaded).logits, answer.logits)


@pytest.mark.parity
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_gradients_are_theirs(tmp_path, version):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = make_model(version)
    hf.save(model, tmp_path)
    net = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    source, target = texts(model.config)
    mask = torch.tensor(source != model.config.pad_id).long()
    net(input_ids=torch.tensor(source), attention_mask=mask, labels=torch.tensor(target)).loss.backward()

    def loss(model):
        log_probs = jax.nn.log_softmax(model(jnp.asarray(source), jnp.asarray(target)))
        return -jnp.take_along_axis(log_probs, jnp.asarray(target)[..., None], axis=-1).mean()

    # Written as a folder, gradients have their names and shapes.
    hf.save(jax.jit(jax.grad(loss))(model), tmp_path / "gradients")
    ours = safetensors.numpy.load_file(tmp_path / "gradients" / "model.safetensors")
    theirs = {name: weight.grad.numpy() for name, weight in net.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.abs(gradient).max() > 1e-5, name
        np.testing.assert_allclose(ours[name], gradient, atol=1e-5, err_msg=name)
