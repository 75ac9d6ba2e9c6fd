"""Any values in any fields of any training: it can be traced, or one line says what is wrong.

A few are drawn each time the tests run; `TFX_JAX_CONFIGURATIONS=2000 pytest tests/training/test_any_config.py` draws
more, other ones each time.
"""

import dataclasses
import os
import typing

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.configs import TRAININGS, default_config, title
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import SPECS
from tfx_jax.planning.plan import plan_step
from tfx_jax.training.config import flat, tiny_variant

MORE = int(os.environ.get("TFX_JAX_CONFIGURATIONS", "0"))
WORDS = ["", "x", "gelu", "relu", "words", "bpe", "characters", "bfloat16", "full", *SPECS, "window,dense"]
FLOATS = [0.0, 1e-30, 1e-3, 0.1, 0.5, 0.999, 1.0, 2.0, -1.0, 1e30, float("nan"), float("inf")]
TUPLES = [(), (0,), (1,), (-1,), (2, 3), (3, 3, 3), ("a",), ("a", "b"), tuple(range(1, 9))]


def values(field, hint, now):
    """What a field may hold by its type, allowed or not: near its bounds, and far from them."""
    kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not Ellipsis]
    if tuple in (typing.get_origin(hint), *map(typing.get_origin, kinds)):
        return st.sampled_from([*TUPLES, now])
    least = field.metadata.get("at_least", 0)
    near = [least - 1, least, least + 1, least + 2, *range(9), 12, 33, 64, 100, -1, 1_000, 10**5, 2**31 - 1, 2**31]
    drawn = {
        bool: st.booleans(),
        int: st.sampled_from([*near, 2 * now] if isinstance(now, int) else near),
        float: st.sampled_from(FLOATS),
        str: st.sampled_from([*field.metadata.get("choices", ()), *WORDS]),
        type(None): st.none(),
    }
    return st.one_of([drawn.get(kind, st.just(now)) for kind in kinds])


@st.composite
def configs(draw):
    """A tiny training with up to four fields changed, rather those of the model; its name and the changes."""
    classes = draw(st.sampled_from(TRAININGS))
    config, changes = tiny_variant(default_config(classes)), {}
    names = sorted(flat(config))
    models = [name for name in names if name.startswith("model.")]
    for name in draw(st.lists(st.one_of(st.sampled_from(models), st.sampled_from(names)), min_size=1, max_size=4)):
        *path, leaf = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        (field,) = (field for field in dataclasses.fields(owner) if field.name == leaf)
        changes[name] = draw(values(field, typing.get_type_hints(type(owner))[leaf], getattr(owner, leaf)))
        setattr(owner, leaf, changes[name])
    return title(classes), changes, config


def traced(config):
    """Whether a step of the training could be traced; False if a line refuses it, which has to be one."""
    try:
        step = plan_step(config, jax.devices()[:1])
        step.setup.step_fn.trace(step.setup.abstract_state, step.batch, jax.random.key(0))
    except UserError as error:
        line = str(error)
        assert line.isprintable() and len(line) > 20  # noqa: PT018
        return False
    return True


@pytest.mark.slow
@settings(
    max_examples=MORE or 12, derandomize=not MORE, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(configs())
def test_any_configuration_is_a_training_or_one_line(drawn):
    _, _, config = drawn
    traced(config)


def test_both_come_about():
    """The instrument itself: it finds what validation lets through, and what is refused."""
    config = tiny_variant(default_config(TRAININGS[0]))
    assert traced(config)
    config.model.num_heads = 3
    assert not traced(config)
