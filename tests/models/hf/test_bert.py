"""BERT and each of its heads against transformers, with random weights."""

import jax
import numpy as np
import pytest
import safetensors.numpy

from tests.models.hf.folders import (
    assert_gradients_near,
    assert_their_config_comes_back,
    change_tensors,
    gradients_by_name,
    loaded_by_them,
    padded_on,
    random_sum,
    redrawn,
    rename_norms_as_of_old,
)
from tests.nn.programs import jitted
from tfx_jax.models import hf

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


@pytest.fixture(scope="module", params=OUTPUTS)
def theirs(request):
    torch.manual_seed(0)
    options = {"num_labels": 5} if "Classification" in request.param else {}
    if request.param == "BertForPreTraining":
        options = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
    return redrawn(getattr(transformers, request.param)(transformers.BertConfig(**SIZES, **options)))


def run_theirs(model, **options):
    inputs = {"input_ids": TOKENS, "token_type_ids": SEGMENTS} | options
    output = model(**{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()})
    return [output[name] for name in OUTPUTS[type(model).__name__]], output.get("attentions")


_run = jitted(lambda model, **options: model(TOKENS, SEGMENTS, **options), static=["return_attention"])


def test_logits_and_maps(theirs, ours):
    got, maps = _run(ours, return_attention=True)
    want, attentions = run_theirs(theirs, output_attentions=True)
    for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
        assert ours_.std() > 0.1
        np.testing.assert_allclose(ours_, theirs_.detach(), atol=1e-4)
    for index, weights in enumerate(attentions):
        np.testing.assert_allclose(maps[f"encoder/{index}/self"], weights.detach(), atol=1e-5)
    assert len(maps) == len(attentions) == 3


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(theirs, ours, side):
    token_mask, positions = padded_on(side, (B, T))
    options = {"attention_mask": token_mask.astype(int)} | ({} if side == "right" else {"position_ids": positions})
    want, _ = run_theirs(theirs, **options)
    for ours_, theirs_ in zip(jax.tree.leaves(_run(ours, token_mask=token_mask)), want, strict=True):
        rows = token_mask if ours_.shape[:2] == (B, T) else token_mask[:, 0]  # their pooler reads column 0
        np.testing.assert_allclose(ours_[rows], theirs_.detach().numpy()[rows], atol=1e-4)


def test_gradients(theirs, ours, tmp_path):
    """Of a random sum of all outputs, for every parameter, by the names of the folder."""
    total, weights = random_sum(run_theirs(theirs)[0])
    theirs.zero_grad()
    total.backward()

    def loss(model):
        return sum((x * w).sum() for x, w in zip(jax.tree.leaves(model(TOKENS, SEGMENTS)), weights, strict=True))

    got, expected = gradients_by_name(ours, loss, tmp_path), dict(theirs.named_parameters())
    assert_gradients_near(got, {name: expected[name].grad.numpy() for name in got})


def test_what_we_save_they_load(theirs, ours, tmp_path):
    again = loaded_by_them(type(theirs), ours, tmp_path)
    for got, want in zip(run_theirs(again)[0], run_theirs(theirs)[0], strict=True):
        np.testing.assert_array_equal(got.detach(), want.detach())


def test_our_folder_has_their_tensors(ours, their_folder, tmp_path):
    hf.save(ours, tmp_path)
    names = [set(safetensors.numpy.load_file(path / "model.safetensors")) for path in (tmp_path, their_folder)]
    assert names[0] == names[1]


def test_their_config_comes_back(theirs, ours, tmp_path):
    has_classes = "Classification" in type(theirs).__name__
    assert_their_config_comes_back(theirs, ours, tmp_path, has_classes=has_classes)


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
    theirs = redrawn(transformers.BertForPreTraining(transformers.BertConfig(**SIZES)))
    theirs.save_pretrained(tmp_path)

    def age(tensors):
        rename_norms_as_of_old(tensors)
        tensors["bert.embeddings.position_ids"] = np.arange(40)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()

    change_tensors(tmp_path, age)
    for name, outputs in OUTPUTS.items():
        if name in ("BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"):
            continue
        again, info = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        with torch.no_grad():
            want = again.eval()(input_ids=torch.tensor(TOKENS), token_type_ids=torch.tensor(SEGMENTS))
        got = _run(hf.load(tmp_path, architecture=name))
        for ours_, output in zip(jax.tree.leaves(got), outputs, strict=True):
            np.testing.assert_allclose(ours_, want[output], atol=1e-4)
