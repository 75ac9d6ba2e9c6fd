"""Every model refuses every invalid field of its configuration by name, from Python as on the command line."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tfx_jax.models as models
from tfx_jax.models import GPT, Conformer, ConformerConfig, GPTConfig, Whisper, WhisperConfig

CONFIGS = [getattr(models, name) for name in models.__all__ if name.endswith("Config")]


def _invalid(config, path):
    """(nested dataclass, its field, an invalid value, the field's path) of each field with declared values."""
    for field in dataclasses.fields(config):
        name, value, metadata = f"{path}.{field.name}", getattr(config, field.name), field.metadata
        if dataclasses.is_dataclass(value):
            yield from _invalid(value, name)
        if "choices" in metadata:
            yield config, field.name, "nonsense", name
        if "at_least" in metadata:
            yield config, field.name, metadata["at_least"] - 1, name
        if "is_fraction" in metadata:
            yield config, field.name, 1.0, name
        if field.type in (int, "int"):
            yield config, field.name, "2", name


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_invalid_field_is_refused_by_name(kind):
    config, rngs = kind(), nnx.Rngs(0)
    (make,) = (
        getattr(models, name)
        for name in models.__all__
        if name in (kind.__name__.removesuffix("Config"), kind.__name__.replace("Config", "Attention"))
    )
    fields = list(_invalid(config, kind.__name__))
    assert len(fields) > 3
    for part, name, invalid, path in fields:
        valid = getattr(part, name)
        setattr(part, name, invalid)
        with pytest.raises(ValueError, match="must be") as caught:
            make(config, rngs=rngs)
        assert str(caught.value).startswith(f"{path} must be "), path
        setattr(part, name, valid)


@pytest.mark.parametrize(("make", "config"), [(Whisper, WhisperConfig), (Conformer, ConformerConfig)])
def test_fields_that_contradict_each_other_are_refused(make, config):
    with pytest.raises(ValueError, match="d_model=30 is not divisible by num_heads=4"):
        make(config(d_model=30, num_heads=4), rngs=nnx.Rngs(0))


def test_64_bits_are_a_dtype_where_jax_has_them():
    with pytest.raises(ValueError, match='dtype must be "float32" or "bfloat16"'):
        GPT(GPTConfig(dtype="float64"), rngs=nnx.Rngs(0))
    with jax.enable_x64(True):
        config = GPTConfig(vocab_size=8, num_layers=1, d_model=8, num_heads=2, dtype="float64")
        assert jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 3), int))).dtype == jnp.float64
