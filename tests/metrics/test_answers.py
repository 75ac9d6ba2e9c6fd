"""Exact match and F1, against figures worked out by hand from what SQuAD's script and JaQuAD's notebook say."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfx_jax.metrics.answers import (
    answer_scores,
    character_exact_match,
    character_f1,
    normalize_answer,
    squad_exact_match,
    squad_f1,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat", "cat"),
        ("the", ""),
        ("", ""),
        ("  a  big\tHOUSE.\n", "big house"),
        ("an apple a day", "apple day"),
        ("another theme at anna's", "another theme at annas"),
        ("U.S.A.", "usa"),
        ("A.", ""),  # punctuation goes before articles do
        ("the-end", "theend"),
        ("$1,000 (approx)", "1000 approx"),
        ("«The» cat", "« » cat"),  # only ASCII marks are punctuation; the guillemets bound the article
        ("Ärger ÉTÉ", "ärger été"),
        ("a\u3000b", "b"),
        ("x_the_y", "xthey"),
        ("the_cat", "thecat"),
    ],
)
def test_normalized(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("the cat", "Cat.", True, 1),
        ("big cat", "cat", False, Fraction(2, 3)),
        ("cat cat dog", "cat dog dog", False, Fraction(2, 3)),  # a bag: two of three words either way
        ("dog cat", "cat dog", False, 1),
        ("mouse", "cat", False, 0),
        ("", "cat", False, 0),
        ("The", "a", True, 0),  # nothing is left of both: the script calls it exact and gives no F1
        ("one two three four", "four", False, Fraction(2, 5)),
    ],
)
def test_squad_scores_of_one_answer(prediction, reference, exact, f1):
    assert squad_exact_match(prediction, reference) is exact
    assert squad_f1(prediction, reference) == pytest.approx(float(f1), rel=1e-12)


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("東京", "東京", True, 1),
        ("東京都", "東京", False, Fraction(4, 5)),
        ("大阪", "東京", False, 0),
        ("東 京", "東京", True, 1),
        ("東\u3000京", "東京", True, 1),
        ("京東", "東京", True, 1),  # a bag of characters, as in the notebook
        ("東京。", "東京", False, Fraction(4, 5)),  # marks count
        ("Tokyo", "tokyo", False, Fraction(4, 5)),  # and so does case
        ("ああい", "あいい", False, Fraction(2, 3)),
        ("", "", True, 1),
        ("", "東京", False, 0),
        (" ", "東京", False, 0),
    ],
)
def test_character_scores_of_one_answer(prediction, reference, exact, f1):
    assert character_exact_match(prediction, reference) is exact
    assert character_f1(prediction, reference) == pytest.approx(float(f1), rel=1e-12)


_words = st.lists(st.sampled_from(["the", "Cat", "dog.", "a", "-", "red", "猫"]), max_size=6).map(" ".join)


def _oracle_f1(found, wanted):
    """Precision and recall of multisets, by striking shared items out one by one."""
    rest, shared = list(wanted), 0
    for item in found:
        if item in rest:
            rest.remove(item)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _oracle_words(text):
    """What is left of a text, word by word: another way to the same words for ASCII marks at the ends of words."""
    words = [re.sub(r"[!-/:-@\[-`{-~]", "", word.lower()) for word in text.split()]
    return [word for word in words if word not in ("", "a", "an", "the")]


@given(st.lists(st.tuples(_words, st.lists(_words, min_size=1, max_size=3)), min_size=1, max_size=6))
def test_scores_of_any_questions(cases):
    predictions = {str(number): prediction for number, (prediction, _) in enumerate(cases)}
    references = {str(number): answers for number, (_, answers) in enumerate(cases)}
    exact = [max(_oracle_words(p) == _oracle_words(a) for a in answers) for p, answers in cases]
    f1 = [max(_oracle_f1(_oracle_words(p), _oracle_words(a)) for a in answers) for p, answers in cases]
    np.testing.assert_allclose(answer_scores(predictions, references), (100 * np.mean(exact), 100 * np.mean(f1)))
    scores = answer_scores(predictions, references, exact_match_fn=character_exact_match, f1_fn=character_f1)
    f1 = [
        max(_oracle_f1(p.replace(" ", ""), a.replace(" ", "")) if (p or a) else 1 for a in answers)
        for p, answers in cases
    ]
    np.testing.assert_allclose(scores.f1, 100 * np.mean(f1))
    np.testing.assert_allclose(scores.exact_match, 100 * np.mean(np.isclose(f1, 1)))


def test_best_reference_counts_and_unanswered_questions_are_wrong():
    references = {"q1": ["dog", "the cat", "red cat"], "q2": ["house"]}
    assert answer_scores({"q1": "cat", "unknown": "house", "other": "house"}, references) == (50, 50)
    assert answer_scores({}, references) == (0, 0)


def test_nothing_to_score():
    with pytest.raises(ValueError, match="no questions"):
        answer_scores({}, {})
    with pytest.raises(ValueError, match="question 'q1' has no reference"):
        answer_scores({"q1": "cat"}, {"q1": []})
