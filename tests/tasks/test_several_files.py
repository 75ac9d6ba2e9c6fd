"""A corpus of several files: their names with commas between."""

import pytest

from tfx_jax.errors import UserError
from tfx_jax.tasks.text.classification import LabeledData
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


@pytest.mark.parametrize("documents", ["file", "lines", "messages"])
@pytest.mark.parametrize("text", ["\n", "\r\n \n\u200b\n"])
def test_a_text_of_blank_lines_is_none(documents, text, tmp_path):
    (tmp_path / "blank").write_text(text, encoding="utf-8")
    (tmp_path / "most").write_text("a\n" + 9 * text, encoding="utf-8")
    data = {"dataset": "files", "data_dir": str(tmp_path), "documents": documents}
    with pytest.raises(UserError, match=r"^the validation split has no text, only blank lines: name another file$"):
        TextData(**data, validation_file="blank").load("validation")
    with pytest.raises(UserError, match="the validation split has no text"):
        TextData(**data, train_file="most", validation_share=0.5).load("validation")
    assert next(iter(TextData(**data, train_file="most").load("train"))).startswith("a")


def test_pairs_to_validate_on_have_text(tmp_path):
    (tmp_path / "blank").write_text("\n\n")
    data = PairData("files", str(tmp_path), validation_source="blank", validation_target="blank")
    with pytest.raises(UserError, match="none of the 2 pairs has text on both sides"):
        data.load("validation")


def test_texts_follow_each_other_and_the_last_gives_its_end_for_validation(folder):
    data = TextData(dataset="files", data_dir=folder, train_file="a.en,a.de", documents="lines")
    assert list(data.load("train")) == ["one", "two", "eins", "zwei"]
    data = TextData(dataset="files", data_dir=folder, train_file="a.en,a.de", validation_share=0.5)
    assert list(data.load("train")) == ["one\ntwo\n", "e"]
    assert list(data.load("validation")) == ["ins\nzwei\n"]


@pytest.fixture
def tables(folder):
    """Two Parquet files beside the texts."""
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    for name, texts in {"a.parquet": ["one\r\n\r\ntwo", "", "three"], "b.parquet": ["four"]}.items():
        parquet.write_table(arrow.table({"text": texts, "id": range(len(texts))}), f"{folder}/{name}")
    return folder


def documents_of(folder, split="train", **fields):
    texts = TextData(dataset="files", data_dir=folder, **fields).load(split)
    return ["".join(document) for document in texts.by_document()]


@pytest.mark.parametrize("kind", ["file", "lines"])
def test_each_row_of_a_parquet_file_is_a_document(tables, kind):
    fields = {"train_file": "*.parquet", "documents": kind}
    rows = ["one\n\ntwo", "", "three", "four"]
    assert documents_of(tables, **fields) == rows
    assert documents_of(tables, validation_share=0.5, **fields) == rows[:2]
    assert documents_of(tables, "validation", validation_share=0.5, **fields) == rows[2:]


def test_rows_and_lines_follow_each_other(tables):
    found = documents_of(tables, train_file="b.parquet,a.en", documents="lines")
    assert found == ["four", "one", "two"]


def test_a_long_row_comes_in_pieces(tables):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "a long text " * 20_000
    parquet.write_table(arrow.table({"body": [text]}), f"{tables}/long.parquet")
    data = TextData(dataset="files", data_dir=tables, train_file="long.parquet", text_column="body")
    pieces = list(data.load("train"))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 140_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"train_file": "a.parquet,a.en"},
            r"train_file names Parquet or Arrow files and files of text: .*documents=\"lines\"",
        ),
        (
            {"train_file": "a.parquet", "documents": "articles"},
            r"documents=\"articles\" is for the text of WikiText, but",
        ),
        (
            {"train_file": "a.parquet", "text_column": "body"},
            r"a\.parquet: 0 columns named 'body'; there are text, id$",
        ),
        ({"train_file": "a.parquet", "text_column": "id"}, r"a\.parquet: the column 'id' must be text, got int64$"),
    ],
)
def test_mistakes_with_parquet_files(tables, fields, message):
    with pytest.raises(UserError, match=message) as caught:
        documents_of(tables, **fields)
    assert "\n" not in str(caught.value)


def test_labels_of_a_parquet_file(tables):
    data = LabeledData(dataset="files", data_dir=tables, train_file="b.parquet", first_column="text", label_column="id")
    assert data.load("train") == [("four", "0")]


def test_a_document_is_located_by_its_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    (tmp_path / "b.jsonl").write_text("{}\n{}\n{}\n")
    data = TextData("files", str(tmp_path), "a.jsonl,b.jsonl", documents="messages", validation_share=0.2)
    assert data.load("train").locate(4, "conversation") == f"{tmp_path / 'b.jsonl'}, line 2"
    assert data.load("validation").locate(1, "conversation") == f"{tmp_path / 'b.jsonl'}, line 3"
