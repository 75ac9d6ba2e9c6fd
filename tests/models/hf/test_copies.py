"""A folder may hold a tied matrix twice, but not two of them: transformers reads both, a model has place for one."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from tests.models.hf import test_bert_folders, test_folder, test_long_folders, test_marian, test_t5
from tests.models.hf.folders import assert_refused, assert_same, change_tensors
from tests.nn.programs import draw
from tfx_jax.models import GPT, hf
from tfx_jax.models.bert import BertMaskedLM


def _gpt_1():
    config = dataclasses.replace(test_folder.CONFIG, pre_norm=False, d_ff=None)
    return draw(lambda: GPT(config, rngs=nnx.Rngs(0)))


_BERT = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_LONGFORMER = {
    "lm_head.decoder.weight": "longformer.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
_T5 = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_MARIAN = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
KINDS = {
    "gpt2": (test_folder.make_model, {"lm_head.weight": "transformer.wte.weight"}),
    "gpt1": (_gpt_1, {"lm_head.weight": "transformer.tokens_embed.weight"}),
    "bert": (lambda: test_bert_folders.make_bert("BertForMaskedLM"), _BERT),
    "big_bird": (lambda: test_long_folders.make(BertMaskedLM, "big_bird"), _BERT),
    "longformer": (lambda: test_long_folders.make(BertMaskedLM, "longformer"), _LONGFORMER),
    "t5": (lambda: test_t5.make_model("1.0"), dict.fromkeys(_T5, "shared.weight")),
    "t5 1.1": (lambda: test_t5.make_model("1.1"), dict.fromkeys(_T5[1:], "shared.weight")),
    "marian": (lambda: test_marian.make_model("opus"), dict.fromkeys(_MARIAN, "model.shared.weight")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_fine_and_another_matrix_is_refused(kind, tmp_path):
    make, copies = KINDS[kind]
    model = make()
    hf.save(model, tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({copy: tensors[copies[copy]] for copy in copies}))
    assert_same(hf.load(tmp_path), model)
    for copy, original in copies.items():
        kept = {}

        def spoil(tensors, copy=copy, kept=kept):
            kept[copy] = tensors[copy]
            tensors[copy] = tensors[copy].copy()
            tensors[copy].flat[-1] += np.float32(1e-3)

        change_tensors(tmp_path, spoil)
        assert_refused(
            tmp_path, f"the tensor {copy} has other values than {original}, but here they are one shared parameter$"
        )
        change_tensors(tmp_path, lambda tensors, kept=kept: tensors.update(kept))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_does_for_an_original_that_was_left_out(kind, tmp_path):
    """Savers that drop duplicates keep one of the names, whichever comes first."""
    make, copies = KINDS[kind]
    model = make()
    hf.save(model, tmp_path)

    def rename(tensors):
        for copy, original in copies.items():
            if original in tensors:
                tensors[copy] = tensors.pop(original)

    change_tensors(tmp_path, rename)
    assert_same(hf.load(tmp_path), model)


def test_a_head_that_is_not_read_may_hold_what_it_likes(tmp_path):
    model = test_bert_folders.make_bert("BertForSequenceClassification", labels=("a", "b"))
    hf.save(model, tmp_path)
    name = "cls.predictions.decoder.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: np.zeros((13, 8), np.float32)}))
    assert_same(hf.load(tmp_path), model)
