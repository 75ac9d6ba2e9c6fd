"""Rows for language models: every token is there, every target follows its input, and every row comes once an epoch."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.data.packing import ArrayRows, TokenBlocks, first_fit, join_documents, pack_documents, row_batches
from tfx_jax.errors import UserError

PAD, EOS = 0, 2
_documents = st.lists(st.lists(st.integers(3, 99), max_size=23), max_size=12)


@given(_documents)
def test_stream_of_documents(documents):
    stream = join_documents(iter(documents), EOS)
    assert stream.tolist() == [token for document in documents for token in [*document, EOS]]
    assert stream.dtype == np.int32


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
    packed = pack_documents(documents, length, pad_id=PAD)
    found = []
    for inputs, targets, weights, segment_ids, positions in zip(*packed, strict=True):
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
    dtypes = [part.dtype for part in packed]
    assert dtypes == [np.int32, np.int32, np.float32, np.int32, np.int32]
    assert all(part.shape == packed.inputs.shape for part in packed)


def _first_fit_by_hand(sizes, capacity):
    bins, rooms = [], []
    for item, size in enumerate(sizes):
        place = next((number for number, room in enumerate(rooms) if room >= size), None)
        if place is None:
            place = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[place].append(item)
        rooms[place] -= size
    return bins


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.lists(st.integers(1, n), max_size=60), st.just(n))))
def test_first_fit_is_that_of_the_definition(case):
    assert first_fit(*case) == _first_fit_by_hand(*case)


def test_first_fit_of_many_items():
    sizes = np.random.default_rng(0).integers(1, 60, 3000).tolist()
    assert first_fit(sizes, 64) == _first_fit_by_hand(sizes, 64)


@pytest.mark.parametrize("sizes", [[3, 9], [0, 3], [-1]])
def test_items_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match="do not fit into bins of 8"):
        first_fit(sizes, 8)


def _take(rows, count, **options):
    iterator = iter(row_batches(rows, **options))
    return [next(iterator)["index"].tolist() for _ in range(count)]


def test_every_row_comes_once_an_epoch_in_another_order():
    rows = ArrayRows(index=np.arange(50), square=np.arange(50)[:, None] ** 2)
    order = np.concatenate(_take(rows, 40, batch_size=10, seed=3)).reshape(8, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in order.tolist())
    assert len({tuple(epoch) for epoch in order.tolist()}) == 8
    assert list(range(50)) not in order.tolist()
    assert np.any(order[0] != np.concatenate(_take(rows, 5, batch_size=10, seed=4)))
    batch = next(iter(row_batches(rows, batch_size=10, seed=3)))
    np.testing.assert_array_equal(batch["square"][:, 0], batch["index"] ** 2)


def test_batches_cross_epochs_without_loss():
    order = np.concatenate(_take(ArrayRows(index=np.arange(7)), 7, batch_size=4, seed=0)).reshape(4, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in order.tolist())


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_each_batch_in_blocks(count):
    rows = ArrayRows(index=np.arange(29))
    whole = _take(rows, 12, batch_size=6, seed=1)
    shares = [_take(rows, 12, batch_size=6, seed=1, process_index=index, process_count=count) for index in range(count)]
    assert [list(itertools.chain(*blocks)) for blocks in zip(*shares, strict=True)] == whole


def test_iteration_resumes_where_it_was():
    blocks = TokenBlocks(np.arange(1000), 7)
    dataset = row_batches(blocks, batch_size=5, seed=2)
    iterator = iter(dataset)
    for _ in range(44):  # into the second epoch
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(40)]
    again = iter(dataset)
    again.set_state(state)
    for batch in expected:
        found = next(again)
        for name, part in batch.items():
            np.testing.assert_array_equal(found[name], part)


def test_mistakes():
    with pytest.raises(UserError, match="there are no rows"):
        row_batches(ArrayRows(index=np.zeros(0)), batch_size=2, seed=0)
    with pytest.raises(UserError, match="batch_size=5 must be a multiple of the 2 processes"):
        row_batches(ArrayRows(index=np.zeros(3)), batch_size=5, seed=0, process_count=2)
    with pytest.raises(ValueError, match=r"arrays of one number of rows are needed, got \{'a': 2, 'b': 3\}"):
        ArrayRows(a=np.zeros(2), b=np.zeros(3))
