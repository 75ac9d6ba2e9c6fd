"""Batches of examples for training and evaluation.

Start with `batches`: `BatchSpec`, `train_batches` and `eval_batches`. `documents` tokenizes plain text onto disk,
`packing` joins documents, `mixture` mixes sources, `pairs` buckets sentence pairs by length, and `text_streams` reads
one text in parallel streams.
"""

from tfx_jax.data.batching.batches import (
    Batch,
    BatchSpec,
    Example,
    ExampleList,
    ExampleSource,
    LoaderOptions,
    ProcessShard,
    eval_batches,
    train_batches,
)
from tfx_jax.data.batching.documents import TextDocuments, encode_documents
from tfx_jax.data.batching.mixture import mixed_epochs
from tfx_jax.data.batching.packing import PackedDocuments, TokenBlocks
from tfx_jax.data.batching.pairs import pair_batches
from tfx_jax.data.batching.text_streams import StreamDataset, TextStreams

__all__ = [
    "Batch",
    "BatchSpec",
    "Example",
    "ExampleList",
    "ExampleSource",
    "LoaderOptions",
    "PackedDocuments",
    "ProcessShard",
    "StreamDataset",
    "TextDocuments",
    "TextStreams",
    "TokenBlocks",
    "encode_documents",
    "eval_batches",
    "mixed_epochs",
    "pair_batches",
    "train_batches",
]
