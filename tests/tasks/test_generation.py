"""Generation against loops that read everything anew for each token; ends, stops, shapes, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.errors import UserError
from tfx_jax.models import GPT, T5, GPTConfig, T5Config, Transformer, TransformerConfig
from tfx_jax.tasks.generation import Generator, Sampling

V, MAX_LENGTH = 23, 40
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
GREEDY = Sampling(temperature=0)


@functools.cache
def make_model():
    config = GPTConfig(vocab_size=V, max_length=MAX_LENGTH, num_layers=2, d_model=16, num_heads=2)
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: leaf + 0.5 * jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) * (leaf.ndim > 1),
        jax.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))(),
    )
    model.positions.table[...] *= 3  # else it repeats itself at once
    model.embedding.table[...] *= 0.5
    return model


@jax.jit
def next_logits(model, tokens, length):
    return model(tokens)[0, length - 1]


def naive(prompt, length, choose):
    """One token at a time, everything read anew."""
    tokens = list(prompt)
    for _ in range(length):
        padded = jnp.zeros((1, MAX_LENGTH), jnp.int32).at[0, : len(tokens)].set(jnp.array(tokens))
        tokens.append(choose(np.asarray(next_logits(make_model(), padded, len(tokens)), np.float64), tokens))
    return tokens[len(prompt) :]


def most_probable(logits, _):
    return int(logits.argmax())


def penalised(penalty):
    def choose(logits, tokens):
        for token in set(tokens):
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        return int(logits.argmax())

    return choose


@functools.cache
def greedy_tokens():
    return [naive(prompt, 12, most_probable) for prompt in PROMPTS]


def test_takes_the_most_probable_token_for_prompts_of_any_length():
    assert Generator(make_model(), max_new_tokens=12, sampling=GREEDY)(PROMPTS) == greedy_tokens()
    assert len({token for tokens in greedy_tokens() for token in tokens}) > 4


def test_top_k_of_one_is_greedy_and_so_is_a_low_temperature():
    for sampling in (Sampling(top_k=1), Sampling(temperature=1e-6), Sampling(top_p=1e-6)):
        assert Generator(make_model(), max_new_tokens=12, sampling=sampling)(PROMPTS) == greedy_tokens()


@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_repetition_penalty(penalty):
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    want = [naive(prompt, 12, penalised(penalty)) for prompt in PROMPTS]
    assert want != greedy_tokens()
    assert Generator(make_model(), max_new_tokens=12, sampling=sampling)(PROMPTS) == want


def test_draws_depend_on_seed_and_row_alone():
    generator = Generator(make_model(), max_new_tokens=12, sampling=Sampling(top_k=9, top_p=0.9))
    first = generator(PROMPTS, seed=1)
    assert first == generator(PROMPTS, seed=1) != generator(PROMPTS, seed=2)
    assert generator([PROMPTS[0], [8] * 9], seed=1)[0] == first[0]


def test_draws_have_the_probabilities_of_the_model():
    """Of 4,096 rows with one prompt, each token's share is within 4 standard errors of its softmax."""
    found = Generator(make_model(), max_new_tokens=1)([PROMPTS[0]] * 4096, seed=3)
    shares = np.bincount([token for (token,) in found], minlength=V) / 4096
    padded = jnp.zeros((1, MAX_LENGTH), jnp.int32).at[0, :5].set(jnp.array(PROMPTS[0]))
    want = np.asarray(jax.nn.softmax(next_logits(make_model(), padded, 5)))
    assert (np.abs(shares - want) < 4 * np.sqrt(want * (1 - want) / 4096) + 1e-6).all()


@pytest.mark.parametrize("num_ends", [1, 2, 3])
def test_any_of_several_ends_ends_a_text_and_is_left_out(num_ends):
    ends = tuple(dict.fromkeys(tokens[number + 2] for number, tokens in enumerate(greedy_tokens())))[:num_ends]
    want = []
    for tokens in greedy_tokens():
        places = [place for place, token in enumerate(tokens) if token in ends]
        want.append(tokens[: places[0]] if places else tokens)
    assert Generator(make_model(), eos_ids=ends, max_new_tokens=12, sampling=GREEDY)(PROMPTS) == want


def test_a_prompt_may_consist_of_the_end():
    """GPT-2 has one token for both ends of a text."""
    want = naive([7], 5, most_probable)
    end = next(token for token in range(V) if token not in want)
    assert Generator(make_model(), eos_ids=[end], max_new_tokens=5, sampling=GREEDY)([[end]]) != [[]]


def test_an_observer_sees_every_token_but_the_last_and_may_stop_rows():
    shown = []

    def observe(tokens):
        shown.append(tokens.copy())
        return np.array([False, len(shown) == 4, False, False])

    generator = Generator(make_model(), max_new_tokens=12, sampling=GREEDY, observer=observe)
    found = generator(PROMPTS)
    whole = greedy_tokens()
    assert found == [whole[0], whole[1][:3], whole[2]]  # the first call comes before any token
    assert (shown[0] == -1).all()
    assert [step[0] for step in shown[1:]] == whole[0][:-1]
    assert [step[1] for step in shown[1:]] == [*whole[1][:3], *[-1] * 8]


def test_few_programs_for_many_shapes():
    generator = Generator(make_model(), max_new_tokens=3, sampling=GREEDY)
    for rows in (3, 4):
        for length in (2, 9, 16):
            assert len(generator([[1] * length] * rows)) == rows
    assert generator._run._cache_size() == 1
    assert len(generator([[1] * 17])) == 1
    assert generator._run._cache_size() == 2
    assert generator([]) == []


def test_eight_bits_run():
    assert len(Generator(make_model(), max_new_tokens=4, sampling=GREEDY, int8=True)(PROMPTS)[0]) == 4


def log_prob(prompt, tokens):
    """Of a continuation, under the model."""
    padded = jnp.zeros((1, MAX_LENGTH), jnp.int32).at[0, : len(prompt) + len(tokens)].set(jnp.array(prompt + tokens))
    return sum(
        float(jax.nn.log_softmax(next_logits(make_model(), padded, len(prompt) + place))[token])
        for place, token in enumerate(tokens)
    )


def test_a_beam_finds_what_is_at_least_as_probable_as_greedy():
    end = greedy_tokens()[0][4]
    options = {"eos_ids": [end], "max_new_tokens": 5}
    found = Generator(make_model(), beam_size=8, alpha=0.0, **options)(PROMPTS)
    greedy = Generator(make_model(), sampling=GREEDY, **options)(PROMPTS)
    for prompt, best, first in zip(PROMPTS, found, greedy, strict=True):
        # With its end, which a beam search adds at the limit at the latest.
        assert log_prob(prompt, [*best, end]) >= log_prob(prompt, [*first[:4], end]) - 1e-4
    assert found != greedy


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("kind", ["t5", "transformer"])
def test_encoder_decoders_answer(kind, beam_size):
    """Sources of two lengths in one batch, as if each were alone."""
    if kind == "t5":
        make = functools.partial(T5, T5Config(vocab_size=V, num_layers=1, d_model=8, num_heads=2, d_k=4, d_ff=16))
    else:
        make = functools.partial(
            Transformer, TransformerConfig(vocab_size=V, num_layers=1, d_model=8, num_heads=2, d_ff=16, start_id=0)
        )
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: leaf + 0.5 * jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
        jax.jit(lambda: make(rngs=nnx.Rngs(0)))(),
    )
    generator = Generator(model, eos_ids=[2], max_new_tokens=6, sampling=GREEDY, beam_size=beam_size)
    together = generator([[5, 6, 7, 2], [9, 2]])
    assert together == [generator([[5, 6, 7, 2]])[0], generator([[9, 2]])[0]]
    assert all(token not in (-1, 2) and 0 <= token < V for tokens in together for token in tokens)
    if beam_size == 1:
        tokens = []
        for _ in range(6):
            target = jnp.array([[*tokens, 0]])
            tokens.append(int(model(jnp.array([[9, 2]]), target)[0, -1].argmax()))
            if tokens[-1] == 2:
                break
        assert together[1] == [token for token in tokens if token != 2]


def test_refusals():
    with pytest.raises(UserError, match="prompt 2 has no token"):
        Generator(make_model(), max_new_tokens=4)([[1], []])
    with pytest.raises(UserError, match="prompt 1 has 37 tokens: with max_new_tokens=4 the model has room for 36"):
        Generator(make_model(), max_new_tokens=4)([[1] * 37])
    assert len(Generator(make_model(), max_new_tokens=4, sampling=GREEDY)([[1] * 36])[0]) == 4
    with pytest.raises(UserError, match="max_new_tokens must be at least 1, got 0"):
        Generator(make_model(), max_new_tokens=0)
    with pytest.raises(
        UserError, match="max_new_tokens=40 leaves no room for a prompt, as the model has max_length=40"
    ):
        Generator(make_model(), max_new_tokens=40)
    for options in ({}, {"eos_ids": (1, 2)}, {"eos_ids": (1,), "sampling": Sampling(repetition_penalty=2.0)}):
        with pytest.raises(UserError, match="a beam search wants one token that ends a text"):
            Generator(make_model(), max_new_tokens=4, beam_size=2, **options)
    for options, match in (
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
    ):
        with pytest.raises(UserError, match=match):
            Sampling(**options)
