"""Extractive question answering with a BERT (Devlin et al., 2019, section 4.2): an answer is a span of its context."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching import Example
from tfx_jax.data.splits import Split
from tfx_jax.data.squad import Question, read_questions
from tfx_jax.models.bert_heads import BertQuestionAnswering
from tfx_jax.tasks.answer_scores import answer_scores, character_exact_match, character_f1
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.question_answering import (
    NO_ANSWER,
    Spans,
    Windows,
    answer_positions,
    best_answer,
    context_windows,
    predict_spans,
    span_loss,
    text_of_span,
    token_span,
)
from tfx_jax.toy_grammar import grammar_questions
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.bert import BertExperiment
from tfx_jax.training.experiments.examples import GRAMMAR_SIZES
from tfx_jax.training.step import Params


class ReadQuestion(NamedTuple):
    """A question as the model reads it.

    Attributes:
      windows: of its context.
      offsets: the first character of each token of the context and the one behind its last, [S, 2] int64.
    """

    windows: Windows
    offsets: np.ndarray


class QuestionAnsweringExperiment(BertExperiment[Question]):
    """A BERT that finds the answer to a question in a text, which it reads in windows.

    As in the authors' program, all windows are trained on, and those that do not show the whole answer are to point at
    [CLS]; of several answers of a training question the first is learned; and windows compete with the sums of both
    logits, though training compares none with another.
    """

    scores = (Score("f1", "F1", " %"), Score("exact_match", "exact match", " %"))
    model_class = BertQuestionAnswering

    def load_split(self, split: Split) -> Sequence[Question]:
        """Questions with their contexts and answers."""
        data = self.config.data
        if data.dataset == "grammar":
            return grammar_questions(split, GRAMMAR_SIZES[split])
        return read_questions(epath.Path(data.data_dir) / getattr(data, f"{split}_file"))

    def texts(self, examples: Sequence[Question]) -> Iterable[str]:
        """All questions, and each context once."""
        return itertools.chain(
            (example.question for example in examples), dict.fromkeys(example.context for example in examples)
        )

    def labels_of(self, examples: Sequence[Question]) -> tuple[str, ...]:
        """None: the classes are the tokens of the context."""
        return ()

    def rows(self, examples: Sequence[Question]) -> list[Example]:
        """A row for each window of each question: what `span_loss` takes."""
        return [row for pair in zip(examples, self.read(examples), strict=True) for row in _window_rows(*pair)]

    def read(self, questions: Sequence[Question]) -> Iterator[ReadQuestion]:
        """Splits questions and contexts into tokens, each context once, and lays them out in windows."""
        data, tokenizer = self.config.data, self.tokenizer
        contexts = {context: tokenizer.encode_with_offsets(context) for context in {item.context for item in questions}}
        encoded = tokenizer.encode_batch([item.question for item in questions])
        for item, question in zip(questions, encoded, strict=True):
            context, offsets = contexts[item.context]
            windows = context_windows(
                question,
                context,
                max_length=data.max_length,
                stride=data.stride,
                cls_id=cast(int, tokenizer.cls_id),
                sep_id=cast(int, tokenizer.sep_id),
                pad_id=cast(int, tokenizer.pad_id),
                max_question_length=data.max_question_length,
            )
            yield ReadQuestion(windows, offsets)

    def predict_batch(self, model: BertQuestionAnswering, batch: dict[str, Array]) -> Spans:
        """The best span of each window."""
        return predict_spans(model, batch, max_answer_length=self.config.data.max_answer_length)

    def loss(self, model: BertQuestionAnswering, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `span_loss`."""
        return span_loss(model, batch, rngs)

    def answers(self, params: Params, questions: Sequence[Question]) -> dict[str, str]:
        """The answer to each question by its name; it is empty if the context has no token."""
        read = list(self.read(questions))
        rows = [row for pair in zip(questions, read, strict=True) for row in _window_rows(*pair)]
        found = iter(self.predict(params, rows))
        answers = {}
        for question, (windows, offsets) in zip(questions, read, strict=True):
            columns: list[Any] = [
                np.array(side) for side in zip(*itertools.islice(found, len(windows.ids)), strict=True)
            ]
            span = best_answer(windows, Spans(*columns))
            answers[question.name] = "" if span is None else text_of_span(question.context, offsets, *span)
        return answers

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Answers every question; of several right answers the nearest counts."""
        questions = self.split(split)
        by_characters = {"exact_match_fn": character_exact_match, "f1_fn": character_f1}
        exact_match, f1 = answer_scores(
            self.answers(params, questions),
            {question.name: [answer.text for answer in question.answers] for question in questions},
            **(by_characters if self.config.data.scoring == "characters" else {}),
        )
        text = f"F1 {f1:.2f} %, exact match {exact_match:.2f} %, {len(questions):,} questions"
        return Evaluation({"f1": f1, "exact_match": exact_match}, text)


def _window_rows(question: Question, read: ReadQuestion) -> list[Example]:
    """The windows of a question without their padding, and where its first answer stands in each."""
    windows, offsets = read
    text, begin = question.answers[0]
    try:
        firsts, lasts = answer_positions(windows, *token_span(offsets, begin, begin + len(text)))
    except ValueError:  # no token: what the tokenizer drops, such as control characters
        firsts = lasts = np.full(len(windows.ids), NO_ANSWER, np.int32)
    shown = windows.context_mask.sum(axis=1)
    lengths = windows.offset + shown + (shown > 0)  # a context that is there has a [SEP] behind it
    return [
        {
            "tokens": ids[:length],
            "segments": types[:length],
            "is_token": np.ones(length, bool),
            "context_mask": mask[:length],
            "first": first,
            "last": last,
            "row_weights": np.array(1, np.float32),
        }
        for ids, types, mask, length, first, last in zip(*windows[:3], lengths, firsts, lasts, strict=True)
    ]
