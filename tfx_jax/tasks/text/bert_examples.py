"""Examples of texts and text pairs in BERT's format."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.data.objectives.next_sentence import pair_inputs
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer


def bert_example(tokenizer: HFTokenizer, first: Sequence[int], second: Sequence[int], max_length: int) -> Example:
    """Returns one or two texts, cut to `max_length`, as "tokens", "token_type_ids" and "token_mask", each [T]."""
    tokens, segments = pair_inputs(
        first,
        second,
        max_length=min(max_length, len(first) + len(second) + (3 if len(second) else 2)),
        cls_id=cast(int, tokenizer.cls_id),
        sep_id=cast(int, tokenizer.sep_id),
        pad_id=cast(int, tokenizer.pad_id),
    )
    return {"tokens": tokens, "token_type_ids": segments, "token_mask": np.ones(len(tokens), bool)}
