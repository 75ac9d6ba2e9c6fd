"""Attention, layers, losses, positions and search as pure functions of arrays; imports jax, numpy and jaxtyping only.

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
C      tokens per expert                        `capacity`
A      experts per token
W      beam width                               `beam_size`
R      rows of a decoding step, B * W
====== ======================================== ============================

`#` before a letter means that the axis may have size 1 and is then broadcast. A file may use a letter for another axis;
its docstrings then say so.
"""

from tfx_jax.functional import attention
from tfx_jax.functional.attention import *  # noqa: F403 - every attention is a public function here too
from tfx_jax.functional.audio import log_mel, mel_filters, spec_augment, whisper_features
from tfx_jax.functional.convolution import last_tokens, short_convolution
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
from tfx_jax.functional.losses import label_smoothed_cross_entropy, symmetric_kl_divergence, z_loss
from tfx_jax.functional.moe import (
    Routing,
    balanced_bias,
    combine,
    dispatch,
    expert_capacity,
    expert_load,
    load_balancing_loss,
    mixture_of_experts,
    router_z_loss,
    sequence_balancing_loss,
    top_1_routing,
    top_2_routing,
    top_k_routing,
)
from tfx_jax.functional.positions import (
    alibi_bias,
    alibi_score_mod,
    alibi_slopes,
    learned_positions,
    relative_position_bias,
    relative_position_bucket,
    relative_shift,
    rotary_embedding,
    rotary_frequencies,
    sinusoidal_positions,
    t5_score_mod,
)
from tfx_jax.functional.readable_signatures import make_readable as _make_readable
from tfx_jax.functional.reversible import reversible_stack
from tfx_jax.functional.search import (
    BeamInvariant,
    BeamSearchResult,
    beam_search,
    greedy_search,
    sample,
    with_repetition_penalty,
    without_repeated_ngrams,
)

__all__ = [
    "BeamInvariant",
    "BeamSearchResult",
    "Routing",
    "add_bias",
    "alibi_bias",
    "alibi_score_mod",
    "alibi_slopes",
    "balanced_bias",
    "beam_search",
    "combine",
    "dispatch",
    "dropout",
    "expert_capacity",
    "expert_load",
    "feed_forward",
    "greedy_search",
    "int8_product",
    "label_smoothed_cross_entropy",
    "last_tokens",
    "layer_norm",
    "learned_positions",
    "linear",
    "linear_logits",
    "load_balancing_loss",
    "log_mel",
    "lookup",
    "mel_filters",
    "mixture_of_experts",
    "quantize_rows",
    "relative_position_bias",
    "relative_position_bucket",
    "relative_shift",
    "reversible_stack",
    "rms_norm",
    "rotary_embedding",
    "rotary_frequencies",
    "router_z_loss",
    "sample",
    "sequence_balancing_loss",
    "short_convolution",
    "sinusoidal_positions",
    "spec_augment",
    "symmetric_kl_divergence",
    "t5_score_mod",
    "top_1_routing",
    "top_2_routing",
    "top_k_routing",
    "whisper_features",
    "with_repetition_penalty",
    "without_repeated_ngrams",
    "z_loss",
]
__all__ += attention.__all__

_make_readable(globals()[name] for name in __all__)
