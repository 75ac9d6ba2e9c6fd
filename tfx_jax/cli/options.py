"""What the verbs share: one-line argument errors, and the device set-up of every program."""

import argparse
import logging
import os
import pathlib
import sys
from typing import Any, NoReturn

import jax

from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint import load_params
from tfx_jax.training.experiment import Experiment


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s and that takes no abbreviations of flags."""

    def __init__(self, verb: str, description: str):
        super().__init__(f"tfx-jax {verb}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Turns an argument error into one line."""
        raise UserError(f"{message}; see {self.prog} --help")


def add_model_options(parser: Parser) -> None:
    """Adds the flags that choose a trained model."""
    parser.add_argument("--workdir", required=True, help="folder of a training, local or gs://")
    parser.add_argument(
        "--step",
        type=_step,
        help='number of a checkpoint, "best" (by validation BLEU), "average" or "latest"; best where there is one',
    )


def add_decoding_options(parser: Parser) -> None:
    """Adds the flags of the beam search."""
    parser.add_argument("--beam", type=at_least_one, help="beam width; that of the training's configuration by default")
    parser.add_argument("--alpha", type=float, help="of the length penalty; the configuration's by default")
    parser.add_argument("--int8", action="store_true", help="decode with weights of 8 bits: faster, not exact")


def load_model(arguments: argparse.Namespace) -> tuple[Experiment, Any]:
    """Opens the experiment and the parameters that `add_model_options` chose."""
    experiment = Experiment.load(arguments.workdir)
    if arguments.step is not None:
        return experiment, load_params(arguments.workdir, None if arguments.step == "latest" else arguments.step)
    try:
        return experiment, load_params(arguments.workdir, "best")
    except UserError:
        return experiment, load_params(arguments.workdir)


def set_up_program() -> None:
    """Quiet logs, and a compilation cache that makes the second start of a program quick."""
    for name in ("absl", "asyncio"):  # where Orbax logs, with tracebacks, the errors that it raises too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _report_unraisable
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "tfx_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _report_unraisable(unraisable: Any) -> None:
    """As ever, but for reads that Orbax left behind when one failed: they come back to a loop that is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def at_least_one(text: str) -> int:
    """Reads a count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least 1')
    return int(text)


def _step(text: str) -> int | str:
    if text in ("best", "average", "latest"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a step, "best", "average" or "latest"') from None
