"""Routing attention against Algorithm 1 of Roy et al. (2020), beyond what test_contract.py asks of every attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.clustered import normalized, routing_centroids, routing_weights
from tests.functional.attention.oracles.dense import dense_weights, mixed, per_query_head
from tfx_jax.functional import routing_attention, update_centroids


def _inputs(b=2, t=19, n=4, k=2, seed=0):
    random = np.random.default_rng(seed)
    shapes = (b, t, n, 8), (b, t, k, 8), (b, t, k, 6)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


@functools.cache
def _jitted(**options):
    return jax.jit(functools.partial(routing_attention, **options))


def _padding():
    return np.arange(19)[None, None, None] != 5


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_cluster_is_dense_attention_on_normalized_vectors(is_causal):
    query, key, value = _inputs()
    one = np.ones((4, 1, 8), np.float32)
    attend = _jitted(window=50, is_causal=is_causal, return_weights=True)
    out, weights = attend(query, key, value, centroids=one, mask=_padding())
    pairs = _padding() & _padding().swapaxes(2, 3)
    want = dense_weights(normalized(query), normalized(key), mask=pairs, is_causal=is_causal)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)
    np.testing.assert_allclose(weights, want, atol=1e-5)


@pytest.mark.parametrize("options", [{"window": 13}, {"window": 2, "is_causal": True, "scale": 0.1}], ids=str)
def test_equals_its_oracle(options):
    """The wide window puts most queries into several clusters; the narrow one leaves most out."""
    query, key, value = _inputs()
    centroids = routing_centroids(query.shape, 3)
    attend = _jitted(**options, return_weights=True)
    out, weights = attend(query, key, value, mask=_padding(), centroids=centroids)
    want = routing_weights(query, key, mask=_padding(), centroids=centroids, **options)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)
    left_out = want.sum(axis=-1) == 0
    assert left_out.mean() > 0.4 if options["window"] == 2 else left_out.mean() < 0.1
    np.testing.assert_array_equal(np.asarray(out).swapaxes(1, 2)[left_out], 0)


class TestCausality:
    """Weights never go to later tokens, but the choice of the clusters looks at them: both are documented."""

    attend = staticmethod(_jitted(window=4, is_causal=True, return_weights=True))

    def test_no_weight_goes_to_the_future(self):
        query, _, value = _inputs(t=14, k=4)
        centroids = routing_centroids(query.shape)
        _, weights = self.attend(query, query, value, centroids=centroids)
        assert (np.triu(weights, 1) == 0).all()

    def test_the_choice_of_a_cluster_depends_on_the_future(self):
        query, _, value = _inputs(t=14, k=4)
        centroids = routing_centroids(query.shape)
        changed = np.concatenate([query[:, :7], _inputs(t=14, seed=1)[0][:, 7:]], axis=1)
        before, after = (np.asarray(self.attend(x, x, value, centroids=centroids)[1]) for x in (query, changed))
        assert ((before[:, :, :7] > 0) != (after[:, :, :7] > 0)).any()


class TestAlgorithm1WithAMask:
    """Where the PyPI package routing-transformer 1.6.1 differs from the paper, which this function follows.

    Without causality both agree. Causal, the package adds a learned key and value to each cluster, which the paper does
    not have. Without these, it gives a query whose cluster has later keys only the mean of their values. With shared
    queries and keys, it makes keys unit vectors and hides a token from itself, as the Reformer does; Algorithm 1 has
    LayerNorm of both and the lower triangle of A, diagonal included.
    """

    def test_later_values_change_nothing_where_a_cluster_has_no_earlier_key(self):
        query, key, value = _inputs()
        centroids = routing_centroids(query.shape, 4)
        attend = _jitted(window=5, is_causal=True)
        later = np.where(np.arange(19)[None, :, None, None] >= 7, value + 100, value)
        before, after = (np.asarray(attend(query, key, x, centroids=centroids)) for x in (value, later))
        np.testing.assert_array_equal(before[:, :7], after[:, :7])
        _, everything = _jitted(window=5, return_weights=True)(query, key, value, centroids=centroids)
        blind = (np.tril(everything).sum(axis=-1) == 0) & (np.asarray(everything).sum(axis=-1) > 0)
        assert blind[:, :, :7].any()  # taken by a cluster, with later keys only
        np.testing.assert_array_equal(before.swapaxes(1, 2)[blind], 0)

    def test_a_token_sees_itself_where_queries_are_the_keys(self):
        query, _, value = _inputs(k=4)
        attend = _jitted(window=5, is_causal=True, return_weights=True)
        weights = np.asarray(attend(query, query, value, centroids=routing_centroids(query.shape, 4))[1])
        taken = weights.sum(axis=-1) > 0
        assert 0.5 < taken.mean() < 1
        assert (np.diagonal(weights, axis1=2, axis2=3)[taken] > 0).all()
        np.testing.assert_allclose(weights[taken].sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("window", [4, 17])
def test_a_text_is_that_alone_wherever_its_padding_is(window):
    """Also where clusters take more than its tokens; and so do centroids move."""
    inputs, wide = _inputs(), 40
    centroids = routing_centroids(inputs[0].shape, 5)
    attend, update = (
        _jitted(window=window, return_weights=True),
        jax.jit(functools.partial(update_centroids, decay=0.5)),
    )
    alone, moved = attend(*inputs, centroids=centroids), update(centroids, *inputs[:2])
    random = np.random.default_rng(2)
    for places in (np.arange(19), np.arange(19) + 21, np.sort(random.permutation(wide)[:19])):
        padded = [9 * random.normal(size=(2, wide, *x.shape[2:])).astype(np.float32) for x in inputs]
        for whole, part in zip(padded, inputs, strict=True):
            whole[:, places] = part
        mask = np.isin(np.arange(wide), places)[None, None, None]
        out, weights = map(np.asarray, attend(*padded, mask=mask, centroids=centroids))
        np.testing.assert_allclose(out[:, places], alone[0], atol=1e-5)
        np.testing.assert_array_equal(np.delete(out, places, axis=1), 0)
        np.testing.assert_allclose(weights[:, :, places[:, None], places], alone[1], atol=1e-5)
        np.testing.assert_allclose(update(centroids, *padded[:2], mask), moved, atol=1e-5)


def test_no_gradient_reaches_the_centroids():
    query, key, value = _inputs()
    centroids = routing_centroids(query.shape)
    loss = lambda centroids: jnp.square(_jitted(window=5)(query, key, value, centroids=centroids)).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(centroids), 0)


def test_update_centroids_equals_the_paper_s_last_lines():
    query, key, _ = _inputs()
    centroids, mask = routing_centroids(query.shape, 5), _padding()
    centroids[2, 4] = centroids[2, 3]  # gets no token: the first of two equals does
    update = jax.jit(update_centroids, static_argnames="decay")
    got = np.asarray(update(centroids, query, key, mask, decay=0.75))
    want = centroids.astype(np.float64)
    for head in range(4):
        tokens = np.concatenate([normalized(query), per_query_head(normalized(key), 4)])
        tokens = tokens[:, mask[0, 0, 0], head].reshape(-1, 8)
        nearest = (tokens @ centroids[head].T.astype(np.float64)).argmax(axis=-1)
        for cluster in range(5):
            if (nearest == cluster).any():
                want[head, cluster] = 0.75 * want[head, cluster] + 0.25 * tokens[nearest == cluster].mean(axis=0)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(got[2, 4], centroids[2, 4])
    np.testing.assert_array_equal(update(centroids, query, key, mask, decay=1.0), centroids)


def test_learned_clusters_find_the_nearest_keys_more_often_than_random_pairs_would():
    """Eight groups of tokens: online k-means finds them, and clusters then hold most of the nearest keys."""
    random = np.random.default_rng(1)
    groups = random.normal(size=(8, 16))[np.arange(256) % 8]
    x = (groups + 0.5 * random.normal(size=groups.shape)).astype(np.float32)[None, :, None]
    first = routing_centroids((1, 256, 1, 16), 8)
    step = jax.jit(functools.partial(update_centroids, decay=0.5))
    learned = first
    for _ in range(20):
        learned = step(learned, x, x)
    closeness = normalized(x)[0, :, 0] @ normalized(x)[0, :, 0].T
    nearest = closeness >= np.sort(closeness, axis=-1)[:, -8:-7]
    attend = _jitted(window=32, return_weights=True)

    def recall(centroids):
        found = np.asarray(attend(x, x, x, centroids=centroids)[1])[0, 0] > 0
        return found[nearest].mean(), found.mean()

    share, at_random = recall(learned)
    assert share > 6 * at_random  # measured: 0.85 of the nearest keys among 0.11 of the pairs
    assert share > recall(first)[0] + 0.2


def test_operations_grow_as_length_to_the_three_halves():
    def operations(length):
        like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        centroids = jax.ShapeDtypeStruct((1, round(length**0.5), 64), jnp.float32)
        compiled = _jitted(window=round(length**0.5)).lower(like, like, like, centroids=centroids).compile()
        return compiled.cost_analysis()["flops"]

    slope = np.log(operations(16384) / operations(1024)) / np.log(16)
    assert abs(slope - 1.5) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "at least 1, got 0"),
        ({"centroids": np.ones((2, 3, 7), np.float32)}, r"\(2, 8\), got \(2, 3, 7\)"),
        ({"centroids": np.ones((2, 8), np.float32)}, r"got \(2, 8\)"),
        ({"bias": np.zeros((1, 1, 1, 4), np.float32)}, r"bias.*\(1, 1, 1, 4\)"),
        ({"mask": np.ones((1, 1, 4, 4), bool)}, r"\(1, 1, 4, 4\).*is_causal or segment_ids"),
        ({"segment_ids": np.ones((1, 4), np.int32)}, "routing attention does not support packed sequences"),
        ({"value": np.ones((1, 5, 2, 8)), "key": np.ones((1, 5, 2, 8))}, "got 4 queries and 5 keys"),
    ],
)
def test_errors_say_what_is_wrong(options, message):
    x = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        routing_attention(
            x, **{"key": x, "value": x, "centroids": np.ones((2, 3, 8), np.float32), "window": 2} | options
        )


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_update_centroids_refuses_a_decay_that_is_none(decay):
    x = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"got {decay}"):
        update_centroids(np.ones((2, 3, 8), np.float32), x, x, decay=decay)
