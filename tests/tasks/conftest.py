"""What the tests of losses share: texts for a BERT, and their cross entropy in float64."""

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

VOCAB_SIZE, ROWS, LENGTH = 29, 6, 13


@pytest.fixture(scope="session")
def make_texts():
    """`make_texts(rng, rows)`: pairs of texts of random lengths, whose last row is padding; with "row_weights"."""

    def make(rng, rows=ROWS):
        lengths = rng.integers(6, LENGTH + 1, rows)
        lengths[-1] = 0
        is_token = np.arange(LENGTH) < lengths[:, None]
        tokens = np.where(is_token, rng.integers(4, VOCAB_SIZE, (rows, LENGTH)), 0).astype(np.int32)
        segments = (is_token & (np.arange(LENGTH) >= 4)).astype(np.int32)
        row_weights = (lengths > 0).astype(np.float32)
        return {"tokens": tokens, "segments": segments, "is_token": is_token, "row_weights": row_weights}

    return make


@pytest.fixture(scope="session")
def sums_of():
    """`sums_of(logits, targets, weights)`: (loss, sums) of predictions one by one, in float64."""

    def sums(logits, targets, weights, smoothing=0.0, z_loss_weight=0.0):
        logits = np.asarray(logits, np.float64)
        found = {"tokens": 0.0, "nll": 0.0, "correct": 0.0}
        loss = z_loss = 0.0
        for place in zip(*np.nonzero(weights), strict=True):
            weight, target, log_probs = float(weights[place]), targets[place], log_softmax(logits[place])
            wanted = np.full(len(log_probs), smoothing / len(log_probs))
            wanted[target] += 1 - smoothing
            finite = wanted > 0  # 0 * -inf is none
            found["tokens"] += weight
            found["nll"] -= weight * log_probs[target]
            found["correct"] += weight * (log_probs.argmax() == target)
            z_loss += weight * z_loss_weight * logsumexp(logits[place]) ** 2
            loss -= weight * (wanted[finite] @ log_probs[finite])
        return loss + z_loss, found | ({"z_loss": z_loss} if z_loss_weight else {})

    return sums


@pytest.fixture(scope="session")
def assert_sums():
    """`assert_sums(actual, expected)`: pairs of a loss and its sums, float32 against float64."""

    def check(actual, expected, rtol=2e-5):
        (total, sums), (expected_total, expected_sums) = actual, expected
        assert {(value.dtype.name, value.shape) for value in (total, *sums.values())} == {("float32", ())}
        assert sums.keys() == expected_sums.keys()
        for name, value in {"loss": expected_total, **expected_sums}.items():
            np.testing.assert_allclose(total if name == "loss" else sums[name], value, rtol=rtol, err_msg=name)

    return check
