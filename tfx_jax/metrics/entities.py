"""Entities as BIO tags of words, and scores of predicted entities.

A tag is "O" (outside), "B-x" (first word of an entity of label x) or "I-x" (further word of it): the scheme IOB2 of
Tjong Kim Sang and Veenstra (1999).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"


class Entity(NamedTuple):
    """An entity: words start to end - 1 of a sentence, and its label."""

    label: str
    start: int
    end: int


class EntityScores(NamedTuple):
    """Precision, recall and F1 of entities in percent.

    Attributes:
      precision: share of the predicted entities that are in the reference; 0 if nothing was predicted.
      recall: share of the reference's entities that were predicted; 0 if it has none.
      f1: harmonic mean of precision and recall; 0 if both are 0.
      support: number of entities in the reference.
    """

    precision: float
    recall: float
    f1: float
    support: int


def tag_names(labels: Iterable[str]) -> list[str]:
    """Returns all tags of some labels in the order of their ids, starting with "O".

    >>> tag_names(["person", "group"])
    ['O', 'B-group', 'I-group', 'B-person', 'I-person']
    """
    return [OUTSIDE, *(f"{prefix}-{label}" for label in sorted(set(labels)) for prefix in "BI")]


def tags_of_entities(entities: Iterable[Entity], length: int) -> list[str]:
    """Returns the tags of a sentence of `length` words.

    Raises:
      ValueError: if an entity is empty, ends outside the sentence or overlaps another.

    >>> tags_of_entities([Entity("person", 0, 2), Entity("group", 2, 3)], length=4)
    ['B-person', 'I-person', 'B-group', 'O']
    """
    tags = [OUTSIDE] * length
    for label, start, end in entities:
        if not 0 <= start < end <= length or any(tag != OUTSIDE for tag in tags[start:end]):
            raise ValueError(
                f"the entity {label!r}, words {start} to {end} (exclusive), must not be empty, outside the {length} "
                "words, or overlap another"
            )
        tags[start:end] = [f"B-{label}", *[f"I-{label}"] * (end - start - 1)]
    return tags


def entities_of_tags(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence, decoded like conlleval and seqeval's default mode.

    Tags may be inconsistent, as those of a model: an I tag that continues no entity of its label begins one.

    Raises:
      ValueError: if a tag is not "O", "B-..." or "I-...".

    >>> entities_of_tags(["I-person", "I-person", "I-group", "O"])
    [Entity(label='person', start=0, end=2), Entity(label='group', start=2, end=3)]
    """
    entities: list[Entity] = []
    label, start = "", 0  # of the current entity; an empty label means none
    for position, tag in enumerate([*tags, OUTSIDE]):  # the additional tag ends the last entity
        prefix, _, tag_label = tag.partition("-")
        if tag != OUTSIDE and (prefix not in ("B", "I") or not tag_label):
            raise ValueError(f"a tag must be O, B-label or I-label, got {tag!r}")
        if label and (prefix != "I" or tag_label != label):
            entities.append(Entity(label, start, position))
            label = ""
        if tag_label and not label:
            label, start = tag_label, position
    return entities


def repair_tags(tags: Sequence[str]) -> list[str]:
    """Turns each I tag that begins an entity into a B tag, without changing the entities (`entities_of_tags`).

    >>> repair_tags(["O", "I-person", "I-person", "I-group"])
    ['O', 'B-person', 'I-person', 'B-group']
    """
    return tags_of_entities(entities_of_tags(tags), len(tags))


def entity_scores(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> EntityScores:
    """Computes micro-averaged scores of entities, as in CoNLL-2003: label and both boundaries must be right.

    The values are those of conlleval, and of seqeval's `f1_score` etc. with default options, times 100.

    Args:
      predictions: predicted tags of the words of each sentence, which may be inconsistent (`entities_of_tags`).
      references: correct tags. (seqeval takes them first.)

    Raises:
      ValueError: if the numbers of sentences or words differ, or a tag is invalid.

    >>> entity_scores([["B-person", "O", "O"]], [["B-person", "O", "B-group"]]).precision
    100.0
    """
    correct, predicted, expected = _count(predictions, references)
    return _score(correct.total(), predicted.total(), expected.total())


def entity_scores_by_label(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, EntityScores]:
    """Computes `entity_scores` for each label that occurs, in alphabetical order."""
    correct, predicted, expected = _count(predictions, references)
    return {label: _score(correct[label], predicted[label], expected[label]) for label in sorted(predicted | expected)}


def _count(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Returns (correct, predicted, expected): the numbers of such entities by label.

    Raises:
      ValueError: if the numbers of sentences or words differ, or a tag is invalid.
    """
    if len(references) != len(predictions):
        raise ValueError(
            f"{len(predictions)} sentences of predictions but {len(references)} of references: pass one prediction for "
            "each reference"
        )
    correct, predicted, expected = Counter(), Counter(), Counter()
    for number, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        if len(prediction) != len(reference):
            raise ValueError(f"sentence {number} has {len(prediction)} tags predicted, but {len(reference)} words")
        in_prediction, in_reference = set(entities_of_tags(prediction)), set(entities_of_tags(reference))
        in_both = in_prediction & in_reference
        for counter, entities in ((correct, in_both), (predicted, in_prediction), (expected, in_reference)):
            counter.update(entity.label for entity in entities)
    return correct, predicted, expected


def _score(correct: int, predicted: int, expected: int) -> EntityScores:
    """Returns the scores from the numbers of correct, predicted and expected entities."""
    precision = 100 * correct / predicted if predicted else 0.0
    recall = 100 * correct / expected if expected else 0.0
    f1 = 200 * correct / (predicted + expected) if correct else 0.0
    return EntityScores(precision, recall, f1, support=expected)
