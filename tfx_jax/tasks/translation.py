"""Translation: what a batch of sentence pairs means, its loss, and how a model's translations are found."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.data.batching import BatchSpec, eval_batches
from tfx_jax.data.bucketing import EncodedPairs
from tfx_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer
from tfx_jax.functional.beams import beam_search
from tfx_jax.models.t5 import T5
from tfx_jax.models.transformer import Transformer
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.loss import LossOutput

# Source lengths that decoding compiles for. Coarse: a step costs the same whatever the padding of its source.
_DECODING_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


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
    """Translates sentences by beam search (Vaswani et al., 2017, section 6.1); compiles once for each batch shape."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        tokenizer: Tokenizer,
        *,
        beam_size: int = 4,
        alpha: float = 0.6,
        extra_length: int = 50,
        max_source_length: int = 256,
        tokens_per_batch: int = 2_048,
        int8: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ):
        """Remembers the model without its parameters and the options of the search.

        Args:
          graphdef: of a model with `start_decoding`, such as `tfx_jax.models.Transformer`.
          tokenizer: the one the model was trained with.
          beam_size: W.
          alpha: of the length penalty.
          extra_length: how many tokens an output may be longer than its input.
          max_source_length: longer inputs are cut to this many tokens, end of sentence included.
          tokens_per_batch: source positions of a batch.
          int8: whether the decoder multiplies integers, see `tfx_jax.functional.int8_product`: faster, not exact.
          on_batch: is told after each batch how many lines it has translated.
        """
        self.tokenizer = tokenizer
        self._on_batch = on_batch
        self._max_source_length = max_source_length
        self._tokens_per_batch = tokens_per_batch
        self._arrange = jax.jit(lambda params: nnx.merge(graphdef, params).decoder(int8=int8))
        self._search = jax.jit(functools.partial(search, graphdef, beam_size, alpha, extra_length))

    def __call__(self, params: Any, lines: Sequence[str]) -> list[str]:
        """Translates each line; an empty one stays empty."""
        return [self.tokenizer.decode(ids) for ids in self.translate_ids(params, lines)]

    def translate_ids(self, params: Any, lines: Sequence[str]) -> list[list[int]]:
        """Translates each line into token ids, the end of sentence included (nothing for an empty line)."""
        params = jax.device_put(params)  # once, not with every batch
        decoder = self._arrange(params)
        outputs: list[list[int]] = [[] for _ in lines]
        wanted = [index for index, line in enumerate(lines) if line.strip()]
        pairs = [{"source": lines[index], "target": ""} for index in wanted]
        few = max(1, len(wanted) - 1).bit_length()  # a handful of lines should not pay for a full batch
        encoded = EncodedPairs(pairs, self.tokenizer, max_length=self._max_source_length)
        spec = BatchSpec(
            self._boundaries(),
            min(self._tokens_per_batch, _DECODING_LENGTHS[0] << few),
            pad_values={"source": PAD_ID, "target": PAD_ID},
        )
        for batch in eval_batches(encoded, spec):
            tokens = np.asarray(self._search(params, decoder, batch["source"]))
            for index, row in zip(batch["index"], tokens, strict=True):
                if index >= 0:
                    outputs[wanted[index]] = row[row != PAD_ID].tolist()
            if self._on_batch is not None:
                self._on_batch(int((batch["index"] >= 0).sum()))
        if self._on_batch is not None and len(wanted) < len(lines):
            self._on_batch(len(lines) - len(wanted))
        return outputs

    def _boundaries(self) -> tuple[int, ...]:
        shorter = (length for length in _DECODING_LENGTHS if length < self._max_source_length)
        return (*shorter, self._max_source_length)


def search(
    graphdef: nnx.GraphDef,
    beam_size: int,
    alpha: float,
    extra_length: int,
    params: Any,
    decoder: Any,
    source: Int[Array, "B S"],
) -> Int[Array, "B L"]:
    """Finds the best hypothesis of each row of source tokens: the program that `Translator` compiles.

    Its arguments but the last three are static and explained there; `decoder` is what the model's `decoder()` made of
    `params`. Rows of nothing but padding are free; a target is at
    most S + extra_length tokens long, EOS_ID included.
    """
    lengths = (source != PAD_ID).sum(axis=1)
    max_length = source.shape[1] + extra_length
    step_fn, cache = nnx.merge(graphdef, params).start_decoding(
        source, max_length=max_length, num_beams=beam_size, decoder=decoder
    )
    found = beam_search(
        step_fn,
        cache,
        jnp.full(source.shape[:1], BOS_ID),
        beam_size=beam_size,
        max_length=max_length,
        # A row of padding is done at once.
        length_limits=jnp.where(lengths > 0, lengths + extra_length, 1),
        eos_id=EOS_ID,
        pad_id=PAD_ID,
        alpha=alpha,
    )
    return found.tokens[:, 0]
