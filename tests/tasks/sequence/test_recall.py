"""Sequences of associative recall, and which configurations of them are rejected."""

import dataclasses

import numpy as np
import pytest

from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig
from tfx_jax.tasks import RecallConfig, RecallData

DATA = RecallData(num_keys=20, num_pairs=4, max_length=16, train_sequences=40, eval_sequences=30)


def examples(split, seed=0, epoch=0):
    source = DATA.draw(split)(seed, epoch)
    return [source[index] for index in range(len(source))]


def test_each_key_comes_again_and_its_target_is_its_value():
    for example in examples("train"):
        tokens = example["inputs"].tolist()
        pairs = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
        assert len(pairs) == 4
        assert all(1 <= key <= 20 < value <= 40 for key, value in pairs.items())
        asked = np.flatnonzero(example["weights"])
        assert {tokens[place] for place in asked} == set(pairs)
        assert len(asked) == 4
        assert [example["targets"][place] for place in asked] == [pairs[tokens[place]] for place in asked]
        rest = np.setdiff1d(np.arange(8, 16), asked)
        assert not example["inputs"][rest].any()
        assert not example["targets"][example["weights"] == 0].any()


def test_seed_epoch_and_split_decide_the_sequences():
    found = [
        tuple(example["inputs"].tolist())
        for split in ("train", "validation", "test")
        for seed in (0, 1)
        for epoch in (0, 1)
        for example in examples(split, seed, epoch)
    ]
    assert len(set(found)) == len(found)
    again = [tuple(example["inputs"].tolist()) for example in examples("train")]
    assert again == found[: len(again)]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (BertConfig(), {}, "recall needs a model of the kind 'decoder', but a BertConfig is 'bert'"),
        (GPTConfig(), {"num_pairs": 21}, r"num_pairs=21 must be at most num_keys=20"),
        (GPTConfig(), {"max_length": 11}, r"max_length=11 must be at least 3 \* num_pairs=4"),
        (GPTConfig(max_length=8), {}, r"max_length=16 is more than config\.model\.max_length=8"),
    ],
)
def test_mistakes_are_one_line(model, changes, message):
    with pytest.raises(UserError, match=message):
        RecallConfig(dataclasses.replace(DATA, **changes)).validate(model)
