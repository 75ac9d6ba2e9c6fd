"""Records of files become the right rows; scores are those of what the model says; attention finds a planted cause."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.stats import rankdata

from tests.training.tasks.told import Told, no_answer
from tfx_jax.cli import main
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.errors import UserError
from tfx_jax.models.seq2vec import Seq2VecConfig
from tfx_jax.tasks.events import EventClassificationConfig, EventClassificationTask, EventData, is_cause
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

ROOT = pathlib.Path(__file__).parents[3]
TRAIN = "HR,died,pH,name\n60,0,7.3,a\n70,1,,b\n,0,,c\n80,1,7.5,d\n"
OTHER = "name,pH,HR,died\nx,7.4,65,1\ny,7.2,99,0\n"  # columns in another order


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "dev.csv").write_text(OTHER)
    return {"data_dir": str(tmp_path), "train_file": "train.csv", "validation_file": "dev.csv"}


def opened(workdir, pooling="additive", **data):
    columns = {"dataset": "files", "label_column": "died", "exclude_columns": "name"}
    data = EventData(**{"max_length": 3, "tokens_per_batch": 6} | columns | data)
    model = Seq2VecConfig(d_model=8, d_ff=4, num_knots=3, pooling=pooling, num_hops=3)
    run = make_run(validate(ExperimentConfig(model=model, task=EventClassificationConfig(data))), workdir)
    assert type(run.task) is EventClassificationTask
    return run


def test_examples_are_the_numbers_of_the_rows(files, tmp_path):
    task = opened(tmp_path, **files).task
    assert task.model_config.vocab_size == 2
    examples = task.encode(task.config.splits()["train"])
    assert [example["variable"].tolist() for example in examples] == [[0, 1], [0], [], [0, 1]]
    assert [int(example["label"]) for example in examples] == [0, 1, 0, 1]
    np.testing.assert_allclose(np.concatenate([example["value"] for example in examples]), [0, 0, 0.5, 1, 1], atol=0.01)
    assert not np.concatenate([example["time"] for example in examples]).any()
    others = task.encode(task.config.splits()["validation"])
    assert [example["variable"].tolist() for example in others] == [[1, 0], [1, 0]]
    np.testing.assert_allclose(others[0]["value"], [0.5, 0.25], atol=0.01)


def test_batches_hold_every_record_once_an_epoch(files, tmp_path):
    run = opened(tmp_path, **files)
    iterator = iter(run.train_data(make_mesh(data=1)))
    found = []
    while len(found) < 4:
        batch = next(iterator)
        assert batch["variable"].size <= 6
        for row in range(len(batch["label"])):
            if batch["row_weights"][row]:
                found.append((int(batch["event_mask"][row].sum()), int(batch["label"][row])))
    iterator.close()
    assert sorted(found) == [(0, 0), (1, 1), (2, 0), (2, 1)]


def test_what_the_model_says_is_ranked(tmp_path):
    task = opened(tmp_path, dataset="synthetic", num_train=20, num_heldout=50, min_events=2).task
    metrics, summary = task.evaluate(Told(lambda batch: batch["label"] - 0.5))
    assert metrics == {"auroc": 1, "average_precision": 1}
    labels = np.array([task.config.splits()["validation"][index].label for index in range(50)])
    assert 0 < labels.sum() < 50
    assert summary == (
        "AUROC 1.0000 (1.0000 to 1.0000), average precision 1.0000 (1.0000 to 1.0000), 50 records, "
        f"{labels.sum()} of label 1"
    )
    metrics, _ = task.evaluate(Told(lambda batch: batch["value"][:, 0]))
    firsts = np.array([example["value"][0] for example in task.encode(task.config.splits()["validation"])])
    ranks = rankdata(firsts)[labels == 1]
    positives, negatives = labels.sum(), 50 - labels.sum()
    assert metrics["auroc"] == pytest.approx((ranks.sum() - positives * (positives + 1) / 2) / (positives * negatives))


@pytest.mark.parametrize(("pooling", "hops"), [("additive", 1), ("structured", 3)])
def test_shares_belong_to_their_events(pooling, hops, files, tmp_path, draw_model):
    run = opened(tmp_path, pooling, **files)
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    trained = run.trained(params)
    records = run.task.config.splits()["validation"]
    probability, label, shares = run.task.event_attention(trained, "validation", 1)
    assert label == 0
    assert 1 / (1 + np.exp(-run.task.predict(trained, records)[1])) == pytest.approx(probability, abs=1e-5)
    assert {(share.name, share.value, share.time) for share in shares} == {("pH", 7.2, 0.0), ("HR", 99.0, 0.0)}
    assert sum(share.weight for share in shares) == pytest.approx(1, abs=1e-5)
    assert shares[0].weight > shares[1].weight
    model, example = nnx.merge(run.graphdef, jax.device_put(params)), run.task.encode(records)[1]
    events = [example[name][None] for name in ("variable", "value", "time", "event_mask")]
    _, maps = jax.jit(lambda: model(*events, return_attention=True))()
    weights, by_name = jax.device_get(maps["pool/0/cross"])[0, :, 0], {share.name: share for share in shares}
    assert weights.shape == (hops, 2)
    for name, event in zip(("pH", "HR"), weights.T, strict=True):
        np.testing.assert_allclose(by_name[name].hops, event, atol=1e-5)
        assert by_name[name].weight == pytest.approx(event.mean(), abs=1e-5)
    with pytest.raises(UserError, match=r"dev\.csv has no record 3: it has 2, counted from 1$"):
        run.task.event_attention(trained, "validation", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HR,died\n1,0\n2,1\n", r"dev\.csv: column 'pH' of the training split is missing$"),
        (
            "HR,pH,died,x,name\n1,2,0,3,\n1,2,1,3,\n",
            r"dev\.csv: column 'x' does not occur in the training split: exclude it with exclude_columns$",
        ),
        (OTHER.replace(",1\n", ",0\n"), r"dev\.csv has only records of label 0: AUROC needs records of both labels$"),
        (OTHER.replace("99", "high"), r"dev\.csv, line 3: column 'HR': 'high' is not a number; exclude the column"),
        ("", r"dev\.csv is empty$"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(files, tmp_path, text, message):
    if "name" not in text and text:
        text = text.replace("HR,died", "HR,died,name").replace(",0\n", ",0,\n").replace(",1\n", ",1,\n")
    (tmp_path / "dev.csv").write_text(text)
    task = opened(tmp_path, **files).task
    with pytest.raises(UserError, match=message):
        task.evaluate(Told(no_answer))
    with pytest.raises(UserError, match=message):  # before the first step already
        task.train_data(LoaderOptions(seed=0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label_column": ""}, "label_column must name a column"),
        ({"tokens_per_batch": 2}, "tokens_per_batch=2 must be at least max_length=3, the size of one record"),
        ({"dataset": "synthetic", "min_events": 4}, "max_length=3 must be at least min_events=4"),
        ({"window_end": 0.2}, r"window_end=0\.2 must be after window_start=0\.3"),
    ],
)
def test_what_does_not_go_together_is_refused(values, message, tmp_path):
    with pytest.raises(UserError, match=rf"^config\.task\.data\.{message}"):
        opened(tmp_path, **values)


@pytest.mark.parametrize(("pooling", "columns"), [("additive", 4), ("structured", 7)])
@pytest.mark.slow
def test_every_row_of_attention_is_listed(pooling, columns, tmp_path, capsys):
    """On the command line: behind weight, name, value and time, if there are several."""
    fields = {"model.pooling": pooling, "model.num_hops": 3, "num_steps": 1, "mesh.data": 1}
    asked = [f"--config.{name}={value}" for name, value in fields.items()]
    experiment = ROOT / "experiments" / "seq2vec_cohort.py"
    assert main(["train", f"--config={experiment}:test", f"--workdir={tmp_path}", *asked]) == 0
    capsys.readouterr()
    assert main(["attend", f"--workdir={tmp_path}", "--row=1"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split("\t") for line in lines]
    assert {len(row) for row in rows} == {columns}
    for weight, _, _, _, *hops in rows:
        assert not hops or float(weight) == pytest.approx(np.mean([float(hop) for hop in hops]), abs=2e-4)


@pytest.mark.slow
@pytest.mark.compiles(40, "two models, trained, evaluated and asked, each at every length")
def test_attention_finds_the_cause_and_a_mean_does_not(tmp_path, capsys):
    """On the command line; of the records with a cause, the causes have more than 0.8 of the attention on average."""
    experiment, areas = ROOT / "experiments" / "seq2vec_cohort.py", {}
    for pooling in ("additive", "mean"):
        workdir = tmp_path / pooling
        fast = ["--config.num_steps=300", "--config.eval_every=0", "--config.mesh.data=1"]
        fast += ["--config.task.data.num_train=6000", f"--config.model.pooling={pooling}"]
        assert main(["train", f"--config={experiment}", f"--workdir={workdir}", *fast]) == 0
        capsys.readouterr()
        assert main(["evaluate", f"--workdir={workdir}", "--json"]) == 0
        areas[pooling] = json.loads(capsys.readouterr().out)["auroc"]
    assert areas["additive"] > 0.98 > 0.9 > areas["mean"] > 0.6
    run = load_run(tmp_path / "additive", EventClassificationTask)
    trained, data = run.trained(load_best_params(tmp_path / "additive")), run.config.task.data
    records, masses = data.load("validation"), []
    for index in [index for index in range(200) if records[index].label]:
        _, _, shares = run.task.event_attention(trained, "validation", index)
        numbers = np.array([records.names.index(share.name) for share in shares])
        values, times = (np.array([getattr(share, name) for share in shares]) for name in ("value", "time"))
        masses.append(sum(np.array([share.weight for share in shares])[is_cause(data, numbers, values, times)]))
    assert len(masses) > 50
    assert np.mean(masses) > 0.8
    assert main(["attend", f"--workdir={tmp_path / 'additive'}", "--row=1", "--split=test"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("record 1 of test: label ")
    weights = [float(line.split("\t")[0]) for line in lines]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1, abs=0.01)
    assert all(len(line.split("\t")) == 4 for line in lines)
    assert main(["attend", f"--workdir={tmp_path / 'mean'}", "--source=a", "--output=a.png"]) == 2
    assert "--source needs a model of text" in capsys.readouterr().err
