"""What tasks keep in a workdir beside the parameters: tokenizers and JSON values, made once."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.data.objectives.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.data.tokenizers.hf_tokenizer import TOKENIZER_FILES, HFTokenizer, load_folder_tokenizer
from tfx_jax.data.tokenizers.train import load_made_as, train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json, read_small_file
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.task import Artifacts

Config = TypeVar("Config", bound=ModelConfig)


def setup_tokenizer(
    artifacts: Artifacts, model: Config, texts: Callable[[], Iterable[str]], *, kind: str, family: str
) -> tuple[HFTokenizer, Config]:
    """Loads the tokenizer of a workdir; the first training makes it, or copies that of the model it starts from.

    Args:
      artifacts: of the workdir.
      model: the configuration of the model, whose vocabulary is how many tokens there are at most.
      texts: begins the training text again, in pieces.
      kind: see `tfx_jax.data.tokenizers.train.train_or_load_folder`.
      family: which special tokens it has: "bert", "gpt", "marian" or "t5".

    Returns:
      The tokenizer, and the configuration of the model with as many tokens as it really has: the tokenizer's, or those
      of the model that it starts from.

    Raises:
      UserError: as `Artifacts.checked`, if the model to start from has no tokenizer, and if that of the workdir is of
        another kind, has more tokens than the configuration allows, or lacks special tokens of its family.
    """
    folder = artifacts.folder / "tokenizer"
    with artifacts.checked(folder.name) as is_new:
        if artifacts.starts_from_model:
            if is_new:
                _copy_tokenizer(artifacts.initial_tokenizer(), folder)
            tokenizer = load_folder_tokenizer(folder)
        else:
            size = model.vocab_size
            if is_new:
                tokenizer = train_or_load_folder(folder, texts, kind=kind, family=family, vocab_size=size)
            else:  # config.json may have been edited since it was made
                tokenizer = load_made_as(folder, kind=kind, family=family, vocab_size=size)
            model = dataclasses.replace(cast(Any, model), vocab_size=tokenizer.vocab_size)
    if family in ("marian", "t5"):
        _check_special_ids(model, tokenizer, artifacts)
    if family == "t5":
        _check_sentinels(tokenizer, artifacts)
    require_tokens(tokenizer, artifacts, *{"bert": ("cls_id", "sep_id", "pad_id"), "gpt": ("eos_id",)}.get(family, ()))
    return tokenizer, model


def require_tokens(tokenizer: HFTokenizer, artifacts: Artifacts, *names: str) -> None:
    """Raises UserError unless the tokenizer of the workdir has some special tokens, such as "pad_id"."""
    meanings = {"pad_id": "padding", "eos_id": "the end of a text"}
    for name in names:
        if getattr(tokenizer, name) is None:
            meaning = meanings.get(name, f"[{name.removesuffix('_id').upper()}]")
            raise UserError(f"the tokenizer of {artifacts.folder} has no token for {meaning}")


def _check_sentinels(tokenizer: HFTokenizer, artifacts: Artifacts) -> None:
    sentinels = sentinel_ids(tokenizer.vocab_size, min(NUM_SENTINELS, tokenizer.vocab_size))
    if tokenizer.pieces(sentinels) != [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]:
        raise UserError(
            f"the last {NUM_SENTINELS} tokens of the tokenizer of {artifacts.folder} are not T5's sentinels"
        )


def _check_special_ids(model: Any, tokenizer: HFTokenizer, artifacts: Artifacts) -> None:
    """Raises UserError unless a model that writes texts has the padding and the end of the tokenizer of the workdir.

    So it is with the start token, if the tokenizer names one: else a model may start with what it likes.
    """
    for name, role in (("pad_id", "pad_id"), ("eos_id", "eos_id"), ("start_id", "bos_id")):
        of_model, of_tokenizer = getattr(model, name), getattr(tokenizer, role)
        if of_model != of_tokenizer and (role, of_tokenizer) != ("bos_id", None):
            raise UserError(
                f"config.model.{name} is {of_model}, but the tokenizer of {artifacts.folder} has {of_tokenizer} for it"
            )


def setup_json(artifacts: Artifacts, name: str, make: Callable[[], Any]) -> Any:
    """Returns what a JSON file of a workdir holds; the first training makes it.

    Raises:
      UserError: as `Artifacts.checked`.
    """
    path = artifacts.folder / name
    with artifacts.checked(name) as is_new:
        if is_new and not path.exists():
            write_file(path, (json.dumps(make(), ensure_ascii=False) + "\n").encode())
        try:
            return parse_json(read_small_file(path))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): put back a copy") from None


def _copy_tokenizer(source: epath.Path, folder: epath.Path) -> None:
    """Copies a tokenizer, unless that was done before."""
    names = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not names:
        raise UserError(f"{source} has no tokenizer: config.init_from takes a workdir or Hugging Face folder with one")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            write_file(folder / name, read_small_file(source / name))
