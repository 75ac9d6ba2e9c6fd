"""Classification of texts and of pairs of texts (Devlin et al., 2019, section 4.1): loss, prediction and scores."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.models.bert_heads import BertClassifier
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.loss import LossOutput


class ClassScores(NamedTuple):
    """How well texts are classified, in percent.

    Attributes:
      accuracy: share of the predictions that are right.
      macro_f1: mean over classes of the harmonic mean of precision and recall, each class alike however rare.
    """

    accuracy: float
    macro_f1: float


def classification_loss(
    model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None, *, label_smoothing: float = 0.0
) -> LossOutput:
    """Sums the cross entropy of the classes of texts.

    Args:
      model: gives each row the logits of its classes.
      batch: "tokens" and "segments" [B, T] int32, "is_token" [B, T] bool, "label" [B] int32, the id of a class, and
        "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives for rows; `num_tokens` counts those read.
    """
    logits = model(batch["tokens"], batch["segments"], is_token=batch["is_token"], rngs=rngs)
    output = summed_cross_entropy(logits, batch["label"], batch["row_weights"], label_smoothing=label_smoothing)
    return output._replace(num_tokens=batch["is_token"].sum(dtype=jnp.float32))


def predict_classes(model: BertClassifier, batch: dict[str, Array]) -> Int[Array, " B"]:
    """The id of each row's likeliest class; for `Predictor`. `batch` as for `classification_loss`, without labels."""
    return model(batch["tokens"], batch["segments"], is_token=batch["is_token"]).argmax(axis=-1)


def class_scores(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> ClassScores:
    """Scores predicted classes.

    The values are those of scikit-learn's `accuracy_score` and of its `f1_score` with `labels` and average="macro",
    times 100: a class that neither occurs nor is predicted has an F1 of 0.

    Args:
      predictions: a class for each text, as its name or its id.
      references: the classes that they should have. (scikit-learn takes them first.)
      labels: all classes there are, each once.

    Raises:
      ValueError: if the sides differ in length or are empty, or a class is none of the labels.

    >>> class_scores(["b", "a", "b", "a"], ["b", "a", "a", "a"], labels=["a", "b"]).accuracy
    75.0
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(f"{len(predictions)} predictions cannot be scored by {len(references)} references")
    number = {label: index for index, label in enumerate(labels)}
    strange = {*predictions, *references} - number.keys()
    if strange:
        raise ValueError(f"{min(strange, key=str)!r} is none of the {len(number)} labels")
    found, wanted = (np.array([number[label] for label in side]) for side in (predictions, references))
    correct, predicted, true = (
        np.bincount(classes, minlength=len(number)) for classes in (found[found == wanted], found, wanted)
    )
    f1 = 2 * correct / np.maximum(predicted + true, 1)
    return ClassScores(100 * float((found == wanted).mean()), 100 * float(f1.mean()))
