"""Atomic writing of files."""

import uuid

from etils import epath


def write_file(path: epath.Path, content: bytes) -> None:
    """Writes a file atomically: readers see the old or the new content, also if several processes write it.

    Raises:
      OSError: if the file system refuses; no partial file is left then.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
