"""Docstrings as Markdown: prose, shapes, doctests, tables and the sections of Google's style."""

import re
import textwrap
from collections.abc import Iterator

from docs.site.symbols import public

SECTIONS = ("Args", "Attributes", "Fields", "Returns", "Raises", "Yields")
_ADDRESS = re.compile(r"https?://[^\s<>)`,;]+[^\s<>)`,;.:]")
_CODE = re.compile(r"(`+)(.+?)\1")


def sections(doc: str) -> dict[str, str]:
    """Splits a docstring into its sections: text by title such as "Args"; the prose has the title ""."""
    result, title = {"": ""}, ""
    for line in doc.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            title = line[:-1]
            result[title] = ""
        elif title and line and not line.startswith(" "):  # prose after a section
            title = ""
            result[""] += f"\n{line}\n"
        else:
            result[title] += f"{line}\n"
    return {name: textwrap.dedent(text).strip("\n") for name, text in result.items()}


def items(section: str) -> list[tuple[str, str]]:
    """Splits the text of a section into (name, description) pairs; the name is "" for text before the first name."""
    result: list[tuple[str, str]] = []
    for line in section.splitlines():
        match = re.match(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): ?(.*)", line)
        if match and not line.startswith(" "):
            result.append((match[1], match[2]))
        elif result:
            name, text = result[-1]
            result[-1] = name, f"{text}\n{line.strip()}"
        elif line.strip():
            result.append(("", line))
    return result


def prose(text: str, *, link: str = "", skip: str = "") -> str:
    """Converts paragraphs: escapes what Markdown would interpret, fences doctests and indented blocks.

    Args:
      text: text of a docstring, without indentation.
      link: path from the page to the root of the site, such as "../../"; public symbols in backticks become links. ""
        makes no links.
      skip: name that is not linked, because the page is about it.
    """
    return "\n\n".join(_blocks(text, link, skip))


def _blocks(text: str, link: str, skip: str) -> Iterator[str]:
    """Yields each paragraph as Markdown; the arguments are those of `prose`."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        if not block.strip():
            continue
        if lines[0].lstrip().startswith(">>>"):
            yield f"```pycon\n{textwrap.dedent(block)}\n```"
        elif all(line.startswith("    ") for line in lines):
            yield f"```text\n{textwrap.dedent(block)}\n```"
        elif re.fullmatch(r"[= ]+", lines[0]) and "=" in lines[0]:
            yield _table(lines)
        elif lines[0].startswith("|"):
            yield block
        elif lines[0].startswith("- "):
            yield "\n".join(
                f"- {inline(line[2:], link=link, skip=skip)}"
                if line.startswith("- ")
                else f"  {inline(line, link=link, skip=skip)}"
                for line in lines
            )
        else:
            yield "\n".join(_not_a_list(inline(line, link=link, skip=skip)) for line in lines)


def _not_a_list(line: str) -> str:
    """Escapes a first character that would begin a list, a heading or a quotation."""
    line = line.strip()
    if re.match(r"([-+#>=|:])", line):
        return "\\" + line
    return re.sub(r"^(\d+)([.)] )", r"\1\\\2", line)


def inline(text: str, *, link: str = "", skip: str = "") -> str:
    """Escapes one line of prose, keeps `code`, and makes links of addresses and of public symbols in `code`.

    `link` and `skip` are those of `prose`.
    """
    parts: list[str] = []
    end = 0
    for match in _CODE.finditer(text):
        parts.append(_escaped(text[end : match.start()]))
        parts.append(code_link(match[2], link, skip) if match[1] == "`" else match[0])
        end = match.end()
    return "".join([*parts, _escaped(text[end:])])


def code_link(code: str, link: str, skip: str = "") -> str:
    """Returns code in backticks; if it names a public symbol, as a link to its page (`link`, `skip`: see `prose`)."""
    match = re.fullmatch(r"(?:tfx_jax\.|tfx\.)?(?:\w+\.)*(\w+)(\([^)]*\))?", code)
    symbol = public().get(match[1]) if match else None
    package = code.rpartition(".")[0].removeprefix("tfx_jax.")
    if symbol is None or not link or symbol.name == skip or (package and package not in symbol.package):
        return f"`{code}`"
    return f"[`{code}`]({link}{symbol.page}.md)"


def _escaped(text: str) -> str:
    """Escapes prose without code, and makes links of addresses."""
    parts: list[str] = []
    end = 0
    for match in _ADDRESS.finditer(text):
        parts += [_escaped_words(text[end : match.start()]), f"<{match[0]}>"]
        end = match.end()
    return "".join([*parts, _escaped_words(text[end:])])


def _escaped_words(text: str) -> str:
    """Escapes prose without code and addresses, and keeps **bold** words."""
    bold = r"(\*\*[^*\s](?:[^*]*[^*\s])?\*\*)"
    return "".join(
        part if re.fullmatch(bold, part) else re.sub(r"([\\<\[\]_*~`$])", r"\\\1", part)
        for part in re.split(bold, text)
    )


def cell(text: str) -> str:
    """Returns text for a cell of a table: on one line, with "|" escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table from its header and its rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def _table(lines: list[str]) -> str:
    """Converts a simple table of reStructuredText, whose first line shows the columns as runs of "="."""
    spans = [match.span() for match in re.finditer(r"=+", lines[0])]
    ends = [start for start, _ in spans[1:]] + [None]
    rows = [
        [inline(line[start:end].strip()) for (start, _), end in zip(spans, ends, strict=True)]
        for line in lines
        if "==" not in line
    ]
    return table(rows[0], rows[1:])
