"""`--config.FIELD=VALUE`: fields of a configuration that a command line changes."""

from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfx_jax.errors import UserError
from tfx_jax.training.config import ExperimentConfig, flat, unknown_field

OVERRIDES_HELP = "--config.FIELD=VALUE overrides a field, for example --config.model.num_layers=2"


def override(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """Applies overrides in the form of the command line.

    Raises:
      UserError: if an argument is no override, a field does not exist, or a value has the wrong type.
    """
    for argument in overrides:
        name, equals, _ = argument.removeprefix("--config.").partition("=")
        if not argument.startswith("--config."):
            raise UserError(f"unknown argument {argument}; overrides have the form --config.FIELD=VALUE")
        if not equals:
            raise UserError(f"{argument} lacks its value: write {argument}=VALUE")
        if name not in flat(config):
            raise unknown_field(name, config)
    argv = ["tfx-jax", *overrides]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dataclass("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    changed: Any = values["config"].value
    return changed
