"""Overrides of configuration fields on the command line: `--config.FIELD=VALUE`."""

import functools
import logging
import typing
from collections.abc import Collection, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfx_jax.errors import UserError
from tfx_jax.tasks.files import FROM_FILES
from tfx_jax.training.config import ExperimentConfig, flat, unknown_field

OVERRIDES_HELP = "--config.FIELD=VALUE overrides a field, for example --config.model.num_layers=2"


def override(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """Applies overrides of the form `--config.FIELD=VALUE`; "None" is a value of fields that may be None.

    Raises:
      UserError: if an argument does not have this form, a field does not exist, or a value has the wrong type.
    """
    last: dict[str, str] = {}  # the last override of each field
    for argument in overrides:
        name, equals, _ = argument.removeprefix("--config.").partition("=")
        if not argument.startswith("--config."):
            raise UserError(f"unknown argument {argument}; overrides have the form --config.FIELD=VALUE")
        if not equals:
            raise UserError(f"{argument} has no value: write {argument}=VALUE")
        if name not in flat(config):
            raise unknown_field(name, config)
        last[name] = argument
    none_fields = [name for name, argument in last.items() if argument.endswith("=None") and _may_be_none(config, name)]
    argv = ["tfx-jax", *(argument for name, argument in last.items() if name not in none_fields)]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dataclass("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        message = message.replace("invalid literal for int() with base 10:", "must be a whole number, got")
        raise UserError(message.replace("could not convert string to float:", "must be a number, got")) from None
    changed: Any = values["config"].value
    for name in none_fields:
        owner, field = _owner(changed, name)
        setattr(owner, field, None)
    _hold_out(changed, last)
    return changed


_HELD_OUT = {"validation_share": 0.1, "validation_pairs": 500}  # fields of data, and what they become in `_hold_out`


def _hold_out(config: ExperimentConfig, overridden: Collection[str]) -> None:
    """Drops the experiment's validation file if only a training file is named: it belongs to other training data.

    Where the data can hold out training examples for validation, it does, unless they are a mixture of files. If only a
    validation file is named, none are held out: `train` may have written that share into config.json.
    """
    data = config.task.data
    if getattr(data, "dataset", "files") not in FROM_FILES:  # `check_dataset` refuses the files
        return
    held_out = {} if getattr(config.task, "mixture", ()) else _HELD_OUT
    for kind in ("file", "source", "folder"):
        shares = {f"task.data.{name}" for name in _HELD_OUT}
        is_named = f"task.data.validation_{kind}" in overridden and bool(getattr(data, f"validation_{kind}"))
        if is_named and not shares & set(overridden):
            for name in _HELD_OUT:
                if hasattr(data, name):
                    setattr(data, name, 0)
        files = {f"task.data.validation_{end}" for end in (kind, "target")}
        if f"task.data.train_{kind}" not in overridden or files & set(overridden):
            continue
        for name in (f"validation_{kind}", "validation_target"):
            if hasattr(data, name):
                setattr(data, name, "")
        for name, value in held_out.items():
            if getattr(data, name, None) == 0 and f"task.data.{name}" not in overridden:
                setattr(data, name, value)
                logging.warning(
                    "no validation_%s is named: training examples are held out, config.task.data.%s=%s",
                    *(kind, name, value),
                )


def _owner(config: Any, name: str) -> tuple[Any, str]:
    """Returns the pair (dataclass that contains the field with this dotted path, name of the field in it)."""
    *owners, field = name.split(".")
    return functools.reduce(getattr, owners, config), field


def _may_be_none(config: Any, name: str) -> bool:
    """Returns whether the annotation of the field with this dotted path allows None."""
    owner, field = _owner(config, name)
    return type(None) in typing.get_args(typing.get_type_hints(type(owner))[field])
