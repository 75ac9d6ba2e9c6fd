"""Model FLOPs against two independent counts of the same step: its jaxpr's matrix products, and XLA's cost analysis."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tfx_jax.generation.decoding import BeamSearch, decode
from tfx_jax.models import GPT, T5, GPTConfig, LongEncoder, LongEncoderConfig, T5Config, Transformer, TransformerConfig
from tfx_jax.tasks.sequence.long_range import long_range_loss
from tfx_jax.tasks.text.language_modeling import language_model_loss
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.reporting.meter import peak_flops
from tfx_jax.training.step import init_state, update

SMALL = TransformerConfig(vocab_size=101, num_layers=3, d_model=24, num_heads=2, d_k=5, d_v=7, d_ff=40)
PRE_NORM = TransformerConfig(vocab_size=50, num_layers=2, d_model=16, num_heads=4, d_ff=30, pre_norm=True)

DEEPER_DECODER = dataclasses.replace(SMALL, num_layers=2, num_decoder_layers=3)


T5_SIZES = {"vocab_size": 61, "num_layers": 2, "d_model": 24, "num_heads": 3, "d_k": 5, "d_ff": 40}
T5_GATED = T5Config(**T5_SIZES, is_gated=True, is_tied=False, num_decoder_layers=3)


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


@pytest.mark.parametrize(("config", "shape"), STEPS)
def test_equals_the_matrix_products_of_the_step(config, shape):
    step, arguments = training_step(config, *shape)
    assert config.training_flops(*shape) == flops_of_products(jax.make_jaxpr(step)(*arguments).jaxpr)


def test_is_nearly_all_that_xla_counts(monkeypatch):
    """XLA adds the element-wise work, 2.4 % at this width. It counts a loop's body once: the one layer is unrolled."""
    config = TransformerConfig(vocab_size=2_000, num_layers=1, d_model=256, num_heads=4, d_ff=1024, dropout_rate=0.0)
    shape = (4, 48, 32)
    monkeypatch.setattr(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True))
    step, arguments = training_step(config, *shape)
    counted = jax.jit(step).lower(*arguments).compile().cost_analysis()["flops"]
    assert config.training_flops(*shape) == pytest.approx(counted, rel=0.05)


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
    assert computed - unneeded <= config.flop_sizes.decoding_flops(*shape) <= computed


def test_decoding_is_nearly_all_that_xla_counts(monkeypatch):
    """With one step, XLA's count of a loop is right; it adds element-wise work and ranking, 6 % at this width."""
    config = TransformerConfig(vocab_size=2_000, num_layers=1, d_model=256, num_heads=4, d_ff=1024)
    shape = (4, 4, 24, 1)
    monkeypatch.setattr(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True))
    program, arguments = searching(config, *shape)
    counted = jax.jit(program).lower(*arguments).compile().cost_analysis()["flops"]
    assert config.flop_sizes.decoding_flops(*shape) == pytest.approx(counted, rel=0.1)


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
    assert deep.training_flops(rows, length, length) - shallow.training_flops(rows, length, length) == expected


def test_peak_is_that_of_all_devices():
    assert peak_flops(["TPU v4"] * 8) == 8 * 275e12
    assert peak_flops(["NVIDIA H100 80GB HBM3"]) == pytest.approx(989e12, rel=1e-3)
    # A v3 chip, of 123 TFLOP/s, is two devices.
    assert peak_flops(["TPU v3"] * 2) == 123e12


def test_no_peak_is_better_than_a_wrong_one():
    assert peak_flops([device.device_kind for device in jax.devices()]) is None  # CPUs
    assert peak_flops(["TPU v4", "TPU v99"]) is None
    assert peak_flops(["NVIDIA H100 80GB HBM3 MIG 1g.10gb"]) is None


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(vocab_size=50, max_length=16, num_layers=3, d_model=16, num_heads=2, d_k=10, d_ff=24),
        GPTConfig(vocab_size=50, max_length=16, num_layers=1, d_model=16, num_heads=4),
    ],
)
def test_flops_of_a_language_model_are_those_of_its_products(config):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))

    def loss(state, batch):
        return language_model_loss(nnx.merge(graphdef, state), batch, None)[0]

    tokens = jax.ShapeDtypeStruct((2, 16), np.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((2, 16), np.float32)}
    jaxpr = jax.make_jaxpr(jax.grad(loss))(state, batch).jaxpr
    assert config.training_flops(2, 16, num_predicted=16) == flops_of_products(jaxpr)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_flops_of_an_encoder_of_long_sequences_are_those_of_its_products_but_for_the_head(num_sequences):
    sizes = {"num_layers": 3, "d_model": 16, "num_heads": 2, "d_ff": 24, "labels": ("a", "b", "c")}
    config = LongEncoderConfig(50, **sizes, num_sequences=num_sequences)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: LongEncoder(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((5, 18), np.int32)
    batch = {name: tokens for name in ("tokens", "other_tokens")[:num_sequences]}
    batch |= {"label": jax.ShapeDtypeStruct((5,), np.int32), "row_weights": jax.ShapeDtypeStruct((5,), np.float32)}
    program = jax.grad(lambda state, batch: long_range_loss(nnx.merge(graphdef, state), batch, None).loss)
    head = 16 * 24 + 24 * 3 if num_sequences == 1 else 64 * 24 + 24 * 12 + 12 * 3
    products = flops_of_products(jax.make_jaxpr(program)(state, batch).jaxpr)
    assert config.training_flops(5, 18) == products - 6 * 5 * head
