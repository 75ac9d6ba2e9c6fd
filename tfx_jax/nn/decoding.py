"""Protocols of models that generate: `tfx_jax.generation` drives every model through them.

It is here, below the models, so that a model needs nothing but its own file to satisfy it, and above the searches of
`tfx_jax.functional.search`, which know of no model: they call `Decoder.step`.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.search import Cache


class Decoder(Protocol):
    """A model, or what it has made of itself, that reads inputs once and then takes one token of each row at a time.

    It is a pytree, such as a Module, that `jax.jit` takes. R = B * W rows are the beams of B inputs, those of an input
    next to each other.
    """

    @property
    def vocab_size(self) -> int:
        """V, how many tokens `step` scores."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that is never written; -1 if every token may be."""
        ...

    @property
    def continues_inputs(self) -> bool:
        """Whether what is written continues an input, as a language model does, or answers it."""
        ...

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns how long an input may be where so many tokens are to follow; below 1, none may; None is no limit."""
        ...

    def encode(self, inputs: Shaped[Array, "B ..."], token_mask: Bool[Array, "B S"] | None = None) -> Any:
        """Reads inputs.

        Args:
          inputs: tokens, [B, S], of which every row of a language model has at least one; or images, of a captioner.
          token_mask: which of them exist, padding may be on either side; None means all but the model's own padding.

        Returns:
          What the model remembers of them, any pytree: the output of an encoder, the keys and values of a prompt, a
          recurrent state.
        """
        ...

    def init_cache(self, memory: Any, *, max_length: int, num_beams: int = 1) -> tuple[Cache, Int[Array, " B"]]:
        """Makes the cache of the first step.

        Args:
          memory: what `encode` returned.
          max_length: how many tokens will be written at most.
          num_beams: W.

        Returns:
          The cache as `tfx_jax.functional.search` has it: its arrays have B rows, which a search repeats for each beam
          and lets follow their beams, and what is `BeamInvariant` stays. And the tokens that the first step takes, [B].

        Raises:
          ValueError: if the model has no room for so many tokens.
        """
        ...

    def step(self, tokens: Int[Array, " R"], cache: Cache) -> tuple[Float[Array, "R V"], Cache]:
        """Takes the newest token of each row, and returns the scores of what may follow, and the next step's cache."""
        ...


@runtime_checkable
class DecodingModel(Protocol):
    """A model that writes."""

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model as it decodes best: itself, or with its weights arranged again, once for all inputs.

        Args:
          int8: whether products with weights are of integers, see `tfx_jax.functional.int8_product`.

        Raises:
          UserError: if `int8` is asked of a model that has no such products.
        """
        ...
