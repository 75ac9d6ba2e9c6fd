"""Decoding: greedy search, beam search and sampling for every `tfx_jax.nn.decoding.DecodingModel`.

`decode` generates for one batch inside `jax.jit`; `DecodeDriver` batches lists of inputs of any lengths and calls it.
"""

import contextlib
import dataclasses
import functools
import itertools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from tfx_jax.arrays import to_device, to_host
from tfx_jax.errors import UserError
from tfx_jax.fields import MAX_BEAMS, MAX_LENGTH_PENALTY, at_least, documented, within
from tfx_jax.functional.search import (
    LARGEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    LENGTH_PENALTY,
    Cache,
    StepFn,
    beam_search,
    greedy_search,
    is_valid_divisor,
    sample,
    with_repetition_penalty,
    without_repeated_ngrams,
)
from tfx_jax.models.padding import left_aligned
from tfx_jax.nn.decoding import Decoder

MAX_PROGRAMS = 64  # compiled searches that are kept, each for batches of one shape
_MIN_LENGTH = 16  # shorter inputs are padded to this length
_NO_TOKEN = -1  # padding of outputs; any id from 0 on may be a token of the model

Observer = Callable[[np.ndarray], np.ndarray]
"""Called at each step with the newest token of each row, [B] int32, -1 if none; returns True for rows to stop, [B]."""


@documented
@dataclasses.dataclass
class DecodingConfig:
    """Search options of a task; the default is the beam search of Vaswani et al. (2017), section 6.1."""

    beam_size: int = within(1, MAX_BEAMS, 4)
    # exponent of the length penalty, the paper's alpha
    length_penalty: float = within(0, MAX_LENGTH_PENALTY, LENGTH_PENALTY)
    extra_length: int = at_least(0, 50)  # how many tokens an output may be longer than its input

    def tiny(self) -> None:
        """Sets short outputs."""
        self.extra_length = 4


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Takes the most probable token at every step, and EOS at the length limit (`tfx_jax.functional.greedy_search`)."""


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Takes the best hypothesis of `tfx_jax.functional.beam_search`.

    Raises:
      UserError: if a value is out of range.
    """

    beam_size: int = 4
    length_penalty: float = LENGTH_PENALTY

    def __post_init__(self):
        _require(numbers.Integral, beam_size=self.beam_size)
        _require(numbers.Real, length_penalty=self.length_penalty)
        if not 1 <= self.beam_size <= MAX_BEAMS:
            raise UserError(f"beam_size must be at least 1 and at most {MAX_BEAMS:,}, got {self.beam_size}")
        if not 0 <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise UserError(
                f"length_penalty must be at least 0 and at most {MAX_LENGTH_PENALTY}, got {self.length_penalty}"
            )


def _require(kind: Any, **values: Any) -> None:
    """Raises UserError for a value that is no instance of `kind`, a kind of number."""
    for name, value in values.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            noun = "number" if isinstance(0.5, kind) else "whole number"
            raise UserError(f"{name} must be a {noun}, got {value!r}")


def check_length_penalty(length_penalty: float, beam_size: int) -> None:
    """Raises UserError for a length penalty without beam search, where it would change nothing."""
    if beam_size == 1 and length_penalty != LENGTH_PENALTY:
        raise UserError("length_penalty needs beam search: set beam_size above 1 as well")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Samples tokens, by default from the model's own distribution. A text is cut at the length limit.

    Raises:
      UserError: if a value is out of range.
    """

    temperature: float = 1.0  # divides the logits; 0 takes the most probable token
    top_k: int | None = None  # samples from this many of the most probable tokens
    top_p: float | None = None  # samples from the fewest tokens whose total probability reaches this value
    min_p: float | None = None  # samples from tokens with at least this share of the largest probability
    repetition_penalty: float = 1.0  # above 1, tokens of the text so far are less probable; a source does not count
    no_repeat_ngram_size: int = 0  # no sequence of this many tokens occurs twice; 0 allows it

    def __post_init__(self):
        _require(numbers.Real, temperature=self.temperature, repetition_penalty=self.repetition_penalty)
        _require(numbers.Integral, no_repeat_ngram_size=self.no_repeat_ngram_size)
        _require(numbers.Integral | None, top_k=self.top_k)
        _require(numbers.Real | None, top_p=self.top_p, min_p=self.min_p)
        if self.temperature != 0 and not is_valid_divisor(self.temperature):
            raise UserError(
                f"temperature must be 0 or at least {LEAST_TEMPERATURE} and at most {LARGEST_TEMPERATURE}, got "
                f"{self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not is_valid_divisor(self.repetition_penalty):
            raise UserError(
                f"repetition_penalty must be at least {LEAST_TEMPERATURE} and at most {LARGEST_TEMPERATURE}, got "
                f"{self.repetition_penalty}"
            )
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be at least 0 and at most 1, got {self.min_p}")
        if self.no_repeat_ngram_size < 0:
            raise UserError(f"no_repeat_ngram_size must be at least 0, got {self.no_repeat_ngram_size}")

    @property
    def reads_history(self) -> bool:
        """Whether the probability of a token depends on which ones the text has."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0


Search = Greedy | BeamSearch | Sampling
"""How the tokens of an output are chosen."""


class Constraint(Protocol):
    """Which tokens may follow the tokens of a row so far, such as those of a grammar.

    Hashable, because a compiled search depends on it. What it knows of a row is its state, a pytree of arrays with the
    rows as leading axis, which beam search repeats and reorders.
    """

    def init(self, values: Int[Array, " B"], length_limits: Int[Array, " B"], max_length: int) -> Any:
        """Returns the state before the first token.

        Args:
          values: a number for each row, which the constraint depends on.
          length_limits: maximum number of new tokens of each row, EOS included.
          max_length: maximum number of new tokens of all rows, static.
        """
        ...

    def advance(self, state: Any, tokens: Int[Array, " R"]) -> Any:
        """Returns the state after the newest token of each row.

        That is the start token at first, which changes nothing; and any token after the end of a row.
        """
        ...

    def allowed(self, state: Any) -> Bool[Array, "R V"]:
        """Returns which tokens may follow."""
        ...


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
    first_ids: Sequence[int] | Int[Array, " F"] = (),
    banned_ids: Sequence[int] = (),
    banned_next_ids: Sequence[int] = (),
    earlier: tuple[Int[Array, "B E"], Bool[Array, "B E"]] | None = None,
    temperature: Float[Array, ""] | None = None,
    observer: Observer | None = None,
    constraint: Constraint | None = None,
    constraint_values: Int[Array, " B"] | None = None,
) -> Int[Array, "B L"]:
    """Encodes a batch of inputs and generates until every row has ended; for use inside `jax.jit`.

    Args:
      decoder: the model's decoder.
      inputs: tokens, [B, S], or other inputs of the model, such as images.
      token_mask: True for tokens, False for padding; rows without tokens give arbitrary outputs. None means no padding.
      length_limits: maximum number of new tokens of each row, EOS included; None means `max_length`.
      rng: key for sampling.
      row_ids: number of each row, from which its samples are derived, so that they do not depend on the rest of the
        batch; see `tfx_jax.functional.sample`.
      search: search method and its options.
      eos_ids: tokens that end a text; exactly one for greedy and beam search.
      max_length: L, the maximum number of new tokens.
      first_ids: tokens that every output begins with, such as the target language; they count as new tokens.
      banned_ids: tokens that are never generated.
      banned_next_ids: tokens that are not generated as the first one after `first_ids`.
      earlier: tokens of each text before its input, which the model does not read, and which of them are tokens, not
        padding: the repetition penalty and repeated n-grams of a text that the model continues count them.
      temperature: divides the logits in place of the temperature of `Sampling`, unless that is 0; None means that one.
        An array may be an argument of the compiled function: other temperatures do not compile again.
      observer: called with the tokens of every step while the program runs; only for `Sampling`. As a
        `jax.tree_util.Partial` it may be an argument of the compiled function: other arrays do not compile again.
      constraint: which tokens may follow; only for `BeamSearch`.
      constraint_values: a number for each row, which the constraint depends on.

    Returns:
      The new tokens of the best text of each row, with its EOS if it has one, padded with -1.

    Raises:
      ValueError: if a constraint has no values or another search than `BeamSearch`.
    """
    if constraint is not None and (constraint_values is None or not isinstance(search, BeamSearch)):
        raise ValueError("a constraint needs BeamSearch, which may have one beam, and constraint_values")
    num_beams = search.beam_size if isinstance(search, BeamSearch) else 1
    memory = decoder.encode(inputs, token_mask)
    cache, start = decoder.init_cache(memory, max_length=max_length, num_beams=num_beams)
    limits: dict[str, Any] = {"max_length": max_length, "length_limits": length_limits}
    step_fn, vocab_size = decoder.step, decoder.vocab_size
    if isinstance(search, Sampling) and search.reads_history:
        text, exists = _text_so_far(decoder, inputs, token_mask, earlier)
        if search.repetition_penalty != 1:
            # Mark the tokens of each text as seen, [B, V]; `max` ignores tokens that are padding.
            seen = jnp.zeros((inputs.shape[0], vocab_size), bool)
            seen = seen.at[jnp.arange(inputs.shape[0])[:, None], text].max(exists)
            step_fn, cache = with_repetition_penalty(step_fn, cache, seen, search.repetition_penalty)
        if search.no_repeat_ngram_size:
            tokens, exists = left_aligned(text, exists)
            lengths = jnp.maximum(exists.sum(axis=1) - 1, 0)  # the last token of a text is the first step's input
            options = {"size": search.no_repeat_ngram_size, "max_length": max_length}
            step_fn, cache = without_repeated_ngrams(step_fn, cache, tokens, lengths, **options)
    if len(first_ids) or banned_ids or banned_next_ids:
        step_fn, cache = _constrained(step_fn, cache, vocab_size, first_ids, banned_ids, banned_next_ids)
    if isinstance(search, Sampling):
        step_fn, cache = _with_end(step_fn, cache, vocab_size, eos_ids, observer)
        limits |= {"rng": jax.random.key(0) if rng is None else rng, "row_ids": row_ids}
        limits["temperature"] = search.temperature if temperature is None else temperature
        return _sample(step_fn, cache, start, search, vocab_size, **limits)
    (eos_id,) = eos_ids
    # Whisper pads with EOS; then the rest of a row needs another filler.
    pad_id = _NO_TOKEN if decoder.pad_id == eos_id else decoder.pad_id
    limits |= {"eos_id": eos_id, "pad_id": pad_id}
    if isinstance(search, Greedy):
        tokens, _ = greedy_search(step_fn, cache, start, **limits)
    else:
        options = {"beam_size": num_beams, "length_penalty": search.length_penalty}
        if constraint is not None and constraint_values is not None:
            row_limits = jnp.full(start.shape, max_length) if length_limits is None else length_limits
            state = constraint.init(constraint_values, row_limits, max_length)
            step_fn, cache, options["allowed_fn"] = _with_constraint(constraint, state, step_fn, cache)
        tokens = beam_search(step_fn, cache, start, **options, **limits).tokens[:, 0]
    return jnp.where(tokens == pad_id, _NO_TOKEN, tokens)


def _text_so_far(
    decoder: Decoder, inputs: Array, token_mask: Array | None, earlier: tuple[Array, Array] | None
) -> tuple[Int[Array, "B P"], Bool[Array, "B P"]]:
    """Returns the tokens that an output continues, and which are no padding; none for a source, which is no part of it.

    The arguments are those of `decode`.
    """
    if not decoder.continues_inputs:
        return jnp.zeros((inputs.shape[0], 0), jnp.int32), jnp.zeros((inputs.shape[0], 0), bool)
    exists = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
    if earlier is None:
        return inputs, exists
    return jnp.concatenate([earlier[0], inputs], axis=1), jnp.concatenate([earlier[1], exists], axis=1)


def _with_constraint(
    constraint: Constraint, state: Any, step_fn: StepFn, cache: Cache
) -> tuple[StepFn, Cache, Callable[[Cache], Bool[Array, "R V"]]]:
    """Adds the state of a constraint to the cache; returns both and the `allowed_fn` of `beam_search`."""

    def step(tokens: Array, cache: tuple[Cache, Any]) -> tuple[Array, tuple[Cache, Any]]:
        logits, model = step_fn(tokens, cache[0])
        return logits, (model, constraint.advance(cache[1], tokens))

    return step, (cache, state), lambda cache: constraint.allowed(cache[1])


def _sample(
    step_fn: StepFn,
    cache: Cache,
    start: Array,
    search: Sampling,
    end: int,
    *,
    temperature: Any,
    **options: Any,
) -> Array:
    """Samples tokens up to `end`, the extra token of `_with_end`.

    Returns:
      [B, L] int32, with -1 from `end` on.
    """
    tokens, _ = sample(
        step_fn,
        cache,
        start,
        eos_id=end,
        pad_id=_NO_TOKEN,
        # Temperature 0 takes the most probable token: top_k=1, at any temperature.
        temperature=temperature if search.temperature else 1.0,
        top_k=search.top_k if search.temperature else 1,
        top_p=search.top_p if search.temperature else None,
        min_p=search.min_p if search.temperature else None,
        **options,
    )
    return jnp.where(tokens == end, _NO_TOKEN, tokens)


class DecodeDriver:
    """Decodes lists of token ids with any model; pads to few shapes, and compiles once for each.

    Drivers of equal searches share their programs, also if their temperatures, observers or parameters differ. The last
    `MAX_PROGRAMS` are kept.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        search: Search,
        *,
        eos_ids: Sequence[int],
        first_ids: Sequence[int] = (),
        int8: bool = False,
        observer: Observer | None = None,
        constraint: Constraint | None = None,
    ):
        """Prepares a search; parameters are passed to `decoder`.

        Args:
          graphdef: graph definition of a `DecodingModel`.
          search: search method and its options.
          eos_ids: tokens that end a text.
          first_ids: tokens that every output begins with, see `decode`.
          int8: whether to multiply with int8 weights, see `tfx_jax.functional.int8_product`: faster, not exact.
          observer: called with the tokens of every step while the program runs, to print them or to stop rows; only for
            `Sampling`. None avoids the transfer to the host.
          constraint: which tokens may follow; only for `BeamSearch`.

        Raises:
          UserError: if greedy or beam search has an observer, or not exactly one token in `eos_ids`.
        """
        if not isinstance(search, Sampling) and (len(eos_ids) != 1 or observer is not None):
            kind = "beam" if isinstance(search, BeamSearch) else "greedy"
            raise UserError(
                f"a {kind} search needs exactly one token that ends a text, got {len(eos_ids)}, and no observer"
            )
        self._graphdef, self._int8, self._first_ids = graphdef, int8, tuple(first_ids)
        self._search, self._eos_ids, self._observer, self._constraint = search, tuple(eos_ids), observer, constraint
        self._temperature = None
        if isinstance(search, Sampling) and search.temperature:  # an argument of the programs, which all others share
            self._search = dataclasses.replace(search, temperature=1.0)
            self._temperature = np.float32(search.temperature)

    def decoder(self, params: Any) -> Decoder:
        """Returns the model's decoder with these parameters, to be reused for all calls.

        Raises:
          UserError: if one of `first_ids` is outside the vocabulary.
        """
        decoder = nnx.merge(self._graphdef, to_device(params)).decoder(int8=self._int8)
        if invalid := [token for token in self._first_ids if not 0 <= token < decoder.vocab_size]:
            raise UserError(f"first_ids has the token id {invalid[0]}; use ids in 0 .. {decoder.vocab_size - 1}")
        return decoder

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
        earlier: Sequence[Sequence[int]] | None = None,
        constraint_values: Sequence[int] | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> list[list[int]]:
        """Decodes each input.

        Args:
          decoder: the result of `decoder`.
          inputs: token ids, at least one each.
          max_new_tokens: function from the length of an input to the maximum number of new tokens, EOS included.
          max_input_length: upper bound of the padded length of inputs; None means only the model's own limit.
          tokens_per_batch: number of input tokens per batch, padding included; None makes one batch of all inputs.
          seed: sampling seed. The samples of an input depend on the seed and on the input's number only.
          first: number of the first input, for callers that process inputs in parts.
          earlier: tokens of each text before its input, which only options against repetition read, see `decode`.
          constraint_values: for each input the number that the constraint depends on.
          on_batch: called after each batch with the number of its inputs.

        Returns:
          The new tokens of each input, with EOS if it was generated.

        Raises:
          UserError: if an input is empty, has an id outside the vocabulary or too many tokens, or if `seed` does not
            fit into 32 bits.
        """

        def padded(length: int) -> int:
            """Rounds a length up to a power of two, within the limits; few shapes save compilations."""
            power_of_two = max(_MIN_LENGTH, 1 << (length - 1).bit_length())
            limits = max_input_length, decoder.max_input_length(max_new_tokens(power_of_two))  # None: no limit
            return max(length, min([power_of_two, *(limit for limit in limits if limit is not None)]))

        if not 0 <= seed < 2**32:
            raise UserError(f"seed must be in 0 .. {2**32 - 1}, got {seed}")
        for number, ids in enumerate(inputs, start=first + 1):
            check_prompt(decoder, number, ids, max_new_tokens(len(ids)))
        outputs: list[list[int]] = [[] for _ in inputs]
        for num_rows, members in _batches([len(ids) for ids in inputs], padded, tokens_per_batch):
            # The batch is filled up with copies of its first input, limited to one new token.
            num_copies = num_rows - len(members)
            row_ids = np.pad(np.array(members, np.int32), (0, num_copies), constant_values=members[0])
            rows = [inputs[index] for index in row_ids]
            limits = [max_new_tokens(len(inputs[member])) for member in members] + [1] * num_copies
            length = padded(max(map(len, rows)))
            padded_tokens, token_mask = _padded_batch(rows, length)
            tokens_before, num_before = None, 0
            if earlier is not None:
                before = [earlier[index] for index in row_ids]
                num_before = 1 << max(map(len, before)).bit_length()
                tokens_before = _padded_batch(before, num_before)
            values = None if constraint_values is None else np.array(constraint_values, np.int32)[row_ids]
            run = self._program(num_rows, length, max_new_tokens(length), num_before)
            with _called_by_number(self._observer) as observer:
                tokens = run(
                    decoder,
                    padded_tokens,
                    token_mask,
                    np.array(limits, np.int32),
                    jax.random.key(seed),
                    first + row_ids,
                    earlier=tokens_before,
                    max_length=max_new_tokens(length),
                    temperature=self._temperature,
                    observer=observer,
                    constraint_values=values,
                )
                all_new_tokens = to_host(tokens).tolist()  # waits for the program, which calls the observer
            for member, row in zip(members, all_new_tokens, strict=False):
                outputs[member] = list(itertools.takewhile(lambda token: token != _NO_TOKEN, row))
            if on_batch is not None:
                on_batch(len(members))
        return outputs

    def _program(self, *shape: int) -> Any:
        """Returns the compiled search for batches of these sizes, which all drivers share."""
        return _program(self._search, self._eos_ids, self._first_ids, self._constraint, shape)


def check_prompt(decoder: Decoder, number: int, ids: Sequence[int], max_new_tokens: int) -> None:
    """Raises UserError if input `number` is empty, has an id outside the vocabulary or too many tokens."""
    length = len(ids)
    if not length:
        raise UserError(f"prompt {number} has no token, but needs at least one")
    if invalid := [token for token in (min(ids), max(ids)) if not 0 <= token < decoder.vocab_size]:
        raise UserError(f"prompt {number} has the token id {invalid[0]}; use ids in 0 .. {decoder.vocab_size - 1}")
    limit = decoder.max_input_length(max_new_tokens)
    if limit is not None and length > limit:
        raise UserError(
            f"prompt {number} has {length:,} tokens: with max_new_tokens={max_new_tokens} the model has room for "
            f"{max(limit, 0):,}"
        )


def _padded_batch(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens padded at the end, int32; token mask, bool), both [len(rows), length]."""
    tokens = np.zeros((len(rows), length), np.int32)
    token_mask = np.zeros((len(rows), length), bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
        token_mask[row, : len(ids)] = True
    return tokens, token_mask


def _batches(
    lengths: Sequence[int], padded: Callable[[int], int], tokens_per_batch: int | None
) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of rows, indices of the inputs) of each batch, short inputs first.

    Args:
      lengths: length of each input.
      padded: returns the padded length of an input from its length; inputs of a batch have the same padded length.
      tokens_per_batch: number of tokens of a batch, padding included; None makes one batch of all inputs.
    """
    count = len(lengths)
    if tokens_per_batch is None:
        if count:
            yield 1 << (count - 1).bit_length(), list(range(count))  # rounded up to a power of two: few shapes
        return
    are_few = _MIN_LENGTH * count <= tokens_per_batch
    order = sorted(range(count), key=lambda index: lengths[index])
    for length, group in itertools.groupby(order, key=lambda index: padded(lengths[index])):
        members = list(group)
        num_rows = max(1, tokens_per_batch // length)
        if are_few:  # of which batches would otherwise be mostly padding
            num_rows = min(num_rows, 1 << (len(members) - 1).bit_length())
        for start in range(0, len(members), num_rows):
            yield num_rows, members[start : start + num_rows]


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _program(
    search: Search,
    eos_ids: tuple[int, ...],
    first_ids: tuple[int, ...],
    constraint: Constraint | None,
    shape: tuple[int, ...],
) -> Any:
    """Returns `decode` with a search, compiled; for each shape another function, so that old programs are freed."""
    options: dict[str, Any] = {"search": search, "eos_ids": eos_ids, "first_ids": first_ids, "constraint": constraint}
    return jax.jit(functools.partial(decode, **options), static_argnames="max_length")


_observers: dict[int, Observer] = {}  # of the programs that run, by number
_numbers = itertools.count()


@contextlib.contextmanager
def _called_by_number(observer: Observer | None) -> Iterator[jax.tree_util.Partial | None]:
    """Yields a function for `decode` that calls an observer by its number, an array: another one compiles nothing."""
    if observer is None:
        yield None
        return
    number = next(_numbers)
    _observers[number] = observer
    try:
        yield jax.tree_util.Partial(_observe, np.int32(number))
    finally:
        del _observers[number]


def _observe(number: Any, tokens: Any) -> np.ndarray:
    """Calls an observer with the tokens as a NumPy array, because `io_callback` may pass a JAX array."""
    if int(number) not in _observers:  # its driver was interrupted: the program should end
        return np.ones(np.shape(tokens), bool)
    return _observers[int(number)](np.asarray(tokens))


class _EndCache(NamedTuple):
    """A model's cache, and whether no step has been taken yet."""

    model: Cache
    is_first: Bool[Array, ""]


def _with_end(
    step_fn: StepFn, cache: Cache, vocab_size: int, eos_ids: Sequence[int], observer: Observer | None
) -> tuple[StepFn, Cache]:
    """Adds a token with id `vocab_size` that always follows one of `eos_ids` or a stop by the observer.

    A search that ends at this token thus supports several EOS tokens or none, prompts that begin with EOS, and rows
    that stop at different steps.

    Returns:
      (step function with logits [B, vocab_size + 1], its initial cache).
    """
    observe: Any = observer
    arguments: tuple[Any, ...] = ()
    if isinstance(observer, jax.tree_util.Partial):  # its arrays have to be arguments of the callback
        observe, arguments = observer.func, observer.args

    def step(tokens: Array, cache: _EndCache) -> tuple[Array, _EndCache]:
        """Takes a step of the model; rows that are over choose the extra token."""
        is_over = jnp.isin(tokens, jnp.asarray(eos_ids, jnp.int32)) if eos_ids else jnp.zeros(tokens.shape, bool)
        if observer is not None:
            # The input of the first step is not a generated token.
            new_tokens = jnp.where(cache.is_first | (tokens >= vocab_size), _NO_TOKEN, tokens)
            is_over_shape = jax.ShapeDtypeStruct(tokens.shape, bool)
            is_over |= io_callback(observe, is_over_shape, *arguments, new_tokens, ordered=True)
        is_over = (is_over & ~cache.is_first)[:, None]  # [B, 1]
        logits, model = step_fn(jnp.clip(tokens, 0, vocab_size - 1), cache.model)
        # Rows that are over get the extra token with probability 1, all others with probability 0.
        end_logits = jnp.where(is_over, 0.0, -jnp.inf).astype(logits.dtype)  # [B, 1]
        logits = jnp.concatenate([jnp.where(is_over, -jnp.inf, logits), end_logits], axis=1)
        return logits, _EndCache(model, jnp.zeros((), bool))

    return step, _EndCache(cache, jnp.ones((), bool))


class _CountingCache(NamedTuple):
    """A model's cache, and the number of steps taken."""

    model: Cache
    num_steps: Int[Array, ""]


def _constrained(
    step_fn: StepFn,
    cache: Cache,
    vocab_size: int,
    first_ids: Sequence[int] | Array,
    banned_ids: Sequence[int],
    banned_next_ids: Sequence[int],
) -> tuple[StepFn, Cache]:
    """Forces and bans tokens as `decode` describes; returns the step function and its initial cache."""
    first, num_first = jnp.asarray(first_ids, jnp.int32), len(first_ids)
    ids = jnp.arange(vocab_size)
    # Which tokens are possible, [steps, V]: one row for each of `first_ids`, one for the step after them, and one for
    # all later steps.
    later = ~jnp.isin(ids, jnp.asarray(banned_ids, jnp.int32))
    following = later & ~jnp.isin(ids, jnp.asarray(banned_next_ids, jnp.int32))
    possible = jnp.concatenate([ids[None] == first[:, None], following[None], later[None]])

    def step(tokens: Array, cache: _CountingCache) -> tuple[Array, _CountingCache]:
        """Takes a step of the model, with log probability 0 for a forced token and -inf for banned ones."""
        logits, model = step_fn(tokens, cache.model)
        row = jnp.minimum(cache.num_steps, num_first + 1)
        # A forced token is certain, so its logit must not be -inf, whatever the model says.
        logits = jnp.where(row < num_first, jnp.zeros_like(logits), logits)
        return jnp.where(possible[row], logits, -jnp.inf), _CountingCache(model, cache.num_steps + 1)

    return step, _CountingCache(cache, jnp.zeros((), jnp.int32))
