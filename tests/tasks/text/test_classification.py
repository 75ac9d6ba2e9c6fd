"""The loss of a classifier of texts."""

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.models import BertClassifier, BertConfig
from tfx_jax.tasks.text.classification import ClassificationTask, classification_loss

LABELS = ("a", "b", "c", "d")
CONFIG = BertConfig(29, max_length=13, num_layers=1, d_model=8, num_heads=2, labels=LABELS)


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_loss_and_prediction(smoothing, draw_model, make_texts, expected_loss, assert_losses):
    rng = np.random.default_rng(0)
    model = draw_model(lambda: BertClassifier(CONFIG, rngs=nnx.Rngs(0)))
    texts = make_texts(rng, rows=12)
    logits = jax.jit(lambda batch: model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"]))(
        texts
    )
    choices = np.asarray(logits).argmax(axis=1)
    batch = texts | {"label": np.where(np.arange(12) % 2, choices, rng.integers(4, size=12)).astype(np.int32)}
    expected = expected_loss(logits, batch["label"], batch["row_weights"], smoothing)
    assert expected.weight == 11 > expected.metrics["accuracy"].sum > 4
    found = jax.jit(lambda batch: classification_loss(model, batch, None, label_smoothing=smoothing))(batch)
    assert_losses(found, expected._replace(num_tokens=batch["token_mask"].sum()))
    np.testing.assert_array_equal(jax.jit(lambda batch: ClassificationTask.logits(model, batch))(texts), logits)
