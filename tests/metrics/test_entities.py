"""Entities and tags are two views of one thing, and the scores are those that papers print."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.metrics.entities import (
    Entity,
    entities_of_tags,
    entity_scores,
    entity_scores_by_label,
    repair_tags,
    tag_names,
    tags_of_entities,
)

LABELS = ["person", "creative-work", "B"]  # hyphens, and a label that looks like a prefix
TAGS = tag_names(LABELS)
_tags = st.lists(st.sampled_from(TAGS), max_size=12)
_sides = st.lists(
    _tags.flatmap(
        lambda tags: st.tuples(st.just(tags), st.lists(st.sampled_from(TAGS), min_size=len(tags), max_size=len(tags)))
    ),
    max_size=6,
)


def _entities_by_regex(tags):
    """A run of one label, which may begin with B and continue with I; on a string of one letter a tag."""
    letters = {tag: chr(ord("a") + number) for number, tag in enumerate(TAGS)}
    text = "".join(letters[tag] for tag in tags)
    found = []
    for label in LABELS:
        begin, inside = letters[f"B-{label}"], letters[f"I-{label}"]
        found += [Entity(label, *match.span()) for match in re.finditer(f"{begin}{inside}*|{inside}+", text)]
    return sorted(found, key=lambda entity: entity.start)


@given(_tags)
def test_entities_of_any_tags(tags):
    assert entities_of_tags(tags) == _entities_by_regex(tags)


def test_entities_of_all_short_sentences():
    for length in range(5):
        for tags in itertools.product(TAGS, repeat=length):
            assert entities_of_tags(tags) == _entities_by_regex(tags)


@given(_tags)
def test_repaired_tags_are_valid_and_mean_the_same(tags):
    repaired = repair_tags(tags)
    assert entities_of_tags(repaired) == entities_of_tags(tags)
    for before, tag in itertools.pairwise(["O", *repaired]):
        assert not tag.startswith("I-") or before[2:] == tag[2:]
    changed = [(old, new) for old, new in zip(tags, repaired, strict=True) if old != new]
    assert all((old[0], new[0]) == ("I", "B") and old[1:] == new[1:] for old, new in changed)
    assert repair_tags(repaired) == repaired


@given(st.lists(st.tuples(st.sampled_from(["", *LABELS]), st.integers(1, 4)), max_size=6))
def test_tags_of_entities_and_back(runs):
    entities, position = [], 0
    for label, length in runs:
        if label:
            entities.append(Entity(label, position, position + length))
        position += length
    assert entities_of_tags(tags_of_entities(entities, position)) == entities


@pytest.mark.parametrize("entities", [[(0, 0)], [(2, 1)], [(3, 5)], [(-1, 1)], [(0, 2), (1, 3)], [(1, 3), (0, 4)]])
def test_entities_that_cannot_be(entities):
    with pytest.raises(ValueError, match="must not be empty, outside the 4 words, or overlap another"):
        tags_of_entities([Entity("person", *span) for span in entities], 4)


@pytest.mark.parametrize("tag", ["", "B", "I-", "E-person", "person", "o", "O-person"])
def test_what_is_no_tag(tag):
    with pytest.raises(ValueError, match="a tag must be O, B-label or I-label, got"):
        entities_of_tags(["O", tag])


def test_example_of_seqeval():
    # From its documentation: one of two entities is exact on either side.
    references = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predictions = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_scores(predictions, references) == (50, 50, 50, 2)
    assert entity_scores_by_label(predictions, references) == {"MISC": (0, 0, 0, 1), "PER": (100, 100, 100, 1)}


def _oracle(sides, label=None):
    """Precision, recall and their harmonic mean, from sets of entities named by their sentence."""
    wanted, found = (
        {
            (number, entity)
            for number, pair in enumerate(sides)
            for entity in _entities_by_regex(pair[side])
            if label in (None, entity.label)
        }
        for side in (0, 1)
    )
    precision = len(wanted & found) / max(1, len(found))
    recall = len(wanted & found) / max(1, len(wanted))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0
    return np.array([100 * precision, 100 * recall, 100 * f1, len(wanted)])


@given(_sides)
@settings(deadline=None)
def test_scores_of_any_sentences(sides):
    references, predictions = [list(side) for side in zip(*sides, strict=True)] or ([], [])
    np.testing.assert_allclose(entity_scores(predictions, references), _oracle(sides))
    by_label = entity_scores_by_label(predictions, references)
    assert list(by_label) == sorted(
        {entity.label for pair in sides for tags in pair for entity in _entities_by_regex(tags)}
    )
    for label, scores in by_label.items():
        np.testing.assert_allclose(scores, _oracle(sides, label))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy")  # of seqeval's mean over the labels, where there are none
def test_scores_are_those_of_seqeval():
    metrics = pytest.importorskip("seqeval.metrics")
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(0, 12, rng.integers(1, 8))
        # Half of the predictions are the reference with some noise: chance alone would seldom agree.
        references = [rng.choice(TAGS, n).tolist() for n in lengths]
        predictions = [[tag if rng.random() < 0.7 else str(rng.choice(TAGS)) for tag in tags] for tags in references]
        mine = entity_scores(predictions, references)
        theirs = [
            getattr(metrics, name)(references, predictions, zero_division=0)
            for name in ("precision_score", "recall_score", "f1_score")
        ]
        np.testing.assert_allclose(mine[:3], 100 * np.array(theirs), rtol=1e-12)
        report = metrics.classification_report(references, predictions, output_dict=True, zero_division=0)
        for label, scores in entity_scores_by_label(predictions, references).items():
            expected = [report[label][name] for name in ("precision", "recall", "f1-score")]
            np.testing.assert_allclose(scores, [*(100 * np.array(expected)), report[label]["support"]], rtol=1e-12)


def test_sides_of_other_lengths():
    with pytest.raises(ValueError, match="2 sentences of predictions but 1"):
        entity_scores([["O"], ["O"]], [["O"]])
    with pytest.raises(ValueError, match="sentence 1 has 2 tags predicted, but 1 words"):
        entity_scores([["O"], ["O", "O"]], [["O"], ["O"]])
