"""Flax NNX modules: each owns parameters and calls `tfx_jax.functional`.

Modules hold variables and Python values only. Random keys (`rngs=None` means evaluation) and caches are arguments and
results of calls, so a module is a pytree that can be passed to `jax.jit`, `jax.grad`, `jax.vmap` and `jax.lax.scan`.
"""

from tfx_jax.nn.attention import AttentionConfig, AttentionOptions, MultiHeadAttention, RotaryConfig
from tfx_jax.nn.auxiliary import AuxiliaryLoss, StepMetric
from tfx_jax.nn.basic import Embedding, FeedForward, LayerNorm, LearnedPositions, Linear, RMSNorm
from tfx_jax.nn.decoding import Decoder, DecodingModel
from tfx_jax.nn.distribution import Distribution, distributed
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer
from tfx_jax.nn.lora import Adapter, Frozen, LoraConfig, adapt, merged
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts, balance_experts
from tfx_jax.nn.stack import scan_layers, stack_layers, unstack_layers

__all__ = [
    "Adapter",
    "AttentionConfig",
    "AttentionOptions",
    "AuxiliaryLoss",
    "Decoder",
    "DecoderLayer",
    "DecodingModel",
    "Distribution",
    "Embedding",
    "EncoderLayer",
    "ExpertsConfig",
    "FeedForward",
    "Frozen",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LoraConfig",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "RMSNorm",
    "RotaryConfig",
    "StepMetric",
    "adapt",
    "balance_experts",
    "distributed",
    "merged",
    "scan_layers",
    "stack_layers",
    "unstack_layers",
]
