"""Flags and set-up that several verbs share: choosing a trained model, decoding, and the JAX process."""

import argparse
import contextlib
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from flax import nnx

from tfx_jax.arguments import Parser, beam_width, folder, length_penalty
from tfx_jax.cli.support.overrides import override
from tfx_jax.cli.support.process import check_cache_folder, check_file_limit
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError, printable
from tfx_jax.files import is_local
from tfx_jax.models import hf
from tfx_jax.training.checkpoint.checkpoints import load_best_params, load_params
from tfx_jax.training.config import load_config, validate
from tfx_jax.training.run import AnyTask, Run, load_run
from tfx_jax.training.sharding.distributed import has_tpu


def add_model_options(parser: Parser) -> None:
    """Adds the flags that choose a trained model."""
    parser.add_argument("--workdir", type=folder, required=True, help="folder of the training run, local or gs://")
    parser.add_argument(
        "--step",
        type=_step,
        help='checkpoint to load: a step number, "best" (by validation score), "average" or "latest"; by default best, '
        "or latest if there is no best",
    )
    add_nonfinite_option(parser)


def add_folder_options(parser: Parser, help: str) -> None:
    """Adds the flags that choose a model: a Hugging Face folder, or the workdir of a training run.

    `help` describes the folder in the help text.
    """
    parser.add_argument("--model", help=f"Hugging Face folder {help}, or the name of a model on the hub, such as gpt2")
    parser.add_argument("--workdir", type=folder, help="instead of --model: folder of a training run, local or gs://")
    parser.add_argument(
        "--step",
        type=_step,
        help='checkpoint of --workdir: a step number, "best", "average" or "latest"; by default best, or latest if '
        "there is no best",
    )
    add_nonfinite_option(parser)


def add_nonfinite_option(parser: Parser) -> None:
    """Adds the flag that accepts parameters with NaN or infinite values."""
    parser.add_argument(
        "--allow-nonfinite", action="store_true", help="load parameters even if some are NaN or infinite"
    )


def load_trained(arguments: argparse.Namespace, dtype: str | None = None) -> tuple[Any, HFTokenizer]:
    """Returns the pair (model, tokenizer) of the workdir that the flags of `add_folder_options` chose.

    Args:
      arguments: parsed arguments of the command.
      dtype: dtype of the computation; by default that of the configuration.

    Raises:
      UserError: if the workdir holds no model, or its model has no tokenizer.
    """
    run, params = load_model(arguments, dtype=dtype)
    tokenizer = getattr(run.task, "tokenizer", None)
    if tokenizer is None:
        raise UserError(f"{arguments.workdir} holds a model without a tokenizer, but text needs one: name another run")
    return nnx.merge(run.graphdef, jax.device_put(params)), tokenizer


def load_generating_folder(
    arguments: argparse.Namespace, folder: epath.Path
) -> tuple[Any, Sequence[int], Sequence[int]]:
    """Loads a Hugging Face folder for decoding, with the flags --dtype, --int8 and --allow-nonfinite.

    Returns:
      The model, and the tokens that end and that begin its outputs.

    Raises:
      UserError: if the folder holds no model, or it is damaged.
    """
    model = hf.load(
        folder,
        dtype=arguments.dtype,
        allow_nonfinite=arguments.allow_nonfinite,
        # Decoding then casts nothing; int8 weights are rounded from float32.
        keep_bfloat16=arguments.dtype == "bfloat16" and not arguments.int8,
    )
    return model, *hf.output_ids(folder)


def check_one_source(arguments: argparse.Namespace) -> None:
    """Raises UserError unless exactly one of --model and --workdir is given."""
    if (arguments.model is None) == (arguments.workdir is None):
        raise UserError("give exactly one of --model=FOLDER and --workdir=FOLDER")
    if arguments.step is not None and arguments.workdir is None:
        raise UserError("--step needs --workdir: it chooses a checkpoint of a training run")


def check_local(path: str, verb: str) -> str:
    """Returns the path of a local folder; raises UserError for a folder in a store, such as gs://."""
    if not is_local(path):
        raise UserError(
            f"{path} is in a store, but {verb} needs local folders: {verb} a local copy, then copy the output folder "
            "to the store"
        )
    return path


def add_decoding_options(parser: Parser) -> None:
    """Adds the flags of the beam search."""
    parser.add_argument("--beam", type=beam_width, help="beam width; by default that of the configuration")
    parser.add_argument(
        "--length-penalty",
        "--alpha",
        type=length_penalty,
        help="exponent of the beam search's length penalty; by default that of the configuration",
    )
    parser.add_argument(
        "--int8", action="store_true", help="decode with int8 weights (but for experts): faster, but not exact"
    )


def load_model(
    arguments: argparse.Namespace,
    kind: type[AnyTask] | tuple[type[AnyTask], ...] | None = None,
    *,
    overrides: Sequence[str] = (),
    dtype: str | None = None,
) -> tuple[Run[AnyTask], Any]:
    """Returns the pair (run, parameters) that the flags of `add_model_options` chose.

    Args:
      arguments: parsed arguments of the command.
      kind: class or classes that the run's task must be an instance of; None accepts any.
      overrides: flags of the form `--config.field=value`.
      dtype: dtype of the computation; by default that of the configuration.

    Raises:
      UserError: if there are no parameters, or they do not fit the model that the configuration describes.
    """
    config = validate(override(load_config(arguments.workdir), overrides)) if overrides else None
    run = load_run(arguments.workdir, kind, config=config)
    options = {"allow_nonfinite": arguments.allow_nonfinite}
    if dtype is not None:  # before the model is built from it
        run.task.model_config.dtype = dtype
    if arguments.step is None:
        params = load_best_params(arguments.workdir, **options)
    else:
        params = load_params(arguments.workdir, None if arguments.step == "latest" else arguments.step, **options)
    run.check_params(params)
    return run, params


# JAX options that would make training fail or differ; the environment may set them for another program.
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
    os.environ["MPLBACKEND"] = "agg"  # figures are written to files: no window, no notebook backend
    for name, value in _JAX_OPTIONS.items():
        if name.upper() in os.environ:
            jax.config.update(name, value)
    for name in ("absl", "asyncio", "gcsfs"):  # Orbax and its clients log, with tracebacks, errors that they also raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.setLogRecordFactory(_Record)
    logging.basicConfig()
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:  # importing Orbax may have made it
            handler.setFormatter(logging.Formatter("tfx-jax: %(message)s"))
    sys.unraisablehook = _report_unraisable
    quiet_libtpu()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        with contextlib.suppress(RuntimeError):  # without a home folder there is no cache
            base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
            jax.config.update("jax_compilation_cache_dir", str(base / "tfx_jax" / "xla"))
    cache_limits = {"jax_persistent_cache_min_compile_time_secs": 0.5, "jax_persistent_cache_min_entry_size_bytes": -1}
    for name, value in cache_limits.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def quiet_libtpu() -> None:
    """Sets what keeps libtpu, if it is installed for `tfx-jax plan`, from warning that this machine has no TPU."""
    if importlib.util.find_spec("libtpu") and not has_tpu():
        from tfx_jax.planning.topologies import ENVIRONMENT  # not needed without libtpu

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)


class _Record(logging.LogRecord):
    """A log record as one line without control characters: it may quote a server or a file."""

    def getMessage(self) -> str:  # noqa: N802  `logging` calls this name
        return printable(super().getMessage())


def _report_unraisable(unraisable: Any) -> None:
    """Reports an error as Python does, but ignores that of reads which Orbax cancelled before it closed their loop."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _step(text: str) -> int | str:
    """Parses the value of --step."""
    if text in ("best", "average", "latest"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" must be a step number, "best", "average" or "latest"') from None
