"""All bad rows of a file are named by one message: the first with their lines, and how many there are."""

import sys

import pytest

from tests.data.batching.test_conversations import TEMPLATE
from tfx_jax.data.batching.conversations import encode_conversations
from tfx_jax.data.batching.documents import TextDocuments
from tfx_jax.data.sources.columns import read_columns
from tfx_jax.data.sources.labeled import read_labeled
from tfx_jax.data.sources.tables import read_table
from tfx_jax.data.tokenizers.chat import ChatTemplate
from tfx_jax.errors import UserError

GOOD = '{"t": "a", "n": 1}'


def message(read):
    with pytest.raises(UserError) as caught:
        read()
    return str(caught.value)


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([GOOD, '{"t": "a"}', GOOD, "[]", '{"t": " "}', *['{"t": ""}'] * 4, '{"t": [1]}', "[]"]))
    assert message(lambda: list(read_columns(path, ["t"]))) == (
        f"{path}, line 4, line 11: must be a JSON object, got a list; line 5, line 6, line 7, ...: the column 't' is "
        "blank; line 10: the field 't' must be text, a number, true or false, got [1]; 8 bad lines in all"
    )


def test_more_kinds_of_problems_than_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t,n\n" + "".join(f"{'x,' * (2 + number)}x\n" for number in range(1_200)))
    found = message(lambda: list(read_columns(path, ["t"])))
    assert found.endswith("; line 4: 5 columns, but line 1 names 2; 1,200 bad lines in all")
    assert len(found) < 200 + len(str(path))


def test_values_end_at_the_first_bad_row(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("t\tn\na\t1\nb\nc\t3\n")
    rows = read_columns(path, ["t"])
    assert next(rows) == ["a"]
    with pytest.raises(UserError, match=r"a\.tsv, line 3: 1 columns, but line 1 names 2$"):
        next(rows)


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    arrow, path = sys.modules["pyarrow"], tmp_path / "a.parquet"
    arrow.parquet.write_table(arrow.table({"t": ["a", None, "", "b", None], "n": [1.0] * 5}), path)
    assert message(lambda: list(read_columns(path, ["t", "n"]))) == (
        f"{path}, row 2, row 5: the column 't' has no value: fill it or leave out the row; row 3: the column 't' is "
        "blank; 3 bad rows in all"
    )


def test_labeled_lines_and_tables_of_numbers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("yes\ta\nno b\nno\tc\nd\n")
    assert message(lambda: read_labeled(path, ["yes"])) == (
        f"{path}, line 2: 'no b' is not a label, one TAB and its text; line 3: the label 'no' is not one of the 1 "
        "known ones; line 4: 'd' is not a label, one TAB and its text; 3 bad lines in all"
    )
    path.write_text("x,y\n1,0\n2,2\n\n3,2\n")
    assert message(lambda: read_table(path, label_column="y")) == (
        f"{path}, line 3, line 5: column 'y': the label must be 0 or 1, got '2'; 2 bad lines in all"
    )


def test_conversations():
    texts = ["[", '{"messages": []}', "{}", "{}"]
    documents = TextDocuments(lambda: iter([text] for text in texts), locate=lambda number: f"a.jsonl, line {number}")
    found = message(lambda: encode_conversations(None, ChatTemplate(TEMPLATE, {}), documents))
    assert found.startswith("a.jsonl, line 1: not JSON (")
    assert "; a.jsonl, line 3, a.jsonl, line 4: no field 'messages'; there are " in found
    assert found.endswith(" bad conversations in all")
