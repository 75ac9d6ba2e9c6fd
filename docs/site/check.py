"""Checks of built pages: requests to other hosts, links within the site, and the formula of each attention."""

import html.parser
import pathlib
import re
import urllib.parse

# Attributes whose address a browser requests when it shows a page, by tag.
_REQUESTING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
}
_ELSEWHERE = re.compile(r"\s*(https?:)?//")  # addresses of other hosts
# Addresses of other hosts in CSS, in url(...) or @import.
_STYLE = re.compile(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)|@import\s+['\"]((?:https?:)?//[^'\"]+)")


class _Page(html.parser.HTMLParser):
    """Collects ids, links and requests to other hosts."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.requests = set[str](), list[str](), list[str]()
        self.num_formulas = 0
        self.has_raw_formula = False  # LaTeX that the converter left as it is
        self._is_in_formula = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by `feed` for each tag."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        requested = [values.get(_REQUESTING.get(tag, ""), ""), values.get("srcset", "")]
        if tag == "link" and values.get("rel") != "canonical":
            requested.append(values.get("href", ""))
        self.requests += [address for address in requested if _ELSEWHERE.match(address)]
        self.requests += [url or imported for url, imported in _STYLE.findall(values.get("style", ""))]
        if tag == "math":
            self.num_formulas += 1
            self._is_in_formula = True

    def handle_endtag(self, tag: str) -> None:
        """Called by `feed` for each end of a tag."""
        self._is_in_formula &= tag != "math"

    def handle_data(self, data: str) -> None:
        """Called by `feed` for text."""
        self.has_raw_formula |= self._is_in_formula and "\\" in data


def problems(folder: pathlib.Path) -> list[str]:
    """Returns one line for each request to another host and for each link that leads nowhere.

    Each page in the folder `attention` must have a formula.
    """
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    result: list[str] = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        result += [f"{name}: requests {address}" for address in page.requests]
        if name.parent.name == "attention" and not page.num_formulas:
            result.append(f"{name}: has no formula")
        if page.has_raw_formula:
            result.append(f"{name}: a formula has a command of LaTeX that latex2mathml does not know")
        for link in dict.fromkeys(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                result.append(f"{name}: {link} does not exist")
            elif parts.fragment and target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].ids:
                result.append(f"{name}: {link} has no such anchor")
    for path in folder.rglob("*.css"):
        for url, imported in _STYLE.findall(path.read_text(encoding="utf-8")):
            result.append(f"{path.relative_to(folder)}: requests {url or imported}")
    return result
