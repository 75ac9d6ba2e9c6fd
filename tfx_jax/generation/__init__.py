"""Text generation with any model that has a decoder (`tfx_jax.nn.Decoder`).

Start with `text.Generator`, which continues or answers prompts. `decoding` holds the search options and the driver that
batches inputs; `ctc` decodes the outputs of CTC models.
"""

from tfx_jax.generation.ctc import collapse, prefix_beam_search
from tfx_jax.generation.decoding import BeamSearch, DecodeDriver, DecodingConfig, Greedy, Sampling, Search, decode
from tfx_jax.generation.text import Generator

__all__ = [
    "BeamSearch",
    "DecodeDriver",
    "DecodingConfig",
    "Generator",
    "Greedy",
    "Sampling",
    "Search",
    "collapse",
    "decode",
    "prefix_beam_search",
]
