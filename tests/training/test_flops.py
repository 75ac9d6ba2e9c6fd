"""Model FLOPs against formulas by hand, the matrix products of the gradient, and XLA's cost analysis."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import flops as by_hand
from tests.tiers import slow_but
from tests.training.configs import TRAININGS, default_config, title, with_values
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.generation.decoding import BeamSearch, decode
from tfx_jax.models import T5, T5Config, Transformer, TransformerConfig
from tfx_jax.nn.moe import ExpertsConfig
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.config import tiny_variant, validate
from tfx_jax.training.flops import decoding_flops, training_flops
from tfx_jax.training.step import init_state, update

SMALL = TransformerConfig(vocab_size=101, num_layers=3, d_model=24, num_heads=2, d_k=5, d_v=7, d_ff=40)
PRE_NORM = TransformerConfig(vocab_size=50, num_layers=2, d_model=16, num_heads=4, d_ff=30, pre_norm=True)
DEEPER_DECODER = dataclasses.replace(SMALL, num_layers=2, num_decoder_layers=3)

T5_SIZES = {"vocab_size": 61, "num_layers": 2, "d_model": 24, "num_heads": 3, "d_k": 5, "d_ff": 40}
T5_GATED = T5Config(**T5_SIZES, is_gated=True, is_tied=False, num_decoder_layers=3)


def pair_flops(config, rows, source_length, target_length):
    """What is counted in a step of translation."""
    model = T5 if isinstance(config, T5Config) else Transformer
    lengths = {"source": source_length, "target": target_length}
    batch = {side: jax.ShapeDtypeStruct((rows, length), jnp.int32) for side, length in lengths.items()}
    return training_flops(lambda: model(config, rngs=nnx.Rngs(0)), translation_loss, batch)


def training_step(config, rows, source_length, target_length):
    """A whole step as a function, and the shapes of its arguments."""
    optimizer = optax.adam(1e-3)
    model = T5 if isinstance(config, T5Config) else Transformer
    graphdef, first_state = init_state(lambda: model(config, rngs=nnx.Rngs(0)), optimizer)
    batch = {
        "source": jax.ShapeDtypeStruct((rows, source_length), jnp.int32),
        "target": jax.ShapeDtypeStruct((rows, target_length), jnp.int32),
    }
    step = functools.partial(update, graphdef, translation_loss, optimizer)
    return step, (jax.eval_shape(first_state), batch, jax.eval_shape(lambda: jax.random.key(0)))


def flops_of_products(jaxpr):
    """Two FLOPs for each multiplication in the matrix products of a program, its loops run to their ends."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"][0]
            lengths = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lengths)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * flops_of_products(inner)
    return total


# One shape each is quick; tracing the gradient is what costs.
STEPS = [
    pytest.param(config, shape, id=f"{name}-{shape}", marks=pytest.mark.slow if shape == (2, 5, 9) else ())
    for name, config in {
        "d_k and d_v": SMALL,
        "pre-norm": PRE_NORM,
        "more decoder layers": DEEPER_DECODER,
        "T5": T5Config(**T5_SIZES),
        "gated T5, not tied": T5_GATED,
    }.items()
    for shape in [(3, 11, 6), (2, 5, 9)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "shape"), STEPS)
def test_equals_the_matrix_products_of_the_step(config, shape):
    step, arguments = training_step(config, *shape)
    expected = flops_of_products(jax.make_jaxpr(step)(*arguments).jaxpr)
    assert pair_flops(config, *shape) == by_hand.encoder_decoder(config, *shape) == expected


def test_is_nearly_all_that_xla_counts(monkeypatch):
    """XLA adds the element-wise work, 2.4 % at this width. It counts a loop's body once: the one layer is unrolled."""
    config = TransformerConfig(vocab_size=2_000, num_layers=1, d_model=256, num_heads=4, d_ff=1024, dropout_rate=0.0)
    shape = (4, 48, 32)
    monkeypatch.setattr(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True))
    step, arguments = training_step(config, *shape)
    counted = jax.jit(step).lower(*arguments).compile().cost_analysis()["flops"]
    assert pair_flops(config, *shape) == pytest.approx(counted, rel=0.05)


def search_flops(config, rows, num_beams, source_length, target_length):
    """What is counted in a beam search."""
    decoder = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)).decoder())
    source = jax.ShapeDtypeStruct((rows, source_length), jnp.int32)
    return decoding_flops(decoder, source, max_length=target_length, num_beams=num_beams)


def searching(config, rows, beam_size, source_length, target_length):
    """A beam search as a function, and the shapes of its arguments."""
    decoder = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)).decoder())
    source, token_mask = (jax.ShapeDtypeStruct((rows, source_length), dtype) for dtype in (jnp.int32, jnp.bool_))
    program = functools.partial(decode, search=BeamSearch(beam_size), eos_ids=(2,), max_length=target_length)
    return program, (decoder, source, token_mask)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SMALL, (2, 1, 5, 9)),
        (DEEPER_DECODER, (3, 4, 11, 6)),
        pytest.param(SMALL, (3, 4, 11, 6), marks=pytest.mark.slow),
        pytest.param(DEEPER_DECODER, (2, 1, 5, 9), marks=pytest.mark.slow),
    ],
)
def test_decoding_is_bounded_by_the_products_of_the_search(config, shape):
    """A query meets T keys of each of W beams T times, T (T + 1) / 2 of which are needed; the loop is counted once."""
    program, arguments = searching(config, *shape)
    jaxpr = jax.make_jaxpr(program)(*arguments).jaxpr
    (body,) = (equation.params["body_jaxpr"].jaxpr for equation in loops(jaxpr))
    rows, beam_size, _, length = shape
    computed = flops_of_products(jaxpr) + (length - 1) * flops_of_products(body)
    pairs = beam_size * length**2 - length * (length + 1) // 2
    unneeded = 2 * rows * beam_size * 3 * 2 * (5 + 7) * pairs  # layers, heads, d_k + d_v
    assert computed - unneeded <= search_flops(config, *shape) <= computed
    assert search_flops(config, *shape) == by_hand.search(config, *shape)


def test_decoding_is_nearly_all_that_xla_counts(monkeypatch):
    """With one step, XLA's count of a loop is right; it adds element-wise work and ranking, 6 % at this width."""
    config = TransformerConfig(vocab_size=2_000, num_layers=1, d_model=256, num_heads=4, d_ff=1024)
    shape = (4, 4, 24, 1)
    monkeypatch.setattr(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True))
    program, arguments = searching(config, *shape)
    counted = jax.jit(program).lower(*arguments).compile().cost_analysis()["flops"]
    assert search_flops(config, *shape) == pytest.approx(counted, rel=0.1)


def loops(jaxpr):
    """The while loops of a program, wherever they are."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from loops(inner)


def test_equals_palm_where_both_are_defined():
    """Appendix B: 6 N + 12 L H Q T a token, N the weights. The difference of two depths leaves the embedding out."""
    shallow, deep = (TransformerConfig(num_layers=layers) for layers in (6, 12))
    rows, length = 2, 64
    weights = 6 * (4 * 512**2 + 2 * 512 * 2048 + 8 * 512**2 + 2 * 512 * 2048)
    attention = 12 * 6 * 512 * length  # of one attention in each of 6 layers; there are three
    expected = rows * length * (6 * weights + 3 * attention)
    assert pair_flops(deep, rows, length, length) - pair_flops(shallow, rows, length, length) == expected


CASES = {title(classes): (classes, {}) for classes in TRAININGS}


def case(name):
    """One of TRAININGS by the beginning of its name."""
    return next(classes for classes in TRAININGS if title(classes).startswith(name))


VARIANTS = {
    "Llama, grouped queries": (case("Llama"), {"num_heads": 4, "num_kv_heads": 2}),
    "GPT, head size": (case("GPT"), {"d_k": 10, "d_ff": 24}),
    "GPT, sliding window": (case("GPT"), {"attention.name": "window", "attention.options.window": 4}),
    "GPT, chunked": (case("GPT"), {"attention.name": "chunked"}),
    "GPT, rematerialized": (case("GPT"), {"remat": "full"}),
    "GPT, unrolled": (case("GPT"), {"unroll": True}),
    "GPT, experts": (case("GPT"), {"num_layers": 2, "experts": ExpertsConfig(num_experts=4)}),
    "GPT, two experts and a shared one": (
        case("GPT"),
        {"num_layers": 2, "experts": ExpertsConfig(4, experts_per_token=2, shared_d_ff=12, use_shared_gate=True)},
    ),
    "Conformer, dense": (case("Conformer"), {"attention.name": "dense"}),
    "Seq2Seq, dot": (case("Seq2Seq"), {"variant": "luong", "score": "dot", "cell": "lstm"}),
    "Seq2Seq, general": (case("Seq2Seq"), {"variant": "luong", "score": "general", "cell": "gru"}),
    "Seq2Seq, concat": (case("Seq2Seq"), {"variant": "luong", "score": "concat"}),
    "Seq2Seq, local-p": (case("Seq2Seq"), {"variant": "luong", "score": "general", "alignment": "local-p"}),
    "Seq2Seq, coverage": (case("Seq2Seq"), {"variant": "bahdanau", "coverage": 1.0}),
    "Seq2Seq, fixed": (case("Seq2Seq"), {"variant": "fixed"}),
    "Decomposable, intra": (case("Decomposable"), {"intra_attention": True}),
    "Seq2Vec, structured": (case("Seq2Vec"), {"pooling": "structured", "penalty": 0.0}),
    "Seq2Vec, penalized": (case("Seq2Vec"), {"pooling": "structured"}),
    "ELMo, without": (case("ElmoConfig-Tagging"), {"tagger.use_elmo": False}),
    "T5, gated": (case("T5"), {"is_gated": True, "is_tied": False, "num_decoder_layers": 3}),
}


QUICK = (title(case("Transformer")), title(case("TransformerXL")), title(case("Captioner")), *VARIANTS)


@pytest.mark.parametrize("name", slow_but(CASES | VARIANTS, *QUICK))
def test_equals_the_formula(name):
    classes, values = (CASES | VARIANTS)[name]
    config = tiny_variant(default_config(classes))
    config = validate(with_values(config, {f"model.{path}": value for path, value in values.items()}))
    task, batch = config.task.planned(config.model, LoaderOptions(seed=0))
    formula = by_hand.FORMULAS[tuple(part.__name__ for part in classes[:2])]
    expected = formula(task.model_config, {name: array.shape for name, array in batch.items()})
    make_carry = getattr(task, "make_carry", lambda: None)
    counted = training_flops(lambda: task.make_model(rngs=nnx.Rngs(params=0)), task.loss, batch, make_carry=make_carry)
    assert counted == expected


class Products(nnx.Module):
    """Products of each kind by one matrix: of an input, of a frozen array, in a branch, and in a loop."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((5, 5)))
        self.frozen = nnx.BatchStat(jnp.ones((5, 5)))

    def __call__(self, x):
        w = self.kernel[...]
        y = x @ w  # 4: no gradient of the input
        y += jax.lax.stop_gradient(y) @ self.frozen[...]  # 2
        y = jax.lax.cond(x.sum() > 0, lambda y: y @ w, lambda y: y, y)  # 6
        # From the second turn on, what is carried depends on a parameter.
        y += jax.lax.scan(lambda carry, _: (carry @ w, None), x, length=7)[0]  # 7 * 6
        return jax.checkpoint(lambda y: y @ self.frozen[...])(y)  # 4


def test_operands_without_a_gradient_cost_less():
    def loss(model, batch, rngs):
        del rngs
        return LossOutput(model(batch).sum(), jnp.ones(()), {}, jnp.ones(()))

    batch = np.ones((3, 5), np.float32)
    assert training_flops(Products, loss, batch) == (4 + 2 + 6 + 7 * 6 + 4) * 3 * 5 * 5
