"""Masking for BERT's masked language model (Devlin et al., 2019, https://arxiv.org/abs/1810.04805, section 3.1).

15 % of the tokens are to be predicted. Of these, 80 % are replaced by [MASK] and 10 % by a random token; 10 % are kept,
so that the model cannot rely on any token that it sees (appendix A.1).
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1  # fractions of the tokens to predict; the rest is kept


class MaskedTokens(NamedTuple):
    """Inputs and targets of a masked language model, all of the shape of the tokens.

    Attributes:
      inputs: corrupted tokens, int32.
      targets: original tokens, int32.
      weights: 1 for tokens to predict, 0 for others, float32.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def mask_tokens(
    ids: np.ndarray,
    rng: np.random.Generator,
    *,
    mask_id: int,
    vocab_size: int,
    special_ids: Collection[int],
    rate: float = 0.15,
) -> MaskedTokens:
    """Samples the tokens of each row to predict, and corrupts them.

    Of n ordinary tokens in a row, round(rate * n) are sampled, but at least one if n > 0. (The authors' program counts
    [CLS] and [SEP] into n.) Call it again in each epoch for the dynamic masking of RoBERTa (Liu et al., 2019, section
    4.1).

    Args:
      ids: tokens, [..., T] int.
      rng: random number generator.
      mask_id: id of [MASK].
      vocab_size: random tokens are uniform over ids below it, without special ones.
      special_ids: ids of padding, [CLS], [SEP], [MASK] and so on, which are never predicted and never random tokens.
      rate: fraction of the ordinary tokens to predict.

    Raises:
      ValueError: if `rate` is not in [0, 1], or all ids are special.

    >>> rng = np.random.default_rng(0)
    >>> masked = mask_tokens(np.arange(10, 18)[None], rng, mask_id=3, vocab_size=20, special_ids={0, 3}, rate=0.25)
    >>> masked.inputs.tolist(), masked.weights.astype(int).tolist()
    ([[10, 11, 1, 3, 14, 15, 16, 17]], [[0, 0, 1, 1, 0, 0, 0, 0]])
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    specials = np.fromiter(special_ids, np.int64, len(special_ids))
    ordinary = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), specials)
    if not ordinary.size:
        raise ValueError(f"all {vocab_size} ids are special, but at least one must be ordinary")
    ids = np.asarray(ids, np.int32)
    is_target = _sample_positions(~np.isin(ids, specials), rate, rng)
    uniform = rng.random(ids.shape)  # decides between [MASK], a random token and the original
    random_tokens = ordinary[rng.integers(ordinary.size, size=ids.shape)]
    corrupted = np.where(
        uniform < _MASK_SHARE,
        np.int32(mask_id),
        np.where(uniform < _MASK_SHARE + _RANDOM_SHARE, random_tokens, ids),
    )
    return MaskedTokens(np.where(is_target, corrupted, ids), ids, is_target.astype(np.float32))


def _sample_positions(is_ordinary: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Samples positions without replacement: in each row, the fraction `rate` of its ordinary positions.

    Args:
      is_ordinary: whether a position may be sampled, [..., T] bool.
      rate: fraction; if positive, at least one position is sampled in each row that has ordinary ones.
      rng: random number generator.

    Returns:
      Whether each position is sampled, [..., T] bool.
    """
    num_ordinary = is_ordinary.sum(axis=-1, keepdims=True)  # [..., 1]
    num_requested = np.maximum(1, np.rint(rate * num_ordinary)) if rate else 0
    counts = np.minimum(num_ordinary, num_requested)  # a row without ordinary positions has none to sample
    # The positions with the smallest of independent uniform numbers are a uniform sample.
    uniform = np.where(is_ordinary, rng.random(is_ordinary.shape), np.inf)
    ranks = uniform.argsort(axis=-1).argsort(axis=-1)  # the second argsort turns an order into ranks
    return ranks < counts
