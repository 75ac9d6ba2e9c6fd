"""Streams of a text: every row resumes where it was, epoch after epoch, until it begins the text again."""

import json

import numpy as np
import pytest

from tfx_jax.data.batching.batches import ProcessShard
from tfx_jax.data.batching.text_streams import StreamDataset, TextStreams
from tfx_jax.errors import UserError

ROWS, LENGTH = 4, 3
TOKENS = np.arange(100, 100 + ROWS * LENGTH * 5 + 7)  # five segments of each part, and seven tokens left over


def test_rows_go_on_where_they_were():
    streams = TextStreams(TOKENS, ROWS, LENGTH)
    expected = [100 + part * 15 for part in range(ROWS)]  # the next token of each row
    for number in range(3 * 5 * ROWS):
        batch = streams[number]
        assert batch["begins"].tolist() == [token in (100, 160) for token in expected]
        expected = [100 if token == 160 else token for token in expected]
        for row, token in enumerate(expected):
            assert batch["inputs"][row].tolist() == [token, token + 1, token + 2]
            assert batch["targets"][row].tolist() == [token + 1, token + 2, token + 3]
        expected = [token + LENGTH for token in expected]
        assert (batch["inputs"].dtype, batch["weights"].dtype, batch["begins"].dtype) == (np.int32, np.float32, bool)
        assert batch["weights"].shape == (ROWS, LENGTH)
        assert (batch["weights"] == 1).all()


def test_an_epoch_has_every_token_once():
    streams = TextStreams(TOKENS, ROWS, LENGTH)
    for epoch in range(3):
        found = np.concatenate([streams[epoch * 5 + segment]["targets"].ravel() for segment in range(5)])
        assert sorted(found.tolist()) == list(range(101, 161))


def test_a_state_of_json_goes_on_with_the_next_batch():
    dataset = StreamDataset(TextStreams(TOKENS, ROWS, LENGTH))
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(dataset)
    again.set_state(state)
    for _ in range(10):
        np.testing.assert_equal(next(again), next(iterator))
    np.testing.assert_equal(next(again), dataset.streams[17])
    for opened in (iterator, again):
        opened.close()


def test_a_state_of_another_text_is_refused():
    first = iter(StreamDataset(TextStreams(TOKENS, ROWS, LENGTH)))
    next(first)
    state = first.get_state()
    first.close()
    other = iter(StreamDataset(TextStreams(TOKENS[:-1], ROWS, LENGTH)))
    with pytest.raises(UserError, match="a text of 67 tokens, but there are 66"):
        other.set_state(state)
    other.close()


def test_processes_have_their_rows():
    streams = TextStreams(TOKENS, ROWS, LENGTH)
    parts = [iter(StreamDataset(streams, ProcessShard(index, 2))) for index in range(2)]
    for number in range(12):
        found = [next(part) for part in parts]
        joined = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        np.testing.assert_equal(joined, streams[number])
    for part in parts:
        part.close()


def test_a_text_must_fill_a_batch():
    assert TextStreams(TOKENS[:13], ROWS, LENGTH)[0]["targets"][-1, -1] == 112
    with pytest.raises(UserError, match="a text of 12 tokens does not fill 4 rows of 3"):
        TextStreams(TOKENS[:12], ROWS, LENGTH)
