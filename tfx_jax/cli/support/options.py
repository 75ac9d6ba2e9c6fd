"""What the verbs share: how a trained model is chosen, and the device set-up of every program."""

import argparse
import contextlib
import logging
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from tfx_jax.arguments import Parser, beam_width, folder, length_penalty
from tfx_jax.cli.support.overrides import override
from tfx_jax.cli.support.process import check_cache_folder, check_file_limit
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError, printable
from tfx_jax.training.checkpoint.checkpoints import load_best_params, load_params
from tfx_jax.training.config import load_config, validate
from tfx_jax.training.run import AnyTask, Run, load_run


def add_model_options(parser: Parser) -> None:
    """Adds the flags that choose a trained model."""
    parser.add_argument("--workdir", type=folder, required=True, help="folder of a training, local or gs://")
    parser.add_argument(
        "--step",
        type=_step,
        help='number of a checkpoint, "best" (by its validation score), "average" or "latest"; best where there is one',
    )
    add_nonfinite_option(parser)


def add_folder_options(parser: Parser, help: str) -> None:
    """Adds the flags that choose a model in a Hugging Face folder or, of one's own, in the workdir of a training."""
    parser.add_argument("--model", help=f"Hugging Face folder {help}, or a name of the hub such as gpt2")
    parser.add_argument("--workdir", type=folder, help="or folder of a training, local or gs://")
    parser.add_argument("--step", type=_step, help="of a training: as for tfx-jax evaluate")
    add_nonfinite_option(parser)


def add_nonfinite_option(parser: Parser) -> None:
    """Adds the flag that takes a model which is not all numbers."""
    parser.add_argument("--allow-nonfinite", action="store_true", help="also where parameters are NaN or infinite")


def load_trained(arguments: argparse.Namespace, dtype: str | None = None) -> tuple[Any, HFTokenizer]:
    """The model of the workdir that `add_folder_options` chose, and its tokenizer.

    Args:
      arguments: of the command.
      dtype: of the computation; that of the training by default.

    Raises:
      UserError: if there is none, or it has no tokenizer.
    """
    run, params = load_model(arguments, dtype=dtype)
    tokenizer = getattr(run.task, "tokenizer", None)
    if tokenizer is None:
        raise UserError(f"{arguments.workdir} holds a model without a tokenizer: it neither reads nor writes text")
    return nnx.merge(run.graphdef, jax.device_put(params)), tokenizer


def check_one_source(arguments: argparse.Namespace) -> None:
    """Raises UserError unless exactly one of --model and --workdir is given."""
    if (arguments.model is None) == (arguments.workdir is None):
        raise UserError("give either --model=FOLDER or --workdir=FOLDER")
    if arguments.step is not None and arguments.workdir is None:
        raise UserError("--step chooses a checkpoint of a --workdir")


def add_decoding_options(parser: Parser) -> None:
    """Adds the flags of the beam search."""
    parser.add_argument("--beam", type=beam_width, help="beam width; that of the training's configuration by default")
    parser.add_argument(
        "--length-penalty",
        "--alpha",
        type=length_penalty,
        help="exponent of the length penalty; the configuration's by default",
    )
    parser.add_argument("--int8", action="store_true", help="decode with weights of 8 bits: faster, not exact")


def load_model(
    arguments: argparse.Namespace,
    kind: type[AnyTask] | tuple[type[AnyTask], ...] | None = None,
    *,
    overrides: Sequence[str] = (),
    dtype: str | None = None,
) -> tuple[Run[AnyTask], Any]:
    """Opens the run, whose task must be of a kind or one of several, and the parameters `add_model_options` chose.

    Raises:
      UserError: if there are none, or they are not those of the model that the configuration describes.
    """
    config = validate(override(load_config(arguments.workdir), overrides)) if overrides else None
    run, options = load_run(arguments.workdir, kind, config=config), {"allow_nonfinite": arguments.allow_nonfinite}
    if dtype is not None:  # before anything is made of it
        run.task.model_config.dtype = dtype
    if arguments.step is None:
        params = load_best_params(arguments.workdir, **options)
    else:
        params = load_params(arguments.workdir, None if arguments.step == "latest" else arguments.step, **options)
    run.check_params(params)
    return run, params


# Options of JAX with which training fails or differs; the environment may have them for another program.
_JAX_OPTIONS: dict[str, Any] = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_transfer_guard": "allow",
    **{f"jax_transfer_guard_{way}": "allow" for way in ("host_to_device", "device_to_device", "device_to_host")},
}


def set_up_program() -> None:
    """Sets up the process: the limit of open files, quiet logs, JAX's options and its compilation cache.

    The cache makes the second start of a program quick.

    Raises:
      UserError: if too few files may be open at once, or JAX_COMPILATION_CACHE_DIR is not a folder.
    """
    check_file_limit()
    check_cache_folder()
    os.environ["MPLBACKEND"] = "agg"  # pictures are files: neither a window nor another notebook's backend
    for name, value in _JAX_OPTIONS.items():
        if name.upper() in os.environ:
            jax.config.update(name, value)
    for name in ("absl", "asyncio", "gcsfs"):  # where Orbax logs, with tracebacks, the errors that it raises too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.setLogRecordFactory(_Record)
    sys.unraisablehook = _report_unraisable
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        with contextlib.suppress(RuntimeError):  # a user without a home folder has no cache
            base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
            jax.config.update("jax_compilation_cache_dir", str(base / "tfx_jax" / "xla"))
    least = {"jax_persistent_cache_min_compile_time_secs": 0.5, "jax_persistent_cache_min_entry_size_bytes": -1}
    for name, value in least.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


class _Record(logging.LogRecord):
    """An entry of a log, which may quote a server or a file: one line that a terminal can be shown."""

    def getMessage(self) -> str:  # noqa: N802  the name that `logging` calls
        return printable(super().getMessage())


def _report_unraisable(unraisable: Any) -> None:
    """As ever, but for reads that Orbax left behind when one failed: they come back to a loop that is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _step(text: str) -> int | str:
    if text in ("best", "average", "latest"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a step, "best", "average" or "latest"') from None
