"""Examples of one epoch of BERT's pre-training: pairs of segments with masked tokens."""

import itertools
import re
from collections.abc import Collection, Sequence

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.data.objectives.masked_lm import MaskedTokens, mask_tokens
from tfx_jax.data.objectives.next_sentence import NUM_PAIR_SPECIALS, Sentence, next_sentence_pairs, pair_inputs
from tfx_jax.data.sources.lines import is_blank

# The end of a sentence: after its final mark and the closing quotation marks and brackets next to that.
_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])(?![」』）])")
_END_OF_TOKENS = re.compile(r"(?<= [.!?])\s+")
_ROWS_AT_ONCE = 8_192  # rows masked in one call, which limits the memory of random numbers


def split_sentences(text: str, *, is_tokenized: bool = False) -> list[str]:
    r"""Splits a text at line breaks and after full stops, question marks and exclamation marks.

    Abbreviations may be split as well. Next sentence prediction tolerates that, because segments have many sentences.

    Args:
      text: the text.
      is_tokenized: whether punctuation marks are surrounded by spaces, which distinguishes them from abbreviations.

    >>> split_sentences("He came. She said: 'Go away!' He went.\n\n犬がいる。猫もいる。")
    ['He came.', "She said: 'Go away!'", 'He went.', '犬がいる。', '猫もいる。']
    >>> split_sentences("the U.S. army left . they won . ", is_tokenized=True)
    ['the U.S. army left .', 'they won .']
    """
    end = _END_OF_TOKENS if is_tokenized else _END
    sentences = []
    for line in text.split("\n"):
        edges = [0, *(match.end() for match in end.finditer(line)), len(line)]
        sentences += [line[start:stop].strip() for start, stop in itertools.pairwise(edges)]
    return [sentence for sentence in sentences if not is_blank(sentence)]


class PretrainingExamples:
    """The examples of an epoch, with the arrays of `tfx_jax.tasks.text.bert_pretraining.pretraining_loss`.

    "tokens", "token_type_ids", "token_mask", "targets" and "weights" are [T], "next_sentence_label" and "row_weights"
    are []. `lengths` are the lengths T of the examples, [number of examples] int.
    """

    def __init__(
        self, masked: MaskedTokens, token_type_ids: np.ndarray, lengths: np.ndarray, next_sentence_label: np.ndarray
    ):
        """Stores the arrays that `make_examples` computes.

        Args:
          masked: inputs, targets and weights, each [R, max_length], of R examples.
          token_type_ids: 0 for the first segment and 1 for the second, [R, max_length].
          lengths: number of tokens of each example without padding, [R] int.
          next_sentence_label: 0 if the second segment follows the first, 1 if it is random, [R] int32.
        """
        self._masked, self._token_type_ids, self._next_sentence_label = masked, token_type_ids, next_sentence_label
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Returns example `index` without padding."""
        inputs, targets, weights = (array[index, : self.lengths[index]] for array in self._masked)
        return {
            "tokens": inputs,
            "token_type_ids": self._token_type_ids[index, : self.lengths[index]],
            "token_mask": np.ones(len(inputs), bool),
            "targets": targets,
            "weights": weights,
            "next_sentence_label": self._next_sentence_label[index],
            "row_weights": np.array(1, np.float32),
        }


def make_examples(
    documents: Sequence[Sequence[Sentence]],
    rng: np.random.Generator,
    *,
    max_length: int,
    cls_id: int,
    sep_id: int,
    pad_id: int,
    mask_id: int,
    vocab_size: int,
    special_ids: Collection[int],
    rate: float = 0.15,
) -> PretrainingExamples:
    """Makes the examples of one pass over a corpus; pairs, truncation and masked tokens depend on `rng`.

    Args:
      documents: for each document its sentences, each a sequence of token ids.
      rng: random number generator.
      max_length: maximum length of an example, special tokens included.
      cls_id: id of [CLS].
      sep_id: id of [SEP].
      pad_id: id of padding.
      mask_id: id of [MASK].
      vocab_size: number of ids, from which random replacements are sampled.
      special_ids: ids that are never masked and never random replacements.
      rate: fraction of the tokens to predict.

    Raises:
      ValueError: if fewer than two documents have text, none has two sentences, or `max_length` is below 5.
    """
    pairs = list(next_sentence_pairs(documents, rng, max_length=max_length))
    tokens = np.full((len(pairs), max_length), pad_id, np.int32)
    token_type_ids = np.zeros_like(tokens)
    lengths = np.zeros(len(pairs), np.int64)
    layout = {"max_length": max_length, "cls_id": cls_id, "sep_id": sep_id, "pad_id": pad_id}
    for row, (first, second, _) in enumerate(pairs):
        tokens[row], token_type_ids[row] = pair_inputs(first, second, rng=rng, **layout)
        lengths[row] = min(max_length, len(first) + len(second) + NUM_PAIR_SPECIALS)
    masked = [
        mask_tokens(rows, rng, mask_id=mask_id, vocab_size=vocab_size, special_ids=special_ids, rate=rate)
        for rows in np.split(tokens, range(_ROWS_AT_ONCE, len(tokens), _ROWS_AT_ONCE))
    ]
    all_masked = MaskedTokens(*map(np.concatenate, zip(*masked, strict=True)))  # joins the chunks of rows
    next_sentence_label = np.array([not pair.is_next for pair in pairs], np.int32)
    return PretrainingExamples(all_masked, token_type_ids, lengths, next_sentence_label)
