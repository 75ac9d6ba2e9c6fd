"""Greedy search, beam search and sampling over any step function and any cache.

A model takes part through one function, `logits, cache = step_fn(tokens, cache)`: `tokens` [R] are the newest tokens of
R rows, `logits` [R, V] score what may come next, and `cache` is any pytree: keys and values, a recurrent state, None.
Its arrays have the rows as leading axis; its scalars, such as a position counter, are common to all rows. What no step
changes (encoder output, its padding mask) is closed over by `step_fn`.

Common to the three decoders:
  * log-probabilities are those of a float32 softmax over all tokens but PAD, which is never generated;
  * logits may be -inf to forbid tokens. A row that may go nowhere gets the log-probability -inf; no other row notices;
  * rows that have ended are fed PAD (in a beam: tokens that are thrown away) until the last row of the batch has ended;
  * a bare call compiles its loop anew each time: call them inside `jax.jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Cache = Any
StepFn = Callable[[Int[Array, " R"], Cache], tuple[Float[Array, "R V"], Cache]]


class Decoded(NamedTuple):
    """What beam search found, best hypothesis first.

    Attributes:
      tokens: [B, W, L], int32, EOS included and PAD after it, without the start token. A hypothesis that does not
        exist, because the vocabulary or the limit allows fewer than W, is all PAD.
      scores: log-probability over length penalty, [B, W], float32; -inf for a hypothesis that does not exist.
    """

    tokens: Int[Array, "B W L"]
    scores: Float[Array, "B W"]


def greedy_search(
    step_fn: StepFn,
    cache: Cache,
    start_tokens: Int[Array, " B"],
    *,
    max_length: int,
    length_limits: Int[Array, " B"] | None = None,
    eos_id: int,
    pad_id: int = 0,
) -> tuple[Int[Array, "B L"], Float[Array, " B"]]:
    """Takes the most probable token at every step, and EOS at the last position that a row's limit allows.

    Args:
      step_fn: the model, called with R = B rows; see the head of this file.
      cache: its state before the first step.
      start_tokens: what the first step is fed, [B].
      max_length: L, the most tokens to generate, EOS included; static.
      length_limits: the most tokens of each row, EOS included, [B]; clipped to 1 .. max_length. None means max_length.
      eos_id: the token that ends a row.
      pad_id: fills a row after its end and is never generated; -1 where every id is a token.

    Returns:
      Tokens, [B, L], int32, EOS included and the start token not; and their log-probabilities, [B], float32.

    Raises:
      ValueError: if an argument is out of range, or a shape contradicts the number of rows.

    >>> table = jnp.log(jnp.array([[0, 0, 0, 1], [0, 0, 0.4, 0.6], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]))  # given the last
    >>> model = lambda tokens, cache: (table[tokens], cache)
    >>> tokens, log_probs = greedy_search(model, None, jnp.array([1]), max_length=2, eos_id=2)
    >>> tokens.tolist(), f"{jnp.exp(log_probs[0]):.2f}"
    ([[3, 2]], '0.30')
    """
    buffer, limits = _check_arguments(cache, start_tokens, max_length, length_limits, eos_id, pad_id)

    def choose(log_probs, length):
        return jnp.where(length >= limits, eos_id, jnp.argmax(log_probs, axis=-1))

    return _generate(step_fn, cache, buffer, limits, choose, eos_id, pad_id)


def sample(
    step_fn: StepFn,
    cache: Cache,
    start_tokens: Int[Array, " B"],
    *,
    rng: PRNGKeyArray,
    max_length: int,
    length_limits: Int[Array, " B"] | None = None,
    eos_id: int | None,
    pad_id: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[Int[Array, "B L"], Float[Array, " B"]]:
    """Draws every token from the model: at a temperature, from its `top_k` best tokens, from their nucleus `top_p`.

    The three apply in this order. The nucleus is the smallest set of tokens whose mass reaches `top_p` ("The Curious
    Case of Neural Text Degeneration", Holtzman et al., 2020, section 3.1, https://arxiv.org/abs/1904.09751); of tokens
    equally probable at its border the lower ids are in. A row that reaches its limit is cut there, without EOS, and so
    is an exact draw of the model's first tokens.

    Args:
      step_fn: as for `greedy_search`.
      cache: as for `greedy_search`.
      start_tokens: as for `greedy_search`.
      rng: folded with step and row, so that a row's draw does not depend on how many others there are.
      max_length: as for `greedy_search`.
      length_limits: as for `greedy_search`.
      eos_id: the token that ends a row; None if the model has none.
      pad_id: as for `greedy_search`.
      temperature: divides the logits; towards 0 the draw becomes greedy.
      top_k: keep that many of the most probable tokens; None keeps all.
      top_p: keep the nucleus of that mass; None or 1 keeps all.

    Returns:
      Tokens, [B, L], int32, the start token not included; and their log-probabilities, [B], float32, under the model
      itself, at temperature 1 and not truncated.

    Raises:
      ValueError: if an argument is out of range, or a shape contradicts the number of rows.
    """
    if not temperature >= 1e-30:  # so that the best log-probability, -log(V) at least, stays finite
        raise ValueError(f"temperature={temperature} is below 1e-30; for the most probable token use greedy_search")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} keeps no token; give at least 1, or None to keep all")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is no probability mass; give 0 < top_p <= 1, or None to keep all")
    buffer, limits = _check_arguments(cache, start_tokens, max_length, length_limits, eos_id, pad_id)
    rows = jnp.arange(limits.size)

    def choose(log_probs, length):
        row_rngs = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(rng, length), rows)
        logits, kept = log_probs / temperature, None
        if top_k is not None:
            logits, kept = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))
        if top_p is not None and top_p < 1:
            logits = jnp.where(_nucleus(jax.nn.softmax(logits), top_p), logits, -jnp.inf)
        drawn = jax.vmap(jax.random.categorical)(row_rngs, logits)
        return drawn if kept is None else jnp.take_along_axis(kept, drawn[:, None], axis=-1)[:, 0]

    return _generate(step_fn, cache, buffer, limits, choose, eos_id, pad_id)


def beam_search(
    step_fn: StepFn,
    cache: Cache,
    start_tokens: Int[Array, " B"],
    *,
    beam_size: int = 4,
    max_length: int,
    length_limits: Int[Array, " B"] | None = None,
    eos_id: int,
    pad_id: int = 0,
    alpha: float = 0.6,
) -> Decoded:
    r"""Searches for the hypotheses Y of highest score log P(Y) / ((5 + |Y|) / 6)^alpha.

    The score is equation 14 of "Google's Neural Machine Translation System" (Wu et al., 2016,
    https://arxiv.org/abs/1609.08144) without its coverage term; |Y| counts EOS. Only sequences that end in EOS are
    hypotheses; at the last position of a row's limit nothing but EOS may follow, so that there always is one.

    Each step ranks all continuations of a row's W sequences. Those among the W best that end in EOS compete by score
    for the row's W finished places; the W best of the others live on. The search stops when in no row a living sequence
    could still win such a place, and not earlier. More steps would change nothing, so a row's result does not depend on
    the rest of the batch.

    Args:
      step_fn: called with R = B * W rows, the W of one input side by side: what it closes over may stay [B, ...] if it
        views its rows as [B, W, ...].
      cache: before the first step, with B rows; repeated W times here, its rows then follow their sequences.
      start_tokens: as for `greedy_search`.
      beam_size: W.
      max_length: as for `greedy_search`.
      length_limits: as for `greedy_search`.
      eos_id: as for `greedy_search`.
      pad_id: as for `greedy_search`.
      alpha: 0 compares log-probabilities, which favours the short; more favours the long.

    Returns:
      The W best hypotheses of every row that were found, with their scores.

    Raises:
      ValueError: if an argument is out of range, or a shape contradicts the number of rows.

    >>> table = jnp.log(jnp.array([[0, 0, 0, 1], [0, 0, 0.4, 0.6], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]))  # given the last
    >>> model = lambda tokens, cache: (table[tokens], cache)
    >>> found = beam_search(model, None, jnp.array([1]), beam_size=2, max_length=3, eos_id=2, alpha=0.0)
    >>> found.tokens[0].tolist(), [f"{probability:.2f}" for probability in jnp.exp(found.scores[0])]
    ([[2, 0, 0], [3, 2, 0]], ['0.40', '0.30'])
    """
    if beam_size < 1:
        raise ValueError(f"beam_size={beam_size} is not positive")
    if not alpha >= 0:
        raise ValueError(f"alpha={alpha} is negative: the search could not tell when to stop; give alpha >= 0")
    buffer, limits = _check_arguments(cache, start_tokens, max_length, length_limits, eos_id, pad_id)
    # One table for scores and bound alike: they must agree to the last bit for the bound to hold.
    penalties = jnp.asarray(((5 + np.arange(max_length + 1)) / 6) ** alpha, jnp.float32)
    penalties_at_limit = penalties[limits]

    def may_improve(beams: _Beams) -> Bool[Array, ""]:
        # A log-probability only falls as a sequence grows, and no penalty exceeds the one at the limit. There a row has
        # no living sequence left, so this also ends the loop at max_length.
        best_score = beams.log_probs[:, 0] / penalties_at_limit
        return jnp.any(best_score > beams.finished_scores[:, -1])

    def extend(beams: _Beams) -> _Beams:
        length = beams.length + 1
        last = jax.lax.dynamic_index_in_dim(beams.tokens, beams.length, axis=2, keepdims=False)
        log_probs, cache = _next_log_probs(step_fn, last.reshape(-1), beams.cache, eos_id, pad_id)
        totals = beams.log_probs[..., None] + log_probs.reshape(*last.shape, -1)
        survivors, parents, tokens = _survivors(totals, length >= limits, eos_id)
        ended = _among_best(totals[..., eos_id], survivors)
        finished_tokens, finished_scores = _keep_best(beams, ended / penalties[length], eos_id)
        return _Beams(
            length=length,
            tokens=_write(jnp.take_along_axis(beams.tokens, parents[..., None], axis=1), length, tokens),
            log_probs=survivors,
            finished_tokens=finished_tokens,
            finished_scores=finished_scores,
            cache=_follow(cache, parents),
        )

    beams = jax.lax.while_loop(may_improve, extend, _first_beams(cache, buffer, beam_size, pad_id))
    return Decoded(tokens=beams.finished_tokens[..., 1:], scores=beams.finished_scores)


class _Beams(NamedTuple):
    """What beam search carries from step to step; C = 1 + L, with the start token in column 0."""

    length: Int[Array, ""]  # tokens of each living sequence, the start token not counted
    tokens: Int[Array, "B W C"]  # living sequences, best first
    log_probs: Float[Array, "B W"]  # theirs; -inf where there is no sequence
    finished_tokens: Int[Array, "B W C"]
    finished_scores: Float[Array, "B W"]
    cache: Cache  # B * W rows


def _first_beams(cache: Cache, buffer: Int[Array, "B C"], beam_size: int, pad_id: int) -> _Beams:
    """One living sequence for each row, the empty one, and nothing finished."""
    tokens = jnp.repeat(buffer[:, None], beam_size, axis=1)
    nothing = jnp.full(tokens.shape[:2], -jnp.inf, jnp.float32)
    return _Beams(
        length=jnp.zeros((), jnp.int32),
        tokens=tokens,
        log_probs=nothing.at[:, 0].set(0.0),
        finished_tokens=jnp.full_like(tokens, pad_id),
        finished_scores=nothing,
        cache=jax.tree.map(lambda leaf: jnp.repeat(leaf, beam_size, axis=0) if jnp.ndim(leaf) else leaf, cache),
    )


def _survivors(
    totals: Float[Array, "B W V"], is_last: Bool[Array, " B"], eos_id: int
) -> tuple[Float[Array, "B W"], Int[Array, "B W"], Int[Array, "B W"]]:
    """The W best continuations by a token other than EOS: log-probability, parent, token."""
    batch, beam_size, vocab_size = totals.shape
    is_barred = (jnp.arange(vocab_size) == eos_id)[None, None, :] | is_last[:, None, None]
    candidates = jnp.where(is_barred, -jnp.inf, totals)
    # One pass over [B, W * V]: on CPU, ranking each beam by itself and then merging took 5 to 25 % longer, W rounds of
    # argmax 2 to 9 times as long (B from 1 to 64, W = 4, V = 10,000 and 32,000).
    log_probs, places = jax.lax.top_k(candidates.reshape(batch, -1), beam_size)
    return log_probs, places // vocab_size, places % vocab_size


def _among_best(ended: Float[Array, "B W"], survivors: Float[Array, "B W"]) -> Float[Array, "B W"]:
    """`ended` where it is among the W best of both, else -inf: what a beam of W drops must not finish either."""
    worst_kept = jax.lax.top_k(jnp.concatenate([ended, survivors], axis=1), ended.shape[1])[0][:, -1:]
    return jnp.where(ended >= worst_kept, ended, -jnp.inf)


def _keep_best(
    beams: _Beams, scores: Float[Array, "B W"], eos_id: int
) -> tuple[Int[Array, "B W C"], Float[Array, "B W"]]:
    """The W best of the finished hypotheses and the living sequences with EOS appended, whose scores are given."""
    ended_tokens = _write(beams.tokens, beams.length + 1, jnp.full(scores.shape, eos_id, jnp.int32))
    # The old come first: `top_k` prefers them when scores are equal, so that -inf never replaces the blank hypothesis.
    scores, kept = jax.lax.top_k(jnp.concatenate([beams.finished_scores, scores], axis=1), scores.shape[1])
    tokens = jnp.concatenate([beams.finished_tokens, ended_tokens], axis=1)
    return jnp.take_along_axis(tokens, kept[..., None], axis=1), scores


def _follow(cache: Cache, parents: Int[Array, "B W"]) -> Cache:
    """Gives every sequence the cache rows of its parent.

    The batch stays an axis of the gather, which then needs no communication when the rows are sharded over devices.
    """
    take_beams = jax.vmap(lambda beams, chosen: jnp.take(beams, chosen, axis=0, mode="clip"))

    def follow(leaf):
        return take_beams(leaf.reshape(*parents.shape, *leaf.shape[1:]), parents).reshape(leaf.shape)

    return jax.tree.map(lambda leaf: follow(leaf) if jnp.ndim(leaf) else leaf, cache)


class _Paths(NamedTuple):
    """What greedy search and sampling carry from step to step; C = 1 + L, with the start token in column 0."""

    length: Int[Array, ""]
    tokens: Int[Array, "B C"]
    log_probs: Float[Array, " B"]
    is_done: Bool[Array, " B"]
    cache: Cache


def _generate(
    step_fn: StepFn, cache: Cache, buffer: Array, limits: Array, choose: Callable, eos_id: int | None, pad_id: int
) -> tuple[Int[Array, "B L"], Float[Array, " B"]]:
    """Appends what `choose(log_probs, length)` picks until every row has met EOS, its limit or a dead end."""

    def extend(paths: _Paths) -> _Paths:
        length = paths.length + 1
        last = jax.lax.dynamic_index_in_dim(paths.tokens, paths.length, axis=1, keepdims=False)
        log_probs, cache = _next_log_probs(step_fn, last, paths.cache, eos_id, pad_id)
        chosen = choose(log_probs, length)
        gain = jnp.take_along_axis(log_probs, chosen[:, None], axis=1)[:, 0]
        is_dead_end = jnp.isneginf(gain)
        is_end = (length >= limits) | is_dead_end
        if eos_id is not None:
            is_end |= chosen == eos_id
        return _Paths(
            length=length,
            tokens=_write(paths.tokens, length, jnp.where(paths.is_done | is_dead_end, pad_id, chosen)),
            log_probs=paths.log_probs + jnp.where(paths.is_done, 0.0, gain),
            is_done=paths.is_done | is_end,
            cache=cache,
        )

    first = _Paths(
        length=jnp.zeros((), jnp.int32),
        tokens=buffer,
        log_probs=jnp.zeros(limits.shape, jnp.float32),
        is_done=jnp.zeros(limits.shape, bool),
        cache=cache,
    )
    paths = jax.lax.while_loop(lambda paths: ~jnp.all(paths.is_done), extend, first)
    return paths.tokens[:, 1:], paths.log_probs


def _next_log_probs(
    step_fn: StepFn, tokens: Int[Array, " R"], cache: Cache, eos_id: int | None, pad_id: int
) -> tuple[Float[Array, "R V"], Cache]:
    """Log-probabilities of the next token in float32, with PAD impossible."""
    logits, cache = step_fn(tokens, cache)
    if logits.ndim != 2 or logits.shape[0] != tokens.size:
        raise ValueError(f"step_fn returned logits of shape {logits.shape} for {tokens.size} rows; expected [rows, V]")
    vocab_size = logits.shape[1]
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id={eos_id} is outside the vocabulary: step_fn returned V={vocab_size} logits")
    logits = jnp.where((jnp.arange(vocab_size) == pad_id)[None, :], -jnp.inf, logits.astype(jnp.float32))
    # A row that allows no token would be NaN.
    is_dead_end = jnp.isneginf(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.where(is_dead_end, -jnp.inf, jax.nn.log_softmax(logits)), cache


def _nucleus(probs: Float[Array, "R V"], top_p: float) -> Bool[Array, "R V"]:
    """True for the smallest set of tokens whose mass reaches `top_p`.

    Bisects the bit pattern of the probability at the border: positive floats are ordered as their bits are. For 16 rows
    of 32,000 tokens on CPU these 31 passes take 5 ms, a sort 90.
    """
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def mass_from(border):
        return jnp.sum(jnp.where(bits >= border, probs, 0.0), axis=-1, keepdims=True)

    def try_bit(index, border):
        higher = border | (1 << (30 - index))
        return jnp.where(mass_from(higher) >= top_p, higher, border)

    border = jax.lax.fori_loop(0, 31, try_bit, jnp.zeros((probs.shape[0], 1), jnp.int32))
    is_tied = bits == border
    ties_before = jnp.cumsum(is_tied, axis=-1, dtype=jnp.float32) - 1.0
    mass_before = mass_from(border + 1) + ties_before * jax.lax.bitcast_convert_type(border, jnp.float32)
    return (bits > border) | (is_tied & (mass_before < top_p))


def _write(tokens: Int[Array, "*rows C"], column: Int[Array, ""], values: Int[Array, "*rows"]) -> Int[Array, "..."]:
    return jax.lax.dynamic_update_index_in_dim(tokens, values.astype(tokens.dtype), column, axis=-1)


def _check_arguments(
    cache: Cache, start_tokens: Array, max_length: int, length_limits: Array | None, eos_id: int | None, pad_id: int
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Token buffer, with start tokens in column 0 and PAD in the L columns after it, and the limit of every row."""
    starts = jnp.asarray(start_tokens, jnp.int32)
    limits = jnp.asarray(jnp.full_like(starts, max_length) if length_limits is None else length_limits, jnp.int32)
    if starts.ndim != 1 or limits.shape != starts.shape:
        raise ValueError(f"start_tokens {starts.shape} and length_limits {limits.shape} must have one shape, [B]")
    if max_length < 1:
        raise ValueError(f"max_length={max_length} leaves no room for a token")
    if eos_id == pad_id:
        raise ValueError(f"eos_id and pad_id are both {eos_id}, but PAD is never generated: no row could end")
    for path, leaf in jax.tree.leaves_with_path(cache):
        if jnp.ndim(leaf) and leaf.shape[0] != starts.size:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"cache {name} has shape {leaf.shape}, but start_tokens has {starts.size} rows")
    buffer = jnp.full((starts.size, 1 + max_length), pad_id, jnp.int32).at[:, 0].set(starts)
    return buffer, jnp.clip(limits, 1, max_length)
