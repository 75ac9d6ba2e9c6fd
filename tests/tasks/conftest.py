"""What the tests of losses share: texts for a BERT, and their cross entropy in float64."""

import chex
import jax
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from tfx_jax.tasks.loss import LossOutput, Metric

VOCAB_SIZE, ROWS, LENGTH = 29, 6, 13


@pytest.fixture(scope="session")
def make_texts():
    """`make_texts(rng, rows)`: pairs of texts of random lengths, whose last row is padding; with "row_weights"."""

    def make(rng, rows=ROWS):
        lengths = rng.integers(6, LENGTH + 1, rows)
        lengths[-1] = 0
        token_mask = np.arange(LENGTH) < lengths[:, None]
        tokens = np.where(token_mask, rng.integers(4, VOCAB_SIZE, (rows, LENGTH)), 0).astype(np.int32)
        segments = (token_mask & (np.arange(LENGTH) >= 4)).astype(np.int32)
        row_weights = (lengths > 0).astype(np.float32)
        return {"tokens": tokens, "token_type_ids": segments, "token_mask": token_mask, "row_weights": row_weights}

    return make


@pytest.fixture(scope="session")
def expected_loss():
    """`expected_loss(logits, targets, weights)`: a `LossOutput` of predictions one by one, in float64."""

    def expect(logits, targets, weights, smoothing=0.0, z_loss_weight=0.0):
        logits = np.asarray(logits, np.float64)
        loss = nll = correct = z_loss = 0.0
        for place in zip(*np.nonzero(weights), strict=True):
            weight, target, log_probs = float(weights[place]), targets[place], log_softmax(logits[place])
            wanted = np.full(len(log_probs), smoothing / len(log_probs))
            wanted[target] += 1 - smoothing
            finite = wanted > 0  # 0 * -inf is none
            nll -= weight * log_probs[target]
            correct += weight * (log_probs.argmax() == target)
            z_loss += weight * z_loss_weight * logsumexp(logits[place]) ** 2
            loss -= weight * (wanted[finite] @ log_probs[finite])
        count = float(np.asarray(weights, np.float64).sum())
        metrics = {"nll": Metric(nll, count), "accuracy": Metric(correct, count)}
        if z_loss_weight:
            metrics["z_loss"] = Metric(z_loss, count)
        return LossOutput(loss + z_loss, count, metrics, num_tokens=count)

    return expect


@pytest.fixture(scope="session")
def assert_losses():
    """`assert_losses(actual, expected)`: two of `LossOutput`, float32 scalars against float64."""

    def check(actual, expected, rtol=2e-5):
        assert {(value.dtype.name, value.shape) for value in jax.tree.leaves(actual)} == {("float32", ())}
        chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=rtol)

    return check
