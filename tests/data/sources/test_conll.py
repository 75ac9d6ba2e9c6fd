import gzip

import pytest

from tfx_jax.data.sources.conll import read_tagged
from tfx_jax.errors import UserError

GOOD = "New\tB-place\nYork\tI-place\n.\tO\n\nhello\tO\n"


def _write(path, content):
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.conll", GOOD),
        ("a.conll.gz", GOOD),
        ("a.conll", "\n\n" + GOOD.replace("\n\n", "\n \n\n") + "\n\n"),  # any number of empty lines
        ("a.conll", GOOD.replace("\n", "\r\n")),
        ("a.conll", GOOD.removesuffix("\n")),
        ("a.conll", GOOD.replace("York", " York ").replace("B-place", " B-place ")),
    ],
)
def test_sentences(tmp_path, name, content):
    assert read_tagged(_write(tmp_path / name, content)) == [
        (["New", "York", "."], ["B-place", "I-place", "O"]),
        (["hello"], ["O"]),
    ]


def test_columns_of_conll_2003(tmp_path):
    """Tags begin with I where no entity stands before: `repair_tags` fixes that, as in other files."""
    text = (
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP I-ORG\nrejects VBZ B-VP O\n\n-DOCSTART- -X- O O\n\nRome NNP I-NP I-LOC\n"
    )
    expected = [(["EU", "rejects"], ["I-ORG", "O"]), (["Rome"], ["I-LOC"])]
    assert read_tagged(_write(tmp_path / "eng.train", text)) == expected
    assert read_tagged(_write(tmp_path / "two", "EU I-ORG\nrejects O\n\nRome I-LOC\n")) == expected
    with pytest.raises(UserError, match=r"a\.conll, line 3: 3 columns, but the first line has 4"):
        read_tagged(_write(tmp_path / "a.conll", "EU NNP B-NP I-ORG\n\nrejects VBZ O\n"))
    with pytest.raises(UserError, match=r"a\.conll, line 1: the tag '-X-' is not O, B-label"):
        read_tagged(_write(tmp_path / "a.conll", "EU NNP B-NP -X-\n"))


def test_words_and_labels_of_any_kind(tmp_path):
    ((words, tags),) = read_tagged(_write(tmp_path / "a", "=\tB-creative-work\n猫 犬\tI-creative-work\n#x\tI-B\n"))
    assert (words, tags) == (["=", "猫 犬", "#x"], ["B-creative-work", "I-creative-work", "I-B"])


@pytest.mark.parametrize("line", ["word", "word O", "a\tb\tO", "\tO", " \tO", "word\t"])
def test_lines_that_are_not_a_word_and_a_tag(tmp_path, line):
    message = "is not a word, one TAB and its tag" if line != "word\t" else "the tag '' is not O"
    with pytest.raises(UserError, match=f"a.conll, line 6: .*{message}") as caught:
        read_tagged(_write(tmp_path / "a.conll", GOOD + line + "\n"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tag", ["B", "I-", "S-place", "place", "o", "O-place"])
def test_tags_of_other_schemes(tmp_path, tag):
    with pytest.raises(UserError, match=f"a.conll, line 2: the tag '{tag}' is not O, B-label or I-label"):
        read_tagged(_write(tmp_path / "a.conll", f"x\tO\ny\t{tag}\n"))


def test_no_sentences(tmp_path):
    with pytest.raises(UserError, match=r"a\.conll has no sentences"):
        read_tagged(_write(tmp_path / "a.conll", "\n \n\n"))
    with pytest.raises(UserError, match=r"b\.conll does not exist"):
        read_tagged(tmp_path / "b.conll")


@pytest.mark.data
@pytest.mark.parametrize(
    ("part", "sentences", "words", "begins"), [("train", 3394, 62_730, 1975), ("dev", 1009, 15_733, 836)]
)
def test_real_sentences(shared_data, part, sentences, words, begins):
    found = read_tagged(shared_data / "ner" / f"{part}.conll")
    assert (len(found), sum(len(sentence.words) for sentence in found)) == (sentences, words)
    assert sum(tag.startswith("B-") for sentence in found for tag in sentence.tags) == begins


@pytest.mark.parametrize("gap", ["\t", " "])
def test_marks_of_documents_are_no_words_whatever_columns_they_have(tmp_path, gap):
    for mark in ("-DOCSTART-", f"-DOCSTART-{gap}O", "-DOCSTART- -X- -X- O", f"-DOCSTART-{gap}-X-{gap}O"):
        text = f"{mark}\n\na{gap}O\nb{gap}B-x\n{mark}\nc{gap}O\n"
        assert read_tagged(_write(tmp_path / "a", text)) == [(["a", "b"], ["O", "B-x"]), (["c"], ["O"])], mark
    ((words, _),) = read_tagged(_write(tmp_path / "a", f"-DOCSTART-x{gap}O\n"))
    assert words == ["-DOCSTART-x"]
