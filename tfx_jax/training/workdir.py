"""The workdir of a run, local or remote: creating, finding and checking it."""

import os

from etils import epath

from tfx_jax.errors import UserError, one_line
from tfx_jax.files import check_no_links, is_local, parse_json, reach, read_small_file
from tfx_jax.models import hf

# Folders in which a run writes and deletes files. Files of the workdir itself are replaced, even if they are links.
_WRITTEN_THROUGH = ("checkpoints", "tensorboard", "tokenizer", "profile", "wandb")


def make_workdir(workdir: epath.PathLike) -> epath.Path:
    """Creates the folder if it does not exist, and returns it.

    Raises:
      UserError: as `find_workdir`, and if it cannot be created or written to.
    """
    path = find_workdir(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file: use another workdir") from None
    except OSError as error:
        raise UserError(f"{path} cannot be created ({error.strerror or error}): use another workdir") from None
    except Exception as error:  # clients of stores raise errors of their own classes
        raise UserError(f"{path} cannot be reached ({one_line(error)})") from None
    check_no_links(path, _WRITTEN_THROUGH)
    if is_local(path) and not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path} is not writable: use another workdir, or change its permissions")
    return path


def find_workdir(workdir: epath.PathLike) -> epath.Path:
    """Returns the path of a folder, which need not exist.

    Raises:
      UserError: if the name is empty, or as `reach`.
    """
    if not os.fspath(workdir):
        raise UserError("--workdir is empty: name a folder")
    return reach(workdir)


def is_workdir(folder: epath.Path) -> bool:
    """Returns whether a folder is the workdir of a run; a Hugging Face folder has a `config.json` too.

    An adapter of PEFT, which names the folder of its model, has an `adapter_config.json` instead.

    Raises:
      UserError: if it is none of these.
    """
    if hf.is_adapter(folder):
        return False
    try:
        values = parse_json(read_small_file(folder / "config.json"))
    except UserError:
        raise
    except (OSError, ValueError):
        raise UserError(
            f"{folder} is neither the workdir of a run nor a Hugging Face folder: it has no readable config.json"
        ) from None
    return isinstance(values, dict) and "num_steps" in values
