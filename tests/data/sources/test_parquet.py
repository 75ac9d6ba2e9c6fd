"""Columns of Parquet and Arrow files, and one line for each mistake in them."""

import datetime
import io
import json
import pathlib
import sys

import numpy as np
import pytest

from tfx_jax.data.sources import parquet
from tfx_jax.data.sources.columns import read_columns
from tfx_jax.data.sources.labeled import read_labeled, read_labeled_columns, read_labeled_pairs
from tfx_jax.data.sources.parquet import read_columnar
from tfx_jax.errors import UserError

ROWS = {"text": ["good, said\nshe", " 日本\u3000語 "], "id": [1, 2], "stars": [0.5, 3.0], "is_new": [True, False]}


@pytest.fixture
def arrow():
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    return sys.modules["pyarrow"]


@pytest.fixture
def write(arrow, tmp_path):
    def write(columns, name="a.parquet", **options):
        table = columns if isinstance(columns, arrow.Table) else arrow.table(columns)
        arrow.parquet.write_table(table, tmp_path / name, **options)
        return tmp_path / name

    return write


def test_values_are_those_of_json_lines(write):
    path = write(ROWS, "a.PARQUET")
    assert list(read_columns(path, ["stars", "text", "is_new", "id"])) == [
        ["0.5", "good, said\nshe", "true", "1"],
        ["3.0", "日本\u3000語", "false", "2"],
    ]
    assert read_labeled_columns(path, text_column="text", label_column="id")[1] == ("日本\u3000語", "2")
    columns = {"first_column": "id", "second_column": "text", "label_column": "is_new"}
    assert read_labeled_pairs(path, **columns)[0] == ("1", "good, said\nshe", "true")
    with pytest.raises(UserError, match=r"a\.PARQUET, row 2: the label 'false' is not one of the 1 known ones"):
        read_labeled_columns(path, {"true"}, text_column="text", label_column="is_new")


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_texts_of_any_type(arrow, write, kind):
    type_ = arrow.dictionary(arrow.int8(), arrow.string()) if kind == "dictionary" else getattr(arrow, kind)()
    texts = ["a", "", "é", "a"]
    path = write({"t": arrow.array(texts, arrow.string()).cast(type_), "t.x": arrow.array([1, 2, 3, 4])})
    assert [text for _, (text,) in read_columnar(path, ["t"], kinds=("text",))] == texts
    assert [row for _, row in read_columnar(path, ["t.x", "t"])] == [[str(i), t] for i, t in enumerate(texts, start=1)]


def test_rows_are_the_same_in_groups_of_any_size(write):
    texts = [f"text {number} " * (number % 7) for number in range(500)]
    for size in (1, 7, 64, 500):
        path = write({"text": texts}, row_group_size=size)
        assert list(read_columnar(path, ["text"])) == [(n, [text]) for n, text in enumerate(texts, start=1)]


def test_a_row_group_is_not_read_at_once(write, monkeypatch):
    """By default, pyarrow would read all of these texts, which do not shrink, by one call."""
    rng, sizes = np.random.default_rng(0), []
    path = write({"text": [rng.bytes(3_000).hex() for _ in range(1_000)]}, use_dictionary=False, write_batch_size=10)

    class Counted(io.FileIO):
        def read(self, size=-1):
            data = super().read(size)
            sizes.append(len(data))
            return data

    monkeypatch.setattr(parquet, "open_regular", Counted)
    assert sum(1 for _ in read_columnar(path, ["text"])) == 1_000
    assert max(sizes) <= 2 << 20
    assert sum(sizes) > path.stat().st_size > 3_000_000


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, r"a\.parquet: 0 columns named 'label'; there are text"),
        ({"text": ["a", "b"], "label": ["x", None]}, r"a\.parquet, row 2: the column 'label' has no value: fill it or"),
        ({"text": ["a", "b"], "label": [1.0, float("nan")]}, r"row 2: the column 'label' has no value"),
        ({"text": ["a"], "label": [["x"]]}, r"the column 'label' must be text, numbers, or true and false, got list<"),
        ({"text": [b"a"], "label": ["x"]}, r"the column 'text' must be text, numbers, or true and false, got binary"),
        ({"text": [None], "label": ["x"]}, r"the column 'text' must be text, numbers, or true and false, got null"),
        ({"text": [{"a": 1}], "label": ["x"]}, r"the column 'text' must be .*, got struct<a: int64>"),
        ({"text": ["a", "\u200b"], "label": ["x", "y"]}, r"a\.parquet, row 2: the column 'text' is blank"),
        ({"text": ["a", "b" * 101], "label": [1, 2]}, r"row 2: the column 'text' is longer than 100 bytes: split"),
        ({"text": ["a", "é" * 51], "label": [1, 2]}, r"row 2: the column 'text' is longer than 100 bytes: split"),
    ],
)
def test_mistakes_are_named(write, monkeypatch, columns, message):
    monkeypatch.setattr(parquet, "MAX_LINE_BYTES", 100)
    with pytest.raises(UserError, match=message) as caught:
        list(read_columns(write(columns), ["text", "label"]))
    assert "\n" not in str(caught.value)


def test_columns_that_must_be_text(write):
    with pytest.raises(UserError, match=r"a\.parquet: the column 'id' must be text, got int64$"):
        list(read_columnar(write(ROWS), ["id"], kinds=("text",)))


def test_a_column_named_twice(arrow, write):
    path = write(arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["t", "t"]))
    with pytest.raises(UserError, match=r"a\.parquet: 2 columns named 't'; there are t, t"):
        list(read_columns(path, ["t"]))


def test_no_rows(write, arrow):
    path = write({"text": arrow.array([], arrow.string()), "label": arrow.array([], arrow.int64())})
    with pytest.raises(UserError, match=r"a\.parquet has no rows$"):
        read_labeled_columns(path, text_column="text", label_column="label")


def test_bytes_that_are_not_utf8(arrow, write):
    """Which pyarrow writes, and reads, without a look."""
    good, bad = (arrow.array([data]).cast(arrow.binary()) for data in (b"a", b"caf\xe9"))
    texts = [arrow.StringArray.from_buffers(1, *array.buffers()[1:]) for array in (good, bad)]
    path = write(arrow.table({"text": arrow.chunked_array([texts[0]] * 70 + [texts[1]])}))
    with pytest.raises(UserError, match=r"a\.parquet, row 71: the column 'text' is not UTF-8 \(unexpected end of data"):
        list(read_columnar(path, ["text"]))


def test_damaged_files(write):
    path = write({"text": [f"some text {number}" for number in range(1_000)]}, write_page_checksum=True)
    data = path.read_bytes()
    middle = len(data) // 4
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for content in (b"", b"text\na\n", data[:100], data[:-1], data[100:], flipped):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet is not a whole Parquet file \(.+\): copy or") as caught:
            list(read_columnar(path, ["text"]))
        assert "\n" not in str(caught.value)


def test_files_that_are_not_there(arrow, tmp_path):
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "loop.parquet").symlink_to("loop.parquet")
    for name, message in {
        "none.parquet": r"none\.parquet does not exist$",
        "folder.parquet": r"folder\.parquet is a directory: name the files in it, such as .*r\.parquet/\*\.parquet",
        "loop.parquet": r"cannot read .*loop\.parquet: Too many levels",
        "a.parquet.gz": r"a\.parquet\.gz is packed: unpack it with gunzip",
    }.items():
        with pytest.raises(UserError, match=message):
            list(read_columns(tmp_path / name, ["text"]))


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError, match=r'a\.parquet needs pyarrow \(.*\): pip install "tfx-jax\[parquet\] @ git\+\S+"$'
    ) as caught:
        list(read_columns(pathlib.Path("a.parquet"), ["text"]))
    assert "\n" not in str(caught.value)


def test_labels_without_names_of_columns():
    with pytest.raises(UserError, match=r"a\.parquet has columns: name two as config\.task\.data\.first_column and"):
        read_labeled("a.parquet")


@pytest.fixture
def write_arrow(arrow, tmp_path):
    def write(columns, kind):
        pytest.importorskip("pyarrow.ipc", reason="needs pyarrow")
        path, table = tmp_path / f"{kind}.arrow", arrow.table(columns)
        with getattr(arrow.ipc, f"new_{kind}")(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
        return path

    return write


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_of_both_formats(write, write_arrow, kind):
    texts = {"text": [f"text {number} " * (number % 7) for number in range(500)], "id": list(range(500))}
    path = write_arrow(texts, kind)
    assert list(read_columnar(path, ["id", "text"])) == list(read_columnar(write(texts), ["id", "text"]))
    with pytest.raises(UserError, match=rf"{kind}\.arrow: 0 columns named 'x'; there are text, id"):
        list(read_columnar(path, ["x"]))
    data = path.read_bytes()
    for content in (b"", b"text\na\n", data[:100], data[: len(data) // 2], data[100:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{kind}\.arrow is not a whole Arrow file \(.+\): copy or") as caught:
            list(read_columnar(path, ["text"]))
        assert "\n" not in str(caught.value)


def test_lists_become_json(write):
    messages = [[{"role": "user", "content": "Hi\n"}], []]
    path = write({"messages": messages})
    found = [json.loads(text) for _, (text,) in read_columnar(path, ["messages"], kinds=("text", "lists"))]
    assert found == messages


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [[], [{"time": datetime.datetime(2026, 1, 1)}]],
            r"row 2: the column 'x' is no JSON \(.*datetime.*: write it as",
        ),
        ([["b" * 96], ["b" * 97]], r"row 2: the column 'x' is longer than 100 bytes: split"),  # with JSON's signs
    ],
)
def test_lists_that_are_refused(write, monkeypatch, values, message):
    monkeypatch.setattr(parquet, "MAX_LINE_BYTES", 100)
    with pytest.raises(UserError, match=message) as caught:
        list(read_columnar(write({"x": values}), ["x"], kinds=("lists",)))
    assert "\n" not in str(caught.value)
