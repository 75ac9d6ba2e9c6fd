"""Experiment configuration: plain dataclasses, read from and written to `config.json`, and checked."""

import dataclasses
import difflib
import re
import typing
from typing import Any, cast

from etils import epath

from tfx_jax import models, tasks
from tfx_jax.errors import UserError, one_line, printable
from tfx_jax.fields import at_least, check_fields, documented, fraction, one_of, within
from tfx_jax.files import check_store
from tfx_jax.models.config import ModelConfig, SelfAttentionConfig, check_pattern
from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.nn.lora import LoraConfig
from tfx_jax.nn.moe import ExpertsConfig
from tfx_jax.tasks.task import TaskConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.checkpoint.artifacts import read_sealed, write_sealed
from tfx_jax.training.workdir import find_workdir


@documented
@dataclasses.dataclass
class OptimizerConfig:
    """By default Adam as in section 5.3 of the paper."""

    name: str = one_of(("adam", "adamw", "adafactor"), "adam")
    # After the warm-up; "cosine" and "linear" go down to the end of the training.
    schedule: str = one_of(("inverse_sqrt", "cosine", "linear"), "inverse_sqrt")
    final_fraction: float = fraction(0.0)  # of the peak, where "cosine" and "linear" end
    warmup_steps: int = at_least(1, 4_000)
    peak_learning_rate: float | None = at_least(
        0, None
    )  # None: (d_model * warmup_steps)^-0.5; of Adafactor, warmup_steps^-0.5
    b1: float = fraction(0.9)  # this and the next two: of Adam and AdamW
    b2: float = fraction(0.98)
    epsilon: float = at_least(0, 1e-9)
    weight_decay: float = at_least(0, 0.0)  # of AdamW and Adafactor, times the learning rate; not of biases and gains
    clip_norm: float = at_least(0, 0.0)  # a gradient with a larger norm over all parameters is scaled to it; 0: never


@documented
@dataclasses.dataclass
class MeshConfig:
    """How many devices share what; the product is at most the number of devices, which several processes all take."""

    data: int = at_least(
        -1, -1
    )  # rows of a batch, each device with the whole model; -1: all devices that the others leave
    fsdp: int = at_least(1, 1)  # rows of a batch, and the parameters, which are gathered layer by layer
    expert: int = at_least(1, 1)  # rows of a batch, and the experts of a mixture
    sequence: int = at_least(1, 1)  # positions of a sequence, by ring attention
    tensor: int = at_least(1, 1)  # heads, hidden units and vocabulary


@documented
@dataclasses.dataclass
class ExperimentConfig:
    """Everything a run depends on: a model, a task that it can be trained on, and how."""

    model: ModelConfig = dataclasses.field(default_factory=TransformerConfig)
    task: TaskConfig = dataclasses.field(default_factory=TranslationConfig)
    init_from: str = ""  # a training's workdir or Hugging Face folder, whose tokenizer, sizes and parameters are taken
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    frozen: str = ""  # regular expression that occurs in the paths of parameters that stay as they are; empty: none
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    accumulate: int = at_least(1, 1)  # parts of a batch that are worked through one after the other, to save memory
    # At a step that is not finite, or a spike: the run stops, or the step is left out and the run goes on.
    bad_steps: str = one_of(("stop", "skip"), "stop")
    spike_factor: float = 0.0  # a spike is a loss this many times its running mean; 0: nothing is
    num_steps: int = at_least(1, 100_000)
    seed: int = within(0, 2**32 - 1, 0)  # of parameters, batches and dropout
    log_every: int = at_least(1, 50)  # steps between lines and TensorBoard points
    checkpoint_every: int = at_least(1, 1_000)
    eval_every: int = at_least(0, 0)  # steps between evaluations on the validation split; 0: only after the last step
    patience: int = at_least(0, 0)  # evaluations without a better score before training stops; 0: never
    keep_last: int = at_least(1, 5)  # newest checkpoints kept, and averaged by `tfx-jax average` unless told otherwise
    keep_best: int = at_least(0, 1)  # checkpoints of the best validation scores kept besides
    keep_every: int = at_least(0, 0)  # checkpoints of steps that are a multiple of it stay for ever; 0: none
    # A step that takes longer (more than compiling does) ends the process; 0: never.
    hang_seconds: float = at_least(0, 1_800.0)


# What may differ between two runs in one workdir: how long, how visibly, how carefully and on which devices, but not
# what is trained.
_CHANGEABLE = {
    "num_steps",
    "log_every",
    "checkpoint_every",
    "eval_every",
    "patience",
    "keep_last",
    "keep_best",
    "keep_every",
    "hang_seconds",
    "task.decoding",
    "mesh",
    "model.remat",
    "model.unroll",
    "accumulate",
    "bad_steps",
    "spike_factor",
}


def tiny_variant(config: ExperimentConfig) -> ExperimentConfig:
    """Turns any experiment into its `test` variant: seconds on one CPU, on built-in data, saving often."""
    config.task.tiny()
    config.model.tiny(max_length=config.task.data.max_length)
    config.init_from, config.lora = "", LoraConfig()
    config.num_steps, config.checkpoint_every, config.eval_every, config.log_every = 6, 2, 0, 2
    return config


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Lists every leaf of nested dataclasses by its dotted name."""
    leaves = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= flat(value, f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = value
    return leaves


def unknown_field(name: str, config: Any) -> UserError:
    """Makes the error for an override of a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, flat(config), n=1, cutoff=0.4)
    hint = f"; did you mean config.{near[0]}?" if near else ""
    return UserError(f"config has no field {name}{hint}")


def save_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Writes `config.json`, or checks that the one that is there describes the same experiment.

    Raises:
      UserError: if the workdir belongs to another experiment; the message names the fields that differ.
    """
    path = workdir / "config.json"
    if path.exists():
        saved, wanted = _described(load_config(workdir)), _described(config)
        may_change = _CHANGEABLE
        if config.optimizer.schedule in ("cosine", "linear"):  # every step's learning rate depends on the last step
            may_change = may_change - {"num_steps"}
        changed = [
            f"{name}={saved.get(name)!r}, not {wanted[name]!r}"
            for name in wanted
            if saved.get(name) != wanted[name] and not any(f"{name}.".startswith(f"{may}.") for may in may_change)
        ]
        if changed:
            raise UserError(f"{workdir} was made with {'; '.join(changed)}: take another --workdir")
    write_sealed(path, _to_dict(config))


def check_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Checks that another process, with this configuration, has called `save_config` on the same folder.

    Raises:
      UserError: if there is none, or another configuration.
    """
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir} has no config.json, which process 0 has just written: the folder must be shared")
    saved, wanted = _described(load_config(workdir)), _described(config)
    changed = [
        f"{name}={wanted[name]!r}, not {saved.get(name)!r}" for name in wanted if saved.get(name) != wanted[name]
    ]
    if changed:
        raise UserError(f"this process was started with {'; '.join(changed)} as process 0 was")


def load_config(workdir: epath.PathLike) -> ExperimentConfig:
    """Reads what `save_config` wrote.

    Raises:
      UserError: if there is none, or it cannot be read.
    """
    path = find_workdir(workdir) / "config.json"
    if not path.exists():
        raise UserError(f"{workdir} has no config.json: it is not the --workdir of a training")
    try:
        return _from_dict(ExperimentConfig, read_sealed(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged or from another version ({error}): put back a copy, or delete it and run the "
            "training's command again, which writes it"
        ) from None


def _described(config: ExperimentConfig) -> dict[str, Any]:
    """The leaves of a configuration, and the classes of its model, its task and the task's data."""
    parts = {"model": config.model, "task": config.task, "task.data": config.task.data}
    return {name: type(part).__name__ for name, part in parts.items()} | flat(config)


def _to_dict(config: Any) -> dict[str, Any]:
    """What JSON can hold; "class" names the class of a part, where the field does not say it."""
    hints, values = typing.get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            kind = type(value)
            told = {} if hints[field.name] is kind else {"class": _public_name(kind)}
            value = told | _to_dict(value)
        values[field.name] = value
    return values


def _from_dict(kind: Any, values: Any, path: str = "config") -> Any:
    """Makes the part of a configuration at `path`; its own parts have the class of the default, unless they name one.

    Raises:
      ValueError: if there is no such part, field or class; the message names it.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be an object with fields, got {printable(repr(values), 100)}")
    default, found, fields = kind(), dict[str, Any](), {field.name for field in dataclasses.fields(kind)}
    for name, value in cast(dict[str, Any], values).items():
        if name not in fields:
            raise ValueError(f"{path} has no field {printable(name, 100)}")
        part: Any = getattr(default, name)
        if dataclasses.is_dataclass(part):
            own, others = type(part), value
            if isinstance(value, dict) and "class" in value:
                others = dict(cast(dict[str, Any], value))
                own = _class(others.pop("class"), f"{path}.{name}")
            found[name] = _from_dict(own, others, f"{path}.{name}")
        else:
            found[name] = tuple(cast(list[Any], value)) if isinstance(value, list) else value
    return kind(**found)


def _public_name(kind: type) -> str:
    """Returns the name of a class in `tfx_jax.models` or `tfx_jax.tasks`, so that its module may be moved."""
    package = models if getattr(models, kind.__name__, None) is kind else tasks
    return f"{package.__name__}.{kind.__name__}"


def _class(name: Any, path: str) -> Any:
    """Finds a configuration by its public name. The file may be anyone's, so it may name nothing else."""
    match = re.fullmatch(r"tfx_jax\.(models|tasks)\.([A-Z]\w*)", name) if isinstance(name, str) else None
    found = match and getattr({"models": models, "tasks": tasks}[match[1]], match[2], None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        shown = printable(repr(name), 100)
        raise ValueError(f"{path}.class={shown} is not a configuration of tfx_jax.models or tfx_jax.tasks")
    return found


def validate(config: ExperimentConfig) -> ExperimentConfig:
    """Raises UserError for impossible settings; call it after command-line overrides."""
    check_fields(config)
    _check_model(config)
    config.task.validate(config.model)
    _check_mesh(config)
    for folder in (config.init_from, getattr(getattr(config.task, "data", None), "data_dir", "")):
        check_store(folder)
    optimizer, every = config.optimizer, config.keep_every
    if optimizer.name == "adam" and optimizer.weight_decay:
        raise UserError('config.optimizer.weight_decay is not for "adam": choose config.optimizer.name="adamw"')
    if optimizer.schedule != "inverse_sqrt" and optimizer.peak_learning_rate is None:
        raise UserError(f'config.optimizer.schedule="{optimizer.schedule}" needs config.optimizer.peak_learning_rate')
    if config.lora.rank and not config.init_from:
        raise UserError("config.lora.rank needs config.init_from: adapters change a model that was trained before")
    if config.spike_factor and not config.spike_factor > 1:
        raise UserError(f"config.spike_factor must be 0 or above 1, got {config.spike_factor}")
    if every % config.checkpoint_every and (not config.eval_every or every % config.eval_every):
        raise UserError(
            f"config.keep_every={every} must be a multiple of checkpoint_every={config.checkpoint_every} or of "
            "eval_every: other steps are not saved"
        )
    return config


def load_valid_config(workdir: epath.PathLike) -> ExperimentConfig:
    """Reads the configuration of a workdir and checks it as `train` does, since the file may have been edited.

    Raises:
      UserError: as `load_config` and `validate`; the message names the file.
    """
    config = load_config(workdir)
    try:
        return validate(config)
    except UserError as error:
        raise UserError(f"{find_workdir(workdir) / 'config.json'}: {error}") from None


def _check_model(config: ExperimentConfig) -> None:
    """Whether the sizes fit each other, and there is such an attention, which the model and the task can have."""
    model = config.model
    try:
        model.validate()
        if isinstance(model, SelfAttentionConfig):
            drops = "attention_dropout_rate" if hasattr(model, "attention_dropout_rate") else "dropout_rate"
            model.attention.check(
                is_causal=model.is_causal,
                has_bias=model.has_position_bias,
                is_packed=getattr(config.task, "is_packed", False),
                is_float32=config.model.dtype == "float32",
                drops=drops if getattr(model, drops) else None,
                num_heads=model.num_heads,
                num_kv_heads=getattr(model, "num_kv_heads", None),
                d_k=getattr(model, "d_k", None) or config.model.d_model // model.num_heads,
            )
            check_pattern(model)
    except ValueError as error:
        field = re.match(r"\w*", str(error))
        dot = "." if field is not None and hasattr(model, field[0]) else ": "
        raise UserError(f"config.model{dot}{error}") from None


def _check_mesh(config: ExperimentConfig) -> None:
    """Whether the axes of the mesh divide what they are to divide."""
    model, mesh = config.model, config.mesh
    if not mesh.data:
        raise UserError("config.mesh.data must be at least 1, or -1 for all devices that the others leave, got 0")
    for axis, names in (("tensor", ("num_heads", "d_ff")), ("fsdp", ("d_model",))):
        for name in names:
            size = getattr(model, name, 0)  # 0: a model without, None: four times d_model
            if (4 * model.d_model if size is None else size) % max(getattr(mesh, axis), 1):
                raise UserError(f"config.mesh.{axis}={getattr(mesh, axis)} does not divide config.model.{name}={size}")
    experts: ExpertsConfig | None = getattr(model, "experts", None)
    if experts is not None and experts.num_experts % max(mesh.expert, 1):
        raise UserError(
            f"config.mesh.expert={mesh.expert} does not divide config.model.experts.num_experts={experts.num_experts}"
        )
    if mesh.sequence > 1:
        for part in (config.task, model):
            if not getattr(part, "can_shard_positions", False):
                raise UserError(
                    f"config.mesh.sequence={mesh.sequence} divides positions, which a {type(part).__name__} does not "
                    "allow: leave it at 1"
                )
        if isinstance(model, SelfAttentionConfig) and model.attention.name != "dense":
            raise UserError(
                f"config.mesh.sequence={mesh.sequence} divides positions, which {model.attention.name} attention does "
                "not allow: leave it at 1"
            )
