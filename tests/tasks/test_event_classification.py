"""Records: what they are made of, how values are scaled, and the loss of those who classify them."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.stats import rankdata

from tests.nn.programs import draw
from tfx_jax.data.sources.tables import Table
from tfx_jax.errors import UserError
from tfx_jax.models import Seq2Vec, Seq2VecConfig
from tfx_jax.tasks.events import (
    Cohort,
    EventData,
    TableRows,
    event_loss,
    fit_scales,
    is_cause,
    predict_log_odds,
    predict_shares,
    rank_values,
)

B, T, V = 5, 4, 3
DATA = EventData(num_train=300, num_heldout=60, num_variables=4, min_events=3, max_length=9)


@pytest.mark.parametrize("pooling", ["additive", "structured"])
def test_loss_and_log_odds_are_those_of_the_logits(pooling, expected_loss, assert_losses):
    rng = np.random.default_rng(0)
    config = Seq2VecConfig(V, 6, 5, 3, pooling=pooling)
    model = draw(lambda: Seq2Vec(config, rngs=nnx.Rngs(0)))
    batch = {
        "variable": rng.integers(V, size=(B, T)).astype(np.int32),
        "value": rng.random((B, T)).astype(np.float32),
        "time": rng.random((B, T)).astype(np.float32),
        "event_mask": np.arange(T) < np.array([4, 1, 3, 2, 0])[:, None],
        "label": np.array([0, 1, 1, 0, 0], np.int32),
        "row_weights": np.array([1, 1, 1, 1, 0], np.float32),
    }
    events = [batch[name] for name in ("variable", "value", "time", "event_mask")]
    logits, maps = jax.device_get(jax.jit(lambda: model(*events, return_attention=True))())
    found, log_odds, shares = jax.jit(
        lambda batch: (event_loss(model, batch, None), predict_log_odds(model, batch), predict_shares(model, batch))
    )(batch)
    assert_losses(found, expected_loss(logits, batch["label"], batch["row_weights"])._replace(num_tokens=10))
    np.testing.assert_allclose(log_odds, logits[:, 1] - logits[:, 0], atol=1e-6)
    np.testing.assert_allclose(shares[0], log_odds, atol=1e-6)
    np.testing.assert_allclose(shares[1], maps["pool/0/cross"][:, :, 0], atol=1e-6)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_label_of_the_cohort_has_its_cause_and_no_other(split):
    cohort = Cohort(DATA, split)
    assert len(cohort) == (300 if split == "train" else 60)
    labels = []
    for index, length in enumerate(cohort.lengths):
        variables, values, times, label = cohort[index]
        assert 3 <= length == len(variables) == len(values) == len(times) <= 9
        assert {*variables.tolist()} <= {0, 1, 2, 3}
        events = zip(variables, values, times, strict=True)
        assert label == any(v == 0 and x > 0.5 and 0.3 <= t < 0.6 for v, x, t in events)
        labels.append(label)
    assert 0 < np.mean(labels) < 0.5


def test_a_cohort_is_a_function_of_its_seed_and_split():
    first, again = Cohort(DATA, "train"), Cohort(DATA, "train")
    others = Cohort(DATA, "validation"), Cohort(dataclasses.replace(DATA, seed=1), "train")
    for index in (7, 0):
        for part, same in zip(first[index], again[index], strict=True):
            np.testing.assert_array_equal(part, same)
        assert all(first[index].values[0] != other[index].values[0] for other in others)
    with pytest.raises(IndexError):
        first[300]


def test_the_window_is_half_open_and_the_threshold_is_not_in():
    variables, values = np.array([0, 0, 0, 0, 1]), np.array([0.6, 0.6, 0.5, 0.6, 0.6])
    times = np.array([0.3, 0.6, 0.4, 0.2, 0.4])
    assert is_cause(DATA, variables, values, times).tolist() == [True, False, False, False, False]


def table(values, labels):
    values = np.array(values, np.float64)
    return TableRows(Table(tuple("abcde"[: values.shape[1]]), values, np.array(labels)), "some.csv")


def test_every_number_of_a_row_is_an_event_without_a_time():
    rows = table([[1, np.nan, 3], [np.nan, np.nan, 6]], [0, 1])
    assert (rows.names, rows.lengths.tolist(), len(rows)) == (("a", "b", "c"), [2, 1], 2)
    assert [part.tolist() for part in rows[0][:3]] == [[0, 2], [1, 3], [0, 0]]
    assert rows[0].label == 0
    assert rows[1].label == 1


def test_values_are_ranked_among_those_of_the_training():
    """With ties and few values, and with more than there are quantiles; as SciPy ranks, to a hundredth."""
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=1000), rng.integers(5, size=1000), np.full(1000, 3.0), np.full(1000, np.nan)]
    scales = fit_scales(table(np.transpose(columns), [0] * 1000))
    assert [scale["name"] for scale in scales] == list("abcd")
    for number, column in enumerate(columns[:3]):
        found = rank_values(scales, np.full(1000, number), column)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, (rankdata(column) - 0.5) / 1000, atol=0.011)
    variables = np.array([0, 2, 0, 1, 3])
    found = rank_values(scales, variables, np.array([-99.0, 99.0, 99.0, 2.5, 7.0]))
    assert found[[0, 1, 2, 4]].tolist() == [0.0, 0.5, 1.0, 0.5]
    assert 0.4 < found[3] < 0.8  # between two ranks


def test_a_row_that_is_too_long_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("y,a,b,c\n0,1,2,3\n1,,2,3\n")
    data = EventData("files", str(tmp_path), "a.csv", label_column="y", max_length=2)
    with pytest.raises(UserError, match=r"a\.csv has a row of 3 numbers: raise config\.task\.data\.max_length=2$"):
        data.load("train")
    data.exclude_columns = "a, c"
    assert data.load("train").names == ("b",)
