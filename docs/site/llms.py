"""llms.txt: what a language model should know of the library, and the site's pages by topic (https://llmstxt.org)."""

import os
import re

from docs.site import hand_written
from docs.site.api import Pages
from docs.site.symbols import ROOT

SITE = "https://tfx-jax.github.io/tfx-jax"
_LINK = re.compile(r"\]\((?:\./)?([\w/.-]+)\.md(#[\w-]+)?\)")  # links between pages


def text(pages: Pages) -> str:
    """Returns llms.txt: AGENTS.md, the recipes of CONTRIBUTING.md, and one line for each page but those of the API.

    Links name the version of the site, which the environment variable DOCS_VERSION names when it is deployed.
    """
    version = os.environ.get("DOCS_VERSION", "main")
    base = SITE if version == "main" else f"{SITE}/{version}"
    agents = hand_written.convert((ROOT / "AGENTS.md").read_text(encoding="utf-8"), "AGENTS.md")
    attentions = sorted(name for name in pages if name.startswith("attention/"))
    packages = sorted(name for name in pages if re.fullmatch("api/.+/index", name))
    others = [name for name in pages if "/" not in name and name not in ("index", "contributing")]
    recipes = [f"- [{title}](contributing.md#{_anchor(title)})" for title in _recipes(pages["contributing"])]
    sections = {
        "Recipes": recipes,
        "Pages": [_entry(name, pages[name]) for name in others],
        "Attention functions": [_entry(name, pages[name]) for name in attentions],
        "API": [_entry(name, pages[name]) for name in packages],
    }
    parts = ["# tfx_jax", f"> {_summary(pages['index'])}", agents.partition("\n")[2].strip()]
    parts += [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items()]
    linked = _LINK.sub(lambda match: f"]({base}/{match[1]}.html{match[2] or ''})", "\n\n".join(parts))
    return linked + "\n"


def _recipes(page: str) -> list[str]:
    """Returns the titles of the recipes on the page `contributing`."""
    section = page.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    return re.findall(r"^### (.+)$", section, re.MULTILINE)


def _anchor(title: str) -> str:
    """Returns the anchor of a heading."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def _entry(name: str, page: str) -> str:
    """Returns a line with the title of a page, its link and the first sentence below the title."""
    title = page.partition("\n")[0].removeprefix("# ")
    summary = _summary(page)
    return f"- [{title}]({name}.md)" + (f": {summary}" if summary else "")


def _summary(page: str) -> str:
    """Returns the first sentence of the first paragraph of a page as plain text; "" if it begins otherwise."""
    blocks = [block for block in page.split("\n\n")[1:] if block.strip()]
    if not blocks or not re.match(r"[\w`*\[]", blocks[0]):
        return ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(blocks[0].split()))
    return re.split(r"(?<=\.)\s", plain.replace("**", ""))[0].rstrip(":")
