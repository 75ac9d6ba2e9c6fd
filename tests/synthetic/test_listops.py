"""ListOps: values as an evaluator of its own gives them, and expressions that are drawn as published."""

import collections

import numpy as np
import pytest

from tfx_jax.errors import UserError
from tfx_jax.synthetic.listops import VOCABULARY, draw_expression, evaluate, tokenize

PUBLISHED = {"max_depth": 10, "max_args": 10, "min_length": 500, "max_length": 2_000}
SHORT = {"max_depth": 4, "max_args": 5, "min_length": 6, "max_length": 60}
ANY = {"max_depth": 2, "max_args": 4, "min_length": 1, "max_length": 1_000}


def text_of(tokens):
    return [VOCABULARY[token] for token in tokens]


def parsed(words):
    """(operator, arguments) or a digit, by recursive descent from the front of a list of words that it eats."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word)
    arguments = []
    while words[0] != "]":
        arguments.append(parsed(words))
    words.pop(0)
    return word, arguments


def value_of(tree):
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = np.array([value_of(argument) for argument in arguments])
    functions = {"[MIN": np.min, "[MAX": np.max, "[MED": np.median, "[SM": lambda x: np.sum(x) % 10}
    return int(functions[operator](values))


def depth_of(tree):
    return 1 if isinstance(tree, int) else 1 + max(map(depth_of, tree[1]))


def lists_in(tree):
    return [] if isinstance(tree, int) else [tree, *(each for argument in tree[1] for each in lists_in(argument))]


def whole_tree(tokens):
    words = text_of(tokens)
    tree = parsed(words)
    assert not words  # all brackets are closed, and nothing stands behind the last one
    return tree


@pytest.mark.parametrize(("limits", "count"), [(SHORT, 300), (PUBLISHED, 5)])
def test_expressions_keep_to_the_limits_and_have_their_value(limits, count):
    drawn = [draw_expression(3, "train", index, **limits) for index in range(count)]
    trees = list(map(whole_tree, drawn))
    assert {tokens.dtype.name for tokens in drawn} == {"uint8"}
    assert all(limits["min_length"] <= len(tokens) <= limits["max_length"] for tokens in drawn)
    assert max(map(depth_of, trees)) == limits["max_depth"]
    sizes = {len(arguments) for tree in trees for _, arguments in lists_in(tree)}
    assert sizes == {*range(2, limits["max_args"] + 1)}
    values = [evaluate(tokens) for tokens in drawn]
    assert values == list(map(value_of, trees))
    assert {*values} <= {*range(10)}
    if count > 100:
        assert {*values} == {*range(10)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 3 0 9 ]", 0),
        ("[MED 1 9 2 ]", 2),
        ("[MED 1 8 2 9 ]", 5),
        ("[MED 2 3 ]", 2),
        ("[SM 9 8 7 ]", 4),
        ("[MAX [MIN 5 6 ] [SM 9 [MED 7 7 ] 0 ] 3 ]", 6),
    ],
)
def test_values_of_expressions_by_hand(text, value):
    assert evaluate(tokenize(text)) == value


@pytest.mark.parametrize("text", ["", "1 2", "[MAX 1 2", "1 ]", "[MAX ]", "[MAX 1 ] 2", "[PAD]"])
def test_what_is_no_expression_has_no_value(text):
    with pytest.raises(ValueError, match=r"not exactly one expression|^unexpected '.*': an expression is a digit"):
        evaluate(tokenize(text))


def near(counts, total, shares):
    """Whether counts are within four standard deviations of what is drawn with these probabilities."""
    return all(
        abs(counts[name] - total * share) < 4 * np.sqrt(total * share * (1 - share)) for name, share in shares.items()
    )


def test_draws_are_distributed_as_published():
    trees = [whole_tree(draw_expression(0, "train", index, **ANY)) for index in range(8_000)]
    nested = [tree for tree in trees if not isinstance(tree, int)]
    assert near({"nested": len(nested)}, len(trees), {"nested": 0.25})
    operators = collections.Counter(operator for operator, _ in nested)
    assert near(operators, len(nested), dict.fromkeys(("[MIN", "[MAX", "[MED", "[SM"), 0.25))
    sizes = collections.Counter(len(arguments) for _, arguments in nested)
    assert near(sizes, len(nested), dict.fromkeys((2, 3, 4), 1 / 3))
    digits = collections.Counter(digit for _, arguments in nested for digit in arguments)
    assert near(digits, digits.total(), dict.fromkeys(range(10), 0.1))


def test_an_expression_follows_from_seed_split_and_number():
    def draw(seed, split, index):
        return tuple(text_of(draw_expression(seed, split, index, **SHORT)))

    keys = [(seed, split, index) for seed in (0, 1) for split in ("train", "validation", "test") for index in range(9)]
    drawn = {key: draw(*key) for key in reversed(keys)}
    assert {key: draw(*key) for key in keys} == drawn
    assert len({*drawn.values()}) == len(keys)


def test_no_split_has_an_expression_of_another():
    """Even where there are so few that each split has some of its own many times."""
    few = {"max_depth": 2, "max_args": 2, "min_length": 4, "max_length": 4}
    found = [
        {bytes(draw_expression(0, split, index, **few)) for index in range(200)}
        for split in ("train", "validation", "test")
    ]
    assert min(map(len, found)) > 20
    assert len(set.union(*found)) == sum(map(len, found))


def test_what_cannot_be_drawn_is_one_line():
    with pytest.raises(UserError, match=r"^none of 100,000 random expressions has 9 to 9 tokens") as raised:
        draw_expression(0, "train", 0, max_depth=2, max_args=2, min_length=9, max_length=9)
    assert "\n" not in str(raised.value)
