"""Files that are there whole or not at all."""

import uuid

from etils import epath


def write_file(path: epath.Path, content: bytes) -> None:
    """Writes a file atomically: readers find the old one or the new one, also if several processes write it.

    Raises:
      OSError: if storage does not allow it; nothing is left behind then.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
