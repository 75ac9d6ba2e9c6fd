"""Masked language model and next sentences: the chosen positions alone, but the loss and gradient of all."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tfx_jax.data.objectives.masked_lm import mask_tokens
from tfx_jax.models import BertConfig, BertMaskedLM, BertPretraining
from tfx_jax.tasks.loss import LossOutput, summed_cross_entropy
from tfx_jax.tasks.text.bert_pretraining import masked_positions, max_predictions, pretraining_loss

V, T, RATE = 29, 13, 0.3
CONFIG = BertConfig(V, max_length=T, num_layers=1, d_model=8, num_heads=2, dropout_rate=0.0, attention_dropout_rate=0.0)
SPECIALS = {0, 1, 2, 3}


@pytest.fixture(scope="module")
def models(draw_model):
    return {cls: draw_model(lambda cls=cls: cls(CONFIG, rngs=nnx.Rngs(0))) for cls in (BertPretraining, BertMaskedLM)}


@pytest.fixture(scope="module")
def losses(models):
    """The jitted loss of each model, as a function of a batch."""
    return {
        cls: jax.jit(functools.partial(pretraining_loss, model, rngs=None, rate=RATE)) for cls, model in models.items()
    }


@pytest.fixture(scope="module")
def batch(make_texts):
    rng = np.random.default_rng(3)
    texts = make_texts(rng)
    masked = mask_tokens(texts["tokens"], rng, mask_id=3, vocab_size=V, special_ids=SPECIALS, rate=RATE)
    assert len(set(masked.weights.sum(axis=1))) >= 3  # rows differ in how many tokens are chosen
    next_sentence_label = rng.integers(2, size=len(texts["tokens"])).astype(np.int32)
    changed = {
        "tokens": masked.inputs,
        "targets": masked.targets,
        "weights": masked.weights,
        "next_sentence_label": next_sentence_label,
    }
    return texts | changed


def plain_loss(model, batch, label_smoothing=0.0, z_loss_weight=0.0):
    """Scores every position."""
    logits = model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"])
    options = {"label_smoothing": label_smoothing, "z_loss_weight": z_loss_weight}
    if not isinstance(model, BertPretraining):
        return summed_cross_entropy(logits, batch["targets"], batch["weights"], **options)[0]
    masked = summed_cross_entropy(logits.masked_lm, batch["targets"], batch["weights"], **options)
    other = summed_cross_entropy(logits.next_sentence, batch["next_sentence_label"], batch["row_weights"])
    return masked.weight * (masked.loss / masked.weight + other.loss / other.weight)


def value_and_grad(loss, model, *args):
    graphdef, params = nnx.split(model)
    return jax.jit(jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params), *args)))(
        nnx.to_pure_dict(params)
    )


OPTIONS = {"label_smoothing": 0.1, "z_loss_weight": 0.01}


@pytest.mark.parametrize(
    ("options", "cls"),
    [
        pytest.param(OPTIONS, BertPretraining, id="options-BertPretraining"),
        pytest.param({}, BertMaskedLM, id="plain-BertMaskedLM"),
        pytest.param({}, BertPretraining, id="plain-BertPretraining", marks=pytest.mark.slow),
        pytest.param(OPTIONS, BertMaskedLM, id="options-BertMaskedLM", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_those_of_all_positions(models, batch, cls, options):
    def loss(model, batch):
        return pretraining_loss(model, batch, None, rate=RATE, **options).loss

    found = value_and_grad(loss, models[cls], batch)
    expected = value_and_grad(functools.partial(plain_loss, **options), models[cls], batch)
    found, expected = jax.device_get((found, expected))
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]) if leaf.size > 1) > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected)


@pytest.mark.parametrize("options", [{}, pytest.param(OPTIONS, marks=pytest.mark.slow)], ids=["plain", "options"])
def test_sums(models, losses, batch, options, expected_loss, assert_losses):
    model = models[BertPretraining]
    logits = jax.jit(lambda batch: model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"]))(
        batch
    )
    masked = expected_loss(logits.masked_lm, batch["targets"], batch["weights"], *options.values())
    other = expected_loss(logits.next_sentence, batch["next_sentence_label"], batch["row_weights"])
    metrics = masked.metrics | {"next_sentence_accuracy": other.metrics["accuracy"]}
    total = masked.loss + other.loss * masked.weight / other.weight
    loss = jax.jit(lambda batch: pretraining_loss(model, batch, None, rate=RATE, **options))
    found = (loss if options else losses[BertPretraining])(batch)
    assert_losses(found, LossOutput(total, masked.weight, metrics, num_tokens=batch["token_mask"].sum()))
    # What the trainer makes of it is the loss of the paper.
    quotient = masked.loss / masked.weight + other.loss / other.weight
    np.testing.assert_allclose(found.loss / found.weight, quotient, rtol=1e-5)


def test_a_masked_language_model_needs_no_next_sentences(models, batch):
    texts = {name: batch[name] for name in ("tokens", "token_type_ids", "token_mask", "targets", "weights")}
    output = jax.eval_shape(pretraining_loss, models[BertMaskedLM], texts, None)
    assert output.metrics.keys() == {"nll", "accuracy"}


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.15, 0.25, 0.5, 0.9, 1.0])
def test_there_is_room_for_every_token_that_is_chosen(rate):
    """Of rows of every length up to 70, with every number of special tokens in them, and not too much room."""
    rng = np.random.default_rng(4)
    for length in range(1, 71):
        ids = np.where(np.arange(length) < np.arange(length + 1)[:, None], 5, 0)
        ids = rng.permuted(ids, axis=1)
        weights = mask_tokens(ids, rng, mask_id=3, vocab_size=V, special_ids=SPECIALS, rate=rate).weights
        count = max_predictions(length, rate)
        assert count <= length
        assert weights.sum(axis=1).max() == (count if rate else 0)
        places = np.argsort(weights == 0, axis=1, kind="stable")[:, :count]
        assert np.take_along_axis(weights, places, axis=1).sum() == weights.sum()


def test_chosen_places_come_first_and_in_order():
    weights = (np.random.default_rng(5).random((200, 17)) < 0.2).astype(np.float32)
    for row, places in zip(weights, np.asarray(masked_positions(weights, 9)), strict=True):
        chosen, others = np.flatnonzero(row), np.flatnonzero(row == 0)
        assert places.tolist() == [*chosen, *others][:9]


def test_a_row_with_more_tokens_chosen_than_expected_makes_the_loss_nan(models, losses, batch):
    too_low = jax.jit(functools.partial(pretraining_loss, models[BertMaskedLM], rngs=None, rate=0.15))
    assert [np.isnan(loss(batch).loss).item() for loss in (losses[BertMaskedLM], too_low)] == [False, True]


def test_batches_without_anything_to_predict(losses, batch):
    output = losses[BertPretraining](jax.tree.map(np.zeros_like, batch))
    assert {*map(float, jax.tree.leaves(output))} == {0.0}


def test_parts_weigh_next_sentences_by_their_share_of_the_chosen_tokens(losses, batch):
    """Odd and even rows are two parts, with unequal numbers of tokens and of rows that are no padding."""
    loss, masked = losses[BertPretraining], losses[BertMaskedLM]
    # The rows of the other part are padding, so that there is one shape to compile.
    is_even = np.arange(len(batch["tokens"])) % 2 == 0
    parts = [
        {
            name: np.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0).astype(rows.dtype)
            for name, rows in batch.items()
        }
        for mine in (is_even, ~is_even)
    ]
    tokens, rows = (np.array([part[name].sum() for part in parts]) for name in ("weights", "row_weights"))
    assert tokens[0] / rows[0] != tokens[1] / rows[1]
    outputs, whole = [loss(part) for part in parts], loss(batch)
    totals, nll = (np.array(values) for values in zip(*((o.loss, o.metrics["nll"].sum) for o in outputs), strict=True))
    means = (totals - nll) / tokens  # over the next sentences of each part, so weighed by its tokens
    whole_nll = whole.metrics["nll"].sum
    np.testing.assert_allclose(nll.sum(), whole_nll, rtol=1e-5)
    np.testing.assert_allclose(rows @ means / rows.sum() * tokens.sum(), whole.loss - whole_nll, rtol=1e-4)
    counts = [output.metrics["next_sentence_accuracy"].weight for output in outputs]
    assert sum(counts) == whole.metrics["next_sentence_accuracy"].weight == rows.sum()
    # Without them, the loss of a batch is that of its parts.
    np.testing.assert_allclose(sum(masked(part).loss for part in parts), masked(batch).loss, rtol=1e-5)


def test_rows_stay_on_their_devices(draw_model):
    """Eight devices with rows of their own exchange gradients and sums, but no tokens, vectors or logits."""
    config = dataclasses.replace(CONFIG, max_length=40)
    graphdef, params = nnx.split(draw_model(lambda: BertPretraining(config, rngs=nnx.Rngs(0))))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    texts = dict.fromkeys(("tokens", "token_type_ids", "targets"), np.zeros((16, 40), np.int32))
    texts |= {"token_mask": np.ones((16, 40), bool), "weights": np.ones((16, 40), np.float32)}
    texts |= {"next_sentence_label": np.zeros(16, np.int32), "row_weights": np.ones(16, np.float32)}

    def loss(params, batch):
        output = pretraining_loss(nnx.merge(graphdef, params), batch, None, rate=1.0)
        return output.loss, output.metrics

    gradient = jax.jit(jax.grad(loss, has_aux=True), in_shardings=(everywhere, rows), out_shardings=everywhere)
    program = gradient.lower(nnx.to_pure_dict(params), texts).compile().as_text()
    assert "all-reduce" in program
    assert not any(name in program for name in ("all-gather", "all-to-all", "collective-permute"))
