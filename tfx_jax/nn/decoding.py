"""Protocols of models that generate; `tfx_jax.generation` uses every model through them.

A model implements them in its own file. The searches of `tfx_jax.functional.search` call `Decoder.step` only.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.search import Cache


class Decoder(Protocol):
    """A model, or a version of it prepared for decoding, that encodes inputs once and then processes token by token.

    It is a pytree, such as a Module, that can be passed to `jax.jit`. There are R = B * W rows, the W beams of each of
    B inputs next to each other.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of logits of `step`."""
        ...

    @property
    def pad_id(self) -> int:
        """The id of PAD, which is never generated; -1 if there is no PAD."""
        ...

    @property
    def continues_inputs(self) -> bool:
        """Whether the output continues the input, as in a language model, or is a separate sequence."""
        ...

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns the maximum input length, in tokens, if `max_new_tokens` follow.

        Below 1 means that no input fits, None means no limit.
        """
        ...

    def encode(self, inputs: Shaped[Array, "B ..."], token_mask: Bool[Array, "B S"] | None = None) -> Any:
        """Encodes inputs, once before decoding.

        Args:
          inputs: tokens, [B, S], at least one per row for a language model; or images for a captioning model.
          token_mask: True for tokens, False for padding on either side; None means that PAD is the padding.

        Returns:
          The memory, any pytree: the output of an encoder, the keys and values of a prompt, or a recurrent state.
        """
        ...

    def init_cache(self, memory: Any, *, max_length: int, num_beams: int = 1) -> tuple[Cache, Int[Array, " B"]]:
        """Returns the cache and the tokens of the first step.

        Args:
          memory: the result of `encode`.
          max_length: maximum number of tokens that will be generated.
          num_beams: W.

        Returns:
          The cache, as in `tfx_jax.functional.search`: its arrays have B rows, which beam search repeats and reorders,
          except in `BeamInvariant` parts. And the tokens that the first step gets, [B].

        Raises:
          ValueError: if input and output together are too long for the model.
        """
        ...

    def step(self, tokens: Int[Array, " R"], cache: Cache) -> tuple[Float[Array, "R V"], Cache]:
        """Processes the newest token of each row; returns the logits of the next token and the new cache."""
        ...


@runtime_checkable
class DecodingModel(Protocol):
    """A model that can generate."""

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the fastest decoder of the model: the model itself, or a version with its weights rearranged.

        Args:
          int8: whether weights are quantized to int8, see `tfx_jax.functional.int8_product`.

        Raises:
          UserError: if the model does not support `int8`.
        """
        ...
