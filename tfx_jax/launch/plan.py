"""What every target of `tfx-jax launch` gives back, and the options that several share."""

import argparse
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.errors import UserError

SAVED = (129, 130, 143)  # exit status of a run that saved after SIGHUP, SIGINT or SIGTERM: rerunning it resumes
MISTAKE = 2  # exit status of a mistake of the user's: running it again cannot help


class Plan(NamedTuple):
    """A launch that is worked out but not begun."""

    text: str
    """The whole of it as a script or manifest, which `--dry-run` writes."""
    program: str
    """What must be installed here to begin."""
    start: Callable[[], int]
    """Begins, and returns the exit status."""
    topology: str | None = None
    """Of the TPU slice that it rents, as `tfx-jax plan` names it; None where its options do not say."""
    num_slices: int = 1
    """How many such slices."""


def execute(argv: Sequence[str], standard_input: str | None = None) -> int:
    """Runs a program in the foreground and returns its exit status; without input it shares ours, for its questions."""
    return subprocess.run(argv, input=standard_input, text=True).returncode


def dns_label(text: str) -> str:
    """Reads a name that Google Cloud and Kubernetes accept.

    They append numbers to it and allow 63 characters in all, hence no more than 40.
    """
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a name of at most 40 lower-case letters, digits and "-" that begins with a letter'
        )
    return text


def literal(argument: str) -> str:
    """Protects an argument of a container's command, where Kubernetes replaces $(NAME) and reads $$ as $."""
    return argument.replace("$", "$$")


def add_grace_option(parser: Parser, default: int, what: str) -> None:
    """Adds `--grace`, in seconds."""
    parser.add_argument("--grace", type=at_least_one, default=default, metavar="SECONDS", help=f"{what} ({default})")


def require_shared_workdir(command: Sequence[str]) -> None:
    """Refuses a relative `--workdir` where every host has its own disk, which is lost with the host.

    Raises:
      UserError: if the command names such a folder. An absolute path may be a mounted file system.
    """
    for index, argument in enumerate(command):
        workdir = argument.removeprefix("--workdir=") if argument.startswith("--workdir=") else None
        if argument == "--workdir" and index + 1 < len(command):
            workdir = command[index + 1]
        if workdir is not None and not workdir.startswith(("gs://", "/")):
            raise UserError(
                f"--workdir={workdir} would be another folder on every host, and lost with it: "
                "name a bucket, --workdir=gs://BUCKET/FOLDER, or the absolute path of a shared file system"
            )
