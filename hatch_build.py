"""Build hook: README.md as package indexes show it, where relative links would lead nowhere."""

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r'(\]\(|src=")(?!https?:|#)([^)"]+)')  # [text](target) or <img src="target">


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme`, with links to the repository's files."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table `project` of pyproject.toml, which it extends."""
        page = metadata["urls"]["Homepage"]
        pictures = page.replace("github.com", "raw.githubusercontent.com")

        def absolute(match: re.Match[str]) -> str:
            is_picture = match[1] != "]("
            return f"{match[1]}{f'{pictures}/main' if is_picture else f'{page}/blob/main'}/{match[2]}"

        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _LINK.sub(absolute, text)}
