"""Duplication in the trainer: what it reads, what it learns, and a model evaluated with another attention."""

import json

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx

from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.models import GPTConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.tasks.sequence.duplication import DuplicationConfig, DuplicationTask
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, load_config, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

LENGTH = 16


def tiny_config(**attention):
    config = tiny_variant(ExperimentConfig(GPTConfig(), DuplicationConfig()))
    config.task.data.num_symbols = 12
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    config.model.attention = AttentionConfig(**attention)
    config.mesh.data = 1
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.02, 20
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that has learned it, with dense attention, and one of before that has not."""
    workdir = tmp_path_factory.mktemp("work")
    config = tiny_config()
    config.num_steps, config.checkpoint_every = 102, 34
    return workdir, train(config, workdir)


def evaluate_with(workdir, name, split="validation", **options):
    """As the lab note of `experiments/gpt_duplication.py` has it."""
    config = load_config(epath.Path(workdir))
    config.model.attention = AttentionConfig(name, AttentionOptions(**options))
    run = make_run(validate(config), workdir, can_make=False)
    return run.evaluate(load_params(workdir), split).metrics


@pytest.mark.slow
def test_training_learns(trained):
    _, result = trained
    (evaluation,) = result.evaluations
    assert evaluation["accuracy"] > 90  # 8.3 by chance, 100 of the best
    assert evaluation["loss"] < 0.5
    assert 0 < evaluation["exact_match"] <= evaluation["accuracy"]


@pytest.mark.slow
def test_evaluation_counts_each_symbol_and_each_sequence(trained):
    """Against the logits themselves, one sequence at a time; and `predict` names the same symbols."""
    workdir, _ = trained
    run = load_run(workdir, DuplicationTask)
    assert run.task.model_config.vocab_size == 13
    params = load_params(workdir, 34)
    logits_fn = jax.jit(nnx.merge(run.graphdef, jax.device_put(params)).__call__)
    sequences = run.task.eval_examples("validation")
    said, words, nll = [], [], 0.0
    for index in range(len(sequences)):
        tokens = sequences[index]["inputs"]
        logits = np.asarray(logits_fn(tokens[None])[0], np.float64)[LENGTH // 2 : LENGTH - 1]
        words.append(tokens[LENGTH // 2 + 1 :].tolist())
        said.append(logits.argmax(axis=-1).tolist())
        nll += (np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(logits)), words[-1]]).sum()
    right = np.array(said) == np.array(words)
    expected = {"accuracy": 100 * right.mean(), "exact_match": 100 * right.all(axis=1).mean(), "loss": nll / right.size}
    assert 0 < expected["exact_match"] < expected["accuracy"] < 100  # or nothing would be told apart
    assert run.evaluate(params).metrics == pytest.approx(expected, rel=1e-5)
    assert run.task.predict(run.trained(params), words) == said
    for word in ([1] * 6, [13] * 7, [0] * 7):
        with pytest.raises(UserError, match=r"a word must have 7 symbols from 1 to 12, got"):
            run.task.encode([word])


def test_splits_differ_and_evaluation_does_not_depend_on_the_seed(tmp_path):
    config = tiny_config()
    firsts = {}
    for seed in (0, 1):
        config.seed = seed
        run = make_run(config, tmp_path)
        iterator = iter(run.train_data(make_mesh(1)))
        batches = [next(iterator) for _ in range(8)]  # two epochs
        iterator.close()
        rows = [tuple(row) for batch in batches for row in batch["inputs"].tolist()]
        assert [batch["inputs"].shape for batch in batches] == [(LENGTH, LENGTH)] * 8
        assert len(set(rows)) == len(rows) == 128
        kept = {split: run.task.eval_examples(split)[0]["inputs"].tolist() for split in ("validation", "test")}
        assert kept["validation"] != kept["test"]
        firsts[seed] = set(rows), kept
    assert not firsts[0][0] & firsts[1][0]
    assert firsts[0][1] == firsts[1][1]


def test_evaluate_prints_a_line_for_each_score(trained, capsys):
    workdir, result = trained
    (last,) = result.evaluations
    assert main(["evaluate", f"--workdir={workdir}", "--step=latest"]) == 0
    lines = [f"accuracy: {last['accuracy']:.2f} %", f"exact match: {last['exact_match']:.2f} %"]
    assert capsys.readouterr().out.splitlines() == [*lines, f"loss: {last['loss']:.4f} nats"]
    assert main(["evaluate", f"--workdir={workdir}", "--split=test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"accuracy", "exact_match", "loss"}
    assert found != pytest.approx({name: last[name] for name in found})


def test_a_model_is_evaluated_with_another_attention(trained):
    """Equal where the other is exact; nearly by chance where it does not reach the first half."""
    workdir, result = trained
    expected = {name: value for name, value in result.evaluations[0].items() if name != "step"}
    before = (workdir / "config.json").read_bytes()
    assert evaluate_with(workdir, "chunked", chunk_size=4) == pytest.approx(expected, rel=1e-4)
    assert evaluate_with(workdir, "window", window=2)["accuracy"] < 30
    assert (workdir / "config.json").read_bytes() == before
    with pytest.raises(UserError, match="window attention needs"):
        evaluate_with(workdir, "window")


def test_lsh_that_finds_every_key_is_full_attention_of_shared_queries_and_keys(trained):
    """One bucket and one chunk, whatever the hashes are: the column "full attention" for a model trained with LSH."""
    workdir, result = trained
    full = [
        evaluate_with(workdir, "lsh", num_hashes=rounds, num_buckets=1, chunk_size=LENGTH, seed=rounds)
        for rounds in (1, 2)
    ]
    assert full[0] == pytest.approx(full[1], rel=1e-4)
    assert full[0]["loss"] > result.evaluations[0]["loss"] + 0.5  # the keys that dense attention learned are not read
