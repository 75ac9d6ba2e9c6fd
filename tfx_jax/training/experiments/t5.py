"""What all experiments with a T5 share: its tokenizer with sentinels, its sizes, its loss (Raffel et al., 2020)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.hf_tokenizer import FolderTokenizer
from tfx_jax.data.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.models.t5 import T5, T5Config
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.experiment import Experiment
from tfx_jax.training.experiments.texts import open_tokenizer
from tfx_jax.training.flops import training_flops
from tfx_jax.training.step import Metrics


class Specials(NamedTuple):
    """Special tokens of a T5's tokenizer; `sentinels` are in the order in which a text has them."""

    pad_id: int
    eos_id: int
    sentinels: list[int]


class T5Experiment(Experiment):
    """A T5, trained on batches {"source" [B, S], "target" [B, T]}; subclasses say what these are.

    Attributes:
      tokenizer: trained on the training part, or that of the model to start from; kept in the workdir.
      specials: ids of its special tokens.
    """

    token = "target token"

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration with a `T5Config`."""
        super().__init__(config)
        self._model = cast(T5Config, config.model)

    def open_tokenizer(self, workdir: epath.PathLike, texts: Callable[[], Iterable[str]]) -> None:
        """Loads the tokenizer of `workdir`, or trains it on texts and saves it there.

        Raises:
          UserError: if its special tokens are not those of the model.
        """
        self.tokenizer: FolderTokenizer = open_tokenizer(self.config, workdir, texts, family="t5")
        model, found = self._model, self.tokenizer
        for name in ("pad", "eos"):
            of_model, of_tokenizer = (getattr(side, f"{name}_id") for side in (model, found))
            if of_model != of_tokenizer:
                raise UserError(
                    f"config.model.{name}_id is {of_model}, but the tokenizer of {workdir} has {of_tokenizer} for it"
                )
        sentinels = sentinel_ids(found.vocab_size, min(NUM_SENTINELS, found.vocab_size))
        if found.pieces(sentinels) != [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]:
            raise UserError(f"the last {NUM_SENTINELS} tokens of the tokenizer of {workdir} are not T5's sentinels")
        self.specials = Specials(model.pad_id, model.eos_id, sentinels)

    @functools.cached_property
    def sizes(self) -> T5Config:
        """The model's configuration, with the vocabulary that it really has."""
        vocab_size = self._model.vocab_size if self.config.init_from else self.tokenizer.vocab_size
        return dataclasses.replace(self._model, vocab_size=vocab_size)

    def make_model(self, attention_fn: Callable[..., Any] = dot_product_attention) -> T5:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""
        return T5(self.sizes, attention_fn=attention_fn, rngs=nnx.Rngs(params=self.config.seed))

    def loss(self, model: T5, batch: dict[str, Array], rngs: nnx.Rngs | None) -> tuple[Array, Metrics]:
        """See `translation_loss`."""
        config = self.config
        return translation_loss(model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, source_length = shapes["source"]
        return training_flops(self.sizes, rows, source_length, shapes["target"][-1])
