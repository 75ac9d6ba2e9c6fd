"""A Hugging Face folder of a small GPT with random weights and a byte-level tokenizer."""

import numpy as np
import tokenizers
from flax import nnx

from tfx_jax.models import GPT, GPTConfig, hf


def save_small_gpt(folder, draw_model):
    """Writes model, tokenizer and generation_config.json."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet])}
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    pipeline.add_special_tokens(["<|endoftext|>"])
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    config = GPTConfig(vocab_size=len(vocabulary), max_length=64, num_layers=1, d_model=16, num_heads=2)
    model = draw_model(lambda: GPT(config, rngs=nnx.Rngs(0)))
    model.positions.table[...] = 3 * np.asarray(model.positions.table[...])
    hf.save(model, folder)
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
