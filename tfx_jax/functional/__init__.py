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
F      feed-forward width                       `d_ff`
V      vocabulary                               `vocab_size`
L      layers, leading axis of stacked params   `num_layers`, the paper's N
W      beam width                               `beam_size`
R      rows of a decoding step, B * W
====== ======================================== ============================

`#` before a letter means that the axis may have size 1 and is then broadcast.
"""

from tfx_jax.functional.attention import Bias, Mask, SegmentIds, dot_product_attention
from tfx_jax.functional.chunked import chunked_attention
from tfx_jax.functional.decoding import Decoded, beam_search, greedy_search, sample
from tfx_jax.functional.dropout import dropout
from tfx_jax.functional.feed_forward import feed_forward
from tfx_jax.functional.losses import label_smoothed_cross_entropy
from tfx_jax.functional.masks import causal_mask, padding_mask, segment_mask
from tfx_jax.functional.normalization import layer_norm
from tfx_jax.functional.positions import learned_positions, sinusoidal_positions
from tfx_jax.functional.ring import ring_attention

__all__ = [
    "Bias",
    "Decoded",
    "Mask",
    "SegmentIds",
    "beam_search",
    "causal_mask",
    "chunked_attention",
    "dot_product_attention",
    "dropout",
    "feed_forward",
    "greedy_search",
    "label_smoothed_cross_entropy",
    "layer_norm",
    "learned_positions",
    "padding_mask",
    "ring_attention",
    "sample",
    "segment_mask",
    "sinusoidal_positions",
]
