"""The training step: the same on any number of devices, in either style of parallelism, however tokens are spread."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.training.tiny import BagOfWords
from tfx_jax.errors import UserError
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.tasks.loss import LossOutput, Metric
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding.strategies import DATA_PARALLEL, make_mesh, shard_batch, state_shardings
from tfx_jax.training.step import init_state, jit_update, update

B, S, T, V = 16, 5, 7, 11
NUM_STEPS = 4
LOSS = functools.partial(translation_loss, label_smoothing=0.1)
R_DROP = functools.partial(LOSS, r_drop=5.0)
ADAM = make_optimizer(OptimizerConfig(warmup_steps=2, peak_learning_rate=0.01), d_model=8)
SGD = optax.sgd(1.0)  # moves the parameters by their gradient
RNG = jax.random.key(7)


def mean_loss(metrics):
    return float(metrics.means["loss"].mean)


def make_transformer(dropout_rate=0.0, seed=0, **changes):
    config = TransformerConfig(V, num_layers=1, d_model=8, num_heads=2, d_ff=12, dropout_rate=dropout_rate, **changes)
    return Transformer(config, rngs=nnx.Rngs(params=seed))


def make_bag_of_words(dropout_rate=0.0, seed=0):
    return BagOfWords(TransformerConfig(V, dropout_rate=dropout_rate), rngs=nnx.Rngs(params=seed))


def make_batch(seed, lengths):
    """One row for each of the target `lengths`, the sources of other lengths; 0 makes a row of padding."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    batch = {"source": rng.integers(3, V, (len(lengths), S)), "target": rng.integers(3, V, (len(lengths), T))}
    for side, size in (("source", S), ("target", T)):
        kept = np.minimum(lengths, size)
        batch[side][np.arange(size) >= kept[:, None]] = 0
    return {side: tokens.astype(np.int32) for side, tokens in batch.items()}


# From shard to shard very different numbers of tokens; with eight devices, two of them have none at all.
UNEVEN = [make_batch(seed, np.roll([7, 7, 7, 6, 5, 1, 0, 0, 3, 2, 7, 4, 0, 0, 1, 1], 2 * seed)) for seed in range(4)]


class Trainer:
    """A compiled step on a mesh, and as many copies of the first state as one likes."""

    def __init__(self, make_model, num_devices=1, optimizer=ADAM, *, loss_fn=LOSS, **options):
        self.mesh = make_mesh(num_devices)
        graphdef, first_state = init_state(make_model, optimizer)
        self.first = jax.device_get(jax.jit(first_state)())
        self.shardings = state_shardings(self.first, self.mesh, [DATA_PARALLEL])
        self.step_fn = jit_update(graphdef, loss_fn, optimizer, self.shardings, **options)

    def put(self, state):
        return jax.device_put(state, self.shardings)

    def run(self, state, batches):
        """The state after a step on each batch, and the metrics of each."""
        history = []
        for batch in batches:
            state, metrics = self.step_fn(state, shard_batch(batch, self.mesh), RNG)
            history.append(jax.device_get(metrics))
        return state, history


@functools.cache
def trained(make_model, num_devices, dropout_rate, **options):
    """A model after a few steps: the state, the metrics of each step, and what trained it."""
    trainer = Trainer(functools.partial(make_model, dropout_rate), num_devices, **options)
    return *trainer.run(trainer.put(trainer.first), UNEVEN), trainer


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("make_model", "dropout_rate", "loss_fn"),
    [
        slow(make_transformer, 0.3, LOSS),
        slow(make_transformer, 0.3, R_DROP),
        (make_bag_of_words, 0.3, LOSS),
        (make_bag_of_words, 0.3, R_DROP),
        (make_bag_of_words, 0.0, LOSS),
    ],
)
def test_eight_devices_equal_one(make_model, dropout_rate, loss_fn):
    """Measured in float32: losses to 2.4e-7 relative, parameters to 1.5e-7 where the steps moved them by up to 0.03."""
    state, history, _ = trained(make_model, 8, dropout_rate, loss_fn=loss_fn)
    expected_state, expected_history, _ = trained(make_model, 1, dropout_rate, loss_fn=loss_fn)
    assert (len(state.step.devices()), len(expected_state.step.devices())) == (8, 1)
    chex.assert_trees_all_close(history, expected_history, rtol=1e-6)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(expected_state.params), rtol=1e-6, atol=1e-6
    )
    assert int(state.step) == int(expected_state.step) == NUM_STEPS


def test_dropout_is_on_when_it_is_asked_for():
    with_dropout, without = trained(make_bag_of_words, 8, 0.3)[1], trained(make_bag_of_words, 8, 0.0)[1]
    assert abs(mean_loss(with_dropout[0]) / mean_loss(without[0]) - 1) > 1e-3


def forgets_rngs(model, batch, rngs):
    del rngs
    return LOSS(model, batch, None)


def take_step(make_model, loss_fn):
    """Traces one step."""
    graphdef, first_state = init_state(make_model, SGD)
    step = functools.partial(update, graphdef, loss_fn, SGD)
    return jax.eval_shape(step, jax.eval_shape(first_state), make_batch(0, [3, 4]), RNG)


class WithFlaxDropout(BagOfWords):
    """Its dropout is a layer of Flax."""

    def __init__(self, rate, **options):
        super().__init__(TransformerConfig(V, dropout_rate=0.0), rngs=nnx.Rngs(params=0))
        self.dropout = nnx.Dropout(rate, **options)

    def __call__(self, source, target, *, rngs=None):
        logits = super().__call__(source, target)
        return logits if rngs is None else self.dropout(logits, rngs=rngs)


@pytest.mark.parametrize(
    ("make_model", "named"),
    [
        (functools.partial(make_bag_of_words, 0.3), "BagOfWords has dropout_rate=0.3"),
        (functools.partial(make_transformer, 0.1), "Transformer has dropout_rate=0.1"),
        (functools.partial(make_transformer, activation_dropout_rate=0.2), "has activation_dropout_rate=0.2"),
        (functools.partial(WithFlaxDropout, 0.4), "Dropout has dropout_rate=0.4"),
    ],
)
def test_a_loss_that_forgets_rngs_is_rejected(make_model, named):
    with pytest.raises(
        UserError, match=f"{named}, but the loss sampled nothing from the stream `dropout`: pass its `rngs`"
    ):
        take_step(make_model, forgets_rngs)
    take_step(make_model, LOSS)


@pytest.mark.parametrize(
    "make_model", [make_bag_of_words, make_transformer, functools.partial(WithFlaxDropout, 0.4, deterministic=True)]
)
def test_a_loss_needs_no_rngs_without_dropout(make_model):
    take_step(make_model, forgets_rngs)


def test_step_compiles_once_and_keeps_the_shardings():
    """Were the outputs sharded otherwise than the inputs, the second step would compile again."""
    state, _, trainer = trained(make_bag_of_words, 8, 0.3)
    assert trainer.step_fn._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == trainer.shardings


@pytest.fixture(scope="module")
def bag():
    return trained(make_bag_of_words, 1, 0.3)[2]


def test_each_shape_compiles_once(bag):
    short, long = make_batch(0, [3, 4]), make_batch(1, [3, 4, 5])
    before = bag.step_fn._cache_size()
    bag.run(bag.put(bag.first), [short, long, short, long])
    assert bag.step_fn._cache_size() == before + 2


def test_state_is_donated(bag):
    state = bag.put(bag.first)
    bag.run(state, UNEVEN[:1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_resumed_run_draws_the_masks_it_would_have_drawn(bag):
    """From a copy of the state in the middle, with the same key: the same bits at the end."""
    state, _ = bag.run(bag.put(bag.first), UNEVEN[:2])
    middle = jax.tree.map(lambda leaf: np.array(leaf), state)
    expected, expected_history = bag.run(state, UNEVEN[2:])
    resumed, history = bag.run(bag.put(middle), UNEVEN[2:])
    chex.assert_trees_all_equal((resumed, history), (expected, expected_history))


def test_steps_draw_different_masks(bag):
    """The same parameters and batch at another step: another loss."""
    later = bag.first._replace(step=bag.first.step + 1)
    losses = [mean_loss(bag.run(bag.put(state), UNEVEN[:1])[1][0]) for state in (bag.first, later)]
    assert abs(losses[0] / losses[1] - 1) > 1e-3


def replicate(tree):
    return jax.tree.map(lambda leaf: np.stack([leaf] * 8), tree)


EIGHT_KEYS = jax.random.wrap_key_data(replicate(jax.random.key_data(RNG)))


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        slow(make_transformer, {}),
        (make_bag_of_words, {"accumulate": 2, "skip_bad_steps": True, "spike_factor": 9.0}),
    ],
)
def test_pmap_equals_jit(make_model, options):
    """The classic style: every device holds a replica of the state and gets its rows of the batch."""
    expected_state, expected_history, trainer = trained(make_model, 8, 0.0)
    graphdef = nnx.graphdef(nnx.eval_shape(make_model))
    step_fn = jax.pmap(functools.partial(update, graphdef, LOSS, ADAM, axis_name="data", **options), axis_name="data")
    state = replicate(trainer.first)
    history = []
    for batch in UNEVEN:
        shards = {side: rows.reshape(8, B // 8, -1) for side, rows in batch.items()}
        state, metrics = step_fn(state, shards, EIGHT_KEYS)
        history.append(jax.device_get(metrics))
    state = jax.device_get(state)
    for replica in range(8):
        mine = jax.tree.map(lambda leaf, replica=replica: leaf[replica], (state.params, history[-1]))
        numbers = expected_history[-1].numbers | ({"bad": 0.0, "bad_in_a_row": 0.0} if options else {})
        expected = jax.device_get((expected_state.params, expected_history[-1]._replace(numbers=numbers)))
        chex.assert_trees_all_close(mine, expected, rtol=1e-6, atol=1e-6)
    # The replicas stay equal to the last bit, or they would drift apart.
    first = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), state)
    chex.assert_trees_all_equal(state, first)


class Draws(nnx.Module):
    """Whose loss is a random number, the same for a whole batch."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))

    @staticmethod
    def loss(model, batch, rngs):
        value = jax.random.uniform(rngs.dropout())
        one = jnp.ones(())
        return LossOutput(model.weight[...] * value, one, {"square": Metric(value**2, one)}, num_tokens=one)


def test_pmap_draws_a_mask_of_its_own_on_each_device():
    graphdef, first_state = init_state(Draws, optax.sgd(0.1))
    step_fn = jax.pmap(
        functools.partial(update, graphdef, Draws.loss, optax.sgd(0.1), axis_name="data"), axis_name="data"
    )
    _, metrics = step_fn(replicate(first_state()), {"rows": np.zeros((8, 2))}, EIGHT_KEYS)
    first = jax.tree.map(lambda leaf: leaf[0], metrics.means)
    assert first["square"].mean - first["loss"].mean ** 2 > 0.01


@pytest.fixture(scope="module")
def sgd():
    """gradient(batch) -> (gradient, metrics) of the first parameters, read off a step of plain gradient descent."""
    trainer = Trainer(make_bag_of_words, optimizer=SGD)

    def gradient(batch):
        after, (metrics,) = trainer.run(trainer.put(trainer.first), [batch])
        before = jax.tree.map(np.float64, trainer.first.params)
        return jax.tree.map(np.subtract, before, jax.device_get(after.params)), metrics

    return gradient


def masked(batch, keep):
    return {side: np.where(keep[:, None], rows, 0) for side, rows in batch.items()}


def test_every_token_weighs_the_same(sgd):
    """The gradient of a batch is the token-weighted mean over any two parts of it, however uneven."""
    batch = UNEVEN[0]
    whole, metrics = sgd(batch)
    assert metrics.numbers["tokens"] == metrics.means["loss"].weight == np.count_nonzero(batch["target"]) == 51
    in_first = np.arange(B) < 3
    (first, first_metrics), (second, second_metrics) = sgd(masked(batch, in_first)), sgd(masked(batch, ~in_first))
    assert (first_metrics.means["nll"].weight, second_metrics.means["nll"].weight) == (21, 30)
    expected = jax.tree.map(lambda one, other: (21 * one + 30 * other) / 51, first, second)
    chex.assert_trees_all_close(whole, expected, atol=3e-7)
    added = jax.tree.map(np.add, first_metrics.means, second_metrics.means)
    chex.assert_trees_all_close(metrics.means, added, rtol=1e-6)


def test_rows_of_padding_change_nothing(sgd):
    batch = make_batch(5, [7, 0, 4, 2])
    padded = {side: np.concatenate([rows, np.zeros((B - 4, rows.shape[1]), np.int32)]) for side, rows in batch.items()}
    expected, expected_metrics = sgd(batch)
    gradient, metrics = sgd(padded)
    chex.assert_trees_all_close(gradient, expected, atol=3e-7)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-6)


def test_batch_of_padding_alone_changes_nothing(sgd):
    gradient, metrics = sgd(make_batch(0, [0] * B))
    chex.assert_trees_all_equal(gradient, jax.tree.map(np.zeros_like, gradient))
    assert not any(jax.tree.leaves(metrics))


def test_batch_of_padding_alone_leaves_adam_to_its_own_decay():
    """A gradient of exactly zero: the moments shrink by b1 and b2, and the parameters follow the old momentum."""
    trainer = trained(make_bag_of_words, 1, 0.0)[2]
    state, _ = trainer.run(trainer.put(trainer.first), UNEVEN[:1])
    before = jax.tree.map(lambda leaf: np.array(leaf), state)
    state, (metrics,) = trainer.run(state, [make_batch(0, [0] * B)])
    assert not any(jax.tree.leaves(metrics))
    old, new = before.opt_state[0], state.opt_state[0]
    chex.assert_trees_all_close(new.mu, jax.tree.map(lambda leaf: 0.9 * leaf, old.mu), rtol=1e-6)
    chex.assert_trees_all_close(new.nu, jax.tree.map(lambda leaf: 0.98 * leaf, old.nu), rtol=1e-6)
    expected = jax.tree.map(
        lambda weight, mu, nu: weight - 0.01 * (0.9 * mu / (1 - 0.9**2)) / (np.sqrt(0.98 * nu / (1 - 0.98**2)) + 1e-9),
        before.params,
        old.mu,
        old.nu,
    )
    chex.assert_trees_all_close(state.params, expected, atol=1e-6)


def test_first_state_is_the_drawn_model():
    graphdef, first_state = init_state(functools.partial(make_bag_of_words, seed=3), ADAM)
    state = jax.jit(first_state)()
    expected = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make_bag_of_words(seed=3))))()
    chex.assert_trees_all_equal(state.params, expected)
    assert state.step == 0
    assert state.step.dtype == jnp.int32
    chex.assert_trees_all_equal(state.opt_state[0].mu, jax.tree.map(np.zeros_like, expected))
    assert not jax.tree.leaves(graphdef)  # the definition holds no array


def test_metrics_are_sums_with_the_norm_of_the_gradient(sgd):
    gradient, metrics = sgd(UNEVEN[1])
    assert metrics.means.keys() == {"loss", "nll", "accuracy"}
    assert metrics.numbers.keys() == {"tokens", "grad_norm"}
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics.numbers["grad_norm"], norm, rtol=1e-5)
    assert mean_loss(metrics) > np.log(V) * 0.5


@pytest.mark.parametrize(
    ("make_model", "num_devices", "accumulate"),
    [
        slow(make_bag_of_words, 1, 4),
        (make_bag_of_words, 1, 16),
        (make_bag_of_words, 8, 2),
        slow(make_transformer, 8, 2),
    ],
)
def test_accumulated_step_equals_that_of_the_whole_batch(make_model, num_devices, accumulate):
    """However unevenly tokens are spread: of sixteen parts, some have none at all."""
    state, history, _ = trained(make_model, num_devices, 0.0, accumulate=accumulate)
    expected_state, expected_history, _ = trained(make_model, 8, 0.0)
    chex.assert_trees_all_close(history, expected_history, rtol=1e-6)
    expected = jax.device_get(expected_state.params)
    chex.assert_trees_all_close(jax.device_get(state.params), expected, rtol=1e-6, atol=1e-6)


def collectives(trainer, batch):
    """The kinds of communication in the compiled step."""
    arguments = trainer.put(trainer.first), shard_batch(batch, trainer.mesh), RNG
    text = trainer.step_fn.lower(*arguments).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {kind for kind in kinds if f" {kind}(" in text or f" {kind}-start(" in text}


def test_parts_of_a_batch_stay_on_their_devices():
    """Nothing but sums is exchanged: a part takes of each device rows that are there already."""
    assert collectives(trained(make_bag_of_words, 8, 0.0, accumulate=2)[2], UNEVEN[0]) == {"all-reduce"}


def test_parts_draw_different_masks():
    trainer = Trainer(Draws, optimizer=optax.sgd(0.1), loss_fn=Draws.loss, accumulate=8)
    _, (metrics,) = trainer.run(trainer.put(trainer.first), [{"rows": np.zeros((8, 2))}])
    assert metrics.numbers["tokens"] == 8
    assert metrics.means["square"].mean - mean_loss(metrics) ** 2 > 0.01


def test_accumulation_saves_memory():
    batch = {side: jax.ShapeDtypeStruct((1024, size), jnp.int32) for side, size in (("source", S), ("target", T))}

    def temporary(accumulate):
        trainer = Trainer(make_bag_of_words, accumulate=accumulate)
        return trainer.step_fn.lower(trainer.first, batch, RNG).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < temporary(1) / 5


def test_rows_that_cannot_be_split():
    trainer = Trainer(make_bag_of_words, accumulate=3)
    with pytest.raises(ValueError, match="accumulate=3 does not divide the 16 examples of the batch"):
        trainer.run(trainer.put(trainer.first), UNEVEN[:1])


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialized_layers_change_nothing(remat):
    """Neither gradients nor the masks of dropout, which are drawn again in the backward pass."""
    model = functools.partial(make_transformer, remat=remat)
    trainer = Trainer(functools.partial(model, 0.3))
    state, history = trainer.run(trainer.put(trainer.first), UNEVEN)
    expected_state, expected_history, _ = trained(make_transformer, 1, 0.3)
    chex.assert_trees_all_close(history, expected_history, rtol=1e-6)
    expected = jax.device_get(expected_state.params)
    chex.assert_trees_all_close(jax.device_get(state.params), expected, rtol=1e-6, atol=1e-6)


def test_bfloat16_computes_on_float32_masters():
    """Parameters, moments, logits, sums and gradients are float32; only what lies between is not."""
    make_model = functools.partial(make_transformer, dtype="bfloat16")
    graphdef, first_state = init_state(make_model, ADAM)
    state, batch = jax.eval_shape(first_state), UNEVEN[0]
    seen = {}

    def watched(model, batch, rngs):
        seen["logits"] = model(batch["source"], batch["target"], rngs=rngs).dtype
        return LOSS(model, batch, rngs)

    def watched_update(grads, opt_state, params=None):
        seen["gradient"] = {leaf.dtype for leaf in jax.tree.leaves(grads)}
        return ADAM.update(grads, opt_state, params)

    optimizer = optax.GradientTransformation(ADAM.init, watched_update)
    program = jax.make_jaxpr(functools.partial(update, graphdef, watched, optimizer), return_shape=True)
    text, (after, metrics) = program(state, batch, RNG)
    assert seen == {"logits": jnp.float32, "gradient": {jnp.dtype("float32")}}
    moments, counts = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim], after.opt_state[0].count
    assert {leaf.dtype for leaf in [*jax.tree.leaves((after.params, metrics)), *moments]} == {jnp.dtype("float32")}
    assert counts.dtype == jnp.int32
    assert "bf16" in str(text)


@pytest.mark.compiles(16, "first states and steps of two dtypes")
@pytest.mark.slow
def test_bfloat16_does_not_lose_small_steps():
    """Updates of a thousandth of a weight, too small for bfloat16, add up in the masters."""
    sgd = optax.sgd(1e-3)
    trainer = Trainer(functools.partial(make_transformer, dtype="bfloat16"), optimizer=sgd)
    state, history = trainer.run(trainer.put(trainer.first), UNEVEN[:1] * 3)
    exact = Trainer(make_transformer, optimizer=sgd)
    expected, expected_history = exact.run(exact.put(exact.first), UNEVEN[:1] * 3)
    moved, should = (
        jnp.concatenate(
            [leaf.ravel() for leaf in jax.tree.leaves(jax.tree.map(np.subtract, after, trainer.first.params))]
        )
        for after in jax.device_get((state.params, expected.params))
    )
    assert moved @ should / np.sqrt(moved @ moved * (should @ should)) > 0.999
    np.testing.assert_allclose(mean_loss(history[-1]), mean_loss(expected_history[-1]), rtol=0.01)


def spoilt_loss(model, batch, rngs):
    """The loss times a factor that comes with the batch."""
    output = LOSS(model, {side: batch[side] for side in ("source", "target")}, rngs)
    return output._replace(loss=output.loss * batch["factor"].max())


def spoilt(batch, factor):
    return batch | {"factor": np.full(B, factor, np.float32)}


@functools.cache
def guarded(spike_factor):
    model = functools.partial(make_bag_of_words, 0.0)
    return Trainer(model, 8, loss_fn=spoilt_loss, skip_bad_steps=True, spike_factor=spike_factor, accumulate=2)


@pytest.mark.parametrize("factor", [np.nan, np.inf, 1e36, 20.0])
def test_bad_step_changes_nothing_but_its_number(factor):
    """A loss that is not finite, a gradient whose norm is not (1e36), a spike."""
    trainer = guarded(3.0)
    state, _ = trainer.run(trainer.put(trainer.first), [spoilt(UNEVEN[0], 1.0)])
    before = jax.tree.map(np.array, state)
    after, (metrics,) = trainer.run(state, [spoilt(UNEVEN[1], factor)])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))  # skipping costs no copy of the state
    numbers = metrics.numbers
    assert (numbers["bad"], numbers["bad_in_a_row"]) == (1, 1)
    assert np.isfinite(mean_loss(metrics)) == (factor in (1e36, 20.0))
    assert np.isfinite(numbers["grad_norm"]) == (factor == 20.0)
    expected = before._replace(step=before.step + 1, skip_state=before.skip_state._replace(in_a_row=np.int32(1)))
    chex.assert_trees_all_equal(jax.device_get(after), expected)


def test_training_goes_on_as_if_bad_steps_had_not_been():
    trainer = guarded(3.0)
    good = [spoilt(batch, 1.0) for batch in UNEVEN]
    bad = [spoilt(UNEVEN[0], factor) for factor in (np.nan, 20.0)]
    state, history = trainer.run(trainer.put(trainer.first), [bad[0], *good[:2], *bad, good[2], bad[1], good[3]])
    expected, expected_history = trainer.run(trainer.put(trainer.first), good)
    chex.assert_trees_all_equal(state._replace(step=expected.step), expected)
    assert [int(metrics.numbers["bad_in_a_row"]) for metrics in history] == [1, 0, 0, 1, 2, 0, 1, 0]
    assert [int(metrics.numbers["bad"]) for metrics in history] == [1, 0, 0, 1, 1, 0, 1, 0]
    assert int(state.step) == 8
    losses = [mean_loss(metrics) for metrics in expected_history]
    mean = functools.reduce(lambda mean, loss: 0.99 * mean + 0.01 * loss, losses)
    np.testing.assert_allclose(state.skip_state.mean_loss, mean, rtol=1e-6)
    unguarded, _, _ = trained(make_bag_of_words, 8, 0.0)
    chex.assert_trees_all_close(state.params, unguarded.params, rtol=1e-6, atol=1e-6)


def test_spikes_are_taken_unless_asked_otherwise():
    _, history = guarded(0.0).run(
        guarded(0.0).put(guarded(0.0).first), [spoilt(UNEVEN[0], factor) for factor in (1.0, 20.0, np.nan)]
    )
    assert [int(metrics.numbers["bad"]) for metrics in history] == [0, 0, 1]


def test_batch_of_padding_leaves_the_running_mean():
    trainer = guarded(3.0)
    state, _ = trainer.run(trainer.put(trainer.first), [spoilt(UNEVEN[0], 1.0)])
    mean = np.array(state.skip_state.mean_loss)
    state, (metrics,) = trainer.run(state, [spoilt(make_batch(0, [0] * B), 1.0)])
    assert metrics.numbers["bad"] == 0
    assert state.skip_state.mean_loss == mean > 0
