"""Tokenizers of translations, made in a folder that no one needs afterwards."""

import tempfile

from tfx_jax.data.tokenizers.train import train_or_load_folder

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)


def make_tokenizer(lines, kind="words", vocab_size=0, family="marian"):
    with tempfile.TemporaryDirectory() as folder:
        return train_or_load_folder(folder, lambda: lines, kind=kind, family=family, vocab_size=vocab_size)
