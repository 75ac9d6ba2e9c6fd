"""Sampling options against the logits processors of transformers: the same tokens may be drawn, as often."""

import functools

import jax
import numpy as np
import pytest

from tfx_jax.functional import sample, with_repetition_penalty, without_repeated_ngrams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, V, P = 3, 11, 8
CASES = [
    {"min_p": 0.2},
    {"min_p": 0.3, "temperature": 0.7},
    {"min_p": 0.15, "top_k": 6, "top_p": 0.8, "temperature": 1.5},
    {"repetition_penalty": 1.4, "top_p": 0.9},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3, "min_p": 0.1, "temperature": 0.9},
]


def their_probabilities(tokens, logits, options):
    """Of the next token of each row, [B, V], after the processors that transformers makes of the options."""
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0} | options)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, n_embd=4, n_layer=1, n_head=1))
    config._pad_token_tensor = config._eos_token_tensor = None
    ids = torch.tensor(tokens, dtype=torch.long)
    processors = model._get_logits_processor(config, input_ids_seq_length=P, prefix_allowed_tokens_fn=None)
    return torch.softmax(processors(ids, torch.tensor(logits)), dim=-1).numpy()


@functools.partial(jax.jit, static_argnames="options")
def draw(tokens, logits, rng, *, options):
    """One token for each row; the last token of a row is the first step's input."""
    fields = dict(options)
    step_fn, cache = (lambda tokens, cache: (logits, cache)), None
    penalty, size = fields.pop("repetition_penalty", 1.0), fields.pop("no_repeat_ngram_size", 0)
    if penalty != 1:
        seen = jax.nn.one_hot(tokens, V).max(axis=1) > 0
        step_fn, cache = with_repetition_penalty(step_fn, cache, seen, penalty)
    if size:
        lengths = np.full(len(tokens), P - 1, np.int32)
        step_fn, cache = without_repeated_ngrams(step_fn, cache, tokens[:, :-1], lengths, size=size, max_length=1)
    return sample(step_fn, cache, tokens[:, -1], rng=rng, max_length=1, eos_id=None, pad_id=-1, **fields)[0]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_tokens_are_drawn_as_often_as_by_transformers(options):
    """Of 4,096 rows, each token's share is within 5 standard errors; what is impossible there is impossible here."""
    rng, count = np.random.default_rng(0), 4096
    tokens = np.int32([[1, 2, 3, 1, 2, 5, 1, 2], [4, 4, 6, 4, 9, 4, 4, 4], [7, 8, 10, 0, 3, 7, 8, 10]])
    logits = rng.normal(0, 1.5, (B, V)).astype(np.float32)
    expected = their_probabilities(tokens, logits, options)
    assert (expected == 0).any()
    found = draw(
        np.repeat(tokens, count, 0), np.repeat(logits, count, 0), jax.random.key(0), options=tuple(options.items())
    )
    shares = np.stack([np.bincount(row, minlength=V) for row in np.asarray(found).reshape(B, count)]) / count
    assert (shares[expected == 0] == 0).all()
    assert (np.abs(shares - expected) < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()
