"""The loss of a language model over blocks of a stream and over packed documents."""

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.data.batching.packing import PackedDocuments, TokenBlocks
from tfx_jax.models import GPT, GPTConfig
from tfx_jax.tasks.text.language_modeling import language_model_loss

V, T = 23, 12
CONFIG = GPTConfig(V, max_length=T, num_layers=1, d_model=8, num_heads=2)


@pytest.fixture(scope="module")
def model(draw_model):
    return draw_model(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 0.01)], ids=["plain", "options"])
def test_blocks(model, options, expected_loss, assert_losses):
    """40 tokens in rows of 12, the last of which is filled up: 39 predictions."""
    rows = TokenBlocks(np.random.default_rng(0).integers(1, V, 40), T, pad_id=0)
    batch = jax.tree.map(lambda *parts: np.stack(parts), *(rows[index] for index in range(len(rows))))
    logits = jax.jit(model)(batch["inputs"])
    expected = expected_loss(logits, batch["targets"], batch["weights"], *options)
    assert expected.weight == 39
    smoothing, z_loss_weight = options

    def loss(batch):
        return language_model_loss(model, batch, None, label_smoothing=smoothing, z_loss_weight=z_loss_weight)

    assert_losses(jax.jit(loss)(batch), expected)


def test_packed_documents_are_scored_as_if_each_were_alone(model, expected_loss, assert_losses):
    """Each document in a call of its own gives the logits; some are longer than a row and cut."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, V, size).tolist() for size in (5, 3, 12, 17, 1, 2, 7)]
    rows = PackedDocuments(np.concatenate(documents), np.cumsum([*map(len, documents)]), T, pad_id=0)
    batch = jax.tree.map(lambda *parts: np.stack(parts), *rows)
    assert batch["segment_ids"].max() >= 3
    assert (batch["segment_ids"] == 0).any()
    run = jax.jit(model)
    logits, targets = [], []
    for document in documents:
        for start in range(0, len(document), T):
            piece = document[start : start + T]
            following = document[start + 1 : start + T + 1]
            alone = np.zeros((1, T), np.int32)
            alone[0, : len(piece)] = piece
            logits.append(np.asarray(run(alone))[0, : len(following)])
            targets += following
    logits = np.concatenate(logits)
    expected = expected_loss(logits, np.array(targets), np.ones(len(targets)))
    assert expected.weight == 47 - 7
    found = jax.jit(lambda batch: language_model_loss(model, batch, None))(batch)
    assert_losses(found, expected._replace(num_tokens=47))
