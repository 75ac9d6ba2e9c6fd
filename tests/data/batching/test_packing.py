"""Examples for language models: every token is there, and every target follows its input."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.data.batching.packing import PackedDocuments, TokenBlocks, first_fit
from tfx_jax.errors import UserError

PAD = 0
_documents = st.lists(st.lists(st.integers(3, 99), max_size=23), max_size=12)


@given(st.integers(2, 60), st.integers(1, 20), st.sampled_from([None, PAD]))
def test_blocks_hold_every_token_and_what_follows(count, length, pad_id):
    stream = np.arange(100, 100 + count)
    if pad_id is None and count <= length:
        with pytest.raises(UserError, match=f"a text of {count} tokens does not fill one row of {length}"):
            TokenBlocks(stream, length)
        return
    blocks = TokenBlocks(stream, length, pad_id=pad_id)
    rows = list(blocks)
    assert len(rows) == len(blocks)
    pairs = []
    for row in rows:
        assert {name: (part.shape, part.dtype) for name, part in row.items()} == {
            "inputs": ((length,), np.int32),
            "targets": ((length,), np.int32),
            "weights": ((length,), np.float32),
        }
        assert set(row["targets"][row["weights"] == 0]) <= {pad_id}
        known = row["weights"] == 1
        pairs += list(zip(row["inputs"][known].tolist(), row["targets"][known].tolist(), strict=True))
    whole = list(itertools.pairwise(stream.tolist()))
    assert pairs == (whole if pad_id is not None else whole[: len(whole) // length * length])


@pytest.mark.parametrize("stream", [[], [5]])
def test_a_stream_without_a_target(stream):
    with pytest.raises(UserError, match="does not fill one row"):
        TokenBlocks(np.array(stream), 4, pad_id=PAD)


@settings(deadline=None)
@given(_documents, st.integers(1, 16))
def test_packing_loses_nothing(documents, length):
    tokens = np.array([token for document in documents for token in document], np.int32)
    packed = PackedDocuments(tokens, np.cumsum([*map(len, documents)], dtype=np.int64), length, pad_id=PAD)
    assert packed.lengths.tolist() == [length] * len(packed)
    found = []
    for row in packed:
        inputs, targets, segment_ids, positions, weights = row.values()
        assert [*row] == ["inputs", "targets", "segment_ids", "positions", "weights"]
        assert [part.dtype for part in row.values()] == [*[np.int32] * 4, np.float32]
        assert all(part.shape == (length,) for part in row.values())
        used = int((segment_ids > 0).sum())
        assert used > 0
        assert not segment_ids[used:].any()
        assert not positions[used:].any()
        assert set(segment_ids[:used]) == set(range(1, segment_ids.max() + 1))
        assert np.all(np.diff(segment_ids[:used]) >= 0)
        assert np.all(inputs[used:] == PAD)
        assert not weights[used:].any()
        assert np.all(targets[weights == 0] == PAD)
        for segment in range(1, segment_ids.max() + 1):
            place = segment_ids == segment
            assert positions[place].tolist() == list(range(place.sum()))
            found.append((inputs[place].tolist(), targets[place].tolist(), weights[place].tolist()))
    expected = []
    for document in documents:
        for start in range(0, len(document), length):
            piece = document[start : start + length]
            following = document[start + 1 : start + length + 1]
            rest = len(piece) - len(following)
            expected.append((piece, following + [PAD] * rest, [1] * len(following) + [0] * rest))
    assert sorted(found) == sorted(expected)


def test_documents_that_are_too_short_are_left_out_of_rows():
    rows = PackedDocuments(np.arange(10, 17), np.array([1, 3, 4, 4, 7]), 8, pad_id=PAD, min_tokens=2)
    assert [row["inputs"].tolist() for row in rows] == [[11, 12, 14, 15, 16, PAD, PAD, PAD]]


def _first_fit_by_hand(sizes, capacity):
    bins, rooms = [], []  # the bin of each item, and what is left of each bin
    for size in sizes:
        place = next((number for number, room in enumerate(rooms) if room >= size), None)
        if place is None:
            place = len(rooms)
            rooms.append(capacity)
        bins.append(place)
        rooms[place] -= size
    return bins


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.lists(st.integers(1, n), max_size=60), st.just(n))))
def test_first_fit_is_that_of_the_definition(case):
    assert first_fit(*case).tolist() == _first_fit_by_hand(*case)


def test_first_fit_of_many_items():
    sizes = np.random.default_rng(0).integers(1, 60, 3000).tolist()
    assert first_fit(sizes, 64).tolist() == _first_fit_by_hand(sizes, 64)


@pytest.mark.parametrize("sizes", [[3, 9], [0, 3], [-1]])
def test_items_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match=r"each size must be from 1 to capacity=8, got"):
        first_fit(sizes, 8)


def test_rows_of_one_length():
    assert TokenBlocks(np.arange(22), 7).lengths.tolist() == [7] * 3


def test_an_index_out_of_range_is_named():
    blocks = TokenBlocks(np.arange(10), 4, pad_id=PAD)
    rows = PackedDocuments(np.arange(10, 17), np.array([3, 7]), 8, pad_id=PAD)
    for examples, what in ((blocks, "example"), (rows, "row")):
        for index in (-1, len(examples)):
            with pytest.raises(IndexError, match=f"^there is no {what} {index}: {what}s are numbered from 0 to "):
                examples[index]
