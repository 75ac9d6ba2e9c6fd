"""The best span is that of brute force, and the loss is of the ends of answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.models import BertConfig, BertQuestionAnswering
from tfx_jax.tasks.loss import Metric
from tfx_jax.tasks.text.question_answering import NO_ANSWER, best_spans, predict_spans, span_loss


def _brute_force(starts, ends, mask, max_answer_length):
    best = (0, 0, -np.inf)
    for i in range(len(starts)):
        for j in range(i, min(len(starts), i + max_answer_length)):
            score = np.float32(starts[i]) + np.float32(ends[j])
            if mask[i] and mask[j] and score > best[2]:
                best = (i, j, score)
    return best


@pytest.mark.parametrize("max_answer_length", [1, 4, 17, 100])
def test_best_span_equals_brute_force(max_answer_length):
    rng = np.random.default_rng(2)
    find = jax.jit(functools.partial(best_spans, max_answer_length=max_answer_length))
    for case in range(20):
        # Whole numbers: ties, of which the first must win.
        logits = rng.normal(size=(2, 5, 17)) if case % 2 else rng.integers(-2, 3, (2, 5, 17))
        starts, ends = logits.astype(np.float32)
        mask = rng.random((5, 17)) < 0.6
        mask[0] = True
        mask[1] = False
        found = find(starts, ends, mask)
        for row in range(5):
            expected = _brute_force(starts[row], ends[row], mask[row], max_answer_length)
            assert float(found.score[row]) == expected[2]
            if row != 1:
                assert (int(found.first[row]), int(found.last[row])) == expected[:2]
    assert found.first.dtype == found.last.dtype == jnp.int32


def test_half_precision_logits_are_added_in_float32():
    starts, ends = np.array([[[256.0, 0.0]], [[1.0, 2.0]]], jnp.bfloat16)
    spans = jax.jit(functools.partial(best_spans, max_answer_length=2))(starts, ends, np.ones((1, 2), bool))
    assert (spans.score[0], spans.last[0]) == (258, 1)  # in bfloat16, 256 + 1 = 256 and 256 + 2 = 258


def test_best_span_needs_no_square_of_the_length():
    length, width = 2048, 30
    shape = jax.ShapeDtypeStruct((4, length), jnp.float32)
    mask = jax.ShapeDtypeStruct((4, length), bool)
    program = jax.jit(functools.partial(best_spans, max_answer_length=width)).lower(shape, shape, mask).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 4 * length * width * 4


@pytest.fixture(scope="module")
def questions(draw_model, make_texts):
    """A model, a batch of 24 rows and the logits; every third row has no answer and every other one the best one."""
    config = BertConfig(29, max_length=13, num_layers=1, d_model=8, num_heads=2)
    model = draw_model(lambda: BertQuestionAnswering(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    batch = make_texts(rng, rows=24)
    logits = jax.jit(lambda batch: model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"]))(
        batch
    )
    batch["context_mask"] = (batch["token_type_ids"] == 1) & (np.arange(13) < 10)
    first, last = np.zeros((2, 24), np.int32)
    for row, mask in enumerate(batch["context_mask"][:-1]):
        places = np.array([NO_ANSWER, *np.flatnonzero(mask)])
        ends = rng.choice(places[1:], 2) if row % 3 else (NO_ANSWER, NO_ANSWER)
        if row % 2:
            ends = [places[np.asarray(side)[row, places].argmax()] for side in logits]
        first[row], last[row] = ends
    last[1] = first[1]  # one end right and one, perhaps, not
    return model, batch | {"first": first, "last": last}, logits


def test_loss_of_spans(questions, expected_loss, assert_losses):
    model, batch, logits = questions
    may = batch["context_mask"] | (np.arange(13) == NO_ANSWER)
    start, end = (np.where(may, side, -np.inf) for side in logits)
    first, last = (
        expected_loss(side, batch[name], batch["row_weights"]) for side, name in ((start, "first"), (end, "last"))
    )
    both = (start.argmax(axis=1) == batch["first"]) & (end.argmax(axis=1) == batch["last"])
    assert 5 < both[:-1].sum() < first.metrics["accuracy"].sum < first.weight == 23
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, last)
    metrics = mean.metrics | {"accuracy": Metric(both[:-1].sum(), 23)}
    expected = mean._replace(metrics=metrics, num_tokens=batch["token_mask"].sum())
    assert_losses(jax.jit(span_loss)(model, batch, None), expected)


def test_an_answer_outside_the_context_is_not_overlooked(questions):
    model, batch, _ = questions
    output = jax.jit(span_loss)(model, batch | {"last": np.where(np.arange(24) == 5, 1, batch["last"])}, None)
    assert float(output.loss) == np.inf


def test_predicted_spans_are_the_best(questions):
    model, batch, logits = questions
    found = jax.jit(functools.partial(predict_spans, max_answer_length=3))(model, batch)
    expected = jax.jit(functools.partial(best_spans, max_answer_length=3))(*logits, batch["context_mask"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
