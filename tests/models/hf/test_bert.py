"""BERT and each of its heads against transformers, with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tfx_jax.models import hf
from tfx_jax.models.hf.names import write_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, T, V = 3, 11, 97
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, V, (B, T))  # not 0, whose vector has no gradient in transformers
SEGMENTS = RNG.integers(0, 3, (B, T))
SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
    "attn_implementation": "eager",
}
OUTPUTS = {
    "BertModel": ("last_hidden_state", "pooler_output"),
    "BertForMaskedLM": ("logits",),
    "BertForPreTraining": ("prediction_logits", "seq_relationship_logits"),
    "BertForNextSentencePrediction": ("logits",),
    "BertForSequenceClassification": ("logits",),
    "BertForTokenClassification": ("logits",),
    "BertForQuestionAnswering": ("start_logits", "end_logits"),
}


def redraw(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module", params=OUTPUTS)
def theirs(request):
    torch.manual_seed(0)
    options = {"num_labels": 5} if "Classification" in request.param else {}
    if request.param == "BertForPreTraining":
        options = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
    return redraw(getattr(transformers, request.param)(transformers.BertConfig(**SIZES, **options)))


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return hf.load(folder)


def run_theirs(model, **options):
    inputs = {"input_ids": TOKENS, "token_type_ids": SEGMENTS} | options
    output = model(**{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()})
    return [output[name] for name in OUTPUTS[type(model).__name__]], output.get("attentions")


def test_logits_and_maps(theirs, ours):
    tokens, segments = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
    got, maps = jax.jit(lambda model: model(tokens, segments, return_attention=True))(ours)
    want, attentions = run_theirs(theirs, output_attentions=True)
    for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
        assert ours_.std() > 0.1
        np.testing.assert_allclose(ours_, theirs_.detach(), atol=1e-4)
    for index, weights in enumerate(attentions):
        np.testing.assert_allclose(maps[f"encoder/{index}/self"], weights.detach(), atol=1e-5)
    assert len(maps) == len(attentions) == 3


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(theirs, ours, side):
    is_token = np.ones((B, T), bool)
    if side != "right":
        is_token[1, :4] = False
    if side != "left":
        is_token[2, 8:] = False
    options = {"attention_mask": is_token.astype(int)}
    if side != "right":
        options["position_ids"] = np.maximum(is_token.cumsum(axis=1) - 1, 0)
    want, _ = run_theirs(theirs, **options)
    tokens, segments = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
    got = jax.jit(lambda model: model(tokens, segments, is_token=jnp.asarray(is_token)))(ours)
    for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
        rows = is_token if ours_.shape[:2] == (B, T) else np.ones(B, bool)
        np.testing.assert_allclose(np.asarray(ours_)[rows], theirs_.detach().numpy()[rows], atol=1e-4)


def test_gradients(theirs, ours, folder):
    """Of a random sum of all outputs, for every parameter, by the names of the folder."""
    want, _ = run_theirs(theirs)
    weights = [np.random.default_rng(1).normal(size=tuple(x.shape)).astype(np.float32) for x in want]
    theirs.zero_grad()
    sum((x * torch.tensor(w)).sum() for x, w in zip(want, weights, strict=True)).backward()
    graphdef, params = nnx.split(ours)

    @jax.jit
    @jax.grad
    def grad(params):
        output = nnx.merge(graphdef, params)(jnp.asarray(TOKENS), jnp.asarray(SEGMENTS))
        return sum((x * w).sum() for x, w in zip(jax.tree.leaves(output), weights, strict=True))

    flat = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(grad(params))}
    got = write_params(hf.FAMILIES[type(theirs).__name__].rows(ours.config), flat)
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    assert got.keys() == stored.keys()
    for name, value in got.items():
        scale = 1 + np.abs(expected[name]).max()
        np.testing.assert_allclose(value / scale, expected[name] / scale, atol=1e-4, err_msg=name)


def test_what_we_save_they_load(theirs, ours, tmp_path):
    hf.save(ours, tmp_path)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for got, want in zip(run_theirs(again.eval())[0], run_theirs(theirs)[0], strict=True):
        np.testing.assert_array_equal(got.detach(), want.detach())


def test_their_config_comes_back(theirs, ours, tmp_path):
    """All fields that say something of the model, and the labels where there are classes."""
    hf.save(ours, tmp_path)
    want, got = theirs.config.to_dict(), transformers.BertConfig.from_pretrained(tmp_path).to_dict()
    silent = {"_name_or_path", "transformers_version", "dtype", "architectures"}
    if "Classification" not in type(theirs).__name__:
        silent |= {"id2label", "label2id"}
    assert {k: v for k, v in got.items() if k not in silent} == {k: v for k, v in want.items() if k not in silent}


def test_labels_and_problem_type_come_back(tmp_path):
    torch.manual_seed(0)
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    config = transformers.BertConfig(
        **SIZES,
        id2label=labels,
        label2id={v: k for k, v in labels.items()},
        problem_type="multi_label_classification",
        classifier_dropout=0.25,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    ours = hf.load(tmp_path / "theirs")
    assert ours.config.labels == tuple(labels.values())
    hf.save(ours, tmp_path / "ours")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").config
    assert (again.id2label, again.label2id) == (labels, config.label2id)
    assert (again.problem_type, again.classifier_dropout) == ("multi_label_classification", 0.25)


def test_a_folder_of_the_first_kind(tmp_path):
    """As bert-base-uncased was published: old names of norms, buffers, copies, heads that config.json does not name."""
    torch.manual_seed(0)
    theirs = redraw(transformers.BertForPreTraining(transformers.BertConfig(**SIZES)))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in safetensors.numpy.load_file(path).items()
    }
    tensors["bert.embeddings.position_ids"] = np.arange(40)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    tokens, segments = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
    for name, outputs in OUTPUTS.items():
        if name in ("BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"):
            continue
        again, info = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        with torch.no_grad():
            want = again.eval()(input_ids=torch.tensor(TOKENS), token_type_ids=torch.tensor(SEGMENTS))
        got = hf.load(tmp_path, architecture=name)(tokens, segments)
        for ours_, output in zip(jax.tree.leaves(got), outputs, strict=True):
            np.testing.assert_allclose(ours_, want[output], atol=1e-4)
