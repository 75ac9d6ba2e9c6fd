"""Decomposable attention for pairs of sentences: attend, compare, aggregate (Parikh et al., 2016).

The premise is the paper's sentence a, the hypothesis its sentence b; words are the tokens of a sentence.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dot_product import dot_product_attention

FeedForward = Callable[[Array], Array]
"""Maps the last axis of an array, such as a feed-forward network."""


def decomposable_attention(
    premise: Float[Array, "B T D"],
    hypothesis: Float[Array, "B S D"],
    premise_mask: Bool[Array, "#B 1 1 T"] | None = None,
    hypothesis_mask: Bool[Array, "#B 1 1 S"] | None = None,
    *,
    attend_fn: FeedForward,
    compare_fn: FeedForward,
    aggregate_fn: FeedForward,
) -> Array:
    r"""Computes the logits of a pair of sentences by comparing aligned words, whatever the word order.

    Attend (`attend_both`), compare v_1i = G([a_i; beta_i]) and v_2j = G([b_j; alpha_j]), aggregate y = H([sum_i v_1i;
    sum_j v_2j]): section 3 of Parikh et al. (2016, https://arxiv.org/abs/1606.01933).

    Args:
      premise: embedded words a, [B, T, D].
      hypothesis: embedded words b, [B, S, D].
      premise_mask: True for words, False for padding, [B, 1, 1, T].
      hypothesis_mask: the same, [B, 1, 1, S].
      attend_fn: the paper's F, from [..., D] to any width; called once per word, not once per pair.
      compare_fn: the paper's G, from [..., 2 D] to any width.
      aggregate_fn: the paper's H, from twice the width of `compare_fn` to logits of the classes.

    Returns:
      Logits, [B, classes], from `aggregate_fn`.

    Raises:
      ValueError: if the shapes of the sentences or of the masks do not match.

    >>> import jax
    >>> same = dict.fromkeys(("attend_fn", "compare_fn", "aggregate_fn"), lambda x: x)
    >>> logits = jax.jit(lambda premise, hypothesis: decomposable_attention(premise, hypothesis, **same))
    >>> logits(jnp.ones((2, 5, 4)), jnp.ones((2, 3, 4))).shape
    (2, 16)
    """
    beta, alpha, *_ = attend_both(premise, hypothesis, premise_mask, hypothesis_mask, attend_fn=attend_fn)
    sums = (
        _sum_of_words(compare_fn(jnp.concatenate([premise, beta], axis=-1)), premise_mask),
        _sum_of_words(compare_fn(jnp.concatenate([hypothesis, alpha], axis=-1)), hypothesis_mask),
    )
    return aggregate_fn(jnp.concatenate(sums, axis=-1))


def attend_both(
    premise: Float[Array, "B T D"],
    hypothesis: Float[Array, "B S D"],
    premise_mask: Bool[Array, "#B 1 1 T"] | None = None,
    hypothesis_mask: Bool[Array, "#B 1 1 S"] | None = None,
    *,
    attend_fn: FeedForward,
) -> tuple[Float[Array, "B T D"], Float[Array, "B S D"], Float[Array, "B T S"], Float[Array, "B S T"]]:
    r"""Aligns every word of two sentences with the words of the other sentence, by soft attention in both directions.

    e_ij = F(a_i) . F(b_j), beta_i = sum_j softmax_j(e_ij) b_j, alpha_j = sum_i softmax_i(e_ij) a_i: equations 1 and 2
    of Parikh et al. (2016, https://arxiv.org/abs/1606.01933). Both use the same scores e.

    Args:
      premise: a, [B, T, D].
      hypothesis: b, [B, S, D].
      premise_mask: True for words, False for padding, [B, 1, 1, T].
      hypothesis_mask: the same, [B, 1, 1, S].
      attend_fn: the paper's F, from [..., D] to any width.

    Returns:
      beta [B, T, D], alpha [B, S, D], and their weights, [B, T, S] and [B, S, T], float32 at least. If one sentence is
      all padding, the words of the other one get zeros.

    Raises:
      ValueError: if the shapes of the sentences or of the masks do not match.

    >>> import jax
    >>> attend = jax.jit(lambda premise, hypothesis: attend_both(premise, hypothesis, attend_fn=lambda x: x))
    >>> [x.shape for x in attend(jnp.ones((2, 5, 4)), jnp.zeros((2, 3, 4)))]
    [(2, 5, 4), (2, 3, 4), (2, 5, 3), (2, 3, 5)]
    """
    words = premise, hypothesis, attend_fn(premise), attend_fn(hypothesis)
    a, b, f_a, f_b = (x[:, :, None] for x in words)  # one head
    beta, beta_weights = dot_product_attention(f_a, f_b, b, mask=hypothesis_mask, scale=1.0, return_weights=True)
    alpha, alpha_weights = dot_product_attention(f_b, f_a, a, mask=premise_mask, scale=1.0, return_weights=True)
    return beta[:, :, 0], alpha[:, :, 0], beta_weights[:, 0], alpha_weights[:, 0]


def _sum_of_words(words: Float[Array, "B T F"], mask: Bool[Array, "#B 1 1 T"] | None) -> Float[Array, "B F"]:
    """Returns the sum over the words of each sentence, without padding."""
    if mask is not None:
        words = jnp.where(mask[:, 0, 0, :, None], words, 0)
    return words.sum(axis=1)
