"""Generation: how a language model goes on with prompts, or an encoder-decoder answers them."""

from collections.abc import Sequence

from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import DecodeDriver, Observer, Sampling, Search
from tfx_jax.nn.decoding import DecodingModel


class Generator:
    """Goes on with prompts of token ids, or answers them: the prompt of an encoder-decoder is its source."""

    def __init__(
        self,
        model: DecodingModel,
        *,
        eos_ids: Sequence[int] = (),
        max_new_tokens: int = 64,
        search: Search = Sampling(),
        int8: bool = False,
        observer: Observer | None = None,
    ):
        """Arranges the model's weights for decoding.

        Args:
          model: a Module; it stays as it is.
          eos_ids: tokens that end a text.
          max_new_tokens: how many a continuation has at most, its end included.
          search: how tokens are chosen.
          int8: see `DecodeDriver`.
          observer: see `DecodeDriver`.

        Raises:
          UserError: if the model has no room for that many tokens, or the search no single end to look for.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        graphdef, params = nnx.split(model)
        self._driver = DecodeDriver(graphdef, search, eos_ids=eos_ids, int8=int8, observer=observer)
        self._decoder = self._driver.decoder(params)
        room = self._decoder.max_input_length(max_new_tokens)
        if room is not None and room < 1:
            raise UserError(
                f"max_new_tokens={max_new_tokens} leaves no room for a prompt, as the model takes "
                f"{self._decoder.max_input_length(0)} tokens"
            )
        self._max_new_tokens, self._eos_ids = max_new_tokens, frozenset(eos_ids)

    @property
    def continues_prompts(self) -> bool:
        """Whether what is generated goes on with a prompt, or answers it."""
        return self._decoder.continues_inputs

    def __call__(self, prompts: Sequence[Sequence[int]], *, seed: int = 0, first: int = 0) -> list[list[int]]:
        """Goes on with each prompt.

        Args:
          prompts: token ids, at least one each.
          seed: of the draws; a prompt's draw depends on it and on the prompt's number, not on the other prompts.
          first: the number of the first prompt, where many are worked through in parts.

        Returns:
          The new tokens of each, without the end.

        Raises:
          UserError: for a prompt of no token, or of more than the model can look back on.
        """
        found = self._driver(
            self._decoder, prompts, max_new_tokens=lambda _: self._max_new_tokens, seed=seed, first=first
        )
        return [ids[:-1] if ids and ids[-1] in self._eos_ids else ids for ids in found]
