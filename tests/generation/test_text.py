"""Generation against loops that read everything again for each token; ends, stops, shapes, refusals."""

import concurrent.futures
import functools
import itertools
import types

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax, softmax

from tests.data.tokenizers_made_here import make_tokenizer
from tfx_jax.data.tokenizers.hf_tokenizer import _clean_up
from tfx_jax.data.tokenizers.streaming import TextStream
from tfx_jax.errors import UserError
from tfx_jax.generation import decoding
from tfx_jax.generation.decoding import BeamSearch, Sampling
from tfx_jax.generation.text import Generator, TextGenerator, generate
from tfx_jax.models import GPT, T5, GPTConfig, T5Config, Transformer, TransformerConfig, Whisper
from tfx_jax.nn import AttentionConfig, AttentionOptions

V, MAX_LENGTH = 23, 40
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
GREEDY = Sampling(temperature=0)


def drawn(make, seed=0):
    """A model whose parameters are drawn by NumPy, which compiles nothing; gains stay near 1."""
    graphdef, params = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return jax.device_put(rng.normal(mean, 0.5, leaf.shape).astype(leaf.dtype))  # `jnp.asarray` would compile

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params)))


@functools.cache
def make_model():
    config = GPTConfig(vocab_size=V, max_length=MAX_LENGTH, num_layers=1, d_model=16, num_heads=2)
    return drawn(lambda: GPT(config, rngs=nnx.Rngs(0)))


@jax.jit
def next_logits(model, tokens, length):
    return model(tokens)[0, length - 1]


def logits_after(tokens):
    """Of what may follow the tokens, which are read again, in float64."""
    padded = np.zeros((1, MAX_LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(next_logits(make_model(), padded, len(tokens)), np.float64)


def naive(prompt, length, choose):
    """One token at a time, everything read again."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(choose(logits_after(tokens), tokens))
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


@functools.cache
def greedy_generator():
    return Generator(make_model(), max_new_tokens=12, search=GREEDY)


def test_takes_the_most_probable_token_for_prompts_of_any_length():
    assert greedy_generator()(PROMPTS) == greedy_tokens()
    assert len({token for tokens in greedy_tokens() for token in tokens}) > 4


def test_top_k_of_one_is_greedy_and_so_is_a_low_temperature():
    for sampling in (Sampling(top_k=1), Sampling(temperature=1e-6), Sampling(top_p=1e-6)):
        assert Generator(make_model(), max_new_tokens=12, search=sampling)(PROMPTS) == greedy_tokens()


@pytest.mark.parametrize("penalty", [1.5, pytest.param(0.7, marks=pytest.mark.slow)])
def test_repetition_penalty(penalty):
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    want = [naive(prompt, 12, penalised(penalty)) for prompt in PROMPTS]
    assert want != greedy_tokens()
    assert Generator(make_model(), max_new_tokens=12, search=sampling)(PROMPTS) == want


def test_a_repetition_penalty_leaves_tokens_of_a_source_alone():
    """As in transformers. Sources of all tokens but one have their first answer's token in almost every case."""
    config = TransformerConfig(vocab_size=V, num_layers=1, d_model=8, num_heads=2, d_ff=16, start_id=0)
    model = drawn(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    sources = [[token for token in range(1, V) if token != other] for other in (3, 5)]
    generate = functools.partial(Generator, model, max_new_tokens=1)
    free = generate(search=Sampling(temperature=0))(sources)
    assert any(answer[0] in source for answer, source in zip(free, sources, strict=True))
    assert generate(search=Sampling(temperature=0, repetition_penalty=1e6))(sources) == free


def test_draws_depend_on_seed_and_row_alone():
    generator = Generator(make_model(), max_new_tokens=12, search=Sampling(top_k=9, top_p=0.9))
    first = generator(PROMPTS, seed=1)
    assert first == generator(PROMPTS, seed=1) != generator(PROMPTS, seed=2)
    assert generator([PROMPTS[0], [8] * 9], seed=1)[0] == first[0]
    assert generator([PROMPTS[1], [8] * 9], seed=1, first=1)[0] == first[1]


def test_draws_have_the_probabilities_of_the_model():
    """Of 4,096 rows with one prompt, each token's share is within 4 standard errors of its softmax."""
    found = Generator(make_model(), max_new_tokens=1)([PROMPTS[0]] * 4096, seed=3)
    shares = np.bincount([token for (token,) in found], minlength=V) / 4096
    want = softmax(logits_after(PROMPTS[0]))
    assert (np.abs(shares - want) < 4 * np.sqrt(want * (1 - want) / 4096) + 1e-6).all()


@pytest.mark.parametrize("num_ends", [pytest.param(number, marks=pytest.mark.slow) for number in (1, 2)] + [3])
def test_any_of_several_ends_ends_a_text_and_is_left_out(num_ends):
    ends = tuple(dict.fromkeys(tokens[number + 2] for number, tokens in enumerate(greedy_tokens())))[:num_ends]
    want = []
    for tokens in greedy_tokens():
        places = [place for place, token in enumerate(tokens) if token in ends]
        want.append(tokens[: places[0]] if places else tokens)
    assert Generator(make_model(), eos_ids=ends, max_new_tokens=12, search=GREEDY)(PROMPTS) == want


@pytest.mark.parametrize("beam_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_output_begins_with_the_first_tokens(beam_size):
    """As if the prompt ended with them; they count as new tokens."""
    first, end = [2, 19], 1
    options = {"eos_ids": [end], "search": GREEDY if beam_size == 1 else BeamSearch(beam_size, 0.0)}
    found = Generator(make_model(), first_ids=first, max_new_tokens=7, **options)(PROMPTS)
    want = Generator(make_model(), max_new_tokens=5, **options)([[*prompt, *first] for prompt in PROMPTS])
    assert found == [[*first, *tokens] for tokens in want]
    assert len({tuple(tokens) for tokens in want}) == 3


def test_a_prompt_may_consist_of_the_end():
    """GPT-2 has one token for both ends of a text."""
    want = naive([7], 5, most_probable)
    end = next(token for token in range(V) if token not in want)
    assert Generator(make_model(), eos_ids=[end], max_new_tokens=5, search=GREEDY)([[end]]) != [[]]


def test_an_observer_sees_every_token_but_the_last_and_may_stop_rows():
    shown = []

    def observe(tokens):
        shown.append(tokens.copy())
        return np.array([False, len(shown) == 4, False, False])

    generator = Generator(make_model(), max_new_tokens=12, search=GREEDY, observer=observe)
    found = generator(PROMPTS)
    whole = greedy_tokens()
    assert found == [whole[0], whole[1][:3], whole[2]]  # the first call comes before any token
    assert (shown[0] == -1).all()
    assert [step[0] for step in shown[1:]] == whole[0][:-1]
    assert [step[1] for step in shown[1:]] == [*whole[1][:3], *[-1] * 8]


def test_few_programs_for_many_shapes(traced_searches):
    generator = Generator(make_model(), max_new_tokens=12, search=GREEDY)  # of which no other test knows
    generator(PROMPTS)
    for rows in (3, 4):
        for length in (2, 9, 16):
            assert len(generator([[1] * length] * rows)) == rows
    assert traced_searches == [(4, 16)]
    assert len(generator([[1] * 17])) == 1
    assert traced_searches == [(4, 16), (1, 28)]  # not 32: the model has 40 positions
    assert generator([]) == []


def stopping_after(count, shown):
    """An observer that stops the first row after this many tokens."""

    def observe(tokens):
        shown.append(tokens[0])
        return np.arange(len(tokens)) < (len(shown) > count)

    return observe


def test_equal_searches_share_their_programs_whatever_model_and_observer(traced_searches):
    """So that a second `tfx_jax.generate` does not compile again."""
    whole, options = greedy_tokens()[0], {"max_new_tokens": 12, "search": GREEDY}
    other = drawn(lambda: GPT(make_model().config, rngs=nnx.Rngs(0)), seed=1)
    shown = [], []
    generators = [
        Generator(make_model(), observer=stopping_after(3, shown[0]), **options),
        Generator(make_model(), observer=stopping_after(5, shown[1]), **options),
        Generator(make_model(), **options),
    ]
    assert [generator(PROMPTS[:1])[0] for generator in generators] == [whole[:3], whole[:5], whole]
    assert shown == ([-1, *whole[:3]], [-1, *whole[:5]])
    assert traced_searches == [(1, 16), (1, 16)]  # with and without an observer
    assert Generator(other, **options)(PROMPTS[:1])[0] != whole
    assert Generator(other, observer=stopping_after(1, []), **options)(PROMPTS[:1])[0] != whole[:1]
    assert len(traced_searches) == 2


def test_an_observer_that_fails_leaves_nothing_behind():
    def fail(tokens):
        raise ArithmeticError("the observer failed")

    options = {"max_new_tokens": 12, "search": GREEDY}
    with pytest.raises(Exception, match="the observer failed"):
        Generator(make_model(), observer=fail, **options)(PROMPTS[:1])
    assert not decoding._observers
    assert decoding._observe(np.int32(0), np.zeros(2, np.int32)).all()  # a program that no one waits for ends
    observer = stopping_after(3, [])
    assert Generator(make_model(), observer=observer, **options)(PROMPTS[:1])[0] == greedy_tokens()[0][:3]


def test_observers_of_two_threads_see_their_own_texts():
    shown = [], []
    options = {"max_new_tokens": 12, "search": GREEDY}
    generators = [Generator(make_model(), observer=stopping_after(20, texts), **options) for texts in shown]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda pair: pair[0]([pair[1]])[0], zip(generators, PROMPTS[:2], strict=True)))
    assert found == greedy_tokens()[:2]
    assert [texts[1:] for texts in shown] == [tokens[:-1] for tokens in found]


def test_eight_bits_run():
    assert len(Generator(make_model(), max_new_tokens=4, search=GREEDY, int8=True)(PROMPTS)[0]) == 4


def log_prob(prompt, tokens):
    """Of a continuation, under the model."""
    return sum(log_softmax(logits_after([*prompt, *tokens[:place]]))[token] for place, token in enumerate(tokens))


def test_a_beam_finds_what_is_at_least_as_probable_as_greedy():
    end = greedy_tokens()[0][4]
    options = {"eos_ids": [end], "max_new_tokens": 5}
    found = Generator(make_model(), search=BeamSearch(8, 0.0), **options)(PROMPTS)
    greedy = Generator(make_model(), search=GREEDY, **options)(PROMPTS)
    for prompt, best, first in zip(PROMPTS, found, greedy, strict=True):
        # With its end, which a beam search adds at the limit at the latest.
        assert log_prob(prompt, [*best, end]) >= log_prob(prompt, [*first[:4], end]) - 1e-4
    assert found != greedy


@pytest.mark.parametrize(
    ("kind", "beam_size"),
    [
        ("t5", 1),
        ("transformer", 3),
        pytest.param("t5", 3, marks=pytest.mark.slow),
        pytest.param("transformer", 1, marks=pytest.mark.slow),
    ],
)
def test_encoder_decoders_answer(kind, beam_size):
    """Sources of two lengths in one batch, as if each were alone; with a beam of 1, as teacher forcing would."""
    if kind == "t5":
        make = functools.partial(T5, T5Config(vocab_size=V, num_layers=1, d_model=8, num_heads=2, d_k=4, d_ff=16))
    else:
        make = functools.partial(
            Transformer, TransformerConfig(vocab_size=V, num_layers=1, d_model=8, num_heads=2, d_ff=16, start_id=0)
        )
    model = drawn(lambda: make(rngs=nnx.Rngs(0)), seed=3)
    search = GREEDY if beam_size == 1 else BeamSearch(beam_size)
    generator = Generator(model, eos_ids=[2], max_new_tokens=6, search=search)
    together = generator([[5, 6, 7, 2], [9, 2]])
    assert together == [generator([[5, 6, 7, 2]])[0], generator([[9, 2]])[0]]
    assert together[0] != together[1]
    assert all(token not in (-1, 2) and 0 <= token < V for tokens in together for token in tokens)
    if beam_size == 1:
        next_logits = jax.jit(lambda target: model(np.array([[9, 2]], np.int32), target)[0])
        target = np.zeros((1, 7), np.int32)
        for place in range(6):
            target[0, place] = next_logits(target)[place].argmax()
        ends = np.flatnonzero(target[0] == 2)
        assert together[1] == target[0, : ends[0] if ends.size else 6].tolist()


def test_refusals():
    with pytest.raises(UserError, match="prompt 6 has no token"):
        greedy_generator()([[1], []], first=4)
    with pytest.raises(UserError, match="prompt 1 has 29 tokens: with max_new_tokens=12 the model has room for 28"):
        greedy_generator()([[1] * 29])
    assert len(greedy_generator()([[1] * 28])[0]) == 12
    with pytest.raises(UserError, match="max_new_tokens must be at least 1, got 0"):
        Generator(make_model(), max_new_tokens=0)
    with pytest.raises(UserError, match="max_new_tokens=40 leaves no room for a prompt, as the model takes 40 tokens"):
        Generator(make_model(), max_new_tokens=40)
    for options in ({}, {"eos_ids": (1, 2)}, {"eos_ids": (1,), "observer": lambda tokens: tokens < 0}):
        with pytest.raises(UserError, match="a beam search needs exactly one token that ends a text"):
            Generator(make_model(), max_new_tokens=4, search=BeamSearch(2), **options)
    for first_ids in ([V], [2, -1]):
        with pytest.raises(UserError, match=rf"first_ids has the token id {first_ids[-1]}; use ids in 0 \.\. {V - 1}"):
            Generator(make_model(), first_ids=first_ids, max_new_tokens=4)
    for options, match in (
        ({"temperature": -1}, r"temperature must be 0 or at least 1e-30 and at most 1e\+30, got -1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 1e-30 and .*, got 0"),
    ):
        with pytest.raises(UserError, match=match):
            Sampling(**options)
    for options, match in (
        ({"beam_size": 0}, "beam_size must be at least 1 and at most .*, got 0"),
        ({"length_penalty": -1.0}, "length_penalty must be at least 0 and at most .*, got -1.0"),
        ({"length_penalty": float("nan")}, "length_penalty must be .*, got nan"),
    ):
        with pytest.raises(UserError, match=match):
            BeamSearch(**options)


ATTENTIONS = {
    "lsh": {"num_buckets": 4, "chunk_size": 4},
    "local": {"block_size": 4},
    "window,dense": {"window": 2},
    "relative": {},
}


@pytest.mark.parametrize("kind", ["gpt", "transformer"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "lsh" else pytest.mark.slow) for n in ATTENTIONS])
def test_a_continuation_depends_on_no_other_prompt_and_on_no_other_limit(kind, name):
    attention = AttentionConfig(name, AttentionOptions(**ATTENTIONS[name]))
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 16, "attention": attention}
    if kind == "gpt":
        model = drawn(lambda: GPT(GPTConfig(V, max_length=100, **sizes), rngs=nnx.Rngs(0)))
    else:
        model = drawn(lambda: Transformer(TransformerConfig(V, **sizes), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, V, length).tolist() for length in (5, 40, 19)]  # padded to 16, 64 and 32 tokens
    generate = Generator(model, max_new_tokens=6, search=Sampling())
    alone = [generate([prompt], first=number)[0] for number, prompt in enumerate(prompts)]
    assert len({tuple(text) for text in alone}) == 3
    for limit in (6, 30):
        found = Generator(model, max_new_tokens=limit, search=Sampling())(prompts)
        assert [text[:6] for text in found] == alone


def sliding_naive(prompt, length, choose=lambda logits, tokens: int(logits.argmax())):
    """Greedy: when no position is left, reads the most recent half again, or as much as leaves room for the rest."""
    tokens, start = list(prompt), max(0, len(prompt) - max(MAX_LENGTH - length, MAX_LENGTH // 2))
    for done in range(length):
        if len(tokens) - start == MAX_LENGTH:
            start = len(tokens) - max(MAX_LENGTH - (length - done), MAX_LENGTH // 2)
        tokens.append(choose(logits_after(tokens[start:]), tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("prompt_length", "length"), [(5, 90), pytest.param(70, 12, marks=pytest.mark.slow)])
def test_sliding_continues_from_the_most_recent_tokens(prompt_length, length):
    prompt = np.random.default_rng(0).integers(0, V, prompt_length).tolist()
    options = {"max_new_tokens": length, "search": GREEDY}
    with pytest.raises(UserError, match=r"leaves no room|has room for 28"):
        Generator(make_model(), **options)([prompt])
    seen = []

    def observe(tokens):
        seen.extend(token for token in tokens.tolist() if token >= 0)
        return np.zeros(len(tokens), bool)

    expected = sliding_naive(prompt, length)
    assert Generator(make_model(), slide=True, observer=observe, **options)([prompt]) == [expected]
    assert seen == expected[:-1]


def test_what_a_text_begins_with_is_not_repeated_where_the_model_slides():
    prompt = np.random.default_rng(0).integers(0, V, 5).tolist()
    generator = Generator(make_model(), slide=True, max_new_tokens=90, search=GREEDY, first_ids=[7, 3])
    assert generator([prompt]) == [[7, 3, *sliding_naive([*prompt, 7, 3], 88)]]


def unrepeated(logits, tokens):
    """The most probable token that completes no pair of successive tokens again."""
    followers = {second for first, second in itertools.pairwise(tokens) if first == tokens[-1]}
    return max(set(range(V)) - followers, key=lambda token: logits[token])


@pytest.mark.parametrize(
    ("options", "choose"),
    [({"no_repeat_ngram_size": 2}, unrepeated), ({"repetition_penalty": 1.5}, None)],
    ids=["ngrams", "penalty"],
)
def test_sliding_remembers_what_the_model_no_longer_reads(options, choose):
    """Of a text that is longer than the model's positions, and of a prompt that is."""
    choose = choose or penalised(options["repetition_penalty"])
    search = Sampling(temperature=0, **options)
    prompt = np.random.default_rng(0).integers(0, V, 50).tolist()
    expected = sliding_naive(prompt, 60, choose)
    assert expected != sliding_naive(prompt, 60)
    assert Generator(make_model(), slide=True, max_new_tokens=60, search=search)([prompt]) == [expected]


def test_every_output_begins_with_tokens_that_repeat_what_a_prompt_has():
    search = Sampling(temperature=0, no_repeat_ngram_size=2)
    generator = Generator(make_model(), first_ids=[2, 19], max_new_tokens=5, search=search)
    assert generator([[3, 2, 19, 4]]) == [[2, 19, *naive([3, 2, 19, 4, 2, 19], 3, unrepeated)]]


def test_sliding_samples_anew_in_each_part_and_ends_where_told():
    generator = Generator(make_model(), max_new_tokens=100, search=Sampling(temperature=2.0), slide=True)
    first, second = generator([PROMPTS[0]] * 2, seed=4)
    assert generator([PROMPTS[0]], seed=4, first=1) == [second] != [first]
    assert len(first) == 100
    end = first[60]
    stopped = Generator(make_model(), eos_ids=[end], max_new_tokens=100, search=Sampling(temperature=2.0), slide=True)
    assert stopped([PROMPTS[0]], seed=4) == [first[: first.index(end)]]


def test_what_cannot_slide():
    with pytest.raises(UserError, match="slide needs a language model and sampling or greedy search"):
        Generator(make_model(), eos_ids=[0], search=BeamSearch(2), slide=True)


class Letters:
    """One letter for each token."""

    def encode_prompt(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(token + ord("a")) for token in ids)

    def stream(self, context=(), *, drops_space=False):
        return TextStream(self.decode, context, drops_space=drops_space)

    def clean_up(self, text):
        return text


@pytest.mark.parametrize("slide", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_first_of_several_texts_is_streamed_to_its_end(slide):
    parts = []
    options = {"max_new_tokens": 30 if slide else 12, "search": GREEDY, "slide": slide}
    generator = TextGenerator(make_model(), Letters(), on_text=parts.append, stop=["zzz"], **options)
    texts = generator(["abcde" * (3 if slide else 1), "g"])
    assert "".join(parts) == texts[0].text != texts[1].text
    assert len(texts[0].text) == options["max_new_tokens"]


class Words(Letters):
    """Words and punctuation marks, before which `decode` removes the spaces that `stream` leaves."""

    def clean_up(self, text):
        return _clean_up(text)

    def decode(self, ids):
        return self.clean_up(self.join(ids))

    def join(self, ids):
        return "".join((" ,", " a", " does", " n't")[token % 4] for token in ids)

    def stream(self, context=(), *, drops_space=False):
        return TextStream(self.join, context, drops_space=drops_space)


@pytest.mark.parametrize("stop", [[], ["does,"]])
def test_a_streamed_text_has_no_spaces_before_punctuation_either(stop):
    """At a stop string that only the text without these spaces has, the program ends too."""
    parts = []
    generator = TextGenerator(make_model(), Words(), on_text=parts.append, stop=stop, max_new_tokens=30, search=GREEDY)
    (output,) = generator(["hi"])
    whole = Words().decode(Generator(make_model(), max_new_tokens=30, search=GREEDY)([[7, 8]])[0])
    assert "".join(parts) == output.text == (whole[: whole.index("does,")] if stop else whole)
    assert len(parts) > 2
    assert (output.num_tokens == 30) == (not stop)


TEXTS = ["the man runs in the park", "the child sleeps , and the man sings", "she reads the book to the child"]


@pytest.mark.parametrize("prompt", ["the man", "the man ", "she"])
@pytest.mark.parametrize("kind", ["words", "characters", "bpe", "unigram"])
def test_a_text_goes_on_behind_its_prompt(kind, prompt):
    """Words are separated, in tokenizers that write the spaces between words and in those that have them in tokens."""
    tokenizer = make_tokenizer(TEXTS, kind, vocab_size=300 if kind == "bpe" else 60, family="gpt")
    config = GPTConfig(vocab_size=tokenizer.vocab_size, max_length=32, num_layers=1, d_model=16, num_heads=2)
    model, options = drawn(lambda: GPT(config, rngs=nnx.Rngs(0))), {"search": GREEDY, "max_new_tokens": 8}
    ids = tokenizer.encode_prompt(prompt)
    (new,) = Generator(model, **options)([ids], seed=0)
    assert new
    parts = []
    (output,) = TextGenerator(model, tokenizer, on_text=parts.append, **options)([prompt])
    whole = tokenizer.decode([*ids, *new])
    if prompt.endswith(" ") and not tokenizer.decode(ids).endswith(" "):  # the space is in no token
        assert prompt + output.text == f"{prompt}{whole[len(prompt) - 1 :].removeprefix(' ')}"
    else:
        assert prompt + output.text == whole
    assert "".join(parts) == output.text


def loaded(model):
    return types.SimpleNamespace(model=model, tokenizer=Letters(), eos_ids=(1,), first_ids=())


def test_beam_search_has_no_options_of_sampling():
    for name, value in {"temperature": 0, "top_k": 1, "min_p": 0.1, "repetition_penalty": 2.0}.items():
        with pytest.raises(UserError, match=rf"^{name} needs sampling, but beam_size is above 1 \(beam search\)"):
            generate(loaded(make_model()), "a", beam_size=2, **{name: value})
    with pytest.raises(UserError, match="beam_size must be at least 1"):  # not sampling
        generate(loaded(make_model()), "a", beam_size=0)
    with pytest.raises(TypeError):
        Sampling(0.5)


def test_sampling_has_no_length_penalty():
    with pytest.raises(UserError, match="length_penalty needs beam search: set beam_size above 1 as well"):
        generate(loaded(make_model()), "a", length_penalty=1.0)


def test_speech_is_no_prompt():
    with pytest.raises(UserError, match=r"a Whisper reads speech, not text: use tfx_jax\.generation\.Transcriber or"):
        generate(loaded(Whisper.__new__(Whisper)), "a")
