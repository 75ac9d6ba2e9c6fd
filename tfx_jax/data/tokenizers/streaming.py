"""Incremental decoding: the text of generated tokens that is final before the next token is known."""

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_WITHHELD = 3  # bytes of an incomplete character of four bytes


class TextStream:
    r"""Decodes tokens one by one into parts of the text, each returned as soon as it is final.

    A token may be a part of a character, which is withheld until it is complete. Whether a token begins with a space
    may depend on the tokens before it. The concatenated parts equal `decode` of all ids. The time per token does not
    grow with the length of the text.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(index) for index in "aß!".encode()], stream.finish()
    (['a', '', 'ß', '!'], '')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """Starts an empty text.

        Args:
          decode: returns the text of ids. More ids may only append to the text, except for incomplete characters at its
            end.
        """
        self._decode = decode
        self._context: list[int] = []  # ids whose text has been returned
        self._pending: list[int] = []  # later ids, whose text has not or only partly been returned
        self._shown = 0  # number of returned characters of the text of both
        self._text = ""

    def push(self, index: int) -> str:
        """Adds a token; returns the text that has become final, possibly empty."""
        self._pending.append(index)
        self._text = text = self._decode(self._context + self._pending)
        broken = len(text) - len(text.rstrip(_BROKEN))
        certain = len(text) - min(broken, _MAX_WITHHELD)
        if certain <= self._shown:
            return ""
        part, self._shown = text[self._shown : certain], certain
        # A new context must not be white space only: `decode` may strip it, with the space of the next token.
        alone = self._decode(self._pending) if not broken else ""
        if alone.strip():
            self._context, self._pending, self._text, self._shown = self._pending, [], alone, len(alone)
        return part

    def finish(self) -> str:
        """Returns the withheld text after the last token."""
        part, self._shown = self._text[self._shown :], len(self._text)
        return part
