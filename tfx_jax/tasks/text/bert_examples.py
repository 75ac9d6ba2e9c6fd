"""Examples of texts and text pairs in BERT's format."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.data.objectives.next_sentence import pair_inputs
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer


def bert_example(tokenizer: HFTokenizer, first: Sequence[int], second: Sequence[int], max_length: int) -> Example:
    """Returns one or two texts as [CLS] first [SEP] second [SEP], without padding.

    Args:
      tokenizer: tokenizer with BERT's special tokens.
      first: tokens of the first text.
      second: tokens of the second text; empty for a single text, which has no second [SEP].
      max_length: maximum number of tokens, including special tokens; longer texts are cut.

    Returns:
      "tokens" and "token_type_ids" [T] int32, and "token_mask" [T] bool, all True.
    """
    num_specials = 3 if len(second) else 2  # [CLS] and a [SEP] after each text
    tokens, segments = pair_inputs(
        first,
        second,
        max_length=min(max_length, len(first) + len(second) + num_specials),
        cls_id=cast(int, tokenizer.cls_id),
        sep_id=cast(int, tokenizer.sep_id),
        pad_id=cast(int, tokenizer.pad_id),
    )
    return {"tokens": tokens, "token_type_ids": segments, "token_mask": np.ones(len(tokens), bool)}
