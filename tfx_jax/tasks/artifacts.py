"""Files that tasks keep in a workdir beside the parameters: tokenizers and JSON values, created once."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.data.objectives.span_corruption import NUM_SENTINELS, sentinel_ids
from tfx_jax.data.tokenizers.hf_tokenizer import TEMPLATE_FILES, TOKENIZER_FILES, HFTokenizer, load_folder_tokenizer
from tfx_jax.data.tokenizers.train import load_made_as, train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json, read_small_file
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.task import Artifacts

Config = TypeVar("Config", bound=ModelConfig)


def setup_tokenizer(
    artifacts: Artifacts, model: Config, texts: Callable[[], Iterable[str]], *, kind: str, family: str
) -> tuple[HFTokenizer, Config]:
    """Loads the tokenizer of a workdir; the first run trains it, or copies that of the model it starts from.

    Args:
      artifacts: files of the workdir.
      model: configuration of the model; its vocabulary size is the maximum number of tokens.
      texts: returns an iterator over the training text, in pieces.
      kind: kind of tokenizer, see `tfx_jax.data.tokenizers.train.train_or_load_folder`.
      family: set of special tokens: "bert", "gpt", "marian" or "t5".

    Returns:
      A pair: the tokenizer, and the model configuration with the real vocabulary size, which is that of the tokenizer
      or of the model that the run starts from.

    Raises:
      UserError: as `Artifacts.checked`; if the initial model has no tokenizer; or if the tokenizer of the workdir is of
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
            else:  # checks its kind: config.json may have been edited
                tokenizer = load_made_as(folder, kind=kind, family=family, vocab_size=size)
            model = dataclasses.replace(cast(Any, model), vocab_size=tokenizer.vocab_size)
    if family in ("marian", "t5"):
        _check_special_ids(model, tokenizer, artifacts)
    if family == "t5":
        _check_sentinels(tokenizer, artifacts)
    required_tokens = {"bert": ("cls_id", "sep_id", "pad_id"), "gpt": ("eos_id",)}.get(family, ())
    require_tokens(tokenizer, artifacts, *required_tokens)
    return tokenizer, model


def require_tokens(tokenizer: HFTokenizer, artifacts: Artifacts, *names: str) -> None:
    """Raises UserError if the tokenizer of the workdir lacks one of these special tokens, such as "pad_id"."""
    meanings = {"pad_id": "padding", "eos_id": "the end of a text"}
    for name in names:
        if getattr(tokenizer, name) is None:
            meaning = meanings.get(name, f"[{name.removesuffix('_id').upper()}]")
            raise UserError(
                f"the tokenizer of {artifacts.folder} has no token for {meaning}, which this task needs: use another "
                "tokenizer"
            )


def _check_sentinels(tokenizer: HFTokenizer, artifacts: Artifacts) -> None:
    """Raises UserError unless the last tokens of the tokenizer are T5's sentinels, in the order of `sentinel_ids`."""
    sentinels = sentinel_ids(tokenizer.vocab_size, min(NUM_SENTINELS, tokenizer.vocab_size))
    if tokenizer.pieces(sentinels) != [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]:
        raise UserError(
            f"the last {NUM_SENTINELS} tokens of the tokenizer of {artifacts.folder} must be T5's sentinels "
            "<extra_id_N>"
        )


def _check_special_ids(model: Any, tokenizer: HFTokenizer, artifacts: Artifacts) -> None:
    """Raises UserError unless the model has the padding and EOS tokens of the workdir's tokenizer.

    The start token must agree, too, if the tokenizer defines one; otherwise any start token is valid.
    """
    for name, tokenizer_name in (("pad_id", "pad_id"), ("eos_id", "eos_id"), ("start_id", "bos_id")):
        model_id, tokenizer_id = getattr(model, name), getattr(tokenizer, tokenizer_name)
        if model_id != tokenizer_id and (tokenizer_name, tokenizer_id) != ("bos_id", None):
            raise UserError(
                f"config.model.{name} is {model_id}, but the tokenizer of {artifacts.folder} has {tokenizer_id}: set "
                "the field to that"
            )


def setup_json(artifacts: Artifacts, name: str, make: Callable[[], Any]) -> Any:
    """Returns the content of a JSON file of a workdir; the first run creates it with `make`.

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
            raise UserError(f"{path} is damaged ({error}): restore a copy") from None


def _copy_tokenizer(source: epath.Path, folder: epath.Path) -> None:
    """Copies the tokenizer files of `source` that `folder` does not have yet."""
    names = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not names:
        raise UserError(
            f"{source} has no tokenizer: config.init_from must be a workdir or Hugging Face folder with a tokenizer"
        )
    folder.mkdir(parents=True, exist_ok=True)
    names += [name for name in TEMPLATE_FILES if (source / name).exists()]
    for name in names:
        if not (folder / name).exists():
            write_file(folder / name, read_small_file(source / name))
