"""Protocols of model configurations, and checks of a configuration against a task."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax
from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.fields import check_fields
from tfx_jax.nn.attention import AttentionConfig
from tfx_jax.nn.moe import ExpertsConfig

Layer = TypeVar("Layer", bound=nnx.Module)
Config = TypeVar("Config", bound=Any)

DTYPES = ("float32", "bfloat16")
"""Dtypes of the computation; parameters, logits and statistics stay float32."""


@runtime_checkable
class ModelConfig(Protocol):
    """Configuration of a model: a dataclass with its sizes and options, in the same file as the model.

    Attributes:
      kind: inputs and outputs of the model, which decide the tasks that it can be trained on. For a new kind, add a
        word here and in its task:
        - "encoder_decoder": source and target tokens to logits of the target tokens.
        - "decoder": tokens to logits of each next token.
        - "recurrent_decoder": a segment of tokens and memories to logits of each next token and new memories.
        - "bert": the encoder below the heads of `tfx_jax.models.bert`.
        - "ctc": frames to logits of labels at fewer steps; the first `num_steps(num_frames)` of them are valid.
        - "elmo": characters of words; for the language model and the tagger of `tfx_jax.models.elmo`.
        - "captioner": images and captions to logits of the captions' tokens.
        - "events": variables, values and times of events to logits of classes.
        - "sentence_pair": two sequences of tokens to logits of labels.
        - "image_classifier": images to logits of labels.
        - "long_sequence": one or two sequences of tokens to logits of labels.
    """

    kind: ClassVar[str]
    d_model: int
    dtype: str

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model reads; for models without tokens, of labels, classes or variables."""
        ...

    def validate(self) -> None:
        """Checks conditions on combinations of fields.

        Raises:
          ValueError: if fields contradict each other; the message begins with the name of a field.
        """
        ...

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU, for sequences of up to `max_length` tokens."""
        ...


@runtime_checkable
class SelfAttentionConfig(Protocol):
    """Additional fields of a `ModelConfig` for models with self-attention.

    The dropout rate of attention weights is `attention_dropout_rate`, or `dropout_rate` without that field.

    Attributes:
      is_causal: whether self-attention (of the decoder, if there is one) is causal.
      has_position_bias: whether the model passes a bias to attention that differs between pairs of positions.
      num_heads: number of query heads.
      attention: attention of every layer.
    """

    @property
    def is_causal(self) -> bool: ...

    has_position_bias: ClassVar[bool]
    num_heads: int
    attention: AttentionConfig


class MakesModel(ModelConfig, Protocol):
    """Configuration that determines the whole model, without a head that the task chooses."""

    def make(self, *, rngs: nnx.Rngs) -> Any:
        """Builds the model; stream `params` initializes its parameters."""
        ...


class EncoderDecoderConfig(MakesModel, Protocol):
    """Configuration of a model of the kind "encoder_decoder".

    Attributes:
      pad_id: id of the padding token.
      start_id: id of the token that the decoder reads first.
      eos_id: id of the token that ends a text.
    """

    pad_id: int
    start_id: int
    eos_id: int


class DecoderConfig(MakesModel, Protocol):
    """Configuration of a model of the kind "decoder"."""


def layer_pattern(
    make_layer: Callable[..., Layer], attention: AttentionConfig, experts: ExpertsConfig | None = None
) -> list[Callable[[nnx.Rngs], Layer]]:
    """Returns functions that build the layers of one repetition of the pattern, for `tfx_jax.nn.stack_layers`.

    Layers repeat the patterns of `attention` (such as local, dense) and of `experts` (such as one sparse layer in two).
    The result has as many layers as the least common multiple of both lengths.

    Args:
      make_layer: called as `make_layer(attention, rngs)`, with the configuration of the layer's attention; with
        `experts` as `make_layer(attention, has_experts, rngs)`, `has_experts` meaning a mixture of experts.
      attention: configuration of the model's attention.
      experts: configuration of the model's mixtures of experts, if it may have any.
    """
    patterns: list[list[Any]] = [attention.pattern()]
    if experts is not None:
        patterns.append(experts.pattern())
    makers: list[Callable[[nnx.Rngs], Layer]] = []
    for index in range(math.lcm(*map(len, patterns))):
        entries = [pattern[index % len(pattern)] for pattern in patterns]  # of this layer, from each pattern
        makers.append(functools.partial(make_layer, *entries))
    return makers


def check_pattern(model: SelfAttentionConfig) -> None:
    """Checks that the numbers of layers are multiples of the length of the layer pattern.

    Raises:
      ValueError: if one is not; the message begins with the name of a field.
    """
    experts: ExpertsConfig = getattr(model, "experts", ExpertsConfig())
    length = math.lcm(len(model.attention.names), len(experts.pattern()))
    for name in ("num_layers", "num_decoder_layers"):
        if (getattr(model, name, None) or 0) % length:
            raise ValueError(f"{name}={getattr(model, name)} is no multiple of the {length} layers of the pattern")


def checked(config: Config) -> Config:
    """Checks each field of a model's configuration and their combinations, and returns it; every model does so first.

    The dtype may also be "float64" where JAX has 64 bits, as with `jax.enable_x64(True)`.

    Raises:
      ValueError: the message names the field.
    """
    is_double = config.dtype == "float64" and jax.dtypes.canonicalize_dtype("float64") == "float64"
    check_fields(dataclasses.replace(config, dtype="float32") if is_double else config, type(config).__name__)
    config.validate()
    return config


def require_kind(model: ModelConfig, kind: str | tuple[str, ...], task: str) -> None:
    """Checks that a model is of the kind, or one of the kinds, that a task can train.

    Raises:
      UserError: if it is not.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    if model.kind not in kinds:
        listed = " or ".join(map(repr, kinds))
        raise UserError(f"{task} needs a model of the kind {listed}, but a {type(model).__name__} is {model.kind!r}")


def check_max_length(model: ModelConfig, max_length: int) -> None:
    """Checks that a model with learned positions has at least `max_length` of them.

    Raises:
      UserError: if it has fewer.
    """
    for name in ("max_length", "learned_positions"):  # learned_positions=0 means sinusoids, which have no limit
        limit = getattr(model, name, None)
        if limit and limit < max_length:
            raise UserError(
                f"config.task.data.max_length={max_length} is more than config.model.{name}={limit}: set "
                f"--config.task.data.max_length={limit} or less"
            )
