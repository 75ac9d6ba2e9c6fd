"""Downloads models by their names on the Hugging Face hub, such as "gpt2", and returns their local folders."""

import functools
import re

from etils import epath

from tfx_jax.errors import UserError, printable
from tfx_jax.files import reach

_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
# Files to download: no pickle, no code, and no subfolders with formats of other programs.
_FILES = ["*.json", "*.txt", "*.model", "*.spm", "*.jinja", "model*.safetensors"]


def local_folder(name: epath.PathLike) -> epath.Path:
    """Returns the folder of a model: the path `name` if it exists, else a download of the hub's model of that name.

    Path objects and strings that begin with "./" are always paths. Downloads are kept in the cache of
    `huggingface_hub`, which fetches a model again only if it has changed; a process asks the hub once per name.

    Raises:
      UserError: if the path does not exist and the hub has no such model or cannot be reached; or as `reach`.
    """
    folder = reach(name)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or folder.exists():
        return folder
    return epath.Path(_download(name))


@functools.cache
def _download(name: str) -> str:
    """Downloads a model. Cached, so that configuration, tokenizer and parameters come from one version."""
    import huggingface_hub.errors  # imported only for a download

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"])
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise UserError(
            f"there is no folder {name} here, and the Hugging Face hub shows no model of that name: if it is gated or "
            "private, log in with `hf auth login`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"there is no folder {name} here, and the hub's model of that name cannot be downloaded "
            f"({printable(str(error).partition(chr(10))[0], 160)}): download it on a machine with network access, "
            "copy its folder here and name that folder"
        ) from None
