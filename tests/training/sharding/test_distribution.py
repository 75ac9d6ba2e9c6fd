"""What a mesh makes of attention: one function for several meshes, and the backward pass of a reversible model."""

import functools

import jax
import numpy as np
import optax
from flax import nnx

from tests.nn.programs import draw, normal
from tfx_jax.models import Reformer, ReformerConfig, reformer
from tfx_jax.nn import Distribution, MultiHeadAttention, distributed
from tfx_jax.tasks import language_model_loss
from tfx_jax.training.sharding.layers import make_distribution
from tfx_jax.training.sharding.strategies import make_mesh
from tfx_jax.training.step import init_state, update

B, T, D, N = 8, 4, 8, 2


def test_each_mesh_has_a_program_of_its_own_and_equal_meshes_share_one():
    layer, x, traces = draw(lambda: MultiHeadAttention(D, N, rngs=nnx.Rngs(0))), normal(1, B, T, D), []

    @jax.jit
    def read(layer, x):
        traces.append(x.shape)
        return layer(x)

    def constraints():
        """Over which meshes the program divides queries, keys, values and outputs."""
        found = [eqn for eqn in read.trace(layer, x).jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
        return [dict(eqn.params["sharding"].mesh.shape) for eqn in found]

    sizes = {"fsdp": 2, "tensor": 2}, {"data": 8}
    expected = np.asarray(read(layer, x))
    assert constraints() == []
    for _ in range(2):
        for size in sizes:
            with distributed(make_distribution(make_mesh(**{"data": 2} | size))):
                np.testing.assert_allclose(read(layer, x), expected, atol=1e-6)
                axes = {"data": 2, "fsdp": 1, "expert": 1, "sequence": 1, "tensor": 1} | size
                assert constraints() == [axes] * 4
        assert constraints() == []
    assert len(traces) == 3


def test_the_backward_pass_of_a_reversible_model_attends_on_the_mesh_too(monkeypatch):
    """It computes attention again, when the loss has returned already."""
    calls = []

    def noted(name, function):
        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(reformer, "lsh_attention", noted("lsh", reformer.lsh_attention))
    attend = noted("attend", lambda attention_fn, *args, **options: attention_fn(*args, **options))
    sizes = {"num_layers": 2, "d_model": D, "num_heads": N, "d_ff": 8, "num_buckets": 2, "chunk_size": 2}
    config, optimizer = ReformerConfig(16, max_length=T, **sizes), optax.sgd(0.1)
    graphdef, first_state = init_state(lambda: Reformer(config, rngs=nnx.Rngs(params=0)), optimizer)
    tokens = jax.ShapeDtypeStruct((B, T), np.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((B, T), np.float32)}

    def forward(state, batch, rng):
        return language_model_loss(nnx.merge(graphdef, state.variables), batch, nnx.Rngs(dropout=rng)).loss

    step = functools.partial(update, graphdef, language_model_loss, optimizer, distribution=Distribution(attend=attend))
    arguments = jax.eval_shape(lambda: (first_state(), jax.random.key(0)))
    arguments = arguments[0], batch, arguments[1]
    jax.eval_shape(forward, *arguments)
    calls_forward = calls.count("lsh")
    assert "attend" not in calls
    calls.clear()
    jax.eval_shape(step, *arguments)
    assert calls == ["attend", "lsh"] * calls.count("lsh")
    assert calls.count("lsh") > calls_forward > 0
