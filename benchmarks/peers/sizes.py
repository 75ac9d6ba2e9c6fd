"""Sizes of the models and tokens, the same for all sides; without JAX, which some sides do not import."""

from typing import Any, NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Sizes of a post-norm encoder-decoder Transformer with one embedding for both sides and sinusoidal positions."""

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    dropout_rate: float


SIZES = {
    "small": Sizes(97, 2, 32, 4, 64, 0.1),  # for the tests
    "tiny": Sizes(10_000, 4, 128, 4, 256, 0.3),
    "base": Sizes(37_000, 6, 512, 8, 2048, 0.1),
    "big": Sizes(37_000, 6, 1024, 16, 4096, 0.3),
}


class RecurrentSizes(NamedTuple):
    """Sizes of an encoder-decoder of LSTMs with one embedding for both sides."""

    vocab_size: int
    num_layers: int  # of encoder and decoder each; the encoder's layers are bidirectional
    d_model: int
    dropout_rate: float


RECURRENT_SIZES = {
    "small": RecurrentSizes(97, 2, 32, 0.1),  # for the tests
    "enja": RecurrentSizes(4_000, 1, 256, 0.2),  # experiments/seq2seq_enja.py
    "base": RecurrentSizes(4_000, 2, 512, 0.2),
}


class DecoderSizes(NamedTuple):
    """Sizes of a decoder: a GPT-2 (offsets, learned positions, tied embedding) or a Llama (tied embedding)."""

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    max_length: int


DECODER_SIZES = {
    "gpt2_small": DecoderSizes(97, 2, 32, 4, 128, 64),  # for the tests
    "llama_small": DecoderSizes(97, 2, 32, 4, 64, 64),  # for the tests
    "gpt2": DecoderSizes(50_257, 12, 768, 12, 3_072, 1_024),  # 124 million
    "llama": DecoderSizes(32_000, 12, 768, 12, 2_304, 2_048),  # 117 million
}
LABEL_SMOOTHING = 0.1
ADAM: dict[str, Any] = {"b1": 0.9, "b2": 0.98, "eps": 1e-9}
LAYER_NORM_EPSILON = 1e-5
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2  # those of the tokenizers of translation


def pairs(vocab_size: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source, target) tokens without padding, [rows, length] int32, the same as `tfx_jax.planning` samples."""
    source, target = (
        np.random.default_rng(seed).integers(EOS_ID + 1, vocab_size, (rows, length), np.int32) for seed in (0, 1)
    )
    return source, target
