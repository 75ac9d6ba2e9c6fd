"""Rows of words for an ELMo: what each predicts on either side, epochs that differ, and whole trainings."""

import itertools
import math
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.errors import UserError
from tfx_jax.models.elmo import CharacterConfig, ElmoConfig
from tfx_jax.tasks.text.bidirectional_language_modeling import BidirectionalLanguageModelConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.word_characters import word_rows
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import make_run
from tfx_jax.training.sharding.strategies import make_mesh

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "elmo_wikitext2.py"
TEXT = "a bb a\n\n   \ncäsar bb a unheardof\n\tbb \n"
# The sentences with their marks; what is rarer than the three most frequent words is unknown.
STREAM = ["|", "a", "bb", "a", "|", "cäsar", "bb", "a", "unheardof", "|", "bb", "|"]
KNOWN = {"|": 0, "a": 2, "bb": 3, "cäsar": 4}


def tiny_config(folder, **data):
    characters = CharacterConfig(3, (1, 2), (4, 3), 1)
    model = ElmoConfig(5, 8, characters, 2, 6, 4)
    options = {"tokenizer": "words", "max_length": 4, "tokens_per_batch": 8} | data
    task = BidirectionalLanguageModelConfig(
        TextData("files", str(folder), "train.txt", "validation.txt", documents="lines", **options)
    )
    return validate(ExperimentConfig(model, task))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text(TEXT)
    (folder / "validation.txt").write_text("bb a new\n")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return make_run(tiny_config(folder), folder / "workdir")


def words_of(examples):
    """Each word that is read, with the targets of both directions, row by row."""
    names = {"".join(map(chr, row)): word for word, row in zip(KNOWN, word_rows([*KNOWN], 8), strict=True)}
    names["".join(map(chr, word_rows(["unheardof"], 8)[0]))] = "unheardof"
    names["".join(map(chr, [257, 259, 258, 0, 0, 0, 0, 0]))] = "|"
    return [
        [
            (names["".join(map(chr, characters))], *targets.tolist())
            for characters, targets in zip(example["characters"], example["targets"], strict=True)
        ]
        for example in examples
    ]


def expected_words(stream):
    ids = [KNOWN.get(word, 1) for word in stream]
    return [(stream[place], ids[place + 1], ids[place - 1]) for place in range(1, len(stream) - 1)]


def test_each_word_predicts_the_next_and_the_one_before(run):
    blocks = run.task.make_blocks("train")
    assert [run.task.tokenizer.encode(word) for word in ("a", "bb", "cäsar", "new")] == [[2], [3], [4], [1]]
    examples = [blocks[index] for index in range(len(blocks))]
    rows = words_of(examples)
    assert [len(row) for row in rows] == [4, 4, 2] == blocks.lengths.tolist()
    assert [*itertools.chain(*rows)] == expected_words(STREAM)
    assert {(name, array.dtype.name) for row in examples for name, array in row.items()} == {
        ("characters", "int32"),
        ("targets", "int32"),
        ("token_mask", "bool"),
    }
    for epoch in range(9):
        cut = run.task.make_epochs(seed=3)(epoch)
        found = [*itertools.chain(*words_of([cut[index] for index in range(len(cut))]))]
        assert found == expected_words(STREAM[len(STREAM) - 2 - len(found) :])
        assert epoch or len(found) == len(STREAM) - 2
    assert len({len(run.task.make_epochs(seed=3)(epoch).lengths) for epoch in range(9)}) > 1


def test_words_are_bytes_that_are_cut_to_the_width():
    rows = word_rows(["unheardof", "", "é"], 8)
    assert rows[0].tolist() == [257, *(code + 1 for code in b"unhear"), 258]
    assert rows[1].tolist() == [257, 258, 0, 0, 0, 0, 0, 0]
    assert rows[2].tolist() == [257, 0xC3 + 1, 0xA9 + 1, 258, 0, 0, 0, 0]
    assert rows.dtype == np.int32


def test_evaluation_is_that_of_the_logits(run, draw_model):
    """Of one sentence in one row, word by word from either side."""
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    metrics, summary = run.evaluate(params)
    (row,) = [run.task.make_blocks("validation")[0]]
    logits = jax.jit(nnx.merge(run.graphdef, jax.device_put(params)).__call__)(row["characters"][None])
    scores = log_softmax(np.asarray(logits, np.float64)[0], axis=-1)
    ids = [0, 3, 2, 1, 0]  # | bb a new |
    loss = -np.mean([scores[t, side, ids[t + 2 - 2 * side]] for t in range(3) for side in (0, 1)])
    assert metrics == {"loss": pytest.approx(loss, rel=1e-5), "perplexity": pytest.approx(math.exp(loss), rel=1e-4)}
    assert summary.endswith(" 3 tokens")


def test_batches_are_padded(run):
    iterator = iter(run.train_data(make_mesh(data=1)))
    batches = [next(iterator) for _ in range(6)]
    iterator.close()
    assert {batch["characters"].shape for batch in batches} == {(2, 4, 8)}
    mask = np.concatenate([batch["token_mask"] for batch in batches])
    assert not mask.all()
    assert not np.concatenate([batch["characters"] for batch in batches])[~mask].any()


def test_text_and_tokenizer_that_do_not_fit_are_refused(folder, tmp_path):
    (tmp_path / "train.txt").write_text("a b\n")
    (tmp_path / "validation.txt").write_text("\n \n")
    run = make_run(tiny_config(tmp_path), tmp_path / "workdir")
    with pytest.raises(UserError, match=r"^the validation split has no text, only blank lines: name another file$"):
        run.evaluate(nnx.to_pure_dict(nnx.state(nnx.eval_shape(run.make_model))))
    with pytest.raises(UserError, match=r'^config\.task\.data\.tokenizer must be "words" for ELMo, got \'bpe\'$'):
        tiny_config(folder, tokenizer="bpe")


@pytest.mark.slow
def test_training_learns_on_the_command_line(tmp_path, capsys):
    workdir = str(tmp_path / "run")
    changes = ["task.data.max_length=8", "mesh.data=1", "optimizer.peak_learning_rate=0.02", "optimizer.warmup_steps=5"]
    overrides = [
        f"--config.{change}"
        for change in (*changes, "num_steps=60", "eval_every=20", "checkpoint_every=60", "log_every=20")
    ]
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={workdir}", *overrides]) == 0
    printed = re.findall(r"step \d+: validation loss ([\d.]+) nats", capsys.readouterr().err)
    first, _, last = map(float, printed)
    assert last < first - 0.2
    assert evaluate_cli.run([f"--workdir={workdir}"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"loss: {last:.4f} nats"
