"""Passages of articles: sections, bytes, cuts, and pairs of one article or of two."""

import numpy as np
import pytest

from tfx_jax.data.sources.wikitext import NUM_BYTE_IDS, Article, byte_ids, cut_passages, draw_pair, sections

LINES = [
    " = Some Town = ",
    " ",
    " It is a town . ",
    " = = History = = ",
    " ",
    " It was founded in 1 @,@ 200 . ",
    " = = = War = = = ",
    " It burnt . ",
    " = = Legacy of war = = ",
    " It is rebuilt . ",
    " x = = y ",
    " = = Nothing = = ",
]


def test_sections_have_their_own_text_and_that_of_their_subsections():
    assert sections(Article("Some Town", LINES)) == [
        ("History", "It was founded in 1,200 .\nIt burnt ."),
        ("Legacy of war", "It is rebuilt .\nx = = y"),
        ("Nothing", ""),
    ]


def test_every_byte_has_an_id_and_none_is_padding():
    everything = "".join(map(chr, range(0x250))) + "語\U0010ffff"
    ids = byte_ids(everything)
    assert bytes((ids - 1).astype(np.uint8).tolist()).decode() == everything
    assert ids.min() == 1
    assert ids.max() < NUM_BYTE_IDS
    assert byte_ids("").shape == (0,)


@pytest.mark.parametrize(("min_length", "sizes"), [(1, [4, 4, 3]), (3, [4, 4, 3]), (4, [4, 4])])
def test_passages_follow_one_another_and_short_rests_are_dropped(min_length, sizes):
    passages = cut_passages("abcdefghijk", min_length=min_length, max_length=4)
    assert list(map(len, passages)) == sizes
    assert np.concatenate(passages).tolist() == byte_ids("abcdefghijk").tolist()[: sum(sizes)]


def test_pairs_are_of_one_article_or_of_two_and_never_a_passage_with_itself():
    articles = [[np.array([article, number]) for number in range(size)] for article, size in enumerate((2, 3, 5))]
    found = {True: set(), False: set()}
    for index in range(400):
        for is_same in found:
            first, second = draw_pair(articles, (7, index), is_same=is_same)
            assert (first[0] == second[0]) == is_same
            assert tuple(first) != tuple(second)
            found[is_same].add((*first.tolist(), *second.tolist()))
    assert len(found[True]) == 2 * 1 + 3 * 2 + 5 * 4  # every pair there is, in both orders
    assert len(found[False]) == 2 * (2 * 3 + 2 * 5 + 3 * 5)
    again = [draw_pair(articles, (7, index), is_same=True) for index in (5, 5, 6)]
    assert np.array_equal(again[0], again[1])
