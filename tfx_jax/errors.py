"""`UserError`, which the command line prints as one line, and helpers that make quoted text safe to print."""

# Packages that access remote stores, and their dependencies; each raises its own error classes.
_CLIENTS = ("gcsfs", "google", "s3fs", "botocore", "aiobotocore", "aiohttp", "fsspec", "requests", "urllib3")


SOURCE = "git+https://github.com/tfx-jax/tfx-jax"
"""Where pip finds the package; docs, README and messages name it too. A release on PyPI makes it unnecessary."""


def install_command(extra: str) -> str:
    """Returns the command that installs an extra.

    >>> install_command("plan")
    'pip install "tfx-jax[plan] @ git+https://github.com/tfx-jax/tfx-jax"'
    """
    return f'pip install "tfx-jax[{extra}] @ {SOURCE}"'


class UserError(ValueError):
    """An error the user can fix. Its message is one line that says what is wrong and the remedy.

    The message may quote files, servers and other programs, so `str` escapes it with `printable`.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def check_text(text: str, name: str) -> None:
    """Checks that a string can be written in UTF-8, as every tokenizer needs.

    Raises:
      UserError: if it contains half of a surrogate pair, such as the first half of an emoji; the message begins with
        `name`.
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
    r"""Escapes characters that would move the cursor, break the line or be invisible on a terminal.

    Args:
      text: untrusted text, such as from a file or a server.
      limit: maximum number of characters; longer text is cut and ends with "...".

    >>> print(printable("404 \x1b[2JNot\r\nFound \u202e"))
    404 \x1b[2JNot\r\nFound \u202e
    """
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return text if limit is None or len(text) <= limit else f"{text[: max(0, limit - 3)]}..."


def one_line(error: BaseException) -> str:
    """Returns the message of an error as one line, or the name of its class if it has no message."""
    return printable(" ".join(str(error).split()), 200) or type(error).__name__


def is_store_error(error: BaseException) -> bool:
    """Returns whether the class of an error belongs to the client of a remote store (gs://, s3://)."""
    return type(error).__module__.partition(".")[0] in _CLIENTS
