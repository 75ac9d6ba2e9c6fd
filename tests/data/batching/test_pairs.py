"""Every example once an epoch, in static shapes within the budget, and the same after every interruption."""

import itertools
import json
import subprocess
import sys

import grain
import numpy as np
import pytest

from tests.data.tokenizers_made_here import EOS_ID, PAD_ID, make_tokenizer
from tfx_jax.data.batching.batches import (
    BatchSpec,
    ExampleList,
    LoaderOptions,
    ProcessShard,
    eval_batches,
    train_batches,
)
from tfx_jax.data.batching.pairs import PairBuffers, encode_pairs, pair_batches
from tfx_jax.data.sources import text
from tfx_jax.errors import UserError

MAX_LENGTH = 24


def _make_pairs(count, seed=0):
    """Pairs whose first word is unique; both sides have 1 to 22 words, seldom the same number."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, MAX_LENGTH - 1, (count, 2))
    return [
        {"source": " ".join([f"s{i}", *["x"] * (n - 1)]), "target": " ".join([f"t{i}", *["y"] * (m - 1)])}
        for i, (n, m) in enumerate(lengths)
    ]


def _make_tokenizer(pairs):
    return make_tokenizer([side for pair in pairs for side in pair.values()])


PAIRS = _make_pairs(103)
TOKENIZER = _make_tokenizer(PAIRS)
OPTIONS = LoaderOptions(seed=3, batch_multiple=2)
SIZES = {"tokens_per_batch": 128, "max_length": MAX_LENGTH, "sort_buffer": 40}


def _batches(pairs=PAIRS, options=OPTIONS, **sizes):
    return iter(pair_batches(pairs, TOKENIZER, options, **{**SIZES, "prefetch": 0, **sizes}))


def _take_buffers(iterator, count):
    """The batches of the next `count` buffers."""
    first = iterator.get_state()["portion"]
    taken = []
    while iterator.get_state()["portion"] < first + count:
        taken.append(next(iterator))
    return taken


def _examples(taken):
    """The pairs of some batches, as text; each row must be tokens, one EOS, padding."""
    found = []
    for batch in taken:
        for source, target in zip(batch["source"], batch["target"], strict=True):
            if source.any() or target.any():
                found.append((_text_of(source), _text_of(target)))
    return found


def _text_of(row):
    length = np.count_nonzero(row)
    assert np.all(row[:length] != PAD_ID)
    assert np.flatnonzero(row == EOS_ID).tolist() == [length - 1]
    return TOKENIZER.decode(row)


def _number_of(ids):
    """Which pair a source is of: its first word says it."""
    return int(TOKENIZER.decode(ids).split()[0][1:])


def _expected(pairs=PAIRS):
    return sorted((pair["source"], pair["target"]) for pair in pairs)


def _assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for side in one:
            np.testing.assert_array_equal(one[side], other[side])


def test_every_example_once_an_epoch_uncut_and_reshuffled():
    iterator = _batches()
    epochs = [_examples(_take_buffers(iterator, 3)) for _ in range(3)]  # 103 examples are 3 buffers of at most 40
    for epoch in epochs:
        assert sorted(epoch) == _expected()
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_buffers_are_of_equal_size_and_hold_different_examples_in_every_epoch():
    iterator = _batches()
    buffers = [{source for source, _ in _examples(_take_buffers(iterator, 1))} for _ in range(6)]
    assert [len(buffer) for buffer in buffers] == [34, 34, 35] * 2
    assert buffers[:3] != buffers[3:]


@pytest.mark.parametrize("sort_buffer", [1, 7, 103, 104, 10_000])
def test_an_epoch_is_an_epoch_whatever_the_sort_buffer(sort_buffer):
    buffers_per_epoch = -(-len(PAIRS) // sort_buffer)
    assert sorted(_examples(_take_buffers(_batches(sort_buffer=sort_buffer), buffers_per_epoch))) == _expected()


def test_shapes_are_few_static_and_within_the_budget():
    for batch in itertools.islice(_batches(), 60):
        rows, length = batch["source"].shape
        assert batch["target"].shape == (rows, length)
        assert batch["source"].dtype == batch["target"].dtype == np.int32
        assert (rows, length) in {(16, 8), (10, 12), (8, 16), (6, 20), (4, 24)}  # rows: even, at most 128 / length


def test_only_one_batch_of_a_buffer_is_not_full():
    iterator = _batches()
    for _ in range(6):
        not_full = [batch for batch in _take_buffers(iterator, 1) if not batch["source"].any(axis=1).all()]
        assert len(not_full) <= 1


def test_lengths_of_batches_come_in_an_order_of_their_own_in_every_epoch_and_for_every_seed():
    iterator, other = _batches(sort_buffer=200), _batches(sort_buffer=200, options=OPTIONS._replace(seed=4))
    orders = [[batch["source"].shape[1] for batch in _take_buffers(epoch, 1)] for epoch in (iterator, iterator, other)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    orders += [sorted(orders[0]), sorted(orders[0], reverse=True)]
    assert len(set(map(tuple, orders))) == len(orders)


def test_same_seed_same_batches_other_seed_other_batches():
    first, again, other = ([*itertools.islice(_batches(options=OPTIONS._replace(seed=seed)), 40)] for seed in (3, 3, 4))
    _assert_same(first, again)
    assert _examples(first) != _examples(other)


@pytest.mark.parametrize(
    ("seed", "number", "expected"),
    [
        (3, 0, [19, 52, 83, 35, 92, 73, 85, 30, 91, 67, 81, 42]),
        (3, 3, [29, 30, 31, 86, 26, 66, 61, 19, 80, 99, 2, 87]),  # the first buffer of the second epoch
        (2**31 - 1, 1, [96, 18, 27, 57, 89, 102, 13, 75, 37, 72, 0, 52]),
    ],
)
def test_the_order_of_pairs_is_the_one_that_checkpoints_were_made_with(seed, number, expected):
    """Grain's shuffle decides it: where another release shuffles otherwise, an old training would resume in silence."""
    buffer = PairBuffers(PAIRS, TOKENIZER, max_length=MAX_LENGTH, seed=seed, sort_buffer=40)(number)
    assert [_number_of(buffer[place]["source"]) for place in range(12)] == expected


def test_the_order_of_batches_is_the_one_that_checkpoints_were_made_with():
    """NumPy's generator decides it, and that of the examples of an epoch that is in memory."""
    taken = itertools.islice(_batches(), 3)
    found = [_number_of(row) for batch in taken for row in batch["source"] if row.any()]
    assert found[:12] == [66, 93, 94, 98, 78, 65, 42, 12, 44, 16, 28, 59]
    examples = ExampleList([{"tokens": np.full(1 + number % 7, number)} for number in range(30)])
    iterator = iter(train_batches(lambda epoch: examples, BatchSpec((4, 8), 32), OPTIONS, prefetch=0))
    found = [next(iterator)["tokens"][:, 0].tolist() for _ in range(3)]
    assert found == [[11, 13, 6, 4], [21, 24, 26, 20], [27, 12, 18, 25]]


def test_a_seed_is_not_its_neighbor_one_epoch_later():
    # Or a mean over seeds would be one over the same order of the data.
    iterator = _batches()
    buffers = [_examples(_take_buffers(iterator, 1)) for _ in range(4)]
    assert set(_examples(_take_buffers(_batches(options=OPTIONS._replace(seed=4)), 1))) != set(buffers[3])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resumes_exactly_at_every_position(prefetch):
    iterator = _batches(prefetch=prefetch)
    states, taken = [], []
    for _ in range(45):  # more than two epochs
        states.append(json.dumps(iterator.get_state()))
        taken.append(next(iterator))
    iterator.close()
    assert max(map(len, states)) < 200
    resumed = _batches(prefetch=prefetch)
    for position in reversed(range(45)):
        resumed.set_state(json.loads(states[position]))
        assert json.dumps(resumed.get_state()) == states[position]
        _assert_same([next(resumed) for _ in range(min(3, 45 - position))], taken[position : position + 3])
    resumed.close()


def test_bpe_dropout_splits_the_same_pairs_in_another_way_each_epoch_and_the_same_way_when_resumed():
    pairs = [{"source": f"the cat number {i} sat", "target": f"the dog {i} on the mat barked"} for i in range(60)]
    tokenizer = make_tokenizer([side for pair in pairs for side in pair.values()], "sentencepiece", vocab_size=80)

    def make():
        sizes = {"tokens_per_batch": 512, "max_length": 64, "sort_buffer": 20}
        return iter(pair_batches(pairs, tokenizer, OPTIONS, **sizes, bpe_dropout=0.2))

    def texts(batches):
        rows = [
            (batch["source"][row], batch["target"][row]) for batch in batches for row in range(len(batch["source"]))
        ]
        return sorted(tuple(map(tokenizer.decode, row)) for row in rows if row[0].any())

    iterator = make()
    epochs, states = [], []
    for _ in range(3):
        states.append(json.dumps(iterator.get_state()))
        epochs.append(_take_buffers(iterator, 3))
    assert [texts(batches) for batches in epochs] == [sorted(tuple(pair.values()) for pair in pairs)] * 3
    assert len({sum(int((batch["target"] > 0).sum()) for batch in batches) for batches in epochs}) == 3
    resumed = make()
    resumed.set_state(json.loads(states[2]))
    _assert_same(_take_buffers(resumed, 3), epochs[2])
    iterator.close()
    resumed.close()


def test_bpe_dropout_of_words_is_refused_before_any_batch():
    with pytest.raises(UserError, match=r"bpe_dropout needs a tokenizer of byte pairs"):
        _batches(bpe_dropout=0.1)


def test_is_a_grain_dataset_that_can_be_iterated_twice():
    dataset = pair_batches(PAIRS, TOKENIZER, OPTIONS, **SIZES)
    assert isinstance(dataset, grain.IterDataset)
    one, other = iter(dataset), iter(dataset)
    _assert_same([next(one) for _ in range(5)], [next(other) for _ in range(5)])
    one.close()
    one.close()
    with pytest.raises(ValueError, match="closed"):
        next(one)
    other.close()


def test_state_of_other_data_is_refused():
    iterator = _batches(PAIRS[:90])
    with pytest.raises(UserError, match=r"belongs to 103 training examples, but there are 90: bring"):
        iterator.set_state(_batches().get_state())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_share_every_batch(count):
    options = LoaderOptions(seed=3, batch_multiple=4)
    whole = [*itertools.islice(_batches(options=options), 30)]
    shards = [ProcessShard(index, count) for index in range(count)]
    shares = [[*itertools.islice(_batches(options=options._replace(shard=shard)), 30)] for shard in shards]
    joined = [
        {side: np.concatenate([part[side] for part in parts]) for side in parts[0]}
        for parts in zip(*shares, strict=True)
    ]
    _assert_same(joined, whole)
    for index in range(1, count):
        assert shares[index][0]["source"].shape == shares[0][0]["source"].shape


def test_pairs_that_are_too_long_or_empty_are_skipped_and_counted(caplog):
    long_source = {"source": "x " * 100_000, "target": "y"}
    long_target = {"source": "x", "target": "y " * MAX_LENGTH}  # one too many with EOS
    just_fits = {"source": "x", "target": "y " * (MAX_LENGTH - 1)}
    without_text = {"source": " ", "target": "y"}
    pairs = [*PAIRS[:20], long_source, long_target, just_fits, without_text]
    iterator = _batches(pairs)
    taken = _take_buffers(iterator, 1)
    expected = {"portion": 1, "batch": 0, "skipped": 3, "num_examples": 24}
    assert {name: iterator.get_state()[name] for name in expected} == expected
    _take_buffers(iterator, 2)
    assert iterator.get_state()["skipped"] == 9
    assert caplog.messages == [
        "3 of the first 24 training examples are left out: they are empty or do not fit, see "
        "config.task.data.max_length"
    ]
    assert sorted(_examples(taken)) == sorted([*_expected(PAIRS[:20]), ("x", " ".join("y" * (MAX_LENGTH - 1)))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": []}, "there are no training pairs"),
        (
            {"pairs": [{"source": "x " * 30, "target": "y"}] * 3},
            "of 3 training pairs in a row, none has 1 to 23 tokens",
        ),
        ({"pairs": [{"source": "x", "target": ""}]}, "check the text, or raise max_length"),
        ({"tokens_per_batch": 47}, "tokens_per_batch=47 cannot hold 2 rows of 24 tokens: raise it or lower max_length"),
        (
            {"options": OPTIONS._replace(shard=ProcessShard(0, 4))},
            "batch_multiple=2 must be a multiple of the 4 processes",
        ),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message) as caught:
        next(_batches(**options))
    assert "\n" not in str(caught.value)


def test_errors_of_the_thread_reach_the_caller():
    with pytest.raises(UserError, match="raise max_length"):
        next(_batches([{"source": "x " * 30, "target": "y"}], prefetch=2))


def test_encoded_pairs_have_both_sides_of_every_pair_with_their_ends():
    encoded = encode_pairs(PAIRS, TOKENIZER)
    assert len(encoded) == len(PAIRS)
    for index, pair in enumerate(PAIRS):
        sides = encoded[index]
        assert {name: ids.dtype for name, ids in sides.items()} == {"source": np.int32, "target": np.int32}
        assert all(ids.tolist().index(EOS_ID) == len(ids) - 1 for ids in sides.values())
        assert {name: _text_of(ids) for name, ids in sides.items()} == pair
        assert encoded.lengths[index] == max(len(text.split()) for text in pair.values()) + 1


def test_encoded_pairs_keep_sources_alone_and_may_be_none_at_all():
    encoded = encode_pairs([{"source": "x x", "target": ""}, {"source": "", "target": ""}], TOKENIZER)
    assert encoded.lengths.tolist() == [3, 1]
    assert encoded[0]["target"].tolist() == [EOS_ID]
    assert len(encode_pairs([], TOKENIZER)) == 0


def test_encoded_pairs_keep_a_line_of_100_000_tokens_or_cut_it_when_told():
    pairs = [*PAIRS[:5], {"source": "x " * 100_000, "target": "y"}]
    assert encode_pairs(pairs, TOKENIZER).lengths[5] == 100_001
    encoded = encode_pairs(pairs, TOKENIZER, max_length=50)
    assert len(encoded[5]["source"]) == encoded.lengths[5] == 50
    assert _text_of(encoded[5]["source"]) == " ".join("x" * 49)


def test_lengths_are_multiples_for_devices_that_divide_positions():
    shapes = {
        batch["source"].shape
        for batch in itertools.islice(_batches(options=LoaderOptions(3, 2, 5), sort_buffer=200), 60)
    }
    assert shapes == {(12, 10), (8, 15), (6, 20), (4, 25)}


def test_buffers_take_boundaries_of_ones_own_and_hold_all_pairs_once():
    buffers = PairBuffers(PAIRS, TOKENIZER, max_length=MAX_LENGTH, seed=3, sort_buffer=40)
    assert [len(buffers(number)) for number in range(3)] == [34, 34, 35]
    iterator = iter(train_batches(buffers, BatchSpec((12, 30), 120), OPTIONS, is_shuffled=True, prefetch=0))
    taken = _take_buffers(iterator, 3)
    assert {batch["target"].shape for batch in taken} == {(10, 12), (4, 30)}
    assert sorted(_examples(taken)) == _expected()


def test_an_evaluation_reads_every_pair_once_in_batches():
    evaluated = list(eval_batches(encode_pairs(PAIRS, TOKENIZER), BatchSpec((8, 24), 120)))
    assert sorted(_examples(evaluated)) == _expected()
    for batch in evaluated:
        places = [(row, index) for row, index in enumerate(batch["index"]) if index >= 0]
        assert all(_text_of(batch["source"][row]) == PAIRS[index]["source"] for row, index in places)


_EXITS_WHILE_PREFETCHING = """
from tests.data.tokenizers_made_here import make_tokenizer
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.batching.pairs import pair_batches
pairs = [{"source": f"the cat number {i} sat on the mat", "target": f"a dog {i} barked"} for i in range(5_000)]
words = make_tokenizer([pair["source"] for pair in pairs[:500]], "sentencepiece", vocab_size=60)
options = {"tokens_per_batch": 512, "max_length": 64, "prefetch": 1_000}
iterator = iter(pair_batches(pairs, words, LoaderOptions(seed=0), **options))
next(iterator)
"""


@pytest.mark.slow
def test_interpreter_ends_cleanly_while_a_thread_prefetches():
    done = subprocess.run(
        [sys.executable, "-c", _EXITS_WHILE_PREFETCHING], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.data
@pytest.mark.slow
def test_little_padding_on_real_text(shared_data):
    folder = shared_data / "multi30k-bpe"
    pairs = text.read_pairs(folder / "train.en.gz", folder / "train.de.gz")
    words = make_tokenizer([pairs[index][side] for index in range(len(pairs)) for side in pairs[0]])
    iterator = iter(pair_batches(pairs, words, LoaderOptions(seed=0), tokens_per_batch=4096, max_length=128))
    tokens = positions = 0
    for batch in itertools.islice(iterator, 120):
        tokens += np.maximum((batch["source"] > 0).sum(axis=1), (batch["target"] > 0).sum(axis=1)).sum()
        positions += batch["source"].size
    iterator.close()
    assert tokens / positions > 0.87
