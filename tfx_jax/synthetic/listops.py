"""ListOps: nested lists of digits under operators, whose value is a digit (Nangia and Bowman, 2018).

Sampled as in Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006): an expression is nested with
probability 0.25 and otherwise a digit. A nested one has one of four operators and 2 to `max_args` arguments, both
uniform. Expressions that are too short or too long are rejected. An expression is a function of seed, split and index.
Its checksum determines its split, so that splits are disjoint.
"""

import functools
import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import UInt8

from tfx_jax.data.sources.splits import Split
from tfx_jax.errors import UserError

VOCABULARY = ("[PAD]", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]")
"""The tokens by their ids; a digit d has the id d + 1."""

_NESTED = 0.25  # probability that an expression is nested, not a digit
_CLOSE = VOCABULARY.index("]")
_DIGITS = range(1, 11)  # ids of the digits 0 to 9
_MAX_DRAWS = 100_000  # attempts to sample one expression


def _median(values: list[int]) -> int:
    """Returns the median rounded down, like the original's `int(np.median(values))`."""
    values = sorted(values)
    count = len(values)
    return (values[(count - 1) // 2] + values[count // 2]) // 2  # the same index twice if the count is odd


_OPERATORS: dict[int, Callable[[list[int]], int]] = {
    VOCABULARY.index("[MIN"): min,
    VOCABULARY.index("[MAX"): max,
    VOCABULARY.index("[MED"): _median,
    VOCABULARY.index("[SM"): lambda values: sum(values) % 10,
}
_OPERATOR_IDS = tuple(_OPERATORS)


def tokenize(text: str) -> UInt8[np.ndarray, " T"]:
    """Returns the ids of an expression whose tokens have spaces between them.

    Raises:
      ValueError: if a token is not in `VOCABULARY`.

    >>> tokenize("[MAX 2 9 ]").tolist()
    [12, 3, 10, 15]
    """
    return np.array([VOCABULARY.index(token) for token in text.split()], np.uint8)


def evaluate(tokens: Sequence[int] | np.ndarray) -> int:
    """Returns the value of an expression, a digit.

    [MIN, [MAX and [MED are the minimum, the maximum and the median (rounded down) of the arguments; [SM is their sum
    modulo 10.

    Args:
      tokens: ids, [T].

    Raises:
      ValueError: if the tokens are not exactly one expression.

    >>> evaluate(tokenize("[MAX 2 9 [MIN 4 7 ] 0 ]")), evaluate(tokenize("[SM 8 [MED 1 4 6 9 ] ]"))
    (9, 3)
    """
    open_lists: list[list[int]] = [[]]  # [operator, arguments so far] of open lists; the outermost has no operator
    for token in map(int, tokens):
        if token in _OPERATORS:
            open_lists.append([token])
        elif token == _CLOSE and len(open_lists) > 1 and len(open_lists[-1]) > 1:
            operator, *values = open_lists.pop()
            open_lists[-1].append(_OPERATORS[operator](values))
        elif token in _DIGITS:
            open_lists[-1].append(token - 1)
        else:
            raise ValueError(
                f"unexpected {VOCABULARY[token]!r}: an expression is a digit, or an operator with arguments and ']'"
            )
    if len(open_lists) != 1 or len(open_lists[0]) != 1:
        raise ValueError(f"{len(tokens)} tokens are not exactly one expression")
    return open_lists[0][0]


def draw_expression(
    seed: int, split: Split, index: int, *, max_depth: int, max_args: int, min_length: int, max_length: int
) -> UInt8[np.ndarray, " T"]:
    """Samples an expression of a split.

    Args:
      seed: seed of the data set.
      split: split of the expression.
      index: number of the expression in its split.
      max_depth: maximum number of levels, the digits of the innermost lists included.
      max_args: maximum number of arguments of an operator, at least 2.
      min_length: minimum number of tokens, brackets included.
      max_length: maximum number of tokens.

    Returns:
      The tokens, uint8 [T].

    Raises:
      UserError: if 100,000 attempts give no such expression.
    """
    rng = random.Random(f"{seed} {split} {index}")
    grow = functools.partial(_grow, rng.random, max_depth=max_depth, max_args=max_args, max_length=max_length)
    for _ in range(_MAX_DRAWS):
        tokens: list[int] = []
        if grow(tokens, 1) and len(tokens) >= min_length and _split_of(tokens) == split:
            return np.array(tokens, np.uint8)
    raise UserError(
        f"none of {_MAX_DRAWS:,} random expressions has {min_length} to {max_length} tokens: lower min_length, or "
        f"raise max_depth={max_depth} or max_args={max_args}"
    )


def _grow(
    draw: Callable[[], float], tokens: list[int], depth: int, *, max_depth: int, max_args: int, max_length: int
) -> bool:
    """Appends a random expression to `tokens`.

    Args:
      draw: returns a random number, uniform in [0, 1).
      tokens: ids so far, extended in place.
      depth: level of the expression, 1 for the outermost.
      max_depth: level at which only digits are allowed.
      max_args: maximum number of arguments of an operator.
      max_length: maximum number of tokens.

    Returns:
      Whether the expression is complete; False, leaving it incomplete, once `max_length` is exceeded.
    """
    if depth == max_depth or draw() > _NESTED:
        tokens.append(1 + int(10 * draw()))
        return len(tokens) <= max_length
    tokens.append(_OPERATOR_IDS[int(len(_OPERATOR_IDS) * draw())])
    for _ in range(2 + int((max_args - 1) * draw())):
        if not _grow(draw, tokens, depth + 1, max_depth=max_depth, max_args=max_args, max_length=max_length):
            return False
    tokens.append(_CLOSE)
    return len(tokens) <= max_length


def _split_of(tokens: list[int]) -> Split:
    """Returns the split of an expression: validation and test have an eighth of all expressions each."""
    bucket = zlib.crc32(bytes(tokens)) % 8
    if bucket == 0:
        return "validation"
    if bucket == 1:
        return "test"
    return "train"
