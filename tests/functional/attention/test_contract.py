"""What every attention promises, so that any of them can be the `attention_fn` of any model.

To add an attention: write its oracle in `oracles/`, from the paper and in float64 NumPy, with a `Case` in its `CASES`.

Compiling is what these tests cost. So an attention is compiled a few times for all of them: `_program` answers whatever
is asked of its values, weights and gradients, and a mask that hides nothing is passed where nothing is hidden.
"""

import functools
import importlib
import pathlib
import pkgutil
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.attentions import KINDS, ON_CPU
from tests.functional.attention import oracles
from tests.functional.attention.case import EVERYTHING, Case
from tests.functional.attention.oracles.additive import additive_weights, covered_weights, general_weights
from tests.functional.attention.oracles.aligned import aligned_weights
from tests.functional.attention.oracles.clustered import routing_centroids, routing_weights
from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.favor import favor_weights, linear_weights
from tests.functional.attention.oracles.hard import most_probable
from tests.functional.attention.oracles.lsh import lsh_weights
from tests.functional.attention.oracles.nystrom import nystrom_weights
from tests.functional.attention.oracles.relative import relative_weights_of_texts
from tests.functional.attention.oracles.sparse import (
    block_pairs,
    local_pairs,
    longformer_weights,
    weights_of_texts,
    window_pairs,
)
from tests.functional.attention.oracles.texts import of_texts
from tests.tiers import slow_but
from tfx_jax.functional import (
    additive_attention,
    aligned_attention,
    bigbird_attention,
    bigbird_block_mask,
    chunked_attention,
    dot_product_attention,
    favor_attention,
    general_attention,
    hard_attention,
    linear_attention,
    local_attention,
    longformer_attention,
    lsh_attention,
    nystrom_attention,
    relative_attention,
    ring_attention,
    routing_attention,
    sliding_window_attention,
)
from tfx_jax.planning.programs import collectives

_projection = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
BIGBIRD = {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 1}


def _bigbird_weights(query, key, *, mask=True, **options):
    """Dense weights over the pattern of the visible tokens of each row, as if there were no others."""
    t = query.shape[1]
    is_token = np.broadcast_to(mask, (len(query), 1, 1, t))[:, 0, 0]
    pairs = np.zeros((len(query), 1, t, t), bool)
    for row, places in enumerate(map(np.flatnonzero, is_token)):
        blocks = bigbird_block_mask(-(-len(places) // 2), **BIGBIRD)
        pairs[row, 0][np.ix_(places, places)] = block_pairs(blocks, len(places), block_size=2)
    return dense_weights(query, key, mask=pairs, **options)


def _is_global(t):
    return np.isin(np.arange(t), (0, 5))


def _longformer(query, *arguments, window=2, **options):
    is_global = jnp.broadcast_to(_is_global(query.shape[1]), query.shape[:2])
    return longformer_attention(query, *arguments, window=window, global_mask=is_global, max_global_tokens=3, **options)


def _transformer_xl(query, key):
    """The parameters of relative attention; eighths, so that bfloat16 holds them exactly."""
    (_, t, n, h), s = query.shape, key.shape[1]
    random = np.random.default_rng(3)
    shapes = {"relative_key": (s + t - 1, n, h), "content_bias": (n, h), "position_bias": (n, h)}
    return {name: np.round(8 * random.normal(size=shape)).astype(np.float32) / 8 for name, shape in shapes.items()}


def _attend_transformer_xl(query, key, *args, **options):
    parameters = {name: jnp.asarray(x) for name, x in _transformer_xl(query, key).items()}
    return relative_attention(query, key, *args, **parameters, **options)


def _transformer_xl_weights(query, key, **options):
    return relative_weights_of_texts(query, key, **_transformer_xl(query, key), **options)


def _longformer_weights(query, key, **options):
    return longformer_weights(query, key, window=2, is_global=_is_global(query.shape[1]), **options)


def _parameters(**shapes):
    random = np.random.default_rng(3)
    return {name: jnp.asarray(random.normal(size=shape) / 2, jnp.float32) for name, shape in shapes.items()}


_ADDITIVE = _parameters(w_query=(8, 5), w_key=(8, 5), v=(5,))
_GENERAL = _parameters(w=(8, 8))


def _coverage(query, key):
    """What earlier queries left of attention at each key; eighths, so that bfloat16 holds them exactly."""
    coverage = np.random.default_rng(4).uniform(0, 3, (1, query.shape[2], query.shape[1], key.shape[1]))
    return {"coverage": np.round(8 * coverage).astype(np.float32) / 8, "w_coverage": np.float32([1.5, -2, 0.5, 1, -1])}


def _covering(query, key, *arguments, **options):
    parameters = _ADDITIVE | {name: jnp.asarray(x) for name, x in _coverage(query, key).items()}
    return additive_attention(query, key, *arguments, **parameters, **options)


def _covering_weights(query, key, **options):
    return covered_weights(query, key, **_ADDITIVE, **_coverage(query, key), **options)


def _covering_weights_of_texts(query, key, **options):
    parameters, shift = _ADDITIVE | _coverage(query, key), key.shape[1] - query.shape[1]

    def oracle(query, key, columns, **options):
        rows = np.maximum(columns[-query.shape[1] :] - shift, 0)
        coverage = parameters["coverage"][:, :, rows[:, None], columns]
        return covered_weights(query, key, **parameters | {"coverage": coverage}, **options)

    return of_texts(oracle, query, key, **options)


def _window_of(sigma):
    """Windows of 7 keys around places that follow from the query's number: whole, broken, and near the last key."""

    def place(t):
        return 1.375 * np.arange(t, dtype=np.float32)[None, None]

    def attend(query, *arguments, number=None, **options):
        """`number` counts the tokens of each text, [B, T]."""
        position = place(query.shape[1])
        if number is not None:
            position, options["key_position"] = 1.375 * number[:, None].astype(jnp.float32), number
        return aligned_attention(query, *arguments, position=position, window=3, sigma=sigma, **options)

    def oracle(query, key, **options):
        return aligned_weights(query, key, position=place(query.shape[1]), window=3, sigma=sigma, **options)

    return attend, oracle


def _routing(query, *arguments, **options):
    centroids = routing_centroids(query.shape)
    return routing_attention(query, *arguments, centroids=jnp.asarray(centroids), window=4, **options)


def _ring(query, key, value, bias=None, mask=None, *, segment_ids=None, return_weights=False, **options):
    """Of whole arrays: half of the sequence on each of two devices; the other devices do the same once more."""
    mesh = jax.make_mesh((2, 4), ("sequence", "copy"), axis_types=(AxisType.Auto, AxisType.Auto))
    attend = functools.partial(ring_attention, axis_name="sequence", chunk_size=4, return_weights=return_weights)
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, "segment_ids": segment_ids}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    sequence = P(None, "sequence")
    specs = {name: P(None, None, None, "sequence") if name in ("bias", "mask") else sequence for name in arrays}
    return jax.shard_map(
        lambda arrays: attend(**arrays, **options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(sequence, P(None, None, "sequence")) if return_weights else sequence,
    )(arrays)


_HERE = (
    Case("dense", dot_product_attention, dense_weights),
    Case(
        "favor",
        functools.partial(favor_attention, projection=_projection, block_size=8),
        functools.partial(favor_weights, projection=_projection),
        is_lean=True,
    ),
    Case("linear", linear_attention, linear_weights, is_lean=True),
    Case(
        "local",
        functools.partial(local_attention, block_size=5),
        functools.partial(weights_of_texts, functools.partial(local_pairs, block_size=5)),
        dense=functools.partial(local_attention, block_size=17),
        is_lean=True,
    ),
    Case(
        "window",
        functools.partial(sliding_window_attention, window=(3, 2), block_size=4),
        functools.partial(weights_of_texts, functools.partial(window_pairs, back=3, ahead=2)),
        dense=functools.partial(sliding_window_attention, window=16),
        is_lean=True,
    ),
    Case(
        "bigbird",
        functools.partial(bigbird_attention, block_size=2, **BIGBIRD),
        _bigbird_weights,
        is_lean=True,
    ),
    Case(
        "longformer",
        _longformer,
        _longformer_weights,
        takes=EVERYTHING - {"bias", "mask", "cross", "causal"},
        dense=functools.partial(_longformer, window=11),
        is_lean=True,
    ),
    Case("relative", _attend_transformer_xl, _transformer_xl_weights),
    Case(
        "additive",
        functools.partial(additive_attention, **_ADDITIVE),
        functools.partial(additive_weights, **_ADDITIVE),
    ),
    Case("coverage", _covering, _covering_weights),
    Case(
        "general",
        functools.partial(general_attention, **_GENERAL),
        functools.partial(general_weights, **_GENERAL),
        dense=functools.partial(general_attention, w=jnp.eye(8) * 8**-0.5),
    ),
    Case(
        "aligned",
        *_window_of(None),
        dense=functools.partial(aligned_attention, position=np.zeros((1, 1, 1), np.float32), window=16),
    ),
    Case(
        "aligned-gaussian",
        *_window_of(1.5),
        dense=functools.partial(aligned_attention, position=np.zeros((1, 1, 1), np.float32), window=16, sigma=1e5),
        is_distribution=False,
    ),
    Case("hard", hard_attention, most_probable),
    # Causal up to rounding only, and equal to dense attention under shared queries and keys: see test_lsh.py.
    Case(
        "lsh",
        functools.partial(lsh_attention, rng=jax.random.key(0), num_hashes=2, num_buckets=4, chunk_size=4),
        functools.partial(lsh_weights, rng=jax.random.key(0), num_hashes=2, num_buckets=4, chunk_size=4),
        takes=frozenset({"segments"}),
        is_lean=True,
    ),
    # Later tokens change which tokens a cluster takes, and attention is on normalized vectors: see test_clustered.py.
    Case(
        "routing",
        _routing,
        functools.partial(routing_weights, window=4),
        is_lean=True,
    ),
    # With so many rounds Z is the inverse, and weights add up to 1. With the paper's few, and where it equals dense
    # attention, which inverts an ill-conditioned matrix and so takes float64: see test_nystrom.py.
    Case(
        "nystrom",
        functools.partial(nystrom_attention, num_landmarks=4, num_iterations=12),
        functools.partial(nystrom_weights, num_landmarks=4, num_iterations=12),
        is_lean=True,
    ),
    Case(
        "chunked",
        functools.partial(chunked_attention, chunk_size=5),
        dense_weights,
        is_lean=True,
    ),
    # Every device has as many queries and as many keys as the others: T != S is in test_ring.py.
    Case("ring", _ring, dense_weights, takes=EVERYTHING - {"bias", "mask", "cross"}, is_lean=True),
)

ATTENTIONS = _HERE + tuple(
    case
    for module in pkgutil.iter_modules(oracles.__path__)
    for case in getattr(importlib.import_module(f"{oracles.__name__}.{module.name}"), "CASES", ())
)

every = pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: case.name)


def one_of_each_kind(cases):
    """Parametrizes over `cases`, all but one of each kind slow: for what wrappers do alike for all attentions."""
    quick = [case for case in cases if case.name in KINDS]
    return pytest.mark.parametrize("case", slow_but(cases, *quick), ids=lambda case: case.name)


def having(feature):
    cases = [case for case in ATTENTIONS if feature in case.features]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def _inputs(case, seed=0, dtype=jnp.float32):
    """Query, key and value of sizes that all differ, as far as the case can take them."""
    random = np.random.default_rng(seed)
    b, t, n = 2, 12, 4
    s = 17 if "cross" in case.features else t
    k = n // 2 if "grouped" in case.features else n
    shapes = (b, t, n, 8), (b, s, k, 8), (b, s, k, 6)
    return tuple(random.normal(size=shape).astype(np.float32).astype(dtype) for shape in shapes)


def _padding(key, hidden=(3, 4, 11)):
    """Hides some keys of every row, and all of them of the last."""
    seen = np.ones((key.shape[0], 1, 1, key.shape[1]), bool)
    seen[:, ..., list(hidden)] = False
    seen[-1] = False
    return seen


def _cotangent(inputs):
    """What the gradients are of: the sum of the output times this, which bfloat16 holds exactly."""
    query, _, value = inputs
    random = np.random.default_rng(2).normal(size=(*query.shape[:3], value.shape[-1]))
    return (np.round(8 * random) / 8).astype(np.float32)


class Answers(NamedTuple):
    """What one run of an attention says."""

    out: Any
    """The output where no weights are asked for."""
    beside_weights: Any
    """The output where they are."""
    weights: Any
    gradients: Any
    """Of query, key and value; None where they were not asked for."""


@functools.cache
def _attend(case):
    """The attention as a function whose trace is shared by all programs that call it alike."""
    return jax.jit(case.attend, static_argnames=("is_causal", "return_weights"))


@functools.cache
def _program(case, is_causal=False, gradients_of=None):
    """`program(inputs, bias=, mask=)` gives Answers, all from one compiled program for each shape and dtype."""
    attend = functools.partial(_attend(case), **({"is_causal": True} if is_causal else {}))

    def answer(inputs, arrays):
        return Answers(attend(*inputs, **arrays), *attend(*inputs, **arrays, return_weights=True), None)

    def loss(inputs, arrays):
        out = getattr(answer(inputs, arrays), gradients_of)
        return (out.astype(jnp.float32) * _cotangent(inputs)).sum()

    @jax.jit
    def program(inputs, arrays):
        gradients = jax.grad(loss)(inputs, arrays) if gradients_of else None
        return answer(inputs, arrays)._replace(gradients=gradients)

    return lambda inputs, **arrays: jax.tree.map(np.asarray, program(inputs, arrays))


def _padded(case, inputs, mask):
    """Answers with keys hidden by `mask`, [B, 1, 1, S], and gradients: in bfloat16 by way of the weights."""
    is_float32 = inputs[0].dtype == np.float32
    return _program(case, gradients_of="out" if is_float32 else "beside_weights")(inputs, mask=mask)


def _equals_oracle(case, answers, inputs, **options):
    query, key, value = inputs
    want = case.oracle(query, key, **options)
    np.testing.assert_allclose(answers.weights, want, atol=1e-5)
    np.testing.assert_allclose(answers.out, mixed(want, value), atol=1e-5)
    assert (answers.out.dtype, answers.weights.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.parametrize("hidden", [(), (3, 4, 11)], ids=["nothing hidden", "padded"])
@every
def test_equals_its_oracle(case, hidden):
    inputs = _inputs(case)
    mask = _padding(inputs[1], hidden) if hidden else np.ones((2, 1, 1, inputs[1].shape[1]), bool)
    _equals_oracle(case, _padded(case, inputs, mask), inputs, mask=mask)


@having("bias")
def test_the_lowest_numbers_are_biases_like_others(case):
    """Many libraries hide by them; here they hide nothing, and leave hidden keys hidden."""
    inputs = _inputs(case)
    mask = np.random.default_rng(1).random((2, 4, 12, 17)) < 0.5
    lowest = np.full(mask.shape, np.finfo(np.float32).min)
    program = _program(case)
    found = program(inputs, mask=mask, bias=lowest)
    wanted = program(inputs, mask=mask, bias=lowest / 4)
    np.testing.assert_allclose(found.out, wanted.out, atol=1e-6)
    np.testing.assert_allclose(found.weights, wanted.weights, atol=1e-6)


@having("causal")
def test_equals_its_oracle_with_causality(case):
    inputs = _inputs(case)
    mask = _padding(inputs[1], hidden=(5,))
    answers = _program(case, is_causal=True)(inputs, mask=mask)
    _equals_oracle(case, answers, inputs, mask=mask, is_causal=True)


@having("bias")
def test_equals_its_oracle_with_a_bias_and_a_mask_of_all_pairs(case):
    inputs = _inputs(case)
    random = np.random.default_rng(1)
    pairs = (2, 4, 12, 17)
    masks = random.random(pairs) < 0.5, np.ones(pairs, bool)
    biases = np.zeros(pairs, np.float32), random.normal(size=pairs).astype(np.float32)
    for mask, bias in zip(masks, biases, strict=True):
        _equals_oracle(case, _program(case)(inputs, bias=bias, mask=mask), inputs, bias=bias, mask=mask)


@pytest.mark.parametrize("case", [case for case in ATTENTIONS if case.name != "ring"], ids=lambda case: case.name)
def test_broadcast_masks_and_biases_are_what_they_broadcast_to(case):
    """Axes of size 1 count as all of their keys, queries, heads and rows."""
    inputs = _inputs(case)
    (b, t, n, _), s = inputs[0].shape, inputs[1].shape[1]
    arrays = [{"mask": np.ones((1, 1, 1, 1), bool)}, {"mask": np.array([True, False]).reshape(b, 1, 1, 1)}]
    full = (b, 1, 1, s)
    if "mask" in case.features:
        full = (b, n, t, s)
        arrays.append({"mask": np.arange(t).reshape(1, 1, t, 1) % 3 > 0})
        arrays.append({"bias": np.linspace(-1, 1, n, dtype=np.float32).reshape(1, n, 1, 1)})
        arrays.append({"bias": np.linspace(-1, 1, t, dtype=np.float32).reshape(1, 1, t, 1)})
    is_causal = {"is_causal": True} if False not in case.modes else {}

    @jax.jit
    def both(inputs, arrays):
        written_out = [jax.tree.map(lambda x: jnp.broadcast_to(x, full), pair) for pair in arrays]
        return [[_attend(case)(*inputs, **pair, **is_causal) for pair in pairs] for pairs in (arrays, written_out)]

    for got, want in zip(*both(inputs, arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


TWICE = [case for case in ATTENTIONS if case.name not in ("lsh", "ring")]
"""Those with second derivatives."""


@one_of_each_kind(TWICE)
def test_second_derivatives_are_finite_where_keys_are_hidden(case):
    inputs = _inputs(case)
    mask, is_causal = _padding(inputs[1]), {"is_causal": True} if "causal" in case.features else {}

    @jax.jit
    def along_ones(inputs):
        def loss(inputs):
            return jnp.square(_attend(case)(*inputs, mask=mask, **is_causal)).sum()

        return jax.jvp(jax.grad(loss), (inputs,), (jax.tree.map(jnp.ones_like, inputs),))[1]

    chex.assert_tree_all_finite(along_ones(inputs))


@every
def test_weights_are_a_distribution_or_nothing_and_asking_for_them_changes_nothing(case):
    inputs = _inputs(case)
    mask = _padding(inputs[1])
    answers = _padded(case, inputs, mask)
    assert (answers.weights[..., ~mask[0, 0, 0]] == 0).all()
    want = case.oracle(*inputs[:2], mask=mask)
    total = want.any(axis=-1) if case.is_distribution else want.sum(axis=-1)  # routing may leave a query out
    np.testing.assert_allclose(answers.weights.sum(axis=-1), total, atol=1e-5)
    np.testing.assert_array_equal(answers.weights[-1], 0)
    np.testing.assert_allclose(answers.beside_weights, answers.out, atol=1e-6)


@every
def test_hidden_keys_change_nothing_bit_for_bit(case):
    query, key, value = _inputs(case)
    mask = _padding(key)
    hidden = ~mask[:, 0, 0, :, None, None]
    before = _padded(case, (query, key, value), mask)
    for junk in np.array([-3.0, 1e4], np.float32):
        key, value = np.where(hidden, junk, key), np.where(hidden, junk, value)
        np.testing.assert_array_equal(before.out, _padded(case, (query, key, value), mask).out)


@having("causal")
def test_the_future_changes_nothing_bit_for_bit(case):
    inputs = _inputs(case)
    attend = functools.partial(_program(case, is_causal=True), mask=np.ones((2, 1, 1, inputs[1].shape[1]), bool))
    before = attend(inputs).out
    for token in (1, 5, 11):
        firsts = [token + x.shape[1] - 12 for x in inputs]  # query t sees keys up to t + S - T
        changed = tuple(x.copy() for x in inputs)
        for x, first in zip(changed, firsts, strict=True):
            x[:, first:] -= 1.5
        after = attend(changed).out
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert not np.array_equal(before[:, token:], after[:, token:])


@every
def test_queries_without_keys_are_zero_with_finite_gradients(case):
    inputs = _inputs(case)
    answers = _padded(case, inputs, _padding(inputs[1]))
    np.testing.assert_array_equal(answers.out[-1], 0)
    chex.assert_tree_all_finite(answers.gradients)
    np.testing.assert_array_equal(answers.gradients[0][-1], 0)


@having("bias")
def test_a_bias_of_minus_infinity_hides_a_key_and_a_row_of_it_is_zero(case):
    """Also where it and a mask hide a row together."""
    inputs = _inputs(case)
    bias, mask = np.zeros((1, 1, 12, 17), np.float32), np.ones((2, 4, 12, 17), bool)
    bias[..., 3, :], bias[..., 5, :9], mask[:, :, 5, 9:] = -np.inf, -np.inf, False
    bias[..., 7, 2] = -np.inf
    out, gradients = _with_gradients(case)((*inputs, bias), mask)
    weights = case.oracle(*inputs[:2], mask=mask & (bias == 0))
    np.testing.assert_allclose(out, mixed(weights, inputs[2]), atol=1e-5)
    np.testing.assert_array_equal(np.asarray(out)[:, [3, 5]], 0)
    chex.assert_tree_all_finite(gradients)
    np.testing.assert_array_equal(np.asarray(gradients[0])[:, [3, 5]], 0)


def _with_gradients(case):
    def loss(arrays, mask):
        out = case.attend(*arrays, mask)
        return jnp.square(out).sum(), out

    compiled = jax.jit(jax.grad(loss, has_aux=True))
    return lambda *arguments: compiled(*arguments)[::-1]


@every
def test_gradients_equal_central_differences_of_the_oracle(case):
    inputs = _inputs(case)
    mask = _padding(inputs[1])
    random = np.random.default_rng(2)
    directions = [random.normal(size=x.shape) for x in inputs]

    def oracle(step):
        query, key, value = (np.asarray(x, np.float64) + step * d for x, d in zip(inputs, directions, strict=True))
        return (mixed(case.oracle(query, key, mask=mask), value) * _cotangent(inputs)).sum()

    want = (oracle(1e-6) - oracle(-1e-6)) / 2e-6
    gradients = _padded(case, inputs, mask).gradients
    got = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@one_of_each_kind(ATTENTIONS)
def test_bfloat16_is_close_and_stays_bfloat16(case):
    inputs = _inputs(case, dtype=jnp.bfloat16)
    mask = _padding(inputs[1])
    answers = _padded(case, inputs, mask)
    assert (answers.out.dtype, answers.beside_weights.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert answers.weights.dtype == jnp.float32
    chex.assert_tree_all_finite(answers)
    query, key, value = (x.astype(np.float32) for x in inputs)
    want = mixed(case.oracle(query, key, mask=mask), value)
    for out in (answers.out, answers.beside_weights):
        np.testing.assert_allclose(out.astype(np.float32), want, atol=3e-2)
    huge = tuple((x.astype(np.float32) * 1e3).astype(jnp.bfloat16) for x in inputs)
    chex.assert_tree_all_finite(_padded(case, huge, mask).out)


@pytest.mark.parametrize("case", [case for case in ATTENTIONS if case.dense], ids=lambda case: case.name)
def test_equals_dense_attention_in_its_limit(case):
    inputs = _inputs(case)
    mask = _padding(inputs[1])
    tokens = mask[:, 0, 0, -inputs[0].shape[1] :, None, None]  # some give padding zeros
    got = jax.jit(lambda *x: [case.dense(*x, mask=mask, is_causal=is_causal) for is_causal in case.modes])(*inputs)
    for out, is_causal in zip(got, case.modes, strict=True):
        want = mixed(dense_weights(*inputs[:2], mask=mask, is_causal=is_causal), inputs[2])
        np.testing.assert_allclose(np.where(tokens, out, 0), np.where(tokens, want, 0), atol=1e-5)


@one_of_each_kind(ATTENTIONS)
def test_vmap_remat_and_scan(case):
    """All three at once, without any mask: output and gradients are those of a plain call that hides nothing."""
    inputs = _inputs(case)
    cotangent = _cotangent(inputs)

    @jax.checkpoint
    def layer(inputs):
        out = jax.vmap(lambda *x: _attend(case)(*(a[None] for a in x))[0])(*inputs)
        return (out * cotangent).sum(), out

    def total(inputs):
        losses, outs = jax.lax.scan(lambda carry, _: (carry, layer(carry)), inputs, length=2)[1]
        return losses.sum(), outs

    gradients, outs = jax.jit(jax.grad(total, has_aux=True))(inputs)
    plain = _padded(case, inputs, np.ones((2, 1, 1, inputs[1].shape[1]), bool))
    for out in outs:
        np.testing.assert_allclose(out, plain.out, atol=1e-5)
    chex.assert_trees_all_close(gradients, tuple(2 * g for g in plain.gradients), rtol=1e-4, atol=1e-4)


@one_of_each_kind(ATTENTIONS)
def test_sharded_over_batch_and_heads(case):
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "copy"), axis_types=(AxisType.Auto,) * 3)
    inputs = _inputs(case)
    placed = (jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in inputs)
    mask = _padding(inputs[1])
    got = _attend(case)(*placed, mask=jax.device_put(mask, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(got, _padded(case, inputs, mask).out, atol=1e-5)


def _loss_and_gradients(case):
    """Output and gradients as a function to trace, causal where that can be: its loops have a state."""
    options = {"is_causal": True} if "causal" in case.features else {}

    def loss(inputs, mask):
        out = case.attend(*inputs, mask=mask, **options)
        return jnp.square(out).sum(), out

    return jax.grad(loss, has_aux=True)


ELSEWHERE = one_of_each_kind([case for case in ATTENTIONS if case.name != "ring"])


@ELSEWHERE
def test_in_shard_map_with_its_checks(case):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    inputs = _inputs(case)
    mask = _padding(inputs[1])
    attend = jax.shard_map(_loss_and_gradients(case), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    gradients, out = jax.eval_shape(attend, inputs, mask)
    assert out.shape == (*inputs[0].shape[:3], inputs[2].shape[-1])
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


@ELSEWHERE
def test_on_explicit_axes(case):
    """The default of `jax.make_mesh`: results are divided as queries are, gradients as what they are of."""
    mesh = jax.make_mesh((2, 2), ("data", "copy"))
    with jax.set_mesh(mesh):
        *inputs, mask = (jax.device_put(x, P("data")) for x in (*_inputs(case), _padding(_inputs(case)[1])))
        gradients, out = jax.eval_shape(_loss_and_gradients(case), tuple(inputs), mask)
        assert [x.sharding.spec[0] for x in (out, *gradients)] == ["data"] * 4
        _, weights = jax.eval_shape(functools.partial(case.attend, return_weights=True), *inputs, mask=mask)
        assert weights.sharding.spec[0] == "data"


def test_explicit_axes_change_no_value():
    case = next(case for case in ATTENTIONS if case.name == "chunked")
    inputs = _inputs(case)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    mask = _padding(inputs[1])
    placed = tuple(jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in inputs)
    placed_mask = jax.device_put(mask, NamedSharding(mesh, P("data")))
    program = _attend(case).lower(*placed, mask=placed_mask).compile()
    assert not collectives(program.as_text())  # jax.sharding.no_collectives would refuse jax.sharding.auto_axes
    got = program(*placed, mask=placed_mask)
    assert got.sharding.spec == P("data", None, "model", None)
    np.testing.assert_allclose(got, _padded(case, inputs, mask).out, atol=1e-5)


# Columns of the tokens of one text each; and of two texts, which begin anywhere, in rows that they share.
PADDED = {
    "right": range(7),
    "left": range(5, 12),
    "between": (0, 1, 4, 5, 6, 9, 11),
    "on both sides and between": (2, 3, 7, 10),
    "nothing": range(12),
}
PACKED = {
    "side by side": (range(7), range(7, 12)),
    "padding between": ((0, 1, 4, 5, 6), (8, 9, 11)),
    "padding between and in front": ((1, 2, 3, 5), (6, 7, 10, 11)),
}
OF_TEXTS = {"coverage": _covering_weights_of_texts}
"""Oracles that know the columns of a text; those that count in tokens do so themselves."""


def _rows(case, num_rows, num_queries=12):
    """Inputs of rows of 12 columns; what padding holds is far from anything else."""
    random = np.random.default_rng(5)
    n, k = 4, 2 if "grouped" in case.features else 4
    shapes = (num_rows, num_queries, n, 8), (num_rows, 12, k, 8), (num_rows, 12, k, 6)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def _equals_each_text_alone(case, inputs, ids, **masks):
    """Compares outputs, causal ones too, with the oracle of each text; `ids` [B, S] number them, 0 is padding."""
    query, key, value = inputs
    numbers = np.zeros(ids.shape, np.int32)
    for row, row_ids in enumerate(ids):
        for text in set(row_ids) - {0}:
            numbers[row, row_ids == text] = np.arange((row_ids == text).sum())
    given = {"number": numbers} if case.name.startswith("aligned") else {}
    key, value = (np.where(ids[:, :, None, None] == 0, 50, x).astype(np.float32) for x in (key, value))

    @jax.jit
    def attend(query, key, value, masks, given):
        return [case.attend(query, key, value, is_causal=mode, **masks, **given) for mode in case.modes]

    oracle = OF_TEXTS.get(case.name, case.oracle)
    if oracle is case.oracle and case.name not in ("relative", "longformer"):
        oracle = functools.partial(of_texts, lambda query, key, columns, **options: case.oracle(query, key, **options))
    has_room = query.shape[1] == 1 and "segment_ids" not in masks  # the query is a token, wherever the last key is
    is_query = (ids[:, -query.shape[1] :] != 0)[:, :, None, None] | has_room
    for out, mode in zip(attend(query, key, value, masks, given), case.modes, strict=True):
        mask = (ids != 0)[:, None, None]
        want = mixed(oracle(query, key, mask=mask, segment_ids=ids, is_causal=mode), value)
        # Weights of Nyström attention may be large and of both signs: its rounding grows with its outputs.
        largest = np.abs(want).max() if case.name == "nystrom" else 1.0
        np.testing.assert_allclose(np.where(is_query, out, 0), np.where(is_query, want, 0), atol=2e-5 * largest)


def _numbered(rows):
    ids = np.zeros((len(rows), 12), np.int32)
    for row, texts in enumerate(rows):
        for text, columns in enumerate(texts):
            ids[row, list(columns)] = (3, 7)[(text + row) % 2]  # whatever number
    return ids


COUNTED = pytest.mark.parametrize("case", ATTENTIONS, ids=lambda x: x.name)


@COUNTED
def test_padding_wherever_it_is_changes_no_token(case):
    ids = _numbered([[columns] for columns in PADDED.values()])
    _equals_each_text_alone(case, _rows(case, len(ids)), (ids != 0).astype(np.int32), mask=(ids != 0)[:, None, None])


@pytest.mark.parametrize(
    "has_mask", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "beside a mask"]
)
@COUNTED
def test_texts_of_a_row_change_no_token_of_each_other(case, has_mask):
    """Nor does padding between their tokens, said by segments or by a mask besides."""
    if "segments" not in case.features:
        pytest.skip("takes no segments")
    ids = _numbered(PACKED.values())
    masks = {"segment_ids": ids}
    if has_mask:
        exists = np.arange(12)[None] % 5 != 3
        masks["mask"] = exists[:, None, None]
        ids = np.where(exists, ids, 0)
    _equals_each_text_alone(case, _rows(case, len(ids)), ids, **masks)


@pytest.mark.parametrize("has_segments", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_queries", [1, pytest.param(4, marks=pytest.mark.slow)])
@COUNTED
def test_decoding_equals_the_text_alone(case, num_queries, has_segments):
    """With padding between what was read, and for one query with a cache's room behind it."""
    if "cross" not in case.features or (has_segments and "segments" not in case.features):
        pytest.skip("self-attention alone, or no segments")
    if case.name.startswith("aligned"):
        pytest.skip("where each query looks is for the caller to say")
    rows = [[columns] for columns in PADDED.values() if num_queries == 1 or max(columns) == 11]
    ids = _numbered(rows + list(PACKED.values()) if has_segments else rows)
    if has_segments:
        query_ids = ids[:, -num_queries:]
        masks = {"segment_ids": (query_ids, ids)}
    else:
        ids = (ids != 0).astype(np.int32)
        masks = {"mask": (ids != 0)[:, None, None]}
    _equals_each_text_alone(case, _rows(case, len(ids), num_queries), ids, **masks)


@pytest.mark.parametrize("case", [c for c in ATTENTIONS if "segments" not in c.features], ids=lambda case: case.name)
def test_packed_texts_are_refused_with_a_line(case):
    inputs = _inputs(case)
    ids = tuple(jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) for x in inputs[:2])
    with pytest.raises(ValueError, match="does not support packed sequences"):
        jax.eval_shape(lambda *inputs, ids: case.attend(*inputs, segment_ids=ids), *inputs, ids=ids)


@every
def test_a_mask_of_all_pairs_is_taken_or_refused(case):
    query, key, value = _inputs(case)
    mask = jax.ShapeDtypeStruct((1, 1, 12, key.shape[1]), jnp.bool_)
    attend = functools.partial(jax.eval_shape, case.attend, query, key, value)
    if "mask" in case.features:
        assert attend(mask=mask).shape == (*query.shape[:3], value.shape[-1])
    else:
        with pytest.raises(ValueError, match=r"is_causal.*segment_ids|segment_ids.*is_causal"):
            attend(mask=mask)


@one_of_each_kind([case for case in ATTENTIONS if case.is_lean])
def test_never_holds_an_array_of_all_pairs(case):
    """Neither forward nor backward: both are in the program whose memory is read.

    In a loop over layers JAX computes before it what does not depend on the layer, such as who sees whom.
    """
    length = 8192
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.bool_)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if "segments" in case.features else None

    def loss(x, mask, ids):
        masks = {"mask": mask} if ids is None else {"mask": mask, "segment_ids": ids}

        def layer(x, weight):
            return x + case.attend(weight * x, x, x, **masks), None

        return jnp.square(jax.lax.scan(layer, x, jnp.ones(2))[0]).sum()

    used = jax.jit(jax.value_and_grad(loss)).lower(x, mask, ids).compile().memory_analysis().temp_size_in_bytes
    assert used < length * length  # a quarter of a float32 for each pair


def test_forward_mode_works_but_for_those_that_the_documentation_names():
    """A backward pass of their own excludes it; it is found when a program is lowered."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "in_your_model.md").read_text()
    (paragraph,) = [text for text in page.split("\n\n") if "`jax.jvp`" in text]
    named = set(re.findall(r"`(\w+)_attention`", paragraph)) - {"dot_product"}

    def is_refused(case):
        query, *fixed = _inputs(case)
        derivative = jax.jit(lambda query: jax.jvp(lambda query: case.attend(query, *fixed), (query,), (query,)))
        try:
            derivative.lower(query)
        except TypeError as error:
            return "forward-mode" in str(error)
        return False

    assert {case.name.removesuffix("-options") for case in ATTENTIONS if is_refused(case)} == named


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)], ids=str)
@every
def test_of_nothing_is_zeros(case, shape):
    """No rows, no queries, no keys: also of weights and of gradients."""
    b, t, s = shape
    if t != s and "cross" not in case.features:
        pytest.skip("queries and keys are of one sequence")
    if case.name == "ring" or (case.name == "relative" and not t + s):
        pytest.skip("each device of a ring has a part; no positions have no distances")
    query, key = (np.ones((b, length, 4, 8), np.float32) for length in (t, s))

    def attend(query, key):
        out, weights = case.attend(query, key, key, return_weights=True)
        return out.sum(), (out, weights)

    shapes = jax.eval_shape(jax.grad(attend, argnums=(0, 1), has_aux=True), query, key)
    assert jax.tree.map(lambda x: x.shape, shapes) == (((b, t, 4, 8), (b, s, 4, 8)), ((b, t, 4, 8), (b, 4, t, s)))
    if t and b:
        np.testing.assert_array_equal(jax.jit(attend)(query, key)[1][0], np.zeros((b, t, 4, 8)))


def test_every_attention_that_configurations_name_is_in_the_contract():
    assert {*ON_CPU} <= {case.name for case in ATTENTIONS}
