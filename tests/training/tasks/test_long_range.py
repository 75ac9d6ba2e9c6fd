"""Long sequences become the right rows, splits are apart, what the model says is scored, and a training learns."""

import collections
import gzip

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.tasks.told import Told
from tfx_jax.data.sources.wikitext import byte_ids
from tfx_jax.errors import UserError
from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.synthetic.listops import evaluate
from tfx_jax.tasks.sequence.long_range import (
    ListOpsData,
    LongRangeConfig,
    LongRangeTask,
    PassagePairData,
    SectionData,
    long_range_loss,
)
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

WORDS = {"A": "aaaa bbbb cccc dddd", "B": "eeee ffff gggg hhhh", "C": "iiii jjjj kkkk llll"}
SMALL = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32}


def article(title, body):
    return f" \n = {title} = \n \n {body} LEAD \n = = Plot = = \n {body} \n = = Cast = = \n {body} CAST \n"


@pytest.fixture
def folder(tmp_path):
    for name in ("train", "valid"):
        text = "".join(article(title, f"{name.upper()} {body}") for title, body in WORDS.items())
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return {
        "dataset": "files",
        "data_dir": str(tmp_path),
        "train_file": "train.txt.gz",
        "validation_file": "valid.txt.gz",
    }


def opened(data, workdir):
    run = make_run(validate(ExperimentConfig(LongEncoderConfig(**SMALL), LongRangeConfig(data))), workdir)
    assert type(run.task) is LongRangeTask
    return run


def test_expressions_are_their_own_ids_and_their_values_are_labels(tmp_path):
    data = ListOpsData(1, 4, 4, 6, 20, num_train=50, num_heldout=20, tokens_per_batch=80)
    run = opened(data, tmp_path)
    assert run.task.labels == run.task.model_config.labels == tuple("0123456789")
    assert (run.task.model_config.vocab_size, run.task.model_config.num_sequences) == (16, 1)
    iterator, found = iter(run.train_data(make_mesh(data=1))), []
    while len(found) < 50:
        batch = next(iterator)
        assert batch["tokens"].shape == (4, 20)
        for tokens, label, weight in zip(batch["tokens"], batch["label"], batch["row_weights"], strict=True):
            assert weight == tokens.any()
            if weight:
                found.append(tokens[tokens != 0].tolist())
                assert evaluate(found[-1]) == label
    iterator.close()
    splits = {split: [one.sequences[0].tolist() for one in data.load(split)] for split in ("train", "validation")}
    assert sorted(found) == sorted(splits["train"])
    assert not {*map(tuple, splits["train"])} & {*map(tuple, splits["validation"])}
    assert {len(splits["train"]), len(data.load("test"))} == {50, 20}


def test_passages_have_the_headings_of_their_sections(folder, tmp_path):
    data = SectionData(**folder, headings="Plot, Cast", min_length=4, max_length=10, tokens_per_batch=40)
    task = opened(data, tmp_path / "run").task
    assert task.labels == ("Plot", "Cast")
    sequences = data.load("validation")
    spelled = [(bytes((one.sequences[0] - 1).astype(np.uint8)).decode(), one.label) for one in sequences]
    assert spelled[:5] == [
        ("VALID aaaa", "Plot"),
        (" bbbb cccc", "Plot"),
        (" dddd", "Plot"),
        ("VALID aaaa", "Cast"),
        (" bbbb cccc", "Cast"),
    ]
    example = task.encode(sequences)[4]
    assert example["tokens"].tolist() == byte_ids(" bbbb cccc").tolist()
    assert (example["tokens"].dtype, example["label"]) == (np.int32, 1)
    with pytest.raises(UserError, match=r"valid\.txt\.gz has no passage of .*min_length=80 bytes"):
        SectionData(**folder, headings="Plot,Cast", min_length=80, max_length=90).load("validation")


def test_pairs_are_of_the_articles_of_their_split(folder, tmp_path):
    data = PassagePairData(**folder, num_train=60, num_heldout=40, min_length=5, max_length=8, tokens_per_batch=64)
    run = opened(data, tmp_path / "run")
    assert (run.task.labels, run.task.model_config.num_sequences) == (("different", "same"), 2)
    texts = {letter: title for title, body in WORDS.items() for letter in body.replace(" ", "")}
    for split, count in (("train", 60), ("validation", 40)):
        pairs = data.load(split)
        assert collections.Counter(pair.label for pair in pairs) == {"different": count // 2, "same": count // 2}
        for pair in pairs:
            sides = [bytes((side - 1).astype(np.uint8)).decode() for side in pair.sequences]
            titles = [{texts[letter] for letter in side if letter in texts} for side in sides]
            assert all(len(found) == 1 for found in titles)
            assert (titles[0] == titles[1]) == (pair.label == "same")
            assert not any(other in side for other in {"TRAIN", "VALID"} - {split[:5].upper()} for side in sides)
    iterator = iter(run.train_data(make_mesh(data=1)))
    assert {name: array.shape for name, array in next(iterator).items()} == {
        "tokens": (8, 8),
        "other_tokens": (8, 8),
        "label": (8,),
        "row_weights": (8,),
    }
    iterator.close()


def test_devices_that_divide_positions_decide_the_length(tmp_path):
    data = ListOpsData(0, 3, 3, 4, 18, num_train=20, num_heldout=4, tokens_per_batch=80)
    config = ExperimentConfig(LongEncoderConfig(**SMALL), LongRangeConfig(data))
    config.mesh.sequence, config.mesh.data = 4, 2
    run = make_run(validate(config), tmp_path)
    iterator = iter(run.train_data(make_mesh(data=2, sequence=4)))
    assert next(iterator)["tokens"].shape == (4, 20)
    iterator.close()


@pytest.mark.data
@pytest.mark.parametrize(("min_length", "max_length", "sizes"), [(128, 256, (7_819, 869)), (1_000, 4_000, (666, 77))])
def test_there_are_as_many_passages_of_wikitext_as_the_lab_note_says(shared_data, min_length, max_length, sizes):
    files = {"train_file": "train.txt.gz", "validation_file": "valid.txt.gz"}
    lengths = {"min_length": min_length, "max_length": max_length}
    data = SectionData("files", str(shared_data / "wikitext2"), **files, **lengths)
    splits = [data.load(split) for split in ("train", "validation")]
    assert tuple(map(len, splits)) == sizes
    assert {one.label for split in splits for one in split} == {*data.labels}
    train, validation = ({one.sequences[0].tobytes() for one in split} for split in splits)
    assert len(train & validation) == (2 if max_length == 256 else 0)  # two articles on the Boat Race begin alike


def test_what_the_model_says_is_scored(tmp_path):
    task = opened(ListOpsData(0, 3, 3, 4, 16, num_train=8, num_heldout=30, tokens_per_batch=64), tmp_path).task
    metrics, summary = task.evaluate(Told(lambda batch: (batch["label"], batch["label"])))
    macro_f1 = pytest.approx(10 * len({*references(task)}))
    assert metrics == {"accuracy": 100, "macro_f1": macro_f1, "balanced_accuracy": 100, "matthews_correlation": 100}
    assert summary.endswith(", 30 texts")
    metrics, _ = task.evaluate(Told(lambda batch: (0 * batch["label"], batch["label"])))
    assert metrics["accuracy"] == pytest.approx(100 * references(task).count("0") / 30)


def references(task):
    return [one.label for one in task.config.splits()["validation"]]


def test_the_loss_is_that_of_the_labels_and_counts_tokens_of_both_sides(expected_loss_of_rows):
    logits = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    batch = {
        "tokens": np.array([[1, 2, 3], [4, 0, 0], [0, 0, 0]], np.int32),
        "other_tokens": np.array([[5, 0, 0], [6, 7, 0], [0, 0, 0]], np.int32),
        "label": np.array([3, 1, 0], np.int32),
        "row_weights": np.array([1, 1, 0], np.float32),
    }
    output = jax.jit(lambda batch: long_range_loss(lambda *sides, rngs: logits[:, : 2 * len(sides)], batch, None))(
        batch
    )
    assert float(output.num_tokens) == 7
    assert float(output.weight) == 2
    np.testing.assert_allclose(output.loss, expected_loss_of_rows(logits, batch["label"], 2), rtol=1e-5)


@pytest.fixture
def expected_loss_of_rows():
    """The cross entropy of the first rows in float64."""

    def expect(logits, labels, count):
        logits = logits.astype(np.float64)
        return sum(np.log(np.exp(logits[row]).sum()) - logits[row, labels[row]] for row in range(count))

    return expect


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ListOpsData(min_length=30, max_length=20), r"min_length=30 must be at most config\.task\.data\.max_length=20"),
        (
            ListOpsData(tokens_per_batch=99),
            r"tokens_per_batch=99 must be at least max_length=2000, the size of one sequence",
        ),
        (SectionData(dataset="files", headings="Plot"), r"headings='Plot' must be at least two different headings"),
        (SectionData(dataset="files", headings="A,B,A"), r"headings='A,B,A' must be at least two different headings"),
    ],
)
def test_what_does_not_go_together_is_one_line(data, message):
    with pytest.raises(UserError, match=message) as raised:
        validate(ExperimentConfig(LongEncoderConfig(**SMALL), LongRangeConfig(data)))
    assert "\n" not in str(raised.value)


def test_articles_that_are_too_few_are_one_line(folder):
    with pytest.raises(
        UserError,
        match=r"valid\.txt\.gz has 0 articles of at least two passages, but at least two such articles are needed",
    ):
        PassagePairData(**folder, min_length=80, max_length=90).load("validation")


@pytest.mark.slow
def test_a_training_learns_and_its_workdir_gives_it_back(tmp_path):
    """Lists of two digits under four operators: who guesses has a tenth."""
    config = tiny_variant(ExperimentConfig(LongEncoderConfig(), LongRangeConfig()))
    data = config.task.data
    data.max_depth, data.max_args, data.min_length, data.max_length, data.tokens_per_batch = 2, 2, 4, 4, 256
    data.num_train = data.num_heldout = 256
    config.model.d_model, config.model.d_ff, config.model.dropout_rate = 32, 64, 0.0
    config.optimizer.warmup_steps, config.optimizer.peak_learning_rate = 20, 5e-3
    config.num_steps, config.checkpoint_every, config.log_every, config.mesh.data = 400, 400, 100, 1
    (evaluation,) = train(config, tmp_path).evaluations
    assert evaluation["accuracy"] > 40
    run = load_run(tmp_path)
    params = load_params(tmp_path)
    assert run.evaluate(params).metrics["accuracy"] == evaluation["accuracy"]
    sequences = run.task.config.splits()["validation"][:5]
    logits = jax.jit(lambda tokens: nnx.merge(run.graphdef, params)(tokens))(
        np.stack([one.sequences[0] for one in sequences]).astype(np.int32)
    )
    assert run.task.predict(run.trained(params), sequences) == [str(index) for index in logits.argmax(axis=-1)]
