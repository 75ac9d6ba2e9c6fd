"""Few shapes within the budget of tokens, and every example in one batch that holds it."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.data.batching import batches as bucketing
from tfx_jax.data.batching.batches import WHOLE, ProcessShard
from tfx_jax.errors import UserError


@given(max_length=st.integers(1, 100_000))
@settings(deadline=None, max_examples=100)
def test_length_boundaries_waste_at_most_a_third(max_length):
    boundaries = bucketing.length_boundaries(max_length)
    assert boundaries[-1] == max_length
    assert all(length % 4 == 0 for length in boundaries[:-1])
    for shorter, longer in itertools.pairwise(boundaries):
        assert shorter < longer <= max(shorter + 4, 1.25 * shorter)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=200),
    boundaries=st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted),
    tokens_per_batch=st.integers(1, 300),
    batch_multiple=st.sampled_from([1, 2, 3]),
)
@settings(deadline=None, max_examples=100)
def test_plan_puts_each_example_into_one_batch_that_holds_it(lengths, boundaries, tokens_per_batch, batch_multiple):
    buckets = bucketing.bucket_shapes(boundaries, tokens_per_batch, batch_multiple)
    plan = bucketing.plan_batches(np.array(lengths, np.int64), buckets)
    planned = collections.Counter(int(member) for _, members in plan for member in members)
    assert planned == {index: 1 for index, length in enumerate(lengths) if length <= boundaries[-1]}
    for bucket, members in plan:
        assert 0 < len(members) <= bucket.rows
        assert max(lengths[member] for member in members) <= bucket.length
        assert bucket.rows % batch_multiple == 0
        assert bucket.rows * bucket.length <= tokens_per_batch or bucket.rows == batch_multiple
    assert sum(len(members) < bucket.rows for bucket, members in plan) <= 1


def test_plan_by_hand():
    buckets = (bucketing.Bucket(4, 3), bucketing.Bucket(8, 2), bucketing.Bucket(16, 1))
    plan = bucketing.plan_batches(np.array([4, 9, 1, 3, 5, 2, 17, 7]), buckets)
    # 5 is left of the first bucket and fills a row of the second; 7 is left of the second and moves to the third.
    assert [(bucket.length, members.tolist()) for bucket, members in plan] == [
        (4, [0, 2, 3]),
        (8, [5, 4]),
        (16, [7]),
        (16, [1]),
    ]
    # What is left at the end takes the shape of its longest example.
    assert [bucket.length for bucket, _ in bucketing.plan_batches(np.array([3, 4]), buckets)] == [4]


@pytest.mark.parametrize(
    ("boundaries", "batch_multiple", "shard", "message"),
    [
        ((8, 24), 2, WHOLE, "tokens_per_batch=47 cannot hold 2 rows of 24 tokens: raise it or lower max_length"),
        ((8, 16), 2, ProcessShard(0, 4), "batch_multiple=2 must be a multiple of the 4 processes"),
        ((16, 8, 24), 1, WHOLE, r"boundaries=\(16, 8, 24\) must increase"),
        ((8, 8, 24), 1, WHOLE, r"boundaries=\(8, 8, 24\) must increase"),
    ],
)
def test_mistakes(boundaries, batch_multiple, shard, message):
    with pytest.raises(UserError, match=message):
        bucketing.training_buckets(boundaries, 47, batch_multiple, shard)
