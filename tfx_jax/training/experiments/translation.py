"""Translation: sentence pairs, a joint tokenizer, beam search and BLEU (Vaswani et al., 2017)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import cast

import grain
import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.data.bucketing import batches
from tfx_jax.data.splits import Split
from tfx_jax.data.text import PairSource, lines_of, read_pairs, read_tsv, split_pairs
from tfx_jax.data.tfds import tfds_pairs
from tfx_jax.data.tokenizer import EOS_ID, Tokenizer, join_subwords, load_tokenizer, tokenizer_file, train_or_load
from tfx_jax.errors import UserError
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.bleu import BleuScores, bleu_scores
from tfx_jax.tasks.decoding import BeamSearch
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.translation import Translator, translation_loss
from tfx_jax.toy_grammar import GrammarPairs
from tfx_jax.training.artifacts import artifact
from tfx_jax.training.config import DataConfig, ExperimentConfig
from tfx_jax.training.distributed import gather_lists
from tfx_jax.training.experiment import Evaluation, Experiment, Score
from tfx_jax.training.flops import training_flops
from tfx_jax.training.sharding import num_batch_shards, process_shard
from tfx_jax.training.step import Params

# SentencePiece learns nothing new from more lines than this, and an endless source has to stop somewhere.
_TOKENIZER_PAIRS = 1_000_000
_GRAMMAR_TOKENIZER_PAIRS = 20_000


class TranslationExperiment(Experiment):
    """What training, evaluation and translation share.

    Attributes:
      data: the part of the configuration that says where pairs come from.
      tokenizer: the joint tokenizer of both languages, trained at first use and kept in the workdir.
    """

    scores = (Score("bleu", "BLEU", note="tokenised"), Score("exact_match", "exact match", " %", digits=1))
    token = "target token"

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration with a `TransformerConfig` and a `DataConfig`."""
        super().__init__(config)
        self._model, self.data = cast(TransformerConfig, config.model), cast(DataConfig, config.data)
        self._train: PairSource | None = None
        self._validation: PairSource | None = None

    def read_data(self) -> None:
        """Opens the training split and, if there is one, the validation split."""
        self._train = open_pairs(self.data, "train")
        if self.has_validation:
            self._validation = open_pairs(self.data, "validation")

    @property
    def has_validation(self) -> bool:
        """Whether the configuration names a validation split."""
        return has_split(self.data, "validation")

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads the tokenizer of `workdir`, or trains it on the training split and saves it there."""
        limit = _GRAMMAR_TOKENIZER_PAIRS if self.data.dataset == "grammar" else _TOKENIZER_PAIRS
        kind = self.data.tokenizer
        with artifact(workdir, tokenizer_file(kind), can_make=can_make) as is_new:
            if is_new:
                self.tokenizer: Tokenizer = train_or_load(
                    workdir,
                    lambda: lines_of(self._training_pairs(), limit),
                    kind=kind,
                    vocab_size=self._model.vocab_size or None,
                )
            else:
                self.tokenizer = load_tokenizer(workdir, kind)

    def make_model(self, shard_attention: ShardAttention | None = None) -> Transformer:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""
        return Transformer(self._sizes, shard_attention=shard_attention, rngs=nnx.Rngs(params=self.config.seed))

    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training split when it trains on a mesh."""
        data = self.data
        return batches(
            self._training_pairs(),
            self.tokenizer,
            tokens_per_batch=data.tokens_per_batch,
            max_length=data.max_length,
            seed=self.config.seed,
            sort_buffer=data.sort_buffer,
            batch_multiple=num_batch_shards(mesh) * self.config.accumulate,
            length_multiple=mesh.shape["sequence"],
            shard=process_shard(mesh),
        )

    def loss(self, model: Transformer, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `translation_loss`."""
        config = self.config
        return translation_loss(model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, source_length = shapes["source"]
        return training_flops(self._sizes, rows, source_length, shapes["target"][-1])

    def translator(
        self,
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        int8: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> Translator:
        """The search of the configuration, or one with another beam; `int8` and `on_batch` as for `Translator`."""
        decoding = self.config.decoding
        return Translator(
            self.graphdef,
            self.tokenizer,
            search=BeamSearch(
                decoding.beam_size if beam_size is None else beam_size,
                decoding.alpha if length_penalty is None else length_penalty,
            ),
            extra_length=decoding.extra_length,
            max_source_length=self.data.max_length,
            int8=int8,
            on_batch=on_batch,
        )

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Translates the source sides and scores them."""
        pairs = self._validation
        if split != "validation" or pairs is None:
            pairs = open_pairs(self.data, split)
        scores, _, _ = self.score(self._translator, params, pairs)
        return Evaluation(
            {"bleu": scores.tokenised, "exact_match": scores.exact_match},
            f"BLEU {scores.tokenised:.2f} (tokenised), {scores.sacrebleu:.2f} (sacreBLEU), "
            f"exact match {scores.exact_match:.1f} %",
        )

    def score(
        self, translator: Translator, params: Params, pairs: PairSource
    ) -> tuple[BleuScores, list[str], list[str]]:
        """Translates the source sides and scores them; returns the scores, the translations and the references.

        Several processes share the sentences; each gets all the translations.
        """
        everything = [pairs[index] for index in range(len(pairs))]
        references = [self._plain(pair["target"]) for pair in everything]
        mine = everything[jax.process_index() :: jax.process_count()]
        hypotheses = gather_lists(translator(params, [pair["source"] for pair in mine]))
        language, is_tokenised = target_text(self.data)
        scores = bleu_scores(hypotheses, references, language=language, is_tokenised=is_tokenised)
        return scores, hypotheses, references

    def attention(
        self, params: Params, source: str, target: str | None = None
    ) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
        """Every attention map of one sentence pair.

        Args:
          params: of the model.
          source: the sentence to read.
          target: its translation; None means the model's own.

        Returns:
          Maps by name, each [N, T, S] float32, the source's pieces and the target's, the end of sentence included.
        """
        source_ids = [*self.tokenizer.encode(source), EOS_ID]
        if target is None:
            (target_ids,) = self.translator().translate_ids(params, [source])
        else:
            target_ids = [*self.tokenizer.encode(target), EOS_ID]

        @jax.jit
        def maps(params: Params, source: Array, target: Array) -> dict[str, Array]:
            return nnx.merge(self.graphdef, params)(source, target, return_attention=True)[1]

        found = maps(params, np.array([source_ids], np.int32), np.array([target_ids], np.int32))
        pieces = self.tokenizer.pieces
        return {name: np.asarray(weights[0]) for name, weights in found.items()}, pieces(source_ids), pieces(target_ids)

    @functools.cached_property
    def _sizes(self) -> TransformerConfig:
        return dataclasses.replace(self._model, vocab_size=self.tokenizer.vocab_size)

    @functools.cached_property
    def _translator(self) -> Translator:
        return self.translator()  # compiles, and so is kept

    def _training_pairs(self) -> PairSource:
        if self._train is None:
            self._train = open_pairs(self.data, "train")
        return self._train

    def _plain(self, reference: str) -> str:
        """References of segmented text lose their subword marks, as the tokenizer's output does."""
        return join_subwords(reference) if self.data.tokenizer == "words" else reference


def open_pairs(data: DataConfig, split: Split) -> PairSource:
    """Opens the "train", "validation" or "test" split of the configured text.

    Evaluation splits keep their empty lines, as every line counts there.

    Raises:
      UserError: if the configuration names no such split, or it cannot be read.
    """
    if data.dataset == "grammar":
        return GrammarPairs(split)
    if data.dataset == "files":
        return _open_files(data, split)
    return tfds_pairs(
        data.dataset,
        split,
        data_dir=data.data_dir,
        source_language=data.source_language,
        target_language=data.target_language,
    )


def has_split(data: DataConfig, split: str) -> bool:
    """Whether the configuration names such a split; texts in files need not have one for validation or test."""
    return data.dataset != "files" or bool(getattr(data, f"{split}_source")) or _is_split_off(data, split)


def target_text(data: DataConfig) -> tuple[str, bool]:
    """The code of the language translated into, without its region, and whether its text is tokens already."""
    if data.dataset == "grammar":
        return "ja", True
    return data.target_language.replace("_", "-").partition("-")[0], data.is_tokenised


def _is_split_off(data: DataConfig, split: str) -> bool:
    return split == "validation" and not data.validation_source and data.validation_pairs > 0


def _open_files(data: DataConfig, split: str) -> PairSource:
    if not has_split(data, split):
        raise UserError(f"config.data.{split}_source names no file for the {split} split")
    if split != "test" and _is_split_off(data, "validation"):
        pairs = _read_files(data, "train")
        if len(pairs) < 10:  # a tenth would be none
            raise UserError(
                f"{data.train_source} has too few pairs to set some aside: name config.data.validation_source"
            )
        return split_pairs(pairs, data.validation_pairs)[split == "validation"]
    return _read_files(data, split)


def _read_files(data: DataConfig, split: str) -> PairSource:
    source, target = getattr(data, f"{split}_source"), getattr(data, f"{split}_target")
    keep_empty = split != "train"
    folder = epath.Path(data.data_dir)
    if not target and source.removesuffix(".gz").endswith(".tsv"):
        return read_tsv(folder / source, keep_empty=keep_empty)
    if not target:
        raise UserError(f"config.data.{split}_target names no file; only a .tsv holds both sides")
    return read_pairs(folder / source, folder / target, keep_empty=keep_empty)
