"""Decoding: greedy, beam search and sampling for every model that is a `tfx_jax.nn.decoding.DecodingModel`.

`decode` is the search itself, one program for a batch; `DecodeDriver` calls it for lists of any lengths.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int, PRNGKeyArray, Shaped

from tfx_jax.arrays import to_device, to_host
from tfx_jax.errors import UserError
from tfx_jax.fields import MAX_BEAMS, MAX_LENGTH_PENALTY, at_least, documented, within
from tfx_jax.functional.search import (
    LEAST_TEMPERATURE,
    Cache,
    StepFn,
    beam_search,
    greedy_search,
    sample,
    with_repetition_penalty,
)
from tfx_jax.nn.decoding import Decoder

_SHORTEST = 16  # inputs of fewer tokens are padded to as many
_NO_TOKEN = -1  # every id may be a token of the model

Observer = Callable[[np.ndarray], np.ndarray]
"""Is shown the newest token of each row, [B] int32, -1 where there is none, and answers which rows are to stop."""


@documented
@dataclasses.dataclass
class DecodingConfig:
    """How a task searches for texts: by default with the beam of Vaswani et al. (2017), section 6.1."""

    beam_size: int = within(1, MAX_BEAMS, 4)
    length_penalty: float = within(0, MAX_LENGTH_PENALTY, 0.6)  # alpha of the paper
    extra_length: int = at_least(0, 50)  # an output may be this many tokens longer than its input

    def tiny(self) -> None:
        """Sets short outputs."""
        self.extra_length = 4


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token at every step, and the end at the limit; see `tfx_jax.functional.greedy_search`."""


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """The best text that `tfx_jax.functional.search` finds."""

    beam_size: int = 4
    length_penalty: float = 0.6


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Tokens that are drawn; the defaults draw from the model itself. A text that reaches its limit is cut there."""

    temperature: float = 1.0  # divides the logits; 0 takes the most probable token
    top_k: int | None = None  # keeps that many of the most probable tokens
    top_p: float | None = None  # keeps the fewest tokens that have this mass together
    repetition_penalty: float = 1.0  # divides the logits of tokens that are there already

    def __post_init__(self):
        """Refuses what is out of range."""
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise UserError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")


Search = Greedy | BeamSearch | Sampling
"""How the tokens of an output are chosen."""


def decode(
    decoder: Decoder,
    inputs: Shaped[Array, "B ..."],
    token_mask: Bool[Array, "B S"] | None = None,
    length_limits: Int[Array, " B"] | None = None,
    rng: PRNGKeyArray | None = None,
    row_ids: Int[Array, " B"] | None = None,
    *,
    search: Search,
    eos_ids: Sequence[int],
    max_length: int,
    observer: Observer | None = None,
) -> Int[Array, "B L"]:
    """Reads a batch of inputs and writes until every row has ended; call it inside `jax.jit`.

    Args:
      decoder: of the model.
      inputs: tokens, [B, S], or whatever else the model reads, such as images.
      token_mask: which tokens exist, at least one of each row that matters; None means all.
      length_limits: how many tokens each row may have at most, its end included; None means `max_length`.
      rng: of the draws.
      row_ids: see `tfx_jax.functional.sample`.
      search: how tokens are chosen.
      eos_ids: tokens that end a text; exactly one where nothing is drawn.
      max_length: L.
      observer: of `Sampling`; is called with the tokens of every step while the program runs.

    Returns:
      The tokens of the best text of each row, its end included if it has one, and -1 behind it.
    """
    num_beams = search.beam_size if isinstance(search, BeamSearch) else 1
    memory = decoder.encode(inputs, token_mask)
    cache, start = decoder.init_cache(memory, max_length=max_length, num_beams=num_beams)
    limits: dict[str, Any] = {"max_length": max_length, "length_limits": length_limits}
    if isinstance(search, Sampling):
        step_fn, vocab_size = decoder.step, decoder.vocab_size
        if search.repetition_penalty != 1:
            rows = jnp.arange(inputs.shape[0])[:, None]
            exists = True if token_mask is None else token_mask
            seen = jnp.zeros((inputs.shape[0], vocab_size), bool).at[rows, inputs].max(exists)
            step_fn, cache = with_repetition_penalty(step_fn, cache, seen, search.repetition_penalty)
        step_fn, cache = _with_end(step_fn, cache, vocab_size, eos_ids, observer)
        limits |= {"rng": jax.random.key(0) if rng is None else rng, "row_ids": row_ids}
        return _sample(step_fn, cache, start, search, vocab_size, **limits)
    (eos_id,) = eos_ids
    limits |= {"eos_id": eos_id, "pad_id": decoder.pad_id}
    if isinstance(search, Greedy):
        tokens, _ = greedy_search(decoder.step, cache, start, **limits)
    else:
        sizes: dict[str, Any] = {"beam_size": num_beams, "length_penalty": search.length_penalty}
        tokens = beam_search(decoder.step, cache, start, **sizes, **limits).tokens[:, 0]
    return jnp.where(tokens == decoder.pad_id, _NO_TOKEN, tokens)


def _sample(step_fn: StepFn, cache: Cache, start: Array, search: Sampling, end: int, **options: Any) -> Array:
    """Draws tokens, `end` not among them."""
    tokens, _ = sample(
        step_fn,
        cache,
        start,
        eos_id=end,
        pad_id=_NO_TOKEN,
        temperature=search.temperature or 1.0,
        top_k=search.top_k if search.temperature else 1,
        top_p=search.top_p if search.temperature else None,
        **options,
    )
    return jnp.where(tokens == end, _NO_TOKEN, tokens)


class DecodeDriver:
    """Decodes lists of token ids with any model; compiles once for each shape of batch, and shapes are few."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        search: Search,
        *,
        eos_ids: Sequence[int],
        int8: bool = False,
        observer: Observer | None = None,
    ):
        """Remembers the model without its parameters, and the search.

        Args:
          graphdef: of a `DecodingModel`.
          search: how tokens are chosen.
          eos_ids: tokens that end a text.
          int8: whether products with weights are of integers, see `tfx_jax.functional.int8_product`: faster, not exact.
          observer: of `Sampling`; is called with the tokens of every step while the program runs, to print or to stop;
            None for neither, which saves the trip to the host.

        Raises:
          UserError: if a search that draws nothing has no single end to look for, or an observer.
        """
        if not isinstance(search, Sampling) and (len(eos_ids) != 1 or observer is not None):
            kind = "beam" if isinstance(search, BeamSearch) else "greedy"
            raise UserError(f"a {kind} search wants one token that ends a text, and no observer")
        self._graphdef, self._int8 = graphdef, int8
        show = None if observer is None else functools.partial(_shown_as_numpy, observer)
        options: dict[str, Any] = {"search": search, "eos_ids": tuple(eos_ids), "observer": show}
        self._run = jax.jit(functools.partial(decode, **options), static_argnames="max_length")

    def decoder(self, params: Any) -> Decoder:
        """Arranges the weights of the model: once for all that is to be decoded with them."""
        return nnx.merge(self._graphdef, to_device(params)).decoder(int8=self._int8)

    def __call__(
        self,
        decoder: Decoder,
        inputs: Sequence[Sequence[int]],
        *,
        max_new_tokens: Callable[[int], int],
        max_input_length: int | None = None,
        tokens_per_batch: int | None = None,
        seed: int = 0,
        first: int = 0,
        on_batch: Callable[[int], object] | None = None,
    ) -> list[list[int]]:
        """Decodes each input.

        Args:
          decoder: what `decoder` returned.
          inputs: token ids, at least one each.
          max_new_tokens: from the length of an input to how many tokens are written at most, its end included.
          max_input_length: no input is longer, and so none is padded further.
          tokens_per_batch: how many places for tokens of inputs a batch has; None puts all into one, in their order.
          seed: of the draws; those of an input depend on it and on the input's number, not on the other inputs.
          first: the number of the first input, where many are worked through in parts.
          on_batch: is told after each batch how many inputs it had.

        Returns:
          The new tokens of each, the end included.

        Raises:
          UserError: for an input of no token, of an id outside the vocabulary, or of more tokens than fit; for a `seed`
            of more than 32 bits.
        """

        def padded(length: int) -> int:
            """Few lengths, powers of two up to the limits. Coarse: a step costs about the same whatever was read."""
            power = max(_SHORTEST, 1 << (length - 1).bit_length())
            limits = max_input_length, decoder.max_input_length(max_new_tokens(power))
            return max(length, min([power, *(limit for limit in limits if limit is not None)]))

        if not 0 <= seed < 2**32:
            raise UserError(f"seed must be in 0 .. {2**32 - 1}, got {seed}")
        for number, ids in enumerate(inputs, start=first + 1):
            _check_prompt(decoder, number, ids, max_new_tokens(len(ids)))
        outputs: list[list[int]] = [[] for _ in inputs]
        for num_rows, members in _batches([len(ids) for ids in inputs], padded, tokens_per_batch):
            # Rows that are added repeat the first, and end at once.
            row_ids = np.pad(np.array(members, np.int32), (0, num_rows - len(members)), constant_values=members[0])
            rows = [inputs[index] for index in row_ids]
            limits = [max_new_tokens(len(inputs[member])) for member in members] + [1] * (num_rows - len(members))
            length = padded(max(map(len, rows)))
            found = self._run(
                decoder,
                *_assembled(rows, length),
                np.array(limits, np.int32),
                jax.random.key(seed),
                first + row_ids,
                max_length=max_new_tokens(length),
            )
            for member, row in zip(members, to_host(found).tolist(), strict=False):
                outputs[member] = list(itertools.takewhile(lambda token: token != _NO_TOKEN, row))
            if on_batch is not None:
                on_batch(len(members))
        return outputs


def _check_prompt(decoder: Decoder, number: int, ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuses an input that the model cannot read."""
    length = len(ids)
    if not length:
        raise UserError(f"prompt {number} has no token")
    if strange := [token for token in (min(ids), max(ids)) if not 0 <= token < decoder.vocab_size]:
        raise UserError(f"prompt {number} has the token id {strange[0]}; use ids in 0 .. {decoder.vocab_size - 1}")
    room = decoder.max_input_length(max_new_tokens)
    if room is not None and length > room:
        raise UserError(
            f"prompt {number} has {length:,} tokens: with max_new_tokens={max_new_tokens} the model has room for "
            f"{max(room, 0):,}"
        )


def _assembled(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a batch, and which of them exist."""
    tokens, token_mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], token_mask[row, : len(ids)] = ids, True
    return tokens, token_mask


def _batches(
    lengths: Sequence[int], padded: Callable[[int], int], tokens_per_batch: int | None
) -> Iterator[tuple[int, list[int]]]:
    """Yields how many rows a batch has, and which inputs are in it; short ones come first."""
    count = len(lengths)
    if tokens_per_batch is None:
        if count:
            yield 1 << (count - 1).bit_length(), list(range(count))
        return
    # A handful of inputs should not pay for a full batch.
    places = min(tokens_per_batch, _SHORTEST << max(1, count - 1).bit_length())
    order = sorted(range(count), key=lambda index: lengths[index])
    for length, group in itertools.groupby(order, key=lambda index: padded(lengths[index])):
        members, num_rows = list(group), max(1, places // length)
        for start in range(0, len(members), num_rows):
            yield num_rows, members[start : start + num_rows]


def _shown_as_numpy(observer: Observer, tokens: Any) -> np.ndarray:
    return observer(np.asarray(tokens))


class _Watched(NamedTuple):
    """A model's cache, and whether its first step is still to come."""

    model: Cache
    is_first: Bool[Array, ""]


def _with_end(
    step_fn: StepFn, cache: Cache, vocab_size: int, eos_ids: Sequence[int], observer: Observer | None
) -> tuple[StepFn, Cache]:
    """Gives the vocabulary one token more, V, which alone may follow an end of the model's or the observer's stop.

    So a model may have several ends or none, its prompt may begin with one, and rows stop while others go on.
    """

    def step(tokens: Array, cache: _Watched) -> tuple[Array, _Watched]:
        is_over = jnp.isin(tokens, jnp.asarray(eos_ids, jnp.int32)) if eos_ids else jnp.zeros(tokens.shape, bool)
        if observer is not None:
            shown = jnp.where(cache.is_first | (tokens >= vocab_size), _NO_TOKEN, tokens)
            is_over |= io_callback(observer, jax.ShapeDtypeStruct(tokens.shape, bool), shown, ordered=True)
        is_over = (is_over & ~cache.is_first)[:, None]
        logits, model = step_fn(jnp.clip(tokens, 0, vocab_size - 1), cache.model)
        logits = jnp.concatenate(
            [jnp.where(is_over, -jnp.inf, logits), jnp.where(is_over, 0.0, -jnp.inf).astype(logits.dtype)], axis=1
        )
        return logits, _Watched(model, jnp.zeros((), bool))

    return step, _Watched(cache, jnp.ones((), bool))
