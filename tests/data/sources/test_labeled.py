import collections
import gzip
import re

import pytest

from tfx_jax.data.sources.labeled import is_labeled, read_labeled, read_labeled_pairs
from tfx_jax.data.sources.lines import read_lines
from tfx_jax.errors import UserError

HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"


def _write(path, *lines):
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_labeled_texts(tmp_path, name):
    path = _write(tmp_path / name, "greeting\thello  there\r", " farewell \t さようなら ", "")
    assert read_labeled(path) == [("hello  there", "greeting"), ("さようなら", "farewell")]
    assert read_labeled(path, labels=["greeting", "farewell", "other"]) == read_labeled(path)


@pytest.mark.parametrize("line", ["hello", "", "a\tb\tc", "\thello", "greeting\t ", "greeting hello"])
def test_lines_that_are_not_a_label_and_a_text(tmp_path, line):
    path = _write(tmp_path / "a.tsv", "greeting\thello", line, "greeting\thi")
    with pytest.raises(UserError, match=r"a\.tsv, line 2: .* is not a label, one TAB and its text"):
        read_labeled(path)


@pytest.mark.parametrize(
    ("name", "line", "columns"),
    [
        ("a.csv", "id, text,topic", "CSV with columns id, text, topic"),
        ("a.csv.gz", '"te,xt",topic', "CSV with columns te,xt, topic"),
        ("a.txt", "text,topic", "CSV with columns text, topic"),
        ("a.tsv", "id\ttext\ttopic", "TSV with columns id, text, topic"),
        ("a.jsonl", '{"text": "a", "topic": "b"}', "JSON lines with fields text, topic"),
    ],
)
def test_a_table_without_names_of_columns(tmp_path, name, line, columns):
    remedy = f"if it is {columns}, set config.task.data.first_column and label_column to two of them"
    with pytest.raises(UserError, match=f"line 1: .* is not a label, one TAB and its text; {re.escape(remedy)}$"):
        read_labeled(_write(tmp_path / name, line))


@pytest.mark.parametrize(("name", "line"), [("a.tsv", "hello"), ("a.csv", 'a "b'), ("a.jsonl", "1"), ("b.jsonl", "{")])
def test_a_line_that_names_no_columns(tmp_path, name, line):
    with pytest.raises(UserError, match=r"line 1: .* is not a label, one TAB and its text$"):
        read_labeled(_write(tmp_path / name, line))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_fasttext(tmp_path, name):
    """Labels are without the prefix; a TAB or several spaces may follow; text stays, with commas and TABs, as it is."""
    lines = [
        "__label__a,b hello  there, you\r",
        " __label__c++\tone\ttwo ",
        "__label__日本   x__label__ _label_ __label",
        "",
    ]
    path = _write(tmp_path / name, *lines)
    expected = [("hello  there, you", "a,b"), ("one\ttwo", "c++"), ("x__label__ _label_ __label", "日本")]
    assert read_labeled(path) == expected
    assert read_labeled(path, labels=["a,b", "c++", "日本"]) == expected
    with pytest.raises(UserError, match=r"line 2: the label 'c\+\+' is not one of the 2 known ones"):
        read_labeled(path, labels=["a,b", "日本"])


@pytest.mark.parametrize("line", ["__label__a __label__b hi", "__label__a hi __label__b", "__label__a\t__label__b"])
@pytest.mark.parametrize("before", [[], ["__label__a hello"]])
def test_several_labels_of_fasttext(tmp_path, line, before):
    path = _write(tmp_path / "a.txt", *before, line)
    message = (
        rf"a\.txt, line {len(before) + 1}: __label__a and __label__b: a text must have one label, so keep one of them$"
    )
    with pytest.raises(UserError, match=message):
        read_labeled(path)


@pytest.mark.parametrize(
    "line", ["hello", "", "a\thello", "__label__ hello", "__label__a", "hi __label__a", "__label__\u200b x"]
)
def test_lines_that_are_not_fasttext(tmp_path, line):
    path = _write(tmp_path / "a.txt", "__label__a hello", line, "__label__b hi")
    with pytest.raises(
        UserError, match=r"a\.txt, line 2: .* is not __label__NAME, a space and its text, as line 1 begins$"
    ):
        read_labeled(path)
    if line.startswith("__label__"):  # in line 1 too, where nothing says what columns there are
        with pytest.raises(UserError, match=r"a\.txt, line 1: .* is not __label__NAME, a space and its text"):
            read_labeled(_write(tmp_path / "a.txt", line))


def test_fasttext_behind_another_line_is_no_format(tmp_path):
    path = _write(tmp_path / "a.txt", "a\thello", "__label__a hello")
    with pytest.raises(UserError, match=r"line 2: .* is not a label, one TAB and its text$"):
        read_labeled(path)


def test_unknown_label(tmp_path):
    path = _write(tmp_path / "a.tsv", "greeting\thello", "greting\thi")
    with pytest.raises(UserError, match=r"a\.tsv, line 2: the label 'greting' is not one of the 2 known ones"):
        read_labeled(path, labels={"greeting", "farewell"})
    pairs = _write(tmp_path / "b.tsv", HEADER, "1\ta\tb\t3\tYES")
    with pytest.raises(UserError, match=r"b\.tsv, line 2: the label 'YES' is not one of the 2 known ones"):
        read_labeled_pairs(pairs, labels={"NEUTRAL", "ENTAILMENT"})


def test_pairs_by_the_names_of_their_columns(tmp_path):
    path = _write(tmp_path / "a.tsv", HEADER, "1\ta b\tc\t3.5\tNEUTRAL\r", "2\td\te\t\tENTAILMENT", "")
    assert read_labeled_pairs(path) == [("a b", "c", "NEUTRAL"), ("d", "e", "ENTAILMENT")]
    turned = _write(tmp_path / "b.tsv.gz", "gold\thypothesis\tpremise", "no\tx\ty")
    columns = {"first_column": "premise", "second_column": "hypothesis", "label_column": "gold"}
    assert read_labeled_pairs(turned, **columns) == [("y", "x", "no")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a\tb\tc", "1\t2\t3"], r"line 1: 0 columns named 'sentence_A'; there are a, b, c"),
        ([HEADER + "\tsentence_B", "1"], "line 1: 2 columns named 'sentence_B'"),
        ([HEADER], "has no pairs, only a line of column names"),
        ([HEADER, "1\ta\tb\t3\tNEUTRAL", "2\ta\tb\tNEUTRAL"], "line 3: 4 columns, but line 1 names 5"),
        ([HEADER, ""], None),
        ([HEADER, "", "1\ta\tb\t3\tNEUTRAL"], "line 2: 1 columns, but line 1 names 5"),
        ([HEADER, "1\ta\t \t3\tNEUTRAL"], "line 2: the column 'sentence_B' is blank"),
        ([HEADER, "1\ta\tb\t3\t"], "line 2: the column 'entailment_judgment' is blank"),
    ],
)
def test_files_that_are_not_pairs(tmp_path, lines, message):
    with pytest.raises(UserError, match=message or "has no pairs") as caught:
        read_labeled_pairs(_write(tmp_path / "a.tsv", *lines))
    assert "a.tsv" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.data
def test_real_intents(shared_data):
    labels = list(read_lines(shared_data / "banking77" / "labels.txt"))
    train, dev = (read_labeled(shared_data / "banking77" / f"{part}.tsv", labels) for part in ("train", "dev"))
    assert (len(train), len(dev)) == (9000, 1003)
    assert {example.label for example in train} == set(labels)


@pytest.mark.data
def test_real_pairs(shared_data):
    pairs = read_labeled_pairs(shared_data / "nli" / "train.tsv", {"NEUTRAL", "ENTAILMENT", "CONTRADICTION"})
    counts = collections.Counter(pair.label for pair in pairs)
    assert counts == {"NEUTRAL": 2536, "ENTAILMENT": 1299, "CONTRADICTION": 665}
    assert pairs[0].second.startswith("A group of boys in a yard")


def test_a_packed_file_is_recognized_like_a_plain_one(tmp_path):
    for text, want in (("a\tI am here\nb\tyou too\n", True), ("I am here\nyou too\n", False)):
        packed, plain = tmp_path / "t.tsv.gz", tmp_path / "t.tsv"
        packed.write_bytes(gzip.compress(text.encode()))
        plain.write_text(text)
        assert is_labeled(packed, {"a", "b"}) is is_labeled(plain, {"a", "b"}) is want
