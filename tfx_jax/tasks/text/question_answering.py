"""Extractive question answering (SQuAD): answer spans, exact match and F1.

Long contexts are read in overlapping windows (Devlin et al., 2019, section 4.2). The answer is the span with the
highest sum of the scores of its first and last token, in any window.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import grain
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.objectives.next_sentence import NUM_PAIR_SPECIALS, pair_inputs
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.sources.squad import Answer, Question, read_questions
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.metrics.answers import answer_scores, character_exact_match, character_f1
from tfx_jax.models.bert import BertConfig, BertQuestionAnswering
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.synthetic.grammar import grammar_questions
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.files import GRAMMAR_SIZES, FileData, check_files, check_share, few_boundaries, split_rows
from tfx_jax.tasks.loss import LossOutput, Metric, is_first_choice, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.answers import Prediction
from tfx_jax.tasks.text.text_attention import TextAttention

NO_ANSWER = 0  # position of [CLS], the target in a window without the answer


class Windows(NamedTuple):
    """A question with W windows of its context, each as [CLS] question [SEP] context [SEP].

    Attributes:
      ids: tokens, [W, L] int32.
      token_types: 0 for the question, 1 for the context and 0 for padding, [W, L] int32.
      context_mask: True at tokens of the context, [W, L] bool.
      starts: index in the context of the first context token of each window, [W] int32.
      offset: position in a window of its first context token.
    """

    ids: np.ndarray
    token_types: np.ndarray
    context_mask: np.ndarray
    starts: np.ndarray
    offset: int


class Spans(NamedTuple):
    """The best span of each window.

    Attributes:
      first: position of its first token, [B] int32.
      last: position of its last token, not before `first`, [B] int32.
      score: sum of both logits, [B] float32; -inf if there is no context, and then `first` and `last` are meaningless.
    """

    first: Int[Array, "B"]
    last: Int[Array, "B"]
    score: Float[Array, "B"]


def context_windows(
    question: Sequence[int],
    context: Sequence[int],
    *,
    max_length: int,
    stride: int,
    cls_id: int,
    sep_id: int,
    pad_id: int,
    max_question_length: int = 64,
) -> Windows:
    """Builds as many windows of a question and its context as needed to show every token of the context.

    Args:
      question: tokens; those beyond `max_question_length` are cut off.
      context: tokens.
      max_length: L, length of a window; 384 for BERT.
      stride: context tokens between the starts of consecutive windows; 128 for BERT. It is lowered to the context
        tokens that fit into a window, if those are fewer.
      cls_id: id of [CLS].
      sep_id: id of [SEP].
      pad_id: id of padding.
      max_question_length: maximum tokens of the question.

    Raises:
      ValueError: if no token of the context fits beside the question, or the stride is not positive.
    """
    question = question[:max_question_length]
    max_shown = max_length - len(question) - NUM_PAIR_SPECIALS  # context tokens in a window
    if max_shown < 1 or stride < 1:
        raise ValueError(
            f"max_length={max_length} leaves {max_shown} tokens for the context with a stride of {stride}: both must "
            "be at least 1"
        )
    step = min(stride, max_shown)
    # The last window starts at or after len(context) - max_shown, so the windows cover the context.
    starts = range(0, max(1, len(context) - max_shown + step), step)
    rows = [
        pair_inputs(
            question,
            context[start : start + max_shown],
            max_length=max_length,
            cls_id=cls_id,
            sep_id=sep_id,
            pad_id=pad_id,
        )
        for start in starts
    ]
    ids, token_types = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    offset = len(question) + 2  # after [CLS] question [SEP]
    num_shown = np.array([[min(len(context) - start, max_shown)] for start in starts])  # [W, 1]
    positions = np.arange(max_length) - offset  # relative to the first token of the context
    context_mask = (positions >= 0) & (positions < num_shown)
    return Windows(ids, token_types, context_mask, starts=np.array(starts, np.int32), offset=offset)


def answer_positions(windows: Windows, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the position of an answer in each window.

    Args:
      windows: windows of the context.
      first: index in the context of the first token of the answer.
      last: index of its last token.

    Returns:
      A pair: positions of the first and of the last token, each [W] int32; NO_ANSWER for both if the window does not
      contain the whole answer.
    """
    num_shown = windows.context_mask.sum(axis=1)  # context tokens of each window
    has_answer = (first >= windows.starts) & (last < windows.starts + num_shown)
    shifts = windows.offset - windows.starts  # from an index in the context to a position in each window
    first_positions = np.where(has_answer, first + shifts, NO_ANSWER)
    last_positions = np.where(has_answer, last + shifts, NO_ANSWER)
    return first_positions.astype(np.int32), last_positions.astype(np.int32)


def best_answer(windows: Windows, spans: Spans) -> tuple[int, int] | None:
    """Returns the highest scoring span over all windows of a question, as token indices in its context.

    Args:
      windows: the W windows.
      spans: best span of each window, from `best_spans`.

    Returns:
      The pair (first token, last token), or None if no window has a token of the context.
    """
    scores = np.asarray(spans.score)
    window = int(scores.argmax())
    if scores[window] == -np.inf:
        return None
    shift = int(windows.starts[window]) - windows.offset  # from a position in the window to an index in the context
    return int(spans.first[window]) + shift, int(spans.last[window]) + shift


def token_span(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """Returns the tokens that cover a range of characters.

    Args:
      offsets: start and end (exclusive) characters of each token, [T, 2] int, in order.
      begin: first character.
      end: end of the range, exclusive.

    Returns:
      The pair (first token, last token) of those that overlap the range.

    Raises:
      ValueError: if no token does.

    >>> token_span(np.array([[0, 3], [3, 8], [9, 12]]), 4, 10)
    (1, 2)
    """
    overlapping = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
    if not overlapping.size:
        raise ValueError(f"no token covers characters {begin} to {end}")
    return int(overlapping[0]), int(overlapping[-1])


def text_of_span(context: str, offsets: np.ndarray, first: int, last: int) -> str:
    """Returns the characters of a span of tokens, without white space at the ends; `offsets` as for `token_span`.

    >>> text_of_span("ein rotes Haus", np.array([[0, 3], [3, 9], [9, 14]]), 1, 2)
    'rotes Haus'
    """
    return context[offsets[first, 0] : offsets[last, 1]].strip()


Questions = Sequence[Question]


@documented
@dataclasses.dataclass
class QuestionData(FileData):
    """Source of questions about texts, and size of examples and batches."""

    dataset: str = one_of(("grammar", "files"), "grammar")  # grammar: built-in questions
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    train_file: str = ""  # files: JSON in SQuAD's format
    validation_file: str = ""
    validation_share: float = fraction(
        0.0
    )  # without validation_file: fraction of the training contexts held out for it
    test_file: str = ""
    scoring: str = one_of(
        ("words", "characters"), "words"
    )  # comparison of answers: words as in SQuAD, characters as in JaQuAD
    tokenizer: str = "wordpiece"  # characters, words, wordpiece, bpe or unigram; ignored with init_from
    max_length: int = at_least(1, 384)  # tokens of a window: question, part of the context and special tokens
    max_answer_length: int = at_least(1, 30)  # maximum tokens of an answer
    tokens_per_batch: int = at_least(1, 12_288)  # positions of a global batch, including padding

    def load(self, split: Split) -> Questions:
        """Reads the questions of a split with their contexts and answers.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return grammar_questions(split, GRAMMAR_SIZES[split])
        return split_rows(self, split, lambda paths: read_questions(*paths), group=lambda question: question.context)

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        if not os.fspath(path).removesuffix(".gz").lower().endswith(".json"):
            return None
        return [(question.question, question.context) for question in read_questions(path, has_answers=False)]

    def score(self, answers: Mapping[str, str], questions: Questions) -> EvalResult:
        """Scores answers by the id of their question; of several true answers the best match counts."""
        by_characters: dict[str, Any] = {"exact_match_fn": character_exact_match, "f1_fn": character_f1}
        exact_match, f1 = answer_scores(
            answers,
            {question.name: [answer.text for answer in question.answers] for question in questions},
            **(by_characters if self.scoring == "characters" else {}),
        )
        return eval_result(ANSWER_METRICS, {"f1": f1, "exact_match": exact_match}, f"{len(questions):,} questions")

    def validate(self, model: ModelConfig) -> None:
        check_files(self, model, what="row")
        check_share(self)

    def tiny(self) -> None:
        """Sets a small built-in data set."""
        self.dataset, self.scoring, self.max_length, self.tokens_per_batch = "grammar", "words", 64, 512


ANSWER_METRICS = (MetricInfo("f1", "F1", " %"), MetricInfo("exact_match", "exact match", " %"))
"""Metrics of `QuestionData.score`."""


@documented
@dataclasses.dataclass
class QuestionAnsweringConfig(TaskConfig):
    """Finds the answer to a question in a text, which is read in windows."""

    data: QuestionData = dataclasses.field(default_factory=QuestionData)
    stride: int = at_least(1, 128)  # context tokens between the starts of consecutive windows
    max_question_length: int = at_least(1, 64)  # maximum tokens of a question; the rest is cut

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is a BERT, and that the longest question leaves room for the context."""
        require_kind(model, "bert", "question answering")
        self.data.validate(model)
        if self.data.max_length < self.max_question_length + NUM_PAIR_SPECIALS + 1:
            raise UserError(
                f"config.task.data.max_length={self.data.max_length} leaves no token for the context beside a question "
                f"of max_question_length={self.max_question_length} and {NUM_PAIR_SPECIALS} special tokens: raise it"
            )

    def tiny(self) -> None:
        self.data.tiny()
        self.stride = self.max_question_length = 16

    def setup(self, model: BertConfig, splits: Splits[Questions], artifacts: Artifacts) -> "QuestionAnsweringTask":
        """Trains or loads the tokenizer, on questions and contexts."""
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: _texts(splits["train"]), kind=self.data.tokenizer, family="bert"
        )
        return QuestionAnsweringTask(self, model, splits, tokenizer)

    def planned(self, model: BertConfig, options: LoaderOptions) -> PlannedTask:
        arrays = dict.fromkeys(("tokens", "token_type_ids"), (np.int32, LENGTH))
        arrays |= dict.fromkeys(("token_mask", "context_mask"), (np.bool_, LENGTH))
        arrays |= {"first": (np.int32,), "last": (np.int32,), "row_weights": (np.float32,)}
        batch = planned_batch(self.data, options, arrays)
        return PlannedTask(QuestionAnsweringTask(self, model, NO_DATA, NO_DATA), batch)


class EncodedQuestion(NamedTuple):
    """A tokenized question with its context.

    Attributes:
      windows: windows of the context.
      offsets: start and end (exclusive) characters of each token of the context, [S, 2] int64.
    """

    windows: Windows
    offsets: np.ndarray


class QuestionAnsweringTask(TextAttention):
    """Question answering with a BERT.

    As in the authors' program, training uses all windows, and the target of a window without the whole answer is [CLS].
    Of several answers of a training question the first is learned. Prediction compares windows by the sums of both
    logits, although training never compares windows.

    Attributes:
      tokenizer: tokenizer of questions and contexts.
    """

    metrics = ANSWER_METRICS
    unit = "token"

    def __init__(
        self,
        config: QuestionAnsweringConfig,
        model_config: BertConfig,
        splits: Splits[Questions],
        tokenizer: HFTokenizer,
    ):
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self._splits = splits

    def make_model(self, *, rngs: nnx.Rngs) -> BertQuestionAnswering:
        return BertQuestionAnswering(self.model_config, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How windows become batches: windows of similar length together."""
        data = self.config.data
        pad_values = {"tokens": cast(int, self.tokenizer.pad_id)}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, pad_values=pad_values)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns endless batches of all windows of all training questions."""
        questions = self._splits["train"]
        pairs = zip(questions, self.encode(questions), strict=True)
        examples = ExampleList([example for pair in pairs for example in _window_examples(*pair)])
        return train_batches(lambda epoch: examples, self.batch_spec, options)  # the same examples in every epoch

    def encode(self, questions: Questions) -> Iterator[EncodedQuestion]:
        """Tokenizes questions and contexts, each context once, and builds their windows."""
        config, tokenizer = self.config, self.tokenizer
        distinct_contexts = {item.context for item in questions}
        contexts = {context: tokenizer.encode_with_offsets(context) for context in distinct_contexts}
        encoded = tokenizer.encode_batch([item.question for item in questions])
        warn_shortened(encoded, config.max_question_length, what="questions", effect="only their beginnings are read")
        for item, question in zip(questions, encoded, strict=True):
            context, offsets = contexts[item.context]
            windows = context_windows(
                question,
                context,
                max_length=config.data.max_length,
                stride=config.stride,
                cls_id=cast(int, tokenizer.cls_id),
                sep_id=cast(int, tokenizer.sep_id),
                pad_id=cast(int, tokenizer.pad_id),
                max_question_length=config.max_question_length,
            )
            yield EncodedQuestion(windows, offsets)

    def loss(self, model: BertQuestionAnswering, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return span_loss(model, batch, rngs)

    def predict(self, model: TrainedModel, questions: Questions) -> dict[str, str]:
        """Returns the answer to each question by its id; "" if the context has no token."""
        encoded = list(self.encode(questions))
        examples = [window for pair in zip(questions, encoded, strict=True) for window in _window_examples(*pair)]
        best = functools.partial(predict_spans, max_answer_length=self.config.data.max_answer_length)
        spans = iter(model.predict(best, ExampleList(examples), self.batch_spec))  # [first, last, score] per window
        answers = {}
        for question, (windows, offsets) in zip(questions, encoded, strict=True):
            # The next len(windows.ids) results are those of this question.
            spans_of_question = itertools.islice(spans, len(windows.ids))
            firsts, lasts, scores = (cast(Any, np.array(values)) for values in zip(*spans_of_question, strict=True))
            span = best_answer(windows, Spans(firsts, lasts, scores))
            answers[question.name] = "" if span is None else text_of_span(question.context, offsets, *span)
        return answers

    inputs = ("question", "context")
    empty_answer: ClassVar[Prediction] = {"answer": ""}

    def attention_inputs(self) -> Iterator[Sequence[str]]:
        return ((question.question, question.context) for question in self._splits["validation"])

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns the answer to each question, a span of its context."""
        answers = self.predict(model, unanswered(rows))
        return [{"answer": answers[str(number)]} for number in range(len(rows))]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Answers every question of a split and scores the answers."""
        questions = self._splits[split]
        return self.config.data.score(self.predict(model, questions), questions)


def unanswered(rows: Sequence[Sequence[str]]) -> Questions:
    """Returns rows (question, context) as questions of the data, with their indices as ids and an empty answer."""
    answers = (Answer("", 0),)
    return [Question(str(number), question, context, answers) for number, (question, context) in enumerate(rows)]


def _texts(questions: Questions) -> Iterable[str]:
    """Yields all questions, and each context once."""
    return itertools.chain(
        (question.question for question in questions), dict.fromkeys(question.context for question in questions)
    )


def _window_examples(question: Question, encoded: EncodedQuestion) -> list[Example]:
    """Returns the windows of a question without padding, with the position of its first answer in each."""
    windows, offsets = encoded
    text, begin = question.answers[0]  # the answer, and its first character in the context
    try:
        firsts, lasts = answer_positions(windows, *token_span(offsets, begin, begin + len(text)))
    except ValueError:  # no token covers the answer: the tokenizer drops characters such as control characters
        firsts = lasts = np.full(len(windows.ids), NO_ANSWER, np.int32)
    num_shown = windows.context_mask.sum(axis=1)  # context tokens of each window
    lengths = windows.offset + num_shown + (num_shown > 0)  # a [SEP] follows the context, if there is any
    return [
        {
            "tokens": ids[:length],
            "token_type_ids": types[:length],
            "token_mask": np.ones(length, bool),
            "context_mask": mask[:length],
            "first": first,
            "last": last,
            "row_weights": np.array(1, np.float32),
        }
        for ids, types, mask, length, first, last in zip(*windows[:3], lengths, firsts, lasts, strict=True)
    ]


def span_loss(model: BertQuestionAnswering, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums over windows the mean cross entropy of an answer's first and last token (Devlin et al., 2019, section 4.2).

    The softmax is over the positions that can be answers, the context and [CLS]; in the authors' program it is over all
    positions. Other positions are never predicted, so nothing need be learned about them.

    Args:
      model: `model(tokens, token_type_ids, token_mask=..., rngs=...)` returns two arrays [B, T]: logits of being the
        first and of being the last token of the answer.
      batch: "tokens" and "token_type_ids" [B, T] int32, "token_mask" and "context_mask" [B, T] bool, "first" and
        "last" [B] int32, and "row_weights" [B] float32, 0 for padding, whose answer is NO_ANSWER. An answer outside
        the context makes the loss infinite.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      The output of `summed_cross_entropy` over windows; "accuracy" is the share with both ends right, and `num_tokens`
      counts the tokens read.
    """
    # Arrays with an axis 2 are for the first and for the last token of the answer.
    logits = jnp.stack(model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"], rngs=rngs))
    can_be_answer = batch["context_mask"] | (jnp.arange(logits.shape[-1]) == NO_ANSWER)[None]
    logits = jnp.where(can_be_answer[None], logits, -jnp.inf)
    targets = jnp.stack([batch["first"], batch["last"]])  # [2, B]
    # Each of both predictions of a window has half the weight of the window.
    weights = jnp.stack([batch["row_weights"] / 2] * 2)
    output = summed_cross_entropy(logits, targets, weights)
    both_right = is_first_choice(logits, targets).all(axis=0)  # [B]
    output.metrics["accuracy"] = Metric((both_right * batch["row_weights"]).sum(), output.weight)
    return output._replace(num_tokens=batch["token_mask"].sum(dtype=jnp.float32))


def predict_spans(model: BertQuestionAnswering, batch: dict[str, Array], *, max_answer_length: int) -> Spans:
    """Returns the best span of each window, for `TrainedModel.predict` with `functools.partial`; see `best_spans`.

    `batch` is as for `span_loss`, without answers.
    """
    start, end = model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"])
    return best_spans(start, end, batch["context_mask"], max_answer_length=max_answer_length)


def best_spans(
    start_logits: Float[Array, "B T"],
    end_logits: Float[Array, "B T"],
    context_mask: Bool[Array, "B T"],
    *,
    max_answer_length: int,
) -> Spans:
    """Returns the argmax over i <= j of start_logits[i] + end_logits[j] (Devlin et al., 2019, section 4.2).

    Of equal spans, the one that begins first wins, then the one that ends first. Memory is O(B T max_answer_length).
    May be jitted, with `max_answer_length` static.

    Args:
      start_logits: logits of an answer that begins at a position.
      end_logits: logits of an answer that ends at a position.
      context_mask: True where an answer may begin and end.
      max_answer_length: maximum tokens of an answer; 30 for BERT.
    """
    num_rows, length = start_logits.shape
    width = min(max_answer_length, length)
    starts = jnp.where(context_mask, start_logits.astype(jnp.float32), -jnp.inf)
    ends = jnp.where(context_mask, end_logits.astype(jnp.float32), -jnp.inf)
    # Padding lets spans that begin near the end reach beyond it; their score is -inf.
    ends = jnp.pad(ends, ((0, 0), (0, width - 1)), constant_values=-jnp.inf)
    # [T, width]: the positions at which spans that begin at t may end.
    span_ends = np.arange(length)[:, np.newaxis] + np.arange(width)[np.newaxis]
    scores = starts[:, :, np.newaxis] + ends[:, span_ends]  # [B, T, width]
    scores = scores.reshape(num_rows, -1)
    best = scores.argmax(axis=1).astype(jnp.int32)  # t * width + (end - t)
    first = best // width
    return Spans(first, first + best % width, scores.max(axis=1))
