"""`--config.FIELD=VALUE`: fields of a configuration that a command line changes."""

import functools
import typing
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfx_jax.errors import UserError
from tfx_jax.training.config import ExperimentConfig, flat, unknown_field

OVERRIDES_HELP = "--config.FIELD=VALUE overrides a field, for example --config.model.num_layers=2"


def override(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """Applies overrides in the form of the command line; `None` is a value of fields that may be None.

    Raises:
      UserError: if an argument is no override, a field does not exist, or a value has the wrong type.
    """
    given: dict[str, str] = {}  # by field: of several the last
    for argument in overrides:
        name, equals, _ = argument.removeprefix("--config.").partition("=")
        if not argument.startswith("--config."):
            raise UserError(f"unknown argument {argument}; overrides have the form --config.FIELD=VALUE")
        if not equals:
            raise UserError(f"{argument} lacks its value: write {argument}=VALUE")
        if name not in flat(config):
            raise unknown_field(name, config)
        given[name] = argument
    nothing = [name for name, argument in given.items() if argument.endswith("=None") and _may_be_none(config, name)]
    argv = ["tfx-jax", *(argument for name, argument in given.items() if name not in nothing)]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dataclass("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    changed: Any = values["config"].value
    for name in nothing:
        part, field = _place(changed, name)
        setattr(part, field, None)
    return changed


def _place(config: Any, name: str) -> tuple[Any, str]:
    """The dataclass in which the field with this path is, and what it is called there."""
    *parts, field = name.split(".")
    return functools.reduce(getattr, parts, config), field


def _may_be_none(config: Any, name: str) -> bool:
    part, field = _place(config, name)
    return type(None) in typing.get_args(typing.get_type_hints(type(part))[field])
