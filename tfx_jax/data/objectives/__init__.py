"""Pretraining objectives as transformations of token ids: masking, next sentences, span corruption."""

from tfx_jax.data.objectives.bert_pretraining import PretrainingExamples, make_examples
from tfx_jax.data.objectives.masked_lm import mask_tokens
from tfx_jax.data.objectives.next_sentence import next_sentence_pairs, pair_inputs
from tfx_jax.data.objectives.span_corruption import CorruptedTexts, corrupt_spans, random_spans, span_corruption_lengths

__all__ = [
    "CorruptedTexts",
    "PretrainingExamples",
    "corrupt_spans",
    "make_examples",
    "mask_tokens",
    "next_sentence_pairs",
    "pair_inputs",
    "random_spans",
    "span_corruption_lengths",
]
