"""Exact match and F1 of answers, as SQuAD v1.1 and JaQuAD compute them.

SQuAD (Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250, section 6.1, and its evaluation script for v1.1)
compares words, and forgives case, ASCII punctuation and articles. Japanese has no spaces between words: JaQuAD (So et
al., 2022, https://arxiv.org/abs/2202.01764) compares characters. Its README and paper give the figures alone; what is
computed here is what the notebook beside the README computes (JaQuAD.ipynb, section "Inference").
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
      exact_match: share of the answers that equal a reference.
      f1: overlap of the answers with the reference that is nearest.
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
    """Scores answers; each is compared with all references of its question, and the best counts.

    Args:
      predictions: an answer for each question, by the question's name; one that is missing scores 0.
      references: right answers by the question's name, one or more each.
      exact_match_fn: of an answer and a reference; `squad_exact_match` by default, `character_exact_match` for JaQuAD.
      f1_fn: likewise, from 0 to 1; `squad_f1` by default, `character_f1` for JaQuAD.

    Raises:
      ValueError: if there is no question, or one has no reference.

    >>> answer_scores({"q1": "the Cat!", "q2": "a red house"}, {"q1": ["cat"], "q2": ["house", "home"]})
    AnswerScores(exact_match=50.0, f1=83.33333333333333)
    """
    exact_match_fn, f1_fn = exact_match_fn or squad_exact_match, f1_fn or squad_f1
    if not references:
        raise ValueError("no questions to score")
    exact = overlap = 0.0
    for name, answers in references.items():
        if not answers:
            raise ValueError(f"question {name!r} has no reference")
        if name in predictions:
            exact += max(exact_match_fn(predictions[name], answer) for answer in answers)
            overlap += max(f1_fn(predictions[name], answer) for answer in answers)
    return AnswerScores(100 * exact / len(references), 100 * overlap / len(references))


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces between words.

    >>> normalize_answer("The  U.S.-led a-Team, an hour")
    'usled ateam hour'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def squad_exact_match(prediction: str, reference: str) -> bool:
    """Whether both are the same when normalized."""
    return normalize_answer(prediction) == normalize_answer(reference)


def squad_f1(prediction: str, reference: str) -> float:
    """F1 of the bags of normalized words; 0 if they share none, so also where nothing is left of both sides.

    >>> squad_f1("the red house", "a house")
    0.6666666666666666
    """
    return _overlap(normalize_answer(prediction).split(), normalize_answer(reference).split())


def character_f1(prediction: str, reference: str) -> float:
    """F1 of the bags of characters, white space aside; nothing is normalized, and two empty answers agree.

    >>> round(character_f1("東京国立博物館", "東京 博物館"), 3)
    0.833
    """
    found, wanted = "".join(prediction.split()), "".join(reference.split())
    if not found or not wanted:
        return float(found == wanted)
    return _overlap(found, wanted)


def character_exact_match(prediction: str, reference: str) -> bool:
    """Whether `character_f1` is 1, which is what JaQuAD's notebook counts: the order of characters is not looked at."""
    return character_f1(prediction, reference) == 1.0


def _overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags; 0 if they have nothing in common."""
    shared = (Counter(found) & Counter(wanted)).total()
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0
