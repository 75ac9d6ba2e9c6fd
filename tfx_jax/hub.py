"""Models by their names on the Hugging Face hub, such as "gpt2": downloaded once, then read as any folder."""

import functools
import re

from etils import epath

from tfx_jax.errors import UserError, printable
from tfx_jax.files import reach

_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
# What is read of a folder: no pickle, no code, and nothing from the folders of other programs' formats.
_FILES = ["*.json", "*.txt", "*.model", "*.spm", "*.jinja", "model*.safetensors"]


def local_folder(name: epath.PathLike) -> epath.Path:
    """Returns the folder of a model: the path that `name` is or, where nothing is there, what the hub has of that name.

    A `pathlib.Path` and its like are always paths, as is text with "./" before it. Downloads lie where
    `huggingface_hub` keeps them, and are not fetched again while they are the newest; one process asks once.

    Raises:
      UserError: if nothing is there, and the hub has no such model or cannot be reached; or as `reach`.
    """
    folder = reach(name)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or folder.exists():
        return folder
    return epath.Path(_download(name))


@functools.cache
def _download(name: str) -> str:
    """Asks the hub once in a process: configuration, tokenizer and parameters are those of one version."""
    import huggingface_hub.errors  # where nothing is downloaded, nothing is imported

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"])
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise UserError(
            f"there is no folder {name} here, and the Hugging Face hub shows no model of that name: for one that is "
            "gated or private, log in with `hf auth login`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"there is no folder {name} here, and the hub's model of that name cannot be downloaded "
            f"({printable(str(error).partition(chr(10))[0], 160)}): copy its folder from where there is a network, and "
            "name that folder"
        ) from None
