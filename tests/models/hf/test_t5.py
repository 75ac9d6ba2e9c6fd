"""T5 in Hugging Face folders, and against transformers."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from flax import nnx

from tests.models.hf import test_marian
from tests.models.hf.folders import (
    LEFT_OUT,
    assert_comes_back,
    assert_encoder_decoder_says_the_same,
    assert_refused,
    assert_same,
    change_config,
    change_tensors,
    encoder_decoder_gradients,
    redrawn,
)
from tests.nn.programs import draw, jitted
from tfx_jax.errors import UserError
from tfx_jax.models import T5, T5Classifier, T5Config, T5Encoder, T5Tagger, hf

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
    "umt5": {"activation": "gelu_tanh", "is_gated": True, "layers_have_biases": True},
}


@functools.cache
def make_model(version):
    config = T5Config(**SIZES | VERSIONS[version])
    return draw(lambda: T5(config, rngs=nnx.Rngs(0)), stddev=0.2)


@pytest.fixture(params=["1.0", "1.1", "other"])
def saved(request, tmp_path):
    model = make_model(request.param)
    hf.save(model, tmp_path)
    return model, tmp_path


def texts(config):
    """Sources with padding behind, of two lengths, and nowhere; targets."""
    rng = np.random.default_rng(1)
    source, target = rng.integers(6, V, (3, 23)), rng.integers(6, V, (3, T))
    source[0, 15:] = source[1, 17:] = config.pad_id
    return source, target


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_saved_is_loaded(tmp_path, version):
    assert_comes_back(make_model(version), tmp_path)


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_generation_config_says_what_a_decoder_starts_with(tmp_path, family):
    model = make_model("1.0") if family == "t5" else test_marian.make_model("opus")
    hf.save(model, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 5}')
    assert hf.load(tmp_path).config.start_id == hf.load_config(tmp_path).start_id == 5
    (tmp_path / "generation_config.json").write_text("{}")
    assert hf.load(tmp_path).config.start_id == model.config.start_id
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": [5]}')
    with pytest.raises(UserError, match=r"generation_config.json: decoder_start_token_id is \[5\], not a token$"):
        hf.load(tmp_path)


def test_computes_in_the_dtype_asked_for(tmp_path):
    hf.save(make_model("1.0"), tmp_path)
    assert hf.load(tmp_path, dtype="bfloat16").config.dtype == "bfloat16"


def test_the_names_of_older_folders(saved):
    """The architecture of the first release, and copies of the embedding under its other names."""
    model, folder = saved

    def add_copies(tensors):
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", *(["lm_head"] if model.config.is_tied else [])):
            tensors[f"{name}.weight"] = tensors["shared.weight"]
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((8, 3), np.float32)

    change_tensors(folder, add_copies)
    change_config(folder, architectures=["T5WithLMHeadModel"])
    assert_same(hf.load(folder), model)


def test_what_transformers_5_says_of_version_1_1(tmp_path):
    hf.save(make_model("1.1"), tmp_path)
    change_config(
        tmp_path, tie_word_embeddings=True, scale_decoder_outputs=False, dense_act_fn="gelu_new", is_gated_act=True
    )
    assert hf.load(tmp_path).config == make_model("1.1").config


@pytest.mark.parametrize("is_scaled", [True, False])
def test_an_output_layer_that_transformers_5_scales_or_shares(tmp_path, is_scaled):
    """Scaled as if it were the embedding, though it is not; and the embedding, not scaled: either has its own here."""
    model = make_model("1.1")
    want = dataclasses.replace(model.config, is_tied=False)
    hf.save(model, tmp_path)
    if not is_scaled:
        change_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    change_config(tmp_path, tie_word_embeddings=not is_scaled, scale_decoder_outputs=is_scaled)
    found = hf.load(tmp_path)
    assert found.config == want == hf.load_config(tmp_path)
    head = model.output_embedding.table[...] * 12**-0.5 if is_scaled else model.embedding.table[...]
    np.testing.assert_allclose(found.output_embedding.table[...], head, rtol=1e-6)
    hf.save(found, tmp_path / "again", fields=json.loads((tmp_path / "config.json").read_text()))
    assert_same(hf.load(tmp_path / "again"), found)


@pytest.mark.parametrize("version", ["1.0", "umt5"])
def test_an_encoder_alone(tmp_path, version):
    config = dataclasses.replace(make_model(version).config, num_decoder_layers=1, is_tied=True)
    encoder = draw(lambda: T5Encoder(config, rngs=nnx.Rngs(0)))
    assert_comes_back(encoder, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("T5EncoderModel")


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", ["T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel", "MT5ForConditionalGeneration"]
)
def test_relatives_say_the_same(tmp_path, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 3, "num_heads": 3}
    config = getattr(transformers, name.partition("T5")[0] + "T5Config")(**sizes, relative_attention_num_buckets=8)
    net = redrawn(getattr(transformers, name)(config))
    net.save_pretrained(tmp_path / "theirs")
    model = hf.load(tmp_path / "theirs")
    hf.save(model, tmp_path / "ours", fields={"architectures": [name]})
    assert_same(hf.load(tmp_path / "ours"), model)
    again, info = type(net).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    theirs, ours = net.state_dict(), again.state_dict()
    for tensor in theirs:
        if tensor != "lm_head.weight" or not config.tie_word_embeddings:
            assert torch.equal(ours[tensor], theirs[tensor]), tensor

    source, target = texts(model.config)
    for side in ("right", "left"):
        text = source if side == "right" else np.stack([np.roll(row, (row == 0).sum()) for row in source])
        mask = text != 0
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor(text), "attention_mask": torch.tensor(mask).long()}
            if "Encoder" in name:
                want = net(**inputs).last_hidden_state.numpy()[mask]
                got = np.asarray(jitted(lambda model, text: model(text))(model, text))[mask]
            else:
                shifted = np.concatenate([np.zeros((len(target), 1), int), target[:, :-1]], axis=1)
                want = net(**inputs, decoder_input_ids=torch.tensor(shifted)).logits.numpy()
                got = jitted(lambda model, text: model(text, target))(model, text)
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
        assert np.std(want) > 0.1


@pytest.mark.parity
def test_an_output_layer_of_umt5(tmp_path):
    """As published, it is no embedding and is not scaled; transformers 5 scales it, and 4 did not."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = dataclasses.replace(make_model("umt5").config, is_tied=False)
    model = draw(lambda: T5(config, rngs=nnx.Rngs(0)), stddev=0.2)
    assert_comes_back(model, tmp_path)
    net = transformers.UMT5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    source, target = np.arange(6, 16)[None], np.arange(7, 13)[None]
    shifted = np.concatenate([[[0]], target[:, :-1]], axis=1)
    with torch.no_grad():
        want = net(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(shifted)).logits.numpy()
    got = np.asarray(jitted(lambda model: model(source, target))(model))
    np.testing.assert_allclose(got * config.d_model**-0.5, want, atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("is_scaled", [True, False])
def test_what_transformers_5_saves_untied_says_the_same(tmp_path, is_scaled):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=is_scaled)
    torch.manual_seed(0)
    net = transformers.T5ForConditionalGeneration(config).eval()
    if is_scaled:
        net.lm_head.weight = torch.nn.Parameter(torch.randn(V, 12))
        net.config.tie_word_embeddings = False
    net.save_pretrained(tmp_path)
    source, target = np.arange(2, 12)[None], np.arange(3, 9)[None]
    shifted = np.concatenate([[[0]], target[:, :-1]], axis=1)
    with torch.no_grad():
        want = net(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(shifted)).logits.numpy()
    np.testing.assert_allclose(jitted(lambda model: model(source, target))(hf.load(tmp_path)), want, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj is 'gated-tanh', but only relu, gelu, "),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is False, but only True is supported"),
        ({"is_decoder": True}, "is_decoder is True, but only False is supported"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu', but only 'relu' is supported"),
        ({"scale_decoder_outputs": True, "tie_word_embeddings": False}, "the tensor lm_head.weight is missing"),
        ({"tie_word_embeddings": False}, "the tensor lm_head.weight is missing"),
        (
            {"feed_forward_proj": "gated-gelu"},
            "there is a tensor decoder.block.0.layer.2.DenseReluDense.wi.weight, for",
        ),
        ({"num_decoder_layers": 1}, "there is a tensor decoder.block.1.layer.0.SelfAttention.k.weight, for which"),
        ({"num_decoder_layers": LEFT_OUT}, "the tensor decoder.block.2.layer.0.layer_norm.weight is missing"),
        ({"d_kv": 4}, r"q.weight has shape \[15, 12\], but \[12, 12\] is needed"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id is \[1, 2\], not of type int"),
        ({"decoder_start_token_id": V}, "start_id=41 must be in 0 .. 40"),
    ],
)
def test_refuses_what_differs(tmp_path, fields, message):
    hf.save(make_model("1.0"), tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)


def test_refuses_to_save_what_has_no_name(tmp_path):
    config = T5Config(**SIZES, activation="gelu", is_gated=True)
    model = nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="no feed-forward layer with gelu and is_gated=True"):
        hf.save(model, tmp_path)


def test_heads_need_labels():
    for model in (T5Classifier, T5Tagger):
        with pytest.raises(ValueError, match="needs labels, got none"):
            model(T5Config(), rngs=nnx.Rngs(0))


@pytest.mark.parity
@pytest.mark.parametrize("prefix", ["T5", "MT5", "UMT5"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_heads_of_their_nets(tmp_path, prefix, head):
    """Each text alone there, and with padding on either side here; classifiers count the last of two EOS."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 3, "num_heads": 3}
    sizes |= {"num_decoder_layers": 2, "relative_attention_num_buckets": 8, "num_labels": 4}
    sizes |= {"decoder_start_token_id": 0}
    cls = getattr(transformers, f"{prefix}{head}")
    net = redrawn(cls(cls.config_class(**sizes, classifier_dropout=0.3)))
    net.save_pretrained(tmp_path / "theirs")
    ours, (tokens, _) = hf.load(tmp_path / "theirs"), texts(T5Config())
    assert ours.config.head_dropout_rate == 0.3
    assert len(ours.config.labels) == 4
    lengths = (tokens != 0).sum(axis=1)
    tokens[:, 4] = tokens[np.arange(3), lengths - 1] = ours.config.eos_id
    with torch.no_grad():
        rows = [torch.tensor(tokens[row : row + 1, :length]) for row, length in enumerate(lengths)]
        want = [net(row).logits[0].numpy() for row in rows]
    left = np.stack([np.roll(row, 23 - length) for row, length in zip(tokens, lengths, strict=True)])
    run = jitted(lambda model, tokens, mask: model(tokens, token_mask=mask))
    for padded in (tokens, left):
        for mask in (None, padded != 0):
            filled = padded if mask is None else np.where(mask, padded, 7)
            logits = np.asarray(run(ours, filled, mask))
            for row, expected in enumerate(want):
                result = logits[row] if logits.ndim == 2 else logits[row, padded[row] != 0]
                assert expected.std() > 0.1
                np.testing.assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())
    hf.save(ours, tmp_path / "ours", fields={"architectures": [f"{prefix}{head}"]})
    again = cls.from_pretrained(tmp_path / "ours")
    assert again.config.id2label == net.config.id2label
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    assert_same(hf.load(tmp_path / "ours"), ours)


@pytest.mark.parity
@pytest.mark.parametrize("version", VERSIONS)
def test_their_net_of_our_folder_says_the_same(tmp_path, version):
    name = "UMT5ForConditionalGeneration" if version == "umt5" else "T5ForConditionalGeneration"
    cls, model = getattr(pytest.importorskip("transformers"), name), make_model(version)
    assert_encoder_decoder_says_the_same(cls, model, texts(model.config), tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_gradients_are_theirs(tmp_path, version):
    cls, model = pytest.importorskip("transformers").T5ForConditionalGeneration, make_model(version)
    ours, theirs = encoder_decoder_gradients(cls, model, texts(model.config), tmp_path)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.abs(gradient).max() > 1e-5, name
        np.testing.assert_allclose(ours[name], gradient, atol=1e-5, err_msg=name)
