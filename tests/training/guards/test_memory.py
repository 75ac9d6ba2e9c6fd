"""What a training takes of the memory: counted right, told before the first step, refused in one line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.training.tiny import tiny_config, train
from tfx_jax.errors import UserError
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.training import loop
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.guards import memory
from tfx_jax.training.guards.memory import StateMemory
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding.strategies import DATA_PARALLEL, make_mesh, state_shardings, with_shardings
from tfx_jax.training.step import init_state, new_state

MIB = 2**20
SHARDED = ((".*/table", P("data", None)), (r".*/feed_forward/up", P("data")))


@pytest.mark.parametrize(("name", "rules"), [("adafactor", DATA_PARALLEL), ("adam", SHARDED)])
def test_bytes_are_those_of_the_arrays(name, rules):
    """Counted from shapes; compared with what lies on the second device once the state is made."""
    model = TransformerConfig(88, num_layers=2, d_model=40, num_heads=2, d_ff=48)
    optimizer = make_optimizer(OptimizerConfig(name=name), 40)
    _, first_state = init_state(lambda: Transformer(model, rngs=nnx.Rngs(0)), optimizer)
    shapes = jax.eval_shape(first_state)
    shardings = state_shardings(shapes, make_mesh(8), [rules])
    found = memory.state_memory(with_shardings(shapes, shardings))

    state = jax.device_put(jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes), shardings)
    device = jax.devices()[1]

    def lying_there(tree):
        shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    assert found.params == found.gradients == lying_there(state.params)
    assert found.optimizer == lying_there(state.opt_state)
    assert found.num_params == sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert (found.params < 4 * found.num_params) == (rules is SHARDED)


def test_frozen_parameters_and_averages_need_memory():
    """An adapter has a few parameters, but the model that it modifies lies on the device as well."""
    state = new_state(
        {"adapter": np.zeros(10, np.float32)},
        optax.sgd(1.0, momentum=0.9),
        model_state={"frozen": np.zeros(1_000, np.float32)},
        has_ema=True,
    )
    found = memory.state_memory(with_shardings(state, state_shardings(state, make_mesh(1))))
    assert found == StateMemory(10, 10, params=4_040, optimizer=80, gradients=40)


def test_state_that_cannot_fit():
    needs = StateMemory(1_000, 1_000, params=10 * MIB, optimizer=20 * MIB, gradients=10 * MIB)
    memory.check_state(needs, 40 * MIB)
    with pytest.raises(
        UserError,
        match=r"^a device has 39 MiB of memory, but needs 40 MiB for parameters, optimizer and gradients: try config",
    ):
        memory.check_state(needs, 39 * MIB)


def test_step_that_cannot_fit():
    needs = StateMemory(2_500_000, 1_500_000, params=10 * MIB, optimizer=20 * MIB, gradients=10 * MIB)
    line = memory.report(needs, 70 * MIB, 100 * MIB)
    assert line == (
        "2,500,000 parameters, 1,500,000 of them trained; of the 100 MiB of each device: parameters 10 MiB, "
        "optimizer 20 MiB, step 70 MiB (10 MiB of it gradients)"
    )
    with pytest.raises(
        UserError, match=r"needs 71 MiB for the step and 30 MiB for parameters and optimizer: try config\.model"
    ):
        memory.report(needs, 71 * MIB, 100 * MIB)
    assert memory.report(needs, None, 100 * MIB).endswith("optimizer 20 MiB, gradients 10 MiB")


def test_memory_of_a_device():
    """Tests run on CPU, whose devices share the machine."""
    whole, shared = (memory.device_memory(make_mesh(size)) for size in (1, 8))
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert whole == 8 * shared == pytest.approx(total, rel=0.01)


def test_step_is_not_compiled_twice():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    step_fn = jax.jit(lambda state, batch: (state + batch @ batch.T, batch.sum()), donate_argnums=0)
    arguments = jnp.zeros((64, 64)), jnp.ones((64, 3))
    compiled.clear()
    assert memory.step_memory(step_fn, *arguments) >= 0
    assert len(compiled) == 1
    state, _ = step_fn(*arguments)
    step_fn(state, arguments[1])
    assert len(compiled) == 1
    assert step_fn._cache_size() == 1


def test_device_that_runs_out_of_memory():
    message = r"^a device ran out of memory \(RESOURCE_EXHAUSTED.*\): try config"
    with pytest.raises(UserError, match=message) as caught, memory.out_of_memory_as_user_error():
        jax.jit(lambda: jnp.zeros(2**47, jnp.uint8))().block_until_ready()
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory.out_of_memory_as_user_error():
        raise jax.errors.JaxRuntimeError("INTERNAL: RESOURCE")
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"), memory.out_of_memory_as_user_error():
        raise ValueError("RESOURCE_EXHAUSTED")


def test_training_tells_before_its_first_step(text, tmp_path, capfd):
    train(tiny_config(text, num_steps=2), tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert [number for number, line in enumerate(lines) if "parameters; of the" in line] == [0]
    assert "step 1/2" in lines[1]


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [("device_memory", 1, "for parameters, optimizer and gradients"), ("step_memory", 2**60, "for the step and")],
)
def test_training_that_cannot_fit_stops_before_its_first_step(text, tmp_path, monkeypatch, name, size, message):
    monkeypatch.setattr(loop, name, lambda *_: size)
    with pytest.raises(UserError, match=message):
        train(tiny_config(text, num_steps=2), tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*"))
