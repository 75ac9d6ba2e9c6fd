"""Whatever attention a configuration names for a model: it does what the training asks of it, or one line says no."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tests.attentions import example
from tests.training.configs import TRAININGS, default_config, with_values
from tests.training.tiny import tiny_config
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import SPECS
from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.models.config import SelfAttentionConfig
from tfx_jax.models.transformer_xl import TransformerXLConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions, Distribution, distributed
from tfx_jax.planning.plan import plan_step
from tfx_jax.training.config import save_config, tiny_variant, validate
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.layers import shard_attention, with_supported_kernels
from tfx_jax.training.sharding.strategies import make_mesh

# A Transformer-XL has an attention of its own, and says so of any other name.
FAMILIES = {
    classes[0].__name__: classes
    for classes in reversed(TRAININGS)
    if isinstance(classes[0](), SelfAttentionConfig) and classes[0] is not TransformerXLConfig
}
RATES = dict.fromkeys(FAMILIES, "attention_dropout_rate") | {"T5Config": "dropout_rate", "LongEncoderConfig": None}
QUICK = ("BertConfig", "T5Config")


def tiny(family, name, rate=0.0, **values):
    """A tiny training of a model with that attention, which drops so many of its weights if it drops any."""
    config = tiny_variant(default_config(FAMILIES[family]))
    config.model.attention = example(name, length=64)
    rates = {} if RATES[family] is None else {RATES[family]: rate}
    return with_values(config, {f"model.{field}": value for field, value in (rates | values).items()})


@functools.cache
def asked(family):
    """What the first step of a training asks of its self-attention: arrays, of shapes alone, and options of a call."""
    config, calls = validate(tiny(family, "chunked", 0.1)), {}

    def note(core, query, key, value, **options):
        if core is chunked_attention or getattr(core, "func", None) is chunked_attention:  # not that to a source
            call = {"query": query, "key": key, "value": value, **options}
            call = {name: jax.typeof(x) if isinstance(x, jax.Array) else x for name, x in call.items()}
            calls[str(call)] = call
        return core(query, key, value, **options)

    planned = config.task.planned(config.model, LoaderOptions(seed=0))

    def loss(batch):
        model = planned.task.make_model(rngs=nnx.Rngs(params=0))
        with distributed(Distribution(attend=note)):
            return planned.task.loss(model, batch, nnx.Rngs(dropout=1)).loss

    jax.eval_shape(loss, planned.batch)
    assert calls
    return list(calls.values())


def trained(attention, call):
    """Whether a core with parameters of its own gives what is asked, and gradients of it: shapes alone."""
    arrays = {name: x for name, x in call.items() if isinstance(x, jax.core.ShapedArray)}
    options = {name: x for name, x in call.items() if name not in arrays}
    (b, t, n, h), gates = call["query"].shape, SPECS[attention.name].gates
    shapes = gates(num_heads=n, num_kv_heads=call["key"].shape[2], d_k=h) if gates is not None else {}
    arrays |= {gate: jax.typeof(np.zeros((b, t, *shape), np.float32)) for gate, shape in shapes.items()}

    def total(inputs, others):
        core = attention.make(n, h, num_kv_heads=call["key"].shape[2], rngs=nnx.Rngs(0))
        learns = {"is_training": True} if getattr(core, "has_running_statistics", False) else {}
        return core(**inputs, **others, **options, **learns).sum()

    inputs = {name: arrays.pop(name) for name in ("query", "key", "value")}
    return jax.eval_shape(jax.grad(total), inputs, arrays)


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_every_attention_does_what_is_asked_or_is_refused_with_a_line(family):
    done = {}
    for name in SPECS:
        for rate in (0.1, 0.0):
            config = tiny(family, name, rate)
            try:
                validate(config)
            except UserError as error:
                line = str(error)
                assert line.startswith("config.model") and f"{name} attention" in line and line.isprintable()  # noqa: PT018
                continue
            for call in asked(family) if name not in done else ():  # to drop none is to be asked for less
                assert (call.get("dropout_rate") == 0.1) == (RATES[family] is not None)
                trained(config.model.attention, call if rate else call | {"dropout_rate": 0.0})
            done.setdefault(name, []).append(rate)
    assert done["dense"] == done["relative"] == [0.1, 0.0]
    assert all(done[name] == [0.0] for name in done if not SPECS[name].dropout and RATES[family])


@pytest.mark.parametrize("name", SPECS)
def test_a_core_drops_weights_or_says_that_it_cannot(name):
    attention = example(name)
    x = jax.typeof(np.zeros((1, 8, 2, 4), np.float32))
    rng = jax.typeof(jax.random.key(0))
    call = {"query": x, "key": x, "value": x, "dropout_rate": 0.1, "dropout_rng": rng}
    if SPECS[name].dropout:
        attention.check(is_causal=SPECS[name].causal_only, drops="attention_dropout_rate")
        trained(attention, call)
        return
    with pytest.raises(ValueError, match=r"has no dropout|no weights to drop"):
        trained(attention, call)
    message = f"attention_dropout_rate must be 0 with {name} attention, which has no dropout of weights"
    with pytest.raises(ValueError, match=message):
        attention.check(is_causal=SPECS[name].causal_only, drops="attention_dropout_rate")


@pytest.mark.parametrize(
    ("family", "name", "values", "message"),
    [
        ("BertConfig", "linear", {}, "config.model.attention_dropout_rate must be 0 with linear attention, which has"),
        (
            "T5Config",
            "flash",
            {},
            "config.model.dropout_rate must be 0 with flash attention, which has no dropout of weights",
        ),
        ("GPTConfig", "cudnn", {"attention_dropout_rate": 0.0}, 'config.model.dtype must be "bfloat16" with cudnn'),
        ("GPTConfig", "relative", {"d_model": 33, "num_heads": 3}, "relative attention: d_model must be even for sin"),
        ("BertConfig", "favor", {"attention.options.block_size": 3}, "favor attention: block_size must be a power of"),
        ("BertConfig", "lsh", {"attention.options.num_buckets": 3}, "lsh attention: num_buckets must be 1 or even"),
        ("BertConfig", "nystrom", {"attention.options.num_iterations": 10**9}, "num_iterations must be at most 100"),
        ("BertConfig", "routing", {"attention.options.num_clusters": 0}, "num_clusters must be at least 1, got 0"),
        (
            "BertConfig",
            "routing",
            {"attention.options.window": 0},
            "routing attention: window must be at least 1, got 0",
        ),
        ("BertConfig", "routing", {"attention.options.decay": 1.5}, "decay must be at most 1, got 1.5"),
    ],
)
def test_the_line_names_what_to_change(family, name, values, message):
    dropping = {} if "attention_dropout_rate must" in message or family == "T5Config" else {"rate": 0.0}
    with pytest.raises(UserError, match=re.escape(message)):
        validate(tiny(family, name, **({"rate": 0.1} | dropping), **values))


def test_kernels_are_refused_where_they_do_not_run_before_anything_is_traced():
    for name, needed in (("splash", "TPU"), ("cudnn", "GPU")):
        config = tiny("GPTConfig", name, dtype="bfloat16")
        message = f'config.model.attention.name="{name}" needs a {needed}, but the devices are cpu: '
        with pytest.raises(UserError, match=re.escape(message)):
            plan_step(config, jax.devices()[:1])


def test_sizes_that_a_kernel_does_not_have_are_one_line():
    core = AttentionConfig("flash").make(2, 144, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((1, 8, 2, 144), np.float32)
    message = "config.model.attention.name=\"flash\": implementation='flash' needs a head size below 128 or a multiple"
    with pytest.raises(UserError, match=re.escape(message)):
        jax.eval_shape(functools.partial(shard_attention(make_mesh(1)), core), x, x, x)


def test_what_was_trained_with_a_kernel_is_read_wherever_it_is(text, tmp_path):
    config = validate(with_values(tiny_config(text), {"model.attention.name": "splash"}))
    save_config(config, tmp_path)
    make_run(config, tmp_path)  # which makes the tokenizer
    run, tokens = load_run(tmp_path), jax.ShapeDtypeStruct((2, 3), np.int32)
    jax.jit(lambda source, target: run.make_model()(source, target)).lower(tokens, tokens)
    attention = AttentionConfig("window,flash", AttentionOptions(window=3))
    for platform, name in (("cpu", "window,dense"), ("gpu", "window,dense"), ("tpu", "window,flash")):
        assert with_supported_kernels(attention, platform) == AttentionConfig(name, AttentionOptions(window=3))
