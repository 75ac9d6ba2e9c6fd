"""`Case`: one attention in the contract of all attentions, tests/functional/attention/test_contract.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tfx_jax.functional.attention import SPECS

EVERYTHING = frozenset({"bias", "mask", "segments", "cross", "grouped", "causal"})


class Case(NamedTuple):
    """An attention with its own options bound, and its oracle."""

    name: str
    """In `SPECS`, if configurations name it."""
    attend: Callable[..., Any]
    oracle: Callable[..., np.ndarray]
    """`oracle(query, key, *, bias, mask, is_causal)` returns the weights, float64 [B, N, T, S]."""
    takes: frozenset[str] | None = None
    """Of EVERYTHING: a bias and a mask of all pairs, segment_ids, T != S, K < N, is_causal.

    None means what the spec says, or everything for an attention without a spec.
    """
    dense: Callable[..., Any] | None = None
    """The function with the options under which it equals dense attention, where `oracle` is not that already."""
    is_lean: bool = False
    """Whether it promises never to hold an array of T x S, forward or backward."""
    is_distribution: bool = True
    """Whether the weights of a query that sees a key add up to 1."""

    @property
    def features(self) -> frozenset[str]:
        """Of EVERYTHING, what it takes."""
        if self.takes is not None or self.name not in SPECS:
            return EVERYTHING if self.takes is None else self.takes
        spec = SPECS[self.name]
        features = {
            "bias": spec.bias,
            "mask": spec.bias,
            "segments": spec.segments,
            "cross": spec.cross,
            "grouped": spec.grouped_queries,
            "causal": spec.causal,
        }
        return frozenset(name for name, takes in features.items() if takes)

    @property
    def modes(self) -> tuple[bool, ...]:
        """The values that `is_causal` may have."""
        if self.name in SPECS and SPECS[self.name].causal_only:
            return (True,)
        return (False, True) if "causal" in self.features else (False,)
