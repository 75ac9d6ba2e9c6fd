"""Encoders that are BERTs with other names and options, against transformers with random weights."""

import jax
import numpy as np
import pytest

from tests.models.hf.folders import (
    assert_same,
    padded_on,
    redrawn,
)
from tests.nn.programs import jitted
from tfx_jax.models import BertMultipleChoice, hf
from tfx_jax.models.hf.encoders import ENCODERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, T, V = 3, 11, 97
TOKENS = np.random.default_rng(0).integers(3, V, (B, T))  # not padding, nor what has no gradient in transformers
SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "max_position_embeddings": 40,
    "attn_implementation": "eager",
}
OF_DISTILBERT = {"dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 50}
CONFIGS = {"XLMRoberta": {"pad_token_id": 1}, "Electra": {"embedding_size": 10}, "Albert": {"embedding_size": 10}}
CONFIGS["ModernBert"] = {"num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0}
# What differs from SIZES and CONFIGS; beside these, every architecture of every family is compared once.
VARIANTS = {
    "BertForMaskedLM untied": {"tie_word_embeddings": False},
    "BertForMultipleChoice": {},
    "BertModel without pooler": {"add_pooling_layer": False},
    "RobertaModel without pooler": {"add_pooling_layer": False},
    "RobertaForMaskedLM untied": {"tie_word_embeddings": False},
    "RobertaForMaskedLM segments": {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "ElectraForMaskedLM untied": {"tie_word_embeddings": False},
    "ElectraModel of one size": {"embedding_size": 24},
    "ElectraForPreTraining relu": {"hidden_act": "relu"},
    "AlbertForMaskedLM untied": {"tie_word_embeddings": False},
    "AlbertModel without pooler": {"add_pooling_layer": False},
    "AlbertModel of one size": {"embedding_size": 24},
    "DistilBertForMaskedLM untied": {"tie_word_embeddings": False},
    "DistilBertModel relu": {"activation": "relu"},
    "DistilBertModel with an epsilon that is not read": {"layer_norm_eps": 0.3},
}
# Windows of 2 tokens on either side; with 5 layers, the last is of a kind of its own.
_MODERN = {
    "ModernBertModel": {},
    "ModernBertForMaskedLM": {},
    "ModernBertForMaskedLM untied": {"tie_word_embeddings": False},
}
_MODERN |= {
    "ModernBertForSequenceClassification": {},
    "ModernBertForSequenceClassification of the mean": {"classifier_pooling": "mean", "classifier_activation": "relu"},
    "ModernBertForTokenClassification": {},
}
_MODERN |= {"ModernBertModel of five layers": {"num_hidden_layers": 5}}
_MODERN |= {"ModernBertModel without windows": {"layer_types": ["full_attention"] * 4}}
VARIANTS |= _MODERN
NAMES = [name for encoder in ENCODERS for name in encoder.HEADS]


def make_theirs(name):
    torch.manual_seed(0)
    architecture, options = name.split()[0], dict(VARIANTS.get(name, {}))
    family = architecture.partition("For")[0].removesuffix("Model")
    made = {"add_pooling_layer": False} if options.pop("add_pooling_layer", True) is False else {}
    sizes = SIZES | (OF_DISTILBERT if family == "DistilBert" else {}) | CONFIGS.get(family, {})
    sizes |= {"num_labels": 5} if "Classification" in name else {}
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    return redrawn(getattr(transformers, architecture)(config, **made))


@pytest.fixture(scope="module", params=[*NAMES, *VARIANTS])
def theirs(request):
    return make_theirs(request.param)


def run_theirs(model, tokens=TOKENS):
    if "MultipleChoice" in type(model).__name__:
        tokens = tokens[:, None]  # of one text
    with torch.no_grad():
        return [x.numpy() for x in model(input_ids=torch.tensor(tokens), return_dict=True).values()]


@jitted
def _run(model, token_mask):
    tokens = np.tile(TOKENS, (len(token_mask) // B, 1))
    if isinstance(model, BertMultipleChoice):
        return model(tokens[:, None], token_mask=token_mask[:, None])
    return model(tokens, token_mask=token_mask)


def test_logits(theirs, ours):
    """Without padding, and with padding on either side, where each row is what it is alone."""
    masks = np.concatenate([np.ones((B, T), bool), *(padded_on(side, (B, T))[0] for side in ("left", "right", "both"))])
    got, whole = jax.tree.leaves(_run(ours, masks)), run_theirs(theirs)
    assert len(got) == len(whole)
    for row, mask in enumerate(masks):
        want = run_theirs(theirs, TOKENS[row % B, mask][None]) if row >= B else [x[row][None] for x in whole]
        for ours_, theirs_ in zip(got, want, strict=True):
            own = ours_[row][mask] if ours_.shape[:2] == masks.shape else ours_[row]
            scale = np.abs(theirs_).max()
            np.testing.assert_allclose(own, theirs_[0], atol=1e-4 * scale)
    assert all(x.std() > (0.01 if x.size == B else 0.1) for x in whole)  # one logit for each text, or more


def test_several_texts(tmp_path):
    """Each of the texts of a question is scored alone."""
    net = make_theirs("BertForMultipleChoice")
    net.save_pretrained(tmp_path)
    tokens = np.stack([TOKENS, TOKENS[::-1]], axis=1)  # [B, C, T]
    types = (np.arange(T) > 4).astype(int) + np.zeros_like(tokens)
    got = jitted(lambda model: model(tokens, types))(hf.load(tmp_path))
    with torch.no_grad():
        want = net(torch.tensor(tokens), token_type_ids=torch.tensor(types)).logits.numpy()
    assert got.shape == (B, 2)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_what_we_save_they_load(theirs, ours, tmp_path):
    fields = {"architectures": [type(theirs).__name__]}
    hf.save(ours, tmp_path, fields=fields)
    assert_same(hf.load(tmp_path), ours)
    assert hf.load(tmp_path).config == ours.config
    options = {"add_pooling_layer": False} if getattr(theirs, "pooler", theirs) is None else {}
    again, info = type(theirs).from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", **options
    )
    assert not any(info.values())
    tensors, want = again.state_dict(), theirs.state_dict()
    assert tensors.keys() == want.keys()
    # Beside the bias of an untied output layer stands a second one that transformers never reads.
    unread = {name for name in want if name.removesuffix("bias") + "decoder.bias" in want}
    assert [name for name in want.keys() - unread if not torch.equal(tensors[name], want[name])] == []
    for got, expected in zip(run_theirs(again.eval()), run_theirs(theirs), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
