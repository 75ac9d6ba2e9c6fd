"""Attention and its companions as pure functions of arrays: nothing but jax, numpy and jaxtyping.

Axis letters, the same in every signature, einsum and docstring:

====== ======================================== ============================
letter meaning                                  name in papers and configs
====== ======================================== ============================
B      batch
T      query (target) length
S      key and value (source, memory) length
D      residual width                           `d_model`
N      query heads                              `num_heads`, the paper's h
K      key and value heads; K divides N         `num_kv_heads`
G      queries that share one key head, N / K
H      query and key head size                  `d_k`
U      value head size                          `d_v`
F      hidden width: feed-forward, additive     `d_ff`
V      vocabulary                               `vocab_size`
L      layers, leading axis of stacked params   `num_layers`, the paper's N
W      beam width                               `beam_size`
R      rows of a decoding step, B * W
====== ======================================== ============================

`#` before a letter means that the axis may have size 1 and is then broadcast.
"""

from tfx_jax.functional.additive import additive_attention, attentional_vector, general_attention
from tfx_jax.functional.attention import Bias, Mask, SegmentIds, dot_product_attention, soft_lookup
from tfx_jax.functional.decoding import Decoded, beam_search, greedy_search, sample
from tfx_jax.functional.decomposable import attend_both, decomposable_attention
from tfx_jax.functional.dropout import dropout
from tfx_jax.functional.feed_forward import feed_forward
from tfx_jax.functional.hard import hard_attention, score_function_loss
from tfx_jax.functional.kernel_regression import kernel_regression
from tfx_jax.functional.losses import label_smoothed_cross_entropy
from tfx_jax.functional.masks import causal_mask, padding_mask, segment_mask
from tfx_jax.functional.normalization import layer_norm
from tfx_jax.functional.positions import (
    alibi_bias,
    alibi_slopes,
    learned_positions,
    relative_position_bias,
    relative_position_bucket,
    relative_shift,
    rotary_embedding,
    sinusoidal_positions,
)

__all__ = [
    "Bias",
    "Decoded",
    "Mask",
    "SegmentIds",
    "additive_attention",
    "alibi_bias",
    "alibi_slopes",
    "attend_both",
    "attentional_vector",
    "beam_search",
    "causal_mask",
    "decomposable_attention",
    "dot_product_attention",
    "dropout",
    "feed_forward",
    "general_attention",
    "greedy_search",
    "hard_attention",
    "kernel_regression",
    "label_smoothed_cross_entropy",
    "layer_norm",
    "learned_positions",
    "padding_mask",
    "relative_position_bias",
    "relative_position_bucket",
    "relative_shift",
    "rotary_embedding",
    "sample",
    "score_function_loss",
    "segment_mask",
    "sinusoidal_positions",
    "soft_lookup",
]
