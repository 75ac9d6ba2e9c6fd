"""Translation: sentence pairs from files, TFDS or the built-in grammar, beam search, BLEU."""

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching.batches import Batch, BatchSpec, ExampleList, LoaderOptions
from tfx_jax.data.batching.pairs import pair_batches
from tfx_jax.data.sources.lines import is_blank, list_of_texts, read_lines
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.sources.text import PairSource, join_pairs, join_subwords, lines_of, read_pairs, read_tsv, split_pairs
from tfx_jax.data.sources.tfds import tfds_pairs
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.losses import symmetric_kl_divergence
from tfx_jax.generation.decoding import BeamSearch, Constraint, DecodeDriver, DecodingConfig, Search
from tfx_jax.metrics.bleu import BleuScores, bleu_scores
from tfx_jax.models.config import EncoderDecoderConfig, ModelConfig, require_kind
from tfx_jax.nn.decoding import Decoder
from tfx_jax.synthetic.grammar import GrammarPairs
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.files import check_batch, few_boundaries, named_paths
from tfx_jax.tasks.loss import LossOutput, Metric, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import PairAttention, TrainedModel, drawable_pair, pair_attention
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, ReportTable, TaskConfig
from tfx_jax.tasks.text.answers import Prediction


@documented
@dataclasses.dataclass
class PairData:
    """Source of the sentence pairs, and how they become batches."""

    dataset: str = "grammar"  # "grammar" (built in), "files", or a TFDS name such as "wmt14_translate/de-en"
    # TFDS: folder of the prepared data set; files: folder of the files below, each of which may be several, "a.en,b.en"
    # or "part-*.en" (sorted), with equally many target files
    data_dir: str = ""
    train_source: str = ""  # files: one sentence per line, plain or .gz; a .tsv has both sides and needs no target
    train_target: str = ""
    validation_source: str = ""
    validation_target: str = ""
    test_source: str = ""
    test_target: str = ""
    # files: without a validation file, pairs set aside for validation, at most a tenth
    validation_pairs: int = at_least(0, 0)
    source_language: str = ""  # files, TFDS: code such as "de"; the grammar is English to Japanese
    target_language: str = ""  # files, TFDS: code such as "en"; decides how translations are tokenized and scored
    is_tokenized: bool = False  # files, TFDS: whether the text consists of space-separated tokens, like the grammar's
    # "words": text is already segmented, as with "@@ "; ignored with init_from, whose tokenizer should be of this kind
    tokenizer: str = one_of(("sentencepiece", "words", "characters"), "sentencepiece")
    max_length: int = at_least(1, 256)  # tokens of a sentence, including EOS; longer training pairs are left out
    tokens_per_batch: int = at_least(1, 25_000)  # positions of each side of a global batch, including padding (paper)
    sort_buffer: int = at_least(1, 65_536)  # number of pairs that are sorted by length together
    # BPE-dropout: probability that a merge is left out in training, so that each epoch splits words differently; 0.1
    # in the paper (Provilkov et al., 2020). A model learns slower, so it is for long trainings; sentences become a
    # seventh to a third longer
    bpe_dropout: float = fraction(0.0)

    def has_split(self, split: Split) -> bool:
        """Returns whether the configuration names a split; files may have none for validation or test."""
        return self.dataset != "files" or bool(getattr(self, f"{split}_source")) or self._is_set_aside(split)

    def load(self, split: Split) -> PairSource:
        """Opens a split. Evaluation splits keep empty lines, because every line counts there.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return GrammarPairs(split)
        if self.dataset == "files":
            return self._open_files(split)
        return tfds_pairs(
            self.dataset,
            split,
            data_dir=self.data_dir,
            source_language=self.source_language,
            target_language=self.target_language,
        )

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        """Returns the sources of a .tsv if the training files are such; see `FileData.read_inputs`."""
        if self.train_target or not os.fspath(path).lower().removesuffix(".gz").endswith(".tsv"):
            return None
        return ((line.partition("\t")[0],) for line in read_lines(path))

    @property
    def scored_as(self) -> tuple[str, bool]:
        """The pair (language code of the targets, without region; whether their text is already tokenized)."""
        if self.dataset == "grammar":
            return "ja", True
        return self.target_language.replace("_", "-").partition("-")[0], self.is_tokenized

    def validate(self) -> None:
        """Checks the data set's name, and the languages: the target language decides tokenization and scoring.

        Raises:
          UserError: if the name is a misspelling, `bpe_dropout` has no merges to leave out, or a language is missing,
            is not a code, or contradicts the names of files.
        """
        similar = difflib.get_close_matches(self.dataset, ("grammar", "files"), n=1, cutoff=0.75)
        if similar and self.dataset != similar[0]:
            raise UserError(
                f'config.task.data.dataset="{self.dataset}" is unknown: did you mean "{similar[0]}"? A TFDS name looks '
                'like "wmt14_translate/de-en"'
            )
        languages = {"source": self.source_language, "target": self.target_language}
        source, target = self.source_language or "en", self.target_language or "ja"
        if self.dataset == "grammar" and (source, target) != ("en", "ja"):
            raise UserError(
                f'config.task.data.dataset="grammar" is English to Japanese, not {source} to {target}: '
                "leave its languages out, or name another dataset"
            )
        if self.bpe_dropout and self.tokenizer != "sentencepiece":
            raise UserError(
                "config.task.data.bpe_dropout leaves out merges of byte pairs, but "
                f'config.task.data.tokenizer="{self.tokenizer}" has none: use tokenizer="sentencepiece"'
            )
        if self.dataset != "files":  # TFDS data sets name their languages
            return
        for side, language in languages.items():
            if not re.fullmatch("[a-z]{2,3}([-_][A-Za-z0-9]+)*", language):
                got = f", got {language!r}" if language else ""
                raise UserError(
                    f'config.task.data.{side}_language must be the code of a language, such as "en" or "de"{got}: it '
                    f"is the language of the {side} side of the files"
                )
        if languages["source"] != languages["target"]:
            self._check_file_names(languages)

    def tiny(self) -> None:
        """Sets a small built-in data set."""
        self.dataset, self.tokenizer, self.is_tokenized = "grammar", "sentencepiece", False
        self.source_language = self.target_language = ""
        self.max_length, self.tokens_per_batch, self.sort_buffer = 64, 512, 256

    def _check_file_names(self, languages: dict[str, str]) -> None:
        """Raises UserError if the name of a file ends with the language of the other side, such as ".de"."""
        for side, other in (("source", "target"), ("target", "source")):
            for split in ("train", "validation", "test"):
                file = getattr(self, f"{split}_{side}")
                names = (name.strip().removesuffix(".gz") for name in file.split(","))
                if any(name.endswith(f".{languages[other]}") for name in names):
                    raise UserError(
                        f"config.task.data.{split}_{side}={file} looks like the {other} side, whose language is "
                        f"{languages[other]}: swap the files or the languages"
                    )

    def _is_set_aside(self, split: Split) -> bool:
        """Returns whether a split consists of pairs that are set aside from the training files."""
        return split == "validation" and not self.validation_source and self.validation_pairs > 0

    def _open_files(self, split: Split) -> PairSource:
        """Opens a split of files; without a validation file, training and validation share the training files."""
        if split == "test" or not self._is_set_aside("validation"):
            return self._read_files(split)
        pairs = self._read_files("train")
        if len(pairs) < 10:  # a tenth of them would be 0
            raise UserError(
                f"{self.train_source} has {len(pairs)} pairs, but a validation split can be taken from at least 10: "
                "add pairs, or name config.task.data.validation_source"
            )
        train_pairs, validation_pairs = split_pairs(pairs, self.validation_pairs)
        return validation_pairs if split == "validation" else train_pairs

    def _read_files(self, split: Split) -> PairSource:
        """Opens the files that the configuration names for a split."""
        source, target = getattr(self, f"{split}_source"), getattr(self, f"{split}_target")
        keep_empty = split != "train"
        sources = named_paths(self.data_dir, source)
        if not target:
            if not all(path.name.removesuffix(".gz").endswith(".tsv") for path in sources):
                raise UserError(
                    f"config.task.data.{split}_target is missing: name the target file; only a .tsv has both sides"
                )
            return join_pairs([read_tsv(path, keep_empty=keep_empty) for path in sources])
        targets = named_paths(self.data_dir, target)
        if len(sources) != len(targets):
            raise UserError(
                f"config.task.data.{split}_source names {len(sources)} files and {split}_target {len(targets)}: each "
                "source file needs a target file at the same position of the list"
            )
        files = zip(sources, targets, strict=True)
        return join_pairs([read_pairs(source, target, keep_empty=keep_empty) for source, target in files])


# SentencePiece gains nothing from more lines than this, and an endless source must end somewhere.
_TOKENIZER_PAIRS = 1_000_000
_GRAMMAR_TOKENIZER_PAIRS = 20_000


@documented
@dataclasses.dataclass
class TranslationConfig(TaskConfig):
    """Translates sentences from one language into another, with one tokenizer for both."""

    can_shard_positions: ClassVar[bool] = True  # allows `config.mesh.sequence` above 1

    data: PairData = dataclasses.field(default_factory=PairData)
    label_smoothing: float = fraction(0.1)
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token; PaLM has 1e-4
    # R-Drop: weight of the divergence of two passes with different dropout; 0: one pass. The paper has 5 (Liang et al.,
    # 2021); a step takes twice the time and memory
    r_drop: float = at_least(0, 0.0)
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is an encoder-decoder with enough positions for a translation."""
        require_kind(model, "encoder_decoder", "translation")
        rates = [rate for name, rate in vars(model).items() if "dropout" in name]
        if self.r_drop and not any(rates):
            raise UserError(
                f"config.task.r_drop={self.r_drop} compares two passes with different dropout, but the model has none: "
                "set config.model.dropout_rate above 0"
            )
        self.data.validate()
        check_batch(self.data, what="sentence")
        check_output_length(model, self.data.max_length, self.decoding, what="translation")

    def tiny(self) -> None:
        self.data.tiny()
        self.decoding.tiny()

    def splits(self) -> Splits[PairSource]:
        """Returns the sentence pairs of each split."""
        return Splits(self.data.has_split, self.data.load, field="source")

    def setup(self, model: EncoderDecoderConfig, splits: Splits[PairSource], artifacts: Artifacts) -> "TranslationTask":
        """Trains or loads the tokenizer, on a limited number of training pairs."""
        limit = _GRAMMAR_TOKENIZER_PAIRS if self.data.dataset == "grammar" else _TOKENIZER_PAIRS
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: lines_of(splits["train"], limit), kind=self.data.tokenizer, family="marian"
        )
        return TranslationTask(self, model, splits, tokenizer)

    def planned(self, model: EncoderDecoderConfig, options: LoaderOptions) -> PlannedTask:
        batch = planned_batch(self.data, options, dict.fromkeys(("source", "target"), (np.int32, LENGTH)))
        return PlannedTask(TranslationTask(self, model, NO_DATA, NO_DATA), batch)


class TranslationTask:
    """Translation of sentences.

    Attributes:
      tokenizer: the joint tokenizer of both languages.
    """

    metrics = (
        MetricInfo("bleu", "BLEU", note="tokenized"),
        MetricInfo("exact_match", "exact match", " %", digits=1),
    )
    unit = "target token"

    def __init__(
        self,
        config: TranslationConfig,
        model_config: EncoderDecoderConfig,
        splits: Splits[PairSource],
        tokenizer: HFTokenizer,
    ):
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self._splits = splits

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return self.model_config.make(rngs=rngs)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        data = self.config.data
        return pair_batches(
            self._splits["train"],
            self.tokenizer,
            options,
            tokens_per_batch=data.tokens_per_batch,
            max_length=data.max_length,
            sort_buffer=data.sort_buffer,
            bpe_dropout=data.bpe_dropout,
        )

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return translation_loss(
            model,
            batch,
            rngs,
            label_smoothing=config.label_smoothing,
            z_loss_weight=config.z_loss,
            r_drop=config.r_drop,
        )

    inputs = ("sentence",)
    empty_answer: ClassVar[Prediction] = {"translation": ""}

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Translates each sentence with the search of the configuration."""
        translations = self.translator(model.graphdef)(model.decoder, [row[0] for row in rows])
        return [{"translation": translation} for translation in translations]

    def translator(
        self,
        graphdef: nnx.GraphDef[Any],
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        int8: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> "Translator":
        """Returns a translator with the search of the configuration, or with another beam.

        Args:
          graphdef: static definition of the model.
          beam_size: beam width; None means that of the configuration.
          length_penalty: exponent of the length penalty; None means that of the configuration.
          int8: see `Translator`.
          on_batch: see `Translator`.
        """
        decoding = self.config.decoding
        return Translator(
            graphdef,
            self.tokenizer,
            search=BeamSearch(
                decoding.beam_size if beam_size is None else beam_size,
                decoding.length_penalty if length_penalty is None else length_penalty,
            ),
            extra_length=decoding.extra_length,
            max_source_length=self.config.data.max_length,
            int8=int8,
            on_batch=on_batch,
        )

    def explain(
        self, model: TrainedModel, lines: Sequence[str], translations: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Describes translations: how probable they are, and where they come from.

        Args:
          model: the trained model.
          lines: sentences, none of them blank.
          translations: their translations as token ids, including EOS.

        Returns:
          A dictionary per line: "translation", "score" (the log-probability of the translation in nats, EOS included),
          "unknown" (see `unknown_parts`), "source" and "target" (their tokens, including EOS) and, of a model that
          returns its maps, "attention": the cross-attention, mean over layers and heads, nested lists [T, S].
        """
        pad_id = self.model_config.pad_id
        examples = [
            {
                "source": np.array(self._encode(line), np.int32),
                "target": np.array(ids, np.int32),
            }
            for line, ids in zip(lines, translations, strict=True)
        ]
        longest = max((len(ids) for example in examples for ids in example.values()), default=1)
        spec = BatchSpec(
            few_boundaries(longest), max(2_048, longest), pad_values=dict.fromkeys(("source", "target"), pad_id)
        )
        rows = ExampleList(examples, by="target")
        rows.lengths = np.array([max(map(len, example.values())) for example in examples])  # sources may be longer
        results = model.predict(_score_and_attend, rows, spec) if examples else []
        descriptions: list[dict[str, Any]] = []
        for line, example, (score, attention) in zip(lines, examples, results, strict=True):
            source, target = example["source"].tolist(), example["target"].tolist()
            description = {
                "translation": self.tokenizer.decode(target),
                "score": score,
                "unknown": unknown_parts(self.tokenizer, line),
                "source": self.tokenizer.pieces(source),
                "target": self.tokenizer.pieces(target),
            }
            if attention:
                weights = [row[: len(source)] for row in attention[: len(target)]]  # [T, S], without padding
                description["attention"] = [[round(weight, 4) for weight in row] for row in weights]
            descriptions.append(description)
        return descriptions

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Translates the source sides of a split and scores them."""
        scores, _, _ = self.score(self.translator(model.graphdef), model, self._splits[split])
        return EvalResult(
            {"bleu": scores.tokenized, "exact_match": scores.exact_match},
            f"BLEU {scores.tokenized:.2f} (tokenized), {scores.sacrebleu:.2f} (sacreBLEU), "
            f"exact match {scores.exact_match:.1f} %",
        )

    def score(
        self, translator: "Translator", model: TrainedModel, pairs: PairSource
    ) -> tuple[BleuScores, list[str], list[str]]:
        """Translates the source sides of pairs and returns a triple: scores, translations and references.

        References are normalized like the training text, because a model cannot write other forms; the signature says
        so if that changes one. Subword marks of segmented text are removed, as in the tokenizer's output. Processes
        share the sentences; each gets all translations.
        """
        all_pairs = [pairs[index] for index in range(len(pairs))]
        normalized = [self.tokenizer.normalize(pair["target"]) for pair in all_pairs]
        references = [join_subwords(text) if self.config.data.tokenizer == "words" else text for text in normalized]
        sources = [pair["source"] for pair in all_pairs]
        hypotheses = model.share(lambda lines: translator(model.params, lines), sources)
        language, is_tokenized = self.config.data.scored_as
        scores = bleu_scores(hypotheses, references, language=language, is_tokenized=is_tokenized)
        if any(text.split() != pair["target"].split() for text, pair in zip(normalized, all_pairs, strict=True)):
            scores = scores._replace(signature=f"{scores.signature}|norm:{self.tokenizer.normalization}")
        return scores, hypotheses, references

    def report_tables(self, model: TrainedModel) -> list[ReportTable]:
        """Returns the translations of the first sentences of the validation split."""
        pairs = self._splits["validation"]
        samples = [pairs[index] for index in range(min(5, len(pairs)))]
        translator = self.translator(model.graphdef)
        sources = [pair["source"] for pair in samples]
        translations = model.share(lambda lines: translator(model.decoder, lines), sources)
        rows = [(pair["source"], pair["target"], text) for pair, text in zip(samples, translations, strict=True)]
        return [ReportTable("Sample translations", ("source", "reference", "translation"), rows)]

    def attention_example(self, model: TrainedModel) -> PairAttention | None:
        """Returns the attention maps of a pair with its reference, as in training."""
        pairs = self._splits["validation"]
        texts = ((pair["source"], pair["target"]) for pair in map(pairs.__getitem__, range(len(pairs))))
        pair = drawable_pair(texts, self._encode)
        return None if pair is None else self.attention(model, *pair)

    def attention(self, model: TrainedModel, source: str, target: str | None = None) -> PairAttention:
        """Computes every attention map of one sentence pair.

        Args:
          model: the trained model.
          source: the sentence to read, cut to `data.max_length` tokens as in `Translator`.
          target: translation, cut likewise; None means the model's own.

        Returns:
          The maps of `pair_attention`, and the tokens of source and target, including EOS.
        """
        source_ids = self._encode(source)
        if target is None:
            (target_ids,) = self.translator(model.graphdef).translate_ids(model.decoder, [source])
        else:
            target_ids = self._encode(target)
        pieces = self.tokenizer.pieces
        return PairAttention(pair_attention(model, source_ids, target_ids), pieces(source_ids), pieces(target_ids))

    def _encode(self, text: str) -> list[int]:
        """Returns the ids of a sentence as the model is trained on them: EOS last, at most `data.max_length`."""
        return _with_eos(self.tokenizer.encode(text), self.tokenizer, self.config.data.max_length)


def _with_eos(ids: list[int], tokenizer: HFTokenizer, max_length: int) -> list[int]:
    """Returns ids with EOS, cut to `max_length` ids, EOS included."""
    return [*ids[: max_length - 1], cast(int, tokenizer.eos_id)]


def unknown_parts(tokenizer: HFTokenizer, text: str) -> list[str]:
    """Returns the parts of a text for which a tokenizer has only the unknown token."""
    if tokenizer.unk_id is None or tokenizer.unk_id not in tokenizer.encode(text):
        return []
    ids, offsets = tokenizer.encode_with_offsets(text)
    return [text[begin:end] for token, (begin, end) in zip(ids, offsets, strict=True) if token == tokenizer.unk_id]


def _score_and_attend(model: Any, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Returns the log-probability of each target [B] and its cross-attention [B, T, S], for `TrainedModel.predict`.

    Of a model without cross-attention maps, the second array is [B, 0, 0].
    """
    source, target = batch["source"], batch["target"]
    maps: dict[str, Array] = {}
    if "return_attention" in inspect.signature(model).parameters:
        logits, maps = model(source, target, return_attention=True)
    else:
        logits = model(source, target)
    all_log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))  # [B, T, V]
    log_probs = jnp.take_along_axis(all_log_probs, target[..., None], axis=-1)[..., 0]  # of the targets, [B, T]
    score = jnp.where(target != model.config.pad_id, log_probs, 0).sum(axis=-1)
    # The mean over heads of each layer, and then over layers.
    layer_means = [weights.mean(axis=1) for name, weights in maps.items() if re.fullmatch("decoder/.*/cross", name)]
    if not layer_means:
        return score, jnp.zeros((len(score), 0, 0), jnp.float32)
    return score, jnp.stack(layer_means).astype(jnp.float32).mean(axis=0)


def check_output_length(model: ModelConfig, max_length: int, decoding: DecodingConfig, *, what: str) -> None:
    """Checks that a model with learned positions has enough of them for every token that it may write.

    Args:
      model: configuration of the model.
      max_length: maximum length of an input.
      decoding: configuration that limits how much longer an output may be.
      what: name of an output in messages.

    Raises:
      UserError: if it has too few.
    """
    num_positions, longest = getattr(model, "learned_positions", 0), max_length + decoding.extra_length
    if num_positions and num_positions < longest:
        raise UserError(
            f"config.model.learned_positions={num_positions} is less than data.max_length + decoding.extra_length "
            f"= {longest}: a {what} may be that long"
        )


def translation_loss(
    model: Any,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    r_drop: float = 0.0,
) -> LossOutput:
    """Sums the label-smoothed cross entropy of target tokens, for any text-to-text task.

    With R-Drop (Liang et al., 2021, https://arxiv.org/abs/2106.14448, equation 4, halved) each pair passes twice
    through the model, with different dropout: the loss is the mean of both passes, and `r_drop` / 2 times the
    `symmetric_kl_divergence` of what they predict for each token.

    Args:
      model: model of the kind "encoder_decoder": `model(source, target, rngs=...)` returns the logits of every target
        token; `model.config.pad_id` is padding.
      batch: "source" [B, S] and "target" [B, T], int32, with padding after the texts.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.
      z_loss_weight: see `summed_cross_entropy`.
      r_drop: weight of the divergence; 0, and evaluation, have one pass.

    Returns:
      The output of `summed_cross_entropy`, with the metric "divergence" of a token in nats where there are two passes.
    """
    source, target = batch["source"], batch["target"]
    num_passes = 2 if r_drop and rngs is not None else 1
    if num_passes > 1:  # both copies of an example are adjacent, and so on one device
        source, target = jnp.repeat(source, num_passes, axis=0), jnp.repeat(target, num_passes, axis=0)
    logits = model(source, target, rngs=rngs)
    weights = (target != model.config.pad_id).astype(jnp.float32) / num_passes
    output = summed_cross_entropy(logits, target, weights, label_smoothing=label_smoothing, z_loss_weight=z_loss_weight)
    if num_passes == 1:
        return output
    passes = logits.reshape(-1, num_passes, *logits.shape[1:])
    divergences = symmetric_kl_divergence(passes[:, 0], passes[:, 1])
    divergence = (divergences * weights.reshape(passes.shape[:3]).sum(axis=1)).sum()
    metrics = output.metrics | {"divergence": Metric(divergence, output.weight)}
    return output._replace(loss=output.loss + 0.5 * r_drop * divergence, metrics=metrics)


class Translator:
    """Translates sentences."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        tokenizer: HFTokenizer,
        *,
        search: Search = BeamSearch(),
        extra_length: int = 50,
        max_source_length: int = 256,
        tokens_per_batch: int = 2_048,
        constraint: Constraint | None = None,
        int8: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ):
        """Stores the model's static definition and the options of the search.

        Args:
          graphdef: static definition of a `tfx_jax.nn.decoding.DecodingModel`, such as `tfx_jax.models.Transformer`.
          tokenizer: tokenizer that the model was trained with.
          search: how tokens are chosen; the default is that of Vaswani et al. (2017), section 6.1.
          extra_length: tokens by which an output may be longer than its input.
          max_source_length: longer inputs are cut to this many tokens, including EOS.
          tokens_per_batch: source positions of a batch.
          constraint: see `DecodeDriver`.
          int8: see `DecodeDriver`.
          on_batch: called after each batch with the number of translated lines.
        """
        self.tokenizer = tokenizer
        self._on_batch = on_batch
        self._extra_length = extra_length
        self._max_source_length = max_source_length
        self._tokens_per_batch = tokens_per_batch
        eos_ids = (cast(int, tokenizer.eos_id),)
        self._driver = DecodeDriver(graphdef, search, eos_ids=eos_ids, int8=int8, constraint=constraint)

    def decoder(self, params: Any) -> Decoder:
        """Returns the decoder of the model with these parameters, whose weights are rearranged."""
        return self._driver.decoder(params)

    def __call__(self, params: Any, lines: Sequence[str]) -> list[str]:
        """Translates each line.

        Args:
          params: parameters; or the result of `decoder`, so that many calls rearrange the weights once.
          lines: sentences; a blank one (see `tfx_jax.data.sources.lines.is_blank`) becomes an empty one.
        """
        return [self.tokenizer.decode(ids) for ids in self.translate_ids(params, lines)]

    def translate_ids(
        self, params: Any, lines: Sequence[str], constraint_values: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Translates each line into token ids, including EOS (none for a blank line).

        Args:
          params: as for `__call__`.
          lines: as for `__call__`.
          constraint_values: for each line the number that the constraint depends on.
        """
        decoder = cast(Decoder, params) if isinstance(params, nnx.Module) else self.decoder(params)
        lines = list_of_texts(lines, "lines")
        not_blank = [index for index, line in enumerate(lines) if not is_blank(line)]
        encoded = self.tokenizer.encode_batch([lines[index] for index in not_blank])
        warn_shortened(
            encoded, self._max_source_length - 1, what="sentences", effect="only their beginnings are translated"
        )
        translations = self._driver(
            decoder,
            [_with_eos(ids, self.tokenizer, self._max_source_length) for ids in encoded],
            max_new_tokens=lambda length: length + self._extra_length,
            max_input_length=self._max_source_length,
            tokens_per_batch=self._tokens_per_batch,
            constraint_values=None if constraint_values is None else [constraint_values[index] for index in not_blank],
            on_batch=self._on_batch,
        )
        if self._on_batch is not None and len(not_blank) < len(lines):  # blank lines count as translated
            self._on_batch(len(lines) - len(not_blank))
        outputs: list[list[int]] = [[] for _ in lines]
        for index, ids in zip(not_blank, translations, strict=True):
            outputs[index] = ids
        return outputs
