"""Trees as text and as symbols are one thing, and any symbols at all become a tree over the words that are there."""

import gzip
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfx_jax.data.sources.lines import read_lines
from tfx_jax.data.sources.trees import (
    Tree,
    delinearize,
    is_bracket,
    linearize,
    parse_tree,
    read_trees,
    split_words,
    write_tree,
)
from tfx_jax.errors import UserError

FIXTURES = (
    "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))",
    "(TOP (HEADING (NP (NN Abstract))))",
    "(TOP (NP (NP (NP (NN x)))))",  # one label within itself
    "(TOP (NN x))",
    "( (S (NP (-LRB- -LRB-) (NNP A) (-RRB- -RRB-)) (: --)))",  # a root without a label, as in the Penn treebank
    "(S (`` ``) (NP (NN )) (NN XX) (XX TOP))".replace("(NN )", "(NN 猫)"),
    "(X (A-B=1 (, ,) (Y (Z z))) (Y (Z z)))",
)

LABELS = ("TOP", "NP", "VP", "NP-1")
SYMBOLS = [*(bracket + label for bracket in "()" for label in LABELS), "XX", "NN", ""]
_words = st.lists(st.text("ab猫-", min_size=1, max_size=3), min_size=1, max_size=5)


def _as_text(node):
    label, parts = node
    if isinstance(parts, str):
        return f"({label} {parts})"
    return f"({label} {' '.join(map(_as_text, parts))})"


_leaves = st.tuples(st.sampled_from(["XX", "NN", ".", "-LRB-"]), st.text("ab猫-:", min_size=1, max_size=3))
_nodes = st.recursive(
    st.tuples(st.sampled_from(LABELS), st.lists(_leaves, min_size=1, max_size=3)),
    lambda nodes: st.tuples(st.sampled_from(LABELS), st.lists(nodes | _leaves, min_size=1, max_size=3)),
    max_leaves=8,
)


def _check_is_tree(symbols):
    """Each end has its beginning, each constituent a word, the first is around all: by striking out, not a stack."""
    text = " ".join(symbols)
    text = re.sub(r"(?<!\S)[^()\s]\S*", "w", text)
    while (shorter := re.sub(r"(?<!\S)\((\S*)(?: w)+ \)\1(?!\S)", "w", text)) != text:
        text = shorter
    assert text == "w"
    assert symbols[0].startswith("(")


@pytest.mark.parametrize("text", FIXTURES)
def test_text_comes_back_as_it_was(text):
    tree = parse_tree(text)
    assert write_tree(tree) == text
    assert delinearize(tree.symbols, tree.words) == (tree, False)
    assert len(tree.tags) == len(tree.words)


def test_white_space_does_not_matter():
    text = FIXTURES[0]
    assert parse_tree("\t" + text.replace("(", " ( ").replace(")", " )\n ")) == parse_tree(text)


def test_symbols_are_those_of_the_paper():
    """Figure 2 of Vinyals et al. (2015), with labels for its own."""
    tree = parse_tree("(S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))")
    assert tree.words == ["John", "has", "a", "dog", "."]
    assert tree.tags == ["NNP", "VBZ", "DT", "NN", "."]
    assert " ".join(linearize(tree)) == "(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S"
    assert " ".join(linearize(tree, with_tags=True)) == "(S (NP NNP )NP (VP VBZ (NP DT NN )NP )VP . )S"


@given(_nodes)
def test_any_tree_comes_back(node):
    text = _as_text(node)
    tree = parse_tree(text)
    _check_is_tree(tree.symbols)
    assert write_tree(tree) == text
    assert delinearize(linearize(tree, with_tags=True), tree.words) == (tree, False)
    without = delinearize(linearize(tree), tree.words)
    assert not without.is_repaired
    assert [symbol for symbol in without.tree.symbols if is_bracket(symbol)] == list(filter(is_bracket, tree.symbols))


@given(st.lists(st.sampled_from(SYMBOLS), max_size=14), _words)
def test_any_symbols_become_a_tree_over_the_words(symbols, words):
    tree, is_repaired = delinearize(symbols, words)
    assert tree.words == words
    assert len(tree.tags) == len(words)
    _check_is_tree(tree.symbols)
    assert is_repaired == (tree.symbols != symbols)
    assert parse_tree(write_tree(tree)) == tree
    assert delinearize(tree.symbols, words) == (tree, False)


@pytest.mark.parametrize(
    ("symbols", "wanted"),
    [
        ("", "(TOP XX XX )TOP"),
        ("XX XX", "(TOP XX XX )TOP"),
        ("(S (NP XX XX )NP", "(S (NP XX XX )NP )S"),  # not closed
        ("(S (NP XX )NP", "(S (NP XX )NP XX )S"),  # a word is missing
        ("(S (NP (VP XX XX )NP )S", "(S (NP (VP XX XX )VP )NP )S"),  # one end for two
        ("(S XX )NP XX )S )S", "(S XX XX )S"),  # ends of what is not open
        ("(S (NP )NP XX (VP (NP )NP )VP XX )S", "(S XX XX )S"),  # constituents of nothing
        ("(S XX XX XX (NP XX )NP )S", "(S XX XX )S"),  # words too many
        ("(S XX )S (NP XX )NP", "(S XX (NP XX )NP )S"),  # two roots
        ("(S XX XX )S (NP XX )NP", "(S XX XX )S"),
        (")S (NP XX )NP XX", "(NP XX XX )NP"),
        ("XX (NP NN", "(TOP XX (NP NN )NP )TOP"),
        ("(NP (NP XX )NP XX )NP", "(NP (NP XX )NP XX )NP"),  # in order
    ],
)
def test_what_is_repaired_and_how(symbols, wanted):
    tree, is_repaired = delinearize(symbols.split(), ["a", "b"])
    assert " ".join(tree.symbols) == wanted
    assert is_repaired == (symbols != wanted)


def test_a_tree_as_deep_as_a_text_is_long():
    depth = 50_000
    text = "(A " * depth + "(X x)" + ")" * depth
    assert write_tree(parse_tree(text)) == text
    assert delinearize(["(A"] * depth, ["x"]).tree.symbols == ["(A", "XX", ")A"]


def test_no_words_no_tree():
    assert split_words(" \t ") == []
    assert write_tree(Tree([], [])) == ""
    for symbols in ([], ["(TOP", ")TOP"], ["XX", "(S", ")S", "(NP"]):
        assert delinearize(symbols, []) == (Tree([], []), bool(symbols))


def test_words_have_no_round_brackets():
    words = split_words("f(x)  ( y )\n")
    assert words == ["f-LRB-x-RRB-", "-LRB-", "y", "-RRB-"]
    tree, _ = delinearize([], words)
    assert parse_tree(write_tree(tree)) == tree


@pytest.mark.parametrize("name", ["trees", "trees.gz"])
def test_a_file_has_a_tree_on_a_line(tmp_path, name):
    content = "\n\n".join([*FIXTURES, " "]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_trees(tmp_path / name) == [parse_tree(text) for text in FIXTURES]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("(S (NN x)", "1 bracket is not closed"),
        ("(S (NP (NN x)", "2 brackets are not closed"),
        ("(S (NN x)) )", r"'\)' follows the end of the tree"),
        ("(S (NN x)) (S (NN y))", r"'\( S \( NN y \) \)' follows the end of the tree"),
        (")S", r"at '\) S' a constituent or a word with its tag, such as \(NN dog\), is required"),
        ("(NN x)", r"at '\( NN x \)' a constituent or a word"),
        ("(S x y z)", r"at '\( S x y' a constituent or a word"),
        ("(S (NN x) y)", r"at 'y \)' a constituent or a word"),
        ("(S (NN))", r"at '\( NN \) \)' a constituent or a word"),
        ("(S ())", r"at '\( \) \)' a constituent or a word"),
        ("dogs bark", "at 'dogs bark' a constituent or a word"),
    ],
)
def test_a_line_that_is_no_tree_is_named(tmp_path, line, complaint):
    path = tmp_path / "trees"
    path.write_text(f"{FIXTURES[0]}\n\n{line}\n{FIXTURES[1]}\n")
    with pytest.raises(UserError, match=rf"trees, line 3: {complaint}") as caught:
        read_trees(path)
    assert "\n" not in str(caught.value)


def test_a_file_without_trees_is_refused(tmp_path):
    (tmp_path / "trees").write_text("\n \n")
    with pytest.raises(UserError, match=r"trees has no trees, only blank lines$"):
        read_trees(tmp_path / "trees")


@pytest.mark.data
@pytest.mark.parametrize("file", ["train.ptb.gz", "dev.ptb.gz"])
@pytest.mark.slow
def test_a_whole_treebank_comes_back(shared_data, file):
    path = shared_data / "treebank" / file
    trees = read_trees(path)
    assert [write_tree(tree) for tree in trees] == list(read_lines(path))
    for tree in trees:
        assert delinearize(tree.symbols, tree.words) == (tree, False)


def test_a_tree_may_go_on_in_lines_that_begin_with_a_space(tmp_path):
    """As in the Penn treebank; messages name the first line."""
    text = "( (S\n    (NP (DT the)\n\t(NN dog))\n  (VP (VBZ barks)) ))\n\n( (S (NN x)\n  ) )\n(S (NN y))\n"
    (tmp_path / "trees").write_text(text)
    assert [write_tree(tree) for tree in read_trees(tmp_path / "trees")] == [
        "( (S (NP (DT the) (NN dog)) (VP (VBZ barks))))",
        "( (S (NN x)))",
        "(S (NN y))",
    ]
    for text, line in (("(S (NN x)\n(S (NN y))\n", 1), ("(S (NN x))\n(S\n (NN y)\n", 2)):
        (tmp_path / "trees").write_text(text)
        with pytest.raises(UserError, match=rf"trees, line {line}: 1 bracket is not closed; if a tree continues on"):
            read_trees(tmp_path / "trees")


def test_traces_are_no_words():
    text = (
        "(S (NP-SBJ-1 (NNP Joe)) (VP (VBD seemed) (S (NP-SBJ (-NONE- *-1)) (VP (TO to) (VP (VB go) "
        "(SBAR (-NONE- 0) (S (-NONE- *T*-2))))))))"
    )
    tree = parse_tree(text)
    assert tree.words == ["Joe", "seemed", "to", "go"]
    assert write_tree(tree) == ("(S (NP-SBJ-1 (NNP Joe)) (VP (VBD seemed) (S (VP (TO to) (VP (VB go))))))")
    _check_is_tree(linearize(tree))
    with pytest.raises(UserError, match=r"^the tree has no words, only traces$"):
        parse_tree("(S (NP (-NONE- *)))")
