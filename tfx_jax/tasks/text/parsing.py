"""Constituency parsing as translation: a sentence in, its tree out (Vinyals et al., 2015; Vaswani et al., 2017).

"Grammar as a Foreign Language" (https://arxiv.org/abs/1412.7449) and section 6.3 of "Attention Is All You Need". The
source is the words, as subwords; the target is the linearized tree, one token per symbol. Symbols follow the subwords
in the joint vocabulary. The search writes only trees over exactly these words (`TreeConstraint`). Without that, as in
the papers, the output is repaired to such a tree; the share of repaired trees is a metric.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Bool, Int

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.sources.lines import is_blank, list_of_texts
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.sources.trees import (
    Parse,
    Tree,
    delinearize,
    is_bracket,
    is_treebank,
    linearize,
    read_trees,
    split_words,
    write_tree,
)
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.generation.decoding import BeamSearch, DecodingConfig
from tfx_jax.metrics.brackets import bracket_scores
from tfx_jax.models.config import EncoderDecoderConfig, ModelConfig, require_kind
from tfx_jax.nn.decoding import Decoder
from tfx_jax.synthetic.grammar import grammar_trees
from tfx_jax.tasks.artifacts import setup_json, setup_tokenizer
from tfx_jax.tasks.files import GRAMMAR_SIZES, FileData, check_batch, check_share, few_boundaries, split_rows
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import PairAttention, TrainedModel, drawable_pair, pair_attention
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig
from tfx_jax.tasks.text.answers import Prediction
from tfx_jax.tasks.text.translation import Translator, check_output_length, translation_loss

_SEARCH_TOKENS = 8_192  # source positions times beams of a search batch, as in translation with a beam of 4


@documented
@dataclasses.dataclass
class TreeData(FileData):
    """Source of the trees, and size of examples and batches."""

    dataset: str = one_of(("grammar", "files"), "grammar")  # grammar: built-in trees
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    train_file: str = ""  # files: trees, "(TOP (S (NP (DT a) ...", plain or .gz, without function tags
    validation_file: str = ""
    validation_share: float = fraction(0.0)  # without validation_file: fraction of the training trees held out for it
    test_file: str = ""
    tokenizer: str = one_of(("sentencepiece", "words", "characters"), "sentencepiece")  # tokenizer of the words
    # Tokens of a sentence or of its tree, including EOS. Longer training trees are left out; a longer sentence is not
    # parsed: it gets a flat tree, which is scored.
    max_length: int = at_least(2, 256)
    tokens_per_batch: int = at_least(1, 4_096)  # positions of each side of a global batch, including padding

    def load(self, split: Split) -> Sequence[Tree]:
        """Reads a split.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return grammar_trees(split, GRAMMAR_SIZES[split])
        return split_rows(self, split, lambda paths: [tree for path in paths for tree in read_trees(path)])

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        """Returns the words of the trees in a treebank; see `FileData.read_inputs`."""
        return [(" ".join(tree.words),) for tree in read_trees(path)] if is_treebank(path) else None

    def tiny(self) -> None:
        """Sets a small built-in treebank."""
        self.dataset, self.max_length, self.tokens_per_batch = "grammar", 64, 512


@documented
@dataclasses.dataclass
class ParsingConfig(TaskConfig):
    """Writes the constituency tree of a sentence; the search is the paper's (section 6.3)."""

    data: TreeData = dataclasses.field(default_factory=TreeData)
    write_tags: bool = False  # whether trees contain the tags of words; else XX for each, as in the papers
    label_smoothing: float = fraction(0.1)
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token
    only_trees: bool = True  # whether the search writes only trees over the words; else its output is repaired
    decoding: DecodingConfig = dataclasses.field(
        default_factory=lambda: DecodingConfig(beam_size=21, length_penalty=0.3, extra_length=300)
    )

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is an encoder-decoder with enough positions for a tree."""
        require_kind(model, "encoder_decoder", "parsing")
        check_batch(self.data, what="tree")
        check_share(self.data)
        check_output_length(model, self.data.max_length, self.decoding, what="tree")

    def tiny(self) -> None:
        self.data.tiny()
        self.decoding.beam_size, self.decoding.extra_length = 2, 16

    def setup(self, model: EncoderDecoderConfig, splits: Splits[Sequence[Tree]], artifacts: Artifacts) -> "ParsingTask":
        """Sets up the task. The tokens of symbols are added to `model.vocab_size`.

        A pretrained model keeps its tokens; their meaning is the same if its training trees had the same symbols.

        Raises:
          UserError: also if the pretrained model has too few tokens for the symbols.
        """
        tokenizer, model = setup_tokenizer(
            artifacts,
            model,
            lambda: (" ".join(tree.words) for tree in splits["train"]),
            kind=self.data.tokenizer,
            family="marian",
        )
        symbols = setup_json(
            artifacts,
            "symbols.json",
            lambda: sorted({symbol for tree in splits["train"] for symbol in self.target(tree)}),
        )
        size = tokenizer.vocab_size + len(symbols)
        if artifacts.starts_from_model and model.vocab_size < size:
            raise UserError(
                f"the model of config.init_from has vocab_size={model.vocab_size}, but parsing needs {size} "
                f"({tokenizer.vocab_size} word pieces and {len(symbols)} tree symbols): start from a model that was "
                "trained to parse"
            )
        if not artifacts.starts_from_model:
            model = dataclasses.replace(cast(Any, model), vocab_size=size)
        return ParsingTask(self, model, splits, tokenizer, symbols)

    def planned(self, model: EncoderDecoderConfig, options: LoaderOptions) -> PlannedTask:
        batch = planned_batch(self.data, options, dict.fromkeys(("source", "target"), (np.int32, LENGTH)))
        return PlannedTask(ParsingTask(self, model, NO_DATA, NO_DATA, []), batch)

    def target(self, tree: Tree) -> list[str]:
        """Returns the target symbols of a tree."""
        return linearize(tree, with_tags=self.write_tags)


class ParsingTask:
    """Parsing with an encoder and a decoder.

    Attributes:
      tokenizer: tokenizer of the words.
      symbols: symbols of the training trees; their tokens follow those of the tokenizer.
    """

    metrics = (
        MetricInfo("f1", "bracket F1", " %", note="as EVALB counts with COLLINS.prm"),
        MetricInfo("precision", "precision", " %"),
        MetricInfo("recall", "recall", " %"),
        MetricInfo("exact_match", "exact match", " %", digits=1),
        MetricInfo("repaired", "repaired trees", " %", is_loss=True),
    )
    unit = "target token"

    def __init__(
        self,
        config: ParsingConfig,
        model_config: EncoderDecoderConfig,
        splits: Splits[Sequence[Tree]],
        tokenizer: HFTokenizer,
        symbols: Sequence[str],
    ):
        self.config, self.model_config, self.tokenizer, self.symbols = config, model_config, tokenizer, symbols
        self._splits = splits

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return self.model_config.make(rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: examples of similar length together."""
        data, pad_id = self.config.data, cast(int, self.tokenizer.pad_id)
        pad_values = {"source": pad_id, "target": pad_id}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, pad_values=pad_values)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns the training data, without examples whose sentence or tree exceeds `max_length` tokens.

        Raises:
          UserError: if no example is left.
        """
        encoded = self.encode(self._splits["train"])
        limit = self.config.data.max_length
        examples = ExampleList(encoded, by="target")
        lengths = np.array([max(map(len, example.values())) for example in encoded])
        if lengths.min() > limit:
            raise UserError(
                f"every training tree or its sentence has more than {limit} tokens: raise config.task.data.max_length"
            )
        examples.lengths = np.where(lengths <= limit, lengths, -1)  # -1: left out of all batches
        # The same examples in every epoch.
        return train_batches(lambda epoch: examples, self.batch_spec, options, num_examples=len(encoded))

    def encode(self, trees: Sequence[Tree]) -> list[Example]:
        """Returns trees as {"source" [S], "target" [T]}, int32, each including EOS.

        Raises:
          UserError: if a symbol does not occur in the training split.
        """
        eos_id = cast(int, self.tokenizer.eos_id)
        ids = {symbol: token for token, symbol in enumerate(self.symbols, start=self.tokenizer.vocab_size)}
        sources = self.tokenizer.encode_batch([" ".join(tree.words) for tree in trees])
        targets = [self.config.target(tree) for tree in trees]
        for symbol in (symbol for target in targets for symbol in target):
            if symbol not in ids:
                raise UserError(
                    f"the symbol {symbol!r} of a tree does not occur in the training split ({len(ids)} symbols)"
                )
        examples: list[Example] = []
        for source, target in zip(sources, targets, strict=True):
            target_ids = [ids[symbol] for symbol in target]
            examples.append(
                {
                    "source": np.array([*source, eos_id], np.int32),
                    "target": np.array([*target_ids, eos_id], np.int32),
                }
            )
        return examples

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return translation_loss(model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss)

    def translator(
        self,
        graphdef: nnx.GraphDef[Any],
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        int8: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> "SentenceParser":
        """Returns a parser with the search of the configuration or another; see `TranslationTask.translator`."""
        decoding, max_length = self.config.decoding, self.config.data.max_length
        beam_size = decoding.beam_size if beam_size is None else beam_size
        translator = Translator(
            graphdef,
            self.tokenizer,
            search=BeamSearch(beam_size, decoding.length_penalty if length_penalty is None else length_penalty),
            extra_length=decoding.extra_length,
            max_source_length=max_length,
            tokens_per_batch=max(max_length, _SEARCH_TOKENS // beam_size),
            constraint=self._constraint if self.config.only_trees else None,
            int8=int8,
            on_batch=on_batch,
        )
        return SentenceParser(translator, self.symbols, max_length=max_length)

    @property
    def _constraint(self) -> "TreeConstraint":
        """What the search may write."""
        return TreeConstraint(
            tuple(self.symbols),
            first_id=self.tokenizer.vocab_size,
            eos_id=cast(int, self.tokenizer.eos_id),
            vocab_size=self.model_config.vocab_size,
        )

    def parse(self, model: TrainedModel, sentences: Sequence[str]) -> list[Parse]:
        """Parses sentences of space-separated words; processes share them, and each gets all parses."""
        parser = self.translator(model.graphdef)
        return model.share(lambda lines: parser.parse(model.decoder, lines), sentences)

    def predict(self, model: TrainedModel, sentences: Sequence[str]) -> list[str]:
        """Returns the trees of sentences as text, one line each."""
        return [write_tree(parse.tree) for parse in self.parse(model, sentences)]

    inputs = ("sentence",)
    empty_answer: ClassVar[Prediction] = {"tree": ""}

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Parses each sentence of space-separated words."""
        return [{"tree": tree} for tree in self.predict(model, [row[0] for row in rows])]

    def attention_example(self, model: TrainedModel) -> PairAttention | None:
        texts = ((" ".join(tree.words), " ".join(self.config.target(tree))) for tree in self._splits["validation"])
        pair = drawable_pair(texts, str.split)
        return None if pair is None else self.attention(model, pair[0])

    def attention(self, model: TrainedModel, source: str, target: str | None = None) -> PairAttention:
        """Computes every attention map of a sentence and the tree that the model writes.

        Raises:
          UserError: if a target is given.
        """
        if target is not None:
            raise UserError("attention is drawn for the tree that the model itself predicts: pass no target")
        (parse,) = self.parse(model, [source])
        (example,) = self.encode([parse.tree])
        symbols = [*self.config.target(parse.tree), "</s>"]
        maps = pair_attention(model, example["source"], example["target"])
        return PairAttention(maps, self.tokenizer.pieces(example["source"].tolist()), symbols)

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Parses every sentence of a split and scores the trees."""
        trees = self._splits[split]
        return self.score(self.parse(model, [" ".join(tree.words) for tree in trees]), trees)

    def score(self, parses: Sequence[Parse], trees: Sequence[Tree]) -> EvalResult:
        """Compares parses with the true trees of their sentences."""
        scores = bracket_scores([parse.tree for parse in parses], trees)
        repaired = 100 * sum(parse.is_repaired for parse in parses) / len(parses)
        values = {metric.name: getattr(scores, metric.name) for metric in self.metrics[:-1]}  # all but "repaired"
        return EvalResult(
            {**values, "repaired": repaired},
            f"bracket F1 {scores.f1:.2f} %, precision {scores.precision:.2f} %, recall {scores.recall:.2f} %, exact "
            f"match {scores.exact_match:.1f} %, {repaired:.1f} % of {len(parses):,} trees repaired",
        )


class SentenceParser:
    """Parses sentences."""

    def __init__(self, translator: Translator, symbols: Sequence[str], *, max_length: int):
        """Wraps a translator from sentences to tokens of trees.

        Args:
          translator: translates sentences to token ids.
          symbols: symbols of trees, whose tokens follow those of the tokenizer.
          max_length: sentences of more tokens, including EOS, are not parsed.
        """
        self._translator, self._symbols, self._max_length = translator, symbols, max_length

    def decoder(self, params: Any) -> Decoder:
        """Returns the decoder of the model with these parameters, see `Translator.decoder`."""
        return self._translator.decoder(params)

    def __call__(self, params: Any, lines: Sequence[str]) -> list[str]:
        """Returns the tree of each line as text; an empty line stays empty. `params` are those of `Translator`."""
        return [write_tree(parse.tree) for parse in self.parse(params, lines)]

    def parse(self, params: Any, lines: Sequence[str]) -> list[Parse]:
        """Parses each line; a line that is too long gets a flat tree, which counts as repaired."""
        sentences = [[] if is_blank(line) else split_words(line) for line in list_of_texts(lines, "lines")]
        texts = [" ".join(words) for words in sentences]
        encoded = self._translator.tokenizer.encode_batch(texts)
        warn_shortened(encoded, self._max_length - 1, what="sentences", effect="they are not read and get flat trees")
        # A text that is too long is replaced by an empty one, which is not translated: its tree has no symbols, and is
        # repaired to a flat one. `_max_length` includes EOS.
        short_texts = [
            text if len(tokens) < self._max_length else "" for text, tokens in zip(texts, encoded, strict=True)
        ]
        outputs = self._translator.translate_ids(params, short_texts, [len(words) for words in sentences])
        eos_id = self._translator.tokenizer.eos_id
        parses = []
        for words, ids in zip(sentences, outputs, strict=True):
            symbols = [self._symbol(token) for token in ids if token != eos_id]
            parses.append(delinearize(symbols, words))
        return parses

    def _symbol(self, token: int) -> str:
        """Returns the symbol of a token; "" if it is the token of a word."""
        index = token - self._translator.tokenizer.vocab_size
        return self._symbols[index] if 0 <= index < len(self._symbols) else ""


class _OpenTree(NamedTuple):
    """State of `TreeConstraint`: the symbols of each row so far, which are the beginning of a tree."""

    labels: Int[Array, "R D"]  # labels of the open constituents, the root first; the rest is arbitrary
    depth: Int[Array, " R"]  # number of open constituents
    is_empty: Bool[Array, " R"]  # whether the innermost one has neither words nor constituents yet
    num_missing: Int[Array, " R"]  # words that are not in the tree yet
    room: Int[Array, " R"]  # tokens up to the length limit, EOS included


@dataclasses.dataclass(frozen=True)
class TreeConstraint:
    """Allows only trees over a given number of words: a `tfx_jax.generation.decoding.Constraint`.

    Every constituent has a word, its end repeats its label, and the root ends after the last word. A constituent begins
    only if all words and ends still fit below the length limit, so that each search ends with a tree, unless even the
    flat one is too long.

    Attributes:
      symbols: symbols of trees, see `tfx_jax.data.sources.trees.linearize`.
      first_id: token of the first symbol; the others follow.
      eos_id: token that ends a tree.
      vocab_size: V, the number of tokens, at least that of `first_id` and all symbols.
    """

    symbols: tuple[str, ...]
    first_id: int
    eos_id: int
    vocab_size: int

    def init(self, values: Int[Array, " B"], length_limits: Int[Array, " B"], max_length: int) -> _OpenTree:
        """Returns the state before the first symbol; `values` are the numbers of words."""
        num_rows, max_depth = len(values), max_length // 2 + 1  # each constituent has two symbols
        return _OpenTree(
            labels=jnp.zeros((num_rows, max_depth), jnp.int32),
            depth=jnp.zeros(num_rows, jnp.int32),
            is_empty=jnp.zeros(num_rows, bool),
            num_missing=jnp.asarray(values, jnp.int32),
            room=jnp.asarray(length_limits, jnp.int32),
        )

    def advance(self, state: _OpenTree, tokens: Int[Array, " R"]) -> _OpenTree:
        """Adds a symbol to each tree; tokens that are no symbols change nothing."""
        begins, ends, is_word, label_of = jax.tree.map(lambda table: jnp.asarray(table)[tokens], self._tables)
        rows = jnp.arange(len(tokens))
        return _OpenTree(
            # A row that begins nothing writes beyond its open constituents, where the labels are arbitrary.
            labels=state.labels.at[rows, state.depth].set(label_of, mode="drop"),
            depth=state.depth + begins - ends,
            is_empty=jnp.where(begins | ends | is_word, begins, state.is_empty),
            num_missing=state.num_missing - is_word,
            room=state.room - (begins | ends | is_word),
        )

    def allowed(self, state: _OpenTree) -> Bool[Array, "R V"]:
        """Returns which symbols may follow, or EOS."""
        begins, ends, is_word, label_of = (table[None] for table in self._tables)  # [1, V]
        depth, num_missing = state.depth, state.num_missing
        innermost = jnp.take_along_axis(state.labels, jnp.maximum(depth - 1, 0)[:, None], axis=1)  # [R, 1]
        # One constituent more needs its two symbols, and the end of each one that is open; the tree needs EOS.
        may_begin = (num_missing > 0) & (state.room >= num_missing + depth + 3)
        may_end = (depth > 0) & ~state.is_empty & ((depth > 1) | (num_missing == 0))
        may_add_word = (depth > 0) & (num_missing > 0)
        is_complete = (depth == 0) & (num_missing == 0)
        return (
            (may_begin[:, None] & begins)
            | (may_end[:, None] & ends & (label_of == innermost))
            | (may_add_word[:, None] & is_word)
            | (is_complete[:, None] & (np.arange(self.vocab_size) == self.eos_id)[None])
        )

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each token whether it begins or ends a constituent or is a word, and the number of its label, all [V]."""
        names = sorted({symbol[1:] for symbol in self.symbols if is_bracket(symbol)})
        labels = {name: number for number, name in enumerate(names)}
        begins, ends, is_word = np.zeros((3, self.vocab_size), bool)
        label_of = np.zeros(self.vocab_size, np.int32)
        for token, symbol in enumerate(self.symbols, start=self.first_id):
            begins[token], ends[token], is_word[token] = symbol[0] == "(", symbol[0] == ")", not is_bracket(symbol)
            label_of[token] = labels.get(symbol[1:], 0)
        return begins, ends, is_word, label_of
