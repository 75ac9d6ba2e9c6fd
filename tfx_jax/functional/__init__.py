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
M      random features; landmarks               `num_features`; `num_landmarks`
L      layers, leading axis of stacked params   `num_layers`, the paper's N
E      experts                                  `num_experts`
C      tokens that one expert takes             `capacity`
A      experts that one token goes to
W      beam width                               `beam_size`
R      rows of a decoding step, B * W
====== ======================================== ============================

`#` before a letter means that the axis may have size 1 and is then broadcast.
"""

from tfx_jax.functional.attention import (
    Bias,
    Mask,
    SegmentIds,
    additive_attention,
    aligned_attention,
    aligned_position,
    attend_both,
    attention_from_logits,
    attention_over_axes,
    attention_rollout,
    attention_weights,
    attentional_vector,
    bigbird_attention,
    bigbird_block_mask,
    causal_mask,
    chunked_attention,
    coverage_loss,
    decomposable_attention,
    dot_product_attention,
    favor_attention,
    flax_attention_fn,
    general_attention,
    hard_attention,
    kernel_regression,
    linear_attention,
    local_attention,
    longformer_attention,
    lsh_attention,
    lsh_num_buckets,
    nystrom_attention,
    orthogonal_features,
    padding_mask,
    redundancy_penalty,
    relative_attention,
    ring_attention,
    routing_attention,
    score_function_loss,
    segment_mask,
    sliding_window_attention,
    structured_pooling,
    update_centroids,
)
from tfx_jax.functional.audio import log_mel, mel_filters, spec_augment
from tfx_jax.functional.layers import (
    add_bias,
    dropout,
    feed_forward,
    int8_product,
    layer_norm,
    linear,
    linear_logits,
    lookup,
    quantize_rows,
    rms_norm,
)
from tfx_jax.functional.losses import label_smoothed_cross_entropy, z_loss
from tfx_jax.functional.moe import (
    Routing,
    combine,
    dispatch,
    expert_capacity,
    load_balancing_loss,
    mixture_of_experts,
    router_z_loss,
    top_1_routing,
    top_2_routing,
)
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
from tfx_jax.functional.reversible import reversible_stack
from tfx_jax.functional.search import (
    BeamInvariant,
    BeamSearchResult,
    beam_search,
    greedy_search,
    sample,
    with_repetition_penalty,
)

__all__ = [
    "BeamInvariant",
    "BeamSearchResult",
    "Bias",
    "Mask",
    "Routing",
    "SegmentIds",
    "add_bias",
    "additive_attention",
    "alibi_bias",
    "alibi_slopes",
    "aligned_attention",
    "aligned_position",
    "attend_both",
    "attention_from_logits",
    "attention_over_axes",
    "attention_rollout",
    "attention_weights",
    "attentional_vector",
    "beam_search",
    "bigbird_attention",
    "bigbird_block_mask",
    "causal_mask",
    "chunked_attention",
    "combine",
    "coverage_loss",
    "decomposable_attention",
    "dispatch",
    "dot_product_attention",
    "dropout",
    "expert_capacity",
    "favor_attention",
    "feed_forward",
    "flax_attention_fn",
    "general_attention",
    "greedy_search",
    "hard_attention",
    "int8_product",
    "kernel_regression",
    "label_smoothed_cross_entropy",
    "layer_norm",
    "learned_positions",
    "linear",
    "linear_attention",
    "linear_logits",
    "load_balancing_loss",
    "local_attention",
    "log_mel",
    "longformer_attention",
    "lookup",
    "lsh_attention",
    "lsh_num_buckets",
    "mel_filters",
    "mixture_of_experts",
    "nystrom_attention",
    "orthogonal_features",
    "padding_mask",
    "quantize_rows",
    "redundancy_penalty",
    "relative_attention",
    "relative_position_bias",
    "relative_position_bucket",
    "relative_shift",
    "reversible_stack",
    "ring_attention",
    "rms_norm",
    "rotary_embedding",
    "router_z_loss",
    "routing_attention",
    "sample",
    "score_function_loss",
    "segment_mask",
    "sinusoidal_positions",
    "sliding_window_attention",
    "spec_augment",
    "structured_pooling",
    "top_1_routing",
    "top_2_routing",
    "update_centroids",
    "with_repetition_penalty",
    "z_loss",
]
