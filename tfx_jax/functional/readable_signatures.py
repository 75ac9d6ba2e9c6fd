"""Signatures that `help` prints as they stand in the source."""

import inspect
from collections.abc import Iterable
from typing import Any

_QUALIFIERS = ("jaxtyping.", "jax.jaxlib._jax.", "jaxlib._jax.", "collections.abc.", "jax._src.basearray.")


class ReadableSignature(inspect.Signature):
    """A signature printed with the annotations of the source, one parameter per line if it is long.

    Python prints `jaxtyping.Float[jaxlib._jax.Array, 'B T N H']` for `Float[Array, "B T N H"]`.
    """

    def __str__(self) -> str:
        """Returns the signature in one line, or with one parameter per line if it is longer than 80 characters."""
        parts: list[str] = []
        has_star = is_positional_only = False
        for parameter in self.parameters.values():
            if is_positional_only and parameter.kind is not parameter.POSITIONAL_ONLY:
                parts.append("/")
            is_positional_only = parameter.kind is parameter.POSITIONAL_ONLY
            has_star |= parameter.kind is parameter.VAR_POSITIONAL
            if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
                parts.append("*")
                has_star = True
            parts.append(_short(str(parameter)))
        if is_positional_only:
            parts.append("/")
        result: Any = self.return_annotation
        returns = "" if result is inspect.Signature.empty else f" -> {_short(inspect.formatannotation(result))}"
        line = f"({', '.join(parts)}){returns}"
        if len(line) <= 80:
            return line
        lines = "".join(f"    {part},\n" for part in parts)
        return f"(\n{lines}){returns}"

    def format(self, *_: Any, **__: Any) -> str:
        """Returns the same text; Python 3.13 and newer call this."""
        return str(self)


def make_readable(functions: Iterable[Any]) -> None:
    """Gives functions a signature that `help` prints in short; other objects are left as they are."""
    for function in functions:
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            vars(function)["__signature__"] = ReadableSignature(
                list(signature.parameters.values()), return_annotation=signature.return_annotation
            )


def _short(text: str) -> str:
    """Removes the names of modules from annotations."""
    for qualifier in _QUALIFIERS:
        text = text.replace(qualifier, "")
    return text
