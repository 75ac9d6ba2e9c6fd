"""Evaluation metrics: functions of predictions and references, on the host."""

from tfx_jax.metrics.answers import answer_scores, character_exact_match, character_f1, squad_exact_match, squad_f1
from tfx_jax.metrics.bleu import BleuScores, bleu_scores
from tfx_jax.metrics.brackets import bracket_scores
from tfx_jax.metrics.classes import ClassScores, class_scores
from tfx_jax.metrics.edit_distance import edit_distance, recognition_scores
from tfx_jax.metrics.entities import Entity, entities_of_tags, entity_scores
from tfx_jax.metrics.ranking import Interval, auroc, average_precision, with_interval

__all__ = [
    "BleuScores",
    "ClassScores",
    "Entity",
    "Interval",
    "answer_scores",
    "auroc",
    "average_precision",
    "bleu_scores",
    "bracket_scores",
    "character_exact_match",
    "character_f1",
    "class_scores",
    "edit_distance",
    "entities_of_tags",
    "entity_scores",
    "recognition_scores",
    "squad_exact_match",
    "squad_f1",
    "with_interval",
]
