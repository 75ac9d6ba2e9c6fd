"""One file for each paper: its Config above its Model."""

from tfx_jax.models.gpt import GPT, GPTConfig
from tfx_jax.models.t5 import T5, T5Config
from tfx_jax.models.transformer import Transformer, TransformerConfig

__all__ = ["GPT", "T5", "GPTConfig", "T5Config", "Transformer", "TransformerConfig"]
