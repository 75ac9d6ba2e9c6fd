"""Constituency trees: Penn treebank text, and the sequences of symbols that a model generates for them.

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
from tfx_jax.data.sources.lines import is_blank, read_first_lines, read_lines
from tfx_jax.errors import UserError

WORD = "XX"  # placeholder for the tag of a word
ROOT = "TOP"
_TRACE = "-NONE-"  # tag of traces, such as "*T*-1", which are not words
_BRACKETS = ("(", ")")
_ESCAPES = str.maketrans({"(": "-LRB-", ")": "-RRB-"})


class Tree(NamedTuple):
    """A sentence with its constituents.

    Attributes:
      words: words without spaces and round brackets.
      symbols: the tree from left to right: "(NP" at the beginning of a constituent, ")NP" at its end, and for each word
        its tag.
    """

    words: list[str]
    symbols: list[str]

    @property
    def tags(self) -> list[str]:
        """The tag of each word."""
        return [symbol for symbol in self.symbols if not is_bracket(symbol)]


class Parse(NamedTuple):
    """A tree made from predicted symbols, and whether they had to be repaired."""

    tree: Tree
    is_repaired: bool


def is_bracket(symbol: str) -> bool:
    """Returns whether a symbol begins or ends a constituent; other symbols are the tags of words."""
    return symbol.startswith(_BRACKETS)


def split_words(sentence: str) -> list[str]:
    """Returns the words of a tokenized sentence, with round brackets replaced by -LRB- and -RRB- as in trees.

    >>> split_words("BMP ( bone )")
    ['BMP', '-LRB-', 'bone', '-RRB-']
    """
    return [word.translate(_ESCAPES) for word in lines.split_words(sentence)]


def read_trees(path: epath.PathLike) -> list[Tree]:
    """Reads the trees of a UTF-8 file, plain or `.gz`; blank lines are skipped.

    A tree is one line, or a line and the following lines that begin with a space or TAB, as in the Penn treebank.

    Raises:
      UserError: if the file cannot be read, is not UTF-8 or has no trees, or lines are not one tree.
    """
    trees = [parse_tree(text, where=f"{path}, line {number}") for number, text in _texts(read_lines(path))]
    if not trees:
        raise UserError(f"{path} has no trees, only blank lines")
    return trees


def is_treebank(path: epath.PathLike) -> bool:
    """Returns whether a file begins with a tree, in contrast to a sentence."""
    try:
        parse_tree(next((text for _, text in _texts(read_first_lines(path))), ""))
    except UserError:
        return False
    return True


def _texts(lines_of_file: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields (number of the first line, text) of each tree."""
    begin, parts = 0, list[str]()  # number of the tree's first line, and its lines so far
    depth = 0  # number of open brackets
    for number, line in enumerate(lines_of_file, start=1):
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
    """Parses a tree in the Penn treebank's format, "(NP (DT a) (NN dog))"; constituents may have no label.

    Traces, whose tag is -NONE-, are removed, and so are constituents that contain only traces.

    Args:
      text: one tree; its parts may be separated by any number of spaces, TABs and line breaks.
      where: name of the tree in error messages.

    Raises:
      UserError: if the text is not exactly one tree with a word in each constituent and a tag for each word.
    """
    tree, labels = Tree([], []), []  # `labels` are those of open constituents
    parts = re.findall(r"[()]|[^() \t\r\n]+", text)  # brackets, labels, tags and words
    index = 0
    while index < len(parts):
        if index and not labels:
            raise UserError(f"{where}: {' '.join(parts[index:])[:40]!r} follows the end of the tree")
        # The next four parts as brackets and "w" for words: "(ww)" is a word with its tag.
        shape = "".join(part if part in _BRACKETS else "w" for part in parts[index : index + 4])
        if shape[0] == ")" and labels:  # the end of a constituent
            label = labels.pop()
            if tree.symbols[-1].startswith("("):  # the constituent had only traces
                tree.symbols.pop()
            else:
                tree.symbols.append(f"){label}")
            index += 1
        elif shape == "(ww)" and labels:  # a word with its tag
            if parts[index + 1] != _TRACE:
                tree.symbols.append(parts[index + 1])
                tree.words.append(parts[index + 2])
            index += 4
        elif shape.startswith(("(w(", "((")):  # the beginning of a constituent, with or without a label
            labels.append(parts[index + 1] if shape[1] == "w" else "")
            tree.symbols.append(f"({labels[-1]}")
            index += shape.index("(", 1)  # to the bracket after the label, if any
        else:
            here = " ".join(parts[index : index + 4])[:40]
            raise UserError(f"{where}: at {here!r} a constituent or a word with its tag, such as (NN dog), is required")
    if labels:
        raise UserError(
            f"{where}: {len(labels)} bracket{'s are' if len(labels) > 1 else ' is'} not closed; if a tree continues on "
            "the next line, that line must begin with a space"
        )
    if not tree.symbols:
        raise UserError(f"{where} has no words, only traces" if parts else f"{where} is empty")
    return tree


def write_tree(tree: Tree) -> str:
    """Returns a tree as one line that `parse_tree` reads; an empty string for a tree without words."""
    words, parts = iter(tree.words), []
    for symbol in tree.symbols:
        if symbol.startswith(")"):
            parts.append(")")
        else:
            parts.append(f" {symbol}" if is_bracket(symbol) else f" ({symbol} {next(words)})")
    return "".join(parts).removeprefix(" ")


def linearize(tree: Tree, *, with_tags: bool = False) -> list[str]:
    """Returns the target sequence of a tree for a model: its symbols, with all tags replaced by XX.

    This is the format of "Grammar as a Foreign Language" (Vinyals et al., 2015, https://arxiv.org/abs/1412.7449),
    section 2.2 and figure 2: a constituent's label is repeated at its end, and the words are only in the source.

    Args:
      tree: any tree.
      with_tags: whether to keep the tags.
    """
    return [symbol if with_tags or is_bracket(symbol) else WORD for symbol in tree.symbols]


def delinearize(symbols: Iterable[str], words: Sequence[str]) -> Parse:
    """Returns a tree over exactly these words from any sequence of symbols, such as a model's output.

    Symbols that are a tree with that number of words give this tree. Others are repaired:

    * The end of a constituent also ends those inside it; it is dropped if no constituent of that label is open.
    * Constituents without words are dropped.
    * Surplus words are dropped; missing words are appended at the end, directly below the root.
    * The root ends after the last word. It is TOP if a word precedes all constituents, or if there are no symbols.
    * Empty symbols, which stand for unknown ones, are dropped.

    Args:
      symbols: symbols as in `linearize`.
      words: words of the sentence; without words the tree has no symbols.
    """
    symbols, builder = list(symbols), _Builder(len(words))
    for symbol in symbols:
        if builder.is_complete:
            break
        builder.add(symbol)
    repaired = builder.finish()
    return Parse(Tree(list(words), repaired), repaired != symbols)


class _Builder:
    """Repairs symbols one by one, so that the kept symbols are always the beginning of a valid tree."""

    def __init__(self, num_words: int):
        self._kept: list[str] = []
        self._labels: list[str] = []  # labels of the open constituents, the root first
        self._num_missing = num_words

    @property
    def is_complete(self) -> bool:
        """Whether the root has ended."""
        return bool(self._kept) and not self._labels

    def add(self, symbol: str) -> None:
        """Adds the next symbol, or drops it if it does not fit."""
        if symbol.startswith("("):
            self._open(symbol[1:])
        elif symbol.startswith(")"):
            # The root may not end before the last word, so it is left out while words are missing.
            open_labels = self._labels[bool(self._num_missing) :]
            if symbol[1:] in open_labels:
                while self._close() != symbol[1:]:  # also end the constituents inside it
                    pass
        elif symbol and self._num_missing:
            if not self._labels:
                self._open(ROOT)
            self._kept.append(symbol)
            self._num_missing -= 1

    def finish(self) -> list[str]:
        """Adds missing words, ends all constituents and returns the symbols of the tree."""
        if not self._kept:
            self._open(ROOT)
        while self._num_missing and len(self._labels) > 1:
            self._close()
        self._kept += [WORD] * self._num_missing
        while self._labels:
            self._close()
        return self._kept

    def _open(self, label: str) -> None:
        self._labels.append(label)
        self._kept.append(f"({label}")

    def _close(self) -> str:
        """Ends the innermost constituent, or drops it if it has no words, and returns its label."""
        label = self._labels.pop()
        if self._kept[-1].startswith("("):
            self._kept.pop()
        else:
            self._kept.append(f"){label}")
        return label
