"""Tags are learned from the first subwords of words, and read off them again."""

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tfx_jax.metrics.entities import tag_names
from tfx_jax.models import BertConfig, BertTagger
from tfx_jax.tasks.text.tagging import IGNORED, align_tags, predict_tags, tagging_loss, tags_of_words

TAGS = tag_names(["person", "creative-work", "B"])


@given(
    st.lists(st.tuples(st.lists(st.integers(5, 99), max_size=4), st.integers(0, 6)), max_size=10),
    st.none() | st.integers(0, 20),
)
def test_first_subwords_carry_the_tags(words, max_length):
    pieces, tags = [list(side) for side in zip(*words, strict=True)] or ([], [])
    ids, targets = align_tags(pieces, tags, unk_id=3, max_length=max_length)
    expected = []
    for word, tag in words:
        expected += [(piece, IGNORED if place else tag) for place, piece in enumerate(word or [3])]
    assert list(zip(ids, targets, strict=True)) == expected[:max_length]
    assert ids.dtype == targets.dtype == np.int32
    # A model that predicts the targets and nonsense between them gets the words' tags back; lost words are outside.
    padded = np.concatenate([targets, [IGNORED] * 3])
    predictions = np.where(padded == IGNORED, 77, padded)
    kept = int((targets != IGNORED).sum())
    assert tags_of_words(predictions, padded, len(words)) == tags[:kept] + [0] * (len(words) - kept)
    assert max_length is not None or kept == len(words)


def test_one_tag_for_each_word():
    with pytest.raises(ValueError, match="2 words but 1 tags"):
        align_tags([[5], [6]], [1], unk_id=3)


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_loss_and_prediction(smoothing, draw_model, make_texts, expected_loss, assert_losses):
    """Of the first subwords alone, about half of all tokens."""
    rng = np.random.default_rng(0)
    config = BertConfig(29, max_length=13, num_layers=1, d_model=8, num_heads=2, labels=tuple(TAGS))
    model = draw_model(lambda: BertTagger(config, rngs=nnx.Rngs(0)))
    texts = make_texts(rng)
    logits = jax.jit(lambda batch: model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"]))(
        texts
    )
    choices = np.asarray(logits).argmax(axis=-1)
    tags = np.where(rng.random(choices.shape) < 0.5, choices, rng.integers(len(TAGS), size=choices.shape))
    targets = np.where(texts["token_mask"] & (rng.random(choices.shape) < 0.5), tags, IGNORED).astype(np.int32)
    expected = expected_loss(logits, targets, targets != IGNORED, smoothing)
    assert 15 < expected.weight < texts["token_mask"].sum() - 15
    assert 5 < expected.metrics["accuracy"].sum < expected.weight - 5
    batch = texts | {"targets": targets}
    found = jax.jit(lambda batch: tagging_loss(model, batch, None, label_smoothing=smoothing))(batch)
    assert_losses(found, expected._replace(num_tokens=texts["token_mask"].sum()))
    np.testing.assert_array_equal(jax.jit(predict_tags)(model, texts), choices)
