"""`tfx-jax experiments`: lists the experiments, prints the lab note of one, or copies its file."""

import ast
import difflib
import pathlib
from collections.abc import Sequence

import tfx_jax
from tfx_jax.arguments import Parser
from tfx_jax.errors import UserError

_MODELS = """# Hugging Face models

The architectures that `tfx_jax.models.hf.load` reads from folders or from the hub, and that `tfx_jax.models.hf.save`
and `tfx-jax convert` write. Parity tests compare each family with transformers, and `python -m benchmarks.hf_folders`
each architecture, with others that are refused: outputs within 1e-4 of their scale, padding on either side, the same
tokens where it generates, and parameters that come back bit for bit.

Of generation_config.json, ids of tokens are read: those that end an output or begin it, and of a Whisper those that may
not occur in it. Beams, sampling and penalties are options of `tfx_jax.generate` and of the commands, whatever the file
says of them.

`tfx-jax experiments --models > docs/hugging_face.md` writes this page.

{table}"""

_RESULT = "Result: "  # prefix of the line of a lab note that the list shows


def run(argv: Sequence[str]) -> int:
    """Lists all experiments, prints the note of one, copies one, or lists the Hugging Face models."""
    parser = Parser("experiments", "Lists the experiments that tfx-jax train --config=NAME takes, with their results.")
    parser.add_argument("name", nargs="?", help="experiment whose full lab note is printed")
    parser.add_argument(
        "--copy",
        metavar="NAME",
        help="copy the experiment's Python file, its configuration without data or checkpoints, to ./NAME.py; edit it, "
        "then train it: tfx-jax train --config=NAME.py --workdir=DIR",
    )
    parser.add_argument("--models", action="store_true", help="list the Hugging Face architectures that load and save")
    arguments = parser.parse_args(argv)
    if arguments.copy is not None and arguments.name is not None:
        raise UserError("give either NAME, to print its lab note, or --copy=NAME, not both")
    if arguments.models and (arguments.copy is not None or arguments.name is not None):
        raise UserError("--models lists Hugging Face models: omit NAME and --copy")
    if arguments.models:
        from tfx_jax.models import hf  # takes seconds, which the list of experiments does not need

        print(_MODELS.format(table=hf.supported()))
        return 0
    if arguments.copy is not None:
        target = copy_experiment(arguments.copy, pathlib.Path())
        print(f"wrote {target}; train it with tfx-jax train --config={target} --workdir=DIR")
    elif arguments.name is not None:
        print(lab_note(experiment_file(arguments.name)))
    else:
        files = experiment_files()
        width = max(map(len, files))
        for name, path in files.items():
            print(f"{name:<{width}}  {result(path)}")
    return 0


def experiment_files() -> dict[str, pathlib.Path]:
    """Returns the files of all experiments by name, from the installed wheel or the clone's folder `experiments`."""
    package = pathlib.Path(tfx_jax.__file__).parent
    installed = package / "_experiments"
    folder = installed if installed.is_dir() else package.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def experiment_file(name: str) -> pathlib.Path:
    """Returns the file of an experiment.

    Args:
      name: name of an experiment, such as "transformer_demo", or the path of a file (with a folder or ending in ".py").

    Raises:
      UserError: if there is no such experiment or file; the message suggests similar names.
    """
    files = experiment_files()
    path = pathlib.Path(name)
    if name in files:
        return files[name]
    if path.is_file():
        return path
    if path.suffix != ".py" and path.name == name:  # not the form of a path
        similar = [other for other in files if name in other] or difflib.get_close_matches(name, files, n=3)
        hint = (
            f"did you mean {' or '.join(similar)}?" if name and similar else "run tfx-jax experiments to list the names"
        )
        raise UserError(f"there is no experiment {name!r}: {hint}")
    hint = f"; write {path.stem} for the experiment of that name in tfx-jax" if path.stem in files else ""
    raise UserError(f"{name} does not exist{hint}")


def copy_experiment(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Copies the file of an experiment into a folder; an existing file is not overwritten.

    Raises:
      UserError: if there is no such experiment, or the file exists or cannot be written.
    """
    source = experiment_file(name)
    target = folder / source.name
    try:
        with target.open("xb") as file:
            file.write(source.read_bytes())
    except FileExistsError:
        raise UserError(f"{target} already exists: rename or delete it first") from None
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def lab_note(path: pathlib.Path) -> str:
    """Returns the docstring of an experiment file."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8-sig"))) or ""


def result(path: pathlib.Path) -> str:
    """Returns the line of the lab note that begins with "Result: ", without that prefix; "" if there is none."""
    lines = lab_note(path).splitlines()
    return next((line.removeprefix(_RESULT) for line in lines if line.startswith(_RESULT)), "")
