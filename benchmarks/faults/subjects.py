"""Tiny trainings and tiny Hugging Face folders, to which the faults happen."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.faults.command import made
from tfx_jax.data.tokenizers import train_or_load_folder
from tfx_jax.models import GPT, T5, BertConfig, GPTConfig, T5Config, Transformer, TransformerConfig, hf
from tfx_jax.models.bert import BertClassifier, BertPretraining
from tfx_jax.synthetic.grammar import GrammarPairs

EXPERIMENTS = {
    "translation": "transformer_demo:test",
    "language": "gpt_wikitext2:test",
    "labels": "bert_banking77:test",
}

TINY = ("--config.num_steps=4", "--config.checkpoint_every=2", "--config.log_every=2", "--config.model.num_layers=1")


def training(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the workdir of a finished training of an experiment, with an average of its checkpoints.

    Args:
      name: key of `EXPERIMENTS`.
      folder: folder of all subjects; the training is made only if it is not there.
    """
    workdir = folder / "subjects" / name
    train = ["train", f"--config={EXPERIMENTS[name]}", f"--workdir={workdir}", *TINY]
    return made(workdir, train, ["average", f"--workdir={workdir}"])


_SIZES: dict[str, Any] = {"vocab_size": 300, "num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 16}
_GPT = GPTConfig(**_SIZES, max_length=16)
_BERT = BertConfig(**_SIZES, max_length=16)
_LABELS = BertConfig(**_SIZES, max_length=16, labels=("a", "b", "c"))

# By name: (family of the tokenizer, kind of the tokenizer, function that makes the model).
MODELS: dict[str, tuple[str, str, Callable[[nnx.Rngs], Any]]] = {
    "gpt": ("gpt", "bpe", lambda rngs: GPT(_GPT, rngs=rngs)),
    "bert": ("bert", "wordpiece", lambda rngs: BertPretraining(_BERT, rngs=rngs)),
    "labels": ("bert", "wordpiece", lambda rngs: BertClassifier(_LABELS, rngs=rngs)),
    "t5": ("t5", "unigram", lambda rngs: T5(T5Config(**_SIZES, d_k=4), rngs=rngs)),
    "marian": ("marian", "words", lambda rngs: Transformer(TransformerConfig.marian(**_SIZES), rngs=rngs)),
    "spm": ("marian", "sentencepiece", lambda rngs: Transformer(TransformerConfig.marian(**_SIZES), rngs=rngs)),
}


def model_folder(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns a Hugging Face folder with a model with random parameters and a tokenizer.

    Args:
      name: key of `MODELS`.
      folder: folder of all subjects; the model is made only if it is not there.
    """
    output = folder / "subjects" / f"{name}-hf"
    if not output.exists():
        family, kind, make = MODELS[name]
        graphdef, params = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        random = np.random.default_rng(0)
        random_params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params)
        hf.save(hf.completed(nnx.merge(graphdef, random_params)), output)
        pairs = GrammarPairs("train")
        texts = [pairs[number]["source"] for number in range(300)]
        train_or_load_folder(
            output, lambda: texts, kind=kind, family=family, vocab_size=0 if family == "marian" else 300
        )
    return output
