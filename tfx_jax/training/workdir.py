"""The folder of a training, local or remote, and what may be wrong with the one that somebody names."""

import os

from etils import epath

from tfx_jax.errors import UserError


def make_workdir(workdir: epath.PathLike) -> epath.Path:
    """Makes the folder, if it is not there.

    Raises:
      UserError: as `find_workdir`, and if it cannot be made or written into.
    """
    path = find_workdir(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file: take another --workdir") from None
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror or error}): take another --workdir") from None
    except Exception as error:  # whatever the client of a store raises
        raise UserError(f"{path} cannot be reached ({one_line(error)})") from None
    if _is_local(path) and not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written into: take another --workdir, or change its permissions")
    return path


def find_workdir(workdir: epath.PathLike) -> epath.Path:
    """Returns the path of a folder that need not be there.

    Raises:
      UserError: if it has no name, or is in a store for which no client is installed.
    """
    if not os.fspath(workdir):
        raise UserError("--workdir is empty: name a folder")
    try:
        path = epath.Path(workdir)
        path.exists()
    except ImportError as error:
        raise UserError(f"{workdir} cannot be reached ({one_line(error)}): install what is missing") from None
    except OSError as error:
        raise UserError(f"{workdir} cannot be used ({error.strerror or error}): take another --workdir") from None
    except Exception as error:  # whatever the client of a store raises
        raise UserError(f"{workdir} cannot be reached ({one_line(error)})") from None
    return path


def _is_local(path: epath.Path) -> bool:
    return "://" not in os.fspath(path)


def one_line(error: BaseException) -> str:
    """What an error of a store says, or its kind where that is nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__
