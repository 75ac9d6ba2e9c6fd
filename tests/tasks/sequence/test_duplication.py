"""Sequences 0 w 0 w, what they decide, and the loss and the metrics of their second half."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.models import GPT, BertConfig, GPTConfig
from tfx_jax.tasks.sequence.duplication import (
    DuplicatedSequences,
    DuplicationConfig,
    DuplicationData,
    duplicate,
    duplication_loss,
)

V, LENGTH = 23, 12
DATA = DuplicationData(num_symbols=V - 1, max_length=LENGTH, train_sequences=40, eval_sequences=30)


def inputs(source):
    return [source[index]["inputs"].tolist() for index in range(len(source))]


def test_an_example_is_a_word_twice():
    """Read as a program without arrays would: which target is said for the second time."""
    for example in map(DuplicatedSequences(50, LENGTH, 3, key=(0,)).__getitem__, range(50)):
        tokens = example["inputs"].tolist()
        word = tokens[1 : LENGTH // 2]
        assert tokens == [0, *word, 0, *word]
        assert set(word) <= {1, 2, 3}
        said = [(place, example["targets"][place]) for place in range(LENGTH) if example["weights"][place]]
        assert said == [(place, tokens[place + 1]) for place in range(LENGTH // 2, LENGTH - 1)]
        assert [array.dtype.name for array in example.values()] == ["int32", "int32", "float32"]
        assert set(example["weights"].tolist()) == {0.0, 1.0}


def test_symbols_are_alike_often():
    source = DuplicatedSequences(2_000, LENGTH, V - 1, key=(0,))
    counts = np.bincount(np.array(inputs(source))[:, 1 : LENGTH // 2].ravel(), minlength=V)
    assert counts[0] == 0
    expected = counts.sum() / (V - 1)
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 60  # chi-squared, 21 degrees: above 50 once in 2,500


def test_seed_epoch_split_and_place_decide_a_sequence_and_nothing_else():
    found = {
        (split, seed, epoch): inputs(DATA.draw(split)(seed, epoch))
        for split in ("train", "validation", "test")
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert [len(rows) for rows in found.values()] == [40] * 4 + [30] * 8
    rows = [tuple(row) for rows in found.values() for row in rows]
    assert len(set(rows)) == len(rows)  # 22^5 words: two alike once in 100 such draws
    for (split, seed, epoch), rows in found.items():
        again = DATA.draw(split)(seed, epoch)
        assert [again[index]["inputs"].tolist() for index in reversed(range(len(again)))] == rows[::-1]
    more = dataclasses.replace(DATA, train_sequences=50).draw("train")(1, 1)
    assert inputs(more)[:40] == found["train", 1, 1]
    for index in (-1, 50):
        with pytest.raises(IndexError, match=f"no example {index}: examples are numbered from 0 to 49"):
            more[index]


class Told(nnx.Module):
    """Says the tokens that it is told, whatever it reads: a model of the kind "decoder"."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, inputs, *, positions=None, segment_ids=None, rngs=None):
        return 5.0 * jax.nn.one_hot(self.tokens, V)


def test_metrics_count_the_second_half_and_whole_sequences():
    """Six rows: right, wrong once in each place that counts or not, and padding."""
    words = np.random.default_rng(0).integers(1, V, (6, LENGTH // 2 - 1))
    batch = {name: np.stack([duplicate(word)[name] for word in words]) for name in duplicate([1])}
    for name in batch:
        batch[name][5] = 0
    said = batch["targets"].copy()
    half = LENGTH // 2
    for row, place in ((1, half), (2, LENGTH - 2), (3, half - 1), (4, LENGTH - 1), (3, 0)):
        said[row, place] = (said[row, place] + 1) % V
    found = jax.jit(lambda batch: duplication_loss(Told(said), batch, None))(batch)
    predictions = 5 * (half - 1)
    assert found.weight == predictions
    assert found.num_tokens == 5 * LENGTH
    assert found.metrics["accuracy"] == (predictions - 2, predictions)
    assert found.metrics["exact_match"] == (3, 5)
    right = np.log(np.exp(5) + V - 1) - 5
    np.testing.assert_allclose(found.loss, predictions * right + 2 * 5, rtol=1e-5)


def test_loss_is_the_cross_entropy_of_the_second_half(draw_model, expected_loss, assert_losses):
    config = GPTConfig(V, max_length=LENGTH, num_layers=1, d_model=8, num_heads=2)
    model = draw_model(lambda: GPT(config, rngs=nnx.Rngs(0)))
    source = DATA.draw("test")(0, 0)
    batch = jax.tree.map(lambda *parts: np.stack(parts), *(source[index] for index in range(4)))
    logits = jax.jit(model)(batch["inputs"])
    counts = np.zeros((4, LENGTH), bool)
    counts[:, LENGTH // 2 : -1] = True
    expected = expected_loss(logits, batch["targets"], counts)
    first_choice = np.asarray(logits).argmax(axis=-1)
    wrong = [any(first_choice[row, t] != batch["inputs"][row, t + 1] for t in range(6, 11)) for row in range(4)]
    expected.metrics["exact_match"] = expected.metrics["accuracy"]._replace(sum=4.0 - sum(wrong), weight=4.0)
    found = jax.jit(lambda batch: duplication_loss(model, batch, None))(batch)
    assert_losses(found, expected._replace(num_tokens=4.0 * LENGTH))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (BertConfig(), {}, "duplication needs a model of the kind 'decoder', but a BertConfig is 'bert'"),
        (GPTConfig(), {"max_length": 63}, r"config\.task\.data\.max_length=63 must be even"),
        (GPTConfig(max_length=8), {"max_length": 10}, r"max_length=10 is more than config\.model\.max_length=8"),
    ],
)
def test_mistakes_are_one_line(model, changes, message):
    with pytest.raises(UserError, match=message):
        DuplicationConfig(dataclasses.replace(DATA, **changes)).validate(model)
