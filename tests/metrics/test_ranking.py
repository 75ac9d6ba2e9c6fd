"""AUROC and average precision against their definitions, pair by pair and threshold by threshold, and scikit-learn."""

import itertools

import numpy as np
import pytest

from tfx_jax.metrics.ranking import Interval, auroc, average_precision, with_interval


def auroc_of_pairs(scores, labels):
    """How many pairs of a row of each class are in the right order."""
    positives, negatives = ([s for s, y in zip(scores, labels, strict=True) if y == label] for label in (1, 0))
    wins = [(p > n) + (p == n) / 2 for p, n in itertools.product(positives, negatives)]
    return sum(wins) / len(wins)


def precision_of_thresholds(scores, labels):
    """The sum over thresholds of precision times what recall gains (Manning et al., 2008, section 8.4, with ties)."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        taken = [y for s, y in zip(scores, labels, strict=True) if s >= threshold]
        total += sum(taken) / len(taken) * (sum(taken) / sum(labels) - recall)
        recall = sum(taken) / sum(labels)
    return total


def cases():
    """Random scores with many ties, few and none, and one class rare or common; and perfect, reversed, constant."""
    rng = np.random.default_rng(0)
    for levels, share in itertools.product((1, 2, 5, 1000), (0.1, 0.5, 0.9)):
        labels = np.append((rng.random(20) < share).astype(int), [0, 1])
        yield rng.integers(levels, size=22) / 7, labels
    labels = np.array([0, 1, 1, 0, 1])
    yield from ((labels, labels), (-labels, labels))


def test_scores_are_those_of_the_definitions():
    for scores, labels in cases():
        assert auroc(scores, labels) == pytest.approx(auroc_of_pairs(scores.tolist(), labels.tolist()))
        expected = precision_of_thresholds(scores.tolist(), labels.tolist())
        assert average_precision(scores, labels) == pytest.approx(expected)


def test_scores_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    for scores, labels in cases():
        assert auroc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores))
        assert average_precision(scores, labels) == pytest.approx(metrics.average_precision_score(labels, scores))


@pytest.mark.parametrize("scorer", [auroc, average_precision])
@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [1, 0, 1, 0]])
def test_a_score_that_is_no_number_makes_none(scorer, labels):
    """A model that returns NaN is broken, and must not be the best."""
    scores = np.array([np.nan, 0.5, 0.25, 1.0])
    assert np.isnan(scorer(scores, labels))
    assert np.isnan(with_interval(scorer, scores, labels)).all()


@pytest.mark.parametrize("scorer", [auroc, average_precision])
@pytest.mark.parametrize(("scores", "labels"), [([1.0, 2.0], [1, 1]), ([1.0], [0]), ([1.0, 2.0], [0, 1, 1]), ([], [])])
def test_what_cannot_be_ranked(scorer, scores, labels):
    with pytest.raises(ValueError, match=rf"^{len(scores)} scores cannot be ranked by {len(labels)} labels"):
        scorer(np.array(scores), np.array(labels))


def test_interval_is_that_of_the_bootstrap():
    """Close to the interval of the normal approximation (Hanley and McNeil, 1982), and the same each time."""
    rng = np.random.default_rng(0)
    labels = (rng.random(600) < 0.4).astype(int)
    scores = rng.normal(size=600) + labels
    found = with_interval(auroc, scores, labels)
    area, positives = auroc(scores, labels), labels.sum()
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    negatives = 600 - positives
    spread = area * (1 - area) + (positives - 1) * (one - area**2) + (negatives - 1) * (two - area**2)
    width = 1.96 * np.sqrt(spread / (positives * negatives))
    assert found.value == area
    np.testing.assert_allclose(found[1:], (area - width, area + width), atol=0.01)
    assert with_interval(auroc, scores, labels) == found != with_interval(auroc, scores, labels, seed=1)
    assert with_interval(auroc, labels, labels) == (1, 1, 1)
    assert str(Interval(0.5, 0.25, 1.0)) == "0.5000 (0.2500 to 1.0000)"
