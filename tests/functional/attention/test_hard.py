"""Hard attention: what is drawn, and that its gradient is right on average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.additive import additive_weights
from tests.functional.attention.oracles.dense import dense_weights
from tfx_jax.functional import additive_attention, hard_attention, score_function_loss


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = _normal(0, 2, 3, 4, 5), _normal(1, 2, 6, 2, 5), _normal(2, 2, 6, 2, 7)
MASK = np.ones((2, 1, 1, 6), bool)
MASK[0, ..., 4] = False
MASK[1] = False

_hard = jax.jit(
    hard_attention,
    static_argnames=("attention_fn", "dropout_rate", "return_weights", "return_log_prob", "return_probs"),
)
_drawn = functools.partial(_hard, return_weights=True, return_log_prob=True)


class TestDraw:
    def test_reads_exactly_one_visible_value_with_its_log_probability(self):
        drawn = _drawn(QUERY, KEY, VALUE, mask=MASK, rng=jax.random.key(0))
        out, weights, log_prob = map(np.asarray, drawn)
        soft = dense_weights(QUERY, KEY, mask=MASK)
        chosen = weights.argmax(axis=-1)
        np.testing.assert_array_equal(np.sort(weights, axis=-1)[0], np.eye(6)[5] * np.ones((4, 3, 1)))
        assert (chosen[0] != 4).all()
        for n, t in np.ndindex(4, 3):
            np.testing.assert_array_equal(out[0, t, n], VALUE[0, chosen[0, n, t], n // 2])
            np.testing.assert_allclose(log_prob[0, n, t], np.log(soft[0, n, t, chosen[0, n, t]]), atol=1e-5)
        for nothing in (out, weights, log_prob):
            np.testing.assert_array_equal(nothing[1], 0)

    def test_frequencies_are_the_soft_weights(self):
        draws = 4000
        many = jax.jit(jax.vmap(lambda rng: hard_attention(QUERY, KEY, VALUE, rng=rng, return_weights=True)[1]))
        frequencies = np.asarray(many(jax.random.split(jax.random.key(1), draws))).mean(axis=0)
        soft = dense_weights(QUERY, KEY)
        errors = np.abs(frequencies - soft) / np.sqrt(soft * (1 - soft) / draws)
        assert errors.max() < 4.0  # standard errors, of 144 frequencies
        assert frequencies.min() > 0

    def test_the_probabilities_of_any_soft_attention(self):
        w_query, w_key, v = _normal(3, 5, 8), _normal(4, 5, 8), _normal(5, 8)
        soft_fn = functools.partial(additive_attention, w_query=w_query, w_key=w_key, v=v)
        soft = additive_weights(QUERY, KEY, w_query=w_query, w_key=w_key, v=v)
        _, weights, log_prob = _drawn(QUERY, KEY, VALUE, attention_fn=soft_fn)
        np.testing.assert_array_equal(np.asarray(weights).argmax(axis=-1), soft.argmax(axis=-1))
        np.testing.assert_allclose(log_prob, np.log(soft.max(axis=-1)), atol=1e-6)

    def test_what_is_returned_follows_what_is_asked_for(self):
        out, weights, log_prob = _drawn(QUERY, KEY, VALUE)
        np.testing.assert_array_equal(_hard(QUERY, KEY, VALUE), out)
        np.testing.assert_array_equal(_hard(QUERY, KEY, VALUE, return_weights=True)[1], weights)
        np.testing.assert_allclose(_hard(QUERY, KEY, VALUE, return_log_prob=True)[1], log_prob, atol=1e-6)
        _, probs = _hard(QUERY, KEY, VALUE, mask=MASK, return_probs=True)
        np.testing.assert_allclose(probs[0], dense_weights(QUERY, KEY, mask=MASK)[0], atol=1e-6)
        assert not np.asarray(probs[1]).any()

    def test_all_that_is_asked_for_exists_without_keys(self):
        nothing = KEY[:, :0], VALUE[:, :0]
        found = _drawn(QUERY, *nothing, return_probs=True)
        assert [part.shape for part in found] == [(2, 3, 4, 7), (2, 4, 3, 0), (2, 4, 3), (2, 4, 3, 0)]
        assert not np.asarray(found[0]).any()

    def test_dropout_drops_the_chosen_weight_and_keeps_the_mean(self):
        out = np.asarray(_hard(QUERY, KEY, VALUE, dropout_rate=0.25, dropout_rng=jax.random.key(0)))
        whole = np.asarray(_hard(QUERY, KEY, VALUE))
        kept = (out != 0).all(axis=-1)
        assert 0 < kept.sum() < kept.size
        np.testing.assert_allclose(out, np.where(kept[..., None], whole / 0.75, 0), rtol=1e-6)


class TestScoreFunction:
    """Two queries choose one of three keys each; the reward depends on both choices together."""

    INPUTS = _normal(6, 1, 2, 1, 2), _normal(7, 1, 3, 1, 2), _normal(8, 1, 3, 1, 2)

    @staticmethod
    def reward(out):
        return 4.0 + jnp.sin(2 * out[..., 0, 0, 0] * out[..., 1, 0, 1]) + out[..., 1, 0, 0]

    def expected_reward(self, inputs):
        """Over all nine pairs of choices."""
        query, key, value = inputs
        soft = jax.nn.softmax(query[0, :, 0] @ key[0, :, 0].T / np.sqrt(2))
        rewards = {(i, j): self.reward(value[:, np.array([i, j])])[0] for i, j in np.ndindex(3, 3)}
        return sum(soft[0, i] * soft[1, j] * reward for (i, j), reward in rewards.items())

    def estimates(self, baselines, draws=20_000):
        """Gradients of the expected reward for each baseline and each draw, [baselines, draws, parameters]."""

        def loss(inputs, rng, baseline):
            out, log_prob = hard_attention(*inputs, rng=rng, return_log_prob=True)
            reward = self.reward(out)
            return (score_function_loss(log_prob.sum(axis=(1, 2)), reward, baseline) - reward).sum()

        rngs = jax.random.split(jax.random.key(0), draws)
        estimate = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, None)))
        of_each = (estimate(self.INPUTS, rngs, np.float32(baseline)) for baseline in baselines)
        return [-np.concatenate([np.float64(g).reshape(draws, -1) for g in gradients], axis=1) for gradients in of_each]

    def test_is_unbiased_and_a_baseline_makes_it_less_noisy(self):
        mean_reward, exact = jax.jit(jax.value_and_grad(self.expected_reward))(self.INPUTS)
        exact = np.concatenate([np.asarray(g).ravel() for g in exact])
        variances = []
        for estimates in self.estimates([0.0, float(mean_reward)]):
            standard_errors = estimates.std(axis=0) / np.sqrt(len(estimates))
            assert (np.abs(estimates.mean(axis=0) - exact) <= 3 * standard_errors + 1e-6).all()
            variances.append(estimates[:, :10].var(axis=0).sum())  # of queries and keys, which the baseline concerns
        assert variances[1] < variances[0] / 4
        assert np.abs(exact[:10]).max() > 0.1  # there is something to estimate

    def test_neither_reward_nor_baseline_gets_a_gradient(self):
        arrays = (np.array(x, np.float32) for x in ([-1.0, -2.0], [3.0, 5.0], [1.0, 1.5]))
        gradients = jax.jit(jax.grad(lambda *x: score_function_loss(*x).sum(), argnums=(0, 1, 2)))(*arrays)
        np.testing.assert_array_equal(np.stack(gradients), [[-2.0, -3.5], [0, 0], [0, 0]])

    @pytest.mark.parametrize("shapes", [((2, 3), (2,), ()), ((2,), (2,), (1,)), ((2,), (2,), (3,))])
    def test_errors(self, shapes):
        with pytest.raises(ValueError, match=r"must have equal shapes .*: sum the log-probabilities"):
            score_function_loss(*map(np.ones, shapes))
