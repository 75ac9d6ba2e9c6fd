"""BERT's masking: the counts are exact, the shares are those of the paper, and specials are never touched."""

import numpy as np
import pytest

from tfx_jax.data.objectives.masked_lm import mask_tokens

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCAB = 40
OPTIONS = {"mask_id": MASK, "vocab_size": VOCAB, "special_ids": {PAD, CLS, SEP, MASK}}


def _rows(rng, count=50, length=70):
    """[CLS] tokens [SEP] padding, of any length from no token to a full row."""
    ids = np.full((count, length), PAD, np.int32)
    for row in ids:
        n = int(rng.integers(0, length - 1))
        row[: n + 2] = [CLS, *rng.integers(4, VOCAB, n), SEP]
    ids[0], ids[1] = PAD, rng.integers(4, VOCAB, length)
    return ids


def test_every_row_has_its_share_of_tokens_to_predict_and_no_special_among_them():
    rng = np.random.default_rng(0)
    for rate in (0.15, 0.5, 1.0):
        ids = _rows(rng)
        masked = mask_tokens(ids, rng, **OPTIONS, rate=rate)
        for row, inputs, weights in zip(ids, masked.inputs, masked.weights, strict=True):
            available = sum(token > MASK for token in row)
            assert weights.sum() == (max(1, round(rate * available)) if available else 0)
            assert set(np.unique(weights)) <= {0, 1}
            for before, after, weight in zip(row, inputs, weights, strict=True):
                assert before > MASK or weight == 0
                assert weight or before == after
                assert after in (MASK, before) or after > MASK
        np.testing.assert_array_equal(masked.targets, ids)
        assert (masked.inputs.dtype, masked.targets.dtype, masked.weights.dtype) == (np.int32, np.int32, np.float32)


def test_shares_of_the_chosen_tokens_are_80_10_10():
    rng = np.random.default_rng(1)
    ids = rng.integers(4, VOCAB, (1000, 200))
    masked = mask_tokens(ids, rng, **OPTIONS)
    chosen = masked.weights > 0
    count = chosen.sum()
    assert count == 1000 * 30
    ordinary = VOCAB - 4
    # One random token in `ordinary` is the one that was there.
    expected = {
        "masked": (masked.inputs == MASK, 0.8),
        "random": ((masked.inputs != MASK) & (masked.inputs != ids), 0.1 * (1 - 1 / ordinary)),
        "kept": (masked.inputs == ids, 0.1 + 0.1 / ordinary),
    }
    for name, (cases, share) in expected.items():
        error = np.sqrt(share * (1 - share) / count)
        assert abs((cases & chosen).sum() / count - share) < 3 * error, name


def test_every_position_and_every_random_token_is_as_likely():
    rng = np.random.default_rng(2)
    ids = np.full((40_000, 20), 4)
    masked = mask_tokens(ids, rng, **OPTIONS)
    share = masked.weights.mean(axis=0)
    assert np.all(np.abs(share - 0.15) < 4 * np.sqrt(0.15 * 0.85 / len(ids)))  # 4: there are 20 of them
    drawn = masked.inputs[(masked.inputs != MASK) & (masked.inputs != 4)]
    counts = np.bincount(drawn, minlength=VOCAB)
    assert not counts[:5].any()
    mean = len(drawn) / (VOCAB - 5)
    assert np.all(np.abs(counts[5:] - mean) < 4 * np.sqrt(mean))


def test_positions_are_chosen_independently():
    # Of pairs of positions, each is as likely as any other: no runs, no spacing.
    rng = np.random.default_rng(3)
    weights = mask_tokens(np.full((30_000, 5), 7), rng, **OPTIONS, rate=0.4).weights
    together = weights.T @ weights / len(weights)
    off = together[~np.eye(5, dtype=bool)]
    assert np.all(np.abs(off - 0.1) < 4 * np.sqrt(0.1 * 0.9 / len(weights)))


def test_same_seed_same_corruption():
    ids = _rows(np.random.default_rng(4))
    one, two, other = (mask_tokens(ids, np.random.default_rng(seed), **OPTIONS) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.inputs, two.inputs)
    assert np.any(one.inputs != other.inputs)


def test_any_leading_axes():
    ids = np.arange(4, 28)
    one = mask_tokens(ids, np.random.default_rng(0), **OPTIONS)
    many = mask_tokens(ids.reshape(1, 1, -1), np.random.default_rng(0), **OPTIONS)
    np.testing.assert_array_equal(one.inputs, many.inputs[0, 0])
    assert mask_tokens(ids.reshape(2, 3, 4), np.random.default_rng(0), **OPTIONS).weights.sum() == 6


def test_rate_zero_chooses_nothing():
    ids = _rows(np.random.default_rng(4))
    masked = mask_tokens(ids, np.random.default_rng(0), **OPTIONS, rate=0)
    assert not masked.weights.any()
    np.testing.assert_array_equal(masked.inputs, ids)


def test_wrong_arguments():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\], got 1\.5"):
        mask_tokens(np.ones((1, 4)), rng, **OPTIONS, rate=1.5)
    with pytest.raises(ValueError, match="all 3 ids are special"):
        mask_tokens(np.ones((1, 4)), rng, mask_id=2, vocab_size=3, special_ids={0, 1, 2})
