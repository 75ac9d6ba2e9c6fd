"""Eight CPU devices, and no silent broadcasting or dtype promotion in our own code."""

import os
import pathlib

# Programs keep compiled code in one folder of the user's, which tests that run side by side must not share.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests of small functions compile for longer than they run. LLVM's expensive passes are left out there, XLA's own
# rewriting is not; trainings are tested as users run them. JAX_DISABLE_MOST_OPTIMIZATIONS=0 optimises all.
QUICKLY_COMPILED = (
    {"functional", "nn", "models", "tasks"} if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ else set()
)

SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _quick_compilation(request):
    jax.config.update("jax_disable_most_optimizations", bool(QUICKLY_COMPILED & set(request.path.parts)))


@pytest.fixture(autouse=True)
def _strict_dtypes(request):
    """Strict promotion where arrays are ours; optax relies on promotion, so training may promote."""
    strict = {"functional", "nn", "models"} & set(request.path.parts)
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real text sets; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no real text sets at {SHARED_DATA.name}: they are not distributed with the code")
    return SHARED_DATA


def _draw(make_model):
    graphdef, params = nnx.split(nnx.eval_shape(make_model))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return jnp.asarray(rng.normal(mean, 0.4, leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params)))


@pytest.fixture(scope="session")
def draw_model():
    """`draw_model(make)`: what `make()` builds, but no parameter is what it starts as; the same each time."""
    return _draw
