"""The loss of a batch of sentence pairs, and lines in, as many lines out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.data.tokenizers_made_here import EOS_ID, PAD_ID, make_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import BeamSearch
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.tasks.text.translation import TranslationConfig, Translator, translation_loss

WORDS = [f"w{number}" for number in range(12)]
TOKENIZER = make_tokenizer([" ".join(WORDS)])
V = TOKENIZER.vocab_size


class Fixed(nnx.Module):
    """Gives the same logits whatever it reads, and notes what it was asked."""

    def __init__(self, logits, pad_id=PAD_ID):
        self.logits = nnx.data(jax.device_put(np.asarray(logits, np.float32)))
        self.config = TransformerConfig(pad_id=pad_id)

    def __call__(self, source, target, *, rngs):
        del source, target, rngs
        return self.logits


def jitted_loss(logits, batch, smoothing, pad_id=PAD_ID):
    return jax.jit(lambda batch: translation_loss(Fixed(logits, pad_id), batch, None, label_smoothing=smoothing))(batch)


@pytest.mark.parametrize(("smoothing", "pad_id"), [(0.0, 0), (0.1, 0), (0.1, 4)])
def test_loss_sums_over_the_tokens_that_are_there(smoothing, pad_id):
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(4, 6, 9))
    logits[0, :3, 6] += 20
    target = rng.choice(np.delete(np.arange(9), pad_id), (4, 6))
    target[1, 2:] = target[2, 5:] = target[3] = pad_id
    target[0, :3] = logits[0, :3].argmax(axis=-1)
    loss = nll = correct = 0.0
    for b, t in zip(*np.nonzero(target != pad_id), strict=True):
        log_probs = logits[b, t] - np.log(np.exp(logits[b, t]).sum())
        wanted = np.full(9, smoothing / 9)
        wanted[target[b, t]] += 1 - smoothing
        loss -= wanted @ log_probs
        nll -= log_probs[target[b, t]]
        correct += log_probs.argmax() == target[b, t]
    batch = {"source": np.ones((4, 2), np.int32), "target": target.astype(np.int32)}
    output = jitted_loss(logits, batch, smoothing, pad_id)
    np.testing.assert_allclose(output.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(output.metrics["nll"].sum, nll, rtol=1e-5)
    assert output.metrics["accuracy"] == (correct, np.count_nonzero(target != pad_id))
    assert output.weight == output.num_tokens == np.count_nonzero(target != pad_id)
    assert {value.dtype for value in jax.tree.leaves(output)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_r_drop_is_the_mean_of_two_passes_and_what_divides_them(smoothing):
    """Equation 4 of Liang et al. (2021), halved, from the losses of either pass alone."""
    rng = np.random.default_rng(0)
    passes = 3 * rng.normal(size=(4, 2, 6, 9))  # of each pair both
    target = rng.integers(1, 9, (4, 6)).astype(np.int32)
    target[1, 2:] = target[3] = PAD_ID
    batch = {"source": np.ones((4, 2), np.int32), "target": target}
    alone = [jitted_loss(passes[:, index], batch, smoothing) for index in range(2)]
    log_probs = passes - np.log(np.exp(passes).sum(-1, keepdims=True))
    p_minus_q, ratio = (values[:, 0] - values[:, 1] for values in (np.exp(log_probs), log_probs))
    divergence = ((p_minus_q * ratio).sum(-1) / 2)[target != PAD_ID].sum()

    @jax.jit
    def loss(batch):
        model = Fixed(passes.reshape(8, 6, 9))
        return translation_loss(model, batch, nnx.Rngs(dropout=0), label_smoothing=smoothing, r_drop=5.0)

    output = loss(batch)
    np.testing.assert_allclose(output.loss, (alone[0].loss + alone[1].loss) / 2 + 2.5 * divergence, rtol=1e-5)
    np.testing.assert_allclose(output.metrics["divergence"].sum, divergence, rtol=1e-5)
    np.testing.assert_allclose(output.metrics["nll"].sum, sum(part.metrics["nll"].sum for part in alone) / 2, rtol=1e-5)
    assert output.weight == output.num_tokens == output.metrics["divergence"].weight == alone[0].weight == 14


def test_r_drop_evaluates_one_pass():
    logits = np.random.default_rng(0).normal(size=(2, 3, V))
    batch = {"source": np.ones((2, 2), np.int32), "target": np.ones((2, 3), np.int32)}
    with_r_drop = jax.jit(lambda batch: translation_loss(Fixed(logits), batch, None, r_drop=5.0))(batch)
    assert jax.tree.map(float, with_r_drop) == jax.tree.map(float, jitted_loss(logits, batch, 0.0))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_r_drop_wants_dropout(rate):
    task = TranslationConfig(r_drop=5.0)
    if rate:
        task.validate(TransformerConfig(dropout_rate=rate))
        return
    with pytest.raises(UserError, match=r"r_drop=5.0 compares two passes .*: set config.model.dropout_rate above 0"):
        task.validate(TransformerConfig(dropout_rate=rate))


def test_loss_of_padding_alone_is_zero_even_where_logits_are_huge():
    batch = {"source": np.zeros((2, 3), np.int32), "target": np.zeros((2, 3), np.int32)}
    output = jitted_loss(np.full((2, 3, 5), 1e30), batch, 0.1)
    assert {*map(float, jax.tree.leaves(output))} == {0.0}


class Echo:
    """Stands in for a decoder and the compiled search: gives back the source, and notes what would be compiled."""

    vocab_size = 2**31 - 1

    def __init__(self):
        self.shapes = []

    def max_input_length(self, max_new_tokens):
        return None

    def __call__(self, decoder, inputs, token_mask, *_, max_length, earlier, temperature, observer, constraint_values):
        self.shapes.append(inputs.shape)
        assert earlier is temperature is observer is constraint_values is None
        assert max_length == inputs.shape[1] + 50
        return np.where(token_mask, inputs, -1)


def echoing(**options):
    """A translator that repeats its input, without a model, and what has noted its shapes."""
    translator, echo = Translator(nnx.graphdef(Fixed(np.zeros(()))), TOKENIZER, **options), Echo()
    translator._driver.decoder, translator._driver._program = lambda params: echo, lambda *shape: echo
    return translator, echo


def random_lines(rng, count, longest):
    return [" ".join(rng.choice(WORDS, length)) for length in rng.integers(1, longest + 1, count)]


def test_progress_is_told_batch_by_batch_and_counts_every_line():
    lines, told = [*random_lines(np.random.default_rng(1), 300, 60), "", "  "], []
    echoing(on_batch=told.append)[0]({}, lines)
    assert sum(told) == len(lines)
    assert len(told) > 3


def test_as_many_lines_as_came_in_and_in_their_order():
    rng = np.random.default_rng(1)
    lines = random_lines(rng, 300, 60)
    empty = rng.choice(300, 40, replace=False)
    for index in empty:
        lines[index] = ["", " ", "\t ", "\u3000"][index % 4]
    expected = [line.strip() for line in lines]
    assert echoing()[0]({}, lines) == expected


def test_no_lines_and_nothing_but_empty_lines():
    translator, echo = echoing()
    assert translator({}, []) == []
    assert translator({}, ["", "  "]) == ["", ""]
    assert translator.translate_ids({}, ["", "w1"]) == [[], [*TOKENIZER.encode("w1"), EOS_ID]]
    assert len(echo.shapes) == 1


def test_very_long_lines_are_cut():
    translator, echo = echoing(max_source_length=20)
    long, short = "w1 w2 " * 50_000, "w3"
    assert translator({}, [long, short]) == ["w1 w2 " * 9 + "w1", "w3"]
    assert max(length for _, length in echo.shapes) == 20


@pytest.mark.parametrize("max_source_length", [256, 100, 10])
def test_a_handful_of_programs_serves_all_lengths(max_source_length):
    """Every length of source, thousands of lines: five shapes at most, each of about as many tokens."""
    translator, echo = echoing(max_source_length=max_source_length, tokens_per_batch=2_048)
    rng = np.random.default_rng(2)
    translator({}, random_lines(rng, 2_000, 300))
    translator({}, [" ".join(["w0"] * length) for length in range(1, 300)])
    shapes = set(echo.shapes)
    assert len(shapes) <= 5
    assert {length for _, length in shapes} <= {16, 32, 64, 128, max_source_length}
    assert all(1_024 < rows * length <= 2_048 for rows, length in shapes)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (100, 128), (1_000, 128)])
def test_a_few_lines_do_not_pay_for_a_full_batch(count, rows):
    translator, echo = echoing(tokens_per_batch=2_048)
    translator({}, ["w1 w2"] * count)
    assert set(echo.shapes) == {(rows, 16)}
    assert len(echo.shapes) == -(-count // rows)


def test_a_few_long_lines_are_one_batch():
    translator, echo = echoing(tokens_per_batch=2_048)
    translator({}, [" ".join(["w1"] * 60)] * 16 + ["w1 w2"] * 3)
    assert sorted(echo.shapes) == [(4, 16), (16, 64)]


def test_line_by_line_needs_one_program_for_each_length():
    """What an interactive user pays: nothing new for the second line of about the same length."""
    translator, echo = echoing()
    for length in range(1, 255):
        translator({}, [" ".join(["w0"] * length)])
    assert set(echo.shapes) == {(1, 16), (1, 32), (1, 64), (1, 128), (1, 256)}


class Endless(nnx.Module):
    """Never ends a sentence by itself; counts the steps of the search."""

    steps = 0
    vocab_size, pad_id, continues_inputs = V, PAD_ID, False

    def decoder(self, *, int8):
        return self

    def max_input_length(self, max_new_tokens):
        return None

    def encode(self, inputs, token_mask):
        return jnp.zeros((inputs.shape[0], 1))

    def init_cache(self, memory, *, max_length, num_beams):
        return memory, jnp.ones(memory.shape[0], jnp.int32)

    def step(self, tokens, cache):
        jax.debug.callback(self.count)
        return jnp.zeros((tokens.shape[0], V)).at[:, EOS_ID].set(-30.0), cache

    @classmethod
    def count(cls):
        cls.steps += 1


def test_rows_of_padding_end_at_once():
    """The search takes as many steps as the longest sentence may: `extra_length` more than its source."""
    translator = Translator(nnx.graphdef(Endless()), TOKENIZER, search=BeamSearch(2), extra_length=3)
    for line in ("w1 w2", "w1"):  # a batch of two rows, the second of them added
        Endless.steps = 0
        (output,) = translator.translate_ids({}, [line])
        jax.effects_barrier()
        assert Endless.steps == len(output) == len(line.split()) + 1 + 3  # the buffer would hold 16 + 3


def make_model():
    config = TransformerConfig(V, num_layers=1, d_model=16, num_heads=2, d_ff=24)
    return Transformer(config, rngs=nnx.Rngs(params=5))


@pytest.fixture(scope="module")
def model():
    """A graph definition and parameters that make it talkative: far apart enough for no two tokens to tie."""
    params = jax.device_get(jax.jit(lambda: nnx.to_pure_dict(nnx.state(make_model())))())
    params["embedding"]["table"] = 3 * params["embedding"]["table"]
    return nnx.graphdef(nnx.eval_shape(make_model)), params


LINES = ["w1 w2 w3", "", "w4", "w5 w6 w7 w8 w9 w10", "w0 w0 w0", "w11 w3 w2 w1 w0 w5 w6 w7 w8 w9 w10 w1 w2 w3"]


@pytest.fixture(scope="module")
def translator(model):
    return Translator(model[0], TOKENIZER, search=BeamSearch(2), extra_length=4)


def test_company_in_a_batch_does_not_change_a_translation(model, translator, traced_searches):
    together = translator.translate_ids(model[1], LINES)
    assert len({tuple(ids) for ids in together}) >= 4  # they do say different things
    assert translator.translate_ids(model[1], LINES[::-1]) == together[::-1]
    alone = [translator.translate_ids(model[1], [line])[0] for line in LINES]
    assert alone == together
    assert traced_searches == [(8, 16), (1, 16)]  # together, alone


def test_a_second_translator_compiles_nothing_and_takes_a_decoder(model, translator, traced_searches):
    expected = translator.translate_ids(model[1], LINES)
    other = Translator(model[0], TOKENIZER, search=BeamSearch(2), extra_length=4)
    assert other.translate_ids(other.decoder(model[1]), LINES) == expected
    assert len(traced_searches) == 1


def test_outputs_end_and_keep_their_limit(model, translator):
    for line, ids in zip(LINES, translator.translate_ids(model[1], LINES), strict=True):
        if line:
            assert ids.index(EOS_ID) == len(ids) - 1
            assert len(ids) <= len(line.split()) + 1 + 4
            assert PAD_ID not in ids


def test_beam_of_one_is_greedy_search_without_a_cache(model):
    """Against the model's own teacher forcing: the best token after each prefix, computed again for every step."""
    graphdef, params = model
    translator = Translator(graphdef, TOKENIZER, search=BeamSearch(1), extra_length=4)

    @jax.jit
    def score(source, target):
        return nnx.merge(graphdef, params)(source, target)

    for line in ("w1 w2 w3", "w5 w6 w7 w8 w9 w10"):
        encoded = [*TOKENIZER.encode(line), EOS_ID]
        source = np.array([encoded + [PAD_ID] * (16 - len(encoded))], np.int32)
        expected = []
        for step in range(len(encoded) + 4):
            target = np.array([expected + [PAD_ID] * (16 - len(expected))], np.int32)
            logits = np.array(score(source, target)[0, step])
            logits[PAD_ID] = -np.inf
            expected.append(EOS_ID if step == len(encoded) + 3 else int(logits.argmax()))
            if expected[-1] == EOS_ID:
                break
        assert translator.translate_ids(params, [line]) == [expected]


@pytest.mark.slow
def test_int8_translates_nearly_the_same(model, translator):
    """Of a talkative model without training, most first tokens: its choices are far closer than a trained one's."""
    rounded = Translator(model[0], TOKENIZER, search=BeamSearch(2), extra_length=4, int8=True).translate_ids(
        model[1], LINES
    )
    exact = translator.translate_ids(model[1], LINES)
    assert [bool(ids) for ids in rounded] == [bool(ids) for ids in exact]
    same = [a[:1] == b[:1] for a, b in zip(rounded, exact, strict=True)]
    assert sum(same) >= len(same) - 2
