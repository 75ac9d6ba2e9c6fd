"""Downloads models and files of data sets from the Hugging Face hub by their names, and uploads models."""

import fnmatch
import functools
import pathlib
import re
from collections.abc import Sequence

from etils import epath

from tfx_jax.errors import UserError, printable
from tfx_jax.files import reach

_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
# Files to download: no pickle, no code, and no subfolders with formats of other programs.
_FILES = [
    "README.md",
    "*.json",
    "*.txt",
    "*.model",
    "*.spm",
    "*.jinja",
    "model*.safetensors",
    "adapter_model.safetensors",
]


DATASETS = "hf://datasets/"
_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[\w.-]+|~?[\w.-]+))?/(.+)", re.ASCII)


def was_downloaded(name: str) -> bool:
    """Returns whether `name` is a model of the hub that this machine has downloaded, and not a local folder."""
    if not _NAME.fullmatch(name) or reach(name).exists():
        return False
    import huggingface_hub  # imported only for this

    return isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)


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
    except Exception as error:  # of the files, of HTTP and of the hub: many classes
        raise UserError(
            f"there is no folder {name} here, and the hub's model of that name cannot be downloaded "
            f"({printable(str(error).partition(chr(10))[0], 160)}): download it on a machine with network access, "
            "copy its folder here and name that folder"
        ) from None


def dataset_files(url: str) -> list[epath.Path]:
    """Downloads files of a data set, which huggingface_hub caches, and returns their local paths, sorted by name.

    Args:
      url: "hf://datasets/OWNER/NAME/PATTERN", as huggingface_hub writes it, such as
        "hf://datasets/stanfordnlp/imdb/plain_text/train-*.parquet". "NAME@REVISION" names a branch, tag or commit, or
        "~parquet" the hub's own conversion ("refs/convert/parquet"). In a pattern, "*" stands for any characters, "/"
        too.

    Raises:
      UserError: if there is no such data set or file, or it cannot be downloaded.
    """
    match = _DATASET.fullmatch(url)
    if match is None:
        raise UserError(f"{url} names no file: write hf://datasets/OWNER/NAME/FILE, where FILE may be a pattern")
    name, revision, pattern = match.groups()
    if revision is not None:
        revision = revision.replace("~", "refs/convert/")
    return [epath.Path(path) for path in _download_dataset(name, revision, pattern)]


@functools.cache
def _download_dataset(name: str, revision: str | None, pattern: str) -> list[str]:
    """Downloads the files that match a pattern. Cached, so that all parts of a run see one version."""
    import huggingface_hub.errors  # imported only for a download

    try:
        folder = pathlib.Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=[pattern])
        )
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise UserError(
            f"the Hugging Face hub shows no data set {name}: if it is gated or private, log in with `hf auth login`"
        ) from None
    except Exception as error:  # of the files, of HTTP and of the hub: many classes
        raise UserError(
            f"the data set {name} cannot be downloaded ({printable(str(error).partition(chr(10))[0], 160)}): download "
            "it on a machine with network access and name its files"
        ) from None
    # The folder may also have files of earlier downloads.
    files = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    matching = [file for file in files if fnmatch.fnmatchcase(str(pathlib.Path(file).relative_to(folder)), pattern)]
    if not matching:
        raise UserError(
            f"the data set {name} has no file {pattern}: see https://huggingface.co/datasets/{name}/tree/main"
        )
    return matching


def check_upload(name: str) -> None:
    """Checks what an upload needs, before a model is made for it.

    Raises:
      UserError: if `name` is not OWNER/NAME, the hub is switched off, or there is no token.
    """
    import huggingface_hub.constants  # imported only for an upload

    if not _NAME.fullmatch(name) or "/" not in name:
        raise UserError(f"--push={name} must be OWNER/NAME, such as jane/my-model")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError("--push needs the Hugging Face hub, which HF_HUB_OFFLINE switches off: unset it")
    if not huggingface_hub.get_token():
        raise UserError("--push needs a token of the Hugging Face hub: log in with `hf auth login`, or set HF_TOKEN")


def upload(folder: pathlib.Path, name: str, files: Sequence[str]) -> str:
    """Uploads files of a folder to the hub's model `name` (OWNER/NAME), which is made as a private one if it is new.

    Returns:
      The address of the model.

    Raises:
      UserError: if the hub refuses or cannot be reached.
    """
    import huggingface_hub  # imported only for an upload

    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        message = "Upload by tfx-jax convert"
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=list(files), commit_message=message)
    except Exception as error:  # of the files, of HTTP and of the hub: many classes
        reason = printable(str(error).partition(chr(10))[0], 160)
        raise UserError(
            f"{folder} is written, but cannot be uploaded to {name} ({reason}): "
            "check the name and the rights of the token, then run the same command again with --overwrite"
        ) from None
    return str(url)
