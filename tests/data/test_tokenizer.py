"""All tokenizers: same ids for the special tokens, round trips, files, and the one line for each mistake."""

import functools
import io
import random

import numpy as np
import pytest
import sentencepiece
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.data import tokenizer
from tfx_jax.data.text import read_lines, read_text
from tfx_jax.errors import UserError

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "finds",
    "big",
    "small",
    "12",
    "345",
    "ねこ",
    "が",
    "いぬ",
    "を",
    "見",
]
LINES = [" ".join(random.Random(seed).choices(WORDS, k=8)) for seed in range(300)]


@pytest.fixture(scope="module", params=["unigram", "bpe", "words", "characters"])
def trained(request):
    if request.param == "words":
        return tokenizer.WordTokenizer.train(LINES)
    if request.param == "characters":
        return tokenizer.CharacterTokenizer.train(LINES)
    return tokenizer.SentencePieceTokenizer.train(LINES, vocab_size=70, model_type=request.param)


def test_special_ids_are_those_of_the_whole_library(trained):
    assert (tokenizer.PAD_ID, tokenizer.BOS_ID, tokenizer.EOS_ID, tokenizer.UNK_ID) == (0, 1, 2, 3)
    assert trained.pieces([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]


def test_round_trip(trained):
    for line in LINES[:50]:
        ids = trained.encode(line)
        assert min(ids) > tokenizer.UNK_ID
        assert max(ids) < trained.vocab_size
        assert trained.decode(ids) == line
    assert trained.encode_batch(LINES[:50]) == [trained.encode(line) for line in LINES[:50]]


def test_decoding_ends_at_the_end_of_sentence_and_ignores_padding(trained):
    ids = trained.encode("the cat sees")
    assert trained.decode([1, *ids, 2, *trained.encode("a dog"), 0, 0]) == "the cat sees"
    assert trained.decode(np.array([*ids, 2, 0], np.int32)) == "the cat sees"
    assert trained.decode([0, *ids]) == "the cat sees"
    assert trained.decode([]) == trained.decode([2]) == ""


def test_pieces_label_every_id(trained):
    ids = np.array(trained.encode("the cat"), np.int32)
    pieces = trained.pieces(ids)
    assert len(pieces) == len(ids)
    assert all(isinstance(piece, str) for piece in pieces)
    assert "".join(pieces).replace("▁", "").replace(" ", "") == "thecat"


def test_empty_text_has_no_ids(trained):
    assert trained.encode("") == []
    assert trained.encode_batch(["", "the"]) == [[], trained.encode("the")]


@pytest.mark.parametrize("spelt", ["<pad>", "<s>", "</s>", "<unk>"])
def test_text_cannot_spell_a_control_token(trained, spelt):
    ids = trained.encode(f"the {spelt} cat")
    assert not set(ids) & {tokenizer.PAD_ID, tokenizer.BOS_ID, tokenizer.EOS_ID}
    assert tokenizer.UNK_ID in ids


def test_save_and_load(trained, tmp_path):
    path = tmp_path / "saved"
    trained.save(path)
    loaded = type(trained).load(str(path))
    assert loaded.vocab_size == trained.vocab_size
    assert loaded.encode_batch(LINES) == trained.encode_batch(LINES)
    assert [item.name for item in tmp_path.iterdir()] == ["saved"]  # no temporary file is left


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_training_sentencepiece_is_deterministic(model_type, tmp_path):
    for name in ("one", "two"):
        tokenizer.SentencePieceTokenizer.train(iter(LINES), vocab_size=60, model_type=model_type).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_digits_are_spelt_out_unless_told_otherwise():
    options = {"vocab_size": 60, "model_type": "bpe"}
    assert "345" in tokenizer.SentencePieceTokenizer.train(["345 x 345"] * 50, split_digits=False, **options).pieces(
        range(4, 10)
    )
    split = tokenizer.SentencePieceTokenizer.train(["345 x 345"] * 50, **options)
    assert split.pieces(split.encode("345"))[-3:] == ["3", "4", "5"]


def test_characters_are_kept_unless_normalization_is_asked_for():
    lines = [*LINES, "ＡＢＣ abc ABC ？"]
    keeping = tokenizer.SentencePieceTokenizer.train(lines, vocab_size=80)
    assert keeping.decode(keeping.encode("ＡＢＣ ？")) == "ＡＢＣ ？"
    folding = tokenizer.SentencePieceTokenizer.train(lines, vocab_size=80, normalization="nmt_nfkc")
    assert folding.decode(folding.encode("ＡＢＣ ？")) == "ABC ?"


@functools.cache
def _trained(normalization):
    return tokenizer.SentencePieceTokenizer.train(LINES, vocab_size=70, normalization=normalization)


@given(text=st.text(st.sampled_from("the  catが猫𠮷ﾊﾟ.\u3000x"), max_size=30))
@settings(deadline=None)
@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_offsets_cut_the_text_itself(normalization, text):
    trained = _trained(normalization)
    ids, offsets = trained.encode_with_offsets(text)
    assert ids == trained.encode(text)
    assert offsets.shape == (len(ids), 2)
    assert np.all(offsets[:, 0] <= offsets[:, 1])
    assert np.all(offsets[1:, 0] >= offsets[:-1, 1])
    covered = "".join(text[begin:end] for begin, end in offsets)
    assert covered.split() == text.split()
    if normalization == "identity":
        for index, piece, (begin, end) in zip(ids, trained.pieces(ids), offsets, strict=True):
            assert index == tokenizer.UNK_ID or text[begin:end].strip() == piece.replace("▁", " ").strip()


def test_a_small_text_yields_a_small_vocabulary():
    assert 4 < tokenizer.SentencePieceTokenizer.train(["a b c"], vocab_size=8000).vocab_size < 20


def test_lines_of_any_length_and_empty_lines_are_accepted():
    trained = tokenizer.SentencePieceTokenizer.train([*LINES, "", "  ", "the cat " * 50_000], vocab_size=70)
    assert trained.decode(trained.encode("the cat " * 50_000)) == ("the cat " * 50_000).strip()


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, "no text to train a tokenizer on"),
        (["", " \u3000"], {}, "no text to train a tokenizer on"),
        (LINES, {"vocab_size": 10}, r"of 10 tokens: Vocabulary size is smaller than required_chars\. 10 vs"),
        (LINES, {"model_type": "words"}, 'unknown enumeration value of "words"'),
        (LINES, {"normalization": "none"}, "cannot train a SentencePiece model"),
    ],
)
def test_mistakes_in_training_sentencepiece(lines, options, message):
    with pytest.raises(UserError, match=message) as caught:
        tokenizer.SentencePieceTokenizer.train(lines, **{"vocab_size": 70, **options})
    assert "\n" not in str(caught.value)


def test_errors_of_the_lines_themselves_are_not_hidden():
    def lines():
        yield "a b c"
        raise UserError("train.en does not exist")

    for make in (tokenizer.SentencePieceTokenizer, tokenizer.WordTokenizer):
        with pytest.raises(UserError, match=r"^train\.en does not exist$"):
            make.train(lines(), vocab_size=70)


def test_words_are_ordered_by_frequency_then_by_appearance():
    trained = tokenizer.WordTokenizer.train(["c b a", "b d", "  a\tb "])
    assert trained.pieces(range(trained.vocab_size)) == ["<pad>", "<s>", "</s>", "<unk>", "b", "a", "c", "d"]


def test_rare_words_are_unknown():
    lines = ["a a a b b c"]
    assert tokenizer.WordTokenizer.train(lines, min_count=2).encode("a b c") == [4, 5, 3]
    assert tokenizer.WordTokenizer.train(lines, vocab_size=5).encode("a b c") == [4, 3, 3]
    assert tokenizer.WordTokenizer.train(lines, vocab_size=5).vocab_size == 5


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([" ", ""], {}, "no text to make a vocabulary from"),
        (["a b"], {"min_count": 2}, "vocab_size=None and min_count=2 leave no token"),
        (["a b"], {"vocab_size": 3}, "vocab_size=3 and min_count=1 leave no token"),
        (["<unk> </s>"], {}, "leave no token"),
    ],
)
def test_mistakes_in_listing_words(lines, options, message):
    with pytest.raises(UserError, match=message):
        tokenizer.WordTokenizer.train(lines, **options)


@given(words=st.lists(st.lists(st.text("abc@", min_size=1, max_size=3), min_size=1, max_size=3), max_size=8))
@settings(deadline=None, max_examples=100)
def test_subwords_join_to_the_words_they_were_cut_from(words):
    words = [[part.strip("@") or "d" for part in parts] for parts in words]
    cut = " ".join("@@ ".join(parts) for parts in words)
    joined = " ".join("".join(parts) for parts in words)
    assert tokenizer.join_subwords(cut) == joined
    assert tokenizer.join_subwords(f"{cut}@@") == joined  # a translation may end too early


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("sentencepiece", "tokenizer.model", {"vocab_size": 70}),
        ("words", "vocab.txt", {"vocab_size": 70}),
        ("characters", "characters.txt", {}),
    ],
)
def test_trains_at_first_use_and_loads_afterwards(tmp_path, kind, name, options):
    workdir = tmp_path / "new" / "workdir"
    first = tokenizer.train_or_load(workdir, lambda: LINES, kind=kind, **options)
    assert [item.name for item in workdir.iterdir()] == [name]

    def fail():
        raise AssertionError("the text was read though the tokenizer is there")

    again = tokenizer.train_or_load(str(workdir), fail, kind=kind, **options)
    assert type(again) is type(first)
    assert again.encode_batch(LINES) == first.encode_batch(LINES)


def test_an_interrupted_save_leaves_nothing_that_would_be_loaded(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(tmp_path)), "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.train_or_load(tmp_path, lambda: LINES, kind="words")
    assert not (tmp_path / "vocab.txt").exists()
    assert tokenizer.train_or_load(tmp_path, lambda: LINES, kind="words").vocab_size == len(WORDS) + 4


def test_unknown_kind(tmp_path):
    with pytest.raises(UserError, match="unknown kind of tokenizer 'bpe': use one of sentencepiece, words, characters"):
        tokenizer.train_or_load(tmp_path, lambda: LINES, kind="bpe")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00\x01\x02" * 100])
def test_a_damaged_model_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.model: not a SentencePiece model; put a good copy in its place"):
        tokenizer.train_or_load(tmp_path, lambda: LINES, kind="sentencepiece", vocab_size=70)


def test_a_model_cut_short_is_refused(tmp_path):
    path = tmp_path / "tokenizer.model"
    tokenizer.SentencePieceTokenizer.train(LINES, vocab_size=70).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(UserError, match="not a SentencePiece model"):
        tokenizer.SentencePieceTokenizer.load(path)


def test_a_model_with_other_special_ids_is_refused(tmp_path):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    with pytest.raises(UserError, match=r"pad, bos, eos, unk = \(-1, 1, 2, 0\); train it with 0, 1, 2, 3"):
        tokenizer.SentencePieceTokenizer(written.getvalue())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its first lines must be <pad> <s> </s> <unk>; put a good copy in its place"),
        (b"the\na\n", "its first lines must be"),
        (b"<pad>\n<s>\n</s>\n<unk>\na\nb\na\n", "'a' occurs twice; put a good copy"),
        (b"<pad>\n<s>\n</s>\n<unk>\n\xff\n", "can't decode byte 0xff"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"vocab.txt: .*{message}") as caught:
        tokenizer.train_or_load(tmp_path, lambda: LINES, kind="words")
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*none\.model: No such file"):
        tokenizer.SentencePieceTokenizer.load(tmp_path / "none.model")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_any_characters_come_back_and_are_kept(tmp_path_factory, text):
    trained = tokenizer.CharacterTokenizer.train([text])
    assert trained.vocab_size == len(set(text)) + 4
    ids = trained.encode(text)
    assert ids == [4 + sorted(set(text)).index(character) for character in text]
    assert trained.decode(ids) == text
    path = tmp_path_factory.mktemp("tokenizer") / "characters.txt"
    trained.save(path)
    assert tokenizer.CharacterTokenizer.load(path).pieces(range(trained.vocab_size)) == trained.pieces(
        range(trained.vocab_size)
    )


@pytest.mark.parametrize("content", [b"", b"aba", b"\xff"])
def test_a_damaged_list_of_characters_is_refused(tmp_path, content):
    (tmp_path / "characters.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"characters\.txt: .*; put a good copy in its place"):
        tokenizer.train_or_load(tmp_path, lambda: LINES, kind="characters")


def test_no_characters():
    with pytest.raises(UserError, match="not a list of characters"):
        tokenizer.CharacterTokenizer.train([""])


@pytest.mark.data
def test_characters_of_real_text(shared_data):
    text = read_text(shared_data / "tinyshakespeare" / "input.txt")
    trained = tokenizer.CharacterTokenizer.train([text])
    assert (len(text), trained.vocab_size) == (1_115_394, 65 + 4)
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.data
def test_segmented_real_text_comes_back_as_words(shared_data):
    lines = read_lines(shared_data / "multi30k-bpe" / "valid.de")
    trained = tokenizer.WordTokenizer.train(lines)
    for line in lines[:200]:
        assert trained.decode(trained.encode(line)) == line.replace("@@ ", "")


@pytest.mark.data
def test_japanese_round_trip(shared_data):
    lines = read_lines(shared_data / "enja" / "dev.ja")
    trained = tokenizer.SentencePieceTokenizer.train(lines, vocab_size=1500)
    for line in lines:
        assert trained.decode(trained.encode(line)) == line
