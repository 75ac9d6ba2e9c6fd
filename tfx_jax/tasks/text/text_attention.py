"""Attention maps of models that read one text, or two: encoders and language models."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.tasks.prediction import PairAttention, TrainedModel, check_returns_attention
from tfx_jax.tasks.text.bert_examples import bert_example

_DRAWABLE = range(4, 33)  # tokens of a text whose labels a plot shows legibly


class TextAttention:
    """Mixin of tasks whose models read tokens of text: attention maps of one input.

    A subclass has `model_config` and `tokenizer`, and defines `attention_inputs`.
    """

    def attention_inputs(self) -> Iterable[Sequence[str]]:
        """Yields inputs of the validation split, each of one or two texts."""
        raise NotImplementedError

    def attention(self: Any, model: TrainedModel, source: str, target: str | None = None) -> PairAttention:
        """Returns the attention maps of one input; see `text_attention`."""
        return text_attention(model, self.model_config, self.tokenizer, source, target)

    def attention_example(self: Any, model: TrainedModel) -> PairAttention | None:
        """Returns the maps of the first of a hundred validation inputs that a plot shows legibly; None if none does."""
        if self.tokenizer is None:  # a model that reads characters
            return None
        for texts in itertools.islice(self.attention_inputs(), 100):
            if sum(len(self.tokenizer.encode(text)) for text in texts) in _DRAWABLE:
                return self.attention(model, *texts)
        return None


def text_attention(
    model: TrainedModel, config: Any, tokenizer: HFTokenizer, source: str, target: str | None = None
) -> PairAttention:
    """Computes every attention map of an encoder or of a language model for one input.

    Args:
      model: the trained model.
      config: its configuration, whose `kind` is "bert" or "decoder".
      tokenizer: its tokenizer.
      source: the text.
      target: second text of a pair; None for a single text.

    Returns:
      Maps by name, each [N, T, T] float32: of an encoder "encoder/LAYER/self", whose tokens are `source`; of a language
      model "decoder/LAYER/self", whose tokens are `target`. The other sequence is empty.

    Raises:
      UserError: if the model is of another kind, cannot return its maps, or a text has no tokens or, for a language
        model, too many.
    """
    if config.kind not in ("bert", "decoder"):
        raise UserError(f"a model of {type(config).__name__} does not read one text: there are no maps to draw")
    if config.kind == "decoder" and target is not None:
        raise UserError("a language model reads one text: pass no target")
    first, second = tokenizer.encode(source), [] if target is None else tokenizer.encode(target)
    if not first:
        raise UserError("the text has no tokens: give a text with visible characters")
    if config.kind == "decoder":
        batch = {"tokens": np.array([first], np.int32)}
    else:
        example = bert_example(tokenizer, first, second, max_length=config.max_length)
        batch = {name: array[None] for name, array in example.items()}
    (maps,) = model.map_batches(_maps, [batch])
    pieces = tokenizer.pieces(cast(list[int], batch["tokens"][0].tolist()))
    maps = {name: weights[0] for name, weights in maps.items()}
    return PairAttention(maps, pieces, []) if config.kind == "bert" else PairAttention(maps, [], pieces)


def _max_length(model: Any) -> int | None:
    """Returns the most tokens that a language model reads; None without a limit, and for an encoder."""
    return model.decoder().max_input_length(0) if isinstance(model, DecodingModel) else None


def _maps(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the attention maps of a batch by name, for `TrainedModel.map_batches`.

    Raises:
      UserError: if the model cannot return its maps, or reads fewer tokens than the batch has.
    """
    check_returns_attention(model)
    arguments = dict(batch)
    num_tokens, limit = arguments["tokens"].shape[1], _max_length(model)
    if limit is not None and num_tokens > limit:
        raise UserError(f"the text has {num_tokens:,} tokens, but the model takes {limit:,}: shorten it")
    inputs = [arguments.pop(name) for name in ("tokens", "token_type_ids") if name in arguments]
    _, maps = model(*inputs, **arguments, return_attention=True)
    return {name: weights.astype("float32") for name, weights in maps.items()}
