"""The gallery of notebooks: cards with a picture of each one whose outputs are stored."""

import re

from docs.site.hand_written import PICTURES

_LINK = r"\[(?P<title>[^\]]+)\]\((?P<link>[^)]+/(?P<name>\w+)\.ipynb)\)"
_ROW = re.compile(rf"\| {_LINK} \|(?P<level>.+?)\|(?P<minutes>.+?)\|(?P<text>.+?)\|\n")


def gallery(page: str) -> str:
    """Returns the page `notebooks` with cards instead of its table.

    Raises:
      ValueError: if the page has no such table.
    """
    rows = list(_ROW.finditer(page))
    if not rows:
        raise ValueError("docs/notebooks.md has no table of notebooks: | [title](link) | level | minutes | you see |")
    begin = page.rindex("\n\n", 0, rows[0].start()) + 2
    cards = "\n".join(_card(row) for row in rows)
    return f"{page[:begin]}::::{{grid}} 1 1 2 3\n:gutter: 3\n\n{cards}::::\n{page[rows[-1].end() :]}"


def _card(row: re.Match[str]) -> str:
    """Returns the card of a row of the table."""
    lines = [f":::{{grid-item-card}} {row['title']}", f":link: {row['link']}"]
    if (PICTURES / f"{row['name']}.png").exists():
        lines += [f":img-top: notebooks/{row['name']}.png", f":img-alt: A picture of {row['title']}"]
    minutes = row["minutes"].strip()
    time = f"{minutes} minutes" if minutes[0].isdigit() else f"minutes {minutes}"
    return "\n".join([*lines, "", row["text"].strip(), "", f"*{row['level'].strip()} level, {time}*", ":::\n"])
