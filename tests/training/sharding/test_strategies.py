"""Meshes, tables of rules, batches spread over devices, and what compiled steps exchange."""

import collections
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tfx_jax.errors import UserError
from tfx_jax.models import GPT, T5, BertConfig, BertPretraining, GPTConfig, T5Config
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.models.vit import ViT, ViTConfig
from tfx_jax.nn import AttentionConfig, MixtureOfExperts
from tfx_jax.planning.programs import collectives
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding.strategies import (
    BATCH,
    DATA_PARALLEL,
    held_batch_shards,
    make_mesh,
    num_batch_shards,
    process_shard,
    shard_batch,
    shard_training,
    state_shardings,
)
from tfx_jax.training.step import new_state


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1, 1)),
        ({"data": 3}, (3, 1, 1, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1, 1, 1)),
        ({"data": 1, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 3}, (1, 2, 1, 1, 3)),
        ({"expert": 2, "sequence": 2, "tensor": 2}, (1, 1, 2, 2, 2)),
    ],
)
def test_mesh_takes_the_first_devices(sizes, shape):
    mesh = make_mesh(**sizes)
    assert mesh.axis_names == ("data", "fsdp", "expert", "sequence", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert mesh.devices.shape == shape
    assert mesh.devices.ravel().tolist() == jax.devices()[: np.prod(shape)]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"data": 0}, "data=0"),
        ({"data": -2}, "data=-2"),
        ({"data": 9}, "data=9"),
        ({"fsdp": 3}, "data=-1 * fsdp=3"),
        ({"fsdp": 16}, "data=-1 * fsdp=16"),
        ({"fsdp": -1}, "data=-1 * fsdp=-1"),
        ({"data": 4, "tensor": 4}, "data=4 * tensor=4"),
        ({"data": 1, "fsdp": -2, "tensor": -2}, "fsdp=-2 * tensor=-2"),
    ],
)
def test_mesh_of_devices_that_are_not_there(sizes, named):
    with pytest.raises(UserError, match=rf"config.mesh: {re.escape(named)} does not fit 8 devices"):
        make_mesh(**sizes)


PARAMS = {
    "encoder": {"query": {"kernel": np.zeros((4, 2, 8))}, "norm": {"scale": np.zeros(4)}},
    "head": {"kernel": np.zeros((4, 16))},
}
STATE = new_state(PARAMS, optax.adam(1e-3))


def test_data_parallel_replicates_everything():
    mesh = make_mesh(4)
    shardings = state_shardings(STATE, mesh, [DATA_PARALLEL])
    chex.assert_trees_all_equal_structs(shardings, STATE)
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))


def test_first_matching_rule_decides_for_parameters_and_moments_alike():
    mesh = make_mesh(fsdp=2)
    rules = (
        (".*query/kernel", P("fsdp", None)),
        (".*/kernel", P("fsdp")),
        (".*norm.*", P("fsdp", None)),
    )
    shardings = state_shardings(STATE, mesh, [rules])
    expected = {
        "encoder": {
            "query": {"kernel": P(None, ("fsdp",), None)},  # rules speak of the last dimensions
            "norm": {"scale": P(None)},  # and are silent on arrays that have fewer
        },
        "head": {"kernel": P(None, ("fsdp",))},
    }
    for tree in (shardings.params, shardings.opt_state[0].mu, shardings.opt_state[0].nu):
        assert jax.tree.map(lambda sharding: sharding.spec, tree) == expected
    assert shardings.step.spec == shardings.opt_state[0].count.spec == P()


def test_pattern_must_match_the_whole_path():
    tree = {"up": np.zeros(8), "upper": np.zeros(8)}
    shardings = state_shardings(tree, make_mesh(1, fsdp=2), [(("up", P("fsdp")),)])
    assert [shardings[name].spec for name in ("up", "upper")] == [P(("fsdp",)), P(None)]


def test_tables_hold_together_where_the_sizes_allow():
    mesh = make_mesh(1, fsdp=2, tensor=4)
    rows, columns = ((".*", P("fsdp", None)),), ((".*", P("tensor")), (".*", P("fsdp")))
    tree = {"even": np.zeros((2, 8)), "odd": np.zeros((3, 8)), "vector": np.zeros(6)}
    specs = jax.tree.map(lambda sharding: sharding.spec, state_shardings(tree, mesh, [rows, columns]))
    assert specs == {"even": P(("fsdp",), ("tensor",)), "odd": P(None, ("tensor",)), "vector": P(None)}
    (both,) = jax.tree.leaves(
        state_shardings({"x": np.zeros(16)}, mesh, [((".*", P("fsdp")),), ((".*", P("tensor")),)])
    )
    assert both.spec == P(("fsdp", "tensor"))


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2}, {"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}])
def test_rows_are_dealt_to_devices_in_order(sizes):
    mesh = make_mesh(**sizes)
    count = num_batch_shards(mesh)
    rows = np.arange(16 * 3, dtype=np.int32).reshape(16, 3)
    batch = shard_batch({"source": rows, "target": rows + 100}, mesh)
    assert process_shard(mesh) == (0, 1)
    assert held_batch_shards(mesh) == tuple(range(count))
    assert batch["source"].dtype == np.int32
    for side, offset in (("source", 0), ("target", 100)):
        np.testing.assert_array_equal(batch[side], rows + offset)
        shards = sorted(batch[side].addressable_shards, key=lambda shard: shard.device.id)
        assert [shard.data.shape for shard in shards] == [(16 // count, 3)] * count
        np.testing.assert_array_equal(np.concatenate([shard.data for shard in shards]), rows + offset)


def test_positions_are_divided_and_rows_copied_where_the_mesh_says_so():
    batch = shard_batch({"source": np.arange(24).reshape(4, 6)}, make_mesh(2, sequence=2, tensor=2))["source"]
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(batch, np.arange(24).reshape(4, 6))


def test_arrays_of_more_axes_are_divided_along_their_first_two():
    frames = np.arange(8 * 4 * 3 * 2, dtype=np.float32).reshape(8, 4, 3, 2)
    batch = shard_batch({"frames": frames}, make_mesh(4, sequence=2))["frames"]
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 2, 3, 2)}
    np.testing.assert_array_equal(batch, frames)


PUBLISHED = {
    "transformer": lambda: Transformer(
        TransformerConfig(37_001, d_model=1024, num_heads=16, d_ff=4096), rngs=nnx.Rngs(0)
    ),
    "gpt2": lambda: GPT(GPTConfig.published("gpt2"), rngs=nnx.Rngs(0)),
    "bert": lambda: BertPretraining(BertConfig.published("bert-base-uncased"), rngs=nnx.Rngs(0)),
    "t5": lambda: T5(T5Config.published("t5-v1_1-base"), rngs=nnx.Rngs(0)),
    "vit": lambda: ViT(ViTConfig.published("ViT-B/16"), rngs=nnx.Rngs(0)),
    "relative": lambda: GPT(GPTConfig(9_000, attention=AttentionConfig("relative")), rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fsdp_leaves_no_large_array_of_any_model_on_every_device(name):
    mesh = make_mesh(fsdp=4, tensor=2)
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(PUBLISHED[name])))
    shardings = dict(jax.tree_util.tree_leaves_with_path(state_shardings(params, mesh)))
    large = {path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if leaf.size >= 1 << 16}
    assert len(large) > 3
    whole = [
        path for path, leaf in large.items() if math.prod(shardings[path].shard_shape(leaf.shape)) > leaf.size // 4
    ]
    assert not whole


def test_what_no_table_knows_is_divided_along_its_largest_dimension_that_can_be():
    mesh = make_mesh(fsdp=4)
    tree = {"new": np.zeros((4, 132, 1024)), "odd": np.zeros((257, 259)), "small": np.zeros((8, 8)), "p": {}}
    specs = jax.tree.map(lambda sharding: sharding.spec, state_shardings(tree, mesh))
    assert specs == {"new": P(None, None, "fsdp"), "odd": P(None, None), "small": P(None, None), "p": {}}
    replicated = state_shardings(tree, mesh, [DATA_PARALLEL])
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(replicated))


B, T, V = 16, 8, 24
CONFIG = TransformerConfig(V, num_layers=2, d_model=16, num_heads=4, d_ff=32, dropout_rate=0.1)
LOSS = functools.partial(translation_loss, label_smoothing=0.1)
NUM_STEPS = 30

STRATEGIES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 2, "tensor": 4},
    "fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence": {"data": 2, "sequence": 4},
    "all": {"fsdp": 2, "sequence": 2, "tensor": 2},
}


class Trainer:
    """A compiled step on a mesh, with everything where the tables say."""

    def __init__(self, mesh, config=CONFIG):
        self.mesh = mesh
        optimizer = make_optimizer(OptimizerConfig(warmup_steps=20, peak_learning_rate=0.005), config.d_model)
        training = shard_training(
            mesh,
            lambda: Transformer(config, rngs=nnx.Rngs(params=0)),
            LOSS,
            optimizer,
        )
        self.step_fn, self.first_state, self.abstract_state, _ = training
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    def run(self, batches):
        """The last state, and of every step the mean loss of a token and the norm of the gradient."""
        state, curve, rng = self.first_state(), [], jax.random.key(3)
        for batch in batches:
            state, metrics = self.step_fn(state, shard_batch(batch, self.mesh), rng)
            curve.append((metrics.means["loss"].mean, metrics.numbers["grad_norm"]))
        return state, np.array(jax.device_get(curve))

    def compiled(self):
        rows = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=NamedSharding(self.mesh, BATCH))
        return self.step_fn.lower(self.abstract_state, {"source": rows, "target": rows}, jax.random.key(0)).compile()


@functools.cache
def trainer(strategy):
    return Trainer(make_mesh(**STRATEGIES.get(strategy, {"data": 1})))


@functools.cache
def trained(strategy):
    random = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_STEPS):
        source = random.integers(3, V, (B, T))
        source[np.arange(T) >= random.integers(1, T + 1, (B, 1))] = 0
        batches.append({"source": source.astype(np.int32), "target": np.roll(source, 1, axis=0).astype(np.int32)})
    return trainer(strategy).run(batches)


@pytest.mark.slow  # test_sharding_families.py has a quick one
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_curve_is_that_of_one_device(strategy):
    state, curve = trained(strategy)
    expected_state, expected = trained("one device")
    assert expected[-1, 0] < expected[0, 0] - 0.1
    np.testing.assert_allclose(curve[:, 0], expected[:, 0], rtol=0, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(expected_state.params), atol=1e-3)
    assert trainer(strategy).step_fn._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == trainer(strategy).shardings


def test_parameters_and_their_moments_lie_where_zero_and_megatron_have_them():
    """Columns into heads, hidden units and tokens over "tensor", what is summed behind them over its rows."""
    fsdp, tensor = ("fsdp",), ("tensor",)
    state = trainer("all").abstract_state
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        layer = tree["decoder_layers"]
        attention, feed_forward = layer["cross_attention"], layer["feed_forward"]
        for array, spec in (
            (tree["embedding"]["table"], P(tensor, fsdp)),
            *((attention[name]["kernel"], P(None, fsdp, tensor, None)) for name in ("query", "key", "value")),
            (attention["out"]["kernel"], P(None, tensor, None, fsdp)),
            (feed_forward["up"], P(None, fsdp, tensor)),
            (feed_forward["up_bias"], P(None, tensor)),
            (feed_forward["down"], P(None, tensor, fsdp)),
            (feed_forward["down_bias"], P(None, None)),
        ):
            assert array.sharding.spec == spec


@functools.cache
def exchanged(strategy):
    """The collectives of a compiled step, those between layers apart from those inside."""
    found = collectives(trainer(strategy).compiled().as_text())
    return [c for c in found if "while/body" in c.source], [c for c in found if "while/body" not in c.source]


LAYERS = CONFIG.num_layers


@pytest.mark.slow
def test_data_parallelism_sums_gradients_and_nothing_else():
    inside, outside = exchanged("data")
    assert {c.kind for c in inside + outside} == {"all-reduce"}
    num_params = sum(leaf.size for leaf in jax.tree.leaves(trainer("data").abstract_state.params))
    summed = sum(c.count * c.num_bytes for c in inside + outside) // 4
    # The embedding's gradient is summed three times, once for each of its uses.
    assert num_params < summed < num_params + 2 * V * CONFIG.d_model + 100


@pytest.mark.slow
def test_fsdp_gathers_no_more_than_a_layer():
    inside, outside = exchanged("fsdp")
    gathers = [c for c in inside if c.kind == "all-gather"]
    # Six matrices in a layer of the encoder, ten in one of the decoder; once forward and once backward.
    assert sum(c.count for c in gathers) == 2 * LAYERS * (6 + 10)
    largest = 4 * CONFIG.d_model * CONFIG.d_ff
    assert max(c.num_bytes for c in inside + outside if c.kind == "all-gather") <= largest
    assert {c.kind for c in inside + outside} == {"all-gather", "all-reduce"}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.device_get(trained("one device")[0].params)))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trained("fsdp")[0].params))
    assert held < whole / 4  # an eighth of the matrices, and all of the vectors


@pytest.mark.slow
def test_tensor_parallelism_sums_once_behind_each_sublayer_and_divides_the_vocabulary():
    inside, _ = exchanged("tensor")
    sums = [c for c in inside if len(c.devices) == 4]
    assert {c.kind for c in sums} == {"all-reduce"}
    # Attention and feed-forward in the encoder, one more attention in the decoder; forward and backward.
    assert sum(c.count for c in sums) == 2 * LAYERS * (2 + 3)
    program = trainer("tensor").compiled().as_text()
    assert f"f32[{B // 2},{T},{V // 4}]" in program  # the logits of this device's rows
    assert f"f32[{B // 2},{T},{V}]" not in program
    table = trainer("tensor").shardings.params["embedding"]["table"]
    assert table.shard_shape((V, CONFIG.d_model)) == (V // 4, CONFIG.d_model)


@pytest.mark.slow
def test_sequence_parallelism_passes_keys_and_values_around():
    inside, outside = exchanged("sequence")
    assert {c.kind for c in inside} == {"collective-permute", "all-reduce"}
    assert all(len(c.devices) == 4 for c in inside if c.kind == "collective-permute")
    gathered = [c for c in outside if c.kind in ("all-gather", "all-to-all")]
    assert max(c.num_bytes for c in gathered) == B // 2 * T * 4  # source ids, whose padding is moved behind them


class Mixture(nnx.Module):
    """Predicts each target from the source token at its place, by a mixture of experts."""

    def __init__(self):
        rngs = nnx.Rngs(params=0)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (V, 16)))
        self.mixture = MixtureOfExperts(16, 32, 8, num_groups=8, rngs=rngs)


def mixture_loss(model, batch, rngs):
    mask = batch["target"] != 0
    y = model.mixture(model.table[...][batch["source"]], token_mask=mask, rngs=rngs)
    nll = optax.softmax_cross_entropy_with_integer_labels(y @ model.table[...].T, batch["target"])
    tokens = mask.sum().astype(jnp.float32)
    return LossOutput((nll * mask).sum(), tokens, {}, num_tokens=tokens)


def test_expert_parallelism_equals_one_device():
    """Eight experts, one on each device; the rows are divided as well, and each device routes its own."""
    random = np.random.default_rng(1)
    rows = random.integers(1, V, (3, B, T)).astype(np.int32)

    def run(mesh):
        setup = shard_training(mesh, Mixture, mixture_loss, optax.adam(0.01))
        batches = [
            shard_batch({"source": source, "target": np.where(source < 5, 0, source - 1)}, mesh) for source in rows
        ]
        program = setup.step_fn.lower(setup.abstract_state, batches[0], jax.random.key(0)).compile()
        state, losses = setup.first_state(), []
        for batch in batches:
            state, metrics = program(state, batch, jax.random.key(0))
            losses.append([float(metrics.means[name].mean) for name in ("loss", "load_balancing", "dropped_tokens")])
        return state, losses, program

    state, losses, program = run(make_mesh(expert=8))
    expected_state, expected, _ = run(make_mesh(1))
    assert 0.05 < losses[0][2] < 0.5  # places are short
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(expected_state.params), atol=1e-5)
    for moment in state.opt_state[0].mu["mixture"]["experts"].values():
        assert {shard.data.shape[0] for shard in moment.addressable_shards} == {1}
    # Tokens travel to their experts and back, and so do their gradients; no device meets what others hold.
    exchanged = collections.Counter()
    for found in collectives(program.as_text()):
        exchanged[found.kind] += found.count
    assert exchanged.keys() == {"all-to-all", "all-reduce"}
    assert exchanged["all-to-all"] == 4
