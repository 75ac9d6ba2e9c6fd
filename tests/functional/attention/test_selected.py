"""Attention to selected keys: the branches of native sparse attention, DeepSeek's indexer in PyTorch, and errors."""

import functools

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights
from tests.functional.attention.oracles.selected import COMPRESSION
from tests.functional.attention.oracles.sparse import weights_over, window_pairs
from tfx_jax.functional import (
    fixed_attention,
    index_scores,
    indexed_attention,
    moba_attention,
    native_sparse_attention,
    sinkhorn_attention,
    strided_attention,
)

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
