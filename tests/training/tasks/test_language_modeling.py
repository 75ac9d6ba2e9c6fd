"""Language models in the trainer: what they read, what evaluation says, and what can be done with a workdir."""

import io
import json
import math
import re
import sys
import types
from typing import Any
from unittest import mock

import chex
import huggingface_hub
import jax
import numpy as np
import pytest
from flax import nnx

from tests.data.tokenizers_made_here import make_tokenizer
from tests.tiers import slow_but
from tfx_jax.cli import main
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.data.tokenizers.train import train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, hf
from tfx_jax.tasks import prediction
from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig
from tfx_jax.tasks.text.classification import ClassificationConfig
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig, LanguageModelTask
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.token_prediction import token_stream
from tfx_jax.training import run as run_module
from tfx_jax.training.checkpoint.checkpoints import best_or_latest_step, load_params
from tfx_jax.training.config import ExperimentConfig, load_config, tiny_variant, validate
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh, state_shardings

TEXT = "\n".join(f"{word} and {other} ." for word in "abcdefgh" for other in "qrstuvwxyz") + "\n"


def tiny_config(**data):
    config = tiny_variant(ExperimentConfig(model=GPTConfig(), task=LanguageModelConfig()))
    for name, value in {"tokenizer": "characters", "max_length": 16, **data}.items():
        setattr(config.task.data, name, value)
    config.model.max_length = 16
    config.model.use_bias = False  # as in nanoGPT; a folder has zeros instead
    config.mesh.data = 1
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 2
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A training of a few steps on text in a file, whose last fifth is for validation."""
    workdir = tmp_path_factory.mktemp("work")
    config = tiny_config(dataset="files", data_dir=str(folder), train_file="text.txt", validation_share=0.2)
    config.num_steps, config.eval_every, config.checkpoint_every = 12, 6, 6
    return workdir, train(config, workdir)


def test_training_learns_and_evaluates(trained):
    workdir, result = trained
    first, last = result.evaluations
    assert first["step"] == 6
    assert last["loss"] < first["loss"] < math.log(40)
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    report = (workdir / "report.md").read_text()
    assert f"| 12 | **{last['loss']:.4f} nats** | {last['perplexity']:.2f} |" in report
    assert "Tokens seen" in report


def test_evaluation_is_the_mean_over_all_tokens(trained):
    """Against the logits themselves: rows of 16, of which the last is short, each token but the first once."""
    workdir, result = trained
    run = load_run(workdir, LanguageModelTask)
    params = load_params(workdir)
    ids = np.array(run.task.tokenizer.encode(TEXT[int(len(TEXT) * 0.8) :]))
    logits_fn = jax.jit(nnx.merge(run.graphdef, jax.device_put(params)).__call__)
    total = 0.0
    for start in range(0, len(ids) - 1, 16):
        inputs, targets = ids[start : start + 16][: len(ids) - 1 - start], ids[start + 1 : start + 17]
        row = np.pad(inputs, (0, 16 - len(inputs)))[None].astype(np.int32)  # what follows is not seen
        logits = np.asarray(logits_fn(row)[0], np.float64)[: len(inputs)]
        log_z = np.log(np.exp(logits).sum(axis=-1))
        total += (log_z - logits[np.arange(len(targets)), targets]).sum()
    assert result.evaluations[-1]["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert run.evaluate(params).metrics == {
        name: value for name, value in result.evaluations[-1].items() if name != "step"
    }


def test_evaluation_of_packed_documents_is_that_of_each_alone(folder, tmp_path):
    config = tiny_config(dataset="files", data_dir=str(folder), train_file="text.txt", documents="lines")
    config.task.data.validation_share, config.task.is_packed = 0.2, True
    config.num_steps = config.checkpoint_every = 4
    result = train(config, tmp_path)
    run = load_run(tmp_path, LanguageModelTask)
    logits_fn = jax.jit(nnx.merge(run.graphdef, jax.device_put(load_params(tmp_path))).__call__)
    tokenizer = run.task.tokenizer
    losses = []
    for line in TEXT.removesuffix("\n").split("\n")[-16:]:
        ids = np.array([*tokenizer.encode(line), tokenizer.eos_id], np.int32)
        logits = np.asarray(logits_fn(np.pad(ids[:-1], (0, 17 - len(ids)))[None])[0], np.float64)[: len(ids) - 1]
        losses += list(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(ids) - 1), ids[1:]])
    assert result.evaluations[-1]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_validation_is_the_end_of_the_text_and_nothing_else(folder):
    config = tiny_config(dataset="files", data_dir=str(folder), train_file="text.txt", validation_share=0.2)
    splits = config.task.splits()
    (train_text,), (validation,) = splits["train"], splits["validation"]
    assert train_text + validation == TEXT
    assert len(validation) == math.ceil(len(TEXT) * 0.2)
    config.task.data.documents = "lines"
    lines = config.task.splits()
    assert [*lines["train"], *lines["validation"]] == TEXT.removesuffix("\n").split("\n")
    assert len([*lines["validation"]]) == 16


def test_several_files_are_read_in_their_order_and_divided_as_one(folder):
    """Between files, which are documents, is an end; a share of them all is for validation."""
    for name, text in {"b-1.txt": "one two\n", "b-2.txt": "three\n", "b-3.txt": "four five six\n"}.items():
        (folder / name).write_text(text)
    data = TextData("files", str(folder), "b-*.txt", validation_share=0.5)
    found = [["".join(document) for document in data.load(split).by_document()] for split in ("train", "validation")]
    assert found == [["one two\n", "three\n"], ["four five six\n"]]
    data.validation_share = 0.25
    assert ["".join(document) for document in data.load("validation").by_document()] == ["ve six\n"]
    data.validation_share, data.train_file, data.documents = 0.0, "b-3.txt, b-1.txt", "lines"
    assert [*data.load("train")] == ["four five six", "one two"]
    data.documents = "file"
    tokenizer = make_tokenizer(["one two three four five six"], "words")
    stream = token_stream(tokenizer, data.load("train"), documents="file")
    assert tokenizer.pieces(stream) == ["four", "five", "six", "</s>", "one", "two"]
    with pytest.raises(UserError, match=r"no file matches .*c-\*\.txt$"):
        TextData("files", str(folder), "b-1.txt,c-*.txt").load("train")


@pytest.mark.parametrize("is_packed", [False, True])
def test_batches_hold_the_text(folder, tmp_path, is_packed):
    documents = "lines" if is_packed else "file"
    config = tiny_config(dataset="files", data_dir=str(folder), train_file="text.txt", documents=documents)
    config.task.is_packed = is_packed
    run = make_run(config, tmp_path)
    mesh = make_mesh()
    iterator = iter(run.train_data(mesh))
    eos = run.task.tokenizer.eos_id
    ids = run.task.tokenizer.encode(TEXT)
    lines = {tuple(run.task.tokenizer.encode(line)) for line in TEXT.removesuffix("\n").split("\n")}
    for _ in range(30):  # some epochs
        batch = next(iterator)
        rows, length = batch["inputs"].shape
        assert (rows % mesh.size, rows * length <= config.task.data.tokens_per_batch, length) == (0, True, 16)
        for row in range(rows):
            inputs, targets, weights = (batch[name][row] for name in ("inputs", "targets", "weights"))
            if not is_packed and weights.any():
                stream = [*inputs[:1].tolist(), *targets.tolist()]
                assert any(ids[at : at + 17] == stream for at in range(len(ids)))
                np.testing.assert_array_equal(inputs[1:], targets[:-1])
            if is_packed:
                segments = batch["segment_ids"][row]
                for segment in range(1, segments.max() + 1):
                    (*document, end) = inputs[segments == segment].tolist()
                    assert (tuple(document) in lines, end) == (True, eos)
                    assert weights[segments == segment].tolist() == [1.0] * len(document) + [0.0]
    iterator.close()


def test_a_stream_is_cut_elsewhere_in_each_epoch(folder, tmp_path):
    task = make_run(tiny_config(dataset="files", data_dir=str(folder), train_file="text.txt"), tmp_path).task
    cut = task.make_epochs(0)
    firsts = [cut(epoch)[0]["inputs"].tolist() for epoch in range(5)]
    assert firsts[0] == task.tokenizer.encode(TEXT)[:16]
    assert len(set(map(tuple, firsts))) > 2
    assert firsts == [cut(epoch)[0]["inputs"].tolist() for epoch in range(5)]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_mixture_has_its_shares_of_each_file(tmp_path, is_packed):
    """Rows of "a" and rows of "b": an epoch has three of the one for each of the other, and resumes bit for bit."""
    for name, count in (("a", 40), ("b", 90)):
        (tmp_path / f"{name}.txt").write_text((f"{name}" * 15 + "\n") * count)
    documents = "lines" if is_packed else "file"
    config = tiny_config(dataset="files", data_dir=str(tmp_path), train_file="a.txt, b.*", documents=documents)
    config.task.is_packed, config.task.mixture = is_packed, (3, 1.0)
    task = make_run(validate(config), tmp_path / "work").task
    letter = task.tokenizer.encode("a")[0]
    for epoch in range(3):
        rows = task.make_epochs(0)(epoch)
        sources = ["ba"[letter in row["inputs"]] for row in (rows[index] for index in range(len(rows)))]
        # A third of an example is left over in each epoch of 40: the third one has it.
        expected = (40, 14 if epoch == 2 else 13) if is_packed else (39, 13)
        assert (sources.count("a"), sources.count("b")) == expected
    for values, message in (
        (
            {"mixture": (1.0,)},
            r"config\.task\.mixture=\(1\.0,\) must have one number above 0 for each of the 2 entries",
        ),
        ({"mixture": (1.0, 0.0)}, "must have one number above 0"),
        ({"mixture": (1.0, 2.0), "share": 0.5}, "must not both be set: set validation_file"),
    ):
        config.task.mixture, config.task.data.validation_share = values["mixture"], values.get("share", 0.0)
        with pytest.raises(UserError, match=message):
            validate(config)


def test_conversations_in_lines_and_in_parquet_are_the_same(tmp_path):
    """The chat template is that of the tokenizer, which the workdir keeps; batches resume bit for bit."""
    arrow = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    pytest.importorskip("jinja2", reason="needs jinja2")
    conversations = [
        [{"role": "user", "content": f"ask {number}"}, {"role": "assistant", "content": f"reply {number}"}]
        for number in range(30)
    ]
    lines = [json.dumps({"messages": messages, "id": number}) for number, messages in enumerate(conversations)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
    arrow.write_table(sys.modules["pyarrow"].table({"messages": conversations}), tmp_path / "talk.parquet")
    base = tmp_path / "base"
    tokenizer = train_or_load_folder(base, lambda: lines, kind="bpe", family="gpt", vocab_size=300)
    (base / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    sizes = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, d_model=8, num_heads=2, max_length=64)
    fields = {"architectures": ["GPT2LMHeadModel"], **hf.FAMILIES["GPT2LMHeadModel"].write_config(sizes)}
    (base / "config.json").write_text(json.dumps(fields))  # no parameters are needed to read data
    tasks = {}
    for name in ("talk.jsonl", "talk.parquet"):
        config = tiny_config(
            dataset="files", data_dir=str(tmp_path), train_file=name, validation_file=name, documents="messages"
        )
        config.init_from, config.task.is_packed = str(base), True
        config.task.data.max_length = config.model.max_length = 64
        config = validate(adopt_pretrained_config(config))
        run = make_run(config, tmp_path / f"{name}.work")
        tasks[name] = run.task
    rows, others = (task.make_epochs(0)(0) for task in tasks.values())
    assert len(rows) == len(others) == len(tasks["talk.jsonl"].make_eval_examples("validation"))
    replies = []
    for index in range(len(rows)):
        row = rows[index]
        chex.assert_trees_all_equal(row, others[index])
        replies += tokenizer.decode(row["targets"][row["weights"] > 0].tolist()).split("\n")
    assert sorted(filter(None, replies)) == sorted(f"reply {number}" for number in range(30))
    assert (tmp_path / "talk.jsonl.work" / "tokenizer" / "chat_template.jinja").exists()

    mesh = make_mesh(data=1)
    iterator, resumed = (iter(run.train_data(mesh)) for _ in range(2))
    next(iterator)
    resumed.set_state(iterator.get_state())
    for _ in range(4):
        chex.assert_trees_all_equal(next(iterator), next(resumed))
    iterator.close()
    resumed.close()


def test_there_is_no_picture_of_the_json_of_conversations():
    splits = {"validation": ['{"messages": [{"role": "user", "content": "the dog runs"}]}']}
    for template, count in ((None, 1), (object(), 0)):
        task: Any = types.SimpleNamespace(_template=template, _splits=splits)
        assert len([*LanguageModelTask.attention_inputs(task)]) == count


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        (GPTConfig, LanguageModelConfig, r'data\.documents="messages" needs config\.task\.is_packed=True$'),
        (
            BertConfig,
            BertPretrainingConfig,
            r'data\.documents="messages" is for language modeling only: choose other documents$',
        ),
    ],
)
def test_conversations_that_a_task_cannot_read(model, task, message):
    config = tiny_variant(ExperimentConfig(model=model(), task=task()))
    config.task.data.dataset, config.task.data.documents = "files", "messages"
    with pytest.raises(UserError, match=message):
        validate(config)


def test_conversations_are_read_from_files():
    config = tiny_variant(ExperimentConfig(model=GPTConfig(), task=LanguageModelConfig()))
    config.task.data.dataset, config.task.data.documents, config.task.is_packed = "grammar", "messages", True
    with pytest.raises(UserError, match=r'documents="messages" needs config\.task\.data\.dataset="files", got '):
        validate(config)


def test_conversations_need_a_model_with_a_template(tmp_path):
    (tmp_path / "talk.jsonl").write_text('[{"role": "user", "content": "a"}]\n')
    config = tiny_config(dataset="files", data_dir=str(tmp_path), train_file="talk.jsonl", documents="messages")
    config.task.is_packed = True
    with pytest.raises(UserError, match=r'documents="messages" needs config\.init_from, a model with a chat template'):
        make_run(validate(config), tmp_path / "work")


def test_generate_goes_on_with_a_workdir(trained, monkeypatch, capsys):
    workdir, _ = trained

    def generate(*options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a and\nb\n")))
        status = main(["generate", *options])
        return status, *capsys.readouterr()

    status, out, _ = generate(f"--workdir={workdir}", "--max-new-tokens=4", "--temperature=0")
    assert status == 0
    assert [line[:5] for line in out.splitlines()] == ["a and", "b" + out.splitlines()[1][1:5]]
    for options, message in (
        ([], "give exactly one of --model=FOLDER and --workdir=FOLDER"),
        (["--model=x", f"--workdir={workdir}"], "give exactly one of --model=FOLDER and --workdir=FOLDER"),
        (["--model=x", "--step=3"], "--step needs --workdir: it chooses a checkpoint of a training run"),
        ([f"--workdir={workdir}", "--step=7"], "has no checkpoint of step 7; there are 6, 12"),
    ):
        status, _, err = generate(*options)
        assert (status, message in err, err.count("\n")) == (2, True, 1)


def test_evaluate_prints_a_line_for_each_score(trained, capsys):
    workdir, result = trained
    last = result.evaluations[-1]
    assert main(["evaluate", f"--workdir={workdir}", "--step=latest"]) == 0
    assert capsys.readouterr().out == f"loss: {last['loss']:.4f} nats\nperplexity: {last['perplexity']:.2f}\n"
    assert main(["evaluate", f"--workdir={workdir}", "--step=latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: last[name] for name in ("loss", "perplexity")}
    assert main(["evaluate", f"--workdir={workdir}", "--beam=2"]) == 2
    assert "--beam needs a translation model" in capsys.readouterr().err
    assert main(["translate", f"--workdir={workdir}"]) == 2
    assert "but a translation task or a parsing task is required" in capsys.readouterr().err


def test_convert_writes_a_folder_of_a_workdir(trained, tmp_path, capsys):
    workdir, _ = trained
    assert main(["convert", f"--workdir={workdir}", f"--output={tmp_path}/out", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["bytes_before"]) == ("GPT2LMHeadModel", None)
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.pipeline_tag, card.data.license, card.data.base_model) == ("text-generation", None, None)
    report = (workdir / "report.md").read_text()
    for title in ("Evaluations on the validation split", "How to repeat it"):
        (section,) = [part for part in report.split("\n## ") if part.startswith(title)]
        assert f"## {re.sub('/[^ `]+/', '', section).rstrip()}\n" in card.text  # without folders
    assert "text.txt` | 800 bytes" in card.text
    assert f"Weights: `GPT2LMHeadModel`, {found['parameters']:,} parameters, float32." in card.text
    assert f"checkpoint: step {best_or_latest_step(workdir):,}." in card.text
    assert "## Configuration" not in card.text
    assert str(tmp_path) not in card.text
    run = load_run(workdir, LanguageModelTask)
    model = nnx.merge(run.graphdef, jax.device_put(load_params(workdir, "best")))
    again = hf.load(tmp_path / "out")
    tokens = np.arange(12, dtype=np.int32)[None]
    np.testing.assert_array_equal(jax.jit(again)(tokens), jax.jit(model)(tokens))
    assert hf.end_ids(tmp_path / "out") == (run.task.tokenizer.eos_id,)
    assert load_folder_tokenizer(tmp_path / "out").encode("a and q .") == run.task.tokenizer.encode("a and q .")


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", slow_but([False, True], False))
def test_a_training_starts_from_another(trained, tmp_path, capsys, is_folder):
    """Its first loss is the last of the other; sizes and tokenizer are the other's, dropout is its own."""
    source, _ = trained
    if is_folder:
        assert main(["convert", f"--workdir={source}", f"--output={tmp_path}/folder", "--step=latest"]) == 0
        source = tmp_path / "folder"
    config = load_config(trained[0])
    config.init_from, config.model = str(source), GPTConfig(dropout_rate=0.0, attention_dropout_rate=0.0)
    config.optimizer.peak_learning_rate = 1e-30
    config.num_steps = config.eval_every = 1
    result = train(config, tmp_path / "work")
    assert result.evaluations[0]["loss"] == pytest.approx(trained[1].evaluations[-1]["loss"], rel=1e-6)
    saved = load_config(tmp_path / "work")
    assert (saved.model.d_model, saved.model.num_layers, saved.model.dropout_rate) == (32, 1, 0.0)
    names = (tmp_path / "work" / "tokenizer").iterdir()
    assert {path.name for path in names} == {"tokenizer.json", "tokenizer_config.json"}
    assert f"starts from {source}: " in capsys.readouterr().err
    capsys.readouterr()
    config.num_steps = 2  # goes on from its own checkpoint
    assert train(config, tmp_path / "work").step == 2
    assert "resuming at step 1" in capsys.readouterr().err


def test_what_a_training_cannot_start_from(trained, tmp_path):
    config = tiny_config()
    for source, message in (
        (str(tmp_path), "is neither the workdir of a run nor a Hugging Face folder"),
        (str(trained[0]), "has a GPTConfig, but the experiment has a BertConfig"),
    ):
        config.init_from = source
        if "GPTConfig" in message:
            config = tiny_variant(ExperimentConfig(model=BertConfig(), task=ClassificationConfig()))
            config.init_from = source
        with pytest.raises(UserError, match=message):
            train(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_mistakes_are_one_line(folder, tmp_path, trained):
    config = tiny_config(dataset="files", data_dir=str(folder), train_file="no.txt")
    with pytest.raises(UserError, match=r"no\.txt does not exist"):
        train(config, tmp_path / "work")
    config = tiny_config(dataset="files", data_dir=str(folder), train_file="text.txt")
    config.eval_every = 2
    with pytest.raises(UserError, match=r"eval_every and config\.patience need a validation split"):
        train(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()
    with pytest.raises(UserError, match=r"config\.task\.data\.test_file is not set: the test split needs a file"):
        load_run(trained[0]).evaluate(load_params(trained[0]), "test")


def test_parameters_that_a_mesh_divides_are_evaluated_where_they_are(trained):
    run, params = load_run(trained[0]), load_params(trained[0])
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    divided = jax.device_put(params, state_shardings(params, mesh))
    assert sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(divided)) > 3
    with mock.patch.object(run_module, "to_host", side_effect=AssertionError("no device has room for all of them")):
        metrics, summary = run.evaluate(divided)
    with mock.patch.object(prediction.nnx, "merge", side_effect=AssertionError("traced again")):
        assert run.evaluate(divided) == (metrics, summary)
    expected, _ = run.evaluate(params)
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert summary
