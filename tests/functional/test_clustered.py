"""Routing attention against Algorithm 1 of Roy et al. (2020), beyond what test_contract.py asks of every attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.oracles.clustered import normalised, routing_centroids, routing_weights
from tests.functional.oracles.dense import mixed, per_query_head
from tfx_jax.functional import dot_product_attention, layer_norm, routing_attention, update_centroids


def _inputs(b=2, t=14, s=19, n=4, k=2, seed=0):
    random = np.random.default_rng(seed)
    shapes = (b, t, n, 8), (b, s, k, 8), (b, s, k, 6)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


@functools.cache
def _jitted(**options):
    return jax.jit(functools.partial(routing_attention, **options))


def _padding(s=19):
    return jnp.asarray(np.arange(s)[None, None, None] != 5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_cluster_is_dense_attention_on_normalised_vectors(is_causal):
    query, key, value = _inputs()
    arrays = {"mask": _padding(), "segment_ids": (jnp.ones((2, 14), jnp.int32), jnp.ones((2, 19), jnp.int32))}
    one = jnp.ones((4, 1, 8))
    out, weights = _jitted(is_causal=is_causal, return_weights=True)(query, key, value, centroids=one, **arrays)
    want = dot_product_attention(
        layer_norm(query), layer_norm(key), value, is_causal=is_causal, return_weights=True, **arrays
    )
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(weights, want[1], atol=1e-5)


@pytest.mark.parametrize("options", [{"window": 9}, {"window": 2, "is_causal": True, "scale": 0.1}], ids=str)
def test_equals_its_oracle(options):
    """The wide window puts most queries into several clusters; the narrow one leaves most out."""
    query, key, value = _inputs()
    centroids = routing_centroids(query.shape, 3)
    attend = _jitted(**options, return_weights=True)
    out, weights = attend(query, key, value, mask=_padding(), centroids=jnp.asarray(centroids))
    want = routing_weights(query, key, mask=_padding(), centroids=centroids, **options)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)
    left_out = want.sum(axis=-1) == 0
    assert left_out.mean() > 0.4 if options["window"] == 2 else left_out.mean() < 0.1
    np.testing.assert_array_equal(np.asarray(out).swapaxes(1, 2)[left_out], 0)


class TestCausality:
    """Weights never go to later tokens, but the choice of the clusters looks at them: both are documented."""

    attend = staticmethod(_jitted(is_causal=True, return_weights=True))

    def test_no_weight_goes_to_the_future(self):
        query, _, value = _inputs(s=14, k=4)
        centroids = jnp.asarray(routing_centroids(query.shape))
        _, weights = self.attend(query, query, value, centroids=centroids)
        assert (np.triu(weights, 1) == 0).all()

    def test_the_choice_of_a_cluster_depends_on_the_future(self):
        query, _, value = _inputs(s=14, k=4)
        centroids = jnp.asarray(routing_centroids(query.shape))
        changed = query.at[:, 7:].set(_inputs(seed=1)[0][:, 7:])
        before, after = (self.attend(x, x, value, centroids=centroids)[1] for x in (query, changed))
        assert (np.asarray(before[:, :, :7] > 0) != np.asarray(after[:, :, :7] > 0)).any()


def test_tokens_of_segment_0_take_no_place_in_a_cluster():
    query, _, value = _inputs(s=14, k=4)
    ids = jnp.ones((2, 14), jnp.int32).at[:, 9:].set(0)
    attend = functools.partial(_jitted(), centroids=jnp.asarray(routing_centroids(query.shape)), segment_ids=ids)
    padding = (ids == 0)[..., None, None]
    before = attend(query, query, value)
    np.testing.assert_array_equal(before[:, 9:], 0)
    assert (before[:, :9] != 0).any()
    junk = jnp.where(padding, 1e3 * _inputs(seed=1)[0], query)
    np.testing.assert_array_equal(before, attend(junk, junk, jnp.where(padding, 5.0, value)))


def test_no_gradient_reaches_the_centroids():
    query, key, value = _inputs()
    centroids = jnp.asarray(routing_centroids(query.shape))
    loss = lambda centroids: jnp.square(_jitted()(query, key, value, centroids=centroids)).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(centroids), 0)


def test_update_centroids_equals_the_paper_s_last_lines():
    query, key, _ = _inputs()
    centroids, mask = routing_centroids(query.shape, 5), _padding()
    ids = jnp.ones((2, 14), jnp.int32).at[1, 10:].set(0), jnp.ones((2, 19), jnp.int32)
    centroids[2, 4] = centroids[2, 3]  # gets no token: the first of two equals does
    got = jax.jit(functools.partial(update_centroids, decay=0.75))(
        jnp.asarray(centroids), query, key, mask, segment_ids=ids
    )
    want = centroids.astype(np.float64)
    for head in range(4):
        queries = normalised(query)[np.asarray(ids[0]) != 0][:, head]
        keys = per_query_head(normalised(key), 4)[:, np.asarray(mask[0, 0, 0])][:, :, head].reshape(-1, 8)
        tokens = np.concatenate([queries, keys])
        nearest = (tokens @ centroids[head].T.astype(np.float64)).argmax(axis=-1)
        for cluster in range(5):
            if (nearest == cluster).any():
                want[head, cluster] = 0.75 * want[head, cluster] + 0.25 * tokens[nearest == cluster].mean(axis=0)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(got[2, 4], centroids[2, 4])
    np.testing.assert_array_equal(update_centroids(jnp.asarray(centroids), query, key, decay=1.0), centroids)


def test_learned_clusters_find_the_nearest_keys_more_often_than_random_pairs_would():
    """Eight groups of tokens: online k-means finds them, and clusters then hold most of the nearest keys."""
    random = np.random.default_rng(1)
    groups = random.normal(size=(8, 16))[np.arange(256) % 8]
    x = jnp.asarray(groups + 0.5 * random.normal(size=groups.shape), jnp.float32)[None, :, None]
    first = jnp.asarray(routing_centroids((1, 256, 1, 16), 8))
    step = jax.jit(functools.partial(update_centroids, decay=0.5))
    learned = first
    for _ in range(20):
        learned = step(learned, x, x)
    closeness = normalised(x)[0, :, 0] @ normalised(x)[0, :, 0].T
    nearest = closeness >= np.sort(closeness, axis=-1)[:, -8:-7]
    attend = _jitted(return_weights=True)

    def recall(centroids):
        found = np.asarray(attend(x, x, x, centroids=centroids)[1][0, 0] > 0)
        return found[nearest].mean(), found.mean()

    share, at_random = recall(learned)
    assert share > 6 * at_random  # measured: 0.85 of the nearest keys among 0.11 of the pairs
    assert share > recall(first)[0] + 0.2


def test_operations_grow_as_length_to_the_three_halves():
    def operations(length):
        like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        centroids = jax.ShapeDtypeStruct((1, round(length**0.5), 64), jnp.float32)
        compiled = _jitted().lower(like, like, like, centroids=centroids).compile()
        return compiled.cost_analysis()["flops"]

    slope = np.log(operations(16384) / operations(1024)) / np.log(16)
    assert abs(slope - 1.5) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "at least 1, got 0"),
        ({"centroids": jnp.ones((2, 3, 7))}, r"\(2, 8\), got shape \(2, 3, 7\)"),
        ({"centroids": jnp.ones((2, 8))}, r"got shape \(2, 8\)"),
        ({"bias": jnp.zeros((1, 1, 1, 4))}, r"bias.*\(1, 1, 1, 4\)"),
        ({"mask": jnp.ones((1, 1, 4, 4), bool)}, r"\(1, 1, 4, 4\).*is_causal or segment_ids"),
        ({"segment_ids": jnp.ones((1, 5), jnp.int32)}, r"\(1, 4\).*\(1, 5\)"),
    ],
)
def test_errors_say_what_is_wrong(options, message):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=message):
        routing_attention(x, x, x, **{"centroids": jnp.ones((2, 3, 8)), **options})


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_update_centroids_refuses_a_decay_that_is_none(decay):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=f"got {decay}"):
        update_centroids(jnp.ones((2, 3, 8)), x, x, decay=decay)
