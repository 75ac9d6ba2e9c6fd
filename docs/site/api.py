"""The API reference: a page for each public symbol, one for each package, and an index of papers."""

import ast
import re
from collections.abc import Iterator

from docs.site.markdown import cell, inline, items, prose, sections, table
from docs.site.symbols import PACKAGES, Definition, Symbol, bases, docstring, path_of, public, symbols, tree

Pages = dict[str, str]
"""Markdown of each page, by its path without a suffix."""


def pages() -> Pages:
    """Returns all pages of the reference: symbols, packages, the index and the papers."""
    result = {symbol.page: _page(symbol) for package in PACKAGES.values() for symbol in symbols(package)}
    result |= {f"api/{name}/index": _package(name) for name in PACKAGES}
    return result | {"api/index": _index(), "papers": papers()}


def missing() -> list[str]:
    """Returns one line for each public symbol without documentation."""
    all_symbols = [symbol for package in PACKAGES.values() for symbol in symbols(package)]
    return [f"{symbol.module}: {symbol.name} has no docstring" for symbol in all_symbols if not symbol.doc]


def _index() -> str:
    """Returns the page of the whole reference."""
    top = ["train", "load", "generate"]  # functions of `tfx_jax` itself
    lines = [
        "# API reference",
        "",
        "One page for each public name. Every array argument has its axes in its type, in the",
        "[letters that all functions share](functional/index.md#axis-letters).",
        "",
        "`import tfx_jax as tfx` gives three functions and the packages below:",
        "",
        *(f"- [`tfx.{name}`](../{public()[name].page}.md): {_summary(public()[name], '../')}" for name in top),
        "",
        "| package | |",
        "| --- | --- |",
        *(
            f"| [{module}]({name}/index.md) | {inline(docstring(tree(module)).partition(chr(10))[0])} |"
            for name, module in PACKAGES.items()
        ),
        "",
        _toctree([f"{name}/index" for name in PACKAGES]),
    ]
    return "\n".join(lines)


def _package(name: str) -> str:
    """Returns the page of a package, a key of `PACKAGES`: its docstring and its names by defining module."""
    module = PACKAGES[name]
    groups: dict[str, list[Symbol]] = {}
    for symbol in symbols(module):
        groups.setdefault(symbol.module, []).append(symbol)
    text = docstring(tree(module))
    # The table of letters gets a title, so that other pages can link to it.
    body = prose(text, link="../../").replace("Axis letters, the same", "## Axis letters\n\nThe letters are the same")
    lines = [f"# {module}", "", body, "", "## Public names"]
    for file, members in sorted(groups.items()):
        title = docstring(tree(file)).partition("\n")[0] if file != module else ""
        lines += ["", f"**{inline(title)}**" if title else "", "", "| name | |", "| --- | --- |"]
        lines += [f"| [{inline(member.name)}]({member.name}.md) | {_summary(member, '../../')} |" for member in members]
    return "\n".join([*lines, "", _toctree([symbol.name for symbol in symbols(module)])])


def _toctree(entries: list[str]) -> str:
    """Returns Sphinx's hidden table of contents, which puts pages into the navigation."""
    return "\n".join(["```{toctree}", ":hidden:", "", *entries, "```"])


def _summary(symbol: Symbol, link: str) -> str:
    """Returns the first paragraph of a symbol's documentation, for a table; `link` is the path to the site's root."""
    return cell(prose(symbol.doc.split("\n\n")[0], link=link, skip=symbol.name))


def _page(symbol: Symbol) -> str:
    """Returns the page of a class, function or constant."""
    module = symbol.package
    lines = [
        f"# {inline(symbol.name)}",
        "",
        f"`from {module} import {symbol.name}` · [source]({symbol.source}) · [{module}](index.md)",
        "",
    ]
    if isinstance(symbol.node, ast.ClassDef):
        return "\n".join([*lines, *_class(symbol, symbol.node)])
    if isinstance(symbol.node, ast.FunctionDef):
        return "\n".join([*lines, *_function(symbol.node, symbol.name)])
    definition = ast.unparse(symbol.node)  # of a constant
    if len(definition) > 400:
        definition = definition[: definition.index("=")] + "= ..."
    return "\n".join([*lines, f"```python\n{definition}\n```", "", prose(symbol.doc, link="../../")])


def signature(node: ast.FunctionDef, name: str, *, bound: bool = False) -> str:
    """Returns the signature of a function as in its source; a long one has one argument on each line.

    Args:
      node: the function.
      name: name to call it by.
      bound: whether to leave out the first argument, `self`.
    """
    arguments, parts = node.args, list[str]()
    positional = arguments.posonlyargs + arguments.args
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if not (bound and index == 0):
            parts.append(_argument(argument, default))
        if arguments.posonlyargs and index == len(arguments.posonlyargs) - 1:
            parts.append("/")
    if arguments.vararg:
        parts.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parts.append(f"**{_argument(arguments.kwarg, None)}")
    result = f" -> {_type(node.returns)}" if node.returns else ""
    short = f"{name}({', '.join(parts)}){result}"
    if len(short) <= 88:
        return short
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    """Returns an argument as `name: type = default`."""
    text = argument.arg + (f": {_type(argument.annotation)}" if argument.annotation else "")
    return text + (f" = {ast.unparse(default)}" if default is not None else "")


def _type(node: ast.expr | None) -> str:
    """Returns a type as in its source, "" for none.

    Strings that name classes lose their quotation marks; those that name axes, as in `Float[Array, "B T"]`, keep them.
    """
    if node is None:
        return ""
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
    return re.sub(r"\[([\w.]+), '([^']*)'\]", r'[\1, "\2"]', text)


def _function(node: ast.FunctionDef, name: str, *, bound: bool = False) -> Iterator[str]:
    """Yields the lines about a function: its signature and its documentation."""
    yield f"```python\n{signature(node, name, bound=bound)}\n```"
    yield ""
    yield from _documentation(docstring(node), node.name)


def _documentation(doc: str, name: str) -> Iterator[str]:
    """Yields the lines of a docstring as Markdown: prose, sections, and examples at the end; `name` is not linked."""
    parts = sections(doc)
    blocks = re.split(r"\n\s*\n", parts.pop(""))
    examples = [block for block in blocks if block.lstrip().startswith(">>>")]
    yield prose("\n\n".join(block for block in blocks if block not in examples), link="../../", skip=name)
    for title, text in parts.items():
        yield f"\n**{ {'Args': 'Arguments', 'Raises': 'Errors'}.get(title, title) }**\n"
        if title in ("Returns", "Yields"):
            yield prose(text, link="../../", skip=name)
            continue
        for item, meaning in items(text):
            item_lines = [line.strip() for line in meaning.splitlines() if line.strip()] or [""]
            text = " ".join(inline(line, link="../../", skip=name) for line in item_lines)
            yield f"- `{item}`: {text}" if item else f"- {text}"
    if examples:
        yield "\n**Example**\n"
        yield prose("\n\n".join(examples))
    yield ""


def _class(symbol: Symbol, node: ast.ClassDef) -> Iterator[str]:
    """Yields the lines about a class: signature, documentation, fields and methods, inherited ones included."""
    parents = ", ".join(ast.unparse(base) for base in node.bases)
    functions = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    init = functions.get("__init__")
    if init is not None:
        yield f"```python\n{signature(init, symbol.name, bound=True)}\n```"
    else:
        yield f"```python\nclass {symbol.name}{f'({parents})' if parents else ''}\n```"
    yield ""
    yield from _documentation(symbol.doc, symbol.name)
    if init is not None and docstring(init):
        yield from _documentation(docstring(init), symbol.name)
    classes = [symbol, *bases(symbol)]
    fields = [(owner, field) for owner in classes for field in _fields(owner)]
    if fields:
        yield "## Fields\n"
        seen: set[str] = set()
        rows: list[list[str]] = []
        for owner, (name, kind, default, meaning) in fields:
            if name not in seen:
                origin = "" if owner is symbol else f" (of `{owner.name}`)"
                default_cell = f"`{default}`" if default else ""
                rows.append([f"`{name}`", f"`{kind}`", default_cell, inline(meaning, link="../../") + origin])
            seen.add(name)
        yield table(["field", "type", "default", ""], rows)
        yield ""
    methods = [(owner, item) for owner in classes for item in _methods(owner.node)]
    seen = set()
    for owner, item in methods:
        if item.name in seen:
            continue
        if not seen:
            yield "## Methods\n"
        seen.add(item.name)
        decorators = {mark.id for mark in item.decorator_list if isinstance(mark, ast.Name)}
        is_property = "property" in decorators
        yield f"### {inline(item.name)}\n"
        if owner is not symbol:
            yield f"Inherited from `{owner.name}`.\n"
        if is_property:
            yield f"```python\n{item.name}: {_type(item.returns)}\n```\n"
            yield from _documentation(docstring(item), item.name)
        else:
            yield from _function(item, item.name, bound="staticmethod" not in decorators)


def _methods(node: Definition) -> list[ast.FunctionDef]:
    """Returns the public methods of a class, and `__call__`; none if the node is not a class."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    functions = [item for item in body if isinstance(item, ast.FunctionDef)]
    return [item for item in functions if not item.name.startswith("_") or item.name == "__call__"]


_DECLARATIONS = (
    "at_least",
    "fraction",
    "one_of",
    "within",
)  # functions of `tfx_jax.fields` whose last argument is the default


def _fields(symbol: Symbol) -> Iterator[tuple[str, str, str, str]]:
    """Yields (name, type, default, meaning) of each public annotated field of a class.

    The meaning is the string below the field, the comment behind it, or the comment lines above it.
    """
    node = symbol.node
    body = node.body if isinstance(node, ast.ClassDef) else []
    source = path_of(symbol.module).read_text(encoding="utf-8").splitlines()
    for index, item in enumerate(body):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)) or item.target.id.startswith(
            "_"
        ):
            continue
        below = body[index + 1] if index + 1 < len(body) else None
        meaning = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            meaning = str(below.value.value)
        lines = source[item.lineno - 1 : item.end_lineno]
        behind = [line.split("  # ")[1] for line in lines if "  # " in line]
        above: list[str] = []
        line_index = item.lineno - 2  # of the line before the field, because `lineno` counts from 1
        while source[line_index].lstrip().startswith("# "):
            above.insert(0, source[line_index].lstrip("# "))
            line_index -= 1
        yield item.target.id, _type(item.annotation), _default(item.value), meaning or " ".join(behind or above)


def _default(value: ast.expr | None) -> str:
    """Returns the default of a field from the expression on the right of its "="; "" for none."""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        if name in _DECLARATIONS:
            return ast.unparse(value.args[-1])
        if name.endswith("field"):
            keywords = {item.arg: item.value for item in value.keywords}
            if "default" in keywords:
                return ast.unparse(keywords["default"])
            factory = ast.unparse(keywords["default_factory"]) if "default_factory" in keywords else ""
            return f"{factory}()" if re.fullmatch(r"\w+", factory) else factory
    return "" if value is None else ast.unparse(value)


# A citation such as 'section 3.2 of "Title" (Vaswani et al., 2017, https://...)'; place and title are optional.
_PAPER = re.compile(
    r"(?:(?P<place>(?:[Ss]ection|[Ee]quation|[Aa]lgorithm|[Aa]ppendi|[Ff]igure|[Tt]able)[^.\"]{1,60}?) of )?"
    r'(?:"(?P<title>[^"]{8,200})"\s+\()?'
    r"(?P<who>[A-Z][\w'\-]+(?: \d)?(?:(?:, [A-Z][\w'\-]+)* and [A-Z][\w'\-]+| et al\.)?),? "
    r"\(?(?P<year>(?:19|20)\d\d), (?P<url>https?://[^\s)\],;]+)"
)


def papers() -> str:
    """Returns the index from papers to the public names that implement them."""
    papers_by_url: dict[str, tuple[str, str, str]] = {}  # (title, authors, year)
    names: dict[str, dict[str, str]] = {}  # for each address, the place in the paper by the symbol's name
    for package in PACKAGES.values():
        for symbol in symbols(package):
            for title, who, year, url, place in cited(symbol):
                earlier_title, _, _ = papers_by_url.get(url, ("", "", ""))
                papers_by_url[url] = title or earlier_title, who, year
                names.setdefault(url, {}).setdefault(symbol.name, place)
    rows: list[tuple[str, str, str]] = []  # (year, authors, line of the table), to be sorted
    for url, (title, who, year) in papers_by_url.items():
        links = [
            f"[`{name}`]({public()[name].page}.md){f' ({inline(place)})' if place else ''}"
            for name, place in sorted(names[url].items())
        ]
        text = f"[{inline(title or url.removeprefix('https://'))}]({url})"
        rows.append((year, who, f"| {inline(who)} ({year}) | {text} | {', '.join(links)} |"))
    return "\n".join(
        [
            "# From paper to function",
            "",
            "Papers that the docstrings of public names cite, oldest first, with the section or equation where the",
            "docstring gives one.",
            "",
            "| paper | title | implemented by |",
            "| --- | --- | --- |",
            *(row for _, _, row in sorted(rows)),
        ]
    )


def cited(symbol: Symbol) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields (title, authors, year, address, place) of each paper that a symbol's documentation cites.

    Title and place, such as "section 3.2", are "" if the citation has none.
    """
    texts = [symbol.doc]
    if isinstance(symbol.node, ast.ClassDef):
        texts += [docstring(item) for item in symbol.node.body if isinstance(item, ast.FunctionDef)]
        texts.append(docstring(tree(symbol.module)))
    for match in _PAPER.finditer(" ".join(" ".join(texts).split())):
        place = match["place"] or ""
        yield match["title"] or "", match["who"], match["year"], match["url"].rstrip("."), place[:1].lower() + place[1:]
