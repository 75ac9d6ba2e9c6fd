"""Numbers on the command line: each flag has a range, and one line names the flag outside it."""

import numpy as np
import pytest

from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import BeamSearch, Sampling
from tfx_jax.models import hf

HUGE = str(2**64)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("seed", ["-1", str(2**32), HUGE, "1" * 5000, "1.5", "x", ""]),
        ("length-penalty", ["-1", "40", "1e400", "nan", "x"]),
        ("temperature", ["-1", "1e-31", "1e400", "nan", "x"]),
        ("top-k", ["0", "-1", HUGE, "x"]),
        ("top-p", ["0", "-1", "1.5", "nan", "x"]),
        ("repetition-penalty", ["-1", "0", "nan", "1e400", "x"]),
        ("beam", ["0", "-1", HUGE, "x"]),
        ("max-new-tokens", ["0", "-1", HUGE, "x"]),
        ("batch", ["0", "-1", HUGE, "x"]),
    ],
)
def test_generate_refuses_numbers_out_of_range_before_it_loads_a_model(flag, values, capfd, tmp_path):
    for value in values:
        assert main(["generate", f"--workdir={tmp_path / 'none'}", f"--{flag}={value}"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert flag in line.replace("_", "-"), line
        assert line.isprintable()


@pytest.mark.parametrize("divisor", [-1.0, 1e-31, 1e31, float("nan"), float("inf")])
def test_sampling_refuses_divisors_that_leave_no_finite_logit(divisor):
    with pytest.raises(UserError, match=r"^temperature must be 0 or at least 1e-30 and at most 1e\+30, got"):
        Sampling(temperature=divisor)
    with pytest.raises(UserError, match=r"^repetition_penalty must be at least 1e-30 and at most 1e\+30, got"):
        Sampling(repetition_penalty=divisor)


@pytest.mark.parametrize(
    ("search", "field", "value"),
    [
        *((Sampling, name, value) for name in ("top_k", "no_repeat_ngram_size") for value in (2.5, "2", True)),
        *((Sampling, name, "1") for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *((BeamSearch, "beam_size", value) for value in (2.5, "2", None)),
        (BeamSearch, "length_penalty", "1"),
    ],
)
def test_searches_refuse_what_is_no_number(search, field, value):
    is_whole = field in ("top_k", "no_repeat_ngram_size", "beam_size")
    with pytest.raises(UserError, match=f"^{field} must be a {'whole ' * is_whole}number, got {value!r}$"):
        search(**{field: value})


def test_numbers_of_numpy_are_numbers():
    assert Sampling(top_k=np.int64(3), temperature=np.float32(0.5)).top_k == 3
    assert BeamSearch(np.int32(2), np.float64(1.0)).beam_size == 2


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64", "bf16", "auto", None, 3])
def test_models_compute_in_float32_and_bfloat16_alone(dtype, tmp_path):
    shown = dtype if dtype in ("float16", "int8", "float64", None) else repr(dtype)
    with pytest.raises(UserError, match=f"^dtype must be float32 or bfloat16, got {shown}: activations"):
        hf.load(tmp_path, dtype=dtype)
