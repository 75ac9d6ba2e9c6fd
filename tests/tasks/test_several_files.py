"""A corpus of several files: their names with commas between."""

import pytest

from tfx_jax.errors import UserError
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.translation import PairData


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "a.en": "one\ntwo\n",
        "a.de": "eins\nzwei\n",
        "b.en": "three\n",
        "b.de": "drei\n",
        "a.tsv": "four\tvier\n",
        "b.tsv": "five\tfünf\nsix\tsechs\n",
        "bad.tsv": "seven\tsieben\neight\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path)


def pairs_of(folder, **fields):
    data = PairData(dataset="files", data_dir=folder, source_language="en", target_language="de", **fields)
    data.validate()
    pairs = data.load("train")
    return [(pairs[index]["source"], pairs[index]["target"]) for index in range(len(pairs))]


def test_pairs_follow_each_other(folder):
    two = pairs_of(folder, train_source="a.en,b.en", train_target="a.de, b.de")
    assert two == [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    assert pairs_of(folder, train_source="a.tsv,b.tsv") == [("four", "vier"), ("five", "fünf"), ("six", "sechs")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_source": "a.en,b.en", "train_target": "a.de"}, "train_source names 2 files and train_target 1: each"),
        ({"train_source": "a.tsv,b.en"}, "train_target is missing: name the target file; only a .tsv has both sides"),
        ({"train_source": "a.tsv,bad.tsv"}, r"bad\.tsv, line 2: 0 TABs"),
        (
            {"train_source": "a.en,b.de", "train_target": "a.de,b.en"},
            "train_source=a.en,b.de looks like the target side",
        ),
        ({"train_source": "a.en,b.en", "train_target": "b.de,a.de"}, r"a\.en has 2 lines and .*b\.de has 1"),
    ],
)
def test_mistakes_are_those_of_one_file(folder, fields, message):
    with pytest.raises(UserError, match=message):
        pairs_of(folder, **fields)


def test_texts_follow_each_other_and_the_last_gives_its_end_for_validation(folder):
    data = TextData(dataset="files", data_dir=folder, train_file="a.en,a.de", documents="lines")
    assert list(data.load("train")) == ["one", "two", "eins", "zwei"]
    data = TextData(dataset="files", data_dir=folder, train_file="a.en,a.de", validation_share=0.5)
    assert list(data.load("train")) == ["one\ntwo\n", "e"]
    assert list(data.load("validation")) == ["ins\nzwei\n"]
