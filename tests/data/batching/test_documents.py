"""Texts that are read in pieces: their tokens are those of the whole, and nothing of them is lost."""

import gzip

import numpy as np
import pytest

from tests.data.tokenizers_made_here import make_tokenizer
from tfx_jax.data.batching import documents
from tfx_jax.data.batching.documents import TextDocuments, encode_documents
from tfx_jax.data.sources import lines
from tfx_jax.data.tokenizers.train import train_or_load_folder
from tfx_jax.errors import UserError
from tfx_jax.synthetic.grammar import grammar_documents

# Words, figures, marks, Japanese without spaces, empty lines, spaces at both ends of lines, and what is no word.
TEXT = "\n".join(
    f"{' ' * (number % 3)}{' '.join(sentences)}  {number}.{number}%\n"
    f"日本語の文章、{number}です。\n\n\t\u0301x<|endoftext|>"
    for number, sentences in enumerate(grammar_documents("train", 60))
)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 70)
    monkeypatch.setattr(documents, "_PIECE", 50)
    monkeypatch.setattr(documents, "_MAX_UNCUT", 500)
    monkeypatch.setattr(documents, "_BATCH_CHARACTERS", 300)
    monkeypatch.setattr(documents, "_BATCH_PIECES", 5)


def _pieces(path, begin=0, end=1 << 40):
    return list(documents.read_pieces(path, begin, end))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pieces_are_the_text(tmp_path, small_pieces, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(gzip.compress(TEXT.encode()) if suffix else TEXT.encode())
    pieces = _pieces(path)
    assert "".join(pieces) == TEXT
    assert len(pieces) > len(TEXT) / 200
    assert documents.count_characters(path) == len(TEXT)
    assert "".join(_pieces(path, 101, 1_203)) == TEXT[101:1_203]


@pytest.mark.parametrize("text", ["a word " * 99, "日本語" * 99, "é" * 333, "\U0001f600a" * 99, "一\n" * 9 + "z" * 99])
def test_a_text_may_have_lines_longer_than_any_bound(tmp_path, small_pieces, monkeypatch, text):
    """As text8 does, whose 100 MB are one line."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 60)
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8", newline="")
    assert "".join(_pieces(path)) == text
    assert documents.count_characters(path) == len(text)
    path.write_bytes(text.encode()[:-1] + b"\xe4\xb8")
    with pytest.raises(UserError, match=r"text, line \d+: not UTF-8"):
        _pieces(path)


def test_a_text_without_places_to_cut_is_cut_anyway(tmp_path, small_pieces):
    (tmp_path / "text").write_text("(x)\n\n" * 1_000)
    pieces = _pieces(tmp_path / "text")
    assert "".join(pieces) == "(x)\n\n" * 1_000
    assert max(map(len, pieces)) <= 5_000


@pytest.mark.parametrize("family", ["gpt", "t5"])
@pytest.mark.parametrize("kind", ["characters", "words", "wordpiece", "bpe", "unigram"])
def test_a_tokenizer_of_pieces_and_its_tokens_are_those_of_the_whole(tmp_path, small_pieces, kind, family):
    (tmp_path / "text").write_text(TEXT)
    texts = TextDocuments(lambda: iter([documents.read_pieces(tmp_path / "text", 0, len(TEXT)), ["a short text"]]))
    made = [
        train_or_load_folder(tmp_path / name, parts, kind=kind, family=family, vocab_size=450)
        for name, parts in (("pieces", lambda: texts.to_train(kind)), ("whole", lambda: [TEXT, "a short text"]))
    ]
    assert len({(tmp_path / name / "tokenizer.json").read_bytes() for name in ("pieces", "whole")}) == 1
    encode_batch, sizes = made[0].encode_batch, []
    made[0].encode_batch = lambda parts: sizes.append(sum(map(len, parts))) or encode_batch(parts)
    tokens, ends = encode_documents(made[0], texts, eos_id=7)
    expected = [[*made[1].encode(text), 7] for text in (TEXT, "a short text")]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert ends.tolist() == [len(expected[0]), len(tokens)]
    assert max(sizes) < 1_000  # never much at once


def test_a_tokenizer_that_takes_no_piece_gets_the_whole(tmp_path, small_pieces):
    """Its first token stands for the beginning of a text."""

    class Begins:
        def encode(self, text):
            return [1, *text.encode()]

        def encode_batch(self, texts):
            return [self.encode(text) for text in texts]

    (tmp_path / "text").write_text(TEXT)
    texts = TextDocuments(lambda: iter([documents.read_pieces(tmp_path / "text", 0, len(TEXT)), [], ["x"]]))
    tokens, ends = encode_documents(Begins(), texts)
    assert tokens.tolist() == [1, *TEXT.encode(), 1, 1, *b"x"]
    assert ends.tolist() == [len(TEXT.encode()) + 1, len(tokens) - 2, len(tokens)]
    assert tokens.dtype == np.int32


def test_many_short_documents(small_pieces):
    written = [f"w{number % 7} " * (number % 4) for number in range(1_000)]
    tokenizer = make_tokenizer(written)
    texts = TextDocuments(lambda: ([line] for line in written))
    tokens, ends = encode_documents(tokenizer, texts, eos_id=tokenizer.eos_id)
    assert tokens.tolist() == [token for ids in tokenizer.encode_batch(written) for token in (*ids, tokenizer.eos_id)]
    assert ends.tolist() == np.cumsum([len(ids) + 1 for ids in tokenizer.encode_batch(written)]).tolist()


def test_lines_go_on_in_the_next_piece_and_end_with_the_document():
    texts = TextDocuments(lambda: iter([["a", "b\nc\n", "d"], ["e"]]))
    assert [*documents.document_lines(texts)] == ["ab", "c", "d", "e"]
