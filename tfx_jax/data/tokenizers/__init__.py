"""Tokenizers in Hugging Face's folder format, and their training.

Start with `hf_tokenizer`: the class `HFTokenizer`, and `load_folder_tokenizer`, which reads a folder. `train` makes new
ones, and `streaming` decodes token by token.
"""

from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, TokenizerConfig, load_folder_tokenizer
from tfx_jax.data.tokenizers.streaming import TextStream
from tfx_jax.data.tokenizers.train import train_or_load_folder

__all__ = ["HFTokenizer", "TextStream", "TokenizerConfig", "load_folder_tokenizer", "train_or_load_folder"]
