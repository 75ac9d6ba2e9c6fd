"""Forms of text that all readers take alike: byte order marks, line ends, line separators and blank lines."""

import io
import json

import numpy as np
import pytest
import regex
import scipy.io.wavfile

from tfx_jax.cli.support.lines import LineReader
from tfx_jax.data.sources import text
from tfx_jax.data.sources.columns import read_columns
from tfx_jax.data.sources.conll import read_tagged
from tfx_jax.data.sources.labeled import read_labeled
from tfx_jax.data.sources.lines import is_blank, read_lines
from tfx_jax.data.sources.squad import read_questions
from tfx_jax.data.sources.tables import read_table
from tfx_jax.data.sources.trees import read_trees
from tfx_jax.data.sources.wikitext import read_articles
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech
from tfx_jax.tasks.text.text_data import TextData

MARK = "\ufeff"
SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\r"  # at which `str.splitlines` would end a line
BLANK = ["", " ", "\t", "\u3000", "\xa0", "\u200b", "\xad", "\x01", "\x7f", "\u2060\ufeff", "\u3164", "\ufe0f"]
SQUAD = {"data": [{"paragraphs": [{"context": "b", "qas": [{"id": 7, "question": "?", "answers": []}]}]}]}
SQUAD["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "b", "answer_start": 0}]


def _speech(path):
    scipy.io.wavfile.write(path.parent / "a.wav", 8_000, np.zeros(800, np.int16))
    scipy.io.wavfile.write(path.parent / "b.wav", 8_000, np.zeros(800, np.int16))
    data = RecordedSpeech(dataset="files", data_dir=str(path.parent), train_file=path.name, sample_rate=8_000)
    return data.load("train").transcripts


def _documents(kind):
    return lambda path: [
        "".join(d) for d in TextData(dataset="files", train_file=str(path), documents=kind).load("train").by_document()
    ]


def _stdin(path):
    return LineReader(io.BytesIO(path.read_bytes())).take(100)


def _pairs(path):
    pairs = text.read_tsv(path)
    return [pairs[index] for index in range(len(pairs))]


# How to read a file, and two rows of one in which the "_" of "a_b" may be any text.
READERS = {
    "lines": (lambda path: list(read_lines(path)), "a_b\nc\n"),
    "standard input": (_stdin, "a_b\nc\n"),
    "pairs": (_pairs, "a_b\tc\nd\te\n"),
    "tags": (read_tagged, "a_b\tO\nc\tB-x\n"),
    "columns of tags": (read_tagged, "a_b NN O\nc NN B-x\n"),
    "labels": (read_labeled, "x\ta_b\ny\tc\n"),
    "labels of fastText": (read_labeled, "__label__x a_b\n__label__y c\n"),
    "tsv": (lambda path: list(read_columns(path, ["t", "l"])), "t\tl\na_b\tx\nc\ty\n"),
    "trees": (read_trees, "(S (N a_b))\n(S (N c))\n"),
    "articles": (lambda path: list(read_articles(path)), " = T = \n\na_b\nc\n"),
    "speech": (_speech, "a.wav\ta_b\nb.wav\tc\n"),
    "documents in lines": (_documents("lines"), "a_b\nc\n"),
    "documents in files": (_documents("file"), "a_b\nc\n"),
}
OTHERS = {
    "csv": (lambda path: list(read_columns(path, ["t", "l"])), "t,l\na,x\nc,y\n", ".csv"),
    "jsonl": (lambda path: list(read_columns(path, ["t", "l"])), '{"t": "a", "l": 1}\n{"t": "b", "l": 2}\n', ".jsonl"),
    "table": (lambda path: str(read_table(path, label_column="l")), "a,l\n1,0\n2,1\n", ".csv"),
    "questions": (read_questions, json.dumps(SQUAD, indent=1), ".json"),
}
ALL = {name: (*case, "") for name, case in READERS.items()} | OTHERS


def _read(read, path, content):
    path.write_bytes(content.encode())
    return read(path)


@pytest.mark.parametrize("name", ALL)
def test_a_byte_order_mark_and_the_line_ends_of_windows_are_no_text(tmp_path, name):
    read, content, suffix = ALL[name]
    path = tmp_path / f"data{suffix}"
    want = str(_read(read, path, content))
    assert str(_read(read, path, MARK + content)) == want
    assert str(_read(read, path, content.replace("\n", "\r\n"))) == want
    assert str(_read(read, path, MARK + content.replace("\n", "\r\n"))) == want
    assert MARK not in want


@pytest.mark.parametrize("name", READERS)
def test_a_line_separator_of_unicode_ends_no_line(tmp_path, name):
    read, content = READERS[name]
    plain = _read(read, tmp_path / "data", content)
    between_words = "\r" if name in ("trees", "columns of tags") else ""
    for separator in set(SEPARATORS) - set(between_words):
        found = _read(read, tmp_path / "data", content.replace("a_b", f"a{separator}b"))
        assert len(found) == len(plain), ascii(separator)
        shown = " " if name == "speech" else repr(separator)[1:-1]  # transcripts have single spaces
        assert str(found) == str(plain).replace("a_b", f"a{shown}b")


@pytest.mark.parametrize("blank", BLANK, ids=ascii)
def test_a_line_that_shows_nothing_is_blank_to_all_readers(tmp_path, blank):
    path = tmp_path / "data"
    assert is_blank(blank)
    assert [len(s.words) for s in _read(read_tagged, path, f"a\tO\n{blank}\nb\tO\n")] == [1, 1]
    assert len(_read(read_trees, path, f"(S (N a))\n{blank}\n(S (N b))\n")) == 2
    assert (
        len(
            _read(read_articles, path, f" = A = \n{blank}\nx\n{blank}\n = B = \n{blank}\ny")
            and list(read_articles(path))
        )
        == 2
    )
    assert _read(_speech, path, f"a.wav\tx\n{blank}\nb.wav\ty\n") == ["x", "y"]
    assert _read(_pairs, path, "a\tb\n" + (f"{blank}\tc\nd\t{blank}\n" if blank != "\t" else "")) == [
        {"source": "a", "target": "b"}
    ]
    with pytest.raises(UserError, match=r"line 2: .* is not __label__NAME, a space and its text"):
        _read(read_labeled, path, f"__label__x a\n__label__x {blank}\n")
    if blank != "\t":
        with pytest.raises(UserError, match=r"line 1: .* is not a label, one TAB and its text"):
            _read(read_labeled, path, f"x\t{blank}\n")
        with pytest.raises(UserError, match="line 2: the column 't' is blank"):
            _read(ALL["tsv"][0], path, f"t\tl\n{blank}\tx\n")


def test_what_shows_nothing_is_what_unicode_says():
    shown = regex.compile(r"[^\s\p{Cc}\p{Default_Ignorable_Code_Point}\u2800\ufff9-\ufffb]")
    for point in range(0x110000):
        if not 0xD800 <= point < 0xE000:
            assert is_blank(chr(point)) == (not shown.match(chr(point))), hex(point)


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_byte_order_mark_that_comes_in_pieces_is_none(cut):
    class Pieces(io.BytesIO):
        def read1(self, size=-1):
            return super().read1(cut)

    for data, want in ((b"\xef\xbb\xbfa\nb", ["a", "b"]), (b"\xef\xbb\xbf", []), (b"\xef\xbb\xbf\n", [""])):
        assert LineReader(Pieces(data)).take(9) == want
    assert LineReader(Pieces("a\n\ufeffb\n".encode())).take(9) == ["a", "\ufeffb"]


def test_files_of_tokenizers_may_come_from_windows(tmp_path):
    """GPT-2's vocabulary and merges, BERT's vocabulary, and the JSON beside them."""
    gpt, bert = tmp_path / "gpt", tmp_path / "bert"
    vocabulary = json.dumps({token: number for number, token in enumerate(["<|endoftext|>", "a", "b", "ab"])}, indent=1)
    for files in (
        {"gpt/vocab.json": vocabulary, "gpt/merges.txt": "#version: 0.2\na b\n"},
        {"bert/vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nab\n", "bert/tokenizer_config.json": "{}\n"},
    ):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes((MARK + content.replace("\n", "\r\n")).encode())
    assert load_folder_tokenizer(gpt).encode("ab") == [3]
    tokenizer = load_folder_tokenizer(bert)
    assert tokenizer.pad_id == 0
    assert tokenizer.encode("ab") == [5]
    for name in ("vocab.txt", "tokenizer_config.json"):
        (bert / name).unlink()
    tiny = {"model": {"type": "WordLevel", "vocab": {"<unk>": 0, "ab": 1}, "unk_token": "<unk>"}}
    (bert / "tokenizer.json").write_text(MARK + json.dumps(tiny), encoding="utf-8")
    assert load_folder_tokenizer(bert).encode("ab") == [1]
