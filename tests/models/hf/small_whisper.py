"""A Hugging Face folder of a small Whisper with random weights, which reads one second, and its tokenizer of words."""

import functools
import json

import tokenizers
from flax import nnx

from tests.nn.programs import draw
from tfx_jax.models import Whisper, WhisperConfig, hf

NAMES = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|haw|>", "<|translate|>", "<|transcribe|>"]
NAMES += ["<|nospeech|>", "<|notimestamps|>"]
WORDS = [f"w{number}" for number in range(40)]
V, FIRST_WORD = len(NAMES) + len(WORDS), len(NAMES)
SIZES = {"vocab_size": V, "num_bands": 20, "source_positions": 50, "learned_positions": 24, "d_model": 24}
SIZES |= {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 3, "d_ff": 40, "pad_id": 0, "start_id": 1, "eos_id": 0}
GENERATION = {
    "suppress_tokens": [FIRST_WORD + 3, FIRST_WORD + 5, 7],
    "begin_suppress_tokens": [0, FIRST_WORD + 1],
    "lang_to_id": {"<|en|>": 2, "<|de|>": 3, "<|haw|>": 4},
    "task_to_id": {"translate": 5, "transcribe": 6},
    "no_timestamps_token_id": 8,
    "is_multilingual": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "decoder_start_token_id": 1,
}


@functools.cache
def make_model():
    return draw(lambda: Whisper(WhisperConfig(**SIZES), rngs=nnx.Rngs(0)), stddev=0.3)


def save_small_whisper(folder):
    """Writes model, tokenizer and generation_config.json."""
    hf.save(make_model(), folder)
    vocabulary = {name: index for index, name in enumerate([*NAMES, *WORDS])}
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=WORDS[0]))
    pipeline.add_special_tokens(NAMES)
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
