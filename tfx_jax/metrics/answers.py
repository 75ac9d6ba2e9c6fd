"""Exact match and F1 of answers, as SQuAD v1.1 and JaQuAD compute them.

SQuAD (Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250, section 6.1, and its evaluation script for v1.1)
compares words, and ignores case, ASCII punctuation and articles. Japanese has no spaces between words: JaQuAD (So et
al., 2022, https://arxiv.org/abs/2202.01764) compares characters. Its README and paper do not define the metrics; the
definitions here are those of its notebook (JaQuAD.ipynb, section "Inference").
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


class AnswerScores(NamedTuple):
    """Means over all questions, in percent.

    Attributes:
      exact_match: share of the questions whose answer equals a reference.
      f1: mean F1 of an answer with its best reference.
    """

    exact_match: float
    f1: float


def answer_scores(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    *,
    exact_match_fn: Callable[[str, str], bool] | None = None,
    f1_fn: Callable[[str, str], float] | None = None,
) -> AnswerScores:
    """Computes exact match and F1; each answer counts with the best of its question's references.

    Args:
      predictions: answer of each question, by the question's name; a missing answer scores 0.
      references: one or more right answers of each question, by the question's name.
      exact_match_fn: `fn(answer, reference) -> bool`: `squad_exact_match` by default, `character_exact_match` for
        JaQuAD.
      f1_fn: `fn(answer, reference) -> float`, 0 to 1: `squad_f1` by default, `character_f1` for JaQuAD.

    Raises:
      ValueError: if there are no questions, or a question has no reference.

    >>> answer_scores({"q1": "the Cat!", "q2": "a red house"}, {"q1": ["cat"], "q2": ["house", "home"]})
    AnswerScores(exact_match=50.0, f1=83.33333333333333)
    """
    exact_match_fn, f1_fn = exact_match_fn or squad_exact_match, f1_fn or squad_f1
    if not references:
        raise ValueError("there are no questions to score: pass at least one")
    sum_of_exact = sum_of_f1 = 0.0
    for name, answers in references.items():
        if not answers:
            raise ValueError(f"question {name!r} has no reference answer: each question needs at least one")
        if name in predictions:
            sum_of_exact += max(exact_match_fn(predictions[name], answer) for answer in answers)
            sum_of_f1 += max(f1_fn(predictions[name], answer) for answer in answers)
    return AnswerScores(100 * sum_of_exact / len(references), 100 * sum_of_f1 / len(references))


def normalize_answer(text: str) -> str:
    """Returns a text in lower case, without ASCII punctuation and English articles, with single spaces.

    >>> normalize_answer("The  U.S.-led a-Team, an hour")
    'usled ateam hour'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def squad_exact_match(prediction: str, reference: str) -> bool:
    """Returns whether both texts are equal after `normalize_answer`."""
    return normalize_answer(prediction) == normalize_answer(reference)


def squad_f1(prediction: str, reference: str) -> float:
    """Returns the F1 of the bags of normalized words; 0 if they share no word, also if both are empty.

    >>> squad_f1("the red house", "a house")
    0.6666666666666666
    """
    return _overlap(normalize_answer(prediction).split(), normalize_answer(reference).split())


def character_f1(prediction: str, reference: str) -> float:
    """Returns the F1 of the bags of characters without white space; 1 if both are empty. Nothing is normalized.

    >>> round(character_f1("東京国立博物館", "東京 博物館"), 3)
    0.833
    """
    predicted, expected = "".join(prediction.split()), "".join(reference.split())
    if not predicted or not expected:
        return float(predicted == expected)
    return _overlap(predicted, expected)


def character_exact_match(prediction: str, reference: str) -> bool:
    """Returns whether `character_f1` is 1, as in JaQuAD's notebook; the order of characters does not matter."""
    return character_f1(prediction, reference) == 1.0


def _overlap(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the harmonic mean of precision and recall of two bags; 0 if they are disjoint."""
    num_shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * num_shared / (len(predicted) + len(expected)) if num_shared else 0.0
