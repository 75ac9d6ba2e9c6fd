"""Tagged sentences become rows and tags of words again; entities are scored; a pre-trained body is taken over."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx

from tests.training.tasks.told import Told, no_answer
from tfx_jax.cli import convert as convert_cli
from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.data.batching.batches import ExampleList
from tfx_jax.data.sources.conll import TaggedSentence
from tfx_jax.errors import UserError
from tfx_jax.metrics.entities import entity_scores
from tfx_jax.models import hf
from tfx_jax.models.bert import BertConfig
from tfx_jax.models.elmo import CharacterConfig, ElmoConfig, ElmoTaggerConfig
from tfx_jax.synthetic.grammar import grammar_documents
from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig
from tfx_jax.tasks.text.bidirectional_language_modeling import BidirectionalLanguageModelConfig
from tfx_jax.tasks.text.tagging import IGNORED, TaggedData, TaggingConfig, TaggingTask, predict_tags
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.word_characters import word_rows
from tfx_jax.training.checkpoint.checkpoints import Checkpoints, load_params
from tfx_jax.training.config import ExperimentConfig, save_config, validate
from tfx_jax.training.init_from import adopt_pretrained_config, init_from_state
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh
from tfx_jax.training.train_setup import make_train_setup

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "bert_wnut17.py"
LABELS = ["O", *(f"{prefix}-{label}" for label in ("animal", "person", "place", "thing", "time") for prefix in "BI")]


def tiny_config(**data):
    model = BertConfig(200, max_length=64, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    task = TaggingConfig(TaggedData(**{"max_length": 16, "tokens_per_batch": 96} | data))
    return validate(ExperimentConfig(model=model, task=task))


def opened(workdir, **data):
    run = make_run(tiny_config(**data), workdir)
    assert type(run.task) is TaggingTask
    return run


def sentences_of(run, split="validation"):
    return run.config.task.splits()[split]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("workdir")


@pytest.fixture(scope="module")
def run(workdir):
    """Words have several pieces, and some sentences are too long."""
    return opened(workdir)


def test_examples_are_words_between_special_tokens(run):
    tokenizer, sentences = run.task.tokenizer, sentences_of(run)
    examples = run.task.encode(sentences)
    assert len(examples) == len(sentences) == 200
    assert list(run.task.labels) == list(run.task.model_config.labels) == LABELS
    cut = 0
    for sentence, example in zip(sentences, examples, strict=True):
        pieces = [tokenizer.encode(word) for word in sentence.words]
        tokens = [token for word in pieces for token in word][:14]
        assert example["tokens"].tolist() == [tokenizer.cls_id, *tokens, tokenizer.sep_id]
        assert {example[name].shape for name in ("targets", "token_mask", "token_type_ids")} == {
            example["tokens"].shape
        }
        assert example["token_mask"].all()
        assert not example["token_type_ids"].any()
        starts = np.cumsum([1, *map(len, pieces[:-1])])
        wanted = {start: tag for start, tag in zip(starts.tolist(), sentence.tags, strict=True) if start < 15}
        found = np.flatnonzero(example["targets"] != IGNORED)
        assert {place: LABELS[example["targets"][place]] for place in found.tolist()} == wanted
        cut += len(wanted) < len(sentence.words)
    assert 20 < cut < 180


def test_what_the_model_says_is_scored(run, workdir):
    sentences = sentences_of(run)
    # Of a sentence that is cut, what was cut off is outside.
    read = [(example["targets"] != IGNORED).sum() for example in run.task.encode(sentences)]
    left = [
        sentence.tags[:count] + ["O"] * (len(sentence.tags) - count)
        for sentence, count in zip(sentences, read, strict=True)
    ]
    best = entity_scores(left, [sentence.tags for sentence in sentences])
    support = sum(tag.startswith("B") for sentence in sentences for tag in sentence.tags)
    assert 50 < best.recall < 99 > best.precision - 1

    def truth(batch):
        return np.where(batch["targets"] == IGNORED, 3, batch["targets"])  # what others say must not count

    metrics, summary = run.task.evaluate(Told(truth))
    assert metrics == {"f1": best.f1, "precision": best.precision, "recall": best.recall}
    assert summary.startswith(f"entity F1 {best.f1:.2f} %, precision ")
    assert summary.endswith(f", {support} entities")
    outside = run.task.evaluate(Told(lambda batch: 0 * batch["targets"]))
    assert outside.metrics == dict.fromkeys(metrics, 0.0)
    roomy = opened(workdir, max_length=64)
    assert max(len(example["tokens"]) for example in roomy.task.encode(sentences)) < 64
    assert roomy.task.evaluate(Told(truth)).metrics == dict.fromkeys(metrics, 100.0)


def test_tags_do_not_depend_on_the_size_of_batches(run, workdir, draw_model):
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    every = [(sentence, example) for sentence in sentences_of(run) for example in run.task.encode([sentence])]
    sentences, examples = zip(*(pair for pair in every if len(pair[1]["tokens"]) <= 12), strict=True)
    assert len(sentences) > 20

    def predicted(run):
        """The tags of all tokens, of special ones too, and those of words."""
        found = run.trained(params).predict(predict_tags, ExampleList(examples), run.task.batch_spec)
        lengths = [len(example["tokens"]) for example in examples]
        tokens = [tags[:length] for tags, length in zip(found, lengths, strict=True)]
        return tokens, run.task.predict(run.trained(params), sentences)

    tokens, words = predicted(run)
    assert len({tag for tags in tokens for tag in tags}) > 3
    assert [len(tags) for tags in words] == [len(sentence.words) for sentence in sentences]
    assert predicted(opened(workdir, tokens_per_batch=700)) == (tokens, words)


def test_padding_has_no_tag(run):
    iterator = iter(run.train_data(make_mesh(data=1)))
    for _ in range(20):
        batch = next(iterator)
        assert (batch["targets"][~batch["token_mask"]] == IGNORED).all()
        assert (batch["targets"] != IGNORED).any()
    iterator.close()


def write(path, *sentences):
    path.write_text("\n".join("".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in sentences))


@pytest.fixture
def files(tmp_path):
    write(tmp_path / "train.conll", [("Ann", "I-person"), ("Lee", "I-person")], [("in", "O"), ("Rome", "B-place")])
    write(tmp_path / "dev.conll", [("Ann", "B-person"), ("Inc", "I-group")])
    return {"dataset": "files", "data_dir": str(tmp_path), "train_file": "train.conll"}


def test_tags_of_files_are_mended(files, tmp_path):
    run = opened(tmp_path / "workdir", **files)
    assert "validation" not in run.config.task.splits()
    assert run.task.labels == ("O", "B-person", "I-person", "B-place", "I-place")
    assert [sentence.tags for sentence in sentences_of(run, "train")] == [["B-person", "I-person"], ["O", "B-place"]]


def test_unknown_tag_is_refused(files, tmp_path):
    run = opened(tmp_path / "workdir", validation_file="dev.conll", **files)
    with pytest.raises(UserError, match=r"^the tag 'B-group' does not occur in the training split \(5 tags\)$"):
        run.task.evaluate(Told(no_answer))
    message = r"^the validation split, sentence 1: the tag 'B-group' does not occur in the training split \(5 tags\)$"
    with pytest.raises(UserError, match=message):
        run.train_data(make_mesh(data=1))


def first_training(config, workdir):
    """A run, and the states and steps of its training."""
    config = validate(adopt_pretrained_config(config))
    save_config(config, epath.Path(workdir))
    run = make_run(config, workdir)
    return run, make_train_setup(config, run.make_model, run.task.loss, make_mesh(data=1))


def test_a_pretrained_body_is_taken_and_its_heads_are_not(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(document) for document in grammar_documents("train", 30)))
    model = BertConfig(250, max_length=24, num_layers=2, d_model=16, num_heads=2, d_ff=32)
    task = BertPretrainingConfig(TextData("files", str(tmp_path), "text.txt", max_length=24))
    config = ExperimentConfig(model=model, task=task)
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    source, training = first_training(config, pretrained)
    with Checkpoints(pretrained) as checkpoints:
        checkpoints.save(jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), training.abstract_state), {})
    config = tiny_config(max_length=24)
    config.init_from, config.seed = str(pretrained), 1
    (tmp_path / "run").mkdir()
    run, training = first_training(config, tmp_path / "run")
    assert (run.task.model_config.num_layers, run.task.model_config.labels) == (2, tuple(LABELS))
    tokenizers = source.task.tokenizer, run.task.tokenizer
    assert [tokenizer.vocab_size for tokenizer in tokenizers] == [250, 250]
    encoded = [tokenizer.encode("my mother 's bag") for tokenizer in tokenizers]
    assert encoded[0] == encoded[1]
    state, _, message = jax.device_get(init_from_state(training, config.init_from))
    count = len(jax.tree.leaves(state.params))
    head = "classifier/bias, classifier/kernel"
    assert message == f"starts from {pretrained}: {count - 2} of {count} arrays; randomly initialized: {head}"
    found = load_params(pretrained)
    assert found["bert"].keys() - state.params["bert"].keys() == {"pooler"}
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(state.params["bert"]))
    assert 0 < np.abs(state.params["classifier"]["kernel"]).max() < 0.05
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(state.opt_state))


def elmo_config(folder):
    """Of a tagger of characters; the sizes of what is trained are of no pre-training."""
    characters = CharacterConfig(3, (1, 2), (4, 3), 1)
    model = ElmoConfig(9, 7, CharacterConfig(), tagger=ElmoTaggerConfig(True, characters, 5, 4))
    task = TaggingConfig(TaggedData("files", str(folder), "train.conll", max_length=5, tokens_per_batch=64))
    return ExperimentConfig(model, task, init_from=str(folder / "pretrained"))


def test_an_elmo_reads_words_as_characters_and_is_taken_over_frozen(files, tmp_path):
    """Its sizes are those of the pre-training, and the tagger's own those of the experiment."""
    characters = CharacterConfig(3, (2, 1), (5, 2), 1)
    model = ElmoConfig(40, 9, characters, 2, 6, 4, 0.0, ElmoTaggerConfig(False, characters, 6, 7))
    (tmp_path / "text.txt").write_text("Ann is in Rome .\n")
    data = TextData("files", str(tmp_path), "text.txt", documents="lines", tokenizer="words", max_length=4)
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    _, training = first_training(ExperimentConfig(model, BidirectionalLanguageModelConfig(data)), pretrained)
    with Checkpoints(pretrained) as checkpoints:
        checkpoints.save(jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), training.abstract_state), {})
    (tmp_path / "run").mkdir()
    config = elmo_config(tmp_path)
    run, training = first_training(config, tmp_path / "run")
    found = run.task.model_config
    assert (found.d_hidden, found.word_length, found.characters) == (6, 9, characters)
    assert found.tagger == config.model.tagger
    assert found.labels == run.task.labels == ("O", "B-person", "I-person", "B-place", "I-place")
    assert run.task.tokenizer is None
    state, _, message = jax.device_get(init_from_state(training, config.init_from))
    assert state.model_state.keys() == {"elmo"}
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(state.model_state))
    assert not any((leaf == 3).all() for leaf in jax.tree.leaves(state.params))
    assert "elmo" not in message.partition("drawn: ")[2]

    (example, _) = run.task.encode(sentences_of(run, "train"))
    assert example["characters"].shape == (4, 9)
    np.testing.assert_array_equal(example["characters"][1:3], word_rows(["Ann", "Lee"], 9))
    for place in (0, 3):  # as sentences begin and end in pre-training
        assert example["characters"][place].tolist() == [257, 259, 258, 0, 0, 0, 0, 0, 0]
    assert example["targets"].tolist() == [IGNORED, 1, 2, IGNORED]
    assert example["token_mask"].tolist() == [True] * 4
    (cut,) = run.task.encode([TaggedSentence(["a", "b", "c", "d"], ["O", "B-place", "O", "O"])])
    assert cut["targets"].tolist() == [IGNORED, 0, 3, 0, IGNORED]
    sentences = sentences_of(run, "train")
    told = run.task.predict(Told(lambda batch: np.where(batch["targets"] == IGNORED, 3, batch["targets"])), sentences)
    assert told == [sentence.tags for sentence in sentences]


@pytest.mark.slow
def test_training_learns_on_the_command_line(tmp_path, capsys):
    """Most words of the grammar have one tag only. One length, on one device: little to compile.

    What a folder does not say of a model, such as what it computes again, does not keep it from being converted.
    """
    workdir = str(tmp_path / "run")
    changes = [
        "model.remat=full",
        "task.data.max_length=8",
        "mesh.data=1",
        "optimizer.peak_learning_rate=0.01",
        "optimizer.warmup_steps=5",
    ]
    overrides = [
        f"--config.{change}"
        for change in (*changes, "num_steps=60", "eval_every=20", "checkpoint_every=60", "log_every=20")
    ]
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={workdir}", *overrides]) == 0
    printed = re.findall(r"step \d+: validation entity F1 ([\d.]+) %", capsys.readouterr().err)
    first, _, last = map(float, printed)
    assert last > first + 10
    assert evaluate_cli.run([f"--workdir={workdir}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores.keys() == {"f1", "precision", "recall"}
    assert f"{scores['f1']:.2f}" == f"{last:.2f}"
    assert scores["precision"] > 50  # of words that fit
    assert "Words" in (tmp_path / "run" / "report.md").read_text()
    assert convert_cli.run([f"--workdir={workdir}", f"--output={tmp_path}/folder"]) == 0
    assert hf.load(tmp_path / "folder").config.labels == load_run(workdir).task.labels


@pytest.mark.slow
@pytest.mark.parametrize("use_elmo", [True, False])
def test_a_tagger_of_characters_learns(use_elmo, tmp_path, capsys):
    """With an ELMo that has read nothing, too."""
    changes = [
        "task.data.max_length=10",
        "mesh.data=1",
        "optimizer.peak_learning_rate=0.02",
        "optimizer.warmup_steps=5",
    ]
    changes += [f"model.tagger.use_elmo={use_elmo}", "num_steps=60", "eval_every=20", "log_every=20"]
    flags = [f"--config.{change}" for change in (*changes, "checkpoint_every=60")]
    file = FILE.with_name("elmo_wnut17.py")
    assert train_cli.run([f"--config={file}:test", f"--workdir={tmp_path}/run", *flags]) == 0
    printed = re.findall(r"step \d+: validation entity F1 ([\d.]+) %", capsys.readouterr().err)
    first, _, last = map(float, printed)
    assert last > first + 5
