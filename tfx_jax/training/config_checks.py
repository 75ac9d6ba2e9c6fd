"""What a configuration must fulfil, checked once, after the command line has changed it."""

import re

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.fields import check_fields
from tfx_jax.files import check_store
from tfx_jax.models.config import SelfAttentionConfig, check_pattern
from tfx_jax.nn.moe import ExpertsConfig
from tfx_jax.training.config import ExperimentConfig, load_config
from tfx_jax.training.workdir import find_workdir


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
