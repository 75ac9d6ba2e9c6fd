"""Constituency trees as text, and as the symbols that a model writes for them.

>>> tree = parse_tree("(TOP (S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .)))")
>>> " ".join(linearize(tree))
'(TOP (S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S )TOP'
>>> write_tree(delinearize(linearize(tree), tree.words).tree)
'(TOP (S (NP (XX John)) (VP (XX has) (NP (XX a) (XX dog))) (XX .)))'
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from etils import epath

from tfx_jax.data.sources import lines
from tfx_jax.data.sources.lines import is_blank, read_lines
from tfx_jax.errors import UserError

WORD = "XX"  # stands for a word whose tag is not said
ROOT = "TOP"
_TRACE = "-NONE-"  # tag of what is not said, such as "*T*-1"
_BRACKETS = ("(", ")")
_ESCAPES = str.maketrans({"(": "-LRB-", ")": "-RRB-"})


class Tree(NamedTuple):
    """A sentence and its constituents.

    Attributes:
      words: none of them has a space or a round bracket.
      symbols: the tree from left to right: "(NP" where a constituent begins, ")NP" where it ends, and the tag of each
        word in its place.
    """

    words: list[str]
    symbols: list[str]

    @property
    def tags(self) -> list[str]:
        """The tag of each word."""
        return [symbol for symbol in self.symbols if not is_bracket(symbol)]


class Parse(NamedTuple):
    """A tree that was made of symbols, and whether it is another one than they say."""

    tree: Tree
    is_repaired: bool


def is_bracket(symbol: str) -> bool:
    """Whether a symbol begins or ends a constituent; the others stand for words."""
    return symbol.startswith(_BRACKETS)


def split_words(sentence: str) -> list[str]:
    """Returns the words of a tokenized sentence as trees have them: round brackets become -LRB- and -RRB-.

    >>> split_words("BMP ( bone )")
    ['BMP', '-LRB-', 'bone', '-RRB-']
    """
    return [word.translate(_ESCAPES) for word in lines.split_words(sentence)]


def read_trees(path: epath.PathLike) -> list[Tree]:
    """Reads the trees of a UTF-8 file, plain or `.gz`; blank lines are skipped.

    A tree is a line, or a line and those after it that begin with a space or TAB, as in the Penn treebank's files.

    Raises:
      UserError: for a file that cannot be read, is not UTF-8 or has no tree, and for lines that are not one tree.
    """
    trees = [parse_tree(text, where=f"{path}, line {number}") for number, text in _texts(path)]
    if not trees:
        raise UserError(f"{path} has no trees, only blank lines")
    return trees


def _texts(path: epath.PathLike) -> Iterator[tuple[int, str]]:
    """Yields the number of the first line of each tree, and its text."""
    begin, parts, depth = 0, list[str](), 0
    for number, line in enumerate(read_lines(path), start=1):
        if is_blank(line):
            continue
        if depth <= 0 or line[0] not in " \t":
            if parts:
                yield begin, " ".join(parts)
            begin, parts, depth = number, [], 0
        parts.append(line)
        depth += line.count("(") - line.count(")")
    if parts:
        yield begin, " ".join(parts)


def parse_tree(text: str, *, where: str = "the tree") -> Tree:
    """Reads a tree in the Penn treebank's format, "(NP (DT a) (NN dog))"; the label of a constituent may be missing.

    Traces, whose tag is -NONE-, are not words: they are left out, and so are constituents of traces alone.

    Args:
      text: one tree. How many spaces, TABs and line breaks stand between its parts does not matter.
      where: what messages call it.

    Raises:
      UserError: if it is not exactly one tree with a word in each constituent and a tag at each word.
    """
    tree, labels = Tree([], []), []
    parts = re.findall(r"[()]|[^() \t\r\n]+", text)
    place = 0
    while place < len(parts):
        if place and not labels:
            raise UserError(f"{where}: {' '.join(parts[place:])[:40]!r} stands behind the end of the tree")
        shape = "".join(part if part in _BRACKETS else "w" for part in parts[place : place + 4])
        if shape[0] == ")" and labels:
            label = labels.pop()
            if tree.symbols[-1].startswith("("):  # it had but traces
                tree.symbols.pop()
            else:
                tree.symbols.append(f"){label}")
            place += 1
        elif shape == "(ww)" and labels:
            if parts[place + 1] != _TRACE:
                tree.symbols.append(parts[place + 1])
                tree.words.append(parts[place + 2])
            place += 4
        elif shape.startswith(("(w(", "((")):
            labels.append(parts[place + 1] if shape[1] == "w" else "")
            tree.symbols.append(f"({labels[-1]}")
            place += shape.index("(", 1)
        else:
            here = " ".join(parts[place : place + 4])[:40]
            raise UserError(f"{where}: at {here!r} there is neither a constituent nor a word with its tag, (NN dog)")
    if labels:
        raise UserError(
            f"{where}: {len(labels)} bracket{'s are' if len(labels) > 1 else ' is'} not closed; a tree that goes on "
            "in the next line continues with a space there"
        )
    if not tree.symbols:
        raise UserError(f"{where} has no words, only traces" if parts else f"{where} is empty")
    return tree


def write_tree(tree: Tree) -> str:
    """Writes a tree on one line, as `parse_tree` reads it; one of no words is empty."""
    words, parts = iter(tree.words), []
    for symbol in tree.symbols:
        if symbol.startswith(")"):
            parts.append(")")
        else:
            parts.append(f" {symbol}" if is_bracket(symbol) else f" ({symbol} {next(words)})")
    return "".join(parts).removeprefix(" ")


def linearize(tree: Tree, *, with_tags: bool = False) -> list[str]:
    """Returns what a model is to write: the symbols of the tree, its tags all XX.

    "Grammar as a Foreign Language" (Vinyals et al., 2015, https://arxiv.org/abs/1412.7449), section 2.2 and figure 2:
    each constituent says its label at its end again, and the words are left to the source.

    Args:
      tree: any.
      with_tags: leaves the tags as they are.
    """
    return [symbol if with_tags or is_bracket(symbol) else WORD for symbol in tree.symbols]


def delinearize(symbols: Iterable[str], words: Sequence[str]) -> Parse:
    """Makes a tree over exactly these words, whatever the symbols are.

    Symbols that are a tree with so many words give that tree. In others:

    * what ends a constituent ends those inside it too, and is dropped where no such one is open;
    * a constituent without a word is dropped;
    * words too many are dropped, words that are missing stand at the end, in the root alone;
    * the root ends behind the last word; it is called TOP if a word stands before any constituent, or nothing does;
    * an empty symbol, for anything that is none, is dropped.

    Args:
      symbols: as of `linearize`.
      words: of no words the tree has no symbols either.
    """
    symbols, builder = list(symbols), _Builder(len(words))
    for symbol in symbols:
        if builder.is_complete:
            break
        builder.add(symbol)
    built = builder.finish()
    return Parse(Tree(list(words), built), built != symbols)


class _Builder:
    """Takes symbols one by one; what it keeps is always the beginning of a tree."""

    def __init__(self, num_words: int):
        self._kept: list[str] = []
        self._labels: list[str] = []  # of open constituents, the root first
        self._missing = num_words

    @property
    def is_complete(self) -> bool:
        return bool(self._kept) and not self._labels

    def add(self, symbol: str) -> None:
        if symbol.startswith("("):
            self._open(symbol[1:])
        elif symbol.startswith(")"):
            open_labels = self._labels[bool(self._missing) :]  # the root may not end before the last word
            if symbol[1:] in open_labels:
                while self._close() != symbol[1:]:
                    pass
        elif symbol and self._missing:
            if not self._labels:
                self._open(ROOT)
            self._kept.append(symbol)
            self._missing -= 1

    def finish(self) -> list[str]:
        if not self._kept:
            self._open(ROOT)
        while self._missing and len(self._labels) > 1:
            self._close()
        self._kept += [WORD] * self._missing
        while self._labels:
            self._close()
        return self._kept

    def _open(self, label: str) -> None:
        self._labels.append(label)
        self._kept.append(f"({label}")

    def _close(self) -> str:
        label = self._labels.pop()
        if self._kept[-1].startswith("("):
            self._kept.pop()
        else:
            self._kept.append(f"){label}")
        return label
