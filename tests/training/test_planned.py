"""What a task says of its largest batch without data is what it trains on with data."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tests.tiers import slow_but
from tests.training.configs import TRAININGS, default_config, title
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.training.config import tiny_variant, validate
from tfx_jax.training.run import make_run
from tfx_jax.training.step import init_state, update

CASES = {title(classes): classes for classes in TRAININGS}
QUICK = ("TransformerConfig-TranslationConfig-PairData", "SanCTCConfig-SpeechRecognitionConfig-SpeechData")


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_a_real_batch_is_no_larger_and_has_the_same_arrays(name, tmp_path):
    config = validate(tiny_variant(default_config(CASES[name])))
    run, options = make_run(config, tmp_path), LoaderOptions(seed=0, batch_multiple=2)
    batch = next(iter(run.task.train_data(options)))
    planned = config.task.planned(run.task.model_config, options).batch
    assert {name: array.dtype for name, array in batch.items()} == {
        name: array.dtype for name, array in planned.items()
    }
    for name, array in batch.items():
        assert array.ndim == planned[name].ndim
        assert array.shape[1:] <= planned[name].shape[1:]
        assert planned[name].shape[0] % 2 == 0


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_its_loss_needs_no_data(name):
    config = validate(tiny_variant(default_config(CASES[name])))
    task, batch = config.task.planned(config.model, LoaderOptions(seed=0))
    carry = getattr(task, "make_carry", lambda: None)

    def loss(batch):
        model = task.make_model(rngs=nnx.Rngs(params=0))
        arguments = () if carry() is None else (carry(),)
        return task.loss(model, batch, nnx.Rngs(dropout=0), *arguments)

    output = jax.eval_shape(loss, batch)
    assert output.loss.shape == output.weight.shape == ()
    longest = max(array.shape[1] for array in batch.values() if array.ndim > 1)
    assert longest >= config.task.data.max_length - isinstance(config.task, TextToTextConfig)
    assert np.prod(next(iter(batch.values())).shape[:2]) <= config.task.data.tokens_per_batch


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (model, *_) in CASES.items() if hasattr(model, "unroll")])
def test_layers_are_unrolled_where_it_is_wanted(name):
    """Every loop over layers is: the only ones of as many turns as there are layers."""
    config = validate(tiny_variant(default_config(CASES[name])))
    config.model.num_layers, config.model.unroll = 13, True
    task, batch = config.task.planned(config.model, LoaderOptions(seed=0))
    model = nnx.eval_shape(lambda: task.make_model(rngs=nnx.Rngs(params=0)))
    carry = getattr(task, "make_carry", lambda: None)()
    arguments = () if carry is None else (carry,)
    program = jax.make_jaxpr(lambda model, batch: task.loss(model, batch, None, *arguments).loss)(model, batch)
    unrolled = [scan.params["unroll"] for scan in program.jaxpr.eqns if scan.params.get("length") == 13]
    assert unrolled
    assert set(unrolled) == {13}


def test_a_frozen_part_may_have_a_rate_that_nothing_draws():
    config = tiny_variant(default_config(CASES["ElmoConfig-TaggingConfig-TaggedData"]))
    config.model.dropout_rate, config.model.tagger.dropout_rate = 0.1, 0.0
    task, batch = config.task.planned(config.model, LoaderOptions(seed=0))
    optimizer = optax.sgd(1.0)
    graphdef, first_state = init_state(lambda: task.make_model(rngs=nnx.Rngs(params=0)), optimizer)
    step = functools.partial(update, graphdef, task.loss, optimizer)
    jax.eval_shape(step, jax.eval_shape(first_state), batch, jax.random.key(0))


def test_devices_that_share_rows_and_positions_decide_the_shapes():
    config = tiny_variant(default_config(CASES[QUICK[0]]))
    config.task.data.max_length, config.task.data.tokens_per_batch = 30, 1000
    options = LoaderOptions(seed=0, batch_multiple=6, length_multiple=4)
    _, batch = config.task.planned(config.model, options)
    assert {array.shape for array in batch.values()} == {(30, 32)}
