"""Context that tells attention and experts how to run on arrays sharded over a mesh; read while tracing.

Models do not know the mesh. A training step enters `distributed` with the `Distribution` that
`tfx_jax.training.sharding` makes for its mesh, and every `MultiHeadAttention` and `MixtureOfExperts` inside uses it.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from tfx_jax.functional.moe import Exchange


def _call(attention_fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls an attention function directly."""
    return attention_fn(*args, **options)


def _no_exchange(num_groups: int, num_experts: int) -> Exchange | None:
    """Leaves the exchange of tokens between devices to the compiler."""
    del num_groups, num_experts
    return None


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How attention and experts run. The default calls them directly: on one device, or partitioned by the compiler."""

    attend: Callable[..., Any] = _call
    """Calls an attention function: `attend(attention_fn, query, key, value, ...)`."""
    num_groups: int = 1
    """Number of groups of tokens that a mixture of experts routes separately in training: the shards of the batch."""
    exchange: Callable[[int, int], Exchange | None] = _no_exchange
    """`exchange(num_groups, num_experts)` returns how tokens are sent to their experts; None if they are not sent."""


DIRECT = Distribution()

# Unlike a `contextvars.ContextVar`, this value is part of the keys of JAX's caches, so a function that was traced with
# one distribution is traced again with another.
_current = jax.make_user_context(DIRECT)


def distributed(distribution: Distribution) -> AbstractContextManager[None]:
    """Returns a context manager within which modules use `distribution`, in the thread that enters it.

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
    """Returns the distribution of the innermost `distributed` context, or `DIRECT` outside of one."""
    return _current.value
