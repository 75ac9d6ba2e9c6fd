"""`tfx-jax train`: kept short, so that a notebook can call `tfx_jax.training.loop.train` instead."""

import pathlib
import runpy
import traceback
from collections.abc import Sequence

from tfx_jax.arguments import Parser, folder
from tfx_jax.cli.experiments import experiment_file
from tfx_jax.cli.support.fields_help import fields_help
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.support.overrides import OVERRIDES_HELP, override
from tfx_jax.errors import UserError
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.loop import train
from tfx_jax.training.reporting.profiling import parse_steps
from tfx_jax.training.sharding.distributed import initialize_from_env

CONFIG_HELP = (
    "experiment by name (tfx-jax experiments) or file, with :variant behind it if it has variants; a file is executed "
    "as Python code"
)


def run(argv: Sequence[str]) -> int:
    """Trains; the exit status is 0, 128 + the number of the signal that stopped it, or 75 after a hang.

    129 (SIGHUP), 130 (SIGINT), 143 (SIGTERM) and 75 mean that the same command, rerun, resumes.
    """
    parser = Parser("train", "Trains an experiment, or resumes an interrupted run.")
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument("--workdir", type=folder, help="folder for checkpoints and logs, local or gs://")
    parser.add_argument("--print-config", action="store_true", help="print all fields with their meanings, and no more")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, where nothing tells (Cloud TPU, Slurm do)")
    parser.add_argument("--num-processes", type=int, help="how many processes train together")
    parser.add_argument("--process-id", type=int, help="which of them this is, from 0")
    parser.add_argument("--profile", metavar="START:STOP", help="trace steps START to STOP - 1 into WORKDIR/profile")
    parser.epilog = OVERRIDES_HELP
    arguments, overrides = parser.parse_known_args(argv)
    set_up_program()
    config = load_config_file(arguments.config, overrides)
    if arguments.print_config:
        print(fields_help(config))
        return 0
    if arguments.workdir is None:
        raise UserError("--workdir is missing: the folder for checkpoints and logs, or --print-config to train nothing")
    profile = None if arguments.profile is None else parse_steps(arguments.profile, config.num_steps)
    initialize_from_env(arguments.coordinator, arguments.num_processes, arguments.process_id)
    result = train(config, arguments.workdir, profile=profile)
    return 0 if result.signum is None else 128 + result.signum


def load_config_file(config: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Calls `get_config(variant)` of an experiment and applies `--config.field=value` overrides.

    Args:
      config: "transformer_demo" or "transformer_demo:test", or the same with the path of a file.
      overrides: in the form of the command line.

    Raises:
      UserError: if the experiment, the variant or a field does not exist, or a value has the wrong type.
    """
    return override(_call_get_config(config), overrides)


def _call_get_config(config: str) -> ExperimentConfig:
    name, _, variant = config.partition(":")
    path = experiment_file(name)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
    except Exception as error:
        raise _broken(path, error) from None
    if get_config is None:
        raise UserError(f"{path} defines no get_config(variant): it is not an experiment file")
    try:
        found = get_config(variant) if variant else get_config()
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:
        raise _broken(path, error) from None
    if not isinstance(found, ExperimentConfig):
        raise UserError(f"get_config of {path} returns a {type(found).__name__}, not an ExperimentConfig")
    return found


def _broken(path: pathlib.Path, error: Exception) -> UserError:
    """The error for an experiment file that raises another, at its last line that did."""
    if isinstance(error, SyntaxError):
        return UserError(f"{path}, line {error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f", line {lines[-1]}" if lines else ""
    return UserError(f"{path}{place}: {type(error).__name__}: {' '.join(str(error).split())}")
