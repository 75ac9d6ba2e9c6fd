"""How attention and experts run where arrays are divided over a mesh: a context that modules read while traced.

Models know of no mesh. A training step enters `distributed` with the `Distribution` that `tfx_jax.training.sharding`
makes for its mesh, and every `MultiHeadAttention` and `MixtureOfExperts` inside follows it.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from tfx_jax.functional.moe import Exchange


def _call(attention_fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return attention_fn(*args, **options)


def _no_exchange(num_groups: int, num_experts: int) -> Exchange | None:
    del num_groups, num_experts
    return None


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How attention and experts run. By default directly: on one device, or as the compiler divides them."""

    attend: Callable[..., Any] = _call
    """Calls an attention function: `attend(attention_fn, query, key, value, ...)`."""
    num_groups: int = 1
    """Groups of tokens that a mixture of experts routes separately in training: the devices with rows of their own."""
    exchange: Callable[[int, int], Exchange | None] = _no_exchange
    """Given the numbers of groups and experts, returns how tokens travel to their experts, or None if they stay."""


DIRECT = Distribution()

# A context variable would do, but for the caches of JAX: this value is part of their keys, so a function that was
# traced for one distribution is traced again for another.
_current = jax.make_user_context(DIRECT)


def distributed(distribution: Distribution) -> AbstractContextManager[None]:
    """Makes the context in which modules follow `distribution`, in the thread that enters it.

    >>> @jax.jit
    ... def num_groups():
    ...     return current_distribution().num_groups
    >>> with distributed(Distribution(num_groups=8)):
    ...     print(num_groups())
    8
    >>> print(num_groups())
    1
    """
    return _current(distribution)


def current_distribution() -> Distribution:
    """Returns the distribution of the innermost `distributed`, or `DIRECT` outside."""
    return _current.value
