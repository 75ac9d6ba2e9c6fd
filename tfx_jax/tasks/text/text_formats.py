"""Text-to-text formats of tasks (Raffel et al., 2020, section 2.4 and appendix D): writing examples, reading answers.

Reading a target returns the content of the example: the format loses nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tfx_jax.data.sources.conll import TaggedSentence
from tfx_jax.data.sources.labeled import LabeledPair, LabeledText
from tfx_jax.data.sources.squad import Question
from tfx_jax.metrics.classes import ClassScores, class_scores
from tfx_jax.metrics.entities import Entity, entities_of_tags, tags_of_entities

NO_LABEL = ""
"""Prediction for an answer that is not a label; no data have this label."""

# A mark, whose number is the first group, or text up to the next mark or "<", the second group.
_MARKS = re.compile(r"<extra_id_(\d+)>|([^<]+|<)")


class Rendered(NamedTuple):
    """Source and target texts of an example."""

    source: str
    target: str


def label_text(label: str) -> str:
    """Returns a label as words, which a tokenizer of text handles better than identifiers.

    >>> label_text("Refund_not_showing_up")
    'refund not showing up'
    """
    return " ".join(label.replace("_", " ").lower().split())


def labels_by_text(labels: Iterable[str]) -> dict[str, str]:
    """Returns a mapping from `label_text` of each label to the label.

    Raises:
      ValueError: if two labels have the same text.

    >>> labels_by_text(["ENTAILMENT", "card_arrival"])
    {'entailment': 'ENTAILMENT', 'card arrival': 'card_arrival'}
    """
    by_text: dict[str, str] = {}
    for label in labels:
        other = by_text.setdefault(label_text(label), label)
        if other != label:
            raise ValueError(f"the labels {other!r} and {label!r} are both written as {label_text(label)!r}")
    return by_text


def render_labeled(example: LabeledText | LabeledPair) -> Rendered:
    """Renders a text or pair with a label like CoLA and MRPC in the paper.

    >>> render_labeled(LabeledPair("A man sings.", "No one sings.", "CONTRADICTION"))
    Rendered(source='classify sentence1: A man sings. sentence2: No one sings.', target='contradiction')
    """
    if isinstance(example, LabeledPair):
        source = f"classify sentence1: {example.first} sentence2: {example.second}"
    else:
        source = f"classify sentence: {example.text}"
    return Rendered(source, label_text(example.label))


def read_label(text: str, labels: Mapping[str, str]) -> str:
    """Returns the label that a text stands for, or NO_LABEL; `labels` are from `labels_by_text`.

    >>> read_label(" card  arrival", labels_by_text(["card_arrival"]))
    'card_arrival'
    """
    return labels.get(label_text(text), NO_LABEL)


def label_scores(predictions: Sequence[str], references: Sequence[str], labels: Sequence[str]) -> ClassScores:
    """Computes `class_scores` of predictions that may be NO_LABEL: these are wrong, and count for no class.

    Only for Matthews correlation NO_LABEL is one more class, which is predicted and never right.

    >>> [round(score, 1) for score in label_scores(["a", "", "b", "b"], ["a", "b", "b", "b"], ["a", "b"])]
    [75.0, 90.0, 83.3, 64.5]
    """
    # As a class, NO_LABEL has an F1 of 0 and adds one class to the mean; it has no recall, so that mean is unaffected.
    scores = class_scores(predictions, references, [*labels, NO_LABEL])
    return scores._replace(macro_f1=scores.macro_f1 * ((len(labels) + 1) / len(labels)))


def render_tagged(sentence: TaggedSentence, *, num_marks: int) -> Rendered:
    """Renders a sentence with T5's sentinels as marks of words, and its entities as marks of their words and a label.

    Marks are the "sentinel" formats of "Transforming Sequence Tagging Into A Seq2Seq Task" (Raman et al., 2022,
    https://arxiv.org/abs/2203.08378); words that are written again might come out differently. There, the target has
    the tag of each word; here only entities, because most words are outside. Words beyond `num_marks` get no mark, and
    their entities are left out.

    >>> sentence = TaggedSentence(["Joe", "Doe", "saw", "Rome"], ["B-person", "I-person", "O", "B-place"])
    >>> source, target = render_tagged(sentence, num_marks=100)
    >>> source
    'tag: <extra_id_0> Joe <extra_id_1> Doe <extra_id_2> saw <extra_id_3> Rome'
    >>> target
    '<extra_id_0> <extra_id_1> person <extra_id_3> place'
    """
    marked = [f"{_mark(number)} {word}" for number, word in enumerate(sentence.words[:num_marks])]
    entities = [
        f"{' '.join(map(_mark, range(start, end)))} {label_text(label)}"
        for label, start, end in entities_of_tags(sentence.tags)
        if end <= num_marks
    ]
    return Rendered(" ".join(["tag:", *marked, *sentence.words[num_marks:]]), " ".join(entities))


def read_tags(text: str, num_words: int, labels: Mapping[str, str]) -> list[str]:
    """Returns the tags of a sentence from entities in the format of `render_tagged`.

    Invalid parts are skipped: marks that are not consecutive or belong to no word, unknown labels, and words of an
    earlier entity.

    Args:
      text: text with marks spelled out.
      num_words: number of words in the sentence.
      labels: labels by text, from `labels_by_text`.

    >>> read_tags("<extra_id_1> <extra_id_2> place <extra_id_0> bird", 4, labels_by_text(["place"]))
    ['O', 'B-place', 'I-place', 'O']
    """
    entities: list[Entity] = []
    tagged_words: set[int] = set()  # indices of the words of all entities so far
    marks: list[int] = []  # marks of the current entity
    words = ""  # its label, as far as it was read
    # An entity ends at the first mark after its label: the additional mark at the end ends the last entity.
    for number, label_part in [*_MARKS.findall(text), ("0", "")]:
        if label_part:
            words += label_part
            continue
        if words.strip() and marks:
            span = range(marks[0], marks[0] + len(marks))
            label = read_label(words, labels)
            is_inside = marks == list(span) and span.stop <= num_words  # consecutive words of the sentence
            if is_inside and not tagged_words & set(span) and label != NO_LABEL:
                entities.append(Entity(label, span.start, span.stop))
                tagged_words |= set(span)
        if words.strip():
            marks, words = [], ""
        marks.append(int(number))
    return tags_of_entities(entities, num_words)


def render_question(question: Question) -> Rendered:
    """Renders a question, its context and its first answer like SQuAD in the paper."""
    return Rendered(f"question: {question.question} context: {question.context}", question.answers[0].text)


def _mark(number: int) -> str:
    return f"<extra_id_{number}>"
