"""Entities as BIO tags of words, and their scores.

A tag is "O" (outside), "B-x" (an entity of label x begins) or "I-x" (it goes on), the scheme IOB2 of Tjong Kim Sang
and Veenstra (1999).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"


class Entity(NamedTuple):
    """Words start to end - 1 of a sentence, and what they are."""

    label: str
    start: int
    end: int


class EntityScores(NamedTuple):
    """How many of the entities found were right, and how many of the right ones were found, in percent.

    Attributes:
      precision: share of the predicted entities that are entities of the reference; 0 if nothing was predicted.
      recall: share of the reference's entities that were predicted; 0 if it has none.
      f1: harmonic mean of both; 0 if both are.
      support: number of entities in the reference.
    """

    precision: float
    recall: float
    f1: float
    support: int


def tag_names(labels: Iterable[str]) -> list[str]:
    """All tags of some labels, in the order of their ids: "O" is 0.

    >>> tag_names(["person", "group"])
    ['O', 'B-group', 'I-group', 'B-person', 'I-person']
    """
    return [OUTSIDE, *(f"{prefix}-{label}" for label in sorted(set(labels)) for prefix in "BI")]


def tags_of_entities(entities: Iterable[Entity], length: int) -> list[str]:
    """The tags of a sentence of `length` words.

    Raises:
      ValueError: if an entity is empty, ends outside the sentence or overlaps another.

    >>> tags_of_entities([Entity("person", 0, 2), Entity("group", 2, 3)], length=4)
    ['B-person', 'I-person', 'B-group', 'O']
    """
    tags = [OUTSIDE] * length
    for label, start, end in entities:
        if not 0 <= start < end <= length or any(tag != OUTSIDE for tag in tags[start:end]):
            raise ValueError(f"{label!r} from word {start} to {end} is empty, outside {length} words or over another")
        tags[start:end] = [f"B-{label}", *[f"I-{label}"] * (end - start - 1)]
    return tags


def entities_of_tags(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, read as conlleval and seqeval's default mode read them.

    A model may predict tags that no entities have. An I without an entity of its label before it begins one.

    Raises:
      ValueError: for a tag that is not "O", "B-..." or "I-...".

    >>> entities_of_tags(["I-person", "I-person", "I-group", "O"])
    [Entity(label='person', start=0, end=2), Entity(label='group', start=2, end=3)]
    """
    entities: list[Entity] = []
    label, start = "", 0  # of the entity that is open; no label, none
    for position, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, current = tag.partition("-")
        if tag != OUTSIDE and (prefix not in ("B", "I") or not current):
            raise ValueError(f"{tag!r} is not a tag: O, B-label or I-label")
        if label and (prefix != "I" or current != label):
            entities.append(Entity(label, start, position))
            label = ""
        if current and not label:
            label, start = current, position
    return entities


def repair_tags(tags: Sequence[str]) -> list[str]:
    """Turns every I that begins an entity into a B; the entities stay those of `entities_of_tags`.

    >>> repair_tags(["O", "I-person", "I-person", "I-group"])
    ['O', 'B-person', 'I-person', 'B-group']
    """
    return tags_of_entities(entities_of_tags(tags), len(tags))


def entity_scores(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> EntityScores:
    """Scores entities of all labels together ("micro"), the figure of CoNLL-2003: an entity counts if it is exact.

    The values are those of conlleval, and of seqeval's `f1_score` and its like by default, times 100.

    Args:
      predictions: the tags that a model gives the words of each sentence, be they such as no entities have.
      references: the tags that they should have. (seqeval takes them first.)

    Raises:
      ValueError: if the sides differ in length, or a tag is none.

    >>> entity_scores([["B-person", "O", "O"]], [["B-person", "O", "B-group"]]).precision
    100.0
    """
    counts = _count(predictions, references)
    return _score(*(sum(count.values()) for count in counts))


def entity_scores_by_label(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, EntityScores]:
    """Scores the entities of each label that occurs, as `entity_scores` does; labels in alphabetical order."""
    correct, predicted, wanted = _count(predictions, references)
    return {label: _score(correct[label], predicted[label], wanted[label]) for label in sorted(predicted | wanted)}


def _count(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """How many entities of each label are in both, in the predictions and in the references."""
    if len(references) != len(predictions):
        raise ValueError(f"{len(predictions)} sentences of predictions but {len(references)} of references")
    correct, predicted, wanted = Counter(), Counter(), Counter()
    for number, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        if len(prediction) != len(reference):
            raise ValueError(f"sentence {number} has {len(prediction)} tags predicted, but {len(reference)} words")
        found, right = set(entities_of_tags(prediction)), set(entities_of_tags(reference))
        for counter, entities in ((correct, right & found), (predicted, found), (wanted, right)):
            counter.update(entity.label for entity in entities)
    return correct, predicted, wanted


def _score(correct: int, predicted: int, wanted: int) -> EntityScores:
    precision = 100 * correct / predicted if predicted else 0.0
    recall = 100 * correct / wanted if wanted else 0.0
    f1 = 200 * correct / (predicted + wanted) if correct else 0.0
    return EntityScores(precision, recall, f1, wanted)
