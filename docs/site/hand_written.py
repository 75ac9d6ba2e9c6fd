"""Pages written by hand, docs/*.md and some in the root; links in them lead to the site's own pages."""

import posixpath
import re

from docs.site.api import Pages
from docs.site.markdown import code_link
from docs.site.symbols import PACKAGES, REPOSITORY, ROOT

FILES = {
    "docs/site/index.md": "index",
    "docs/guide.md": "guide",
    "docs/notebooks.md": "notebooks",
    "docs/in_your_model.md": "in_your_model",
    "docs/attention.md": "attention",
    "docs/models.md": "models",
    "docs/hugging_face.md": "hugging_face",
    "docs/formats.md": "formats",
    "docs/serving.md": "serving",
    "docs/conformance.md": "conformance",
    "docs/sweeps.md": "sweeps",
    "docs/results.md": "results",
    "docs/speed.md": "speed",
    "docs/from_laptop_to_pod.md": "from_laptop_to_pod",
    "docs/pod_on_paper.md": "pod_on_paper",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "CHANGELOG.md": "changelog",
}
"""Paths of the pages, without a suffix, by file in the repository."""
PICTURES = ROOT / "docs" / "notebooks"
"""Pictures of docs/notebooks.md; the site has them under the same relative path."""
_FENCE = re.compile(r"^(`{3,}|:{3,}).*?^\1$", re.MULTILINE | re.DOTALL)


def pages() -> Pages:
    """Returns all pages written by hand."""
    return {page: convert((ROOT / file).read_text(encoding="utf-8"), file) for file, page in FILES.items()}


def convert(text: str, file: str) -> str:
    """Converts a page: links to files become links to pages or to the repository, and public names become links."""
    parts: list[str] = []
    end = 0
    for match in re.finditer(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL):
        # The tests read the name of a file after the language of a block; the site shows it as a caption.
        block = re.sub(r"^```(text|json) (\S+)\n", r"```{code-block} \1\n:caption: \2\n\n", match[0])
        parts += [_prose(text[end : match.start()], file), block]
        end = match.end()
    return "".join([*parts, _prose(text[end:], file)])


def _prose(text: str, file: str) -> str:
    """Converts text without blocks of code; `file` is the file of the page, from which relative links start."""
    text = re.sub(
        r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)", lambda match: f"{match[1]}{_target(match[2], match[3] or '', file)})", text
    )
    links = re.compile(r"(\[[^\]]*\]\([^)]*\))|`([^`\n]+)`")
    return links.sub(lambda match: match[1] or code_link(match[2], "./"), text)


def _target(path: str, anchor: str, file: str) -> str:
    """Returns the target on the site of a relative link.

    Args:
      path: target in the repository, relative to the folder of `file`.
      anchor: "#section" in the target, or "".
      file: file that contains the link.
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    if (ROOT / target).parent == PICTURES:
        return path
    if target in FILES:
        return f"{FILES[target]}.md{anchor}"
    experiment = re.fullmatch(r"experiments/(\w+)\.py", target)
    if experiment:
        return f"experiments.md#{experiment[1]}"
    package = re.fullmatch(r"tfx_jax/(.+)/__init__\.py", target)
    if package and package[1].replace("/", ".") in PACKAGES:
        return f"api/{package[1].replace('/', '.')}/index.md{anchor}"
    if not (ROOT / target).exists():  # a page that the generator writes
        return path + anchor
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{target}{anchor}"
