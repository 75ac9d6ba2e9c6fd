"""Text as it is generated: what can be printed before the next token is known."""

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_WITHHELD = 3  # a character of four bytes, of which the last is missing


class TextStream:
    r"""The text of tokens that come one by one, in parts, each as soon as it is certain.

    A token may be a part of a character, which is withheld until the rest has come; whether a space stands before a
    token may depend on what is before it. The parts together are `decode` of all ids. The time for each token does not
    grow with the length of the text.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(index) for index in "aß!".encode()], stream.finish()
    (['a', '', 'ß', '!'], '')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """Starts an empty text.

        Args:
          decode: gives the text of ids. More ids may append to it, but must not change it, apart from incomplete
            characters at the end.
        """
        self._decode = decode
        self._context: list[int] = []  # their text is out
        self._pending: list[int] = []  # theirs is not, or not all of it
        self._shown = 0  # how many characters of both together are out
        self._text = ""

    def push(self, index: int) -> str:
        """Takes a token; returns what is certain now and was not before, which may be nothing."""
        self._pending.append(index)
        self._text = text = self._decode(self._context + self._pending)
        broken = len(text) - len(text.rstrip(_BROKEN))
        certain = len(text) - min(broken, _MAX_WITHHELD)
        if certain <= self._shown:
            return ""
        part, self._shown = text[self._shown : certain], certain
        # As a beginning, white space alone may vanish, and what follows would lose its own.
        alone = self._decode(self._pending) if not broken else ""
        if alone.strip():
            self._context, self._pending, self._text, self._shown = self._pending, [], alone, len(alone)
        return part

    def finish(self) -> str:
        """What was withheld, if no token comes any more."""
        part, self._shown = self._text[self._shown :], len(self._text)
        return part
