"""Labeled brackets as EVALB counts them, against counts by hand and a scorer that knows no stack."""

import itertools

import numpy as np
import pytest

from tfx_jax.data.sources.trees import Tree, delinearize, parse_tree
from tfx_jax.metrics.brackets import bracket_scores, brackets

# (found, right, brackets right, found and wanted), all counted by hand.
BY_HAND = {
    "equal": ("(TOP (S (NP (X a)) (VP (X b))))", "(TOP (S (NP (N a)) (VP (V b))))", 3, 3, 3),
    "another label": ("(TOP (S (NP (X a)) (VP (X b))))", "(TOP (S (NP (N a)) (PP (V b))))", 2, 3, 3),
    "another span": ("(TOP (S (NP (X a) (X b)) (X c)))", "(TOP (S (X a) (NP (X b) (X c))))", 1, 2, 2),
    "the root does not count": ("(TOP (S (X a)))", "(S (TOP (X a)))", 1, 1, 1),
    "a label within itself": ("(TOP (NP (NP (X a))))", "(TOP (NP (X a)))", 1, 2, 1),
    "twice right": ("(TOP (NP (NP (X a))))", "(TOP (NP (NP (X a))))", 2, 2, 2),
    "twice wanted": ("(TOP (NP (X a)))", "(TOP (NP (NP (NP (X a)))))", 1, 1, 3),
    "chains in another order": ("(TOP (S (NP (X a))))", "(TOP (NP (S (X a))))", 2, 2, 2),
    # Without the comma and the full stop, the spans are the same.
    "punctuation": (
        "(TOP (S (NP (X a) (X ,)) (VP (X b)) (X .)))",
        "(TOP (S (S (NP (N a)) (, ,) (VP (V b))) (. .)))",
        3,
        3,
        4,
    ),
    "all deleted tags": (
        "(TOP (S (NP (X q) (X c) (X d) (X e)) (X f)))",
        "(TOP (S (`` q) (: c) ('' d) (NP (N e)) (. f)))",
        2,
        2,
        2,
    ),
    "brackets and dollars are words": ("(TOP (NP (X -LRB-)) )", "(TOP (NP (-LRB- -LRB-)))", 1, 1, 1),
    "a constituent of punctuation": ("(TOP (S (PRN (X ,)) (X a)))", "(TOP (S (, ,) (PRN (N a))))", 1, 1, 2),
    "particles are adverbs": ("(TOP (S (ADVP (X a)) (PRT (X b))))", "(TOP (S (PRT (R a)) (ADVP (R b))))", 3, 3, 3),
    "function tags": ("(TOP (S (NP-SBJ (X a)) (NP=2 (X b))))", "(TOP (S (NP (N a)) (NP-1 (N b))))", 3, 3, 3),
    "nothing but punctuation": ("(TOP (NP (X .)))", "(TOP (S (. .)))", 0, 0, 0),
}


def _spans_by_pairs(tree):
    """A bracket for each beginning and the first end behind it with as many beginnings as ends between them."""
    depth = np.cumsum([symbol.startswith("(") - 1 * symbol.startswith(")") for symbol in tree.symbols])
    is_word = np.array([symbol[0] not in "()" for symbol in tree.symbols])
    for first, symbol in enumerate(tree.symbols):
        if symbol.startswith("("):
            last = next(place for place in range(first, len(depth)) if depth[place] == depth[first] - 1)
            assert tree.symbols[last] == f"){symbol[1:]}"
            yield symbol[1:], is_word[:first].sum(), is_word[:last].sum()


def _matched_by_striking_out(found, right):
    """Each right bracket takes one of those found that are left; words by their names, not by their places."""
    deleted = {place for place, tag in enumerate(right.tags) if tag in (",", ":", "``", "''", ".")}

    def listed(tree):
        spans = [
            (label.replace("=", "-").partition("-")[0], frozenset(range(*span)) - deleted)
            for label, *span in _spans_by_pairs(tree)
        ]
        return [({"PRT": "ADVP"}.get(label, label), words) for label, words in spans if words and label != "TOP"]

    left, wanted, num_right = listed(found), listed(right), 0
    num_found = len(left)
    for bracket in wanted:
        if bracket in left:
            left.remove(bracket)
            num_right += 1
    return num_right, num_found, len(wanted)


def _percentages(right, found, wanted):
    precision, recall = 100 * right / found if found else 0, 100 * right / wanted if wanted else 0
    return precision, recall, 2 * precision * recall / (precision + recall) if right else 0


def _check(scores, right, found, wanted, exact, errors=0):
    precision, recall, f1 = _percentages(right, found, wanted)
    assert scores == pytest.approx((f1, precision, recall, exact, errors))


@pytest.mark.parametrize("name", BY_HAND)
def test_counts_by_hand(name):
    found, right, *counts = BY_HAND[name]
    found, right = parse_tree(found), parse_tree(right)
    _check(bracket_scores([found], [right]), *counts, exact=100 * (len(set(counts)) == 1))
    assert (*_matched_by_striking_out(found, right),) == (*counts,)


def test_sentences_add_up_and_errors_count_in_nothing():
    trees = [(parse_tree(found), parse_tree(right)) for found, right, *_ in BY_HAND.values()]
    counts = np.array([counts for _, _, *counts in BY_HAND.values()])
    exact = 100 * np.mean([len(set(row)) == 1 for row in counts.tolist()])
    error = parse_tree("(TOP (NP (NN a) (NN b)))"), parse_tree("(TOP (NP (NN a)))")
    renamed = parse_tree("(TOP (NP (NN b)))"), parse_tree("(TOP (NP (NN a)))")
    for more, errors in (([], 0), ([error], 1), ([error, renamed], 2)):
        found, right = zip(*trees, *more, strict=True)
        _check(bracket_scores(found, right), *counts.sum(axis=0), exact, errors)
    assert bracket_scores(*zip(error, strict=True)) == (0, 0, 0, 0, 1)
    assert bracket_scores([], []) == (0, 0, 0, 0, 0)


def test_random_trees_against_brute_force():
    rng = np.random.default_rng(0)
    symbols = [*(bracket + label for bracket in "((())" for label in ("NP", "PRT", "ADVP", "TOP")), "XX", "XX"]
    tags = np.array(["NN", "NN", ",", ".", ":", "``", "''", "XX"])
    found, right, counts = [], [], []
    for _ in range(300):
        words = [f"w{place}" for place in range(rng.integers(1, 7))]
        sides = []
        for _ in range(2):
            tree = delinearize(rng.choice(symbols, 20).tolist(), words).tree
            sides.append(Tree(words, [rng.choice(tags) if symbol == "XX" else symbol for symbol in tree.symbols]))
        counts.append(_matched_by_striking_out(*sides))
        found.append(sides[0])
        right.append(sides[1])
    counts = np.array(counts)
    assert 0 < counts[:, 0].sum() < counts[:, 1].sum()
    _check(bracket_scores(found, right), *counts.sum(axis=0), 100 * np.mean(np.ptp(counts, axis=1) == 0))


def test_brackets_come_with_their_places():
    tree = parse_tree("(TOP (S (NP (A a) (, ,) (NP (B b))) (PRT (C c)) (. .)))")
    counted = [tag not in ",." for tag in tree.tags]
    assert brackets(tree, counted) == [("NP", 1, 2), ("NP", 0, 2), ("ADVP", 2, 3), ("S", 0, 3)]
    assert [end for _, _, end in brackets(tree, list(itertools.repeat(True, 5)))] == [3, 3, 4, 5]


def test_a_root_without_a_label_does_not_count():
    """As in the files of the Penn treebank."""
    right, predicted = "(S (NP (DT a) (NN dog)) (VP (VBZ barks)))", "(S (DT a) (NP (NN dog)) (VP (VBZ barks)))"
    scores = [
        bracket_scores([parse_tree(f"({root} {predicted})")], [parse_tree(f"({root} {right})")]) for root in ("", "TOP")
    ]
    assert scores[0] == scores[1]
    assert scores[0].f1 == pytest.approx(200 / 3)


def test_as_many_trees_as_references():
    with pytest.raises(ValueError, match="0 trees predicted, but 1 references"):
        bracket_scores([], [parse_tree("(TOP (NN a))")])
