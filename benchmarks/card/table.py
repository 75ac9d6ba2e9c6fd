"""Tables of rows that are dictionaries."""

from collections.abc import Sequence
from typing import Any


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table for each section, whose columns are the keys of its rows, and how each section ended.

    >>> print(as_markdown([{"section": "a", "row": "x", "ms": 1.23456}, {"section": "a", "row": "y", "note": "a|b"}]))
    ## a
    <BLANKLINE>
    | row | ms | note |
    |---|---|---|
    | x | 1.235 |  |
    | y |  | a/b |
    <BLANKLINE>
    """
    parts = []
    for section in dict.fromkeys(row["section"] for row in rows):
        found = [row for row in rows if row["section"] == section and row["row"] != "section"]
        names = list(dict.fromkeys(name for row in found for name in row if name != "section"))
        lines = [f"## {section}", ""]
        if found:
            lines += [_line(names), "|---" * len(names) + "|"]
            lines += [_line([_cell(row.get(name)) for name in names]) for row in found]
            lines += [""]
        for row in rows:
            if row["section"] == section and row["row"] == "section":
                lines += [f"{row['outcome'][:1].upper()}{row['outcome'][1:]}, after {row['seconds']:.0f} s.", ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    return " ".join(str(value).split()).replace("|", "/")[:160]
