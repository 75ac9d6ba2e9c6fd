"""The pre-training of BERT: masked language model and next sentence prediction (Devlin et al., 2019, section 3.1)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.models.bert_heads import BertMaskedLM, BertPretraining
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.loss import LossOutput


def pretraining_loss(
    model: BertPretraining | BertMaskedLM,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    rate: float = 0.15,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Scores the chosen tokens, and no others, and whether the second text of each row follows the first.

    The paper's loss is the sum of two means, over chosen tokens and over rows. The loss returned here over its weight
    is exactly that for the batch given: next sentences are weighed by tokens / rows. If gradients are
    accumulated over parts of a batch, or over the replicas of `jax.pmap`, "batch" is a part: its mean over rows has the
    weight of its share of all chosen tokens, not of all rows, which is the same where the parts have equally many
    tokens per row. A part without any chosen token leaves its next sentences out.

    Args:
      model: a `BertMaskedLM` has no next sentence prediction, so none is in its loss.
      batch: "tokens" and "segments" [B, T] int32, "is_token" [B, T] bool; "targets" [B, T] int32 and "weights" [B, T]
        float32, 1 where a token was chosen, as `tfx_jax.data.masked_lm.mask_tokens` gives them; for the next sentences
        "is_other" [B] int32, 1 where the second text is another, and "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      rate: of `mask_tokens`, which decides how many tokens of a row there is room for, see `num_chosen`. A row with
        more of them makes the loss NaN.
      label_smoothing: of the masked tokens, see `summed_cross_entropy`.
      z_loss_weight: of the masked tokens, see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives for chosen tokens; `num_tokens` counts those read; and, if the model predicts
      next sentences, there is the metric "next_sentence_accuracy" over rows.
    """
    encoded = model.bert(batch["tokens"], batch["segments"], is_token=batch["is_token"], rngs=rngs)
    places = chosen_places(batch["weights"], num_chosen(batch["tokens"].shape[1], rate))
    targets, weights = (jnp.take_along_axis(batch[name], places, axis=1) for name in ("targets", "weights"))
    sequence = jnp.take_along_axis(encoded.sequence, places[:, :, None], axis=1)
    output = summed_cross_entropy(
        model.masked_lm(sequence, model.bert.embedding),
        targets,
        weights,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
    )
    is_complete = jnp.count_nonzero(weights) == jnp.count_nonzero(batch["weights"])
    total, metrics = output.loss + jnp.where(is_complete, 0.0, jnp.nan), output.metrics
    if isinstance(model, BertPretraining):
        logits = model.next_sentence(encoded.pooled)
        other = summed_cross_entropy(logits, batch["is_other"], batch["row_weights"])
        total = total + other.loss * output.weight / jnp.maximum(other.weight, 1.0)
        metrics = metrics | {"next_sentence_accuracy": other.metrics["accuracy"]}
    return LossOutput(total, output.weight, metrics, num_tokens=batch["is_token"].sum(dtype=jnp.float32))


def num_chosen(length: int, rate: float) -> int:
    """The most tokens that `mask_tokens` chooses in a row of `length` at a rate.

    It chooses max(1, round(rate * n)) of the n tokens that it may choose, with ties to even; that does not fall with n,
    and n is at most `length`.

    >>> num_chosen(128, 0.15)
    19
    """
    return max(1, round(rate * length))


def chosen_places(weights: Float[Array, "B T"], count: int) -> Int[Array, "B P"]:
    """The first P = `count` positions of each row that have a weight, then the first that have none.

    A stable sort: unlike `jax.lax.top_k`, which gathers all rows on every device, it leaves each row where it is.

    >>> chosen_places(jnp.array([[0.0, 1.0, 0.0, 1.0]]), 3).tolist()
    [[1, 3, 0]]
    """
    return jnp.argsort(weights == 0, axis=1, stable=True)[:, :count]
