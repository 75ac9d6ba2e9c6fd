"""Batches of epochs: every example once, each epoch again, in blocks for processes, resumed where they were."""

import itertools
import json
import threading

import numpy as np
import pytest

from tfx_jax.data.batching.batches import (
    BatchSpec,
    ExampleList,
    LazyExamples,
    LoaderOptions,
    ProcessShard,
    eval_batches,
    train_batches,
)
from tfx_jax.errors import UserError

SPEC = BatchSpec(boundaries=(4, 8), tokens_per_batch=16, pad_values={"tokens": -7}, fixed_lengths={"target": 3})


def make_epoch(epoch):
    """31 + epoch examples of 1 to 8 tokens that tell epoch and index."""
    rng = np.random.default_rng(epoch)
    examples = []
    for index in range(31 + epoch):
        length = int(rng.integers(1, 9))
        examples.append(
            {
                "tokens": np.full(length, 1000 * epoch + index, np.int32),
                "target": np.arange(index % 4, dtype=np.int32),
                "frames": rng.normal(size=(length, 2, 3)).astype(np.float32),
                "name": np.array(1000 * epoch + index + 1, np.int32),
            }
        )
    return ExampleList(examples)


def take(count, **options):
    iterator = iter(train_batches(make_epoch, SPEC, LoaderOptions(seed=3), **options))
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def names(batch):
    return [int(name) for name in batch["name"] if name]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_every_example_comes_once_an_epoch(prefetch):
    batches = take(60, prefetch=prefetch)
    found = list(itertools.chain.from_iterable(map(names, batches)))
    for epoch in range(3):
        numbers = [name for name in found if name // 1000 == epoch]
        assert sorted(numbers) == [1000 * epoch + index + 1 for index in range(31 + epoch)]
        assert numbers != sorted(numbers)
    assert found == sorted(found, key=lambda name: name // 1000)  # one epoch after the other


def test_examples_are_collated_with_their_padding():
    for batch in take(40):
        rows, length = batch["tokens"].shape
        assert length in SPEC.boundaries
        assert rows == SPEC.tokens_per_batch // length
        assert batch["target"].shape == (rows, 3)
        assert batch["frames"].shape == (rows, length, 2, 3)
        for tokens, target, frames, name in zip(
            *(batch[k] for k in ("tokens", "target", "frames", "name")), strict=True
        ):
            if not name:
                assert (tokens == -7).all()
                assert not target.any()
                assert not frames.any()
                continue
            example = make_epoch(name // 1000)[int(name) % 1000 - 1]
            size = len(example["tokens"])
            assert length == 8 or size <= 4
            np.testing.assert_array_equal(tokens, [*example["tokens"], *[-7] * (length - size)])
            np.testing.assert_array_equal(target, [*example["target"], *[0] * (3 - len(example["target"]))])
            np.testing.assert_array_equal(frames[:size], example["frames"])
            assert not frames[size:].any()


def test_examples_may_be_trees_whose_arrays_have_paths():
    sound = [np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 1 for n in (1, 3, 4)]
    examples = ExampleList(
        [
            {
                "inputs": {"sound": frames, "tags": np.arange(row)},
                "sound": np.arange(len(frames)),
                "label": np.int64(row),
            }
            for row, frames in enumerate(sound)
        ],
        by="inputs/sound",
    )
    spec = BatchSpec((4,), 16, {"inputs/sound": -1, "label": -2, "tags": -3}, {"inputs/tags": 2, "sound": 5})
    assert examples.lengths.tolist() == [1, 3, 4]
    (batch,) = eval_batches(examples, spec)
    assert batch["index"].tolist() == [0, 1, 2, -1]
    assert batch["label"].tolist() == [0, 1, 2, -2]
    assert batch["inputs"]["tags"].tolist() == [[0, 0], [0, 0], [0, 1], [0, 0]]
    assert batch["sound"].tolist() == [[0, 0, 0, 0, 0], [0, 1, 2, 0, 0], [0, 1, 2, 3, 0], [0, 0, 0, 0, 0]]
    for padded, frames in zip(batch["inputs"]["sound"], [*sound, np.zeros((0, 2))], strict=True):
        np.testing.assert_array_equal(padded[: len(frames)], frames)
        assert (padded[len(frames) :] == -1).all()
        assert padded.shape == (4, 2)


def test_examples_of_negative_length_are_skipped_and_counted():
    examples = make_epoch(0)
    kept = [int(examples[index]["name"]) for index in np.flatnonzero(examples.lengths <= 4)]
    examples.lengths = np.where(examples.lengths <= 4, examples.lengths, -1)
    iterator = iter(train_batches(lambda epoch: examples, SPEC, LoaderOptions(seed=0), prefetch=0))
    found = []
    while iterator.get_state()["portion"] == 0:
        found += names(next(iterator))
    assert sorted(found) == kept
    assert iterator.get_state()["skipped"] == len(examples) - len(kept) > 0


def test_epochs_differ_in_order_and_seeds_too():
    def order(seed):
        iterator = iter(train_batches(lambda epoch: make_epoch(0), SPEC, LoaderOptions(seed), prefetch=0))
        found = list(itertools.chain.from_iterable(names(next(iterator)) for _ in range(50)))
        return [tuple(found[start : start + 31]) for start in (0, 31, 62)]

    assert len({*order(0), *order(1)}) == 6
    assert order(0) == order(0)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_each_batch_in_blocks(count):
    options = {"batch_multiple": 4}
    spec = SPEC._replace(tokens_per_batch=32)

    def batches(**more):
        iterator = iter(train_batches(make_epoch, spec, LoaderOptions(seed=1, **options, **more), prefetch=0))
        return [next(iterator) for _ in range(30)]

    whole = batches()
    shares = [batches(shard=ProcessShard(index, count)) for index in range(count)]
    for batch, *parts in zip(whole, *shares, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


@pytest.mark.parametrize("taken", [0, 1, 7, 12, 13, 14, 30])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_iteration_resumes_where_it_was(taken, prefetch):
    dataset = train_batches(make_epoch, SPEC, LoaderOptions(seed=2), prefetch=prefetch)
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(20)]
    again = iter(dataset)
    again.set_state(state)
    assert json.loads(json.dumps(again.get_state())) == state
    for batch in expected:
        found = next(again)
        assert found.keys() == batch.keys()
        for name, part in batch.items():
            np.testing.assert_array_equal(found[name], part)
    iterator.close()
    again.close()


@pytest.mark.parametrize("multiples", [(3, 1), (1, 3), (3, 1, 2), (1, 2, 1)])
@pytest.mark.parametrize("taken", [1, 4])
def test_every_example_comes_once_also_if_devices_or_accumulation_change(multiples, taken):
    """Batches get other rows and lengths, so that a number of batches means other examples."""
    found, state = [], None
    for multiple in multiples:
        spec = SPEC._replace(tokens_per_batch=32, boundaries=(4, 8 + multiple % 2))
        iterator = iter(train_batches(make_epoch, spec, LoaderOptions(seed=2, batch_multiple=multiple)))
        if state is not None:
            iterator.set_state(state)
        for _ in range(taken if multiple is not multiples[-1] else 40):
            found += names(next(iterator))
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
    assert sorted(found[:31]) == [index + 1 for index in range(31)]
    assert sorted(found[31 : 31 + 32]) == [1000 + index + 1 for index in range(32)]


@pytest.mark.parametrize("count", [1, 3])
def test_evaluation_on_all_processes_gives_every_example_once_short_ones_first(count):
    examples = make_epoch(0)
    seen = []
    for shard in (ProcessShard(index, count) for index in range(count)):
        taken = []
        batches = list(eval_batches(examples, SPEC, shard=shard))
        for batch in batches:
            assert batch["index"].dtype == np.int32
            for index, name, tokens in zip(batch["index"], batch["name"], batch["tokens"], strict=True):
                assert (index < 0) == (name == 0)
                if index >= 0:
                    assert name == examples[int(index)]["name"]
                    np.testing.assert_array_equal(tokens[tokens != -7], examples[int(index)]["tokens"])
                    taken.append(int(index))
        assert {index % count for index in taken} == {shard.index}
        assert examples.lengths[taken].tolist() == sorted(examples.lengths[taken])
        assert sum(int((batch["index"] < 0).any()) for batch in batches) <= 1
        seen += taken
    assert sorted(seen) == list(range(len(examples)))


def test_evaluation_on_nothing_and_on_fewer_examples_than_processes():
    assert list(eval_batches(ExampleList([]), SPEC)) == []
    one = ExampleList([make_epoch(0)[0]])
    assert [len(list(eval_batches(one, SPEC, shard=ProcessShard(index, 2)))) for index in range(2)] == [1, 0]


def test_mistakes():
    with pytest.raises(UserError, match="tokens_per_batch=16 cannot hold 3 rows of 8 tokens: raise it or lower max"):
        train_batches(make_epoch, SPEC, LoaderOptions(seed=0, batch_multiple=3))
    with pytest.raises(UserError, match="batch_multiple=1 must be a multiple of the 2 processes"):
        train_batches(make_epoch, SPEC, LoaderOptions(seed=0, shard=ProcessShard(0, 2)))
    for sizes, message in (
        ([], "no examples to train on"),
        ([9], "an example has 9 tokens, but must have at most 8"),
    ):
        epoch = ExampleList([{"tokens": np.zeros(size, np.int32)} for size in sizes])
        with pytest.raises(UserError, match=message):
            next(iter(train_batches(lambda _, epoch=epoch: epoch, SPEC, LoaderOptions(seed=0), prefetch=0)))
    with pytest.raises(UserError, match="an example has 9 tokens, but must have at most 8"):
        next(eval_batches(epoch, SPEC))


def test_other_data_than_that_of_the_checkpoint_is_refused():
    iterator = iter(train_batches(make_epoch, SPEC, LoaderOptions(seed=2), prefetch=0))
    next(iterator)
    state = iterator.get_state()
    fewer = iter(train_batches(lambda epoch: make_epoch(epoch + 1), SPEC, LoaderOptions(seed=2), prefetch=0))
    fewer.set_state(state)
    with pytest.raises(UserError, match="the checkpoint belongs to 31 training examples, but there are 32: bring"):
        next(fewer)


def test_files_of_a_batch_are_read_at_once_and_stay_in_order():
    both = threading.Barrier(2, timeout=30)

    def read(number):
        if number == 9:
            raise UserError("the file 9 is damaged")
        both.wait()  # passes only if another thread reads as well
        return {"tokens": np.full(number, number, np.int32)}

    def batches(numbers):
        return [*eval_batches(LazyExamples(numbers, read, np.array(numbers), reads_files=True), SPEC)]

    found = [batch["tokens"].max(axis=1, initial=0) for batch in batches([4, 1, 3, 2])]
    np.testing.assert_array_equal(np.concatenate(found), [1, 2, 3, 4])
    with pytest.raises(UserError, match="the file 9 is damaged"):
        LazyExamples([9], read, np.array([9]), reads_files=True).read([0])
