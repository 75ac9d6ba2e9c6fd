"""LongT5 in Hugging Face folders, and against transformers."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from tests.models.hf.folders import assert_comes_back, assert_refused, assert_same, change_config, redrawn
from tests.nn.programs import draw, jitted
from tfx_jax.generation.decoding import Sampling
from tfx_jax.generation.text import Generator
from tfx_jax.models import T5, T5Config, T5Encoder, hf

V, T = 41, 9
SIZES = {"vocab_size": V, "num_layers": 2, "num_decoder_layers": 1, "d_model": 12, "num_heads": 3, "d_k": 5, "d_ff": 20}
SIZES |= {"num_buckets": 8, "max_distance": 12, "norm_epsilon": 1e-5}
KINDS = {"local": {"local_radius": 3}, "transient-global": {"local_radius": 2, "global_block_size": 4}}


def make_model(kind, **options):
    config = T5Config(**SIZES | KINDS[kind] | options)
    return draw(lambda: T5(config, rngs=nnx.Rngs(0)), stddev=0.3)


def texts():
    """Sources of 23, 14, 3 and 8 tokens, without padding in front, and targets."""
    random = np.random.default_rng(1)
    source, target = random.integers(2, V, (4, 23)), random.integers(2, V, (4, T))
    for row, length in enumerate((23, 14, 3, 8)):
        source[row, length:] = 0
    return source, target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_saved_is_loaded(tmp_path, kind, is_tied):
    assert_comes_back(make_model(kind, is_tied=is_tied), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    """Of a text with padding behind, before or between its tokens, compared with the text alone."""
    model, (source, target) = make_model(kind), texts()
    score = jitted(lambda model, source, target: model(source, target))
    want = score(model, source, target)
    gap = np.insert(source[:, :22], 1, 0, axis=1)  # the last token of the longest is lost
    for moved in (np.stack([np.roll(row, (row == 0).sum()) for row in source]), np.pad(source, ((0, 0), (0, 9)))):
        np.testing.assert_allclose(score(model, moved, target), want, atol=2e-5)
    np.testing.assert_allclose(score(model, gap, target)[1:], want[1:], atol=2e-5)
    np.testing.assert_allclose(score(model, source[1:2, :14], target[1:2]), want[1:2], atol=2e-5)
    assert np.abs(score(model, gap, target)[0] - want[0]).max() > 1e-3


def test_maps_have_the_summaries_first():
    source, target = texts()
    call = jitted(lambda model: model(source, target, return_attention=True)[1])
    maps = call(make_model("transient-global"))["encoder/1/self"]
    assert maps.shape == (4, 3, 23, 5 + 23)
    np.testing.assert_allclose(maps[0].sum(axis=-1), 1, atol=1e-5)
    assert maps[2, :, :3, :5].max() == 0  # its three tokens are no block
    assert (maps[1, :, :14, :3] > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_block_size": 4}, "global_block_size=4 needs local_radius"),
        ({"local_radius": 4, "layers_have_biases": True}, "local_radius=4 needs layers_have_biases=False"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: T5(T5Config(**SIZES, **options), rngs=nnx.Rngs(0)))


def test_refuses_what_differs(tmp_path):
    hf.save(make_model("local"), tmp_path)
    change_config(tmp_path, encoder_attention_type="global")
    assert_refused(tmp_path, "encoder_attention_type is 'global', but only local, transient-global are supported")
    change_config(tmp_path, encoder_attention_type="transient-global")
    assert_refused(tmp_path, "there is a tensor encoder.block.0.layer.0.LocalSelfAttention.k.weight, for which")


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_is_saved_and_loaded(tmp_path, kind):
    config = make_model(kind, is_tied=True).config
    assert_comes_back(draw(lambda: T5Encoder(config, rngs=nnx.Rngs(0))), tmp_path)
    assert '"LongT5EncoderModel"' in (tmp_path / "config.json").read_text()


def their_model(folder, name, kind, **options):
    """A LongT5 of transformers with random weights, which is saved in `folder`, and what we load from there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
    sizes |= {"encoder_attention_type": kind, "feed_forward_proj": "gated-gelu"} | KINDS[kind] | options
    net = redrawn(getattr(transformers, name)(transformers.LongT5Config(**sizes)))
    net.save_pretrained(folder)
    model = hf.load(folder)
    c = model.config
    assert (c.local_radius, c.global_block_size) == (sizes["local_radius"], sizes.get("global_block_size", 0))
    return torch, net, model


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_the_same(tmp_path, kind):
    torch, net, model = their_model(tmp_path / "theirs", "LongT5EncoderModel", kind)
    assert isinstance(model, T5Encoder)
    source = texts()[0]
    exists = source != 0
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(source), "attention_mask": torch.tensor(exists).long()}
        want = net(**inputs).last_hidden_state.numpy()
    got = jitted(lambda model: model(source))(model)
    np.testing.assert_allclose(got[exists], want[exists], rtol=0, atol=1e-4 * np.abs(want).max())
    assert np.std(want) > 0.1
    hf.save(model, tmp_path / "ours")
    again, info = type(net).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    ours = again.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_scaled", [True, False])
def test_transformers_computes_the_same(tmp_path, kind, is_scaled):
    """Logits and greedy tokens, there and back; without scaling, the output layer is the embedding all the same."""
    torch, net, model = their_model(
        tmp_path / "theirs", "LongT5ForConditionalGeneration", kind, tie_word_embeddings=is_scaled
    )
    source, target = texts()
    shifted = np.concatenate([np.zeros((len(target), 1), int), target[:, :-1]], axis=1)
    inputs = {"input_ids": torch.tensor(source), "attention_mask": torch.tensor(source != 0).long()}
    with torch.no_grad():
        want = net(**inputs, decoder_input_ids=torch.tensor(shifted)).logits.numpy()
        tokens = net.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)[:, 1:].tolist()
    got = jitted(lambda model: model(source, target))(model)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    assert np.std(want) > 0.1
    generator = Generator(model, max_new_tokens=8, search=Sampling(temperature=0), eos_ids=[])
    assert generator([row[row != 0].tolist() for row in source]) == tokens

    hf.save(model, tmp_path / "ours")
    assert_same(hf.load(tmp_path / "ours"), model)
    if model.config.is_tied:
        again, info = type(net).from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(info.values())
        theirs = again.state_dict()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in net.state_dict().items())


def test_other_models_are_no_longt5(tmp_path):
    config = dataclasses.replace(make_model("local").config, local_radius=None)
    hf.save(draw(lambda: T5(config, rngs=nnx.Rngs(0))), tmp_path)
    assert '"T5ForConditionalGeneration"' in (tmp_path / "config.json").read_text()
