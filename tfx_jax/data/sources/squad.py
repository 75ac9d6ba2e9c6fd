"""Questions on a context, in the JSON of SQuAD v1.1 (Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250)."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from etils import epath

from tfx_jax.data.sources.lines import is_blank, read_text
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json

T = TypeVar("T")

_MAX_BYTES = 64 << 20  # JSON takes up to 24 times as much when it is read; SQuAD has 30 MB


class Answer(NamedTuple):
    """Characters `start` to `start` + len(text) - 1 of the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question, and where its context answers it.

    Attributes:
      name: tells it from all others of the file ("id" in the file, which may be a number there).
      question: its text.
      context: the paragraph it is about.
      answers: one or more.
    """

    name: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(*paths: epath.PathLike) -> list[Question]:
    """Reads all questions of files, plain or `.gz`, and checks that each answer stands where it should.

    Raises:
      UserError: for a file that cannot be read, is larger than 64 MiB, not UTF-8, not JSON or not such JSON, for a name
        used twice, and for a question without an answer (SQuAD v2 has such) or with one that its context does not have
        in that place.
    """
    found: dict[str, Question] = {}
    for path in paths:
        before = len(found)
        for question in _questions(_read(path), str(path)):
            if question.name in found:
                raise UserError(f"{path}: two questions are named {question.name!r}; each needs an id of its own")
            found[question.name] = question
        if len(found) == before:
            raise UserError(f"{path} has no questions")
    return list(found.values())


def _read(path: epath.PathLike) -> Any:
    try:
        return parse_json(read_text(path, _MAX_BYTES))
    except UserError:
        raise
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except ValueError as error:
        raise UserError(f"{path} is not in SQuAD's format ({error})") from None


def _questions(contents: Any, where: str) -> Iterator[Question]:
    for number, article in enumerate(_field(contents, "data", list, where), start=1):
        in_article = f"{where}, article {number}"
        for place, paragraph in enumerate(_field(article, "paragraphs", list, in_article), start=1):
            in_paragraph = f"{in_article}, paragraph {place}"
            context = _field(paragraph, "context", str, in_paragraph)
            for record in _field(paragraph, "qas", list, in_paragraph):
                name = _name(record, in_paragraph)
                in_question = f"{in_paragraph}, question {name!r}"
                text = _field(record, "question", str, in_question)
                answers = tuple(
                    _answer(answer, context, in_question) for answer in _field(record, "answers", list, in_question)
                )
                if not answers:
                    raise UserError(f"{in_question} has no answer; leave such questions of SQuAD v2 out")
                yield Question(name, text, context, answers)


def _name(record: Any, where: str) -> str:
    """The id of a question, which other data sets in this format write as a number."""
    name = record.get("id") if isinstance(record, dict) else None
    return str(name) if type(name) is int else _field(record, "id", str, where)


def _answer(record: Any, context: str, where: str) -> Answer:
    text, start = _field(record, "text", str, where), _field(record, "answer_start", int, where)
    if is_blank(text) or start < 0:
        raise UserError(f"{where}: {text!r} at character {start} is no answer")
    found = context[start : start + len(text)]
    if found != text:
        raise UserError(
            f"{where}: the answer is {text[:40]!r}, but at character {start} the context has {found[:40]!r}"
        )
    return Answer(text, start)


def _field(record: Any, name: str, kind: type[T], where: str) -> T:
    """A field of a JSON object, which must be there and of the right kind."""
    if not isinstance(record, dict) or not isinstance(record.get(name), kind):
        raise UserError(f"{where}: no {name!r} of type {kind.__name__}, so this is not SQuAD's format")
    return record[name]
