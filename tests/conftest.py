"""Eight CPU devices, and no silent broadcasting or dtype promotion in our own code."""

import functools
import gc
import os
import pathlib

from tests import tiers
from tests.compilation import CompileBudget, SharedCache, compile_quickly, kept_folder

compile_quickly(os.environ)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where libtpu is installed, only tests that ask for it load it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for a model

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.generation import decoding
from tfx_jax.planning import topologies

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser):
    """Adds what CI runs a share of the tests with; `make test-all` runs all."""
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run about one case in N of large tests")
    parser.addoption("--whole", type=int, default=6, metavar="K", help="the most cases of a test that is not large (6)")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    """Keeps the share of `--one-in`."""
    number, whole = config.getoption("one_in"), config.getoption("whole")
    stays = tiers.one_in(number, [item.nodeid for item in items], whole=whole)
    config.hook.pytest_deselected(items=[item for item, stay in zip(items, stays, strict=True) if not stay])
    items[:] = [item for item, stay in zip(items, stays, strict=True) if stay]


def pytest_configure(config):
    """Counts programs, and keeps them; the process that only hands tests to workers compiles none."""
    if config.getoption("one_in") == 1:  # else crumbs are counted that left-out cases would have compiled
        config.pluginmanager.register(CompileBudget())
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = SharedCache(kept_folder())
        config.pluginmanager.register(cache)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.folder)
        jax.config.update("jax_compilation_cache_dir", str(cache.folder))


gc.set_threshold(20_000, 20, 20)


def pytest_runtest_teardown(item, nextitem):
    """Searches no garbage in what earlier files of tests left: traced programs stay, and each save of Orbax searches.

    That was a third of the time.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.freeze()


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


@pytest.fixture
def traced_searches(monkeypatch):
    """The shapes [B, S] of what `decode` was traced for, in order; programs of earlier tests are forgotten."""
    shapes = []

    def traced(decoder, inputs, *arguments, **options):
        shapes.append(inputs.shape)
        return original(decoder, inputs, *arguments, **options)

    original = decoding.decode
    monkeypatch.setattr(decoding, "decode", traced)
    decoding._program.cache_clear()
    yield shapes
    decoding._program.cache_clear()


@pytest.fixture(scope="session")
def tpu_devices():
    """`tpu_devices("v5e:4x4", 2)`: devices of TPU slices that are not there; where libtpu is absent, the test skips."""
    pytest.importorskip(
        "libtpu", reason='no libtpu, which describes and compiles for TPU slices: pip install "jax[tpu]"'
    )
    return functools.cache(topologies.tpu_devices)


@pytest.fixture(scope="session")
def gpu_devices():
    """`gpu_devices("h100:1x2x8")`: devices of nodes that are not there; without JAX for CUDA, the test is skipped."""
    if not topologies.has_cuda():
        pytest.skip('no JAX for CUDA, which compiles for GPUs: pip install "jax[cuda13]", some 4 GB')
    return functools.cache(topologies.gpu_devices)


def _draw(make_model):
    graphdef, params = nnx.split(nnx.eval_shape(make_model))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return jax.device_put(rng.normal(mean, 0.4, leaf.shape).astype(leaf.dtype))  # jnp.asarray compiles programs

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params)))


@pytest.fixture(scope="session")
def draw_model():
    """`draw_model(make)`: what `make()` builds, but no parameter is what it starts as; the same each time."""
    return _draw
