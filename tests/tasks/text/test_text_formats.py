"""Examples as texts: what is written is read back, and whatever a model writes is read."""

import itertools

import numpy as np
import pytest

from tfx_jax.data.sources.conll import TaggedSentence, read_tagged
from tfx_jax.data.sources.labeled import LabeledText, read_labeled, read_labeled_pairs
from tfx_jax.data.sources.squad import Answer, Question, read_questions
from tfx_jax.metrics.answers import answer_scores
from tfx_jax.metrics.entities import Entity, entities_of_tags, repair_tags, tags_of_entities
from tfx_jax.synthetic.grammar import grammar_labeled, grammar_labeled_pairs, grammar_questions, grammar_tagged
from tfx_jax.tasks.text.text_formats import (
    NO_LABEL,
    label_scores,
    labels_by_text,
    read_label,
    read_tags,
    render_labeled,
    render_question,
    render_tagged,
)

SPLITS = ("train", "validation", "test")


def check_labels(examples):
    labels = labels_by_text(sorted({example.label for example in examples}))
    assert len(labels) > 2
    for example in examples:
        source, target = render_labeled(example)
        assert all(text in source for text in example[:-1])
        assert read_label(target, labels) == example.label


def check_tags(sentences, num_marks=100):
    labels = labels_by_text({entity.label for sentence in sentences for entity in entities_of_tags(sentence.tags)})
    assert len(labels) > 4
    for sentence in sentences:
        source, target = render_tagged(sentence, num_marks=num_marks)
        prefix, *pieces = source.split(" ")
        assert prefix == "tag:"
        assert pieces[0::2] == [f"<extra_id_{number}>" for number in range(len(sentence.words))]
        assert pieces[1::2] == sentence.words
        assert read_tags(target, len(sentence.words), labels) == repair_tags(sentence.tags)


def check_answers(questions):
    rendered = [render_question(question) for question in questions]
    for question, (source, target) in zip(questions, rendered, strict=True):
        assert source == f"question: {question.question} context: {question.context}"
        assert target in question.context
    predictions = {question.name: target for question, (_, target) in zip(questions, rendered, strict=True)}
    references = {question.name: [answer.text for answer in question.answers] for question in questions}
    exact_match, f1 = answer_scores(predictions, references)
    assert exact_match == 100
    assert f1 > 99.9  # of nothing but an article, such as "A", SQuAD's F1 is 0


@pytest.mark.parametrize("split", SPLITS)
def test_examples_of_the_grammar_are_read_back(split):
    check_labels(grammar_labeled(split, 200))
    check_labels(grammar_labeled_pairs(split, 200))
    check_tags(grammar_tagged(split, 200))
    check_answers(grammar_questions(split, 100))


@pytest.mark.data
def test_examples_of_real_data_are_read_back(shared_data):
    for part in ("train", "dev"):
        check_labels(read_labeled(shared_data / "banking77" / f"{part}.tsv"))
        check_labels(read_labeled_pairs(shared_data / "nli" / f"{part}.tsv"))
        check_tags(read_tagged(shared_data / "ner" / f"{part}.conll"))
        check_answers(read_questions(shared_data / "squadshifts" / f"{part}.json.gz"))


def test_sources_and_targets_word_for_word():
    assert render_labeled(LabeledText("Where is my card?", "card_ARRIVAL")) == (
        "classify sentence: Where is my card?",
        "card arrival",
    )
    sentence = TaggedSentence(["a", "b", "c", "d"], ["I-x", "B-x", "I-x", "B-long_Name"])
    assert render_tagged(sentence, num_marks=100).target == (
        "<extra_id_0> x <extra_id_1> <extra_id_2> x <extra_id_3> long name"
    )
    assert render_tagged(TaggedSentence(["a"], ["O"]), num_marks=100).target == ""
    question = Question("q", "Who?", "He or she.", (Answer("He", 0), Answer("she", 6)))
    assert render_question(question) == ("question: Who? context: He or she.", "He")


def test_words_without_a_mark_have_no_entity():
    sentence = TaggedSentence(["a", "b", "c", "d"], ["B-x", "B-y", "I-y", "B-x"])
    source, target = render_tagged(sentence, num_marks=2)
    assert source == "tag: <extra_id_0> a <extra_id_1> b c d"
    assert target == "<extra_id_0> x"  # the second entity has only half of its marks
    assert read_tags(target, 4, {"x": "x", "y": "y"}) == ["B-x", "O", "O", "O"]


def test_any_entities_are_read_back():
    """Random sentences, with entities side by side, at both ends, and of labels that contain one another."""
    rng, labels = np.random.default_rng(0), ["x", "Y_z", "y-z"]
    for _ in range(300):
        length = int(rng.integers(1, 30))
        cuts = [0, *sorted(rng.choice(np.arange(1, length + 1), rng.integers(0, length + 1), replace=False).tolist())]
        entities = [
            Entity(str(rng.choice(labels)), start, end) for start, end in itertools.pairwise(cuts) if rng.random() < 0.6
        ]
        tags = tags_of_entities(entities, length)
        _, target = render_tagged(TaggedSentence(["w"] * length, tags), num_marks=100)
        assert read_tags(target, length, labels_by_text(labels)) == tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "O O O"),
        ("x", "O O O"),  # no mark
        ("<extra_id_1>", "O O O"),  # no label
        ("<extra_id_1> nonsense <extra_id_2> x", "O O B-x"),
        ("<extra_id_0> <extra_id_2> x", "O O O"),  # with a gap
        ("<extra_id_1> <extra_id_0> x", "O O O"),  # in the wrong order
        ("<extra_id_2> <extra_id_3> x", "O O O"),  # beyond the end
        ("<extra_id_99> x <extra_id_0>x", "B-x O O"),
        ("<extra_id_0> <extra_id_1> x <extra_id_1> <extra_id_2> x", "B-x I-x O"),  # over another
        ("x <extra_id_0> X  <extra_id_0> y", "B-x O O"),
        ("<extra_id_0> x < <extra_id_1> x", "O B-x O"),
        ("<extra_id_0> a b <extra_id_1> A  b", "B-a_b B-a_b O"),
    ],
)
def test_what_is_no_entity_is_passed_over(text, expected):
    assert read_tags(text, 3, labels_by_text(["x", "y", "a_b"])) == expected.split()


def test_labels_that_read_alike_are_refused():
    with pytest.raises(ValueError, match="the labels 'a_b' and 'A b' are both written as 'a b'"):
        labels_by_text(["a_b", "c", "A b"])
    assert labels_by_text(["a", "a"]) == {"a": "a"}


def test_scores_without_a_label_are_those_of_sklearn():
    """f1_score(references, predictions, labels=labels, average="macro", zero_division=0) and the others, by hand."""
    labels, references = ["a", "b", "c"], ["a", "a", "b", "c", "c"]
    predictions = ["a", NO_LABEL, "b", "b", NO_LABEL]
    accuracy, macro_f1, balanced_accuracy, correlation = label_scores(predictions, references, labels)
    assert accuracy == pytest.approx(40)
    assert macro_f1 == pytest.approx(100 * (2 / 3 + 2 / 3 + 0) / 3)
    assert balanced_accuracy == pytest.approx(100 * (1 / 2 + 1 + 0) / 3)
    # Right: 2 of 5. Said: a 1, b 2, nothing 2; true: a 2, b 1, c 2. NO_LABEL is a class that is never right.
    assert correlation == pytest.approx(100 * (5 * 2 - 4) / ((25 - 9) * (25 - 9)) ** 0.5)
