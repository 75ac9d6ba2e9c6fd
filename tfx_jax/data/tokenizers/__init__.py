"""Tokenizers in Hugging Face's folder format, and their training.

Start with `hf_tokenizer`: the class `HFTokenizer`, and `load_folder_tokenizer`, which reads a folder. `train` makes new
ones, `streaming` decodes token by token, and `chat` turns conversations into prompts.
"""

from tfx_jax.data.tokenizers.chat import ChatTemplate, load_chat_template
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, TokenizerConfig, load_folder_tokenizer
from tfx_jax.data.tokenizers.streaming import TextStream
from tfx_jax.data.tokenizers.train import train_or_load_folder

__all__ = [
    "ChatTemplate",
    "HFTokenizer",
    "TextStream",
    "TokenizerConfig",
    "load_chat_template",
    "load_folder_tokenizer",
    "train_or_load_folder",
]
