"""An epoch of BERT's pre-training: sentences become pairs, and these become examples with hidden tokens."""

import itertools
import re
from collections.abc import Collection, Sequence

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.data.objectives.masked_lm import MaskedTokens, mask_tokens
from tfx_jax.data.objectives.next_sentence import Sentence, next_sentence_pairs, pair_inputs
from tfx_jax.data.sources.lines import is_blank

# Behind a mark that ends sentences, and the quotation marks and brackets that stand beside it.
_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])(?![」』）])")
_END_OF_TOKENS = re.compile(r"(?<= [.!?])\s+")
_ROWS_AT_ONCE = 8_192  # that are masked: bounds the memory that random numbers take


def split_sentences(text: str, *, is_tokenized: bool = False) -> list[str]:
    r"""Cuts a text at line breaks, and behind full stops, question marks and exclamation marks.

    Abbreviations may be cut as well, which next sentence prediction can bear: segments have more than one sentence.

    Args:
      text: to be cut.
      is_tokenized: whether punctuation marks have blanks around them, which tells them from parts of abbreviations.

    >>> split_sentences("He came. She said: 'Go away!' He went.\n\n犬がいる。猫もいる。")
    ['He came.', "She said: 'Go away!'", 'He went.', '犬がいる。', '猫もいる。']
    >>> split_sentences("the U.S. army left . they won . ", is_tokenized=True)
    ['the U.S. army left .', 'they won .']
    """
    end = _END_OF_TOKENS if is_tokenized else _END
    sentences = []
    for line in text.split("\n"):
        places = [0, *(found.end() for found in end.finditer(line)), len(line)]
        sentences += [line[start:stop].strip() for start, stop in itertools.pairwise(places)]
    return [sentence for sentence in sentences if not is_blank(sentence)]


class PretrainingExamples:
    """The examples of an epoch, of the arrays that `tfx_jax.tasks.text.bert_pretraining.pretraining_loss` takes.

    "tokens", "token_type_ids", "token_mask", "targets" and "weights" are [T], "next_sentence_label" and "row_weights"
    are [].
    """

    def __init__(
        self, masked: MaskedTokens, token_type_ids: np.ndarray, lengths: np.ndarray, next_sentence_label: np.ndarray
    ):
        """Wraps the output of `make_examples`, [R, T] and [R]."""
        self._masked, self._token_type_ids, self._next_sentence_label = masked, token_type_ids, next_sentence_label
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
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
    """Goes once through a corpus: other pairs, other cuts and other hidden tokens with each state of `rng`.

    Args:
      documents: tokens of the sentences of each document.
      rng: drawn from; the same state gives the same examples.
      max_length: of an example.
      cls_id: of [CLS].
      sep_id: of [SEP].
      pad_id: of padding.
      mask_id: of [MASK].
      vocab_size: see `tfx_jax.data.objectives.masked_lm.mask_tokens`, as for the two that follow.
      special_ids: never hidden, and never put in the place of a token.
      rate: share of the tokens to predict.

    Raises:
      ValueError: as for `tfx_jax.data.objectives.next_sentence.next_sentence_pairs`.
    """
    pairs = list(next_sentence_pairs(documents, rng, max_length=max_length))
    tokens = np.full((len(pairs), max_length), pad_id, np.int32)
    token_type_ids = np.zeros_like(tokens)
    lengths = np.zeros(len(pairs), np.int64)
    layout = {"max_length": max_length, "cls_id": cls_id, "sep_id": sep_id, "pad_id": pad_id}
    for place, (first, second, _) in enumerate(pairs):
        tokens[place], token_type_ids[place] = pair_inputs(first, second, rng=rng, **layout)
        lengths[place] = min(max_length, len(first) + len(second) + 3)
    masked = [
        mask_tokens(rows, rng, mask_id=mask_id, vocab_size=vocab_size, special_ids=special_ids, rate=rate)
        for rows in np.split(tokens, range(_ROWS_AT_ONCE, len(tokens), _ROWS_AT_ONCE))
    ]
    next_sentence_label = np.array([not pair.is_next for pair in pairs], np.int32)
    return PretrainingExamples(
        MaskedTokens(*map(np.concatenate, zip(*masked, strict=True))), token_type_ids, lengths, next_sentence_label
    )
