"""Text as it is generated: what can be printed before the next token is known."""

from collections.abc import Callable, Iterable, Iterator, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_WITHHELD = 3  # a character of four bytes, of which the last is missing


def decode_stream(decode: Callable[[Sequence[int]], str], ids: Iterable[int]) -> Iterator[str]:
    r"""The text of tokens, in parts, each as soon as it is certain.

    A token may be a part of a character, which is withheld until the rest has come; whether a space stands before a
    token may depend on what is before it. The parts together are `decode` of all ids. The time for each token does not
    grow with the length of the text.

    Args:
      decode: gives the text of ids. More ids may append to it, but must not change it, apart from incomplete
        characters at the end.
      ids: tokens; each is asked for when the text of those before it is out.

    Yields:
      Text, never empty.

    >>> list(decode_stream(lambda ids: bytes(ids).decode(errors="replace"), "aß!".encode()))
    ['a', 'ß', '!']
    """
    context: list[int] = []  # their text is out
    pending: list[int] = []  # theirs is not, or not all of it
    shown = 0  # how many characters of both together are out
    text = ""
    for index in ids:
        pending.append(index)
        text = decode(context + pending)
        broken = len(text) - len(text.rstrip(_BROKEN))
        certain = len(text) - min(broken, _MAX_WITHHELD)
        if certain > shown:
            yield text[shown:certain]
            shown = certain
            # As a beginning, white space alone may vanish, and what follows would lose its own.
            alone = decode(pending) if not broken else ""
            if alone.strip():
                context, pending, text, shown = pending, [], alone, len(alone)
    if len(text) > shown:
        yield text[shown:]
