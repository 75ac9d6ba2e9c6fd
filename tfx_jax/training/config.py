"""Experiment configuration: plain dataclasses, changed by experiment files and the command line, checked once."""

import dataclasses
import difflib
import json
import types
import typing
from typing import Any

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.models.transformer import BOS_ID, EOS_ID, PAD_ID, TransformerConfig
from tfx_jax.nn.feed_forward import ACTIVATIONS


@dataclasses.dataclass
class DataConfig:
    """Where sentence pairs come from and how they become batches."""

    dataset: str = "grammar"  # "grammar" (built in), "files", or a TFDS name such as "wmt14_translate/de-en"
    data_dir: str = ""  # TFDS: where the data set was prepared; files: the folder that the names below are relative to
    train_source: str = ""  # files: one sentence a line, plain or .gz; a .tsv holds both sides and needs no target
    train_target: str = ""
    validation_source: str = ""
    validation_target: str = ""
    test_source: str = ""
    test_target: str = ""
    source_language: str = "en"
    target_language: str = "ja"
    is_tokenised: bool = False  # the text is tokens with spaces between them, as BLEU counts them
    tokenizer: str = "sentencepiece"  # or "words": the text is segmented already, for example by BPE with "@@ " marks
    max_length: int = 256  # tokens of a sentence, its end included; longer training pairs are left out
    tokens_per_batch: int = 25_000  # positions of each side of a global batch, padding included (the paper's 25,000)
    window: int = 65_536  # pairs that are sorted by length together


@dataclasses.dataclass
class OptimizerConfig:
    """By default Adam as in section 5.3 of the paper."""

    name: str = "adam"  # or "adamw" or "adafactor"
    warmup_steps: int = 4_000
    peak_learning_rate: float | None = None  # None: (d_model * warmup_steps)^-0.5; of Adafactor, warmup_steps^-0.5
    b1: float = 0.9  # this and the next two: of Adam and AdamW
    b2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0  # of AdamW and Adafactor, times the learning rate; not of biases and gains
    clip_norm: float = 0.0  # a gradient whose norm over all parameters is larger is scaled down to it; 0: never


@dataclasses.dataclass
class DecodingConfig:
    """Beam search as in section 6.1 of the paper."""

    beam_size: int = 4
    alpha: float = 0.6  # of the length penalty
    extra_length: int = 50  # an output may be this many tokens longer than its input


@dataclasses.dataclass
class MeshConfig:
    """How many devices share what; the product is at most the number of devices."""

    data: int = -1  # rows of a batch, each device with the whole model; -1: all devices that the others leave
    fsdp: int = 1  # rows of a batch, and the parameters, which are gathered layer by layer
    expert: int = 1  # rows of a batch, and the experts of a mixture
    sequence: int = 1  # positions of a sequence, by ring attention
    tensor: int = 1  # heads, hidden units and vocabulary


@dataclasses.dataclass
class ExperimentConfig:
    """Everything a run depends on."""

    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    label_smoothing: float = 0.1
    z_loss: float = 0.0  # weight of log^2 Z in the loss of a token; PaLM has 1e-4
    accumulate: int = 1  # parts of a batch that are worked through one after the other, to save memory
    bad_steps: str = "stop"  # at a step that is not finite, or a spike; "skip": it is left out and the run goes on
    spike_factor: float = 0.0  # a spike is a loss this many times its running mean; 0: nothing is
    num_steps: int = 100_000
    seed: int = 0
    log_every: int = 50  # steps between lines and TensorBoard points
    checkpoint_every: int = 1_000
    eval_every: int = 0  # steps between translations of the validation part; 0: only after the last step
    patience: int = 0  # evaluations without a better BLEU before training stops; 0: never
    keep_last: int = 5  # newest checkpoints kept, and averaged by `tfx-jax average` unless told otherwise
    keep_best: int = 1  # checkpoints of highest validation BLEU kept besides
    keep_every: int = 0  # checkpoints of steps that are a multiple of it stay for ever; 0: none
    hang_seconds: float = 1_800.0  # a step that takes longer (more than compiling does) ends the process; 0: never


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
    "decoding",
    "mesh",
    "model.remat",
    "accumulate",
    "bad_steps",
    "spike_factor",
}


_AT_LEAST_ONE = (
    "model.vocab_size",
    "model.num_layers",
    "model.num_heads",
    "model.d_model",
    "model.d_ff",
    "data.max_length",
    "data.window",
    "optimizer.warmup_steps",
    "accumulate",
    "decoding.beam_size",
    "num_steps",
    "log_every",
    "checkpoint_every",
    "keep_last",
)
_AT_LEAST_ZERO = (
    "model.learned_positions",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "z_loss",
    "decoding.alpha",
    "decoding.extra_length",
    "eval_every",
    "patience",
    "keep_best",
    "keep_every",
    "hang_seconds",
)
_CHOICES = {
    "model.activation": tuple(ACTIVATIONS),
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots"),
    "data.tokenizer": ("sentencepiece", "words"),
    "optimizer.name": ("adam", "adamw", "adafactor"),
    "bad_steps": ("stop", "skip"),
}
_TOKENS = {"model.pad_id": PAD_ID, "model.start_id": BOS_ID, "model.eos_id": EOS_ID}
_BELOW_ONE = (
    "model.dropout_rate",
    "model.attention_dropout_rate",
    "model.activation_dropout_rate",
    "optimizer.b1",
    "optimizer.b2",
    "label_smoothing",
)


def validate(config: ExperimentConfig) -> ExperimentConfig:
    """Raises UserError for impossible settings; call it after command-line overrides."""
    model, data, values = config.model, config.data, flat(config)
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            if not values[name] >= least:
                raise UserError(f"config.{name} must be at least {least}, got {values[name]}")
    for name in _BELOW_ONE:
        if not 0.0 <= values[name] < 1.0:
            raise UserError(f"config.{name} must be in [0, 1), got {values[name]}")
    if model.num_decoder_layers is not None and not model.num_decoder_layers >= 1:
        raise UserError(f"config.model.num_decoder_layers must be at least 1, got {model.num_decoder_layers}")
    for name, token in _TOKENS.items():
        if values[name] != token:
            raise UserError(f"config.{name} must be {token}, which it is for the tokenizers, got {values[name]}")
    if model.d_model % 2 and not model.learned_positions:
        raise UserError(f"config.model.d_model must be even for sinusoidal positions, got {model.d_model}")
    if None in (model.d_k, model.d_v) and model.d_model % model.num_heads:
        raise UserError(f"config.model.d_model={model.d_model} is not divisible by num_heads={model.num_heads}")
    for axis, names in (("tensor", ("num_heads", "d_ff")), ("fsdp", ("d_model",))):
        for name in names:
            if getattr(model, name) % max(getattr(config.mesh, axis), 1):
                raise UserError(
                    f"config.mesh.{axis}={getattr(config.mesh, axis)} does not divide "
                    f"config.model.{name}={getattr(model, name)}"
                )
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            listed = " or ".join(f'"{choice}"' for choice in choices)
            raise UserError(f"config.{name} must be {listed}, got {values[name]!r}")
    if config.optimizer.name == "adam" and config.optimizer.weight_decay:
        raise UserError('config.optimizer.weight_decay is not for "adam": choose config.optimizer.name="adamw"')
    if config.spike_factor and not config.spike_factor > 1:
        raise UserError(f"config.spike_factor must be 0 or above 1, got {config.spike_factor}")
    if data.tokens_per_batch < data.max_length:
        raise UserError(
            f"config.data.tokens_per_batch={data.tokens_per_batch} holds no sentence of max_length={data.max_length}"
        )
    every = config.keep_every
    if every % config.checkpoint_every and (not config.eval_every or every % config.eval_every):
        raise UserError(
            f"config.keep_every={every} must be a multiple of checkpoint_every={config.checkpoint_every} or of "
            "eval_every: other steps are not saved"
        )
    longest = data.max_length + config.decoding.extra_length
    if model.learned_positions and model.learned_positions < longest:
        raise UserError(
            f"config.model.learned_positions={model.learned_positions} is less than data.max_length + "
            f"decoding.extra_length = {longest}: a translation may be that long"
        )
    return config


def tiny_variant(config: ExperimentConfig) -> ExperimentConfig:
    """Turns any experiment into its `test` variant: seconds on one CPU, on the built-in grammar, saving often."""
    config.data.dataset = "grammar"
    config.data.source_language, config.data.target_language = "en", "ja"
    config.data.tokenizer, config.data.is_tokenised = "sentencepiece", True
    config.data.max_length, config.data.tokens_per_batch, config.data.window = 64, 512, 256
    config.model.vocab_size = 1_000
    config.model.num_layers, config.model.d_model, config.model.num_heads, config.model.d_ff = 1, 32, 2, 64
    config.decoding.extra_length = 4
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
        saved, wanted = flat(load_config(workdir)), flat(config)
        changed = [
            f"{name}={saved[name]!r}, not {wanted[name]!r}"
            for name in wanted
            if saved[name] != wanted[name] and not _CHANGEABLE & {name, name.split(".")[0]}
        ]
        if changed:
            raise UserError(f"{workdir} was made with {'; '.join(changed)}: take another --workdir or delete this one")
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    partial.replace(path)


def check_config(config: ExperimentConfig, workdir: epath.Path) -> None:
    """Checks that another process, with this configuration, has called `save_config` on the same folder.

    Raises:
      UserError: if there is none, or another configuration.
    """
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir} has no config.json, which process 0 has just written: the folder must be shared")
    saved, wanted = flat(load_config(workdir)), flat(config)
    changed = [f"{name}={wanted[name]!r}, not {saved[name]!r}" for name in wanted if saved[name] != wanted[name]]
    if changed:
        raise UserError(f"this process was started with {'; '.join(changed)} as process 0 was")


def load_config(workdir: epath.Path) -> ExperimentConfig:
    """Reads what `save_config` wrote.

    Raises:
      UserError: if there is none, or it cannot be read.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"{workdir} has no config.json: it is not the --workdir of a training")
    try:
        return _from_dict(ExperimentConfig, json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or from another version ({error})") from None


def _from_dict(cls: type, values: dict[str, Any]) -> Any:
    kinds = typing.get_type_hints(cls)
    nested = {
        name for name, kind in kinds.items() if not isinstance(kind, types.UnionType) and dataclasses.is_dataclass(kind)
    }
    return cls(**{name: _from_dict(kinds[name], value) if name in nested else value for name, value in values.items()})
