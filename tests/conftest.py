"""Eight CPU devices, and no silent broadcasting or dtype promotion in our own code."""

import atexit
import os
import pathlib
import shutil
import tempfile

# Tests compile for longer than they run: LLVM's expensive passes are left out, XLA's own rewriting is not. Trainings in
# processes of their own inherit that, so that they give the same bits. JAX_DISABLE_MOST_OPTIMIZATIONS=0 optimises all.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# What is compiled once serves all tests of a worker, and the programs that they start. Workers do not share a folder:
# JAX does not write its files atomically. A folder that JAX_COMPILATION_CACHE_DIR names serves the next run too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="tfx_jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{worker}"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


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
