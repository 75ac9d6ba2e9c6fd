import gzip

import pytest

from tfx_jax.data.sources.lines import read_lines
from tfx_jax.data.sources.wikitext import read_articles, running_text
from tfx_jax.errors import UserError

LINES = [
    " ",
    " = First title = ",
    " ",
    " A line of text .",
    " ",
    " = = Section = = ",
    " ",
    " a = b = ",
    " = c = ",  # between lines of text: part of a formula
    " = d = ",
    " ",
    " = Zweiter ( Titel = 2 ) = ",
    "",
    " = = = Deep = = = ",
    "",
]


def _write(path, lines):
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_articles(tmp_path, name):
    first, second = read_articles(_write(tmp_path / name, LINES))
    assert (first.title, second.title) == ("First title", "Zweiter ( Titel = 2 )")
    assert first.lines == LINES[:11]
    assert second.lines == LINES[11:]


def test_titles_at_both_ends_of_a_file(tmp_path):
    articles = list(read_articles(_write(tmp_path / "a", ["= a =", "", "text", "", " = b = "])))
    assert articles == [("a", ["= a =", "", "text", ""]), ("b", [" = b = "])]


def test_text_before_the_first_title(tmp_path):
    with pytest.raises(UserError, match=r"a\.txt, line 2: text before the first title"):
        list(read_articles(_write(tmp_path / "a.txt", ["", "text", "", " = a = ", ""])))


def test_what_is_no_article_but_a_file_of_something_else(tmp_path, monkeypatch):
    monkeypatch.setattr("tfx_jax.data.sources.wikitext._MAX_LINES", 4)
    article = [" = a = ", "", "b", ""]
    with pytest.raises(UserError, match=r"a\.txt, line 5: 4 lines without a title; a title is ' = Title = '"):
        list(read_articles(_write(tmp_path / "a.txt", [*article, "c"])))
    assert len(list(read_articles(_write(tmp_path / "b.txt", 2 * article)))) == 2


@pytest.mark.parametrize("lines", [["", " "], [""]])
def test_no_article(tmp_path, lines):
    with pytest.raises(UserError, match=r"a\.txt has no article"):
        list(read_articles(_write(tmp_path / "a.txt", lines)))


@pytest.mark.data
@pytest.mark.parametrize(("part", "count"), [("train", 600), ("valid", 60)])
def test_real_articles(shared_data, part, count):
    path = shared_data / "wikitext2" / f"{part}.txt.gz"
    articles = list(read_articles(path))
    assert len(articles) == count  # as published
    assert [line for article in articles for line in article.lines] == list(read_lines(path))


def test_running_text():
    assert running_text("\n".join(LINES)) == "A line of text .\na = b ="  # but " = c = " looks like a heading
    text = " a @-@ b 1 @,@ 000 @.@ 5 @-@ <unk> <unk>s mail @ home @-@\n\n = x \n x = "
    assert running_text(text) == "a-b 1,000.5-[UNK] [UNK]s mail @ home @-@\n= x\nx ="


@pytest.mark.data
def test_running_text_of_wikitext2(shared_data):
    articles = read_articles(shared_data / "wikitext2" / "valid.txt.gz")
    text = "\n".join(running_text("\n".join(article.lines)) for article in articles)
    lines = list(read_lines(shared_data / "wikitext2" / "valid.txt.gz"))
    assert text.count("[UNK]") == sum(line.count("<unk>") for line in lines if not line.startswith(" = ")) > 5_000
    assert "@-@" not in text
    assert len(text.split("\n")) == sum(bool(line.strip()) and not line.startswith(" = ") for line in lines)
