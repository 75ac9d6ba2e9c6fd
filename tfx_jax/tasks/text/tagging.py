"""Tagging of words, such as named entities, with a BERT (Devlin et al., 2019) or on an ELMo (Peters et al., 2018)."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import grain
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.sources.conll import TaggedSentence, is_tagged, read_tagged
from tfx_jax.data.sources.lines import split_words
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.metrics.entities import entity_scores, repair_tags, tag_names
from tfx_jax.models.bert import BertTagger
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.elmo import ElmoTagger
from tfx_jax.synthetic.grammar import grammar_tagged
from tfx_jax.tasks.artifacts import setup_json, setup_tokenizer
from tfx_jax.tasks.files import GRAMMAR_SIZES, FileData, check_files, check_share, few_boundaries, split_rows
from tfx_jax.tasks.loss import LossOutput, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import PairAttention, TrainedModel
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.answers import Prediction
from tfx_jax.tasks.text.bert_examples import bert_example
from tfx_jax.tasks.text.text_attention import TextAttention
from tfx_jax.tasks.text.word_characters import boundary_row, word_rows

IGNORED = -1  # target of positions that do not begin a word, such as later subwords; not the id of a tag

TaggedSentences = Sequence[TaggedSentence]


@documented
@dataclasses.dataclass
class TaggedData(FileData):
    """Source of the tagged sentences, and size of examples and batches."""

    dataset: str = one_of(("grammar", "files"), "grammar")  # grammar: built-in sentences
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    train_file: str = ""  # files: lines of word, TAB, BIO tag, or of CoNLL-2003; an empty line between sentences
    validation_file: str = ""
    validation_share: float = fraction(
        0.0
    )  # without validation_file: fraction of the training sentences held out for it
    test_file: str = ""
    # characters, words, wordpiece, bpe or unigram; ignored with init_from, and for a model that reads characters.
    tokenizer: str = "wordpiece"
    max_length: int = at_least(1, 128)  # tokens of a sentence, including special tokens; words beyond get the tag O
    tokens_per_batch: int = at_least(1, 2_048)  # positions of a global batch, including padding

    def load(self, split: Split) -> TaggedSentences:
        """Reads a split; a tag I at the beginning of an entity becomes B.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return grammar_tagged(split, GRAMMAR_SIZES[split])
        sentences = split_rows(self, split, lambda paths: [row for path in paths for row in read_tagged(path)])
        return [TaggedSentence(sentence.words, repair_tags(sentence.tags)) for sentence in sentences]

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        return [(" ".join(sentence.words),) for sentence in read_tagged(path)] if is_tagged(path) else None

    def validate(self, model: ModelConfig) -> None:
        check_files(self, model, what="row")
        check_share(self)

    def tiny(self) -> None:
        """Sets a small built-in data set."""
        self.dataset, self.max_length, self.tokens_per_batch = "grammar", 64, 512


@documented
@dataclasses.dataclass
class TaggingConfig(TaskConfig):
    """Predicts the BIO tag of each word: BERT from its first subword, ELMo from its characters."""

    data: TaggedData = dataclasses.field(default_factory=TaggedData)
    label_smoothing: float = fraction(0.0)

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, ("bert", "elmo"), "tagging")
        self.data.validate(model)

    def setup(self, model: Any, splits: Splits[TaggedSentences], artifacts: Artifacts) -> "TaggingTask":
        """Chooses how words are read (subwords or characters), and collects the labels of the training split."""
        if model.kind == "elmo":
            encoding = Characters(model.word_length)
        else:
            tokenizer, model = setup_tokenizer(
                artifacts,
                model,
                lambda: (" ".join(words) for words, _ in splits["train"]),
                kind=self.data.tokenizer,
                family="bert",
            )
            encoding = Subwords(tokenizer)
        labels = tuple(setup_json(artifacts, "labels.json", lambda: _labels(splits["train"])))
        return TaggingTask(self, dataclasses.replace(model, labels=labels), splits, encoding)

    def planned(self, model: Any, options: LoaderOptions) -> PlannedTask:
        encoding = Characters(model.word_length) if model.kind == "elmo" else Subwords(NO_DATA)
        arrays = {**encoding.arrays, "token_mask": (np.bool_, LENGTH), "targets": (np.int32, LENGTH)}
        batch = planned_batch(self.data, options, arrays)
        # Some tags, because without data there are none; their number hardly changes memory and time.
        model = dataclasses.replace(model, labels=("O", "B-X", "I-X"))
        return PlannedTask(TaggingTask(self, model, NO_DATA, encoding), batch)


class Subwords:
    """Encodes sentences for BERT: subwords between special tokens.

    Attributes:
      tagger: class of the model.
      tokenizer: tokenizer of the words; None for a model without one.
      arrays: the arrays that the model reads in addition to "token_mask", as for `planned_batch`.
    """

    tagger = BertTagger
    arrays: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("tokens", "token_type_ids"), (np.int32, LENGTH))

    def __init__(self, tokenizer: HFTokenizer):
        """Stores the tokenizer."""
        self.tokenizer = tokenizer

    @property
    def pad_values(self) -> Mapping[str, int]:
        """Padding values other than 0, by array."""
        return {"tokens": cast(int, self.tokenizer.pad_id)}

    def encode(self, sentences: TaggedSentences, label_ids: Mapping[str, int], max_length: int) -> list[Example]:
        """Returns one example per sentence.

        Args:
          sentences: the sentences.
          label_ids: id of each tag.
          max_length: tokens after which a sentence is cut, including special tokens.

        Returns:
          The arrays of `arrays`, "token_mask" [T] bool and "targets" [T] int32: the id of a word's tag at its first
          token, and IGNORED elsewhere.
        """
        tokens_of_words = iter(self.tokenizer.encode_batch([word for sentence in sentences for word in sentence.words]))
        # For each sentence, the tokens of each word.
        encoded = [[next(tokens_of_words) for _ in sentence.words] for sentence in sentences]
        # A word without a token gets one, see `align_tags`; 0 stands for it, because only the length matters here.
        token_ids = [[token for word in words for token in word or [0]] for words in encoded]
        _warn_shortened(token_ids, max_length)
        examples: list[Example] = []
        for sentence, words in zip(sentences, encoded, strict=True):
            tokens, targets = align_tags(
                words,
                [label_ids[tag] for tag in sentence.tags],
                unk_id=cast(int, self.tokenizer.unk_id),
                max_length=max_length - 2,  # without [CLS] and [SEP]
            )
            example = bert_example(self.tokenizer, tokens.tolist(), [], max_length)
            examples.append(example | {"targets": np.pad(targets, 1, constant_values=IGNORED)})
        return examples


class Characters:
    """Encodes sentences for a tagger of characters: words between two markers, as in pre-training; see `Subwords`."""

    tagger = ElmoTagger
    tokenizer = None
    pad_values: ClassVar[Mapping[str, int]] = {}

    def __init__(self, word_length: int):
        """Stores the number of characters per word, see `word_rows`."""
        self.word_length = word_length
        self.arrays: Mapping[str, tuple[Any, ...]] = {"characters": (np.int32, LENGTH, word_length)}

    def encode(self, sentences: TaggedSentences, label_ids: Mapping[str, int], max_length: int) -> list[Example]:
        """Returns one example per sentence, as `Subwords.encode`; a token is a word or a marker of an end."""
        width = self.word_length
        examples: list[Example] = []
        marker = boundary_row(width)[np.newaxis]
        _warn_shortened([sentence.words for sentence in sentences], max_length)
        warn_shortened(
            [word.encode() for sentence in sentences for word in sentence.words],
            width - 2,  # without the marks of a word's beginning and end
            what="words",
            effect="only their beginnings are read",
            unit="bytes",
        )
        for words, tags in sentences:
            rows = word_rows(words[: max_length - 2], width)  # without both markers
            targets = np.array([label_ids[tag] for tag in tags[: max_length - 2]], np.int32)
            examples.append(
                {
                    "characters": np.concatenate([marker, rows, marker]),
                    "token_mask": np.ones(len(rows) + 2, bool),
                    "targets": np.pad(targets, 1, constant_values=IGNORED),
                }
            )
        return examples


def _warn_shortened(sentences: Sequence[Sequence[Any]], max_length: int) -> None:
    """Warns about sentences whose tokens, and two special tokens, exceed `max_length`."""
    effect = "their ends are not read, and words there get the tag O: raise max_length or cut the sentences"
    warn_shortened(sentences, max_length - 2, what="sentences", effect=effect)


class TaggingTask(TextAttention):
    """Tagging of words.

    Attributes:
      encoding: encodes sentences for the model.
      tokenizer: tokenizer of the model, or None.
      labels: all tags of the training split, in the order of their ids.
    """

    metrics = (
        MetricInfo("f1", "entity F1", " %", note="exact entities of all labels"),
        MetricInfo("precision", "precision", " %"),
        MetricInfo("recall", "recall", " %"),
    )
    unit = "word"

    def __init__(
        self,
        config: TaggingConfig,
        model_config: Any,
        splits: Splits[TaggedSentences],
        encoding: Subwords | Characters,
    ):
        self.config, self.model_config, self.encoding = config, model_config, encoding
        self.tokenizer: Any = encoding.tokenizer
        self.labels: tuple[str, ...] = model_config.labels
        self._splits = splits

    def make_model(self, *, rngs: nnx.Rngs) -> BertTagger | ElmoTagger:
        return self.encoding.tagger(self.model_config, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: examples of similar length together."""
        data = self.config.data
        pad_values = {**self.encoding.pad_values, "targets": IGNORED}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, pad_values=pad_values)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        if "validation" in self._splits:  # raises for unknown tags before training, not at the first evaluation
            self._label_ids(self._splits["validation"], "the validation split")
        examples = ExampleList(self.encode(self._splits["train"]), by="targets")
        return train_batches(lambda epoch: examples, self.batch_spec, options)  # the same examples in every epoch

    def encode(self, sentences: TaggedSentences) -> list[Example]:
        """Returns one example per sentence, cut to `max_length`.

        Raises:
          UserError: if a tag does not occur in the training split.
        """
        return self.encoding.encode(sentences, self._label_ids(sentences), self.config.data.max_length)

    def _label_ids(self, sentences: TaggedSentences, where: str = "") -> dict[str, int]:
        """Returns the id of each tag, after checking the tags of the sentences.

        Raises:
          UserError: if a tag is unknown; if `where` is given, the message names it and the number of the sentence.
        """
        ids = {label: index for index, label in enumerate(self.labels)}
        for number, sentence in enumerate(sentences, 1):
            for tag in sentence.tags:
                if tag not in ids:
                    location = f"{where}, sentence {number}: " if where else ""
                    raise UserError(f"{location}the tag {tag!r} does not occur in the training split ({len(ids)} tags)")
        return ids

    def loss(self, model: BertTagger | ElmoTagger, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return tagging_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)

    def predict(self, model: TrainedModel, sentences: TaggedSentences) -> list[list[str]]:
        """Returns the tags of the words of each sentence; words that were cut off get the tag O."""
        examples = self.encode(sentences)
        predictions = model.predict(predict_tags, ExampleList(examples, by="targets"), self.batch_spec)
        tags = []
        for predicted, example, sentence in zip(predictions, examples, sentences, strict=True):
            targets = example["targets"]  # without padding, unlike `predicted`
            ids = tags_of_words(np.array(predicted)[: len(targets)], targets, len(sentence.words))
            tags.append([self.labels[tag] for tag in ids])
        return tags

    inputs = ("sentence",)
    empty_answer: ClassVar[Prediction] = {"tags": [], "words": []}

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns tags and words of each sentence of space-separated words."""
        word_lists = [split_words(row[0]) for row in rows]
        placeholder = self.labels[0]  # a tag for each word, which the prediction ignores
        sentences = [TaggedSentence(words, [placeholder] * len(words)) for words in word_lists]
        tags = self.predict(model, sentences)
        pairs = zip(tags, sentences, strict=True)
        return [{"tags": predicted, "words": sentence.words} for predicted, sentence in pairs]

    def attention_inputs(self) -> Iterator[Sequence[str]]:
        return ((" ".join(sentence.words),) for sentence in self._splits["validation"])

    def attention(self, model: TrainedModel, source: str, target: str | None = None) -> PairAttention:
        """Returns the attention maps of a sentence of space-separated words; see `text_attention`.

        Raises:
          UserError: also if the model reads characters, and so has no attention.
        """
        if self.tokenizer is None:
            raise UserError(f"a model of {type(self.model_config).__name__} has no attention to draw")
        return super().attention(model, source, target)

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Tags every sentence of a split and scores the entities."""
        sentences = self._splits[split]
        tags = self.predict(model, sentences)
        precision, recall, f1, support = entity_scores(tags, [sentence.tags for sentence in sentences])
        values = {"f1": f1, "precision": precision, "recall": recall}
        return eval_result(self.metrics, values, f"{support:,} entities")


def _labels(sentences: TaggedSentences) -> list[str]:
    """Returns "O" and, for each entity label, its B and I tags."""
    return tag_names(tag[2:] for sentence in sentences for tag in sentence.tags if tag != "O")


def align_tags(
    pieces: Sequence[Sequence[int]], tags: Sequence[int], *, unk_id: int, max_length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns the tag of each word to its first subword, as BERT's tagging does (Devlin et al., 2019, section 5.3).

    Args:
      pieces: subwords of each word; a word without any, such as a character that the tokenizer drops, gets `unk_id`.
      tags: id of each word's tag.
      unk_id: id of the unknown subword.
      max_length: maximum number of subwords to return; None returns all.

    Returns:
      A pair: subwords and their targets, both [T] int32; the target is IGNORED at later subwords of a word.

    Raises:
      ValueError: if the numbers of words and tags differ.

    >>> align_tags([[5, 6], [7]], [2, 0], unk_id=1)
    (array([5, 6, 7], dtype=int32), array([ 2, -1,  0], dtype=int32))
    """
    if len(pieces) != len(tags):
        raise ValueError(f"{len(pieces)} words but {len(tags)} tags: each word needs exactly one")
    words = [word if len(word) else [unk_id] for word in pieces]
    ids = [piece for word in words for piece in word]
    targets: list[int] = []
    for word, tag in zip(words, tags, strict=True):
        targets += [tag, *[IGNORED] * (len(word) - 1)]
    return np.array(ids[:max_length], np.int32), np.array(targets[:max_length], np.int32)


def tagging_loss(
    model: BertTagger | ElmoTagger,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """Sums the cross entropy of the tags of words at their first subwords (Devlin et al., 2019, section 5.3).

    Args:
      model: a tagger, which returns the logits of the tags of each token, [B, T, tags].
      batch: "tokens" and "token_type_ids" [B, T] int32 or "characters" [B, T, W] int32, "token_mask" [B, T] bool and
        "targets" [B, T] int32, the id of a tag or IGNORED, as from `align_tags`; IGNORED at special tokens and padding.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      The output of `summed_cross_entropy` over words; `num_tokens` counts the tokens read.
    """
    logits = _logits(model, batch, rngs)
    is_word = batch["targets"] != IGNORED
    targets = jnp.where(is_word, batch["targets"], 0)  # a valid tag, because weight 0 does not hide an invalid one
    output = summed_cross_entropy(logits, targets, is_word.astype(jnp.float32), label_smoothing=label_smoothing)
    return output._replace(num_tokens=batch["token_mask"].sum(dtype=jnp.float32))


def predict_tags(model: BertTagger | ElmoTagger, batch: dict[str, Array]) -> Int[Array, "B T"]:
    """Returns the id of the most likely tag of each token, for `TrainedModel.predict`.

    `batch` is as for `tagging_loss`, without targets.
    """
    return _logits(model, batch, rngs=None).argmax(axis=-1)


def _logits(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> Array:
    """Calls a tagger with the arrays that it reads."""
    inputs = [batch[name] for name in ("characters", "tokens", "token_type_ids") if name in batch]
    return model(*inputs, token_mask=batch["token_mask"], rngs=rngs)


def tags_of_words(predictions: np.ndarray, targets: np.ndarray, num_words: int, *, outside_id: int = 0) -> list[int]:
    """Returns the predictions at the first subwords of words, in order: the inverse of `align_tags`.

    Args:
      predictions: id of a tag for each subword, [T] int.
      targets: targets of `align_tags`, [T] int, possibly followed by IGNORED.
      num_words: number of words in the sentence; words that were cut off get `outside_id`.
      outside_id: id of the tag "O".
    """
    ids = np.asarray(predictions)[np.asarray(targets) != IGNORED].tolist()
    return ids + [outside_id] * (num_words - len(ids))
