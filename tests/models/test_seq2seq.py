"""The recurrent models against loops over positions in float64 NumPy, from the formulas of the papers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, log_softmax, softmax

from tests.nn.programs import draw, initial, jitted, params_of, started
from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.functional import chunked_attention, dot_product_attention, linear_attention
from tfx_jax.functional.search import beam_search
from tfx_jax.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tfx_jax.nn.decoding import DecodingModel

B, S, T, V, D = 3, 7, 5, 23, 6
SIZES = {"vocab_size": V, "d_model": D, "num_layers": 2, "num_decoder_layers": 3, "dropout_rate": 0.0}
SOURCE = np.array([[4, 9, 22, 5, 7, 8, 2], [8, 6, 2, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0, 0]], np.int32)
TARGET = np.array([[5, 21, 13, 6, 2], [7, 7, 2, 0, 0], [11, 2, 0, 0, 0]], np.int32)

CASES = {
    "fixed-gru": {"variant": "fixed", "cell": "gru"},
    "fixed-lstm": {"variant": "fixed", "cell": "lstm"},
    "bahdanau-gru": {"variant": "bahdanau", "cell": "gru"},
    "bahdanau-lstm": {"variant": "bahdanau", "cell": "lstm"},
    "general-gru": {"variant": "luong", "score": "general", "cell": "gru"},
    "general-lstm": {"variant": "luong", "score": "general", "cell": "lstm"},
    "dot-lstm": {"variant": "luong", "score": "dot", "cell": "lstm"},
    "concat-gru": {"variant": "luong", "score": "concat", "cell": "gru"},
    "unscaled-gru": {"variant": "luong", "score": "general", "scaled": False, "cell": "gru"},
    "unscaled-dot": {"variant": "luong", "score": "dot", "scaled": False, "cell": "lstm"},
    "local-m-gru": {"variant": "luong", "score": "dot", "cell": "gru", "alignment": "local-m", "window": 1},
    "local-p-lstm": {"variant": "luong", "score": "general", "cell": "lstm", "alignment": "local-p", "window": 2},
    "local-p-gru": {"variant": "luong", "score": "concat", "cell": "gru", "alignment": "local-p", "window": 1},
    "coverage-gru": {"variant": "bahdanau", "coverage": 1.0, "cell": "gru"},
    "coverage-lstm": {"variant": "luong", "score": "concat", "coverage": 1.0, "cell": "lstm"},
    "coverage-local-p": {"score": "concat", "coverage": 1.0, "cell": "gru", "alignment": "local-p", "window": 2},
}
QUICK = ("fixed-lstm", "bahdanau-gru", "general-lstm", "local-m-gru", "local-p-lstm", "coverage-gru")
ATTENDING = [name for name in CASES if not name.startswith("fixed")]


@functools.cache
def make(name, **overrides):
    return draw(lambda: Seq2Seq(Seq2SeqConfig(**SIZES | CASES[name] | overrides), rngs=nnx.Rngs(0)))


forward = jitted(lambda model, source, target: model(source, target))
with_maps = jitted(lambda model, source, target: model(source, target, return_attention=True))


def layer_of(stack, index):
    return jax.tree.map(lambda leaf: leaf[index], stack)


def cell_step(cell, weights, x, state, kept=1.0):
    """One step of one row; the blocks of each matrix by their letters, `kept` of what the recurrent ones are told."""
    num_gates = {"lstm": 4, "gru": 3}[cell]
    w, u, b = (np.split(weights[name], num_gates, axis=-1) for name in ("kernel", "recurrent", "bias"))
    if cell == "lstm":
        h, c = state
        i, f, g, o = (x @ w[k] + (kept * h) @ u[k] + b[k] for k in range(4))
        c = expit(f) * c + expit(i) * np.tanh(g)
        return expit(o) * np.tanh(c), c
    (h,) = state
    r, z = (expit(x @ w[k] + (kept * h) @ u[k] + b[k]) for k in range(2))
    return (z * h + (1 - z) * np.tanh(x @ w[2] + (r * kept * h) @ u[2] + b[2]),)


class Oracle:
    """One sentence at a time, without padding."""

    def __init__(self, model):
        self.config, self.params = model.config, params_of(model, np.float64)
        self.num_states = 2 if self.config.cell == "lstm" else 1
        # Masks of recurrent dropout, [layers, 2, D / 2] and [layers, D].
        self.kept_in_encoder, self.kept = (
            np.ones((self.config.num_layers, 2, 1)),
            np.ones((self.config.decoder_depth, 1)),
        )

    def read(self, tokens):
        x = self.params["embedding"]["table"][tokens] * np.sqrt(D)
        for index in range(self.config.num_layers):
            layer, outputs, last = layer_of(self.params["encoder_layers"], index), {}, {}
            for name, places, kept in zip(
                ("forward", "backward"),
                (range(len(x)), reversed(range(len(x)))),
                self.kept_in_encoder[index],
                strict=True,
            ):
                state = (np.zeros(D // 2),) * self.num_states
                for place in places:
                    state = cell_step(self.config.cell, layer[name], x[place], state, kept)
                    outputs[name, place] = last[name] = state[0]
            x = np.array([np.concatenate([outputs["forward", t], outputs["backward", t]]) for t in range(len(x))])
        return x, np.concatenate([last["forward"], last["backward"]])

    def attend(self, query, memory, step):
        p = self.params.get("attention", {})
        if (
            self.config.coverage is not None
        ):  # equation 11 of See et al. (2017), v^T tanh(W_h h_i + W_s s_t + w_c c_i + b)
            hidden = [
                key @ p["w_key"] + query @ p["w_query"] + p["w_coverage"] * covered + p["b_score"]
                for key, covered in zip(memory, self.coverage, strict=True)
            ]
            scores = np.array([p["v"] @ np.tanh(unit) for unit in hidden])
        elif self.config.variant == "bahdanau" or self.config.score == "concat":  # v . tanh([W_query; W_key] [q; k])
            scores = np.array([p["v"] @ np.tanh(query @ p["w_query"] + key @ p["w_key"]) for key in memory])
        elif self.config.score == "general":
            scores = np.array([query @ p["w_query"] @ key for key in memory])
        else:
            scores = np.array([query @ key for key in memory])
        if self.config.scaled and self.config.variant == "luong" and self.config.score != "concat":
            scores = scores / np.sqrt(D)
        weights = self.windowed(query, scores, step)
        return weights @ memory, weights

    def windowed(self, query, scores, step):
        """Equations 7, 9 and 10 of Luong et al. (2015): alignment inside a window, and the Gaussian of "local-p"."""
        alignment, p, reach = self.config.alignment, self.params.get("attention", {}), self.config.window
        if alignment == "global":
            return softmax(scores)
        center = (
            step if alignment == "local-m" else len(scores) * expit(p["v_position"] @ np.tanh(query @ p["w_position"]))
        )
        inside, weights = (
            [s for s in range(len(scores)) if center - reach <= s <= center + reach],
            np.zeros(len(scores)),
        )
        if inside:
            weights[inside] = softmax(scores[inside])
        if alignment == "local-m":
            return weights
        return weights * np.array([np.exp(-((s - center) ** 2) / (2 * (reach / 2) ** 2)) for s in range(len(scores))])

    def first_cell(self):
        """Its input is the word and what is fed, beside each other."""
        first = self.params["first_layer"]
        return first | {"kernel": np.concatenate([first["kernel"], self.params["feed"]])}

    def __call__(self, source, target):
        """Logits and weights of each step, of tokens that all exist."""
        p, depth, variant = self.params, self.config.num_decoder_layers, self.config.variant
        memory, last = self.read(source)
        drawn = np.tanh(last @ p["initial"] + p["initial_bias"]).reshape(depth, self.num_states, D)
        states = [tuple(layer) for layer in drawn]
        fed = last if variant == "fixed" else np.zeros(D)
        logits, maps = [], []
        self.coverage = np.zeros(len(source))
        for step, token in enumerate([1, *target[:-1]]):
            word = p["embedding"]["table"][token] * np.sqrt(D)
            weights = None
            if variant == "bahdanau":
                fed, weights = self.attend(states[-1][0], memory, step)
            x = np.concatenate([word, fed])
            for index in range(depth):
                layer = layer_of(p["decoder_layers"], index - 1) if index else self.first_cell()
                states[index] = cell_step(self.config.cell, layer, x, states[index], self.kept[index])
                x = states[index][0]
            if variant == "luong":
                context, weights = self.attend(x, memory, step)
                fed = x = np.tanh(np.concatenate([context, x]) @ p["readout"])
            else:
                hidden = np.concatenate([x, word, fed]) @ p["readout"] + p["readout_bias"]
                x = np.array([max(hidden[2 * unit], hidden[2 * unit + 1]) for unit in range(D)])
            logits.append(p["embedding"]["table"] @ x)
            maps.append(weights)
            if self.config.coverage is not None:
                self.coverage = np.sum(maps, axis=0)  # equation 10
        return np.array(logits), maps


def lengths(tokens):
    return (tokens != 0).sum(axis=1)


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK, "dot-lstm", "concat-gru", "unscaled-gru", "coverage-lstm"))
def test_logits_and_alignments_are_those_of_a_loop(name):
    model = make(name)
    logits, maps = with_maps(model, SOURCE, TARGET) if name in ATTENDING else (forward(model, SOURCE, TARGET), {})
    assert logits.dtype == np.float32
    assert maps.keys() == ({"decoder/2/cross"} if name in ATTENDING else set())
    oracle = Oracle(model)
    for row, (s, t) in enumerate(zip(lengths(SOURCE), lengths(TARGET), strict=True)):
        expected, weights = oracle(SOURCE[row, :s], TARGET[row, :t])
        np.testing.assert_allclose(logits[row, :t], expected, atol=3e-5, rtol=3e-5)
        for alignment in maps.values():
            assert alignment.shape == (B, 1, T, S)
            np.testing.assert_allclose(alignment[row, 0, :t, :s], weights, atol=1e-5)
            assert not alignment[row, ..., s:].any()


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_the_future_and_the_padding_have_no_effect(name):
    model, other = make(name), TARGET.copy()
    other[:, 3:] = 17
    before, after = forward(model, SOURCE, TARGET), forward(model, SOURCE, other)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])  # the fourth is told the third
    assert np.abs(before[:, 4] - after[:, 4]).max() > 1e-3
    longer = np.pad(SOURCE, ((0, 0), (0, 4)))
    np.testing.assert_array_equal(before, forward(model, longer, TARGET))
    # Padding in front of a source, and more of it behind.
    moved = np.stack(
        [np.pad(row[:length], (2, S - length)) for row, length in zip(SOURCE, lengths(SOURCE), strict=True)]
    )
    np.testing.assert_allclose(forward(model, moved, TARGET), before, atol=1e-5)


@functools.cache
def searched(name, beam_size):
    """The best texts with their scores, and what the steps score when they are told the target."""
    model = make(name)

    def run(source, target):
        step, cache, start = started(model.decoder(), source, max_length=6, num_beams=beam_size)
        found = beam_search(step, cache, start, beam_size=beam_size, max_length=6, eos_id=2, length_penalty=0.0)
        step, cache, start = started(model.decoder(), source, source != 0, max_length=T)

        def told(cache, newest):
            logits, cache = step(newest, cache)
            return cache, logits

        inputs = jnp.concatenate([start[:, None].astype(target.dtype), target[:, :-1]], axis=1)
        return found, jax.lax.scan(told, cache, inputs.T)[1].swapaxes(0, 1)

    return jitted(run)(SOURCE, TARGET)


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_steps_are_those_of_training_and_beams_keep_their_states(name):
    found, told = searched(name, 3)
    np.testing.assert_allclose(told, forward(make(name), SOURCE, TARGET), atol=2e-5)
    oracle = Oracle(make(name))
    assert np.unique(found.scores).size == 3 * B
    for row in range(B):
        for beam in range(3):
            text = found.tokens[row, beam]
            text = text[: np.argmax(text == 2) + 1] if 2 in text else text
            logits, _ = oracle(SOURCE[row, : lengths(SOURCE)[row]], text)
            logits[:, 0] = -np.inf  # padding is never written
            scores = log_softmax(logits, axis=-1)[np.arange(len(text)), text].sum()
            np.testing.assert_allclose(found.scores[row, beam], scores, atol=1e-4)


def test_a_beam_of_every_text_finds_the_best_of_them():
    """Of all that five tokens can write in three steps: padding is none of them, and the last step may only end."""
    sizes = SIZES | CASES["general-lstm"] | {"vocab_size": 6, "num_layers": 1, "num_decoder_layers": 1}
    model = draw(lambda: Seq2Seq(Seq2SeqConfig(**sizes), rngs=nnx.Rngs(0)), seed=14, stddev=1.0)
    source = np.array([[4, 3, 5, 2]], np.int32)

    def run(source):
        step, cache, start = started(model.decoder(), source, max_length=3, num_beams=16)
        return beam_search(step, cache, start, beam_size=16, max_length=3, eos_id=2, length_penalty=2.0)

    found, oracle, every = jitted(run)(source), Oracle(model), {}
    for text in itertools.product(range(1, 6), repeat=3):
        text = text[: text.index(2) + 1] if 2 in text[:2] else (*text[:2], 2)
        logits, _ = oracle(source[0], np.array(text))
        logits[:, 0] = -np.inf
        likelihood = log_softmax(logits, axis=-1)[np.arange(len(text)), text].sum()
        every[text] = likelihood / ((5 + len(text)) / 6) ** 2
    assert len(every) == 1 + 4 + 16
    best = max(every, key=every.__getitem__)
    assert len(best) == 3
    texts = [tuple(text[text != 0].tolist()) for text in found.tokens[0]]
    assert texts[0] == best
    np.testing.assert_allclose(found.scores[0], [every[text] for text in texts], atol=1e-4)


def test_a_decoding_model_that_has_no_integers():
    model = make("dot-lstm")
    assert isinstance(model, DecodingModel)
    assert model.max_input_length(99) is None
    with pytest.raises(UserError, match="does not support int8"):
        model.decoder(int8=True)


def linear(query, memory, _):
    """Elu + 1 of both sides instead of a softmax (Katharopoulos et al., 2020)."""
    feature = lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1  # noqa: E731
    weights = feature(memory) @ feature(query)
    return weights / weights.sum() @ memory, weights


OTHERS = {
    "scaled": (dot_product_attention, lambda q, k, _: (softmax(k @ q / np.sqrt(D)) @ k, None)),
    "chunked": (
        functools.partial(chunked_attention, chunk_size=2),
        lambda q, k, _: (softmax(k @ q / np.sqrt(D)) @ k, None),
    ),
    "linear": (linear_attention, linear),
}


@pytest.mark.parametrize("variant", slow_but(("bahdanau", "luong"), "luong"))
@pytest.mark.parametrize("name", slow_but(OTHERS, "linear"))
def test_any_attention_that_takes_one_query_at_a_time_fits(name, variant):
    attention_fn, formula = OTHERS[name]
    config = Seq2SeqConfig(**SIZES | {"variant": variant, "cell": "gru"})
    model = draw(lambda: Seq2Seq(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))
    assert "attention" not in params_of(model)
    logits, oracle = forward(model, SOURCE, TARGET), Oracle(model)
    oracle.attend = formula
    for row, (s, t) in enumerate(zip(lengths(SOURCE), lengths(TARGET), strict=True)):
        expected, _ = oracle(SOURCE[row, :s], TARGET[row, :t])
        np.testing.assert_allclose(logits[row, :t], expected, atol=3e-5, rtol=3e-5)


def test_a_source_of_only_padding_is_attended_to_by_nobody():
    logits, maps = with_maps(make("bahdanau-gru"), np.zeros_like(SOURCE), TARGET)
    assert np.isfinite(logits).all()
    assert not maps["decoder/2/cross"].any()


def test_behind_a_source_a_monotonic_window_is_empty():
    """The second source has three tokens, the third two, and the window reaches one further: the rest sees nothing."""
    _, maps = with_maps(make("local-m-gru"), SOURCE, np.full((B, T), 9, np.int32))
    (alignment,) = maps.values()
    np.testing.assert_allclose(alignment[:, 0].sum(axis=-1), np.arange(T) < [[5], [4], [3]], atol=1e-6)


@pytest.mark.parametrize("alignment", slow_but(("local-m", "local-p"), "local-p"))
def test_a_window_around_an_attention_of_ones_own(alignment):
    """That its own scale is kept is seen with `scale=1.0` in the loop above: "dot" is such a one."""
    config = Seq2SeqConfig(**SIZES | {"alignment": alignment, "window": 1, "cell": "gru"})
    model = draw(lambda: Seq2Seq(config, attention_fn=dot_product_attention, rngs=nnx.Rngs(0)))
    assert "w_query" not in params_of(model).get("attention", {})
    logits, oracle = forward(model, SOURCE, TARGET), Oracle(model)

    def attend(query, memory, step):
        weights = oracle.windowed(query, memory @ query / np.sqrt(D), step)
        return weights @ memory, weights

    oracle.attend = attend
    for row, (s, t) in enumerate(zip(lengths(SOURCE), lengths(TARGET), strict=True)):
        expected, _ = oracle(SOURCE[row, :s], TARGET[row, :t])
        np.testing.assert_allclose(logits[row, :t], expected, atol=3e-5, rtol=3e-5)


def test_a_fixed_context_has_no_map():
    with pytest.raises(UserError, match=r'variant="fixed" has no attention'):
        jax.eval_shape(lambda model: model(SOURCE, TARGET, return_attention=True), make("fixed-gru"))


@pytest.mark.parametrize("name", slow_but(CASES, "general-lstm"))
def test_gradients_reach_every_parameter_and_are_those_of_differences(name):
    graphdef, params, others = nnx.split(make(name), nnx.Param, ...)
    weights = np.random.default_rng(1).normal(size=(B, T, V)).astype(np.float32)

    def total(params):
        return (nnx.merge(graphdef, params, others)(SOURCE, TARGET) * weights).sum()

    grads = jitted(jax.grad(total))(nnx.to_pure_dict(params))
    direction = jax.tree.map(lambda leaf: np.sign(leaf + 1e-30).astype(np.float32), grads)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    slope = sum(np.vdot(leaf, sign) for leaf, sign in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))
    program, size = jitted(total), 1e-5 if "local-p" in name else 1e-4  # no window may pass a token on the way
    ends = [
        program(
            jax.tree.map(
                lambda leaf, sign, step=step: np.array(leaf) + step * sign, nnx.to_pure_dict(params), direction
            )
        )
        for step in (np.float32(size), np.float32(-size))
    ]
    assert float(ends[0] - ends[1]) / (2 * size) == pytest.approx(float(slope), rel=0.02)


@pytest.mark.parametrize("name", ["fixed-lstm", "general-lstm"])
def test_dropout_is_drawn_anew_for_each_key_and_only_in_training(name):
    model = make(name, dropout_rate=0.5)
    train = jitted(lambda model, key: model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=key)))
    first, again, other = (train(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2
    np.testing.assert_array_equal(forward(model, SOURCE, TARGET), forward(make(name), SOURCE, TARGET))


@pytest.mark.parametrize("name", slow_but(CASES, "bahdanau-gru"))
def test_bfloat16_is_near_and_gives_float32(name):
    logits = forward(make(name, dtype="bfloat16"), SOURCE, TARGET)
    assert logits.dtype == np.float32
    expected = forward(make(name), SOURCE, TARGET)
    assert 0 < np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


def test_number_of_parameters():
    """By hand: of a cell of G blocks from I to H inputs G H (I + H + 1)."""
    cell = lambda gates, inputs, size: gates * size * (inputs + size + 1)  # noqa: E731
    found = lambda **fields: sum(  # noqa: E731
        leaf.size
        for leaf in jax.tree.leaves(nnx.eval_shape(lambda: Seq2Seq(Seq2SeqConfig(**fields), rngs=nnx.Rngs(0))))
    )
    d, v = 8, 31
    sizes = {"vocab_size": v, "d_model": d, "num_layers": 2}
    lstm = v * d + 2 * 2 * cell(4, d, d // 2) + cell(4, 2 * d, d) + cell(4, d, d) + 4 * d * (d + 1)
    assert found(**sizes, variant="luong", score="dot") == lstm + 2 * d * d
    assert found(**sizes, variant="luong", score="general") == lstm + 3 * d * d
    assert found(**sizes, variant="luong", score="concat") == lstm + 4 * d * d + d
    assert found(**sizes, variant="luong", alignment="local-m") == lstm + 3 * d * d
    assert found(**sizes, variant="luong", alignment="local-p") == lstm + 4 * d * d + d
    gru = v * d + 2 * cell(3, d, d // 2) + cell(3, 2 * d, d) + d * (d + 1)
    maxout = 2 * d * (3 * d + 1)
    sizes |= {"num_layers": 1, "cell": "gru"}
    assert found(**sizes, variant="fixed") == gru + maxout
    assert found(**sizes, variant="bahdanau") == gru + maxout + 2 * d * d + d
    told = 2  # Variables, not parameters: the loss of coverage, weighed and not
    assert found(**sizes, variant="bahdanau", coverage=1.0) == gru + maxout + 2 * d * d + 3 * d + told


def test_the_forget_gate_starts_open():
    model = initial(lambda: Seq2Seq(Seq2SeqConfig(**SIZES), rngs=nnx.Rngs(0)))
    bias = params_of(model)["first_layer"]["bias"]
    np.testing.assert_array_equal(bias.reshape(4, D), np.eye(4)[1][:, None] * np.ones(D))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 7}, "d_model must be even"),
        ({"cell": "rnn"}, 'cell must be "lstm" or "gru", got \'rnn\''),
        ({"variant": "global"}, "variant must be \"fixed\" or .*, got 'global'"),
        ({"score": "cosine"}, "score must be \"general\" or .*, got 'cosine'"),
        ({"alignment": "local"}, "alignment must be \"global\" or .*, got 'local'"),
        ({"variant": "bahdanau", "alignment": "local-m"}, 'alignment="local-m" needs variant="luong", got'),
        ({"coverage": 1.0}, 'coverage=1.0 needs an additive score, .* got variant="luong" and score="general"'),
        ({"coverage": 0.0, "variant": "fixed", "score": "concat"}, 'coverage=0.0 needs .* got variant="fixed"'),
        ({"start_id": V}, f"start_id={V} must be in 0 .. {V - 1}"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Seq2Seq(Seq2SeqConfig(**SIZES | fields), rngs=nnx.Rngs(0))


def test_an_attention_of_ones_own_sees_no_coverage():
    config = Seq2SeqConfig(**SIZES, variant="bahdanau", coverage=1.0)
    with pytest.raises(ValueError, match=r"coverage=1.0 cannot be combined with attention_fn: leave one of them out"):
        Seq2Seq(config, attention_fn=dot_product_attention, rngs=nnx.Rngs(0))


def test_a_fixed_context_is_given_no_attention():
    with pytest.raises(ValueError, match="leave attention_fn out"):
        Seq2Seq(Seq2SeqConfig(**SIZES, variant="fixed"), attention_fn=dot_product_attention, rngs=nnx.Rngs(0))
