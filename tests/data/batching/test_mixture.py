"""Mixtures: shares of sources, passes over each, and resuming."""

import collections

import numpy as np
import pytest

from tfx_jax.data.batching.batches import BatchSpec, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.batching.mixture import mixed_epochs
from tfx_jax.errors import UserError


def source(first, size):
    """Examples of one token each, `first`, `first` + 1, ..., and of lengths that tell the pass they were read in."""
    return lambda number: ExampleList([{"tokens": np.array([first + n, number])} for n in range(size)])


def read(epoch):
    return [tuple(example["tokens"].tolist()) for example in epoch]


@pytest.mark.parametrize(
    ("sizes", "shares", "counts", "totals"),
    [
        ((10, 20), (1, 1), (10, 10), (200, 200)),
        ((10, 4), (3, 1), (10, 3), (200, 66)),
        ((7, 100), (0.02, 0.98), (2, 100), (40, 2_000)),
        ((3,), (5,), (3,), (60,)),
        ((10, 10), (100, 1), (10, 0), (200, 2)),  # not one in each epoch, which would be ten times the share
    ],
)
def test_epochs_have_shares_and_every_pass_has_each_example_once(sizes, shares, counts, totals):
    sources = [source(1000 * number, size) for number, size in enumerate(sizes)]
    make = mixed_epochs(sources, shares, seed=3)
    examples = [example for epoch in range(20) for example in read(make(epoch))]
    for number, (size, total) in enumerate(zip(sizes, totals, strict=True)):
        seen = [(token, number_of_pass) for token, number_of_pass in examples if token // 1000 == number]
        assert len(seen) == total
        whole_passes = total // size
        repeats = collections.Counter(token for token, number_of_pass in seen if number_of_pass < whole_passes)
        assert set(repeats.values()) <= {whole_passes}
        assert len(repeats) == (size if whole_passes else 0)
        assert len(set(seen)) == len(seen)
    assert len(make(0).lengths) == len(make(0)) == sum(counts)
    with pytest.raises(
        IndexError, match=f"no example {sum(counts)}: examples are numbered from 0 to {sum(counts) - 1}"
    ):
        make(0)[sum(counts)]


def test_a_source_without_examples_is_refused():
    with pytest.raises(UserError, match="source 2 of the mixture has no examples: its documents are too short"):
        mixed_epochs([source(0, 5), source(10, 0)], (1, 1), seed=0)


def test_orders_differ_between_passes_and_seeds_and_are_functions_of_the_epoch():
    sources = [source(0, 50), source(1000, 50)]
    make, again, other = (mixed_epochs(sources, (1, 1), seed=seed) for seed in (0, 0, 1))
    first, second = ([token for token, _ in read(make(epoch))] for epoch in (0, 1))
    assert first != second
    assert [token for token, _ in read(again(1))] == second  # without the first
    assert [token for token, _ in read(other(1))] != second


def test_batches_resume_within_an_epoch_bit_for_bit():
    sources = [source(0, 9), source(1000, 31)]

    def data():
        make = mixed_epochs(sources, (1, 2), seed=0)
        return iter(train_batches(make, BatchSpec((2,), 8), LoaderOptions(seed=5)))

    iterator = data()
    for _ in range(9):
        next(iterator)
    resumed = data()
    resumed.set_state(iterator.get_state())
    for _ in range(12):
        np.testing.assert_array_equal(next(iterator)["tokens"], next(resumed)["tokens"])
    iterator.close()
    resumed.close()
