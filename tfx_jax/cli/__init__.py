"""The command `tfx-jax VERB`: dispatch, and errors as one line."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tfx_jax import __version__
from tfx_jax.cli.support import process
from tfx_jax.cli.support.large_pages import restart_with_large_pages
from tfx_jax.errors import UserError, is_of_store, one_line, printable

VERBS = {
    "train": "train an experiment, or resume it",
    "experiments": "list the experiments, show one, or copy one to edit",
    "evaluate": "score a trained model: sacreBLEU, tokenized BLEU, exact match",
    "translate": "translate standard input, line by line",
    "generate": "go on with each line of standard input, with a pretrained model",
    "predict": "answer standard input, line by line: labels, tags, answers, translations",
    "transcribe": "write down what is said in WAV files",
    "average": "average the newest checkpoints of a training",
    "attend": "show what a model looks at, in a sentence pair, an image or a record of events",
    "convert": "write a Hugging Face folder again, in one file and in another dtype",
    "prepare": "download and build a TFDS translation data set, WMT14 for one",
    "bench": "measure training, decoding, an attention or the data on this machine",
    "plan": "say whether a training fits TPUs or GPUs that are not there, and how long it would take",
    "launch": "start a verb on several processes, a TPU slice or a cluster",
}

_USAGE = "usage: tfx-jax VERB [options]; tfx-jax VERB --help says more; tfx-jax --version\n\n" + "".join(
    f"  {verb:<11} {what}\n" for verb, what in VERBS.items()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status: 2 for a mistake of the user's, which costs one line on stderr."""
    if argv is None and sys.platform != "win32":
        process.restart_in_utf8_mode()
        process.set_up_streams()
    process.use_utf8(sys.stdin, sys.stdout, sys.stderr)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return _flushed(0 if arguments else 2)
    if arguments[0] in ("-V", "--version"):
        packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax"))
        print(f"tfx-jax {__version__} ({packages}, Python {platform.python_version()})")
        return _flushed(0)
    if sys.platform == "win32":  # trainings lock their folder, and input is waited for, as POSIX does it
        print("tfx-jax: the command is for Linux and macOS: on Windows, run it in WSL", file=sys.stderr)
        return 2
    verb = arguments.pop(0)
    if verb not in VERBS:
        print(f"tfx-jax: unknown verb {verb!r}; there are {', '.join(VERBS)}", file=sys.stderr)
        return 2
    if sys.stdout is None:  # closed by who started this
        print(f"tfx-jax {verb}: standard output is closed", file=sys.stderr)
        return 2
    if argv is None:
        restart_with_large_pages()
    try:
        if sys.stdin is None:  # likewise: there is nothing to read
            sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives
        process.check_arguments(arguments)
        status = _module(verb).run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit:  # of `VERB --help`
        if status := _flushed(0):
            raise SystemExit(status) from None
        raise
    except BrokenPipeError:
        # Whoever read our output has had enough (`| head`). Python would complain once more when it flushes at exit.
        sys.stdout = None
        return 141
    except Exception as error:
        line = None if os.environ.get("TFX_JAX_TRACEBACK", "0") not in ("", "0") else _line(error)
        if isinstance(error, OSError) and not _can_flush_output():
            sys.stdout = None  # Python would complain again when it flushes at exit
            line = line and f"cannot write to standard output: {error.strerror or one_line(error)}"
        if argv is None:
            _end_within(5, status=1 if line is None else 2)
        if line is None:
            raise
        wipe = "\r\x1b[K" if sys.stderr.isatty() else ""  # a prompt, or how far it was
        print(f"{wipe}tfx-jax {verb}: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt goes on a line of its own
        return 130


def _module(verb: str) -> Any:
    """Imports the module of a verb.

    Raises:
      UserError: if JAX, which is imported with it, refuses a variable of the environment.
    """
    try:
        return importlib.import_module(f"tfx_jax.cli.{verb}")
    except ValueError as error:
        raise UserError(f"JAX cannot start ({one_line(error)}): correct or unset this variable (JAX_...)") from None


def _flushed(status: int) -> int:
    """Flushes standard output, which Python would do at exit with two lines of its own where that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout, status = None, 141
    except OSError as error:
        print(f"tfx-jax: cannot write to standard output: {error.strerror}", file=sys.stderr)
        sys.stdout, status = None, 2
    return status


def _can_flush_output() -> bool:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


def _end_within(seconds: float, *, status: int) -> None:
    """Ends the process after that time, if its threads keep it alive so long after an error.

    Those of Orbax do, for five minutes, when a store failed while a checkpoint was begun. What was saved is complete:
    `Checkpoints` has waited for it. Several processes that train leave by `abort_together`, and others wait for each
    other when they end.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        return

    def end() -> None:
        with contextlib.suppress(OSError, ValueError):  # no one reads it any more, or it is closed
            sys.stdout.flush()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _line(error: Exception) -> str | None:
    """The message of an error; None for a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if is_of_store(error):
        return f"a store cannot be reached ({one_line(error)}): run the same command again"
    if isinstance(error, OSError):  # a circumstance that no one thought of
        place = printable(str(error.filename)) if error.filename else "a file"
        told = error.strerror or one_line(error)
        return f"{place}: {told}; TFX_JAX_TRACEBACK=1 shows where that was met"
    reason = str(error).partition("\n")[0]
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in reason:
        return f"{printable(reason, 300)}: correct or unset the variables JAX_..., or free the device"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
        return f"out of memory ({printable(reason, 160) or 'no more to be had'}): give it less at once"
    return None
