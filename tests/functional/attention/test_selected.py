"""Attention to selected keys: tiles and chunks against a mask of all pairs, branches, DeepSeek's indexer, errors."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights
from tests.functional.attention.oracles.selected import COMPRESSION
from tests.functional.attention.oracles.sparse import weights_over, window_pairs
from tfx_jax.functional import (
    dot_product_attention,
    fixed_attention,
    index_scores,
    indexed_attention,
    moba_attention,
    native_sparse_attention,
    sinkhorn_attention,
    strided_attention,
)
from tfx_jax.functional.attention import selected_blocks
from tfx_jax.functional.attention.dense import among_largest
from tfx_jax.planning.attentions import ATTENTIONS

B, T, N, K, H = 2, 11, 4, 2, 8
RANDOM = np.random.default_rng(0)
QUERY, KEY = (RANDOM.normal(size=(B, T, heads, H)).astype(np.float32) for heads in (N, K))
GATE = np.zeros((B, T, N, 3), np.float32)
INDEX = {
    "index_query": np.zeros((B, T, 3, 5), np.float32),
    "index_key": np.zeros((B, T, 5), np.float32),
    "index_weight": np.zeros((B, T, 3), np.float32),
}


def test_each_branch_of_native_sparse_attention_by_itself():
    attend = functools.partial(native_sparse_attention, num_blocks=99, window=3, return_weights=True, **COMPRESSION)
    weights = jax.jit(lambda gate: attend(QUERY, KEY, KEY, gate=gate)[1])
    _, of_blocks, near = (weights(np.where(np.arange(3) == i, GATE + 99, -99)) for i in range(3))
    np.testing.assert_allclose(of_blocks, dense_weights(QUERY, KEY, is_causal=True), atol=1e-5)
    pairs = functools.partial(window_pairs, back=2, ahead=0)
    np.testing.assert_allclose(near, weights_over(pairs, QUERY, KEY), atol=1e-5)


def test_moba_reads_so_many_blocks_and_its_own():
    attend = functools.partial(moba_attention, block_size=2, num_blocks=3, is_causal=True, return_weights=True)
    weights = np.asarray(jax.jit(attend)(QUERY, KEY, KEY)[1])
    blocks = np.pad(weights, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(B, N, T, -1, 2).sum(axis=-1) > 0
    assert (blocks.sum(axis=-1) == np.minimum(np.arange(T) // 2 + 1, 3)).all()
    assert blocks[:, :, np.arange(T), np.arange(T) // 2].all()


@pytest.mark.parity
def test_the_indexer_selects_the_keys_of_deepseek_v32():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    config = modeling.DeepseekV32Config(
        hidden_size=16, q_lora_rank=6, index_n_heads=3, index_head_dim=8, qk_rope_head_dim=4, index_topk=4
    )
    torch.manual_seed(0)
    layer = modeling.DeepseekV32Indexer(config, layer_idx=0)
    x, residual = torch.randn(B, T, 16), torch.randn(B, T, 6)
    still = torch.ones(1, T, 4), torch.zeros(1, T, 4)  # no rotation
    past = torch.ones(T, T, dtype=torch.bool).tril()[None]
    with torch.no_grad():
        want = np.sort(layer(x, residual, still, past, torch.arange(T)[None]).numpy())
        query, weight = layer.wq_b(residual).reshape(B, T, 3, 8).numpy(), layer.weights_proj(x).numpy()
        key = layer.k_norm(layer.wk(x)).numpy()
    value = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, 1, T))
    index = {"index_query": query, "index_key": key, "index_weight": weight}
    attend = functools.partial(indexed_attention, num_keys=4, is_causal=True, **index)
    read = np.asarray(jax.jit(attend)(QUERY[:, :, :1], KEY[:, :, :1], value))[:, :, 0] > 0
    for row, t in np.ndindex(B, T):
        if t >= 3:  # fewer keys than four: PyTorch adds some that its mask hides
            np.testing.assert_array_equal(np.flatnonzero(read[row, t]), want[row, t])


LONG = 150
"""Tokens of several tiles of 8 queries and of several chunks of 32."""


def _long(seed=3):
    random = np.random.default_rng(seed)
    shapes = (2, LONG, N, H), (2, LONG, K, H), (2, LONG, K, 6), (2, LONG, N, 6)
    *inputs, cotangent = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return tuple(inputs), cotangent


def _masks(name):
    """No mask; padding in several places; texts of 1 to 40 tokens, with padding between some of them."""
    if name == "nothing hidden":
        return {}
    if name == "padded":
        exists = np.arange(LONG) % 7 != 3
        return {"mask": np.stack([exists, exists & (np.arange(LONG) < 90)])[:, None, None]}
    ends = np.cumsum([1, 40, 3, 17, 2, 4, 33])
    ids = np.searchsorted(ends, np.arange(LONG), side="right") + 1
    ids = np.where((ids == 8) | (np.arange(LONG) == 60), 0, ids)
    return {"segment_ids": np.stack([ids, ids[::-1]]).astype(np.int32)}


def _native_by_weights(query, key, value, **options):
    """Native sparse attention as a product of its weights of all pairs."""
    _, weights = native_sparse_attention(query, key, value, return_weights=True, **options)
    return jnp.einsum("BNTS,BSNU->BTNU", weights, jnp.repeat(value, N // K, axis=2))


def _indexed_by_mask(query, key, value, *, index_query, index_key, index_weight, num_keys, **options):
    """Dense attention to the keys that the indexer selects, with the mask of all pairs."""
    seen = np.tril(np.ones((LONG, LONG), bool))[None, None] & np.asarray(options.pop("mask", True))
    if "segment_ids" in options:
        ids = options.pop("segment_ids")
        seen = seen & ((ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0))[:, None]
    if "bias" in options:
        seen = seen & (options["bias"] != -np.inf)
    is_read = among_largest(index_scores(index_query, index_key, index_weight)[:, None], seen, num_keys)
    return dot_product_attention(query, key, value, options.pop("bias", None), is_read)


def _pair(name):
    """The attention, and the same by an array of all pairs."""
    random = np.random.default_rng(4)
    if name == "moba":
        attend = functools.partial(moba_attention, block_size=8, num_blocks=3, is_causal=True)
        return attend, functools.partial(attend, bias=np.zeros((1, 1, LONG, LONG), np.float32))
    if name == "moba, both ways":
        attend = functools.partial(moba_attention, block_size=8, num_blocks=3)
        return attend, functools.partial(attend, bias=np.zeros((1, 1, LONG, LONG), np.float32))
    if name == "native_sparse":
        options = {"gate": random.normal(size=(2, LONG, N, 3)).astype(np.float32), "num_blocks": 4, "window": 5}
        options |= COMPRESSION
        return tuple(functools.partial(f, **options) for f in (native_sparse_attention, _native_by_weights))
    shapes = {"index_query": (2, LONG, 3, 5), "index_key": (2, LONG, 5), "index_weight": (2, LONG, 3)}
    index = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    attend = functools.partial(indexed_attention, num_keys=6, is_causal=True, **index)
    return attend, functools.partial(_indexed_by_mask, num_keys=6, **index)


def _outputs_and_gradients(attend, inputs, cotangent):
    def both(inputs):
        out, pull_back = jax.vjp(attend, *inputs)
        return out, pull_back(jnp.asarray(cotangent))

    return jax.jit(both)(inputs)


@pytest.mark.parametrize("hidden", ["nothing hidden", "padded", "packed"])
@pytest.mark.parametrize("name", ["moba", "moba, both ways", "native_sparse", "indexed"])
def test_tiles_and_chunks_are_attention_by_a_mask_of_all_pairs(name, hidden, monkeypatch):
    """Outputs and gradients of 150 tokens, in many tiles or chunks, and of texts that are shorter than a block."""
    monkeypatch.setattr(selected_blocks, "TILE_SIZE", 8)
    inputs, cotangent = _long()
    masks = _masks(hidden)
    tokens = masks["mask"][:, 0, 0, :, None, None] if "mask" in masks else True
    got, want = (
        _outputs_and_gradients(functools.partial(attend, **masks), inputs, np.where(tokens, cotangent, 0))
        for attend in _pair(name)
    )
    # The output of padding is zeros in one form, anything in the other.
    got, want = ((np.where(tokens, out, 0), gradients) for out, gradients in (got, want))
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-5)


def test_a_bias_of_pairs_is_cut_into_chunks_with_its_queries():
    inputs, cotangent = _long()
    bias = np.random.default_rng(5).normal(size=(1, N, LONG, LONG)).astype(np.float32)
    bias[..., 40, :30], bias[..., 7] = -np.inf, -np.inf
    got, want = (
        _outputs_and_gradients(
            lambda *x, attend=attend: attend(*x[:3], bias=x[3]), (*inputs, jnp.asarray(bias)), cotangent
        )
        for attend in _pair("indexed")
    )
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-5)


def test_every_block_of_a_text_may_be_chosen_however_many_texts_a_row_has():
    """Texts of one token more than a block have the most blocks that can be chosen."""
    (query, key, value), _ = _long()
    ids = (np.arange(LONG) // 5 + 1)[None].repeat(2, axis=0)
    got = jax.jit(functools.partial(moba_attention, block_size=4, num_blocks=9))(query, key, value, segment_ids=ids)
    want = jax.jit(dot_product_attention)(query, key, value, segment_ids=ids)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_of_blocks_with_equal_scores_the_first_are_read():
    attend = functools.partial(moba_attention, block_size=2, num_blocks=3, is_causal=True, return_weights=True)
    weights = jax.jit(attend)(QUERY, np.zeros_like(KEY), KEY)[1]
    np.testing.assert_array_equal(np.flatnonzero(weights[0, 0, -1]), [0, 1, 2, 3, 10])


@pytest.mark.parametrize("name", ["moba", "native_sparse", "indexed"])
def test_dropout_drops_the_same_weights_in_the_backward_pass(name, monkeypatch):
    monkeypatch.setattr(selected_blocks, "TILE_SIZE", 8)
    (query, key, value), cotangent = _long()
    # All blocks are chosen, so the choice does not change between the ends of a finite difference. The indexer's choice
    # does not depend on queries and keys.
    all_blocks = {} if name == "indexed" else {"num_blocks": LONG}
    whole = functools.partial(_pair(name)[0], **all_blocks)
    attend = functools.partial(whole, dropout_rate=0.3, dropout_rng=jax.random.key(1))
    outputs = jax.jit(lambda *inputs: (attend(*inputs) * cotangent).sum())
    gradients = jax.jit(jax.grad(outputs, argnums=(0, 1, 2)))(query, key, value)
    dropped = np.asarray(jax.jit(attend)(query, key, np.ones_like(value)))
    kept = np.asarray(jax.jit(whole)(query, key, np.ones_like(value)))
    assert np.std(dropped - kept) > 0.05
    np.testing.assert_allclose(dropped.mean(), kept.mean(), rtol=0.05)
    # Outputs are linear in values.
    np.testing.assert_allclose((gradients[2] * value).sum(), outputs(query, key, value), rtol=1e-4, atol=1e-3)
    for index in (0, 1):
        direction = np.random.default_rng(6).normal(size=(query, key)[index].shape).astype(np.float32)
        step = 2e-3
        ends = [
            outputs(*(x + sign * step * direction if i == index else x for i, x in enumerate((query, key))), value)
            for sign in (1, -1)
        ]
        want = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((gradients[index] * direction).sum(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "name",
    ["moba", pytest.param("native_sparse", marks=pytest.mark.slow), pytest.param("indexed", marks=pytest.mark.slow)],
)
def test_memory_is_linear(name):
    """Forward and backward, with the options of the spec's example for 16,384 tokens."""
    attend = functools.partial(ATTENTIONS[name].make(16_384, 1, 64), is_causal=True)

    def temporary(length):
        like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        gradient = jax.grad(lambda *inputs: jnp.square(attend(*inputs)).sum(), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(like, like, like).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(16_384), temporary(32_768)
    assert long < 2.1 * short
    assert long < 32_768**2 / 2  # an eighth of one float32 map


@pytest.mark.parametrize("num_blocks", [2, 6])
def test_logits_are_computed_for_chosen_blocks_only(num_blocks):
    """Each tile has TILE_SIZE * block_size logits; the last tile of a block may be partly empty."""
    length, size = 16_384, 128
    random = np.random.default_rng(0)
    own = np.arange(length) // size * size
    others = random.integers(0, 2**20, (length, num_blocks - 1)) % np.maximum(own // size, 1)[:, None] * size
    chosen = np.sort(np.concatenate([others, own[:, None]], axis=1), axis=1)
    chosen[:, 1:][chosen[:, 1:] == chosen[:, :-1]] = length  # each block once
    options = selected_blocks._Options(size, True, 1.0, 0.0, selected_blocks.TILE_SIZE, num_blocks)

    @jax.jit
    def tiles(chosen):
        query = jnp.zeros((1, 1, length, 1, 1))
        key = jnp.zeros((1, 1, length + size, 1))
        first = jnp.arange(length + size, dtype=jnp.int32)[None, None] // size * size
        pairs = selected_blocks._sort_pairs(chosen.reshape(1, 1, -1), options, length)
        inputs = selected_blocks._Inputs(query, key, key, first)
        return selected_blocks._over_tiles(
            options, inputs, pairs, None, lambda tile, position, rng, number: number + 1, jnp.zeros((), jnp.int32)
        )

    num_pairs = (chosen < length).sum()
    smallest = -(-num_pairs // selected_blocks.TILE_SIZE)
    assert smallest <= tiles(jnp.asarray(chosen, jnp.int32)) <= smallest + length // size


def test_errors_name_the_option():
    native = functools.partial(native_sparse_attention, QUERY, KEY, KEY, num_blocks=2, window=2)
    for call, message in {
        lambda: moba_attention(QUERY, KEY, KEY, block_size=0, num_blocks=1): "block_size must be at least 1, got 0",
        lambda: moba_attention(
            QUERY, KEY[:, 1:], KEY[:, 1:], block_size=2, num_blocks=1
        ): r"as many queries as keys \(10\), got 11",
        lambda: native(gate=GATE, is_causal=False, **COMPRESSION): "causal only, because it compresses the past",
        lambda: native(GATE[..., :1], gate=GATE, **COMPRESSION): "takes no bias: a compressed key belongs to no pair",
        lambda: native(None, np.ones((1, N, 1, T), bool), gate=GATE, **COMPRESSION): "one mask for all heads",
        lambda: native(
            gate=GATE[:, :, :2], **COMPRESSION
        ): r"gate must have shape \(2, 11, 4, 3\), got \(2, 11, 2, 3\)",
        lambda: native(gate=GATE, **COMPRESSION | {"value_mix": np.ones(2, np.float32)}): "value_mix must have shape",
        lambda: indexed_attention(QUERY, KEY, KEY, num_keys=0, **INDEX): "num_keys must be at least 1, got 0",
        lambda: indexed_attention(
            QUERY, KEY, KEY, num_keys=1, **INDEX | {"index_key": INDEX["index_weight"]}
        ): r"index_key must have shape \(2, 11, 5\), got \(2, 11, 3\)",
        lambda: indexed_attention(
            QUERY, KEY, KEY, num_keys=1, **INDEX | {"index_query": INDEX["index_key"]}
        ): r"index_query must have shape \[B, S, J, I\], got \(2, 11, 5\)",
        lambda: strided_attention(QUERY, KEY, KEY, stride=0): "stride must be at least 1, got 0",
        lambda: fixed_attention(QUERY, KEY, KEY, block_size=2, num_summaries=3): "num_summaries in 1 .. block_size",
        lambda: sinkhorn_attention(QUERY, KEY[:, 1:], KEY[:, 1:], block_size=2): "11 queries and 10 keys",
        lambda: sinkhorn_attention(QUERY, KEY, KEY, block_size=2, temperature=0.0): "temperature above 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_index_scores_are_sums_of_positive_products():
    random = np.random.default_rng(1)
    query, key, weight = (
        random.normal(size=shape).astype(np.float32) for shape in ((1, 3, 2, 5), (1, 4, 5), (1, 3, 2))
    )
    want = sum(weight[0, :, j, None] * np.maximum(query[0, :, j].astype(np.float64) @ key[0].T, 0) for j in range(2))
    np.testing.assert_allclose(jax.jit(index_scores)(query, key, weight)[0], want, atol=1e-5)
