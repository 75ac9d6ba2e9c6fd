"""Reader of question answering data in SQuAD v1.1's JSON (Rajpurkar et al., 2016, arXiv:1606.05250)."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from etils import epath

from tfx_jax.data.sources.lines import is_blank, read_text
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json

T = TypeVar("T")

_MAX_BYTES = 64 << 20  # parsing JSON takes up to 24 times this memory; SQuAD has 30 MB


class Answer(NamedTuple):
    """An answer: characters `start` to `start` + len(text) - 1 of the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question with its context and answers.

    Attributes:
      name: unique name ("id" in the file, where it may be a number).
      question: text of the question.
      context: the paragraph that contains the answers.
      answers: one or more answers.
    """

    name: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(*paths: epath.PathLike, has_answers: bool = True) -> list[Question]:
    """Reads all questions of files, plain or `.gz`, and checks the position of each answer.

    Args:
      *paths: the files.
      has_answers: whether to read the answers; without them, questions have an empty tuple.

    Raises:
      UserError: if a file cannot be read, is larger than 64 MiB, not UTF-8, not JSON or not in SQuAD's format, if a
        name is used twice, or if a question has no answer (as some of SQuAD v2) or one that the context does not
        contain at its position.
    """
    questions: dict[str, Question] = {}
    for path in paths:
        num_before = len(questions)
        for question in _questions(_read(path), str(path), has_answers):
            if question.name in questions:
                raise UserError(f"{path}: two questions are named {question.name!r}; ids must be unique")
            questions[question.name] = question
        if len(questions) == num_before:
            raise UserError(f"{path} has no questions")
    return list(questions.values())


def _read(path: epath.PathLike) -> Any:
    """Returns the parsed JSON of a file; raises UserError if it cannot be read or parsed."""
    try:
        return parse_json(read_text(path, _MAX_BYTES))
    except UserError:
        raise
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except ValueError as error:
        raise UserError(f"{path} is not in SQuAD's format ({error})") from None


def _questions(contents: Any, where: str, has_answers: bool) -> Iterator[Question]:
    """Yields the questions of a parsed file; `where` is its path, for messages. See `read_questions`."""
    for number, article in enumerate(_field(contents, "data", list, where), start=1):
        in_article = f"{where}, article {number}"
        for paragraph_number, paragraph in enumerate(_field(article, "paragraphs", list, in_article), start=1):
            in_paragraph = f"{in_article}, paragraph {paragraph_number}"
            context = _field(paragraph, "context", str, in_paragraph)
            for record in _field(paragraph, "qas", list, in_paragraph):
                name = _name(record, in_paragraph)
                in_question = f"{in_paragraph}, question {name!r}"
                text = _field(record, "question", str, in_question)
                if not has_answers:
                    yield Question(name, text, context, ())
                    continue
                answers = tuple(
                    _answer(answer, context, in_question) for answer in _field(record, "answers", list, in_question)
                )
                if not answers:
                    raise UserError(f"{in_question} has no answer; remove questions without answers (SQuAD v2)")
                yield Question(name, text, context, answers)


def _name(record: Any, where: str) -> str:
    """Returns the id of a question as text; some data sets in this format have numbers."""
    name = record.get("id") if isinstance(record, dict) else None
    return str(name) if type(name) is int else _field(record, "id", str, where)


def _answer(record: Any, context: str, where: str) -> Answer:
    """Returns an answer after checking that the context contains it; `where` names the question, for messages."""
    text, start = _field(record, "text", str, where), _field(record, "answer_start", int, where)
    if is_blank(text) or start < 0:
        raise UserError(f"{where}: an answer needs text and a start of at least 0, got {text!r} at character {start}")
    in_context = context[start : start + len(text)]
    if in_context != text:
        raise UserError(
            f"{where}: the answer is {text[:40]!r}, but at character {start} the context has {in_context[:40]!r}"
        )
    return Answer(text, start)


def _field(record: Any, name: str, kind: type[T], where: str) -> T:
    """Returns a field of a JSON object; raises UserError if it is missing or not of type `kind`."""
    if not isinstance(record, dict) or not isinstance(record.get(name), kind):
        raise UserError(f"{where}: no {name!r} of type {kind.__name__}, so this is not SQuAD's format")
    return record[name]
