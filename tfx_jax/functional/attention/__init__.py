"""Attention functions of arrays, under the signature of `dot_product_attention`.

Four have other arguments, because they do not compare queries with keys: `kernel_regression`, `decomposable_attention`,
`structured_pooling` and `attention_from_logits`.

Read `dense` first: the formula. `dot_product` is the function around it and chooses between the formula, `chunked`,
which needs linear memory, and the `kernels` of accelerators. `signature` holds argument types, masks, checks and
decorators, `spec` the description of an attention. Every other module is one published attention.
"""

from tfx_jax.functional.attention.additive import (
    ADDITIVE,
    GENERAL,
    additive_attention,
    attentional_vector,
    coverage_loss,
    general_attention,
)
from tfx_jax.functional.attention.aligned import aligned_attention, aligned_position
from tfx_jax.functional.attention.axial import attention_over_axes
from tfx_jax.functional.attention.bigbird import BIGBIRD, bigbird_attention, bigbird_block_mask
from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.cosine import COSINE, cosine_attention
from tfx_jax.functional.attention.decoding import recurrent_decoding
from tfx_jax.functional.attention.decomposable import attend_both, decomposable_attention
from tfx_jax.functional.attention.delta_rules import (
    DELTA_RULE,
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    delta_rule,
    gated_delta_rule,
    kimi_delta_attention,
)
from tfx_jax.functional.attention.dense import attention_from_logits, attention_weights, merge_attention
from tfx_jax.functional.attention.dot_product import CHUNKED, CUDNN, DENSE, FLASH, SPLASH, dot_product_attention
from tfx_jax.functional.attention.factorized import FIXED, STRIDED, fixed_attention, strided_attention
from tfx_jax.functional.attention.flax_attention import flax_attention_fn
from tfx_jax.functional.attention.forgetting import (
    FORGETTING_ATTENTION,
    forgetting_attention,
)
from tfx_jax.functional.attention.hard import HARD, hard_attention, score_function_loss
from tfx_jax.functional.attention.head_mixtures import (
    DIFFERENTIAL_ATTENTION,
    TALKING_HEADS_ATTENTION,
    differential_attention,
    talking_heads_attention,
)
from tfx_jax.functional.attention.kernel_features import (
    FAVOR,
    LINEAR,
    favor_attention,
    linear_attention,
    orthogonal_features,
)
from tfx_jax.functional.attention.kernel_regression import kernel_regression
from tfx_jax.functional.attention.latent import LATENT, latent_attention
from tfx_jax.functional.attention.linear_recurrences import (
    GATED_LINEAR_ATTENTION,
    RETENTION,
    STATE_SPACE_DUALITY,
    gated_linear_attention,
    retention,
    state_space_duality,
)
from tfx_jax.functional.attention.local import LOCAL, WINDOW, local_attention, sliding_window_attention
from tfx_jax.functional.attention.longformer import longformer_attention
from tfx_jax.functional.attention.low_rank import INDUCED, LINFORMER, induced_attention, linformer_attention
from tfx_jax.functional.attention.lsh import LSH, lsh_attention, lsh_num_buckets
from tfx_jax.functional.attention.normalizations import (
    ENTMAX_ATTENTION,
    SIGMOID_ATTENTION,
    STICK_BREAKING_ATTENTION,
    TOPK_ATTENTION,
    entmax_attention,
    sigmoid_attention,
    stick_breaking_attention,
    topk_attention,
)
from tfx_jax.functional.attention.nystrom import NYSTROM, nystrom_attention
from tfx_jax.functional.attention.relative import RELATIVE, relative_attention
from tfx_jax.functional.attention.ring import ring_attention
from tfx_jax.functional.attention.rollout import attention_rollout
from tfx_jax.functional.attention.routing import ROUTING, routing_attention, update_centroids
from tfx_jax.functional.attention.selected import (
    INDEXED,
    MOBA,
    NATIVE_SPARSE,
    index_scores,
    indexed_attention,
    moba_attention,
    native_sparse_attention,
)
from tfx_jax.functional.attention.signature import Bias, Mask, SegmentIds, causal_mask, padding_mask, segment_mask
from tfx_jax.functional.attention.sinkhorn import SINKHORN, sinkhorn_attention
from tfx_jax.functional.attention.spec import AttentionSpec
from tfx_jax.functional.attention.structured import redundancy_penalty, structured_pooling
from tfx_jax.functional.attention.synthesizer import (
    DENSE_SYNTHESIZER_ATTENTION,
    SYNTHESIZER_ATTENTION,
    dense_synthesizer_attention,
    synthesizer_attention,
)
from tfx_jax.functional.attention.transient_global import block_summaries, transient_global_attention

SPECS = {
    spec.name: spec
    for spec in (
        DENSE,
        CHUNKED,
        SPLASH,
        FLASH,
        CUDNN,
        LOCAL,
        WINDOW,
        BIGBIRD,
        LSH,
        FAVOR,
        LINEAR,
        NYSTROM,
        HARD,
        ADDITIVE,
        GENERAL,
        COSINE,
        RELATIVE,
        ROUTING,
        ENTMAX_ATTENTION,
        SIGMOID_ATTENTION,
        STICK_BREAKING_ATTENTION,
        TOPK_ATTENTION,
        DIFFERENTIAL_ATTENTION,
        TALKING_HEADS_ATTENTION,
        FORGETTING_ATTENTION,
        SYNTHESIZER_ATTENTION,
        RETENTION,
        GATED_LINEAR_ATTENTION,
        STATE_SPACE_DUALITY,
        DELTA_RULE,
        GATED_DELTA_RULE,
        KIMI_DELTA_ATTENTION,
        LINFORMER,
        INDUCED,
        DENSE_SYNTHESIZER_ATTENTION,
        STRIDED,
        FIXED,
        SINKHORN,
        MOBA,
        NATIVE_SPARSE,
        INDEXED,
        LATENT,
    )
}
"""All attentions that configurations name."""

__all__ = [
    "SPECS",
    "AttentionSpec",
    "Bias",
    "Mask",
    "SegmentIds",
    "additive_attention",
    "aligned_attention",
    "aligned_position",
    "attend_both",
    "attention_from_logits",
    "attention_over_axes",
    "attention_rollout",
    "attention_weights",
    "attentional_vector",
    "bigbird_attention",
    "bigbird_block_mask",
    "block_summaries",
    "causal_mask",
    "chunked_attention",
    "cosine_attention",
    "coverage_loss",
    "decomposable_attention",
    "delta_rule",
    "dense_synthesizer_attention",
    "differential_attention",
    "dot_product_attention",
    "entmax_attention",
    "favor_attention",
    "fixed_attention",
    "flax_attention_fn",
    "forgetting_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "general_attention",
    "hard_attention",
    "index_scores",
    "indexed_attention",
    "induced_attention",
    "kernel_regression",
    "kimi_delta_attention",
    "latent_attention",
    "linear_attention",
    "linformer_attention",
    "local_attention",
    "longformer_attention",
    "lsh_attention",
    "lsh_num_buckets",
    "merge_attention",
    "moba_attention",
    "native_sparse_attention",
    "nystrom_attention",
    "orthogonal_features",
    "padding_mask",
    "recurrent_decoding",
    "redundancy_penalty",
    "relative_attention",
    "retention",
    "ring_attention",
    "routing_attention",
    "score_function_loss",
    "segment_mask",
    "sigmoid_attention",
    "sinkhorn_attention",
    "sliding_window_attention",
    "state_space_duality",
    "stick_breaking_attention",
    "strided_attention",
    "structured_pooling",
    "synthesizer_attention",
    "talking_heads_attention",
    "topk_attention",
    "transient_global_attention",
    "update_centroids",
]
