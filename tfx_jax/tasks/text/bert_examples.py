"""What all tasks with a BERT share: its tokenizer, and texts as it reads them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.data.objectives.next_sentence import pair_inputs
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.task import Artifacts

Config = TypeVar("Config", bound=ModelConfig)


def setup_bert_tokenizer(
    artifacts: Artifacts, model: Config, texts: Callable[[], Iterable[str]], *, kind: str
) -> tuple[HFTokenizer, Config]:
    """Loads or makes the tokenizer of a workdir, which has BERT's special tokens; see `setup_tokenizer`.

    Raises:
      UserError: as `setup_tokenizer`, and if it has not.
    """
    tokenizer, model = setup_tokenizer(artifacts, model, texts, kind=kind, family="bert")
    if None in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id):
        raise UserError(f"the tokenizer of {artifacts.folder} has not all of BERT's special tokens")
    return tokenizer, model


def bert_example(tokenizer: HFTokenizer, first: Sequence[int], second: Sequence[int], max_length: int) -> Example:
    """Returns one text or two as BERT reads them, cut: "tokens", "token_type_ids" and "token_mask", each [T]."""
    tokens, segments = pair_inputs(
        first,
        second,
        max_length=min(max_length, len(first) + len(second) + (3 if len(second) else 2)),
        cls_id=cast(int, tokenizer.cls_id),
        sep_id=cast(int, tokenizer.sep_id),
        pad_id=cast(int, tokenizer.pad_id),
    )
    return {"tokens": tokens, "token_type_ids": segments, "token_mask": np.ones(len(tokens), bool)}
