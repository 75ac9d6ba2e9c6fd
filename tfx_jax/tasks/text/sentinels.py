"""The tokenizer of tasks that write text with sentinels (Raffel et al., 2020, section 3.1.4)."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from tfx_jax.data.objectives.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.models.config import EncoderDecoderConfig
from tfx_jax.tasks.artifacts import check_special_ids, setup_tokenizer
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
    """Loads or makes the tokenizer of a workdir, which has T5's special tokens; see `setup_tokenizer`.

    Raises:
      UserError: as `setup_tokenizer`, and if its special tokens are not those of the model.
    """
    tokenizer, model = setup_tokenizer(artifacts, model, texts, kind=kind, family="t5")
    check_special_ids(model, tokenizer, artifacts)
    sentinels = sentinel_ids(tokenizer.vocab_size, min(NUM_SENTINELS, tokenizer.vocab_size))
    if tokenizer.pieces(sentinels) != [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]:
        raise UserError(
            f"the last {NUM_SENTINELS} tokens of the tokenizer of {artifacts.folder} are not T5's sentinels"
        )
    return SentinelTokenizer(tokenizer, Specials(model.pad_id, model.eos_id, sentinels)), model
