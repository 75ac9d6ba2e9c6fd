"""What every loss promises to the trainer: sums that add, padding that does not matter, float32 whatever the model."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tfx_jax import models
from tfx_jax.models.elmo import CharacterConfig, ElmoConfig, ElmoLanguageModel, ElmoTagger, ElmoTaggerConfig
from tfx_jax.models.transformer_xl import TransformerXL, TransformerXLConfig
from tfx_jax.tasks.events import event_loss
from tfx_jax.tasks.sequence.duplication import duplicate, duplication_loss
from tfx_jax.tasks.sequence.long_range import long_range_loss
from tfx_jax.tasks.speech.speech_recognition import recognition_loss
from tfx_jax.tasks.text.bert_pretraining import pretraining_loss
from tfx_jax.tasks.text.bidirectional_language_modeling import bidirectional_language_model_loss
from tfx_jax.tasks.text.classification import classification_loss
from tfx_jax.tasks.text.language_modeling import language_model_loss
from tfx_jax.tasks.text.question_answering import span_loss
from tfx_jax.tasks.text.recurrent_language_modeling import recurrent_language_model_loss
from tfx_jax.tasks.text.sentence_pairs import sentence_pair_loss
from tfx_jax.tasks.text.tagging import IGNORED, tagging_loss
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.tasks.vision.captioning import captioning_loss
from tfx_jax.tasks.vision.image_classification import image_classification_loss
from tfx_jax.training.step import new_state, update

V, ROWS, T, PAD = 29, 6, 13, 7  # rows and length as in conftest.py
SIZES: dict[str, Any] = {"vocab_size": V, "num_layers": 1, "d_model": 8, "num_heads": 2, "dropout_rate": 0.0}
QUIET: dict[str, Any] = {"attention_dropout_rate": 0.0}
BERT = models.BertConfig(**SIZES, **QUIET, max_length=T)
GPT = models.GPTConfig(**SIZES, **QUIET, max_length=T)
CHARACTERS = CharacterConfig(3, (2, 1), (5, 4), 1)
TAGGER = ElmoTaggerConfig(True, CHARACTERS, 6, 5, dropout_rate=0.2)
ELMO = ElmoConfig(V, 8, CHARACTERS, 2, 10, 4, 0.0, TAGGER)
SEQ2SEQ = {"pad_id": PAD, "start_id": PAD}


class Case(NamedTuple):
    """A loss, its model, its batch without the texts of a BERT, and where the numbers of a batch mean nothing."""

    loss: Any
    model: type
    config: Any
    fields: Any
    free: Any = lambda batch: {"tokens": ~batch["token_mask"], "token_type_ids": ~batch["token_mask"]}


def packed(rng, texts):
    segment_ids = texts["token_mask"] + texts["token_type_ids"]
    weights = ((segment_ids > 0) & (np.roll(segment_ids, -1, axis=1) == segment_ids)).astype(np.float32)
    positions = np.where(segment_ids == 2, np.arange(T) - 4, np.arange(T)) * texts["token_mask"]
    targets = np.where(weights > 0, np.roll(texts["tokens"], -1, axis=1), 0)
    return {
        "inputs": texts["tokens"],
        "targets": targets,
        "weights": weights,
        "segment_ids": segment_ids.astype(np.int32),
        "positions": positions.astype(np.int32),
    }


def segments(rng, texts):
    weights = texts["token_mask"].astype(np.float32)
    return {"inputs": texts["tokens"], "targets": np.roll(texts["tokens"], -1, axis=1), "weights": weights}


def without_carry(*arguments):
    """What it remembers of each row is no sum over rows."""
    return recurrent_language_model_loss(*arguments)._replace(carry=None)


def masked(rng, texts):
    weights = np.zeros((ROWS, T), np.float32)
    weights[:-1, [1, 3]] = 1  # as many in each row: parts of a batch are then all alike
    next_sentence_label = rng.integers(2, size=ROWS).astype(np.int32)
    return texts | {"targets": texts["tokens"], "weights": weights, "next_sentence_label": next_sentence_label}


def sentence_pairs(rng, texts):
    source, target = rng.integers(8, V, (2, ROWS, T))
    source[~texts["token_mask"]] = PAD
    target[~texts["token_mask"]] = PAD
    return {"source": source.astype(np.int32), "target": target.astype(np.int32)}


def speech(rng, texts):
    num_frames, num_labels = (
        (2 * T * (texts["row_weights"] > 0)).astype(np.int32),
        np.array([3, 4, 0, 2, 5, 0], np.int32),
    )
    num_frames[1] = 2 * T - 3
    frames = rng.normal(size=(ROWS, 2 * T, 5)).astype(np.float32)
    labels = rng.integers(1, V, (ROWS, 5)).astype(np.int32)
    return {"frames": frames, "num_frames": num_frames, "labels": labels, "num_labels": num_labels}


def characters(rng, texts):
    rows = np.where(texts["token_mask"][..., None], rng.integers(1, 260, (ROWS, T, 8)), 0).astype(np.int32)
    return {"characters": rows, "token_mask": texts["token_mask"]}


def without_words(batch):
    return {"characters": ~batch["token_mask"][..., None]}


def captions(rng, texts):
    caption = np.where(texts["token_mask"], rng.integers(8, V, (ROWS, T)), PAD).astype(np.int32)
    image = rng.integers(0, 256, (ROWS, 8, 8, 3)).astype(np.uint8)
    boxes = np.where((caption != PAD)[..., None], np.array([2, 1, 7, 4]), 0).astype(np.int32)
    return {"image": image * (caption != PAD).any(axis=1)[:, None, None, None], "caption": caption, "boxes": boxes}


def labeled_images(rng, texts):
    weights = texts["token_mask"].any(axis=1)
    image = rng.integers(0, 256, (ROWS, 8, 8, 3)).astype(np.uint8) * weights[:, None, None, None]
    label = rng.integers(0, 3, ROWS).astype(np.int32)
    return {"image": image.astype(np.uint8), "label": label, "row_weights": weights.astype(np.float32)}


def events(rng, texts):
    values, times = rng.random((2, ROWS, T)).astype(np.float32)
    batch = {"variable": texts["tokens"], "value": values, "time": times, "event_mask": texts["token_mask"]}
    return batch | {"label": rng.integers(2, size=ROWS).astype(np.int32), "row_weights": texts["row_weights"]}


def labeled_pairs(rng, texts):
    sides = sentence_pairs(rng, texts)
    labels = {"label": rng.integers(3, size=ROWS).astype(np.int32), "row_weights": texts["row_weights"]}
    return {"premise": sides["source"], "hypothesis": sides["target"]} | labels


def long_pairs(rng, texts):
    sides = {
        name: np.where(texts["token_mask"], rng.integers(1, V, (ROWS, T)), 0) for name in ("tokens", "other_tokens")
    }
    labels = {"label": rng.integers(3, size=ROWS).astype(np.int32), "row_weights": texts["row_weights"]}
    return {name: tokens.astype(np.int32) for name, tokens in sides.items()} | labels


def duplicated(rng, texts):
    examples = [duplicate(rng.integers(1, V, T // 2 - 1)) for _ in range(ROWS)]
    batch = jax.tree.map(lambda *rows: np.stack(rows), *examples)
    return {
        name: np.where(texts["row_weights"][:, None] > 0, rows, 0).astype(rows.dtype) for name, rows in batch.items()
    }


CASES = {
    "translation": Case(
        translation_loss, models.Transformer, models.TransformerConfig(**SIZES, **SEQ2SEQ), sentence_pairs, None
    ),
    "text-to-text": Case(
        translation_loss, models.T5, models.T5Config(**SIZES, **SEQ2SEQ, d_k=4, d_ff=12), sentence_pairs, None
    ),
    "language-model": Case(
        language_model_loss,
        models.GPT,
        GPT,
        packed,
        lambda batch: {"inputs": batch["segment_ids"] == 0, "targets": batch["weights"] == 0},
    ),
    "recurrent-language-model": Case(
        without_carry,
        TransformerXL,
        TransformerXLConfig(**SIZES, d_ff=12),
        segments,
        lambda batch: {"inputs": batch["weights"] == 0, "targets": batch["weights"] == 0},
    ),
    "duplication": Case(
        duplication_loss,
        models.GPT,
        GPT,
        duplicated,
        lambda batch: {"inputs": ~batch["weights"].any(axis=1)[:, None], "targets": batch["weights"] == 0},
    ),
    "pretraining": Case(
        pretraining_loss,
        models.BertPretraining,
        BERT,
        masked,
        lambda batch: {"tokens": ~batch["token_mask"], "targets": batch["weights"] == 0},
    ),
    "masked-lm": Case(pretraining_loss, models.BertMaskedLM, BERT, masked),
    "classification": Case(
        classification_loss,
        models.BertClassifier,
        BERT,
        lambda rng, texts: texts | {"label": rng.integers(2, size=ROWS).astype(np.int32)},
        lambda batch: {"tokens": ~batch["token_mask"], "label": batch["row_weights"] == 0},
    ),
    "tagging": Case(
        tagging_loss,
        models.BertTagger,
        BERT,
        lambda rng, texts: texts | {"targets": np.where(texts["token_mask"], texts["tokens"] % 2, IGNORED)},
    ),
    "tagging-characters": Case(
        tagging_loss,
        ElmoTagger,
        ELMO,
        lambda rng, texts: (
            characters(rng, texts) | {"targets": np.where(texts["token_mask"], texts["tokens"] % 2, IGNORED)}
        ),
        without_words,
    ),
    "bidirectional-language-model": Case(
        bidirectional_language_model_loss,
        ElmoLanguageModel,
        ELMO,
        lambda rng, texts: characters(rng, texts) | {"targets": rng.integers(V, size=(ROWS, T, 2)).astype(np.int32)},
        lambda batch: without_words(batch) | {"targets": ~batch["token_mask"][..., None]},
    ),
    "spans": Case(
        span_loss,
        models.BertQuestionAnswering,
        BERT,
        lambda rng, texts: (
            texts
            | {"context_mask": texts["token_type_ids"] == 1, "first": np.array([4, 5, 0, 4, 5, 0], np.int32)}
            | {"last": np.array([5, 5, 0, 4, 5, 0], np.int32)}
        ),
    ),
    "events": Case(
        event_loss,
        models.Seq2Vec,
        models.Seq2VecConfig(vocab_size=V, d_model=8, d_ff=6, num_knots=3, dropout_rate=0.0),
        events,
        lambda batch: {
            **{name: ~batch["event_mask"] for name in ("variable", "value", "time")},
            "label": batch["row_weights"] == 0,
        },
    ),
    "sentence-pairs": Case(
        sentence_pair_loss,
        models.DecomposableAttention,
        models.DecomposableConfig(V, 8, 6, 5, dropout_rate=0.0, labels=("a", "b", "c"), pad_id=PAD),
        labeled_pairs,
        lambda batch: {"label": batch["row_weights"] == 0},
    ),
    "sentence-pairs-esim": Case(
        sentence_pair_loss,
        models.Esim,
        models.EsimConfig(V, 8, 6, dropout_rate=0.0, labels=("a", "b", "c"), pad_id=PAD),
        labeled_pairs,
        lambda batch: {"label": batch["row_weights"] == 0},
    ),
    "images": Case(
        image_classification_loss,
        models.ViTClassifier,
        models.ViTConfig(8, 4, num_layers=2, d_model=8, num_heads=2, d_ff=6, labels=("a", "b", "c")),
        labeled_images,
        lambda batch: {
            "image": (batch["row_weights"] == 0)[:, None, None, None],
            "label": batch["row_weights"] == 0,
        },
    ),
    "images-pooled": Case(
        image_classification_loss,
        models.PatchPooling,
        models.PatchPoolingConfig(8, 4, d_model=8, d_ff=6, labels=("a", "b", "c")),
        labeled_images,
        lambda batch: {
            "image": (batch["row_weights"] == 0)[:, None, None, None],
            "label": batch["row_weights"] == 0,
        },
    ),
    "long-range": Case(
        long_range_loss,
        models.LongEncoder,
        models.LongEncoderConfig(**SIZES, d_ff=12, num_sequences=2, labels=("a", "b", "c")),
        long_pairs,
        lambda batch: {"label": batch["row_weights"] == 0},
    ),
    "speech": Case(
        recognition_loss,
        models.SanCTC,
        models.SanCTCConfig(**SIZES, **QUIET, num_features=5, subsampling=2),
        speech,
        lambda batch: {
            "frames": (np.arange(2 * T) >= batch["num_frames"][:, None])[..., None],
            "labels": np.arange(5) >= batch["num_labels"][:, None],
        },
    ),
}


CASES |= {
    f"captioning-{variant}": Case(
        captioning_loss,
        models.Captioner,
        models.CaptionerConfig(V, image_size=8, channels=(4, 6), d_model=8, variant=variant, pad_id=PAD, start_id=PAD),
        captions,
        lambda batch: {
            "image": (batch["caption"] == PAD).all(axis=1)[:, None, None, None],
            "boxes": (batch["caption"] == PAD)[..., None],
        },
    )
    for variant in ("soft", "hard")
}


# Of two models with one loss, one is quick.
SLOW = ("text-to-text", "masked-lm", "tagging-characters", "captioning-soft")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES])
def case(request):
    return CASES[request.param]


@pytest.fixture
def batch(case, make_texts):
    rng = np.random.default_rng(8)
    return case.fields(rng, make_texts(rng))


@pytest.fixture
def draw(case, draw_model):
    """`draw(**overrides)`: graph definition and parameters; the numbers do not depend on the overrides."""

    def draw(**overrides):
        config = dataclasses.replace(case.config, **overrides)
        graphdef, params = nnx.split(draw_model(lambda: case.model(config, rngs=nnx.Rngs(0))))
        return graphdef, nnx.to_pure_dict(params)

    return draw


def test_padding_does_not_matter_and_rows_add(case, batch, draw):
    """Other numbers where nothing is change no bit of loss, sums and gradient; all of these are sums over rows."""
    graphdef, params = draw(dropout_rate=0.5)  # which is not for evaluation

    @jax.jit
    def summed(params, batch):
        def loss(params):
            output = case.loss(nnx.merge(graphdef, params), batch, None)
            return output.loss, output

        return jax.grad(loss, has_aux=True)(params)

    def gradient(batch):
        return jax.device_get(summed(params, batch))

    found = gradient(batch)
    assert found[1].weight > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    if case.free is not None:
        free = {name: np.broadcast_to(where, batch[name].shape) for name, where in case.free(batch).items()}
        assert all(where.any() for where in free.values())
        changed = batch | {name: np.where(where, 1 - (batch[name] == 1), batch[name]) for name, where in free.items()}
        jax.tree.map(np.testing.assert_array_equal, found, gradient(changed))
    # The last row is padding: let all others be like it but some.
    some, others, none = (
        gradient(
            {name: rows[[row if row in kept else ROWS - 1 for row in range(ROWS)]] for name, rows in batch.items()}
        )
        for kept in ({0, 3}, {1, 2, 4}, {})
    )
    added = jax.tree.map(np.add, some, others)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, added)
    assert {float(np.abs(leaf).max()) for leaf in jax.tree.leaves(none)} == {0.0}


@pytest.mark.slow
def test_bfloat16_and_dropout(case, batch, draw):
    """The sums of a model of half precision are float32 and finite; each stream of random numbers drops others."""
    graphdef, params = draw(dtype="bfloat16", dropout_rate=0.2)

    @jax.jit
    def summed(params, seed):
        return case.loss(nnx.merge(graphdef, params), batch, nnx.Rngs(dropout=jax.random.key(seed)))

    one, other = summed(params, 0), summed(params, 1)
    assert {value.dtype.name for value in jax.tree.leaves(one)} == {"float32"}
    assert all(np.isfinite([other.loss, *jax.tree.leaves(one)]))
    assert one.loss != other.loss


@pytest.mark.slow
def test_pretraining_in_parts_is_the_same_step(draw_model, make_texts):
    """Two parts with equally many chosen tokens per row, through the trainer's own accumulation."""
    rng = np.random.default_rng(8)
    case = CASES["pretraining"]
    batch = {name: rows[[0, 1, 2, 3]] for name, rows in case.fields(rng, make_texts(rng)).items()}
    graphdef, params = nnx.split(draw_model(lambda: case.model(case.config, rngs=nnx.Rngs(0))))
    optimizer = optax.sgd(1.0)
    state = new_state(nnx.to_pure_dict(params), optimizer)
    whole, parts = (
        jax.jit(functools.partial(update, graphdef, case.loss, optimizer, accumulate=accumulate))(
            state, batch, jax.random.key(0)
        )
        for accumulate in (1, 2)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, parts)
