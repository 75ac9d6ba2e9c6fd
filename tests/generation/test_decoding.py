"""One driver for all models: a recurrent network that satisfies the protocol in this file alone decodes through it.

Oracles are loops in NumPy over the network's own formulas, and all continuations of a small vocabulary.
"""

import functools
import io
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from tests.data.tokenizers_made_here import EOS_ID, make_tokenizer
from tfx_jax import models
from tfx_jax.cli import generate
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import BeamSearch, DecodeDriver, Greedy, Sampling, decode
from tfx_jax.generation.text import Generator
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.tasks.text.translation import Translator

V, D, LIMIT = 7, 5, 4
PROMPTS = [[3, 1, 4], [5], [6, 3, 3, 5, 4], [4, 4]]


class Recurrent(nnx.Module):
    """A language model h' = tanh(W h + e(token)) with logits U h: its memory of a prompt is a state."""

    vocab_size, pad_id, continues_inputs = V, 0, True

    def __init__(self):
        rng = np.random.default_rng(3)
        draw = lambda *shape: nnx.Param(jax.device_put(rng.normal(size=shape).astype(np.float32)))  # noqa: E731
        self.embedding, self.recurrent, self.output = draw(V, D), draw(D, D), draw(D, V)

    def decoder(self, *, int8=False):
        if int8:
            raise UserError("a recurrent network has no products of integers")
        return self

    def max_input_length(self, max_new_tokens):
        return None

    def encode(self, inputs, token_mask=None):
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        places = jnp.arange(inputs.shape[1])[None]
        last = jnp.max(jnp.where(token_mask, places, -1), axis=1, keepdims=True)

        def read(state, column):
            tokens, counts = column
            return jnp.where(counts[:, None], self._next(state, tokens), state), None

        columns = inputs.T, (token_mask & (places < last)).T
        state, _ = jax.lax.scan(read, jnp.zeros((inputs.shape[0], D)), columns)
        return state, jnp.take_along_axis(inputs, last, axis=1)[:, 0]

    def init_cache(self, memory, *, max_length, num_beams=1):
        return memory

    def step(self, tokens, cache):
        state = self._next(cache, tokens)
        return state @ self.output[...], state

    def _next(self, state, tokens):
        return jnp.tanh(state @ self.recurrent[...] + self.embedding[...][tokens])


class EncodingRecurrent(Recurrent):
    """The same as an encoder-decoder: it answers, from the state that a source leaves behind, and a start token."""

    continues_inputs = False

    def encode(self, inputs, token_mask=None):
        state, last = super().encode(inputs, token_mask)
        return self._next(state, last), jnp.ones_like(last)


@functools.cache
def model():
    return Recurrent()


@functools.cache
def weights():
    return [np.asarray(param[...], np.float64) for param in (model().embedding, model().recurrent, model().output)]


def log_probs_after(tokens, never=0):
    """Float64, without the token that is never written."""
    embedding, recurrent, output = weights()
    state = np.zeros(D)
    for token in tokens:
        state = np.tanh(state @ recurrent + embedding[token])
    logits = state @ output
    logits[[] if never is None else never] = -np.inf
    return log_softmax(logits)


def score(prompt, text, length_penalty):
    log_prob = sum(log_probs_after([*prompt, *text[:place]])[token] for place, token in enumerate(text))
    return log_prob / ((5 + len(text)) / 6) ** length_penalty


def best_text(prompt, length_penalty, limit=LIMIT):
    """Of all that end, by trying each."""
    others = [token for token in range(1, V) if token != EOS_ID]
    texts = [[*text, EOS_ID] for length in range(limit) for text in itertools.product(others, repeat=length)]
    return max(texts, key=lambda text: score(prompt, text, length_penalty))


def greedy_text(prompt, limit=LIMIT):
    text = []
    while len(text) < limit and EOS_ID not in text:
        choice = int(log_probs_after([*prompt, *text]).argmax())
        text.append(EOS_ID if len(text) == limit - 1 else choice)
    return text


def decoded(search, prompts=PROMPTS, limit=LIMIT, eos_ids=(EOS_ID,), **options):
    graphdef, params = nnx.split(model())
    driver = DecodeDriver(graphdef, search, eos_ids=eos_ids)
    return driver(driver.decoder(params), prompts, max_new_tokens=lambda _: limit, **options)


def test_a_recurrent_network_is_a_decoding_model():
    assert isinstance(model(), DecodingModel)
    assert not isinstance(nnx.Linear, DecodingModel)


def test_greedy_takes_the_most_probable_token_and_ends_at_the_limit():
    found = decoded(Greedy(), limit=6)
    assert found == [greedy_text(prompt, 6) for prompt in PROMPTS]
    assert len({tuple(text) for text in found}) > 1


@pytest.mark.parametrize("length_penalty", [0.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_wide_beam_finds_the_best_of_all_texts(length_penalty):
    found = decoded(BeamSearch(5**LIMIT, length_penalty))
    assert found == [best_text(prompt, length_penalty) for prompt in PROMPTS]


def test_draws_are_those_of_seed_and_number_however_inputs_are_batched():
    prompts = PROMPTS * 6
    sampling = functools.partial(decoded, Sampling(top_k=4), limit=8)
    together = sampling(prompts, seed=1)
    assert together == sampling(prompts, seed=1) != sampling(prompts, seed=2)
    told = []
    assert sampling(prompts, seed=1, tokens_per_batch=64, on_batch=told.append) == together
    assert told == [4] * 6  # sorted by length, four rows of 16 places
    assert sampling(prompts[10:], seed=1, first=10) == together[10:]
    assert len({tuple(text) for text in together[:: len(PROMPTS)]}) > 1


def test_temperatures_share_a_program_and_draw_as_one_that_knows_theirs(traced_searches):
    tokens = np.array([prompt + [0] * (16 - len(prompt)) for prompt in PROMPTS], np.int32)
    mask = np.arange(16) < np.array([len(prompt) for prompt in PROMPTS])[:, None]
    seen = []
    for temperature in (0.4, 1.0, 2.5):
        search = Sampling(temperature=temperature, top_p=0.9)
        known = jax.jit(functools.partial(decode, search=search, eos_ids=(EOS_ID,), max_length=8))
        expected = np.asarray(known(model(), tokens, mask, rng=jax.random.key(0))).tolist()
        seen.append(decoded(search, limit=8))
        assert seen[-1] == [[token for token in row if token >= 0] for row in expected]
    assert len(traced_searches) == 1
    assert seen[0] != seen[1] != seen[2]


def test_the_most_probable_tokens_are_drawn_at_a_temperature_of_zero():
    """Cut at the limit; a greedy search has the end there."""
    for prompt, text in zip(PROMPTS, decoded(Sampling(temperature=0)), strict=True):
        # A draw may be of every token, that of padding too.
        assert text == [int(log_probs_after([*prompt, *text[:place]], None).argmax()) for place in range(len(text))]
        assert len(text) == LIMIT or text[-1] == EOS_ID


def test_a_generator_goes_on_and_leaves_the_end_out():
    generator = Generator(model(), eos_ids=[EOS_ID], max_new_tokens=LIMIT, search=BeamSearch(5**LIMIT, 0.0))
    assert generator.continues_prompts
    assert generator(PROMPTS) == [best_text(prompt, 0.0)[:-1] for prompt in PROMPTS]


def test_translations_are_answers_to_sources():
    tokenizer = make_tokenizer(["a b c"])
    assert tokenizer.vocab_size == V
    graphdef, params = nnx.split(EncodingRecurrent())
    translator = Translator(graphdef, tokenizer, search=BeamSearch(5**LIMIT, 0.6), extra_length=1)
    lines = ["a b", "", "c"]
    sources = [[*tokenizer.encode(line), EOS_ID] for line in lines]
    found = translator.translate_ids(params, lines)
    assert found[1] == []
    for place in (0, 2):
        limit = len(sources[place]) + 1
        assert found[place] == best_text([*sources[place], 1], 0.6, limit)


def test_the_command_line_generates_with_it(monkeypatch, capsys):
    class Letters:
        eos_id, bos_id = EOS_ID, None

        def encode_prompt(self, line):
            return [ord(letter) - ord("a") for letter in line]

        def decode(self, ids):
            return "".join(chr(token + ord("a")) for token in ids)

    monkeypatch.setattr(generate, "set_up_program", lambda: None)
    monkeypatch.setattr(generate, "load_trained", lambda *_: (model(), Letters()))
    lines = ["".join(chr(token + ord("a")) for token in prompt) for prompt in PROMPTS]
    standard_input = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=standard_input))
    assert generate.run(["--workdir=w", "--beam=4", "--alpha=0", f"--max-new-tokens={LIMIT}"]) == 0
    texts = [Letters().decode(ids[:-1]) for ids in decoded(BeamSearch(4, 0.0))]
    assert capsys.readouterr().out.splitlines() == [line + text for line, text in zip(lines, texts, strict=True)]


def test_what_cannot_be_searched_is_refused():
    for search in (Greedy(), BeamSearch()):
        for eos_ids in ((), (1, 2)):
            with pytest.raises(UserError, match=r"search needs exactly one token that ends a text, got [02], and no"):
                decoded(search, eos_ids=eos_ids)
    with pytest.raises(UserError, match="prompt 2 has no token"):
        decoded(Greedy(), [[1], []])


@pytest.mark.parametrize(
    "name", ["GPT", "Llama", "T5", "Transformer", "Seq2Seq", "TransformerXL", "Reformer", "Captioner", "Whisper"]
)
def test_decoders_of_equal_models_have_one_structure(name):
    """Else a program of one would not serve the other, and each call would compile."""
    config = getattr(models, f"{name}Config")()
    make = lambda: getattr(models, name)(config, rngs=nnx.Rngs(0)).decoder(int8=False)  # noqa: E731
    first, second = (jax.tree.structure(nnx.eval_shape(make)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
