"""The tokenizer of tasks that write text with sentinels (Raffel et al., 2020, section 3.1.4)."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

from tfx_jax.data.hf_tokenizer import HFTokenizer
from tfx_jax.data.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.errors import UserError
from tfx_jax.models.config import EncoderDecoderConfig
from tfx_jax.tasks.artifacts import real_vocab_size, setup_tokenizer
from tfx_jax.tasks.task import Artifacts

Config = TypeVar("Config", bound=EncoderDecoderConfig)


class Specials(NamedTuple):
    """The special tokens of such a tokenizer; `sentinels` are in the order in which a text has them."""

    pad_id: int
    eos_id: int
    sentinels: list[int]


class SentinelTokenizer(NamedTuple):
    """A tokenizer and its special tokens."""

    tokenizer: HFTokenizer
    specials: Specials


def setup_sentinel_tokenizer(
    artifacts: Artifacts, model: Config, texts: Callable[[], Iterable[str]], *, kind: str
) -> tuple[SentinelTokenizer, Config]:
    """Loads or makes the tokenizer of a workdir, which has T5's special tokens.

    Returns:
      The tokenizer, and the configuration of the model with the vocabulary that it really has.

    Raises:
      UserError: as `setup_tokenizer`, and if its special tokens are not those of the model.
    """
    tokenizer = setup_tokenizer(artifacts, texts, kind=kind, family="t5", vocab_size=model.vocab_size)
    for name in ("pad", "eos"):
        of_model, of_tokenizer = (getattr(side, f"{name}_id") for side in (model, tokenizer))
        if of_model != of_tokenizer:
            raise UserError(
                f"config.model.{name}_id is {of_model}, but the tokenizer of {artifacts.folder} has {of_tokenizer} "
                "for it"
            )
    sentinels = sentinel_ids(tokenizer.vocab_size, min(NUM_SENTINELS, tokenizer.vocab_size))
    if tokenizer.pieces(sentinels) != [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]:
        raise UserError(
            f"the last {NUM_SENTINELS} tokens of the tokenizer of {artifacts.folder} are not T5's sentinels"
        )
    model = dataclasses.replace(cast(Any, model), vocab_size=real_vocab_size(model, tokenizer, artifacts))
    return SentinelTokenizer(tokenizer, Specials(model.pad_id, model.eos_id, sentinels)), model
