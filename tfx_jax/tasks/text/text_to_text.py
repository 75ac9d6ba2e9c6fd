"""Tasks as text to text: a model reads an example and writes the answer (Raffel et al., 2020, section 2.4)."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import grain
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.objectives.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.data.sources.conll import TaggedSentence
from tfx_jax.data.sources.lines import split_words
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.sources.squad import Question
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction
from tfx_jax.generation.decoding import BeamSearch, DecodingConfig, Greedy, Search, decode
from tfx_jax.metrics.entities import entities_of_tags, entity_scores
from tfx_jax.models.config import EncoderDecoderConfig, ModelConfig, require_kind
from tfx_jax.tasks.artifacts import setup_json, setup_tokenizer
from tfx_jax.tasks.classification import CLASS_METRICS, check_labels, class_result, labels_of
from tfx_jax.tasks.files import few_boundaries
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import PairAttention, TrainedModel, pair_attention
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig
from tfx_jax.tasks.text.answers import Prediction
from tfx_jax.tasks.text.classification import LabeledData, LabeledTexts, inputs_of, unlabeled
from tfx_jax.tasks.text.question_answering import ANSWER_METRICS, QuestionData, unanswered
from tfx_jax.tasks.text.tagging import TaggedData
from tfx_jax.tasks.text.text_formats import (
    NO_LABEL,
    Rendered,
    label_scores,
    label_text,
    labels_by_text,
    read_label,
    read_tags,
    render_labeled,
    render_question,
    render_tagged,
)
from tfx_jax.tasks.text.translation import translation_loss


@documented
@dataclasses.dataclass
class TextToTextConfig(TaskConfig):
    """Writes the label of a text, the entities of a sentence or the answer to a question, depending on the data.

    As in the paper, a source longer than `data.max_length` is cut.
    """

    data: LabeledData | TaggedData | QuestionData = dataclasses.field(default_factory=LabeledData)
    label_smoothing: float = fraction(0.0)
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "encoder_decoder", "text to text")
        self.data.validate(model)

    def tiny(self) -> None:
        self.data.tiny()
        self.decoding.tiny()

    def setup(self, model: EncoderDecoderConfig, splits: Splits[Any], artifacts: Artifacts) -> "TextToTextTask":
        """Trains or loads the tokenizer, and collects labels and the maximum target length of the training split."""
        text_format = _FORMATS[type(self.data)]
        tokenizer, model = setup_tokenizer(
            artifacts,
            model,
            lambda: itertools.chain(*map(text_format.render, splits["train"])),
            kind=self.data.tokenizer,
            family="t5",
        )

        def describe_targets() -> dict[str, Any]:
            """Returns the labels of the training split, and the length of its longest target, including EOS."""
            examples = splits["train"]
            encoded = tokenizer.encode_batch([text_format.render(example).target for example in examples])
            length = max(map(len, encoded)) + 1
            max_answer_length = getattr(self.data, "max_answer_length", None)
            return {
                "labels": text_format.labels_of(examples),
                "length": length if max_answer_length is None else min(length, max_answer_length + 1),
            }

        targets = setup_json(artifacts, "targets.json", describe_targets)
        num_positions = getattr(model, "learned_positions", 0)
        if 0 < num_positions < targets["length"]:
            raise UserError(
                f"the longest target has {targets['length']} tokens, but must have at most "
                f"config.model.learned_positions={num_positions}"
            )
        return TextToTextTask(
            self, model, splits, tokenizer, text_format, labels=targets["labels"], target_length=targets["length"]
        )

    def planned(self, model: EncoderDecoderConfig, options: LoaderOptions) -> PlannedTask:
        """Plans the task; targets are assumed to be as long as the longest answer, or else as the sources."""
        length = getattr(self.data, "max_answer_length", self.data.max_length - 1) + 1
        batch = planned_batch(self.data, options, {"source": (np.int32, LENGTH), "target": (np.int32, length)})
        text_format = _FORMATS[type(self.data)]
        task = TextToTextTask(self, model, NO_DATA, NO_DATA, text_format, labels=[], target_length=length)
        return PlannedTask(task, batch)


class TextFormat(NamedTuple):
    """How examples of some data are written as text, and answers are scored.

    Attributes:
      metrics: metrics that `score` returns.
      render: returns source and target of an example.
      labels_of: returns the distinct labels of examples; [] for data without labels.
      score: `score(answers, examples, by_text, labels, data)` scores the model's answers; `by_text` maps the written
        text of each label to the label, and `data` is the configuration of the data.
      inputs: returns the names of the strings of an input, given the configuration of the data.
      unanswered: returns inputs, rows of strings, as examples with meaningless targets.
    """

    metrics: tuple[MetricInfo, ...]
    render: Callable[[Any], Rendered]
    labels_of: Callable[[Any], list[str]]
    score: Callable[[Sequence[str], Any, Mapping[str, str], Sequence[str], Any], EvalResult]
    inputs: Callable[[Any], tuple[str, ...]]
    unanswered: Callable[[Sequence[Sequence[str]]], Sequence[Any]]


class TextToTextTask:
    """A task learned as text to text.

    Attributes:
      metrics: metrics of the data.
      tokenizer: tokenizer of sources and targets.
      labels: labels of the training split.
      target_length: tokens of the longest target of the training split, including EOS; limits the answers.
    """

    unit = "target token"

    def __init__(
        self,
        config: TextToTextConfig,
        model_config: EncoderDecoderConfig,
        splits: Splits[Any],
        tokenizer: HFTokenizer,
        text_format: TextFormat,
        *,
        labels: list[str],
        target_length: int,
    ):
        """Stores the parts that `TextToTextConfig.setup` creates.

        Raises:
          UserError: if two labels have the same written text.
        """
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.metrics = text_format.metrics
        self.labels, self.target_length = labels, target_length
        self._splits, self._format = splits, text_format
        self._check_labels()

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return self.model_config.make(rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: sources of similar length together, all targets padded to one length."""
        data = self.config.data
        return BatchSpec(
            few_boundaries(data.max_length),
            data.tokens_per_batch,
            pad_values={"source": self.model_config.pad_id, "target": self.model_config.pad_id},
            fixed_lengths={"target": self.target_length},
        )

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns the training data, after checking the labels of the validation split.

        Raises:
          UserError: if the validation split has a label that the training split lacks.
        """
        if isinstance(self.config.data, LabeledData) and "validation" in self._splits:
            check_labels(self._splits["validation"], self.labels, "the validation split")
        examples = ExampleList(self.encode(self._splits["train"]), by="source")
        return train_batches(lambda epoch: examples, self.batch_spec, options)  # the same examples in every epoch

    def encode(self, examples: Sequence[Any]) -> list[Example]:
        """Returns examples as {"source" [S], "target" [T]}, int32, each including EOS."""
        rendered = [self._format.render(example) for example in examples]
        sources = self.tokenizer.encode_batch([example.source for example in rendered])
        targets = self.tokenizer.encode_batch([example.target for example in rendered])
        source_limit, target_limit = self.config.data.max_length - 1, self.target_length - 1  # without EOS
        warn_shortened(sources, source_limit, what="inputs", effect="only their beginnings are read")
        warn_shortened(targets, target_limit, what="answers", effect="only their beginnings are learned")
        eos_id = self.model_config.eos_id
        return [
            {
                "source": np.array([*source[:source_limit], eos_id], np.int32),
                "target": np.array([*target[:target_limit], eos_id], np.int32),
            }
            for source, target in zip(sources, targets, strict=True)
        ]

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return translation_loss(model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss)

    def predict(self, model: TrainedModel, examples: Sequence[Any]) -> list[str]:
        """Returns the model's answers to examples (their targets are not used), with sentinels spelled out."""
        decoding = self.config.decoding
        search = Greedy() if decoding.beam_size == 1 else BeamSearch(decoding.beam_size, decoding.length_penalty)
        write = functools.partial(write_targets, max_length=self.target_length, search=search)
        encoded = ExampleList(self.encode(examples), by="source")
        return [self.spell(tokens) for tokens in model.predict(write, encoded, self.batch_spec)]

    empty_answer: ClassVar[Prediction] = {"answer": ""}

    @property
    def inputs(self) -> tuple[str, ...]:
        return self._format.inputs(self.config.data)

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns the model's answer to each input."""
        return [{"answer": text} for text in self.predict(model, self._format.unanswered(rows))]

    def attention_example(self, model: TrainedModel) -> PairAttention | None:
        """Returns the attention for the first short example among 100 of validation; None if all are longer."""
        for example in itertools.islice(self._splits["validation"], 100):
            (encoded,) = self.encode([example])
            if all(len(encoded[name]) <= 24 for name in ("source", "target")):
                return self._attention(model, encoded["source"].tolist(), encoded["target"].tolist())
        return None

    def attention(self, model: TrainedModel, source: str, target: str | None = None) -> PairAttention:
        """Computes every attention map of an input and its answer.

        Args:
          model: the trained model.
          source: the input; a TAB separates the parts that `inputs` names.
          target: the answer; None means the model's own.

        Raises:
          UserError: if the input has another number of parts.
        """
        parts = source.split("\t")
        if len(parts) != len(self.inputs):
            raise UserError(f"--source must be {', TAB, '.join(self.inputs)}, but has {len(parts) - 1} TABs")
        (example,) = self._format.unanswered([parts])
        answer = self.predict(model, [example])[0] if target is None else target
        (encoded,) = self.encode([example])
        return self._attention(model, encoded["source"].tolist(), self.tokenizer.encode_with_specials(answer).ids)

    def _attention(self, model: TrainedModel, source: list[int], target: list[int]) -> PairAttention:
        """Computes every attention map of two sequences of token ids, each including EOS."""
        pieces = self.tokenizer.pieces
        return PairAttention(pair_attention(model, source, target), pieces(source), pieces(target))

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Answers every example of a split by search and scores the answers."""
        examples = self._splits[split]
        return self.score(self.predict(model, examples), examples)

    def score(self, answers: Sequence[str], examples: Sequence[Any]) -> EvalResult:
        """Scores the model's answer to each example."""
        return self._format.score(answers, examples, self.labels_as_written, self.labels, self.config.data)

    def spell(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens up to EOS, with sentinels spelled out."""
        sentinel_numbers = {token: number for number, token in enumerate(sentinel_ids(self.tokenizer.vocab_size))}
        before_eos = list(itertools.takewhile(lambda token: token != self.model_config.eos_id, ids))
        parts = []
        for is_sentinel, group in itertools.groupby(before_eos, key=sentinel_numbers.__contains__):
            if is_sentinel:
                parts += [f"<extra_id_{sentinel_numbers[token]}>" for token in group]
            else:
                parts.append(self.tokenizer.decode(group).strip())
        return " ".join(parts)

    def as_written(self, text: str) -> str:
        """Returns a text after encoding and decoding it: the form in which a model can write it."""
        return self.spell(self.tokenizer.encode(text))

    @functools.cached_property
    def labels_as_written(self) -> dict[str, str]:
        """Maps the text of each label, in the form in which a model can write it, to the label."""
        return {label_text(self.as_written(text)): label for text, label in labels_by_text(self.labels).items()}

    def _check_labels(self) -> None:
        """Raises UserError if two labels have the same text, or the tokenizer cannot write one so that it differs."""
        try:
            by_text = self.labels_as_written
        except ValueError as error:
            raise UserError(f"{error}: rename one") from None
        # Labels whose text is written like that of another label, which has replaced it there, or is empty.
        ambiguous = set(self.labels) - set(by_text.values()) | {by_text.get(NO_LABEL)}
        for label in self.labels:
            if label in ambiguous:
                raise UserError(f"the tokenizer writes the label {label!r} like another one: rename it")


def _score_labels(
    answers: Sequence[str],
    examples: LabeledTexts,
    by_text: Mapping[str, str],
    labels: Sequence[str],
    data: LabeledData,
) -> EvalResult:
    """Scores labels; an answer that is not a label is wrong."""
    del data
    check_labels(examples, labels)
    predicted = [read_label(answer, by_text) for answer in answers]
    result = class_result(label_scores(predicted, [example.label for example in examples], labels), len(predicted))
    num_invalid = predicted.count(NO_LABEL)
    if not num_invalid:
        return result
    return result._replace(summary=f"{result.summary}, {num_invalid:,} of them without a label")


def _score_tags(
    answers: Sequence[str],
    examples: Sequence[TaggedSentence],
    by_text: Mapping[str, str],
    labels: Sequence[str],
    data: TaggedData,
) -> EvalResult:
    """Scores entities; invalid parts of an answer are skipped."""
    del labels, data
    predicted = [
        read_tags(answer, len(example.words), by_text) for answer, example in zip(answers, examples, strict=True)
    ]
    precision, recall, f1, support = entity_scores(predicted, [example.tags for example in examples])
    summary = f"entity F1 {f1:.2f} % (precision {precision:.2f} %, recall {recall:.2f} %), {support:,} entities"
    return EvalResult({"f1": f1, "precision": precision, "recall": recall}, summary)


def _score_answers(
    answers: Sequence[str],
    examples: Sequence[Question],
    by_text: Mapping[str, str],
    labels: Sequence[str],
    data: QuestionData,
) -> EvalResult:
    """Scores answers to questions by exact match and F1."""
    del by_text, labels
    return data.score({example.name: answer for example, answer in zip(examples, answers, strict=True)}, examples)


def _entity_labels(examples: Sequence[TaggedSentence]) -> list[str]:
    """Returns the distinct labels of the entities in sentences, in alphabetical order."""
    return sorted({entity.label for example in examples for entity in entities_of_tags(example.tags)})


_FORMATS: dict[type, TextFormat] = {
    LabeledData: TextFormat(
        metrics=CLASS_METRICS,
        render=render_labeled,
        labels_of=labels_of,
        score=_score_labels,
        inputs=inputs_of,
        unanswered=functools.partial(unlabeled, label=""),
    ),
    TaggedData: TextFormat(
        metrics=(
            MetricInfo("f1", "entity F1", " %"),
            MetricInfo("precision", "precision", " %"),
            MetricInfo("recall", "recall", " %"),
        ),
        render=functools.partial(render_tagged, num_marks=NUM_SENTINELS),
        labels_of=_entity_labels,
        score=_score_tags,
        inputs=lambda data: ("sentence",),
        unanswered=lambda rows: [TaggedSentence(words := split_words(row[0]), ["O"] * len(words)) for row in rows],
    ),
    QuestionData: TextFormat(
        metrics=ANSWER_METRICS,
        render=render_question,
        labels_of=lambda examples: [],
        score=_score_answers,
        inputs=lambda data: ("question", "context"),
        unanswered=unanswered,
    ),
}


def write_targets(
    model: Any, batch: Mapping[str, Array], *, max_length: int, search: Search = Greedy()
) -> Int[Array, "B L"]:
    """Returns the model's answers to sources, for `TrainedModel.predict`.

    Args:
      model: model whose configuration has the padding, start and EOS tokens.
      batch: "source" [B, S] int32; examples of padding only cost nothing.
      max_length: L, maximum number of tokens of an answer, including EOS.
      search: how tokens are chosen.

    Returns:
      Tokens including EOS, followed by padding.
    """
    token_mask = batch["source"] != model.config.pad_id
    tokens = decode(
        model.decoder(),
        batch["source"],
        token_mask,
        length_limits=jnp.where(token_mask.any(axis=1), max_length, 1),  # 1 for padding examples
        search=search,
        eos_ids=(model.config.eos_id,),
        max_length=max_length,
    )
    return jnp.where(tokens < 0, model.config.pad_id, tokens)  # `decode` returns -1 after EOS
