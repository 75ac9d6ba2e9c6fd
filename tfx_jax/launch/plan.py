"""The plan that every target of `tfx-jax launch` returns, and options that several targets share."""

import argparse
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.errors import UserError

SAVED = (129, 130, 143)  # exit statuses of a run that saved after SIGHUP, SIGINT or SIGTERM: rerunning resumes it
MISTAKE = 2  # exit status of a user's mistake: rerunning cannot help


class Plan(NamedTuple):
    """A launch that is planned but not started."""

    text: str
    """The complete script or manifest, which `--dry-run` prints."""
    program: str
    """Program that must be installed here to start the launch."""
    start: Callable[[], int]
    """Starts the launch and returns the exit status."""
    topology: str | None = None
    """Topology of a rented TPU slice, as `tfx-jax plan` names it; None if the options do not determine it."""
    num_slices: int = 1
    """Number of such slices."""
    unknown: str = ""
    """Why `topology` is None although the target rents a slice; "" if it rents none that its options describe."""


def execute(argv: Sequence[str], standard_input: str | None = None) -> int:
    """Runs a program in the foreground and returns its exit status. Without input, it can ask the user questions."""
    return subprocess.run(argv, input=standard_input, text=True).returncode


def dns_label(text: str) -> str:
    """Parses a name that Google Cloud and Kubernetes accept.

    They append numbers to it and allow 63 characters in total, hence at most 40 here.
    """
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f'"{text}" must be at most 40 lower-case letters, digits and "-", and begin with a letter'
        )
    return text


def literal(argument: str) -> str:
    """Escapes an argument of a container's command: Kubernetes replaces $(NAME) and reads $$ as $."""
    return argument.replace("$", "$$")


def add_grace_option(parser: Parser, default: int, meaning: str) -> None:
    """Adds the flag `--grace`, in seconds."""
    parser.add_argument(
        "--grace", type=at_least_one, default=default, metavar="SECONDS", help=f"{meaning}; {default} by default"
    )


def require_shared_workdir(command: Sequence[str]) -> None:
    """Rejects a relative `--workdir` if every host has its own disk, which is lost with the host.

    Raises:
      UserError: if the command has a relative --workdir. An absolute path may be on a mounted file system.
    """
    for index, argument in enumerate(command):
        workdir = argument.removeprefix("--workdir=") if argument.startswith("--workdir=") else None
        if argument == "--workdir" and index + 1 < len(command):
            workdir = command[index + 1]
        if workdir is not None and not workdir.startswith(("gs://", "/")):
            raise UserError(
                f"--workdir={workdir} would be a different folder on every host, and lost with the host: name a "
                "bucket, --workdir=gs://BUCKET/FOLDER, or an absolute path on a shared file system"
            )
