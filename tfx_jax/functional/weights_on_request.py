"""What type checkers know of a function that returns a pair when it is asked for its weights."""

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

from jaxtyping import Array

P = ParamSpec("P")


class WeightsOnRequest(Protocol[P]):
    """An attention: an array, or with `return_weights=True` a pair of arrays."""

    # Who asks for weights gives up the check of the other arguments: no annotation adds an option to a ParamSpec.
    @overload
    def __call__(self, *args: Any, return_weights: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: bool, **options: Any) -> Array | tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Array: ...


def weights_on_request(attention: Callable[P, Array | tuple[Array, Array]]) -> WeightsOnRequest[P]:
    """Says so of an attention, and changes nothing of it."""
    return cast(Any, attention)
