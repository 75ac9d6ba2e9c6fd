"""What tasks keep in a workdir beside the parameters: tokenizers and JSON values, made once."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.data.hf_tokenizer import TOKENIZER_FILES, HFTokenizer, load_folder_tokenizer
from tfx_jax.data.train_tokenizer import train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.task import Artifacts


def setup_tokenizer(
    artifacts: Artifacts, texts: Callable[[], Iterable[str]], *, kind: str, family: str, vocab_size: int
) -> HFTokenizer:
    """Loads the tokenizer of a workdir; the first training makes it, or copies that of the model it starts from.

    Args:
      artifacts: of the workdir.
      texts: begins the training text anew, in pieces.
      kind: see `tfx_jax.data.train_tokenizer.train_or_load_folder`, as for the next two.
      family: which special tokens it has.
      vocab_size: how many tokens at most.

    Raises:
      UserError: as `Artifacts.checked`, and if the model to start from has no tokenizer.
    """
    folder = artifacts.folder / "tokenizer"
    with artifacts.checked(folder.name) as is_new:
        if is_new and not artifacts.starts_from_model:
            return train_or_load_folder(folder, texts, kind=kind, family=family, vocab_size=vocab_size)
        if is_new:
            _copy_tokenizer(artifacts.initial_tokenizer(), folder)
        return load_folder_tokenizer(folder)


def real_vocab_size(model: ModelConfig, tokenizer: HFTokenizer, artifacts: Artifacts) -> int:
    """Returns how many tokens the model has: the tokenizer's, or those of the model that it starts from."""
    return model.vocab_size if artifacts.starts_from_model else tokenizer.vocab_size


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
            return json.loads(path.read_text(encoding="utf-8"))
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
            write_file(folder / name, (source / name).read_bytes())
