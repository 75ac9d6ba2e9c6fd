"""Generation: how a language model goes on with a text, or an encoder-decoder answers it; one program for a batch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int

from tfx_jax.errors import UserError
from tfx_jax.functional.beams import beam_search
from tfx_jax.functional.decoding import Cache, StepFn, sample, with_repetition_penalty
from tfx_jax.models.gpt import GPT
from tfx_jax.models.t5 import T5
from tfx_jax.models.transformer import Transformer

_SHORTEST_PROMPT = 16
_NO_TOKEN = -1  # every id may be a token of the model

Model = GPT | T5 | Transformer

Observer = Callable[[np.ndarray], np.ndarray]
"""Is shown the newest token of each row, [B] int32, -1 where there is none, and answers which rows are to stop."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults draw from the model itself."""

    temperature: float = 1.0  # divides the logits; 0 takes the most probable token
    top_k: int | None = None  # keeps that many of the most probable tokens
    top_p: float | None = None  # keeps the fewest tokens that have this mass together
    repetition_penalty: float = 1.0  # divides the logits of tokens that are there already

    def __post_init__(self):
        """Refuses what is out of range."""
        if not self.temperature >= 0:
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise UserError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")


def can_generate(model: Any) -> bool:
    """Whether `Generator` takes a model."""
    return isinstance(model, Model)


class Generator:
    """Goes on with prompts of token ids; compiles once for each shape of batch, and shapes are few.

    The prompt of an encoder-decoder is its source, and what is generated its target.
    """

    def __init__(
        self,
        model: Model,
        *,
        eos_ids: Sequence[int] = (),
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),
        beam_size: int = 1,
        alpha: float = 0.6,
        int8: bool = False,
        observer: Observer | None = None,
    ):
        """Arranges the model's weights for decoding.

        Args:
          model: it stays as it is.
          eos_ids: tokens that end a text.
          max_new_tokens: how many a continuation has at most, its end included.
          sampling: how tokens are chosen, with a beam of 1.
          beam_size: W; above 1 the best text that `tfx_jax.functional.beam_search` finds, and nothing is drawn.
          alpha: of its length penalty.
          int8: whether products with weights are of integers, see `tfx_jax.functional.int8_product`.
          observer: is called with the tokens of every step while the program runs, to print or to stop; None for
            neither, which saves the trip to the host.

        Raises:
          UserError: if the model has no room for that many tokens, or a beam search no single end to look for.
        """
        self._room = None  # how long a prompt may be
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if isinstance(model, GPT):
            self._room = model.config.max_length - max_new_tokens
            if self._room < 1:
                raise UserError(
                    f"max_new_tokens={max_new_tokens} leaves no room for a prompt, as the model has "
                    f"max_length={model.config.max_length}"
                )
        if beam_size > 1 and (len(eos_ids) != 1 or observer is not None or sampling.repetition_penalty != 1):
            raise UserError("a beam search wants one token that ends a text, no observer and no repetition penalty")
        graphdef, self._params = nnx.split(model)
        self._max_new_tokens, self._eos_ids = max_new_tokens, tuple(eos_ids)
        self._decoder = jax.jit(lambda params: nnx.merge(graphdef, params).decoder(int8=int8))(self._params)
        show = None if observer is None else functools.partial(_shown_as_numpy, observer)
        self._run = jax.jit(
            functools.partial(_generate, graphdef, max_new_tokens, self._eos_ids, sampling, beam_size, alpha, show)
        )

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
        for number, prompt in enumerate(prompts, start=1):
            if not prompt:
                raise UserError(f"prompt {number} has no token")
            if self._room is not None and len(prompt) > self._room:
                raise UserError(
                    f"prompt {number} has {len(prompt):,} tokens: with max_new_tokens={self._max_new_tokens} the model "
                    f"has room for {self._room:,}"
                )
        if not prompts:
            return []
        # Few shapes: rows and lengths are powers of two. The rows that are added repeat the first.
        longest = max(len(prompt) for prompt in prompts)
        length = max(_SHORTEST_PROMPT, 1 << (longest - 1).bit_length())
        shape = 1 << (len(prompts) - 1).bit_length(), length if self._room is None else min(length, self._room)
        tokens, is_token = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, prompt in enumerate(
            itertools.islice(itertools.chain(prompts, itertools.repeat(prompts[0])), shape[0])
        ):
            tokens[row, : len(prompt)], is_token[row, : len(prompt)] = prompt, True
        limits = np.where(np.arange(shape[0]) < len(prompts), self._max_new_tokens, 1)
        found = np.asarray(
            self._run(
                self._params,
                self._decoder,
                tokens,
                is_token,
                limits.astype(np.int32),
                jax.random.key(seed),
                np.int32(first),
            )
        )
        ends = (*self._eos_ids, _NO_TOKEN)
        return [
            list(itertools.takewhile(lambda token: token not in ends, row)) for row in found[: len(prompts)].tolist()
        ]


def _generate(
    graphdef: nnx.GraphDef,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    sampling: Sampling,
    beam_size: int,
    alpha: float,
    observer: Observer | None,
    params: Any,
    decoder: Any,
    prompt: Int[Array, "B P"],
    is_token: Bool[Array, "B P"],
    limits: Int[Array, " B"],
    rng: Array,
    first: Int[Array, ""],
) -> Int[Array, "B L"]:
    """Reads the prompts and generates until every row has ended: one program."""
    model: Model = nnx.merge(graphdef, params)
    options: dict[str, Any] = {"max_length": max_new_tokens, "num_beams": beam_size, "decoder": decoder}
    if isinstance(model, GPT):
        step_fn, cache, start = model.start_decoding(prompt, is_token, **options)
        pad_id = _NO_TOKEN
    else:
        pad_id = model.config.pad_id
        step_fn, cache = model.start_decoding(jnp.where(is_token, prompt, pad_id), **options)
        start = jnp.full(prompt.shape[:1], model.config.start_id)
    if beam_size > 1:
        (eos_id,) = eos_ids
        common: dict[str, Any] = {"max_length": max_new_tokens, "length_limits": limits, "eos_id": eos_id}
        found = beam_search(step_fn, cache, start, beam_size=beam_size, pad_id=pad_id, alpha=alpha, **common)
        tokens = found.tokens[:, 0]
        return jnp.where(tokens == pad_id, _NO_TOKEN, tokens)
    vocab_size = model.config.vocab_size
    if sampling.repetition_penalty != 1:
        rows = jnp.arange(prompt.shape[0])[:, None]
        seen = jnp.zeros((prompt.shape[0], vocab_size), bool).at[rows, prompt].max(is_token)
        step_fn, cache = with_repetition_penalty(step_fn, cache, seen, sampling.repetition_penalty)
    step_fn, cache = _with_end(step_fn, cache, vocab_size, eos_ids, observer)
    tokens, _ = sample(
        step_fn,
        cache,
        start,
        rng=rng,
        first_row=first,
        max_length=max_new_tokens,
        length_limits=limits,
        eos_id=vocab_size,
        pad_id=_NO_TOKEN,
        temperature=sampling.temperature or 1.0,
        top_k=sampling.top_k if sampling.temperature else 1,
        top_p=sampling.top_p if sampling.temperature else None,
    )
    return jnp.where(tokens == vocab_size, _NO_TOKEN, tokens)


def _shown_as_numpy(observer: Observer, tokens: Any) -> np.ndarray:
    return observer(np.asarray(tokens))


class _Watched(NamedTuple):
    """A model's cache, and whether its first step is still to come."""

    model: Cache
    is_first: Bool[Array, ""]


def _with_end(
    step_fn: StepFn, cache: Cache, vocab_size: int, eos_ids: tuple[int, ...], observer: Observer | None
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
