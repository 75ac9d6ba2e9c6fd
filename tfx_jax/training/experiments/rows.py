"""What all experiments share but translation: splits that are read once, a tokenizer like everyone's, rows by epoch."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar, cast

import grain
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.data.batching import BatchSpec, ExampleSource, train_batches
from tfx_jax.data.files import write_file
from tfx_jax.data.hf_tokenizer import TOKENIZER_FILES, HFTokenizer, load_folder_tokenizer
from tfx_jax.data.splits import Split
from tfx_jax.data.train_tokenizer import train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.prediction import Predictor
from tfx_jax.training.artifacts import artifact
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.experiment import Experiment
from tfx_jax.training.initial import tokenizer_folder
from tfx_jax.training.sharding import num_batch_shards, process_shard

SplitData = TypeVar("SplitData")


class RowsExperiment(Experiment, Generic[SplitData]):
    """An experiment whose batches are rows, of which each epoch may have others.

    Attributes:
      model_class: draws a model from `sizes`.
      family: which special tokens its tokenizers have, see `tfx_jax.data.train_tokenizer`.
      tokenizer: trained on the training split, or that of the model to start from; kept in the workdir.
    """

    model_class: ClassVar[Callable[..., nnx.Module]]
    family: ClassVar[str]
    tokenizer: HFTokenizer

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration whose data have `train_file`, `validation_file` and `test_file`."""
        super().__init__(config)
        self._splits: dict[Split, SplitData] = {}

    @abc.abstractmethod
    def load_split(self, split: Split) -> SplitData:
        """Reads a split that the configuration names."""

    @abc.abstractmethod
    def tokenizer_text(self) -> Iterable[str]:
        """All text of the training split, in pieces."""

    @abc.abstractmethod
    def make_epochs(self) -> Callable[[int], ExampleSource]:
        """The training rows of the epoch with a number."""

    @property
    @abc.abstractmethod
    def batch_spec(self) -> BatchSpec:
        """How rows become batches."""

    @abc.abstractmethod
    def predict_batch(self, model: Any, batch: dict[str, Array]) -> Any:
        """What evaluation asks the model about a batch: a pytree of arrays; pure, to be compiled."""

    def split(self, split: Split) -> SplitData:
        """A split, read once.

        Raises:
          UserError: if there is no such split, or it cannot be read.
        """
        if split not in self._splits:
            if not self.has_split(split):
                raise self.no_such_split(split)
            self._splits[split] = self.load_split(split)
        return self._splits[split]

    def has_split(self, split: Split) -> bool:
        """Whether the configuration names such a split."""
        data = self.config.data
        return data.dataset != "files" or bool(getattr(data, f"{split}_file"))

    @property
    def has_validation(self) -> bool:
        """Whether the configuration names a validation split."""
        return self.has_split("validation")

    def read_data(self) -> None:
        """Reads the training split and, if there is one, the validation split."""
        for split in ("train", "validation") if self.has_validation else ("train",):
            self.split(cast(Split, split))

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads what `workdir` has, the tokenizer first of all, or makes it from the training split and saves it there.

        Raises:
          UserError: as for every experiment, or if the model to start from has no tokenizer or one that is not for such
            a model.
        """
        folder, start = epath.Path(workdir) / "tokenizer", self.config.init_from
        with artifact(workdir, folder.name, can_make=can_make) as is_new:
            if is_new and not start:
                self.tokenizer = train_or_load_folder(
                    folder,
                    self.tokenizer_text,
                    kind=self.config.data.tokenizer,
                    family=self.family,
                    vocab_size=self.config.model.vocab_size,
                )
            else:
                if is_new:
                    _copy_tokenizer(tokenizer_folder(start), folder)
                self.tokenizer = load_folder_tokenizer(folder)

    @property
    def sizes(self) -> Any:
        """The model's configuration, with the vocabulary that it really has."""
        model = self.config.model
        vocab_size = model.vocab_size if self.config.init_from else self.tokenizer.vocab_size
        return dataclasses.replace(model, vocab_size=vocab_size)

    def make_model(self, shard_attention: ShardAttention | None = None) -> nnx.Module:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""
        return type(self).model_class(
            self.sizes, shard_attention=shard_attention, rngs=nnx.Rngs(params=self.config.seed)
        )

    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training split when it trains on a mesh."""
        return train_batches(
            self.make_epochs(),
            self.batch_spec,
            seed=self.config.seed,
            batch_multiple=num_batch_shards(mesh) * self.config.accumulate,
            shard=process_shard(mesh),
        )

    @functools.cached_property
    def predictor(self) -> Predictor:
        """Applies `predict_batch` to batches."""
        return Predictor(self.graphdef, self.predict_batch)


def _copy_tokenizer(source: epath.Path, folder: epath.Path) -> None:
    """Copies a tokenizer, unless that was done before."""
    names = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not names:
        raise UserError(f"{source} has no tokenizer: config.init_from takes a workdir or Hugging Face folder with one")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            write_file(folder / name, (source / name).read_bytes())
