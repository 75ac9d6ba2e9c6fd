"""`tfx-jax train`: kept short, so that a notebook can call `tfx_jax.training.loop.train` instead."""

import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfx_jax.cli.options import Parser, set_up_program
from tfx_jax.errors import UserError
from tfx_jax.training.config import ExperimentConfig, unknown_field
from tfx_jax.training.loop import train


def run(argv: Sequence[str]) -> int:
    """Trains; the exit status is 0, or 128 + the number of the signal that stopped it."""
    parser = Parser("train", "Trains an experiment, or goes on with one that was interrupted.")
    parser.add_argument("--config", required=True, help="experiment file, with :variant behind it if it has variants")
    parser.add_argument("--workdir", required=True, help="folder for checkpoints and logs, local or gs://")
    parser.epilog = "--config.FIELD=VALUE overrides a field, for example --config.model.num_layers=2"
    arguments, overrides = parser.parse_known_args(argv)
    set_up_program()
    result = train(load_config_file(arguments.config, overrides), arguments.workdir)
    return 0 if result.signum is None else 128 + result.signum


def load_config_file(config: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Calls `get_config(variant)` of an experiment file and applies `--config.field=value` overrides.

    Args:
      config: "experiments/file.py" or "experiments/file.py:variant".
      overrides: in the form of the command line.

    Raises:
      UserError: if the file, the variant or a field does not exist, or a value has the wrong type.
    """
    for override in overrides:
        if not override.startswith("--config."):
            raise UserError(f"unknown argument {override}; overrides have the form --config.FIELD=VALUE")
        if "=" not in override:
            raise UserError(f"{override} lacks its value: write {override}=VALUE")
    argv = ["tfx-jax", f"--config={config}", *overrides]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        values(argv)
        found: Any = values["config"].value
    except FileNotFoundError:
        raise UserError(f"{config.partition(':')[0]} does not exist; --config takes an experiment file") from None
    except (KeyError, AttributeError) as error:
        raise _unknown_field(error, overrides) from None
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    if not isinstance(found, ExperimentConfig):
        raise UserError(f"get_config of {config} returns a {type(found).__name__}, not an ExperimentConfig")
    return found


def _unknown_field(error: Exception, overrides: Sequence[str]) -> UserError:
    """Finds the override that named a field which does not exist."""
    from tfx_jax.training.config import flat

    known = flat(ExperimentConfig())
    for override in overrides:
        name = override.removeprefix("--config.").partition("=")[0]
        if name not in known:
            return unknown_field(name, ExperimentConfig())
    return UserError(" ".join(str(error).split()))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
