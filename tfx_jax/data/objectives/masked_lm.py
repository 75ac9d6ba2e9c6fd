"""The corruption of BERT's masked language model (Devlin et al., 2019, https://arxiv.org/abs/1810.04805, section 3.1).

15 % of the tokens are to be predicted. Of these, 80 % are replaced by [MASK], 10 % by a random token and 10 % stay, so
that the model cannot trust any token it sees (appendix A.1).
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the rest stays


class MaskedTokens(NamedTuple):
    """What a masked language model reads and what it is asked.

    Attributes:
      inputs: the corrupted tokens, int32, in the shape of the tokens given.
      targets: the tokens as they were, int32; they count where `weights` is 1.
      weights: 1 where a token was chosen and is to be predicted, 0 elsewhere, float32.
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
    """Chooses tokens of each row to predict, and corrupts them.

    Of n tokens that may be chosen in a row, round(rate * n) are, but at least one where there are any: as many in each
    row as the authors' program chooses, which counts [CLS] and [SEP] into n. Call it again each epoch: RoBERTa's
    dynamic
    masking (Liu et al., 2019, section 4.1).

    Args:
      ids: tokens, [..., T] int.
      rng: drawn from; the same state gives the same corruption.
      mask_id: of [MASK].
      vocab_size: a random token is any id below it, each as likely, except special ones.
      special_ids: padding, [CLS], [SEP], [MASK] and the like: never chosen, and never the random token.
      rate: share of the tokens to predict.

    Returns:
      Inputs, targets and weights, each [..., T].

    Raises:
      ValueError: if a rate is no share, or all ids are special.

    >>> rng = np.random.default_rng(0)
    >>> masked = mask_tokens(np.arange(10, 18)[None], rng, mask_id=3, vocab_size=20, special_ids={0, 3}, rate=0.25)
    >>> masked.inputs.tolist(), masked.weights.astype(int).tolist()
    ([[10, 11, 1, 3, 14, 15, 16, 17]], [[0, 0, 1, 1, 0, 0, 0, 0]])
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate} is not between 0 and 1")
    specials = np.fromiter(special_ids, np.int64, len(special_ids))
    ordinary = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), specials)
    if not ordinary.size:
        raise ValueError(f"all {vocab_size} ids are special: there is no random token to draw")
    ids = np.asarray(ids, np.int32)
    chosen = _choose(~np.isin(ids, specials), rate, rng)
    fate = rng.random(ids.shape)
    drawn = ordinary[rng.integers(ordinary.size, size=ids.shape)]
    corrupted = np.where(
        fate < _MASK_SHARE, np.int32(mask_id), np.where(fate < _MASK_SHARE + _RANDOM_SHARE, drawn, ids)
    )
    return MaskedTokens(np.where(chosen, corrupted, ids), ids, chosen.astype(np.float32))


def _choose(may: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Chooses a share of the positions in each row where `may` is True, [..., T] bool: those with the lowest lots."""
    available = may.sum(axis=-1, keepdims=True)
    counts = np.minimum(available, np.maximum(1, np.rint(rate * available)) if rate else 0)
    lots = np.where(may, rng.random(may.shape), np.inf)
    ranks = lots.argsort(axis=-1).argsort(axis=-1)
    return ranks < counts
