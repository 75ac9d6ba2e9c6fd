"""Experiment configuration: dataclasses, their checks, and their file `config.json`."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping
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
from tfx_jax.tasks.files import check_dataset, named_fields
from tfx_jax.tasks.task import TaskConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.checkpoint.artifacts import read_sealed, write_sealed
from tfx_jax.training.workdir import find_workdir


@documented
@dataclasses.dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule; the defaults are Adam as in section 5.3 of "Attention Is All You Need"."""

    name: str = one_of(("adam", "adamw", "adafactor", "lion", "sgd", "muon", "schedule_free"), "adam")
    # Shape of the learning rate after warm-up; "cosine" and "linear" decrease until num_steps.
    schedule: str = one_of(("inverse_sqrt", "cosine", "linear", "constant"), "inverse_sqrt")
    final_fraction: float = fraction(0.0)  # of the peak: learning rate at the end of "cosine" and "linear"
    warmup_steps: int = at_least(1, 4_000)  # steps of linear warm-up
    # Learning rate after warm-up; None: (d_model * warmup_steps)^-0.5, for Adafactor warmup_steps^-0.5.
    peak_learning_rate: float | None = at_least(0, None)
    # Adam, AdamW: decay of the first moment; Lion: its share in the update; SGD, Muon: momentum; schedule_free: share
    # of the average in the parameters.
    b1: float = fraction(0.9)
    b2: float = fraction(0.98)  # Adam, AdamW: decay of the second moment; Lion: decay of the first moment
    epsilon: float = at_least(0, 1e-9)  # Adam and AdamW: added to the denominator of the update
    # All but Adam and SGD: decoupled weight decay, multiplied by the learning rate; biases and scales are
    # exempt.
    weight_decay: float = at_least(0, 0.0)
    clip_norm: float = at_least(0, 0.0)  # gradients with a larger global norm are scaled down to it; 0: no clipping
    # Decay of an exponential moving average of the parameters, which evaluation, prediction and export use; 0: none.
    ema_decay: float = fraction(0.0)


@documented
@dataclasses.dataclass
class MeshConfig:
    """Sizes of the device mesh. Their product is at most the number of devices; several processes use all devices."""

    # Data parallelism: devices that share the examples of a batch, each with the whole model; -1: all remaining
    # devices.
    data: int = at_least(-1, -1)
    fsdp: int = at_least(1, 1)  # devices that share examples and parameters, which are gathered layer by layer
    expert: int = at_least(1, 1)  # devices that share examples and the experts of a mixture
    sequence: int = at_least(1, 1)  # devices that share the positions of a sequence (ring attention)
    tensor: int = at_least(1, 1)  # devices that share heads, hidden units and vocabulary


@documented
@dataclasses.dataclass
class ExperimentConfig:
    """Configuration of a run: model, task, optimizer, devices, checkpoints and evaluation."""

    model: ModelConfig = dataclasses.field(default_factory=TransformerConfig)
    task: TaskConfig = dataclasses.field(default_factory=TranslationConfig)
    init_from: str = ""  # workdir or Hugging Face folder that provides tokenizer, model sizes and initial parameters
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    frozen: str = ""  # regular expression; parameters whose paths contain a match are not trained; empty: all are
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    accumulate: int = at_least(1, 1)  # gradient accumulation: parts of a batch processed in turn to save memory
    # Reaction to a step with a non-finite loss or gradient, or a loss spike: stop the run, or skip the step and
    # continue.
    bad_steps: str = one_of(("stop", "skip"), "stop")
    spike_factor: float = 0.0  # a loss this many times its running mean is a spike; 0: no spike detection
    num_steps: int = at_least(1, 100_000)  # optimizer steps of the run
    seed: int = within(0, 2**32 - 1, 0)  # seed of initialization, batches and dropout
    log_every: int = at_least(1, 50)  # steps between log lines and TensorBoard points
    checkpoint_every: int = at_least(1, 1_000)  # steps between checkpoints
    eval_every: int = at_least(0, 0)  # steps between evaluations on the validation split; 0: only after the last step
    patience: int = at_least(0, 0)  # evaluations without a better score before training stops; 0: never
    keep_last: int = at_least(1, 5)  # newest checkpoints to keep; `tfx-jax average` averages them by default
    keep_best: int = at_least(0, 1)  # checkpoints with the best validation scores to keep in addition
    # Name of the metric whose validation score decides which checkpoint is best and when training stops early, such as
    # matthews_correlation; empty: the first metric of the task.
    best_metric: str = ""
    keep_every: int = at_least(0, 0)  # checkpoints at multiples of this step count are never deleted; 0: none
    # Seconds after which a step counts as hung and the process exits; must exceed the compilation time; 0: never.
    hang_seconds: float = at_least(0, 1_800.0)


# Fields that may differ between two runs in one workdir: duration, logging, checkpoints and devices, but nothing that
# changes what is learned.
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
    """Changes an experiment into its `test` variant: seconds on one CPU, built-in data, frequent checkpoints."""
    config.task.tiny()
    data = config.task.data
    for name in named_fields(data):  # of files, which built-in data do not read
        setattr(data, name, getattr(type(data), name))
    config.model.tiny(max_length=config.task.data.max_length)
    config.init_from, config.lora = "", LoraConfig()
    config.num_steps, config.checkpoint_every, config.log_every = 6, 2, 2
    config.eval_every, config.patience = 0, 0
    return config


def accelerator_variant(config: ExperimentConfig, *, batch_factor: int = 1) -> ExperimentConfig:
    """Changes an experiment for accelerators by `accelerator_settings`.

    Batches get `batch_factor` times as many tokens, and there are as many times fewer steps, also between checkpoints.
    """
    for name, value in accelerator_settings(config.model).items():
        setattr(config.model, name, value)
    config.task.data.tokens_per_batch *= batch_factor
    config.num_steps, config.checkpoint_every = (
        config.num_steps // batch_factor,
        config.checkpoint_every // batch_factor,
    )
    return config


def accelerator_settings(model: Any) -> dict[str, Any]:
    """Returns the fields of a model's configuration to change for faster steps on TPUs, and their values.

    These are bfloat16 instead of float32, and layers compiled one by one instead of as a loop; {} if the model has both
    already, or neither option.
    """
    settings = (("dtype", "float32", "bfloat16"), ("unroll", False, True))
    return {name: value for name, slow, value in settings if getattr(model, name, None) == slow}


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of all fields of nested dataclasses by dotted name, such as {"model.num_layers": 6}.

    `prefix` is put before each name.
    """
    leaves = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= flat(value, f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = value
    return leaves


def unknown_field(name: str, config: Any) -> UserError:
    """Returns the error for an override of a field that does not exist, with the field that is spelled alike, if any.

    Only the last part of the dotted name has to be alike: it is what users remember.
    """

    def last(path: str) -> str:
        return path.rpartition(".")[2]

    # First the most similar last part, then the most similar of the fields that end with it.
    similar_ends = difflib.get_close_matches(last(name), {last(path) for path in flat(config)}, n=1, cutoff=0.8)
    candidates = [path for path in flat(config) if similar_ends and last(path) == similar_ends[0]]
    suggestions = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    hint = f"; did you mean config.{suggestions[0]}?" if suggestions else "; --print-config prints all fields"
    return UserError(f"config has no field {name}{hint}")


def save_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Writes `config.json`, or checks that an existing one describes the same experiment.

    Raises:
      UserError: if the workdir belongs to another experiment; the message names the fields that differ.
    """
    path = workdir / "config.json"
    if path.exists():
        saved, expected = _described(load_config(workdir)), _described(config)
        may_change = _CHANGEABLE  # names of fields, or of dataclasses all of whose fields may change
        if config.optimizer.schedule in ("cosine", "linear"):  # their learning rate depends on num_steps at every step
            may_change = may_change - {"num_steps"}
        changed = [
            f"{name}={saved.get(name)!r}, not {expected[name]!r}"
            for name in expected
            if saved.get(name) != expected[name]
            and not any(f"{name}.".startswith(f"{changeable}.") for changeable in may_change)
        ]
        # Another class has other fields: their names say nothing more.
        classes = [entry for entry in changed if entry.startswith(("model=", "task=", "task.data="))]
        changed = classes or changed
        if changed:
            raise UserError(
                f"{workdir} was made with {'; '.join(changed)}: restore these values, or use another workdir"
            )
    write_sealed(path, _to_dict(config))


def check_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Checks in the other processes that `config.json`, written by process 0, describes the same configuration.

    Raises:
      UserError: if there is no file, or its configuration differs.
    """
    if not (workdir / "config.json").exists():
        raise UserError(
            f"{workdir} has no config.json, which process 0 has just written: --workdir must be on storage that all "
            "processes share"
        )
    saved, expected = _described(load_config(workdir)), _described(config)
    changed = [
        f"{name}={expected[name]!r}, not {saved.get(name)!r}" for name in expected if saved.get(name) != expected[name]
    ]
    if changed:
        raise UserError(
            f"this process was started with {'; '.join(changed)} as process 0 was: start all processes with the same "
            "configuration"
        )


def load_config(workdir: epath.PathLike) -> ExperimentConfig:
    """Reads the `config.json` of a workdir.

    Raises:
      UserError: if there is none, or it cannot be read.
    """
    path = find_workdir(workdir) / "config.json"
    if not path.exists():
        raise UserError(f"{workdir} has no config.json: it is not the --workdir of a run")
    try:
        return _from_dict(ExperimentConfig, read_sealed(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged or from another version ({error}): restore a copy, or delete it and rerun the training "
            "command, which writes it"
        ) from None


def config_of_fields(values: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the configuration with these fields, nested as in `config.json`; others have their defaults.

    A checksum, "sha256", is ignored: the fields may have been edited on purpose.

    Raises:
      ValueError: if a field or class does not exist, or a value is not an object; the message names it.
    """
    return _from_dict(ExperimentConfig, {name: value for name, value in values.items() if name != "sha256"})


def _described(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the leaves of a configuration, and the class names of its model, its task and the task's data."""
    parts = {"model": config.model, "task": config.task, "task.data": config.task.data}
    return {name: type(part).__name__ for name, part in parts.items()} | flat(config)


def _to_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration as JSON values; "class" names the class of a nested one if its field allows several."""
    hints = typing.get_type_hints(type(config))
    values = {}
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            kind = type(value)
            class_entry = {} if hints[field.name] is kind else {"class": _public_name(kind)}
            value = class_entry | _to_dict(value)
        values[field.name] = value
    return values


def _from_dict(kind: Any, values: Any, path: str = "config") -> Any:
    """Builds the configuration at `path`. Nested ones have the class of the default, unless "class" names another.

    Raises:
      ValueError: if a field or class does not exist, or a value is not an object; the message names it.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be an object with fields, got {printable(repr(values), 100)}")
    default = kind()
    arguments: dict[str, Any] = {}
    fields = {field.name for field in dataclasses.fields(kind)}
    for name, value in cast(dict[str, Any], values).items():
        if name not in fields:
            raise ValueError(f"{path} has no field {printable(name, 100)}")
        default_value: Any = getattr(default, name)
        if dataclasses.is_dataclass(default_value):
            nested_kind, nested_values = type(default_value), value
            if isinstance(value, dict) and "class" in value:
                nested_values = dict(cast(dict[str, Any], value))
                nested_kind = _class(nested_values.pop("class"), f"{path}.{name}")
            arguments[name] = _from_dict(nested_kind, nested_values, f"{path}.{name}")
        else:
            arguments[name] = tuple(cast(list[Any], value)) if isinstance(value, list) else value
    return kind(**arguments)


def _public_name(kind: type) -> str:
    """Returns a class's name in `tfx_jax.models` or `tfx_jax.tasks`, which stays valid if its module moves."""
    package = models if getattr(models, kind.__name__, None) is kind else tasks
    return f"{package.__name__}.{kind.__name__}"


def _class(name: Any, path: str) -> Any:
    """Returns the configuration class of a public name. The file is not trusted, so it can name no other class.

    Raises:
      ValueError: if there is no such class; the message names `path`.
    """
    match = re.fullmatch(r"tfx_jax\.(models|tasks)\.([A-Z]\w*)", name) if isinstance(name, str) else None
    kind = None
    if match:
        package, class_name = match.groups()
        kind = getattr({"models": models, "tasks": tasks}[package], class_name, None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        shown = printable(repr(name), 100)
        raise ValueError(f"{path}.class={shown} must name a configuration in tfx_jax.models or tfx_jax.tasks")
    return kind


def validate(config: ExperimentConfig) -> ExperimentConfig:
    """Checks a configuration and returns it unchanged; call it after overrides.

    Raises:
      UserError: for the first impossible setting.
    """
    check_fields(config)
    _check_model(config)
    config.task.validate(config.model)
    check_dataset(config.task.data)
    _check_mesh(config)
    for folder in (config.init_from, getattr(getattr(config.task, "data", None), "data_dir", "")):
        check_store(folder)
    optimizer, keep_every = config.optimizer, config.keep_every
    if optimizer.name in ("adam", "sgd") and optimizer.weight_decay:
        raise UserError(
            f'config.optimizer.weight_decay must be 0 for "{optimizer.name}": use config.optimizer.name="adamw" for '
            "weight decay"
        )
    if optimizer.name == "schedule_free" and (optimizer.schedule, optimizer.ema_decay) != ("constant", 0):
        raise UserError(
            'config.optimizer.name="schedule_free" averages the parameters in place of a schedule: set '
            'config.optimizer.schedule="constant" and ema_decay=0'
        )
    if optimizer.name == "schedule_free" and not optimizer.b1:
        raise UserError('config.optimizer.b1 must be above 0 for "schedule_free", which divides by it: set it to 0.9')
    if optimizer.schedule != "inverse_sqrt" and optimizer.peak_learning_rate is None:
        raise UserError(f'config.optimizer.schedule="{optimizer.schedule}" needs config.optimizer.peak_learning_rate')
    if config.patience and not config.eval_every:
        raise UserError("config.patience counts evaluations without a better score: set config.eval_every as well")
    if config.lora.rank and not config.init_from:
        raise UserError("config.lora.rank needs config.init_from: adapters modify a pretrained model")
    if not config.lora.rank and config.lora != LoraConfig():
        raise UserError("config.lora has options of adapters, but config.lora.rank=0 makes none: set it to 8, say")
    if config.spike_factor and not config.spike_factor > 1:
        raise UserError(f"config.spike_factor must be 0 or above 1, got {config.spike_factor}")
    if keep_every % config.checkpoint_every and (not config.eval_every or keep_every % config.eval_every):
        raise UserError(
            f"config.keep_every={keep_every} must be a multiple of checkpoint_every={config.checkpoint_every} or of "
            "eval_every, because only these steps are saved"
        )
    return config


def load_valid_config(workdir: epath.PathLike) -> ExperimentConfig:
    """Reads the configuration of a workdir and checks it like `train`, because the file may have been edited.

    Raises:
      UserError: as `load_config` and `validate`; the message names the file.
    """
    config = load_config(workdir)
    try:
        return validate(config)
    except UserError as error:
        raise UserError(f"{find_workdir(workdir) / 'config.json'}: {error}") from None


def _check_model(config: ExperimentConfig) -> None:
    """Checks that the model's sizes fit together, and that its attention supports the options of model and task."""
    model = config.model
    try:
        model.validate()
        if isinstance(model, SelfAttentionConfig):
            rate_field = "attention_dropout_rate" if hasattr(model, "attention_dropout_rate") else "dropout_rate"
            model.attention.check(
                is_causal=model.is_causal,
                has_bias=model.has_position_bias,
                is_packed=getattr(config.task, "is_packed", False),
                is_float32=config.model.dtype == "float32",
                drops=rate_field if getattr(model, rate_field) else None,
                num_heads=model.num_heads,
                num_kv_heads=getattr(model, "num_kv_heads", None),
                d_k=getattr(model, "d_k", None) or config.model.d_model // model.num_heads,
            )
            check_pattern(model)
            if getattr(config.task, "is_packed", False) and (rotary := getattr(model, "rotary", None)) is not None:
                rotary.check_packed()
    except ValueError as error:
        # A message that begins with the name of a field continues the path "config.model".
        field = re.match(r"\w*", str(error))
        separator = "." if field is not None and hasattr(model, field[0]) else ": "
        raise UserError(f"config.model{separator}{error}") from None


def _check_mesh(config: ExperimentConfig) -> None:
    """Checks that the mesh axes divide the sizes that they shard."""
    model, mesh = config.model, config.mesh
    if not mesh.data:
        raise UserError("config.mesh.data must be at least 1, or -1 for all devices that the other axes leave, got 0")
    for axis, names in (("tensor", ("num_heads", "d_ff")), ("fsdp", ("d_model",))):
        num_shards = getattr(mesh, axis)
        for name in names:
            configured = getattr(model, name, 0)  # 0: the model has no such size; None: d_ff is 4 * d_model
            size = 4 * model.d_model if configured is None else configured
            if size % max(num_shards, 1):
                raise UserError(f"config.mesh.{axis}={num_shards} does not divide config.model.{name}={configured}")
    experts: ExpertsConfig | None = getattr(model, "experts", None)
    if experts is not None and experts.num_experts % max(mesh.expert, 1):
        raise UserError(
            f"config.mesh.expert={mesh.expert} does not divide config.model.experts.num_experts={experts.num_experts}"
        )
    if mesh.sequence > 1:
        for part in (config.task, model):
            if not getattr(part, "can_shard_positions", False):
                raise UserError(
                    f"config.mesh.sequence={mesh.sequence} shards positions, which {type(part).__name__} does not "
                    "support: leave it at 1"
                )
        if isinstance(model, SelfAttentionConfig) and model.attention.name != "dense":
            raise UserError(
                f"config.mesh.sequence={mesh.sequence} shards positions, which {model.attention.name} attention does "
                "not support: leave it at 1"
            )
