"""The targets that a search writes are the model's."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.generation.decoding import BeamSearch
from tfx_jax.models import T5, T5Config
from tfx_jax.tasks.text.text_to_text import write_targets


@pytest.fixture(scope="module")
def model(draw_model):
    config = T5Config(vocab_size=23, num_layers=1, d_model=16, num_heads=2, d_k=8, d_ff=32)
    return draw_model(lambda: T5(config, rngs=nnx.Rngs(0)))


def sources():
    rng = np.random.default_rng(1)
    source = rng.integers(2, 23, (6, 7)).astype(np.int32)
    source[3:, 4:] = 0
    source[-1] = 0  # padding
    return source


@functools.lru_cache
def log_probs_fn(model):
    graphdef, params = nnx.split(model)
    logits_fn = jax.jit(lambda params, source, target: nnx.merge(graphdef, params)(source, target))
    return functools.partial(logits_fn, params)


def log_probs(model, source, target):
    """Of every token but padding, which is never written, by teacher forcing, in float64."""
    logits = np.array(log_probs_fn(model)(source, target), np.float64)
    log_z = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    logits[..., 0] = -np.inf
    return logits - log_z


@functools.lru_cache
def write(model, **options):
    """What the model writes for the sources; found once for each model and options."""
    graphdef, params = nnx.split(model)
    source = sources()
    written = jax.jit(lambda params: write_targets(nnx.merge(graphdef, params), {"source": source}, **options))(params)
    return np.asarray(written)


def test_greedy_targets_are_the_first_choices(model):
    found = write(model, max_length=6)
    assert found.shape == (6, 6)
    assert len({tuple(row) for row in found[:-1].tolist()}) > 1
    choices = log_probs(model, sources(), found).argmax(axis=-1)
    for row, choice in zip(found[:-1].tolist(), choices[:-1].tolist(), strict=True):
        end = row.index(1)
        assert row[:end] == choice[:end]
        assert choice[end] == 1 or end == 5  # the end by choice, or at the limit
        assert set(row[end + 1 :]) <= {0}
    assert found[-1].tolist() == [1, 0, 0, 0, 0, 0]  # nothing to read


def test_a_beam_finds_no_worse(model):
    source = sources()

    def score(tokens):
        logp = np.take_along_axis(log_probs(model, source, tokens), tokens[..., None], axis=-1)[..., 0]
        token_mask = tokens != 0
        return np.where(token_mask, logp, 0).sum(axis=1) / ((5 + token_mask.sum(axis=1)) / 6) ** 0.6

    greedy, beam = write(model, max_length=6), write(model, max_length=6, search=BeamSearch(8))
    assert (score(beam)[:-1] >= score(greedy)[:-1] - 1e-5).all()
    assert (score(beam)[:-1] > score(greedy)[:-1] + 1e-3).any()
