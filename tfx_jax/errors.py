"""The one exception that the command line turns into a single line, and what makes the text of others safe in it."""

# Packages that reach stores, each of which raises errors of its own, and what they stand on.
_CLIENTS = ("gcsfs", "google", "s3fs", "botocore", "aiobotocore", "aiohttp", "fsspec", "requests", "urllib3")


class UserError(ValueError):
    """A mistake or a circumstance the user can fix; its message is one line that names the thing and the remedy.

    The message may quote files, servers and other programs: it is shown as `printable` gives it.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def check_text(text: str, name: str) -> None:
    """Checks that a string can be written in UTF-8, as every tokenizer needs.

    Raises:
      UserError: if it has half of a surrogate pair, such as the first half of an emoji; `name` says whose text it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UserError(
            f"{name}: character {error.start + 1} is half of a surrogate pair ({half}), which UTF-8 cannot hold: "
            "delete it, or add the other half"
        ) from None


def printable(text: str, limit: int | None = None) -> str:
    r"""Escapes whatever would move the cursor, break the line or hide: text from a file or a server may do all that.

    Args:
      text: from elsewhere.
      limit: the most characters to show; what is cut off is marked with "...".

    >>> print(printable("404 \x1b[2JNot\r\nFound \u202e"))
    404 \x1b[2JNot\r\nFound \u202e
    """
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return text if limit is None or len(text) <= limit else f"{text[: max(0, limit - 3)]}..."


def one_line(error: BaseException) -> str:
    """What an error says, or its kind where that is nothing."""
    return printable(" ".join(str(error).split()), 200) or type(error).__name__


def is_of_store(error: BaseException) -> bool:
    """Whether it is a client of a store (gs://, s3://) that raised the error."""
    return type(error).__module__.partition(".")[0] in _CLIENTS
