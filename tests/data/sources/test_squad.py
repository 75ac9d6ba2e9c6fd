import gzip
import json

import pytest

from tfx_jax.data.sources import squad
from tfx_jax.data.sources.squad import Answer, Question, read_questions
from tfx_jax.errors import UserError

CONTEXT = "東京国立博物館は、上野にある。"


def _contents():
    answers = [
        {"text": "上野", "answer_start": 9, "answer_type": "Location"},
        {"text": "上野にある", "answer_start": 9},
    ]
    questions = [
        {"id": "q1", "question": "どこ?", "answers": answers},
        {"id": "q2", "question": "何?", "answers": [{"text": "東京国立博物館", "answer_start": 0}]},
    ]
    first = {"title": "x", "paragraphs": [{"context": CONTEXT, "qas": questions}, {"context": "a", "qas": []}]}
    third = {"context": "b c", "qas": [{"id": "q3", "question": "?", "answers": [{"text": "c", "answer_start": 2}]}]}
    return {"version": "1.1", "data": [first, {"paragraphs": []}, {"paragraphs": [third]}]}


def _write(path, contents):
    data = (contents if isinstance(contents, str) else json.dumps(contents, ensure_ascii=False)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_questions_of_all_paragraphs(tmp_path, name):
    assert read_questions(_write(tmp_path / name, _contents())) == [
        Question("q1", "どこ?", CONTEXT, (Answer("上野", 9), Answer("上野にある", 9))),
        Question("q2", "何?", CONTEXT, (Answer("東京国立博物館", 0),)),
        Question("q3", "?", "b c", (Answer("c", 2),)),
    ]


def _first_question(contents):
    return contents["data"][0]["paragraphs"][0]["qas"][0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("answers", [], "question 'q1' has no answer; remove questions without answers"),
        (
            "answers",
            [{"text": "上野", "answer_start": 8}],
            "the answer is '上野', but at character 8 the context has '、上'",
        ),
        ("answers", [{"text": "。x", "answer_start": 14}], "at character 14 the context has '。'"),
        ("answers", [{"text": "。", "answer_start": -1}], "a start of at least 0, got '。' at character -1"),
        (
            "answers",
            [{"text": "", "answer_start": 0}],
            "an answer needs text and a start of at least 0, got '' at character 0",
        ),
        ("answers", [{"text": "上野"}], "no 'answer_start' of type int"),
        ("answers", [{"text": "上野", "answer_start": "9"}], "no 'answer_start' of type int"),
        ("answers", ["上野"], "no 'text' of type str"),
        ("question", None, "question 'q1': no 'question' of type str"),
        ("id", 7.5, "no 'id' of type str"),
        ("id", True, "no 'id' of type str"),
    ],
)
def test_questions_that_are_not_as_they_should(tmp_path, field, value, message):
    contents = _contents()
    _first_question(contents)[field] = value
    with pytest.raises(UserError, match=f"a.json, article 1, paragraph 1.*{message}") as caught:
        read_questions(_write(tmp_path / "a.json", contents))
    assert "\n" not in str(caught.value)


def test_paragraphs_that_are_not_as_they_should(tmp_path):
    contents = _contents()
    del contents["data"][2]["paragraphs"][0]["context"]
    with pytest.raises(UserError, match=r"a\.json, article 3, paragraph 1: no 'context' of type str, so this is not"):
        read_questions(_write(tmp_path / "a.json", contents))
    with pytest.raises(UserError, match=r"a\.json: no 'data' of type list"):
        read_questions(_write(tmp_path / "a.json", [1, 2]))
    with pytest.raises(UserError, match=r"a\.json has no questions"):
        read_questions(_write(tmp_path / "a.json", {"data": []}))


def test_names_used_twice(tmp_path):
    contents = _contents()
    _first_question(contents)["id"] = "q3"
    with pytest.raises(UserError, match=r"a\.json: two questions are named 'q3'"):
        read_questions(_write(tmp_path / "a.json", contents))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (
            "[" * 100_000,
            r"a\.json is not in SQuAD's format .the JSON is nested deeper than Python can read, some thousand levels",
        ),
        (
            '{"data": [' + "[]," * 400_000 + "[]]}",
            r"a\.json has more than 1,000,000 bytes, the limit for files",
        ),
    ],
    ids=["deep", "large"],
)
def test_what_would_fill_the_memory(tmp_path, monkeypatch, contents, message):
    monkeypatch.setattr(squad, "_MAX_BYTES", 1_000_000)
    with pytest.raises(UserError, match=message):
        read_questions(_write(tmp_path / "a.json", contents))


def test_not_json(tmp_path):
    with pytest.raises(UserError, match=r"a\.json, line 3: not JSON \(Expecting"):
        read_questions(_write(tmp_path / "a.json", '{"data":\n[\n}'))


@pytest.mark.data
@pytest.mark.parametrize(
    ("folder", "part", "count", "answers"),
    [("squadshifts", "train", 7467, 21_417), ("squadshifts", "dev", 471, 1377), ("jaquad", "dev", 1526, 1526)],
)
def test_real_questions(shared_data, folder, part, count, answers):
    questions = read_questions(shared_data / folder / f"{part}.json.gz")
    assert (len(questions), sum(len(question.answers) for question in questions)) == (count, answers)


def test_an_id_may_be_a_number(tmp_path):
    contents = _contents()
    _first_question(contents)["id"] = 7
    assert read_questions(_write(tmp_path / "a.json", contents))[0].name == "7"
