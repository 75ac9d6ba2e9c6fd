"""Tables of three kinds say the same, and every mistake in them is named with its line."""

import gzip
import json

import pytest

from tfx_jax.data.sources.columns import read_columns
from tfx_jax.data.sources.labeled import LabeledText, check_repeated, read_labeled_columns, read_labeled_pairs
from tfx_jax.errors import UserError

ROWS = [("good, said she", "1", "y e s"), ("日本\u3000語", "2", "no")]
TABLES = {
    "a.tsv": "text\tid\tlabel\n" + "".join("\t".join(row) + "\n" for row in ROWS),
    "a.csv": 'text,id,label\r\n"good, said she",1,y e s\r\n\r\n日本\u3000語,2,no\r\n',
    "b.CSV": '\ufeff"label","text","id"\ny e s,"good, said she",1\nno,"日本\u3000語",2',
    "a.jsonl": "".join(json.dumps({"id": int(i), "text": t, "label": label}) + "\n" for t, i, label in ROWS),
    "a.other": " text \tid\t label\n" + "".join("\t".join(row) + " \n" for row in ROWS),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_all_kinds_say_the_same(tmp_path, name, is_packed):
    path = tmp_path / (f"{name}.gz" if is_packed else name)
    data = TABLES[name].encode()
    path.write_bytes(gzip.compress(data) if is_packed else data)
    assert list(read_columns(path, ("text", "label"))) == [[text, label] for text, _, label in ROWS]
    assert list(read_columns(path, ("id",))) == [["1"], ["2"]]
    assert read_labeled_columns(path, text_column="text", label_column="label") == [
        LabeledText(text, label) for text, _, label in ROWS
    ]
    assert read_labeled_pairs(path, first_column="label", second_column="text", label_column="id")[0] == (
        "y e s",
        "good, said she",
        "1",
    )


def test_a_line_break_in_quotes_is_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"one ""1""\nand two",yes\nthree,no\n')
    assert list(read_columns(path, ("text", "label"))) == [['one "1"\nand two', "yes"], ["three", "no"]]
    with pytest.raises(UserError, match=r"line 2: the label 'yes' is .*; line 4: the label 'no' is "):
        read_labeled_columns(path, {"maybe"}, text_column="text", label_column="label")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "a,b\n1,2\n", r"a\.csv, line 1: 0 columns named 'text'; there are a, b"),
        ("a.csv", "text,label,text\n1,2,3\n", r"line 1: 2 columns named 'text'"),
        ("a.csv", "text,label\na,b\nc\n", r"a\.csv, line 3: 1 columns, but line 1 names 2"),
        ("a.csv", "text,label\na, \n", r"a\.csv, line 2: the column 'label' is blank"),
        ("a.csv", 'text,label\na,b\n"c,d\ne,f\n', r"a\.csv, line 3: unexpected end of data"),
        ("a.csv", 'text,label\n"a"b,c\n', r"a\.csv, line 2: "),
        ("a.csv", "text,label\n", r"a\.csv has no texts, only a line of column names"),
        ("a.jsonl", '{"text": "a", "label": "b"}\n{"text": "a"\n', r"a\.jsonl, line 2: not JSON \("),
        ("a.jsonl", '{"text": "a", "label": "b"}\n[1]\n', r"a\.jsonl, line 2: must be a JSON object, got a list"),
        (
            "a.jsonl",
            '{"text": "\\ud83d", "label": "b"}\n',
            r"a\.jsonl, line 1: not JSON \(a string has .*half of a surro",
        ),
        ("a.jsonl", '{"text": "a"}\n', r"a\.jsonl, line 1: no field 'label'; there are text"),
        (
            "a.jsonl",
            '{"text": "a", "label": null}\n',
            r"line 1: the field 'label' must be text, a number, true or false, got null",
        ),
        (
            "a.jsonl",
            '{"text": "a", "label": ["b"]}\n',
            r"line 1: the field 'label' must be text, a number, true or false, got \[\"b\"\]",
        ),
        ("a.jsonl", '{"text": "", "label": "b"}\n', r"line 1: the column 'text' is blank"),
        ("a.jsonl", "[" * 100_000, r"line 1: not JSON \("),
    ],
)
def test_mistakes_are_named_with_their_lines(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_labeled_columns(tmp_path / name, text_column="text", label_column="label")
    assert "\n" not in str(caught.value)


def test_a_label_that_is_not_known_is_named_with_its_line(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,yes\nb,ja\n")
    with pytest.raises(UserError, match=r"a\.csv, line 3: the label 'ja' is not one of the 2 known ones"):
        read_labeled_columns(tmp_path / "a.csv", {"yes", "no"}, text_column="text", label_column="label")


@pytest.mark.parametrize(("num_labels", "num_texts"), [(1, 20), (10, 20), (19, 19), (77, 9_000)])
def test_labels_that_come_again(num_labels, num_texts):
    check_repeated([LabeledText("a", str(index % num_labels)) for index in range(num_texts)], "a.tsv")


def test_labels_that_are_texts():
    texts = [LabeledText("yes", f"What is {index}?") for index in range(600)]
    with pytest.raises(
        UserError,
        match=r"a\.tsv has 600 texts with 600 different labels, for example the label 'What is 0\?': are the columns",
    ):
        check_repeated(texts, "a.tsv")
