"""What all experiments with a T5 share: its tokenizer with sentinels, its loss (Raffel et al., 2020)."""

from collections.abc import Mapping
from typing import NamedTuple

from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.errors import UserError
from tfx_jax.models.t5 import T5
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.experiments.rows import RowsExperiment, SplitData
from tfx_jax.training.flops import training_flops


class Specials(NamedTuple):
    """Special tokens of a T5's tokenizer; `sentinels` are in the order in which a text has them."""

    pad_id: int
    eos_id: int
    sentinels: list[int]


class T5Experiment(RowsExperiment[SplitData]):
    """A T5, trained on batches {"source" [B, S], "target" [B, T]}; subclasses say what these are.

    Attributes:
      specials: ids of the special tokens of its tokenizer.
    """

    token = "target token"
    model_class = T5
    family = "t5"

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads the tokenizer of `workdir`, or trains it on the training split and saves it there.

        Raises:
          UserError: if its special tokens are not those of the model.
        """
        super().open(workdir, can_make=can_make)
        model, found = self.config.model, self.tokenizer
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

    @property
    def pad_values(self) -> dict[str, int]:
        """What padding is."""
        return {"source": self.specials.pad_id, "target": self.specials.pad_id}

    def loss(self, model: T5, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `translation_loss`."""
        config = self.config
        return translation_loss(model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, source_length = shapes["source"]
        return training_flops(self.sizes, rows, source_length, shapes["target"][-1])
