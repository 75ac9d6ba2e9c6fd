"""What every model's configuration offers to tasks and to the trainer."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.nn.attention import AttentionConfig
from tfx_jax.nn.moe import ExpertsConfig

Layer = TypeVar("Layer", bound=nnx.Module)

DTYPES = ("float32", "bfloat16")
"""Of the computation; parameters, logits and statistics stay float32."""


@runtime_checkable
class ModelConfig(Protocol):
    """The sizes of a model: a dataclass, which stands above its model in the file of its paper.

    Attributes:
      kind: what the model computes, which decides the tasks that it can be trained on: "encoder_decoder" takes sources
        and targets and gives the logits of the targets, "decoder" gives the logits of what follows each token, "bert"
        is the body below the heads of `tfx_jax.models.bert`, "ctc" takes frames and gives the logits of labels
        at fewer steps, of which the configuration's `num_steps(num_frames)` count, "elmo" takes the characters of
        words, for `tfx_jax.models.elmo` and its tagger, "captioner" takes images and captions and gives the logits of
        these, "events" takes the variables, values and times of events and gives the logits of classes, "sentence_pair"
        takes two rows of tokens and gives the logits of labels, "image_classifier" takes images and gives the logits
        of labels, "long_sequence" takes one row of tokens or two and gives the logits of labels. A new kind is a new
        word here and in its task.
    """

    kind: ClassVar[str]
    d_model: int
    dtype: str

    @property
    def vocab_size(self) -> int:
        """How many things the model reads, or tells apart."""
        ...

    def validate(self) -> None:
        """Checks how fields go together.

        Raises:
          ValueError: if they do not; the message begins with the name of a field.
        """
        ...

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU, for texts of up to `max_length` tokens."""
        ...


@runtime_checkable
class SelfAttentionConfig(Protocol):
    """What the configuration of a model has besides whose positions attend to each other.

    Training drops attention weights by its `attention_dropout_rate`, or by `dropout_rate` where it has none.

    Attributes:
      is_causal: whether a position may not see later ones, at least in a decoder.
      has_position_bias: whether attention is given a bias for each pair of positions.
      num_heads: of its attention.
      attention: of every layer.
    """

    is_causal: ClassVar[bool]
    has_position_bias: ClassVar[bool]
    num_heads: int
    attention: AttentionConfig


class MakesModel(ModelConfig, Protocol):
    """The configuration of a model that needs no head."""

    def make(self, *, rngs: nnx.Rngs) -> Any:
        """Makes the model; stream `params` initializes its parameters."""
        ...


class EncoderDecoderConfig(MakesModel, Protocol):
    """The configuration of a model of the kind "encoder_decoder".

    Attributes:
      pad_id: the token that fills a row.
      start_id: the one that the decoder reads first.
      eos_id: the one that ends a text.
    """

    pad_id: int
    start_id: int
    eos_id: int


class DecoderConfig(MakesModel, Protocol):
    """The configuration of a model of the kind "decoder"."""


def layer_pattern(
    make_layer: Callable[..., Layer], attention: AttentionConfig, experts: ExpertsConfig | None = None
) -> list[Callable[[nnx.Rngs], Layer]]:
    """Returns what `tfx_jax.nn.stack_layers` takes for layers whose attention or feed-forward networks differ.

    Args:
      make_layer: `make_layer(attention, rngs)` makes a layer, given the configuration of its attention;
        `make_layer(attention, is_sparse, rngs)` where there may be `experts`.
      attention: of the model.
      experts: likewise; whether a layer has a mixture of them is `is_sparse`.
    """
    columns: list[list[Any]] = [attention.pattern(), *([] if experts is None else [experts.pattern()])]
    return [
        functools.partial(make_layer, *(column[index % len(column)] for column in columns))
        for index in range(math.lcm(*map(len, columns)))
    ]


def check_pattern(model: SelfAttentionConfig) -> None:
    """Checks that the layers of a model are a multiple of those of its pattern.

    Raises:
      ValueError: if they are not; the message begins with the name of a field.
    """
    experts: ExpertsConfig = getattr(model, "experts", ExpertsConfig())
    length = math.lcm(len(model.attention.names), len(experts.pattern()))
    for name in ("num_layers", "num_decoder_layers"):
        if (getattr(model, name, None) or 0) % length:
            raise ValueError(f"{name}={getattr(model, name)} is no multiple of the {length} layers of the pattern")


def require_kind(model: ModelConfig, kind: str | tuple[str, ...], task: str) -> None:
    """Checks that a task can train a model, which may be of one kind or of any of several.

    Raises:
      UserError: if the model is of another kind.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    if model.kind not in kinds:
        listed = " or ".join(map(repr, kinds))
        raise UserError(f"{task} needs a model of the kind {listed}, but a {type(model).__name__} is {model.kind!r}")


def check_max_length(model: ModelConfig, max_length: int) -> None:
    """Checks that a model with learned positions has one for every token of an example.

    Raises:
      UserError: if it has not.
    """
    for name in ("max_length", "learned_positions"):  # of the latter, 0 means that they are not learned
        limit = getattr(model, name, None)
        if limit and limit < max_length:
            raise UserError(f"config.task.data.max_length={max_length} is more than config.model.{name}={limit}")
