"""Text generation with any model that has a decoder (`tfx_jax.nn.Decoder`).

Start with `text.generate`, which continues or answers prompts. `decoding` holds the search options and the driver that
batches inputs; `speech` transcribes with a Whisper; `ctc` decodes the outputs of CTC models.
"""

from tfx_jax.generation.ctc import collapse, prefix_beam_search
from tfx_jax.generation.decoding import BeamSearch, DecodeDriver, DecodingConfig, Greedy, Sampling, Search, decode
from tfx_jax.generation.speech import Transcriber
from tfx_jax.generation.text import GeneratedText, Generator, TextGenerator, generate

__all__ = [
    "BeamSearch",
    "DecodeDriver",
    "DecodingConfig",
    "GeneratedText",
    "Generator",
    "Greedy",
    "Sampling",
    "Search",
    "TextGenerator",
    "Transcriber",
    "collapse",
    "decode",
    "generate",
    "prefix_beam_search",
]
