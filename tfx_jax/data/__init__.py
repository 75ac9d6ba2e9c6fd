"""Data: from files to batches.

`sources` reads files, `tokenizers` turns text into token ids, `objectives` makes pretraining examples, and `batching`
makes batches. Tasks (`tfx_jax.tasks`) join these.
"""
