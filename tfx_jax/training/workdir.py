"""The folder of a training, local or remote, and what may be wrong with the one that somebody names."""

import contextlib
import os

from etils import epath

from tfx_jax.errors import UserError, one_line


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
    if "://" in os.fspath(workdir):
        _end_waiting()
    try:
        path = epath.Path(workdir)
        path.exists()
    except ImportError as error:
        raise UserError(f"{workdir} cannot be reached ({one_line(error)}): install what is missing") from None
    except Exception as error:
        if isinstance(error, OSError) and "://" not in os.fspath(workdir):
            raise UserError(f"{workdir} cannot be used ({error.strerror or error}): take another --workdir") from None
        raise UserError(f"{workdir} cannot be reached ({one_line(error)})") from None  # by whatever client it has
    return path


def absolute(path: epath.PathLike) -> epath.Path:
    """The whole path, as Orbax asks for; `resolve` would take one in a store for a local folder named "gs:"."""
    found = epath.Path(path)
    return found.resolve() if _is_local(found) else found


def _end_waiting() -> None:
    """Makes who reads Google's store give a request up that is not answered, after which it is tried again.

    By default gcsfs waits five minutes, six times, and tensorstore for ever; who has set something else keeps that.
    """
    with contextlib.suppress(ImportError):
        import fsspec.config

        fsspec.config.conf.setdefault("gcs", {}).setdefault("requests_timeout", 20)
    for name, value in (("TIME_SECONDS", "20"), ("LIMIT_BYTES", "1")):
        os.environ.setdefault(f"TENSORSTORE_CURL_LOW_SPEED_{name}", value)


def _is_local(path: epath.Path) -> bool:
    return "://" not in os.fspath(path)
