"""The command `tfx-jax VERB`: runs the module of the verb and prints errors as one line."""

import contextlib
import difflib
import importlib
import importlib.metadata
import os
import platform
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from tfx_jax import __version__
from tfx_jax.cli.support import process
from tfx_jax.cli.support.large_pages import restart_with_large_pages
from tfx_jax.errors import SOURCE, UserError, is_store_error, one_line, printable

VERBS = {
    "train": "train an experiment, or resume it",
    "experiments": "list the experiments, show one, or copy one to edit",
    "evaluate": "score a trained model: sacreBLEU, tokenized BLEU, exact match",
    "compare": "compare training runs: fields, losses, evaluations and their curves",
    "translate": "translate standard input, line by line",
    "generate": "continue each line of standard input with a language model, or answer it with an encoder-decoder",
    "predict": "answer standard input, line by line: labels, tags, answers, translations",
    "serve": "serve a model on this machine: a page, a JSON endpoint, OpenAI-style completions",
    "transcribe": "transcribe the speech in WAV files",
    "average": "average the newest checkpoints of a training run",
    "attend": "show the attention weights for a text, a pair of texts, an image or a record of events",
    "convert": "rewrite a Hugging Face folder as one weights file in a chosen dtype, or export a trained model",
    "export": "write a model as programs for CPUs, GPUs and TPUs that run without tfx_jax",
    "prepare": "download and build a TFDS translation data set, such as WMT14",
    "bench": "measure training, decoding, an attention or the input pipeline on this machine",
    "check-attention": "compare any attention function, yours or a library's, with the formula on 94 cases",
    "plan": "predict, without the accelerators, whether a training run fits on TPUs or GPUs and how long it takes",
    "launch": "run a verb on several processes, a TPU slice or a cluster",
    "completion": "print the script with which bash, zsh or tcsh completes verbs, options and experiments",
}

_USAGE = (
    "usage: tfx-jax VERB [options]; tfx-jax help VERB lists the options of a verb; tfx-jax --version\n\n"
    + "".join(f"  {verb:<15} {summary}\n" for verb, summary in VERBS.items())
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status.

    0 means success, 2 a mistake of the user (explained in one line on stderr), 130 an interrupt, 141 a closed pipe and
    143 SIGTERM; a verb may define others.
    """
    if argv is None and sys.platform != "win32":
        process.restart_in_utf8_mode()
        process.set_up_streams()
    process.use_utf8(sys.stdin, sys.stdout, sys.stderr)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _flush(0 if arguments else 2, _USAGE)
    if arguments[0] in ("-V", "--version"):
        names = ("jax", "jaxlib", "flax") if find_spec("flax") else ("jax", "jaxlib")
        packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
        return _flush(0, f"tfx-jax {__version__} ({packages}, Python {platform.python_version()})\n")
    if sys.platform == "win32":  # the workdir's lock and `select` on standard input need POSIX
        print("tfx-jax: the command is for Linux and macOS: on Windows, run it in WSL", file=sys.stderr)
        return 2
    verb = arguments.pop(0)
    if verb not in VERBS:
        similar = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"use one of {', '.join(VERBS)}"
        print(f"tfx-jax: unknown verb {printable(verb)!r}; {hint}", file=sys.stderr)
        return 2
    if sys.stdout is None:  # the parent process closed it
        print(f"tfx-jax {verb}: standard output is closed", file=sys.stderr)
        return 2
    if argv is None:
        restart_with_large_pages()
        process.end_on_signals(verb)
    try:
        if sys.stdin is None:  # closed by the parent process: read an empty file instead
            sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives
        process.check_arguments(arguments)
        status = _module(verb).run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit:  # raised by `VERB --help`
        if status := _flush(0):
            raise SystemExit(status) from None
        raise
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Python would report the error again when it flushes at exit.
        sys.stdout = None
        return 141
    except Exception as error:
        wants_traceback = os.environ.get("TFX_JAX_TRACEBACK", "0") not in ("", "0")
        line = None if wants_traceback else _line(error)  # None: the error is raised with its traceback
        if isinstance(error, OSError) and error.filename == process.STANDARD_OUTPUT:
            sys.stdout = None  # Python would report the error again when it flushes at exit
            if line is not None:  # None: the traceback was asked for
                line = f"cannot write to standard output: {error.strerror or one_line(error)}"
        if argv is None:
            _end_within(5, status=1 if line is None else 2)
        if line is None:
            raise
        wipe = "\r\x1b[K" if sys.stderr.isatty() else ""  # wipes a prompt or the progress line
        print(f"{wipe}tfx-jax {verb}: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # so that the shell's prompt starts a new line
        return 130


def _module(verb: str) -> Any:
    """Imports the module of a verb.

    Raises:
      UserError: if importing JAX fails because an environment variable (JAX_...) has an invalid value.
    """
    try:
        return importlib.import_module(f"tfx_jax.cli.{verb.replace('-', '_')}")
    except ValueError as error:
        raise UserError(
            f"JAX cannot start ({one_line(error)}): correct or unset the environment variable JAX_... of this message"
        ) from None


def _flush(status: int, text: str = "") -> int:
    """Writes `text`, flushes standard output and returns `status`, or that of the failure: 141 (closed pipe) or 2.

    Without this, Python would flush at exit and report a failure in two lines of its own.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout, status = None, 141
    except OSError as error:
        print(f"tfx-jax: cannot write to standard output: {error.strerror}", file=sys.stderr)
        sys.stdout, status = None, 2
    return status


def _end_within(seconds: float, *, status: int) -> None:
    """Exits with `status` after `seconds` if background threads still keep the process alive after an error.

    Orbax's threads do so for five minutes when a store fails at the start of a checkpoint. Saved checkpoints are
    complete, because `Checkpoints` waited for them. Does nothing in a run of several processes: those exit by
    `abort_together`, or wait for each other at exit.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        return

    def end() -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            sys.stdout.flush()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _line(error: Exception) -> str | None:
    """Returns the one-line message of an error the user can fix; None for any other, which is a bug of tfx_jax."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "tfx_jax").partition(".")[0]
        if package == "tfx_jax" or find_spec(package):  # a mistake in an import
            return None
        return (
            f"needs the package {package}, which is not installed. With jax and jaxtyping alone only check-attention "
            f'works; what the other commands need is installed by: pip install "tfx-jax @ {SOURCE}"'
        )
    if is_store_error(error):
        return f"a remote store cannot be reached ({one_line(error)}): check the network and rerun the same command"
    if isinstance(error, OSError):  # a file error that no other code has explained
        file = printable(str(error.filename)) if error.filename else "a file"
        reason = error.strerror or one_line(error)
        return f"{file}: {reason}; set TFX_JAX_TRACEBACK=1 to see the traceback"
    reason = str(error).partition("\n")[0]
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in reason:
        return f"{printable(reason, 300)}: correct or unset the variables JAX_..., or free the device"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
        return f"out of memory ({printable(reason, 160) or 'on the host'}): use a smaller batch or shorter inputs"
    return None
