"""`tfx-jax train`: trains an experiment; in a notebook, call `tfx_jax.training.loop.train` instead."""

import pathlib
import runpy
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import yaml
from etils import epath

from tfx_jax.arguments import Parser, folder
from tfx_jax.cli.experiments import experiment_file, experiment_files
from tfx_jax.cli.support.fields_help import fields_help
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.support.overrides import OVERRIDES_HELP, override
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json, read_small_file
from tfx_jax.training.config import ExperimentConfig, config_of_fields
from tfx_jax.training.loop import train
from tfx_jax.training.reporting.loggers import LOGGERS
from tfx_jax.training.reporting.profiling import parse_steps
from tfx_jax.training.sharding.distributed import initialize_from_env

CONFIG_HELP = (
    "name of an experiment (tfx-jax experiments lists them) or path of its .py file, which is executed as Python code, "
    "followed by :VARIANT if it has variants; or a .json, .toml or .yaml file of fields, such as WORKDIR/config.json"
)


def run(argv: Sequence[str]) -> int:
    """Trains and returns the exit status: 0, or 128 + the number of the signal that stopped it; a hang exits with 75.

    After 129 (SIGHUP), 130 (SIGINT), 143 (SIGTERM) and 75, rerunning the same command resumes the run.
    """
    parser = Parser("train", "Trains an experiment, or resumes an interrupted run.")
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument("--workdir", type=folder, help="folder for checkpoints and logs, local or gs://")
    parser.add_argument("--print-config", action="store_true", help="print all fields with their meanings and exit")
    parser.add_argument(
        "--coordinator",
        help="several processes: HOST:PORT of process 0; Cloud TPU and Slurm set it automatically",
    )
    parser.add_argument("--num-processes", type=int, help="several processes: number of processes")
    parser.add_argument("--process-id", type=int, help="several processes: index of this process, from 0")
    parser.add_argument(
        "--profile", metavar="START:STOP", help="write a trace of steps START to STOP - 1 to WORKDIR/profile"
    )
    parser.add_argument(
        "--logger",
        choices=tuple(LOGGERS),
        help="also log to Weights & Biases or MLflow, which their own environment variables configure",
    )
    parser.epilog = OVERRIDES_HELP
    arguments, overrides = parser.parse_known_args(argv)
    set_up_program()
    config = load_config_file(arguments.config, overrides)
    if arguments.print_config:
        print(fields_help(config))
        return 0
    if arguments.workdir is None:
        raise UserError(
            "--workdir is missing: give a folder for checkpoints and logs, or --print-config to print the fields only"
        )
    if sys.stderr.isatty():  # in a log, the steps and errors stay the only lines
        print(f"training {arguments.config} in {arguments.workdir}", file=sys.stderr, flush=True)
    profile = None if arguments.profile is None else parse_steps(arguments.profile, config.num_steps)
    initialize_from_env(
        coordinator_address=arguments.coordinator,
        num_processes=arguments.num_processes,
        process_id=arguments.process_id,
    )
    if sys.stderr.isatty():
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        print(f"reading the data, to train on {devices}", file=sys.stderr, flush=True)
    result = train(config, arguments.workdir, profile=profile, logger=arguments.logger)
    return 0 if result.signum is None else 128 + result.signum


def load_config_file(config: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Calls `get_config(variant)` of an experiment and applies `--config.field=value` overrides.

    Args:
      config: name of an experiment, such as "transformer_demo" or "transformer_demo:test" (with its variant), or the
        path of a `.py` file in its place; or a `.json`, `.toml` or `.yaml` file, which holds the fields of a
        configuration, as `config.json` of a workdir does, or the name of an experiment of tfx_jax as "experiment" and
        the fields that differ from it. Such a file executes no code of its author.
      overrides: flags of the form `--config.field=value`.

    Raises:
      UserError: if the experiment, the variant, the file or a field does not exist, or a value has the wrong type.
    """
    if epath.Path(config).suffix in _READERS:
        return _read_fields(epath.Path(config), overrides)
    return override(_call_get_config(config), overrides)


_READERS: dict[str, Callable[[str], Any]] = {
    ".json": parse_json,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def _read_fields(path: epath.Path, overrides: Sequence[str]) -> ExperimentConfig:
    """Reads a configuration from a file of fields and applies overrides; see `load_config_file`.

    Raises:
      UserError: if the file cannot be read, or a field does not exist or has an impossible value.
    """
    try:
        values = _READERS[path.suffix](read_small_file(path).decode("utf-8-sig"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not fields")
        config = None if "experiment" in values else config_of_fields(values)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    if config is not None:
        return override(config, overrides)
    experiment = str(values.pop("experiment"))
    file_overrides = list(_flags(values))
    try:
        is_ours = experiment_file(experiment.partition(":")[0]) in experiment_files().values()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not is_ours:  # a file of fields may come from anyone
        raise UserError(
            f"{path}: experiment={experiment} is a Python file, which a file of fields does not execute: write the "
            f"name of an experiment of tfx-jax, or --config={experiment}"
        )
    try:  # together: a validation file of one belongs to a training file of the other
        return override(_call_get_config(experiment), [*file_overrides, *overrides])
    except UserError:
        # If the fields of the file alone are wrong, name the file in the message.
        try:
            override(_call_get_config(experiment), file_overrides)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        raise


def _flags(values: Mapping[str, Any], prefix: str = "--config.") -> Iterator[str]:
    """Yields nested fields as overrides, such as "--config.model.num_layers=2"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flags(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            value = tuple(cast(list[Any], value)) if isinstance(value, list) else value  # fields have tuples
            yield f"{prefix}{name}={value}"


def _call_get_config(config: str) -> ExperimentConfig:
    """Executes the file of an experiment, "NAME" or "NAME:VARIANT", and returns the result of its `get_config`.

    Raises:
      UserError: if there is no such file or function, or it raises an error.
    """
    name, _, variant = config.partition(":")
    path = experiment_file(name)
    if path.suffix != ".py":
        raise UserError(
            f"{path} is not a .py file: experiments are Python files, which are executed; fields are read from .json, "
            ".toml and .yaml files"
        )
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
    except Exception as error:
        raise _broken(path, error) from None
    if get_config is None:
        raise UserError(f"{path} defines no get_config(variant): write that function or name another file")
    try:
        result = get_config(variant) if variant else get_config()
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:
        raise _broken(path, error) from None
    if not isinstance(result, ExperimentConfig):
        raise UserError(f"get_config of {path} must return an ExperimentConfig, got a {type(result).__name__}")
    return result


def _broken(path: pathlib.Path, error: Exception) -> UserError:
    """Returns a UserError that names the experiment file, the last of its lines in the traceback, and the error."""
    if isinstance(error, SyntaxError):
        return UserError(f"{path}, line {error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = f", line {lines[-1]}" if lines else ""
    return UserError(f"{path}{line}: {type(error).__name__}: {' '.join(str(error).split())}")
