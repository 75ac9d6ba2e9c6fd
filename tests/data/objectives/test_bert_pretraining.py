"""Rows of BERT's pre-training, from a corpus in which every token tells where it comes from."""

import itertools
import re

import numpy as np
import pytest

from tfx_jax.data.objectives import bert_pretraining as pretraining
from tfx_jax.data.objectives.bert_pretraining import make_examples, split_sentences

CLS, SEP, PAD, MASK, UNK = 1, 2, 0, 3, 4
NUM_DOCUMENTS = 60
VOCAB_SIZE = 20_000


def corpus(rng):
    """Documents of sentences, no token of which occurs twice."""
    fresh = itertools.count(10)
    return [
        [[next(fresh) for _ in range(rng.integers(1, 15))] for _ in range(rng.integers(1, 20))]
        for _ in range(NUM_DOCUMENTS)
    ]


def rows_of(documents, seed=0, max_length=40):
    return make_examples(
        documents,
        np.random.default_rng(seed),
        max_length=max_length,
        cls_id=CLS,
        sep_id=SEP,
        pad_id=PAD,
        mask_id=MASK,
        vocab_size=VOCAB_SIZE,
        special_ids={CLS, SEP, PAD, MASK, UNK},
    )


@pytest.fixture(scope="module")
def documents():
    return corpus(np.random.default_rng(0))


@pytest.mark.parametrize("max_length", [8, 40, 128])
def test_rows_are_two_stretches_of_documents(documents, max_length):
    place = {
        token: (number, position)
        for number, document in enumerate(documents)
        for position, token in enumerate(itertools.chain(*document))
    }
    rows = rows_of(documents, max_length=max_length)
    seen = set()
    assert len(rows) == len(rows.lengths)
    for row, length in zip((rows[index] for index in range(len(rows))), rows.lengths, strict=True):
        first, second, rest = np.split(row["targets"], np.flatnonzero(row["targets"] == SEP) + 1)
        assert (first[0], first[-1], second[-1], rest.size) == (CLS, SEP, SEP, 0)
        assert len(first) + len(second) == length <= max_length
        assert row["token_type_ids"].tolist() == [0] * len(first) + [1] * len(second)
        assert row["token_mask"].all()
        assert row["row_weights"] == 1
        (one, start), (other, begin) = place[first[1]], place[second[0]]
        assert [place[token] for token in first[1:-1]] == [(one, start + n) for n in range(len(first) - 2)]
        assert [place[token] for token in second[:-1]] == [(other, begin + n) for n in range(len(second) - 1)]
        assert row["next_sentence_label"] == (one != other)
        if one == other:
            assert begin >= start + len(first) - 2
            if length < max_length:  # nothing was cut off
                assert begin == start + len(first) - 2
        seen.update(row["targets"].tolist())
    if max_length == 128:
        # Few tokens are cut off, and few sentences are the last of a document with nothing behind them.
        assert len(seen) > 0.9 * len(place)
    errors = 3 * 0.5 / np.sqrt(len(rows))
    assert np.mean([rows[index]["next_sentence_label"] for index in range(len(rows))]) == pytest.approx(0.5, abs=errors)


def test_tokens_are_hidden_as_the_paper_says(documents):
    rows = [rows_of(documents, seed) for seed in range(8)]
    rows = [epoch[index] for epoch in rows for index in range(len(epoch))]
    for row in rows:
        specials = np.isin(row["targets"], [CLS, SEP])
        assert specials.sum() == 3
        assert row["weights"].sum() == max(1, np.rint(0.15 * (~specials).sum()))
        assert not row["weights"][specials].any()
        np.testing.assert_array_equal(row["tokens"][row["weights"] == 0], row["targets"][row["weights"] == 0])
    tokens, targets, weights = (
        np.concatenate([row[name] for row in rows]) for name in ("tokens", "targets", "weights")
    )
    chosen = weights == 1
    for share, found in ((0.8, tokens == MASK), (0.1, tokens == targets)):
        assert found[chosen].mean() == pytest.approx(share, abs=3 * np.sqrt(share * (1 - share) / chosen.sum()))
    drawn = tokens[chosen & (tokens != MASK) & (tokens != targets)]
    assert drawn.min() > UNK
    assert drawn.mean() == pytest.approx(VOCAB_SIZE / 2, abs=3 * VOCAB_SIZE / np.sqrt(12 * len(drawn)))


def as_lists(rows):
    return [{name: array.tolist() for name, array in rows[index].items()} for index in range(len(rows))]


def test_the_state_of_the_generator_decides(documents, monkeypatch):
    once = as_lists(rows_of(documents))
    assert as_lists(rows_of(documents)) == once
    other = as_lists(rows_of(documents, seed=1))
    hidden = [{tuple(row["tokens"]) for row in epoch} for epoch in (once, other)]
    assert len(hidden[0] & hidden[1]) < 0.01 * len(once)
    monkeypatch.setattr(pretraining, "_ROWS_AT_ONCE", 7)  # other random numbers, but the same pairs
    parts = as_lists(rows_of(documents))
    assert len(parts) % 7
    assert [row["targets"] for row in parts] == [row["targets"] for row in once]
    assert [sum(row["weights"]) for row in parts] == [sum(row["weights"]) for row in once]


def test_rows_of_a_short_text():
    rows = rows_of([[[10], [11]], [[12]]])
    (row,) = as_lists(rows)
    assert row["targets"] in ([CLS, 10, SEP, 11, SEP], [CLS, 10, SEP, 12, SEP])
    assert row["next_sentence_label"] == (12 in row["targets"])
    assert sum(row["weights"]) == 1
    with pytest.raises(ValueError, match="two documents"):
        rows_of([[[10], [11]]])


@pytest.mark.parametrize("is_tokenized", [False, True])
def test_sentences_are_the_text_in_pieces(is_tokenized):
    rng = np.random.default_rng(0)
    words = ["a", "B", "U.S.", ".", "?", "!", '"', "'", ")", "\n", "。", "」", " ", "1.5", "\t"]
    count = 0
    for _ in range(300):
        text = (" " if is_tokenized else "").join(rng.choice(words, rng.integers(0, 30)))
        sentences = split_sentences(text, is_tokenized=is_tokenized)
        assert re.sub(r"\s", "", "".join(sentences)) == re.sub(r"\s", "", text)
        assert all(sentence == sentence.strip() != "" for sentence in sentences)
        if is_tokenized:
            assert not any(re.search(r" [.!?] ", sentence) for sentence in sentences)
            inside = [
                sentence for line in text.split("\n") for sentence in split_sentences(line, is_tokenized=True)[:-1]
            ]
            assert all(sentence[-1] in ".!?" and sentence[-2:-1] in ("", " ") for sentence in inside)
        count += len(sentences)
    assert count > 500


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n \n", []),
        ("one line", ["one line"]),
        ("It is 1.5 m. (Really?) Yes!", ["It is 1.5 m.", "(Really?)", "Yes!"]),
        ("He asked: “Why?” She left.", ["He asked: “Why?”", "She left."]),
        ("行こう！「待って。」と言った。", ["行こう！", "「待って。」と言った。"]),
    ],
)
def test_ends_of_sentences(text, sentences):
    assert split_sentences(text) == sentences
