"""Fields declare their values, and an error names the field that has another."""

import copy
import dataclasses
import math
import pickle

import pytest

from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, check_fields, documented, fraction, one_of


@dataclasses.dataclass
class Inner:
    rate: float = fraction(0.1)
    head_rate: float | None = fraction(None)
    name: str = one_of(("a", "b"), "a")


@dataclasses.dataclass
class Outer:
    size: int = at_least(1, 6)
    limit: int | None = at_least(1, None)
    widths: tuple[int, ...] = (1, 2)
    weight: float = at_least(0, 0.0)
    free: float = -7.0
    inner: Inner = dataclasses.field(default_factory=Inner)
    any_class: object = dataclasses.field(default_factory=Inner)


def test_defaults_are_those_that_are_declared():
    config = Outer()
    assert (config.size, config.limit, config.weight, config.free) == (6, None, 0.0, -7.0)
    assert config.inner == config.any_class == Inner(0.1, None, "a")
    check_fields(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", 1),
        ("limit", 1),
        ("limit", None),
        ("weight", 0),
        ("inner.rate", 0.0),
        ("inner.rate", 0.999),
        ("inner.head_rate", 0.5),
        ("inner.name", "b"),
        ("any_class", None),
        ("any_class", "text"),
    ],
)
def test_what_is_declared_may_be_set(name, value):
    check_fields(changed(name, value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", 0, "config.size must be at least 1, got 0"),
        ("size", -3, "config.size must be at least 1, got -3"),
        ("size", "6", "config.size must be a whole number, got '6'"),
        ("size", True, "config.size must be a whole number, got True"),
        ("size", None, "config.size must be a whole number, got None"),
        ("size", 2.0, "config.size must be a whole number, got 2.0"),
        ("size", 10**400, "config.size must be at most 2147483647, got a number of more than 30 digits"),
        ("limit", "", "config.limit must be a whole number or None, got ''"),
        ("free", -(2**31), "config.free must be from -2147483647 to 2147483647, got -2147483648"),
        ("widths", 3, "config.widths must be a list of whole numbers, got 3"),
        ("widths", [1, 2], "config.widths must be a tuple of whole numbers, got [1, 2]"),
        ("widths", (1, "a"), "config.widths must be a list of whole numbers, got (1, 'a')"),
        ("widths", (1, 2**31), "config.widths must be from -2147483647 to 2147483647, got 2147483648"),
        ("inner", 1, "config.inner must be an instance of Inner, got 1"),
        ("limit", 0, "config.limit must be at least 1, got 0"),
        ("weight", -0.5, "config.weight must be at least 0, got -0.5"),
        ("weight", math.nan, "config.weight must be at least 0, got nan"),
        ("weight", math.inf, "config.weight must be finite, got inf"),
        ("free", math.nan, "config.free must be finite, got nan"),
        ("inner.rate", 1.0, "config.inner.rate must be in [0, 1), got 1.0"),
        ("inner.rate", -0.1, "config.inner.rate must be in [0, 1), got -0.1"),
        ("inner.rate", math.nan, "config.inner.rate must be in [0, 1), got nan"),
        ("inner.head_rate", 2, "config.inner.head_rate must be in [0, 1), got 2"),
        ("inner.name", "c", 'config.inner.name must be "a" or "b", got \'c\''),
        ("inner.name", "", 'config.inner.name must be "a" or "b", got \'\''),
        ("any_class.name", "c", 'config.any_class.name must be "a" or "b", got \'c\''),
    ],
)
def test_other_values_are_refused_in_one_line_that_names_the_field(name, value, message):
    with pytest.raises(UserError) as caught:
        check_fields(changed(name, value))
    assert str(caught.value) == message


def test_the_whole_is_called_as_one_wants():
    with pytest.raises(UserError, match=r"^task\.size must be at least 1, got 0$"):
        check_fields(Outer(size=0), "task")


def changed(name, value):
    config = owner = Outer()
    *path, leaf = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, leaf, value)
    return config


@documented
@dataclasses.dataclass
class Documented:
    learning_rate: float = 0.1
    num_steps: int = 3

    @property
    def steps(self):
        return self.num_steps

    @steps.setter
    def steps(self, value):
        self.num_steps = value


@dataclasses.dataclass
class Inheriting(Documented):
    window: int = 1


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (Documented(), "learning_rte", "Documented has no field learning_rte; did you mean learning_rate?"),
        (Inheriting(), "windw", "Inheriting has no field windw; did you mean window?"),
        (Inheriting(), "num_stepz", "Inheriting has no field num_stepz; did you mean num_steps?"),
        (Documented(), "heads", "Documented has no field heads; its fields are learning_rate, num_steps"),
    ],
)
def test_an_attribute_that_is_no_field_is_refused(config, name, message):
    with pytest.raises(UserError) as caught:
        setattr(config, name, 1)
    assert str(caught.value) == message
    assert not hasattr(config, name)


def test_fields_and_properties_are_set_and_copied():
    config = Inheriting()
    config.steps, config.window = 7, 2
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert copied == Inheriting(0.1, 7, 2)
