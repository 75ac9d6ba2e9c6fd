"""The repetition penalty of CTRL, by hand."""

import jax
import numpy as np
import pytest

from tfx_jax.functional import with_repetition_penalty


def test_what_a_row_has_seen_loses_whatever_its_sign_and_what_it_was_fed_counts_as_seen():
    logits = np.float32([[4, -4, 2, -1], [4, -4, 2, -1]])
    prompt = np.array([[True, True, False, False], [False, False, False, False]])
    step_fn, cache = with_repetition_penalty(lambda tokens, cache: (logits, cache + 1), np.int32(5), prompt, 2.0)
    found, cache = jax.jit(step_fn)(np.array([2, 3]), cache)
    np.testing.assert_array_equal(found, [[2, -8, 1, -1], [4, -4, 2, -2]])
    assert cache["model"] == 6
    np.testing.assert_array_equal(cache["seen"], [[True, True, True, False], [False, False, False, True]])


@pytest.mark.parametrize("penalty", [0.0, 1e-46, 1e39, float("nan")])
def test_penalties_that_leave_no_finite_logit_are_refused(penalty):
    with pytest.raises(ValueError, match=r"the repetition penalty must be in \[1e-30, 1e\+30\], because .*, got "):
        with_repetition_penalty(lambda tokens, cache: (tokens, cache), None, np.zeros((1, 4), bool), penalty)
