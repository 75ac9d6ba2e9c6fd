"""Incremental decoding: the text of generated tokens that is final before the next token is known."""

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Maximum number of replacement characters at the end that may still become text: the first bytes, at most three, of a
# character of four bytes, each decoded as one replacement character.
_MAX_WITHHELD = 3


class TextStream:
    r"""Decodes tokens one by one into parts of the text, each returned as soon as it is final.

    A token may be a part of a character, which is withheld until it is complete. Whether a token begins with a space
    may depend on the tokens before it. The concatenated parts equal `decode` of all ids. The time per token does not
    grow with the length of the text.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(index) for index in "aß!".encode()], stream.finish()
    (['a', '', 'ß', '!'], '')
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = (), *, drops_space: bool = False
    ):
        """Starts an empty text.

        Args:
          decode: returns the text of ids. Decoding more ids may only append to the text, except that incomplete
            characters at its end are completed.
          context: ids that the text continues; theirs is not returned.
          drops_space: whether a space at the start of the text is left out, because the context's text ends with one.
        """
        self._decode, self._drops_space = decode, drops_space
        self._context = list(context)  # ids whose text has been returned
        self._pending: list[int] = []  # later ids, whose text has not or only partly been returned
        self._text = decode(self._context) if self._context else ""  # text of context and pending ids
        self._shown = len(self._text)  # number of characters of `_text` that have been returned

    def push(self, index: int) -> str:
        """Adds a token; returns the text that has become final, possibly empty."""
        self._pending.append(index)
        self._text = text = self._decode(self._context + self._pending)
        num_broken = len(text) - len(text.rstrip(_BROKEN))
        num_final = len(text) - min(num_broken, _MAX_WITHHELD)
        if num_final <= self._shown:
            return ""
        part = text[self._shown : num_final]
        if self._drops_space:
            part, self._drops_space = part.removeprefix(" "), False
        self._shown = num_final
        # A new context must not be white space only: `decode` may strip it, with the space of the next token.
        pending_text = self._decode(self._pending) if not num_broken else ""
        if pending_text.strip():
            # The pending ids, now returned, become the context, so that older ids need not be decoded again.
            self._context, self._pending = self._pending, []
            self._text, self._shown = pending_text, len(pending_text)
        return part

    def finish(self) -> str:
        """Returns the withheld text after the last token."""
        part = self._text[self._shown :]
        self._shown = len(self._text)
        return part
