"""LSH attention against section 2 of Kitaev et al. (2020), beyond what test_contract.py asks of every attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.lsh import lsh_weights
from tfx_jax.functional import lsh_attention, lsh_num_buckets
from tfx_jax.functional.attention.lsh import _buckets, _rotations

RNG = jax.random.key(3)
LENGTH = 37  # a prime: no chunk size divides it


def _inputs(length=LENGTH, batch=2, heads=2, seed=0):
    random = np.random.default_rng(seed)
    shapes = (batch, length, heads, 8), (batch, length, heads, 6)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


@functools.cache
def _jitted(**options):
    return jax.jit(lambda x, value, **arrays: lsh_attention(x, x, value, rng=RNG, **options, **arrays))


def _small(x, value, mask=None, *, is_causal):
    """Output and weights, by one program with a mask whatever the mask is."""
    mask = np.ones((2, 1, 1, LENGTH), bool) if mask is None else mask
    return map(np.asarray, _jitted(**SMALL, is_causal=is_causal, return_weights=True)(x, value, mask=mask))


def _padding(length=LENGTH, hidden=(0, 7, 8, 30)):
    mask = np.ones((2, 1, 1, length), bool)
    mask[0, ..., list(hidden)] = False
    return mask


SMALL = {"num_hashes": 3, "num_buckets": 4, "chunk_size": 5}


@pytest.mark.parametrize(
    "options",
    [
        {**SMALL, "is_causal": True},
        {**SMALL, "num_hashes": 2, "num_buckets": (2, 4), "scale": 1.5},
        {**SMALL, "num_hashes": 1, "num_buckets": 2, "chunk_size": 1, "is_causal": True},
    ],
    ids=["causal", "factored", "chunk of one"],
)
def test_equals_its_oracle(options):
    x, value = _inputs()
    mask = _padding()
    out, weights = _jitted(**options, return_weights=True)(x, value, mask=mask)
    want = lsh_weights(x, x, rng=RNG, mask=mask, **options)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_bucket_is_dense_attention_with_shared_queries_and_keys(is_causal):
    x, value = _inputs()
    mask = _padding()
    out = _jitted(num_hashes=4, num_buckets=1, chunk_size=64, is_causal=is_causal)(x, value, mask=mask)
    keys = x / np.linalg.norm(x, axis=-1, keepdims=True)
    others = mask & ~np.eye(LENGTH, dtype=bool)[None, None]
    want = mixed(dense_weights(x, keys, mask=others, is_causal=is_causal), value)
    if is_causal:  # the first token that may be seen has no one before it
        want[0, 1], want[1, 0] = value[0, 1], value[1, 0]
    is_visible, out = mask[:, 0, 0], np.asarray(out)
    np.testing.assert_allclose(out[is_visible], want[is_visible], atol=1e-5)
    np.testing.assert_array_equal(out[~is_visible], 0)


class TestCausality:
    """The published rule leaks what lies in reach; ours must not."""

    def _before_and_after(self, is_causal, token):
        x, value = _inputs()
        attend = functools.partial(_small, is_causal=is_causal)
        later = (np.arange(LENGTH) >= token)[None, :, None, None]
        other, other_value = _inputs(seed=1)
        pairs = attend(x, value), attend(np.where(later, other, x), np.where(later, other_value, value))
        return [(out[:, :token], weights[:, :, :token, :token]) for out, weights in pairs]

    @pytest.mark.parametrize("token", [9, 20, 36])
    def test_the_future_changes_nothing_but_the_order_of_summation(self, token):
        (out, weights), (out_after, weights_after) = self._before_and_after(True, token)
        np.testing.assert_array_equal(weights > 0, weights_after > 0)
        np.testing.assert_allclose(weights, weights_after, atol=1e-6)
        np.testing.assert_allclose(out, out_after, atol=1e-6)

    def test_chunks_as_published_leak_what_is_in_reach(self):
        (_, weights), (_, weights_after) = self._before_and_after(False, 20)
        assert (np.tril(weights > 0) != np.tril(weights_after > 0)).any()

    def test_no_weight_goes_to_the_future(self):
        _, weights = _small(*_inputs(), is_causal=True)
        assert (np.triu(weights, 1) == 0).all()
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("by", ["mask", "segment_ids"])
def test_what_a_hidden_token_is_changes_no_other_bit(by):
    x, value = _inputs()
    mask = _padding()
    arrays = {by: mask if by == "mask" else mask[:, 0, 0].astype(np.int32)}
    attend = _jitted(**SMALL)
    hidden = ~mask[:, 0, 0, :, None, None]
    before = np.asarray(attend(x, value, **arrays))
    junk, junk_value = np.where(hidden, np.float32(1e4), x), np.where(hidden, np.float32(-7.0), value)
    np.testing.assert_array_equal(before, attend(junk, junk_value, **arrays))
    np.testing.assert_array_equal(before[hidden[..., 0, 0]], 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_segments_are_attended_to_as_if_alone(is_causal):
    """Wherever they begin: chunks are cut from each one's own tokens."""
    x, value = _inputs()
    segment = np.digitize(np.arange(LENGTH), [7, 23, 24]) * 7 + 2
    attend = _jitted(**SMALL, is_causal=is_causal, return_weights=True)
    out, weights = attend(x, value, segment_ids=np.broadcast_to(segment.astype(np.int32), (2, LENGTH)))
    for part in (slice(7), slice(7, 23), slice(23, 24), slice(24, None)):
        alone = lsh_weights(x[:, part], x[:, part], rng=RNG, is_causal=is_causal, **SMALL)
        np.testing.assert_allclose(np.asarray(weights)[:, :, part, part], alone, atol=1e-5)
        np.testing.assert_allclose(np.asarray(out)[:, part], mixed(alone, value[:, part]), atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_a_text_is_that_alone_wherever_its_padding_is(chunk_size, is_causal):
    """Also where the array is shorter than a chunk and the padded one is not."""
    options = SMALL | {"chunk_size": chunk_size, "is_causal": is_causal}
    x, value = _inputs()
    wide, attend = 80, _jitted(**options, return_weights=True)
    random = np.random.default_rng(2)
    alone = attend(x, value)
    for places in (np.arange(LENGTH), np.arange(LENGTH) + 43, np.sort(random.permutation(wide)[:LENGTH])):
        padded = [random.normal(size=(2, wide, *a.shape[2:])).astype(np.float32) for a in (x, value)]
        for whole, part in zip(padded, (x, value), strict=True):
            whole[:, places] = part
        mask = np.isin(np.arange(wide), places)[None, None, None]
        out, weights = map(np.asarray, attend(*padded, mask=mask))
        np.testing.assert_allclose(out[:, places], alone[0], atol=1e-5)
        np.testing.assert_allclose(weights[:, :, places[:, None], places], alone[1], atol=1e-5)


def test_values_of_fewer_heads_are_shared():
    x, value = _inputs(heads=4)
    attend = jax.jit(functools.partial(lsh_attention, rng=RNG, **SMALL))
    whole = attend(x, x, np.repeat(value[:, :, :2], 2, axis=2))
    np.testing.assert_array_equal(attend(x, x[:, :, :2], value[:, :, :2]), whole)


def test_a_token_that_sees_nobody_attends_to_itself():
    x, value = _inputs(length=1)
    out, weights = _jitted(**SMALL, return_weights=True)(x, value)
    np.testing.assert_array_equal(out, value)
    np.testing.assert_array_equal(weights, 1)


def test_two_buckets_divide_tokens_as_often_as_a_random_plane_does():
    """With two buckets argmax([xr; -xr]) is the side of a plane: shared with probability 1 - angle / pi."""
    angles = np.array([0.0, 0.3, 1.0, 2.0, np.pi])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)[None, :, None]
    rounds = 4000
    hashed = jax.jit(lambda rng, vectors: _buckets(vectors, _rotations(rng, rounds, 1, 2, (2,))))
    buckets = np.asarray(hashed(RNG, vectors))[:, 0, :, 0]
    share = (buckets == buckets[:, :1]).mean(axis=0)
    want = 1 - angles / np.pi
    assert (np.abs(share - want) <= 3.5 * np.sqrt(want * (1 - want) / rounds) + 1e-3).all()


def test_finds_the_nearest_keys_more_often_than_random_pairs_would():
    x, value = _inputs(length=256, batch=1)
    _, weights = _jitted(num_hashes=4, num_buckets=16, chunk_size=32, return_weights=True)(x, value)
    found = np.asarray(weights)[0] > 0
    unit = x[0] / np.linalg.norm(x[0], axis=-1, keepdims=True)
    closeness = np.einsum("tnh,snh->nts", unit, unit) - 2 * np.eye(256)
    nearest = closeness >= np.sort(closeness, axis=-1)[..., -4:-3]
    assert found[nearest].mean() > 2.5 * found.mean()


def test_dropout_keeps_the_mean_and_repeats_with_its_key():
    x, value = _inputs(length=12, batch=1)
    options = {"rng": RNG, "num_hashes": 2, "num_buckets": 2, "chunk_size": 4}

    @jax.jit
    def draw(rng):
        keys = jax.random.split(rng, 500)
        keys = keys.at[-1].set(keys[3])
        attend = functools.partial(lsh_attention, x, x, value, dropout_rate=0.25, **options)
        return jax.vmap(lambda rng: attend(dropout_rng=rng))(keys)

    *many, again = np.asarray(draw(jax.random.key(0)))
    np.testing.assert_array_equal(many[3], again)
    error = np.mean(many, axis=0) - mixed(lsh_weights(x, x, **options), value)
    assert (np.abs(error) <= 5 * np.std(many, axis=0) / 499**0.5 + 1e-6).all()
    assert np.std(many, axis=0).mean() > 0.1


@pytest.mark.parametrize(
    ("length", "chunk_size", "factors"),
    [
        (10, 64, (1,)),
        (32, 64, (1,)),
        (33, 64, (2,)),
        (1000, 64, (32,)),
        (4096, 64, (128,)),
        (4097, 64, (16, 16)),
        (65536, 64, (32, 64)),
    ],
)
def test_the_usual_buckets_fill_at_most_half_a_chunk(length, chunk_size, factors):
    assert lsh_num_buckets(length, chunk_size=chunk_size) == factors
    assert length / np.prod(factors) <= chunk_size / 2


def test_training_on_65536_tokens_takes_memory_for_a_few_arrays_of_a_round():
    length, chunk_size = 65536, 64
    like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
    options = {"rng": RNG, "num_buckets": lsh_num_buckets(length, chunk_size=chunk_size), "is_causal": True}
    loss = lambda x, value: jnp.square(lsh_attention(x, x, value, **options)).sum()  # noqa: E731
    used = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(like, like).compile().memory_analysis().temp_size_in_bytes
    logits_of_a_round = 4 * length * 2 * chunk_size
    assert used < 24 * logits_of_a_round < length**2  # a 20th of one float32 for each pair


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 3}, "1 or even.*got 3"),
        ({"num_buckets": (4, 5)}, r"1 or even.*got \(4, 5\)"),
        ({"num_buckets": 0}, "1 or even.*got 0"),
        ({"num_hashes": 0}, "at least 1, got 0 and 64"),
        ({"chunk_size": 0}, "at least 1, got 4 and 0"),
        ({"bias": np.zeros((1, 1, 1, 4), np.float32)}, r"bias.*\(1, 1, 1, 4\)"),
        ({"mask": np.ones((1, 2, 1, 4), bool)}, r"\(1, 2, 1, 4\).*is_causal or segment_ids"),
        ({"mask": np.ones((1, 1, 1, 4), np.float32)}, "boolean"),
        ({"segment_ids": np.ones((1, 5), np.int32)}, r"\(1, 4\).*\(1, 5\)"),
        ({"segment_ids": (np.ones((1, 4), np.int32),) * 2}, "one array"),
        ({"dropout_rate": 1.0, "dropout_rng": RNG}, "rate"),
    ],
)
def test_errors_say_what_is_wrong(options, message):
    x = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: lsh_attention(x, x, x, **{"rng": RNG, "num_buckets": 2} | options), x)


def test_cross_attention_is_refused():
    x, others = np.ones((1, 4, 2, 8), np.float32), np.ones((1, 5, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"LSH attention is self-attention .* got 4 queries and 5 keys"):
        lsh_attention(x, others, others, rng=RNG, num_buckets=2)


def test_segments_do_not_see_each_other_though_all_share_one_bucket():
    x, value = (np.asarray(array) for array in _inputs())
    ids = np.broadcast_to(np.where(np.arange(LENGTH) < 16, 2, 9).astype(np.int32), (2, LENGTH))
    attend = _jitted(num_hashes=1, num_buckets=1, chunk_size=LENGTH)
    other = np.where(ids[..., None, None] == 9, -value, value)
    before, after = (np.asarray(attend(x, v, segment_ids=ids)) for v in (value, other))
    np.testing.assert_array_equal(before[:, :16], after[:, :16])
    np.testing.assert_allclose(before[:, 16:], -after[:, 16:])


def test_forward_mode_is_refused():
    x, value = _inputs()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(lambda x: jax.jvp(lambda x: lsh_attention(x, x, value, rng=RNG, num_buckets=2), (x,), (x,))).lower(x)
