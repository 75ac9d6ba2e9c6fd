"""Language modeling: the loss of predicting every token from those before it."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from tfx_jax.models.gpt import GPT
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.loss import LossOutput


def language_model_loss(
    model: GPT,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Sums the cross entropy of the tokens that follow (Radford et al., 2018, equation 1).

    Args:
      model: `model(inputs, positions=..., segment_ids=..., rngs=...)` gives the logits of what follows each token.
      batch: "inputs" and "targets" [B, T] int32, "weights" [B, T] float32, and for packed documents "segment_ids" and
        "positions" [B, T] int32, as in `tfx_jax.data.packing`. Padding of weight 0 stands behind the tokens or has
        segment 0.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.
      z_loss_weight: see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives; with segments, `num_tokens` counts those read: the last of a document predicts
      nothing.
    """
    segment_ids = batch.get("segment_ids")
    logits = model(batch["inputs"], positions=batch.get("positions"), segment_ids=segment_ids, rngs=rngs)
    output = summed_cross_entropy(
        logits, batch["targets"], batch["weights"], label_smoothing=label_smoothing, z_loss_weight=z_loss_weight
    )
    if segment_ids is None:
        return output
    return output._replace(num_tokens=(segment_ids != 0).sum(dtype=jnp.float32))
