"""The one exception that the command line turns into a single line."""


class UserError(ValueError):
    """A mistake or a circumstance the user can mend; its message is one line that names the thing and the remedy."""
