"""One file for each paper: its Config above its Model."""

from tfx_jax.models.gpt import GPT, GPTConfig
from tfx_jax.models.transformer import Transformer, TransformerConfig

__all__ = ["GPT", "GPTConfig", "Transformer", "TransformerConfig"]
