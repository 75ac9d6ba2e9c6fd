"""Translation: what a batch of sentence pairs means, its loss, and how a model's translations are found."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.tokenizer import EOS_ID, Tokenizer
from tfx_jax.models.t5 import T5
from tfx_jax.models.transformer import Transformer
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.decoding import BeamSearch, DecodeDriver, Search
from tfx_jax.tasks.loss import LossOutput


def translation_loss(
    model: Transformer | T5,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Sums the label-smoothed cross entropy over target tokens, for any task with a text in and a text out.

    Args:
      model: `model(source, target, rngs=...)` gives the logits of every target token, `model.config.pad_id` is padding.
      batch: "source" [B, S] and "target" [B, T], int32, with padding behind the texts.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.
      z_loss_weight: see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives.
    """
    target = batch["target"]
    logits = model(batch["source"], target, rngs=rngs)
    weights = (target != model.config.pad_id).astype(jnp.float32)
    return summed_cross_entropy(logits, target, weights, label_smoothing=label_smoothing, z_loss_weight=z_loss_weight)


class Translator:
    """Translates sentences; compiles once for each batch shape."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        tokenizer: Tokenizer,
        *,
        search: Search = BeamSearch(),
        extra_length: int = 50,
        max_source_length: int = 256,
        tokens_per_batch: int = 2_048,
        int8: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ):
        """Remembers the model without its parameters and the options of the search.

        Args:
          graphdef: of a `tfx_jax.nn.decoding.DecodingModel`, such as `tfx_jax.models.Transformer`.
          tokenizer: the one the model was trained with.
          search: how tokens are chosen; the default is that of Vaswani et al. (2017), section 6.1.
          extra_length: how many tokens an output may be longer than its input.
          max_source_length: longer inputs are cut to this many tokens, end of sentence included.
          tokens_per_batch: source positions of a batch.
          int8: see `DecodeDriver`.
          on_batch: is told after each batch how many lines it has translated.
        """
        self.tokenizer = tokenizer
        self._on_batch = on_batch
        self._extra_length = extra_length
        self._max_source_length = max_source_length
        self._tokens_per_batch = tokens_per_batch
        self._driver = DecodeDriver(graphdef, search, eos_ids=(EOS_ID,), int8=int8)

    def __call__(self, params: Any, lines: Sequence[str]) -> list[str]:
        """Translates each line; an empty one stays empty."""
        return [self.tokenizer.decode(ids) for ids in self.translate_ids(params, lines)]

    def translate_ids(self, params: Any, lines: Sequence[str]) -> list[list[int]]:
        """Translates each line into token ids, the end of sentence included (nothing for an empty line)."""
        wanted = [index for index, line in enumerate(lines) if line.strip()]
        encoded = self.tokenizer.encode_batch([lines[index] for index in wanted])
        found = self._driver(
            self._driver.decoder(params),
            [[*ids[: self._max_source_length - 1], EOS_ID] for ids in encoded],
            max_new_tokens=lambda length: length + self._extra_length,
            max_input_length=self._max_source_length,
            tokens_per_batch=self._tokens_per_batch,
            on_batch=self._on_batch,
        )
        if self._on_batch is not None and len(wanted) < len(lines):
            self._on_batch(len(lines) - len(wanted))
        outputs: list[list[int]] = [[] for _ in lines]
        for index, ids in zip(wanted, found, strict=True):
            outputs[index] = ids
        return outputs
