"""Training examples held out for validation, where no validation file is named."""

import json

import numpy as np
import pytest

from tfx_jax.cli.support.overrides import override
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.tasks import LabeledData, QuestionData, TaggedData, TextData, TreeData
from tfx_jax.training.config import validate

NUM_ROWS = 20


def question(row):
    """Returns one of the questions of SQuAD's format; two of them share each context."""
    answers = [{"text": f"{row // 2}", "answer_start": 0}]
    return {"id": str(row), "question": f"what is {row}", "answers": answers}


FILES = {
    LabeledData: "".join(f"{row % 3}\ttext {row}\n" for row in range(NUM_ROWS)),
    TaggedData: "".join(f"word{row}\tO\n\n" for row in range(NUM_ROWS)),
    TreeData: "".join(f"(TOP (NN word{row}))\n" for row in range(NUM_ROWS)),
    QuestionData: json.dumps(
        {
            "data": [
                {"paragraphs": [{"context": f"{row // 2} is it", "qas": [question(row), question(row + 1)]}]}
                for row in range(0, NUM_ROWS, 2)
            ]
        }
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_row_is_in_one_of_the_two_splits(tmp_path, kind):
    (tmp_path / "all").write_text(FILES[kind])
    names = {"dataset": "files", "data_dir": str(tmp_path), "train_file": "all"}
    everything = kind(**names).load("train")
    assert len(everything) == NUM_ROWS
    assert not kind(**names).has_split("validation")
    data = kind(**names, validation_share=0.2)
    assert data.has_split("validation")
    assert not data.has_split("test")
    train, validation = data.load("train"), data.load("validation")
    assert len(validation) == NUM_ROWS / 5
    places = [everything.index(row) for row in validation]
    assert places == sorted(places)
    assert places[0] < NUM_ROWS / 2 <= places[-1]  # spread over the file, which may be sorted by label
    assert sorted(map(str, [*train, *validation])) == sorted(map(str, everything))
    with pytest.raises(UserError, match=r"validation_share=0\.01 .* leaves one split empty: name validation_file"):
        kind(**names, validation_share=0.01).load("train")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_one_row_of_every_part_of_a_file_is_held_out(tmp_path, share):
    """In a file whose labels alternate, whatever their number, each label is in both splits."""
    for num_labels in (2, 3, 4, 5, 10):
        rows = [f"c{number % num_labels}\ttext {number}\n" for number in range(400)]
        (tmp_path / "all").write_text("".join(rows))
        data = LabeledData(dataset="files", data_dir=str(tmp_path), train_file="all", validation_share=share)
        validation = data.load("validation")
        assert {row.label for row in validation} == {row.label for row in data.load("train")}
        numbers = [int(row.text.split()[1]) for row in validation]
        np.testing.assert_array_equal(np.unique((np.array(numbers) * share).astype(int)), range(round(share * 400)))


@pytest.mark.parametrize(("documents", "share", "size"), [("lines", 0.1, "1 documents"), ("file", 0.9, "2 characters")])
def test_a_text_of_which_nothing_would_remain_is_refused(documents, share, size, tmp_path):
    (tmp_path / "all").write_text("hi")
    data = TextData("files", str(tmp_path), "all", documents=documents, validation_share=share)
    with pytest.raises(UserError, match=rf"validation_share={share} of the {size} leaves one split empty: name"):
        data.load("train")


def test_questions_about_one_context_stay_together(tmp_path):
    (tmp_path / "all").write_text(FILES[QuestionData])
    data = QuestionData("files", str(tmp_path), "all", validation_share=0.3)
    contexts = [{question.context for question in data.load(split)} for split in ("train", "validation")]
    assert not contexts[0] & contexts[1]
    assert list(map(len, contexts)) == [7, 3]


@pytest.mark.parametrize(
    ("experiment", "named", "field", "value"),
    [
        ("bert_banking77", "train_file", "validation_share", 0.1),
        ("bert_wnut17", "train_file", "validation_share", 0.1),
        ("bert_jaquad", "train_file", "validation_share", 0.1),
        ("gpt_wikitext2", "train_file", "validation_share", 0.1),
        ("transformer_treebank:wsj", "train_file", "validation_share", 0.1),
        ("transformer_tiny_multi30k", "train_source", "validation_pairs", 500),
        ("conformer_fsdd", "train_file", "validation_file", ""),
        ("vit_digits:b16", "train_folder", "validation_folder", ""),
    ],
)
def test_the_validation_file_of_an_experiment_goes_with_its_training_file(caplog, experiment, named, field, value):
    data = load_config_file(experiment, [f"--config.task.data.{named}=mine"]).task.data
    assert getattr(data, field) == value
    other = f"validation_{named.removeprefix('train_')}"
    assert getattr(data, other) == ""
    assert ("training examples are held out" in caplog.text) == (value != "")
    overrides = [f"--config.task.data.{name}=mine" for name in (named, other)]
    data = load_config_file(experiment, overrides).task.data
    assert getattr(data, other) == "mine"
    assert getattr(data, field) in (0, "mine")
    assert getattr(load_config_file(experiment).task.data, other) not in ("", "mine")


@pytest.mark.parametrize(
    ("experiment", "named", "share"),
    [
        ("bert_banking77", "train_file", "validation_share=0.2"),
        ("gpt_wikitext2", "train_file", "validation_share=0"),
        ("seq2seq_multi30k", "train_source", "validation_pairs=5"),
    ],
)
def test_a_named_share_takes_the_place_of_the_validation_file_too(caplog, experiment, named, share):
    data = load_config_file(experiment, [f"--config.task.data.{one}" for one in (f"{named}=mine", share)]).task.data
    field, value = share.split("=")
    assert (getattr(data, field), getattr(data, f"validation_{named.removeprefix('train_')}")) == (float(value), "")
    assert "held out" not in caplog.text


def test_a_named_validation_file_clears_the_share_that_train_wrote():
    """As `evaluate --config.task.data.validation_file=X` of a run that named no validation file."""
    config = load_config_file("bert_banking77", ["--config.task.data.train_file=mine"])
    assert config.task.data.validation_share == 0.1
    data = validate(override(config, ["--config.task.data.validation_file=X"])).task.data
    assert (data.validation_file, data.validation_share) == ("X", 0)
    both = ["--config.task.data.validation_file=X", "--config.task.data.validation_share=0.1"]
    with pytest.raises(UserError, match="must not both be set"):
        validate(override(config, both))
    config = load_config_file("transformer_tiny_multi30k", ["--config.task.data.train_source=mine"])
    assert override(config, ["--config.task.data.validation_source=X"]).task.data.validation_pairs == 0


def test_nothing_is_held_out_of_a_mixture(caplog):
    overrides = ["--config.task.data.train_file=a.txt,b.txt", "--config.task.mixture=3,1"]
    config = load_config_file("gpt_wikitext2", overrides)
    assert (config.task.data.validation_file, config.task.data.validation_share) == ("", 0)
    assert "holds out" not in caplog.text
    config = validate(load_config_file("gpt_wikitext2", [*overrides, "--config.task.data.validation_file=dev.txt"]))
    assert config.task.data.validation_file == "dev.txt"


def test_a_share_beside_a_validation_file_is_rejected():
    for name in ("bert_banking77", "bert_wnut17", "bert_jaquad", "transformer_treebank:wsj"):
        with pytest.raises(UserError, match="validation_file and validation_share must not both be set"):
            validate(load_config_file(name, ["--config.task.data.validation_share=0.1"]))


@pytest.mark.parametrize(
    ("experiment", "dataset", "named"),
    [
        ("bert_banking77:test", "grammar", "train_file=mine"),
        ("gpt_wikitext2:test", "grammar", "validation_file=mine"),
        ("transformer_tiny_multi30k:test", "grammar", "train_source=mine"),
        ("transformer_demo", "grammar", "test_target=mine"),
        ("seq2vec_icu2012:test", "synthetic", "train_file=mine"),
        ("captioning_shapes", "shapes", "train_file=mine"),
        ("conformer_fsdd:test", "tones", "train_file=mine"),
        ("vit_digits", "digits", "train_folder=mine"),
        ("bert_wnut17:test", "grammar", "validation_share=0.2"),
    ],
)
def test_files_that_the_data_set_does_not_read_are_refused(caplog, experiment, dataset, named):
    validate(load_config_file(experiment))
    other = "folder" if "folder" in named else "files"
    message = f'^config\\.task\\.data\\.dataset="{dataset}" does not read {named}: set dataset="{other}", or do not'
    with pytest.raises(UserError, match=message):
        validate(load_config_file(experiment, [f"--config.task.data.{named}"]))
    assert "held out" not in caplog.text


def test_a_test_variant_reads_files_on_request():
    overrides = ["--config.task.data.dataset=files", "--config.task.data.train_file=mine"]
    data = validate(load_config_file("bert_banking77:test", overrides)).task.data
    assert (data.train_file, data.validation_file, data.validation_share) == ("mine", "", 0.1)
