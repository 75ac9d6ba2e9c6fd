"""A T5 that learns a task as text to text (Raffel et al., 2020, section 2.4): classes, tags or answers."""

import abc
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Array

from tfx_jax.data.batching import BatchSpec, Example
from tfx_jax.data.conll import TaggedSentence, read_tagged
from tfx_jax.data.labelled import LabelledPair, LabelledText
from tfx_jax.data.span_corruption import NUM_SENTINELS
from tfx_jax.data.splits import Split
from tfx_jax.data.squad import Question, read_questions
from tfx_jax.errors import UserError
from tfx_jax.models.t5 import T5
from tfx_jax.tasks.answer_scores import answer_scores, character_exact_match, character_f1
from tfx_jax.tasks.decoding import BeamSearch, Greedy
from tfx_jax.tasks.tagging import entities_of_tags, entity_scores
from tfx_jax.tasks.text_to_text import (
    NO_LABEL,
    Rendered,
    label_scores,
    label_text,
    labels_by_text,
    read_label,
    read_tags,
    render_labelled,
    render_question,
    render_tagged,
    write_targets,
)
from tfx_jax.toy_grammar import grammar_questions, grammar_tagged
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.classification import load_labelled_split
from tfx_jax.training.experiments.examples import GRAMMAR_SIZES, ExamplesExperiment, Record, made_once
from tfx_jax.training.experiments.t5 import T5Experiment
from tfx_jax.training.step import Params


class TextToTextExperiment(T5Experiment[Sequence[Record]], ExamplesExperiment[Record]):
    """A T5 trained on examples of a task; subclasses say how these are written, and answers scored.

    As in the paper, a source longer than `max_length` is cut.

    Attributes:
      labels: of the training split; kept in the workdir.
      target_length: tokens of the longest target of the training split, its end included; answers are no longer.
    """

    length_of = "source"

    @abc.abstractmethod
    def render(self, example: Record) -> Rendered:
        """Source and target of an example."""

    @abc.abstractmethod
    def score(self, answers: Sequence[str], examples: Sequence[Record]) -> Evaluation:
        """Scores what a model wrote for each example; sentinels are spelled out."""

    def labels_of(self, examples: Sequence[Record]) -> list[str]:
        """The labels of some examples; none for a task without."""
        del examples
        return []

    def predict_batch(self, model: T5, batch: dict[str, Array]) -> Array:
        """See `write_targets`."""
        size = self.config.decoding.beam_size
        search = Greedy() if size == 1 else BeamSearch(size, self.config.decoding.alpha)
        return write_targets(model, batch, max_length=self.target_length, search=search)

    def tokenizer_text(self) -> Iterable[str]:
        """Sources and targets of the training split."""
        return itertools.chain(*map(self.render, self.split("train")))

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads tokenizer, labels and length of `workdir`, or makes them from the training split and saves them."""
        super().open(workdir, can_make=can_make)
        found = made_once(workdir, "targets.json", self._targets, can_make=can_make)
        self.labels: list[str] = found["labels"]
        self.target_length: int = found["length"]
        self._check_labels()

    @property
    def batch_spec(self) -> BatchSpec:
        """Sources of similar length together; all targets are equally wide."""
        widths = {"target": self.target_length}
        return BatchSpec(self.boundaries, self.config.data.tokens_per_batch, self.pad_values, widths)

    def rows(self, examples: Sequence[Record]) -> list[Example]:
        """Examples as {"source" [S], "target" [T]}, int32, each with its end."""
        rendered = [self.render(example) for example in examples]
        sides = {"source": self.config.data.max_length, "target": self.target_length}
        encoded = {
            name: self.tokenizer.encode_batch([getattr(example, name) for example in rendered]) for name in sides
        }
        return [
            {
                name: np.array([*ids[: sides[name] - 1], self.specials.eos_id], np.int32)
                for name, ids in zip(sides, both, strict=True)
            }
            for both in zip(*encoded.values(), strict=True)
        ]

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Answers every source by a search and scores that."""
        examples = self.split(split)
        return self.score(self.answer(params, examples), examples)

    def answer(self, params: Params, examples: Sequence[Record]) -> list[str]:
        """What the model writes for examples, whose targets it does not see; processes share them."""
        return [self.spell(tokens) for tokens in self.predict(params, self.rows(examples))]

    def spell(self, ids: Sequence[int]) -> str:
        """The text of tokens up to the end, sentinels spelled out."""
        number = {sentinel: place for place, sentinel in enumerate(self.specials.sentinels)}
        text = list(itertools.takewhile(lambda token: token != self.specials.eos_id, ids))
        parts = []
        for is_sentinel, group in itertools.groupby(text, key=number.__contains__):
            if is_sentinel:
                parts += [f"<extra_id_{number[token]}>" for token in group]
            else:
                parts.append(self.tokenizer.decode(group).strip())
        return " ".join(parts)

    def as_written(self, text: str) -> str:
        """A text as a model writes it at best: with what the tokenizer leaves of it."""
        return self.spell(self.tokenizer.encode(text))

    @functools.cached_property
    def labels_as_written(self) -> dict[str, str]:
        """The labels by their texts as a model writes them."""
        return {label_text(self.as_written(text)): label for text, label in labels_by_text(self.labels).items()}

    def _check_labels(self) -> None:
        """Refuses labels that an answer cannot tell apart."""
        try:
            lost = set(self.labels) - set(self.labels_as_written.values()) | {self.labels_as_written.get(NO_LABEL)}
        except ValueError as error:
            raise UserError(f"{error}: rename one") from None
        for label in self.labels:
            if label in lost:
                raise UserError(f"the tokenizer cannot spell the label {label!r} apart from others: rename it")

    def _targets(self) -> dict[str, Any]:
        examples = self.split("train")
        encoded = self.tokenizer.encode_batch([self.render(example).target for example in examples])
        length = max(map(len, encoded)) + 1
        limit = getattr(self.config.data, "max_answer_length", None)
        return {"labels": self.labels_of(examples), "length": length if limit is None else min(length, limit + 1)}


class ClassificationAsTextExperiment(TextToTextExperiment[LabelledText | LabelledPair]):
    """A T5 that writes the label of a text, or of a pair of texts."""

    scores = (Score("accuracy", "accuracy", " %"), Score("macro_f1", "macro F1", " %"))

    def load_split(self, split: Split) -> Sequence[LabelledText | LabelledPair]:
        """Texts or pairs and their labels."""
        return load_labelled_split(self.config.data, split)

    def render(self, example: LabelledText | LabelledPair) -> Rendered:
        """See `render_labelled`."""
        return render_labelled(example)

    def labels_of(self, examples: Sequence[LabelledText | LabelledPair]) -> list[str]:
        """The labels of some examples, in alphabetical order."""
        return sorted({example.label for example in examples})

    def score(self, answers: Sequence[str], examples: Sequence[LabelledText | LabelledPair]) -> Evaluation:
        """Scores labels; an answer that is none is wrong."""
        for example in examples:
            if example.label not in self.labels:
                raise UserError(f"the label {example.label!r} is none of the {len(self.labels)} of the training split")
        found = [read_label(answer, self.labels_as_written) for answer in answers]
        accuracy, macro_f1 = label_scores(found, [example.label for example in examples], self.labels)
        text = f"accuracy {accuracy:.2f} %, macro F1 {macro_f1:.2f} %, {len(found):,} texts"
        strange = found.count(NO_LABEL)
        text += f", {strange:,} of them without a label" if strange else ""
        return Evaluation({"accuracy": accuracy, "macro_f1": macro_f1}, text)


class TaggingAsTextExperiment(TextToTextExperiment[TaggedSentence]):
    """A T5 that writes down the entities of a sentence."""

    scores = (
        Score("f1", "entity F1", " %"),
        Score("precision", "precision", " %"),
        Score("recall", "recall", " %"),
    )

    def load_split(self, split: Split) -> Sequence[TaggedSentence]:
        """Sentences and their tags."""
        data = self.config.data
        if data.dataset == "grammar":
            return grammar_tagged(split, GRAMMAR_SIZES[split])
        return read_tagged(epath.Path(data.data_dir) / getattr(data, f"{split}_file"))

    def render(self, example: TaggedSentence) -> Rendered:
        """See `render_tagged`."""
        return render_tagged(example, num_marks=NUM_SENTINELS)

    def labels_of(self, examples: Sequence[TaggedSentence]) -> list[str]:
        """The labels of entities, in alphabetical order."""
        return sorted({entity.label for example in examples for entity in entities_of_tags(example.tags)})

    def score(self, answers: Sequence[str], examples: Sequence[TaggedSentence]) -> Evaluation:
        """Scores entities; what is none in the answer is passed over."""
        found = [
            read_tags(answer, len(example.words), self.labels_as_written)
            for answer, example in zip(answers, examples, strict=True)
        ]
        precision, recall, f1, support = entity_scores(found, [example.tags for example in examples])
        text = f"entity F1 {f1:.2f} % (precision {precision:.2f} %, recall {recall:.2f} %), {support:,} entities"
        return Evaluation({"f1": f1, "precision": precision, "recall": recall}, text)


class AnsweringAsTextExperiment(TextToTextExperiment[Question]):
    """A T5 that writes the answer to a question on a text.

    `stride` and `max_question_length` are without effect: there are no windows.
    """

    scores = (Score("f1", "F1", " %"), Score("exact_match", "exact match", " %"))

    def load_split(self, split: Split) -> Sequence[Question]:
        """Questions, their contexts and answers."""
        data = self.config.data
        if data.dataset == "grammar":
            return grammar_questions(split, GRAMMAR_SIZES[split])
        return read_questions(epath.Path(data.data_dir) / getattr(data, f"{split}_file"))

    def render(self, example: Question) -> Rendered:
        """See `render_question`."""
        return render_question(example)

    def score(self, answers: Sequence[str], examples: Sequence[Question]) -> Evaluation:
        """Scores answers as the configuration says."""
        predictions = {example.name: answer for example, answer in zip(examples, answers, strict=True)}
        references = {example.name: [answer.text for answer in example.answers] for example in examples}
        functions: dict[str, Any] = {}
        if self.config.data.scoring == "characters":
            functions = {"exact_match_fn": character_exact_match, "f1_fn": character_f1}
        exact_match, f1 = answer_scores(predictions, references, **functions)
        text = f"F1 {f1:.2f} %, exact match {exact_match:.2f} %, {len(references):,} questions"
        return Evaluation({"f1": f1, "exact_match": exact_match}, text)
