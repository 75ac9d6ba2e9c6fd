"""The Transformer as a MarianMTModel, or one of its relatives, in Hugging Face folders, and against transformers."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.models.hf.folders import (
    LEFT_OUT,
    assert_comes_back,
    assert_encoder_decoder_says_the_same,
    assert_refused,
    assert_same,
    change_config,
    change_tensors,
    encoder_decoder_gradients,
    loaded_by_them,
    redrawn,
)
from tests.nn.programs import draw, jitted, params_of
from tests.tiers import slow_but
from tfx_jax.generation.decoding import BeamSearch, DecodeDriver
from tfx_jax.models import Transformer, TransformerClassifier, TransformerConfig, hf
from tfx_jax.models.hf import marian
from tfx_jax.nn import AttentionConfig, AttentionOptions

V, T = 41, 13
SIZES = {"vocab_size": V, "num_layers": 3, "num_decoder_layers": 2, "d_model": 12, "num_heads": 3, "d_ff": 20}
VARIANTS = {
    # As released: the last token pads and starts, 0 ends.
    "opus": {"pad_id": V - 1, "start_id": V - 1, "eos_id": 0, "activation_dropout_rate": 0.1},
    # As trained here, with the ids of our tokenizers.
    "ours": {"activation": "relu", "dropout_rate": 0.3, "attention_dropout_rate": 0.1},
    "other": {"activation": "gelu", "scale_embedding": False, "num_decoder_layers": 3},
    "two vocabularies": {"source_vocab_size": 47, "pad_id": V - 1, "start_id": V - 1, "eos_id": 0, "is_tied": False},
    "two vocabularies tied": {"source_vocab_size": 47, "pad_id": V - 1, "start_id": V - 1, "eos_id": 0},
}
_LEARNED = {"learned_positions": 30, "first_position": 2, "embedding_norm": True}
_IDS = {"pad_id": 1, "start_id": 2, "eos_id": 2, "activation": "gelu"}
RELATIVES = {
    "BartForConditionalGeneration": {**_LEARNED, **_IDS, "scale_embedding": False},
    "MBartForConditionalGeneration": {**_LEARNED, **_IDS, "pre_norm": True},
    "PegasusForConditionalGeneration": {"pad_id": 0, "start_id": 0, "eos_id": 1, "pre_norm": True},
    "M2M100ForConditionalGeneration": {**_IDS, "pre_norm": True, "first_position": 2, "sinusoids_reach_base": True}
    | {"activation": "relu", "logits_bias": False},
}
VARIANTS |= RELATIVES


@functools.cache
def make_model(variant):
    config = TransformerConfig.marian(**SIZES | VARIANTS[variant])
    return draw(lambda: Transformer(config, rngs=nnx.Rngs(0)), stddev=0.2)


def class_name(variant):
    return variant if variant in RELATIVES else "MarianMTModel"


def texts(config):
    """Sources with padding behind, of two lengths, and nowhere; targets."""
    rng = np.random.default_rng(1)
    source, target = rng.integers(3, V - 1, (3, 17)), rng.integers(3, V - 1, (3, T))
    source[0, 11:] = source[1, 13:] = config.pad_id
    return source, target


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_saved_is_loaded(tmp_path, variant):
    model = make_model(variant)
    assert_comes_back(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [class_name(variant)]
    bias = safetensors.numpy.load_file(tmp_path / "model.safetensors").get("final_logits_bias")
    assert (bias is None) == (model.logits_bias is None)
    if bias is not None:
        np.testing.assert_array_equal(bias[0], model.logits_bias)


def test_a_bart_without_offsets_of_logits(tmp_path):
    """Older folders lack them."""
    hf.save(make_model("BartForConditionalGeneration"), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop("final_logits_bias"))
    model = hf.load(tmp_path)
    assert (model.config.logits_bias, hf.load_config(tmp_path)) == (False, model.config)
    assert_comes_back(model, tmp_path / "again")


def test_older_folders_have_copies_and_sinusoids(tmp_path):
    hf.save(make_model("opus"), tmp_path)

    def add_copies(tensors):
        for name in ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["model.shared.weight"]
        for side in ("encoder", "decoder"):
            angles = np.arange(512)[:, None] / 10_000 ** (np.arange(6) / 6)
            sinusoids = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
            tensors[f"model.{side}.embed_positions.weight"] = sinusoids.astype(np.float32)

    change_tensors(tmp_path, add_copies)
    change_config(tmp_path, architectures=LEFT_OUT, static_position_embeddings=True, num_beams=6)
    assert_same(hf.load(tmp_path), make_model("opus"))

    def change_positions(tensors):
        tensors["model.decoder.embed_positions.weight"] = tensors["model.decoder.embed_positions.weight"][::-1].copy()

    change_tensors(tmp_path, change_positions)
    assert_refused(tmp_path, r"the tensor model\.decoder\.embed_positions\.weight has other values than the sinusoids")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "tanh"}, "activation_function is 'tanh', but only gelu_new, "),
        ({"decoder_vocab_size": V + 1}, "decoder_vocab_size is 42, but only 41 is supported"),
        ({"decoder_ffn_dim": 24}, "decoder_ffn_dim is 24, but only 20 is supported"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads is 2, but only 3 is supported"),
        ({"num_attention_heads": 2}, "num_attention_heads is 2, but only 3 is supported"),
        ({"share_encoder_decoder_embeddings": False}, "there is a tensor model.shared.weight, for which"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1, but only 0.0 is supported"),
        ({"decoder_start_token_id": LEFT_OUT}, "start_id=58100 must be in 0 .. 40"),
        ({"encoder_attention_heads": 5, "decoder_attention_heads": 5}, "d_model=12 is not divisible by num_heads=5"),
        ({"encoder_layers": 4}, "the tensor model.encoder.layers.3.self_attn.q_proj.weight is missing"),
    ],
)
def test_refuses_what_differs(tmp_path, fields, message):
    hf.save(make_model("opus"), tmp_path)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre_norm": True, "embedding_norm": True}, "has pre_norm=False, embedding_norm=False;"),
        ({"learned_positions": 50}, "has learned_positions=0;"),
        ({"is_tied": False}, "has is_tied=True;"),
        ({"attention_bias": False, "layer_norm_epsilon": 1e-6}, "has layer_norm_epsilon=1e-05;"),
        ({"interleaved_sinusoids": True, "pre_norm": True, "d_v": 5}, "has pre_norm=False, d_v=d_model/num_heads;"),
        ({"d_k": 3}, "has d_k=d_model/num_heads;"),
        ({"d_v": 5}, "has d_v=d_model/num_heads;"),
    ],
)
def test_refuses_to_save_what_marian_has_not(tmp_path, fields, message):
    config = TransformerConfig.marian(**SIZES | fields)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=rf"{message} TransformerConfig.marian\(\) is like this$"):
        hf.save(model, tmp_path)


COMPLETED = {
    "default": {},
    "activation": {"activation": "gelu_tanh", "scale_embedding": False, "attention_bias": True},
    "norm first, as in the demo": {"pre_norm": True},
    "sines in front": {"interleaved_sinusoids": False},
    "offsets": {"attention_bias": True, "logits_bias": True, "activation": "swish"},
}


def test_another_attention_is_refused(tmp_path):
    config = TransformerConfig(**SIZES, attention=AttentionConfig("window", AttentionOptions(window=3)))
    model = draw(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"no Hugging Face architecture supports window attention with window=3, so"):
        hf.save(model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", slow_but(COMPLETED, "default", "norm first, as in the demo"))
def test_a_model_of_another_form_says_the_same(tmp_path, form):
    config = TransformerConfig(**SIZES | COMPLETED[form])
    model = draw(lambda: Transformer(config, rngs=nnx.Rngs(0)), stddev=0.3)
    before = jax.tree.map(np.array, params_of(model))
    hf.save(model, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params_of(model), before)
    again = hf.load(tmp_path)
    assert again.config == dataclasses.replace(
        config, attention_bias=True, logits_bias=True, interleaved_sinusoids=False
    )
    assert_same(again, hf.completed(model))
    assert hf.completed(again) is again
    source, target = texts(config)
    want, got = jitted(model)(source, target), jitted(again)(source, target)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.std(want) > 0.5
    sentences = [row[row != config.pad_id].tolist() for row in source]
    for beam_size in (1, 3):
        found = []
        for side in (model, again):
            graphdef, params = nnx.split(side)
            driver = DecodeDriver(graphdef, BeamSearch(beam_size), eos_ids=(config.eos_id,))
            found.append(driver(driver.decoder(params), sentences, max_new_tokens=lambda length: length + 3))
        assert found[0] == found[1]
        assert len({tuple(text) for text in found[0]}) == len(sentences)


@pytest.mark.parity
def test_transformers_reads_a_model_with_the_norm_first(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = TransformerConfig(**SIZES, pre_norm=True)
    model = draw(lambda: Transformer(config, rngs=nnx.Rngs(0)), stddev=0.3)
    hf.save(model, tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "PegasusForConditionalGeneration"
    source, target = np.array([[5, 6, 7, 8, config.eos_id]]), np.array([[9, 10, 11, config.eos_id]])
    inputs = np.concatenate([[[config.start_id]], target[:, :-1]], axis=1)
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(inputs)).logits.numpy()
    np.testing.assert_allclose(jitted(model)(source, target), want, atol=1e-5)


def test_sizes_of_head_may_be_given(tmp_path):
    hf.save(make_model("ours"), tmp_path)
    want = (tmp_path / "config.json").read_text()
    model = nnx.clone(make_model("ours"))
    model.config = dataclasses.replace(model.config, d_k=4, d_v=4)
    hf.save(model, tmp_path)
    assert (tmp_path / "config.json").read_text() == want


def test_parameters_of_opus():
    """A base model of 58,101 tokens: what the released English-German one has, sinusoids not counted."""
    config = TransformerConfig.marian(vocab_size=58_101)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    attention, norm, feed_forward = 4 * (512 + 1) * 512, 2 * 512, 512 * 2048 * 2 + 2048 + 512
    layers = 6 * (attention + feed_forward + 2 * norm) + 6 * (2 * attention + feed_forward + 3 * norm)
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 58_101 * 512 + layers + 58_101


@pytest.mark.parity
@pytest.mark.parametrize("variant", VARIANTS)
def test_their_net_of_our_folder_says_the_same(tmp_path, variant):
    cls, model = getattr(pytest.importorskip("transformers"), class_name(variant)), make_model(variant)
    source, target = texts(model.config)
    assert_encoder_decoder_says_the_same(cls, model, (source, target), tmp_path)
    left = np.stack([np.roll(row, (row == model.config.pad_id).sum()) for row in source])
    np.testing.assert_array_equal(left[:, -1] == model.config.pad_id, False)
    got, want = (jitted(lambda model, source: model(source, target))(model, text) for text in (left, source))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("variant", ["opus", "ours"])
def test_gradients_are_theirs(tmp_path, variant):
    cls, model = getattr(pytest.importorskip("transformers"), class_name(variant)), make_model(variant)
    ours, theirs = encoder_decoder_gradients(cls, model, texts(model.config), tmp_path)
    assert ours.keys() == theirs.keys() | {"final_logits_bias"}  # which is no parameter there
    # There, nothing is learned where padding is looked up.
    looked_up = np.arange(V) != model.config.pad_id
    for name, gradient in theirs.items():
        if not name.endswith("k_proj.bias"):  # the same for all keys, which softmax does not see
            assert np.abs(gradient).max() > 1e-5, name
        rows = looked_up if name == "model.shared.weight" else slice(None)
        np.testing.assert_allclose(ours[name][rows], gradient[rows], atol=1e-5, err_msg=name)


def test_a_classifier_needs_labels():
    with pytest.raises(ValueError, match="a classifier needs labels, got none"):
        TransformerClassifier(TransformerConfig(), rngs=nnx.Rngs(0))


@pytest.mark.parity
@pytest.mark.parametrize("architecture", marian.CLASSIFIERS)
def test_classifiers(architecture, tmp_path):
    """Of texts with two ends, the second of which counts: alone, and with padding on either side."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sides = {"layers": 2, "attention_heads": 3, "ffn_dim": 20}
    cls = getattr(transformers, architecture)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    net = redrawn(cls(cls.config_class(vocab_size=V, d_model=12, max_position_embeddings=30, **sizes, num_labels=4)))
    net.save_pretrained(tmp_path)
    ours, (tokens, _) = hf.load(tmp_path), texts(TransformerConfig.marian(pad_id=1))
    lengths = (tokens != 1).sum(axis=1)
    tokens[:, 4] = tokens[np.arange(3), lengths - 1] = 2
    rows = [tokens[row : row + 1, :length] for row, length in enumerate(lengths)]
    with torch.no_grad():
        want = np.concatenate([net(torch.tensor(row)).logits for row in rows])
    assert want.std() > 0.1
    left = np.stack([np.roll(row, 17 - length) for row, length in zip(tokens, lengths, strict=True)])
    run = jitted(lambda model, tokens, mask: model(tokens, token_mask=mask))
    for padded in (tokens, left):
        for mask in (None, padded != 1):
            filled = padded if mask is None else np.where(mask, padded, 7)
            np.testing.assert_allclose(run(ours, filled, mask), want, atol=1e-4 * np.abs(want).max())
    assert_comes_back(ours, tmp_path / "ours")
    again = loaded_by_them(cls, ours, tmp_path / "again")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())


def test_an_nllb_that_starts_with_padding_is_refused(tmp_path):
    """Which has another position there than we count."""
    hf.save(make_model("M2M100ForConditionalGeneration"), tmp_path)
    change_config(tmp_path, decoder_start_token_id=1)
    assert_refused(tmp_path, "decoder_start_token_id is that of padding, where transformers counts no position")
