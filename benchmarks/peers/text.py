"""Training of the same model on real text: in our batches, or padded as in PyTorch's tutorials."""

import pathlib
import tempfile
from collections.abc import Iterator
from itertools import islice

import jax
import numpy as np

from benchmarks.peers.ours import config_of, step_and_state
from benchmarks.peers.sizes import PAD_ID
from benchmarks.peers.worker import Workload
from tfx_jax.data.batching import LoaderOptions, pair_batches
from tfx_jax.data.sources.text import PairSource, lines_of, read_pairs
from tfx_jax.data.tokenizers import HFTokenizer, train_or_load_folder

FILES = ("train.en.gz", "train.de.gz")


def training(
    *, model: str, data_dir: str, is_padded: bool, tokens_per_batch: int, num_batches: int, dtype: str = "float32"
) -> Workload:
    """Steps on the first batches of an epoch, counted in target tokens that are not padding.

    Args:
      model: key of `SIZES`.
      data_dir: folder of `FILES`, with BPE applied.
      is_padded: whether batches have a fixed number of random sentences, padded to the longest; otherwise our batches.
      tokens_per_batch: positions of one of our batches; the padded ones have the same tokens on average.
      num_batches: steps of a unit of work.
      dtype: dtype of the computation.
    """
    pairs = read_pairs(*(pathlib.Path(data_dir) / name for name in FILES))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_or_load_folder(
            folder, lambda: lines_of(pairs), kind="words", family="marian", vocab_size=20_000
        )
    options = LoaderOptions(seed=0)
    ours = iter(pair_batches(pairs, tokenizer, options, tokens_per_batch=tokens_per_batch, max_length=128, prefetch=0))
    batch_list = list(islice(ours, num_batches))
    rows = round(np.mean([len(batch["target"]) for batch in batch_list]))
    if is_padded:
        batch_list = list(islice(padded(pairs, tokenizer, rows), num_batches))
    tokens = sum(int((batch["target"] != PAD_ID).sum()) for batch in batch_list)
    positions = sum(batch["target"].size for batch in batch_list)

    config = config_of(model, dtype, vocab_size=tokenizer.vocab_size)
    step, state = step_and_state(config)
    on_device, rng = jax.device_put(batch_list), jax.random.key(1)

    def run() -> None:
        nonlocal state
        for batch in on_device:
            state, _ = step(state, batch, rng)
        jax.block_until_ready(state)

    return Workload(
        run, tokens, {"tokens": tokens, "positions": positions, "rows": rows, "shapes": _shapes(batch_list)}
    )


def padded(pairs: PairSource, tokenizer: HFTokenizer, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of an epoch in random order: `rows` pairs, each side padded to its longest sentence."""
    order = np.random.default_rng(0).permutation(len(pairs))
    for start in range(0, len(order) - rows + 1, rows):
        chosen = [pairs[int(index)] for index in order[start : start + rows]]
        yield {
            side: _pad([tokenizer.encode_with_specials(pair[side]).ids for pair in chosen])
            for side in ("source", "target")
        }


def _pad(sentences: list[list[int]]) -> np.ndarray:
    ids = np.full((len(sentences), max(map(len, sentences))), PAD_ID, np.int32)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence)] = sentence
    return ids


def _shapes(batch_list: list[dict[str, np.ndarray]]) -> list[list[int]]:
    """Returns [rows, source length, target length] of each batch."""
    return [[*batch["source"].shape, batch["target"].shape[1]] for batch in batch_list]
