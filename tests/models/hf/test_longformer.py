"""Longformer of Hugging Face: windows, global tokens with projections of their own, and its folders."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.hf.folders import (
    assert_gradients_near,
    assert_refused,
    change_config,
    gradients_by_name,
    random_sum,
    redrawn,
)
from tests.nn.programs import jitted
from tfx_jax.models import hf
from tfx_jax.nn import AttentionConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, T, V = 3, 29, 97
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(3, V, (B, T))
TOKENS[:, [4, 5, 12]] = 2  # separators, the first behind the question
GLOBAL = RNG.random((B, T)) < 0.2
GLOBAL[1], GLOBAL[2] = np.arange(T) % 9 == 0, np.arange(T) == 7
SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "max_position_embeddings": 42,
    "type_vocab_size": 1,
    "attention_window": 6,
    "pad_token_id": 1,
}
OUTPUTS = {
    "LongformerModel": ("last_hidden_state", "pooler_output"),
    "LongformerForMaskedLM": ("logits",),
    "LongformerForSequenceClassification": ("logits",),
    "LongformerForTokenClassification": ("logits",),
    "LongformerForQuestionAnswering": ("start_logits", "end_logits"),
}


@pytest.fixture(scope="module", params=OUTPUTS)
def theirs(request):
    torch.manual_seed(0)
    options = {"num_labels": 5} if "Classification" in request.param else {}
    return redrawn(getattr(transformers, request.param)(transformers.LongformerConfig(**SIZES, **options)))


def run_theirs(model, **options):
    inputs = {"input_ids": TOKENS} | options
    output = model(**{name: torch.tensor(value) for name, value in inputs.items()})
    return [output[name] for name in OUTPUTS[type(model).__name__]]


run = jitted(lambda model, tokens, **options: model(tokens, **options))


def test_logits(theirs, ours):
    """Without a word about global tokens: of a classifier the first, of a question all are."""
    for got, want in zip(jax.tree.leaves(run(ours, TOKENS)), run_theirs(theirs), strict=True):
        assert got.std() > 0.1
        np.testing.assert_allclose(got, want.detach(), atol=1e-4)


def test_global_tokens(theirs, ours):
    want = run_theirs(theirs, global_attention_mask=GLOBAL.astype(int))
    got = jax.tree.leaves(run(ours, TOKENS, global_mask=GLOBAL))
    for ours_, theirs_, without in zip(got, want, jax.tree.leaves(run(ours, TOKENS)), strict=True):
        np.testing.assert_allclose(ours_, theirs_.detach(), atol=1e-4)
        assert np.abs(ours_ - without).max() > 0.01


@pytest.mark.parametrize("has_global", [False, True])
def test_padding_on_the_right(theirs, ours, has_global):
    token_mask = np.arange(T) < np.array([[T], [T - 3], [T // 2]])
    tokens = np.where(token_mask, TOKENS, 1)
    options, mine = {"attention_mask": token_mask.astype(int), "input_ids": tokens}, {}
    if has_global:
        options["global_attention_mask"] = (GLOBAL & token_mask).astype(int)
        mine["global_mask"] = GLOBAL & token_mask
    got, want = run(ours, tokens, token_mask=token_mask, **mine), run_theirs(theirs, **options)
    for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
        rows = token_mask if ours_.shape[:2] == (B, T) else np.ones(B, bool)
        np.testing.assert_allclose(ours_[rows], theirs_.detach().numpy()[rows], atol=1e-4)


def test_gradients(theirs, ours, tmp_path):
    """Of a random sum of all outputs, for every parameter, by the names of the folder."""
    total, weights = random_sum(run_theirs(theirs, global_attention_mask=GLOBAL.astype(int)))
    theirs.zero_grad()
    total.backward()

    def loss(model):
        outputs = jax.tree.leaves(model(TOKENS, global_mask=GLOBAL))
        return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))

    got, expected = gradients_by_name(ours, loss, tmp_path), dict(theirs.named_parameters())
    assert_gradients_near(got, {name: expected[name].grad.numpy() for name in got})
    assert all(np.abs(value).max() > 0 for name, value in got.items() if name.endswith("_global.weight"))


def test_what_we_save_they_load(theirs, ours, tmp_path):
    hf.save(ours, tmp_path)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for got, want in zip(run_theirs(again.eval()), run_theirs(theirs), strict=True):
        np.testing.assert_array_equal(got.detach(), want.detach())


def test_their_config_comes_back(theirs, ours, tmp_path):
    hf.save(ours, tmp_path)
    want, got = theirs.config.to_dict(), type(theirs.config).from_pretrained(tmp_path).to_dict()
    silent = {"_name_or_path", "transformers_version", "dtype", "architectures", "attention_window"}
    silent |= set() if "Classification" in type(theirs).__name__ else {"id2label", "label2id"}
    assert {k: v for k, v in got.items() if k not in silent} == {k: v for k, v in want.items() if k not in silent}
    assert got["attention_window"] == [6] * 3


def test_what_cannot_be_is_refused(tmp_path):
    transformers.LongformerModel(transformers.LongformerConfig(**SIZES)).save_pretrained(tmp_path)
    for values, message in (
        ({"attention_window": [6, 6, 4]}, "attention_window is .6, 6, 4., but layers must have the same"),
        ({"attention_window": 5}, "attention_window is 5, not an even number above 0"),
        ({"attention_window": "6"}, "attention_window is '6', not an even number above 0"),
        ({"pad_token_id": 0}, "pad_token_id is 0, but only 1 is supported"),
    ):
        change_config(tmp_path, **values)
        assert_refused(tmp_path, message)
        change_config(tmp_path, **{name: SIZES[name] for name in values})
    model = hf.load(tmp_path)
    assert model.config.max_length == 40
    with pytest.raises(ValueError, match="at most max_length=40 tokens, got 41"):
        jax.eval_shape(model, np.zeros((1, 41), int))


def test_more_global_tokens_than_there_may_be_are_refused(ours):
    """Further ones would not be global, as inside of a traced call, where their number is not known."""
    config = dataclasses.replace(ours.config, max_global_tokens=3)
    model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: type(ours)(config, rngs=nnx.Rngs(0)))), nnx.state(ours))
    with pytest.raises(
        ValueError, match=r"a row has 4 global tokens, but config\.max_global_tokens=3: build the model"
    ):
        model(TOKENS, global_mask=np.arange(T)[None] < np.array([[2], [4], [3]]))


def test_no_global_tokens_for_a_bert(ours):
    config = dataclasses.replace(ours.config, max_global_tokens=0)
    bert = nnx.eval_shape(lambda: type(ours)(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="global_mask needs a model with max_global_tokens above 0"):
        jax.eval_shape(lambda model: model(TOKENS, global_mask=GLOBAL), bert)
    dense = dataclasses.replace(ours.config, max_global_tokens=3, attention=AttentionConfig())
    with pytest.raises(ValueError, match=r"max_global_tokens=3 needs attention\.name='window', got 'dense'"):
        nnx.eval_shape(lambda: type(ours)(dense, rngs=nnx.Rngs(0)))
