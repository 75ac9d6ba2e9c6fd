"""Tokenizers made here: what each kind learns, beside oracles; what each family demands; files; and transformers."""

import collections
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import unicodedata

import numpy as np
import pytest
import tokenizers
from etils import epath
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tfx_jax.data.sources.lines import read_lines, read_text
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer, write_template
from tfx_jax.data.tokenizers.train import train_or_load_folder
from tfx_jax.errors import UserError

KINDS = ("characters", "words", "wordpiece", "bpe", "unigram")
FIRST = {
    "gpt": ["<|endoftext|>", "<unk>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "t5": ["<pad>", "</s>", "<unk>"],
}
LAST = {"gpt": [], "bert": [], "t5": [f"<extra_id_{number}>" for number in range(99, -1, -1)]}
WORDS = [
    "the",
    "They",
    "there",
    "other",
    "dog",
    "doing",
    "done",
    "isn't",
    "3,141",
    "walked",
    "walking",
    "Straße",
    "läuft",
]
WORDS += ["日本語", "の", "文章", "東京", "である。", "(", ")", ".", "!", "🙂"]
LINES = [" ".join(random.Random(seed).choices(WORDS, k=7)) + "\n" for seed in range(150)]
LINES += ["xylophone's quixotic\n"]  # of which some pairs come once
LINES += ["[MASK] <unk> <extra_id_7> </s> <|endoftext|> [MASK]\n"] * 9
VOCAB_SIZE = 420
# fmt: off
PARTS = [
    "the", "They", "walking", "Straße", "日本", "語", "東京", "🙂", "'s", ".", "!", "é", "e\u0301", "Ω", "ｶﾞ", "▁", "##",
    "▅",    "[MASK]", "[SEP]", "</s>", "<extra_id_0>", "<extra_id_99>", "<|endoftext|>", "<unk>", "＜/s＞", "<", "xxxx",
    " ", " ", "  ", "\t", "\n", "\u3000", "\u200b", "\x00", "\r\n",
]
# fmt: on


def random_texts(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choice(PARTS) for _ in range(rng.randint(0, 14))) for _ in range(count)]


def train(folder, lines=LINES, kind="words", family="gpt", vocab_size=VOCAB_SIZE):
    return train_or_load_folder(folder, lambda: lines, kind=kind, family=family, vocab_size=vocab_size)


def special_of(kind, family):
    return [token for token in FIRST[family] if (kind, token) != ("bpe", "<unk>") or family != "gpt"] + LAST[family]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes each tokenizer once."""
    made = {}

    def folder(kind, family):
        if (kind, family) not in made:
            made[kind, family] = tmp_path_factory.mktemp(f"{kind}_{family}")
            train(made[kind, family], kind=kind, family=family)
        return made[kind, family]

    return folder


def model_of(folder):
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]


def all_pieces(tokenizer):
    return tokenizer.pieces(range(tokenizer.vocab_size))


def by_frequency(tokens):
    return [token for token, _ in sorted(collections.Counter(tokens).items(), key=lambda item: (-item[1], item[0]))]


def plain(kind, family, lines=LINES):
    """The text between special tokens."""
    pattern = "|".join(map(re.escape, special_of(kind, family)))
    return [part for line in lines for part in re.split(pattern, line) if part]


def learn_merges(words, alphabet, count):
    """Byte-pair encoding, one merge at a time (Sennrich et al., 2016, algorithm 1); ties go to the oldest symbols."""
    ids = {symbol: number for number, symbol in enumerate(alphabet)}
    words = collections.Counter(map(tuple, words))
    merges = []
    while len(ids) < count:
        pairs = collections.Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]), default=None)
        if best is None or pairs[best] < 2:
            break
        merges.append(best)
        ids.setdefault(best[0] + best[1].removeprefix("##"), len(ids))
        merged = collections.Counter()
        for word, times in words.items():
            pieces, rest = [], list(word)
            while rest:
                size = 2 if tuple(rest[:2]) == best else 1
                pieces.append(rest[0] + "".join(piece.removeprefix("##") for piece in rest[1:size]))
                rest = rest[size:]
            merged[tuple(pieces)] += times
        words = merged
    return merges, list(ids)


# Families.


@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_ids_of_the_family(folder_of, kind, family):
    tokenizer = load_folder_tokenizer(folder_of(kind, family))
    pieces = all_pieces(tokenizer)
    special = special_of(kind, family)
    first = special[: len(special) - len(LAST[family])]
    assert tokenizer.vocab_size <= VOCAB_SIZE
    assert pieces[: len(first)] == first
    assert pieces[len(pieces) - len(LAST[family]) :] == LAST[family]
    assert all(pieces)
    assert len(set(pieces)) == len(pieces)
    assert len(pieces) > len(special) + 10
    for token in special:
        assert tokenizer.pieces(tokenizer.encode(f"the{token}dog")).count(token) == 1
        assert tokenizer.decode([pieces.index(token)]) == ""


@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_learned_from_special_tokens(folder_of, tmp_path, kind, family):
    train(tmp_path, plain(kind, family), kind, family)
    assert model_of(tmp_path) == model_of(folder_of(kind, family))
    assert plain(kind, family) != LINES


@pytest.mark.parametrize("kind", KINDS)
def test_ids_by_role(folder_of, kind):
    roles = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
    expected = {
        "gpt": (None, 0, 0, None if kind == "bpe" else 1, None, None, None),
        "bert": (0, None, None, 1, 4, 2, 3),
        "t5": (0, None, 1, 2, None, None, None),
    }
    for family, ids in expected.items():
        tokenizer = load_folder_tokenizer(folder_of(kind, family))
        assert tuple(getattr(tokenizer, f"{role}_id") for role in roles) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_around_texts(folder_of, kind):
    for first, second in zip(random_texts(40), random_texts(40, seed=1), strict=True):
        for family in FIRST:
            tokenizer = load_folder_tokenizer(folder_of(kind, family))
            a, b = tokenizer.encode(first), tokenizer.encode(second)
            one, two = {
                "gpt": ((a, [0] * len(a)), (a + b, [0] * len(a) + [1] * len(b))),
                "bert": (
                    ([2, *a, 3], [0] * (len(a) + 2)),
                    ([2, *a, 3, *b, 3], [0] * (len(a) + 2) + [1] * (len(b) + 1)),
                ),
                "t5": (([*a, 1], [0] * (len(a) + 1)), ([*a, 1, *b, 1], [0] * (len(a) + len(b) + 2))),
            }[family]
            assert tokenizer.encode_with_specials(first) == one
            assert tokenizer.encode_with_specials(first, second) == two


# Kinds.


@pytest.mark.parametrize("family", FIRST)
def test_characters_are_ids_by_frequency(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of("characters", family))
    special = special_of("characters", family)
    known = by_frequency("".join(plain("characters", family)))
    pieces = all_pieces(tokenizer)
    assert [piece for piece in pieces if piece not in special] == known
    pattern = re.compile("|".join([*map(re.escape, special), "(?s:.)"]))
    for text in [*random_texts(200), *LINES]:
        spelled = [match.group() for match in pattern.finditer(text)]
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == [pieces.index(part) if part in pieces else tokenizer.unk_id for part in spelled]
        assert offsets.tolist() == [list(match.span()) for match in pattern.finditer(text)]
        assert tokenizer.decode(ids) == "".join(part for part in spelled if part in known)


@given(text=st.text(st.sampled_from(sorted(set("".join(plain("characters", "gpt"))))), max_size=40))
@settings(deadline=None)
def test_characters_give_every_text_back(folder_of, text):
    assume("<unk>" not in text)
    tokenizer = load_folder_tokenizer(folder_of("characters", "gpt"))
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(offsets, np.arange(len(text))[:, None] + [0, 1])


def test_a_whole_book_of_characters_at_once(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("characters", "gpt"))
    text = "".join(random.Random(0).choices("the dog\nである", k=200_000))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("family", FIRST)
def test_words_are_ids_by_frequency(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of("words", family))
    special = special_of("words", family)
    known = by_frequency(word for part in plain("words", family) for word in part.split())
    pieces = all_pieces(tokenizer)
    assert [piece for piece in pieces if piece not in special] == known
    pattern = re.compile(f"({'|'.join(map(re.escape, special))})")
    for text in [*random_texts(200), *LINES]:
        words = [word for part in pattern.split(text) for word in ([part] if part in special else part.split())]
        ids = tokenizer.encode(text)
        assert ids == [pieces.index(word) if word in pieces else tokenizer.unk_id for word in words]
        assert tokenizer.decode(ids) == " ".join(word for word in words if word in known)


def bert_words(text):
    """Words and punctuation marks, as Devlin et al. split a cased text of ours: each Chinese character by itself."""
    text = re.sub("([一-鿿])", r" \1 ", text)
    return re.findall(r"[^\W_]+|[^\w\s]|_", re.sub("(?<=[^\\W_])🙂|🙂(?=[^\\W_])", "", text))


@pytest.mark.parametrize("vocab_size", [110, 150, VOCAB_SIZE])
def test_word_pieces_are_learned_by_merging(tmp_path, vocab_size):
    lines = [re.sub("[🙂🈁]", "", line) for line in LINES]
    train(tmp_path, lines, "wordpiece", "bert", vocab_size)
    words = [
        [word[0], *(f"##{c}" for c in word[1:])]
        for part in plain("wordpiece", "bert", lines)
        for word in bert_words(part)
    ]
    symbols = {symbol for word in words for symbol in word}
    marked = sorted(symbol for symbol in symbols if symbol.startswith("##") and len(symbol) == 3)
    alphabet = sorted({symbol.removeprefix("##") for symbol in symbols} | {"#"} & set("".join(lines)))
    _, pieces = learn_merges(words, [*marked, *alphabet], vocab_size - 5)
    vocabulary = model_of(tmp_path)["vocab"]
    assert sorted(vocabulary, key=vocabulary.get) == FIRST["bert"] + pieces
    assert len(pieces) > len(alphabet) + len(marked)


def test_word_pieces_are_the_longest_from_the_left(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("wordpiece", "bert"))
    known = set(all_pieces(tokenizer)) - set(FIRST["bert"])
    rng = random.Random(0)
    for _ in range(300):
        word = "".join(rng.choices(["the", "walk", "ed", "ing", "d", "o", "e", "ß", "x"], k=rng.randint(1, 5)))
        pieces, rest = [], word
        while rest and pieces != ["[UNK]"]:
            heads = [("##" if pieces else "") + rest[:size] for size in range(len(rest), 0, -1)]
            piece = next((head for head in heads if head in known), None)
            pieces = [*pieces, piece] if piece else ["[UNK]"]
            rest = rest[len((piece or "").removeprefix("##")) :] if piece else ""
        assert tokenizer.pieces(tokenizer.encode(word)) == pieces
        if pieces != ["[UNK]"]:
            assert tokenizer.decode(tokenizer.encode(f"the {word}")) == f"the {word}"


@pytest.mark.parametrize("vocab_size", [257, 300, VOCAB_SIZE])
def test_bytes_are_merged_by_frequency(tmp_path, vocab_size):
    tokenizer = train(tmp_path, kind="bpe", vocab_size=vocab_size)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [word for part in plain("bpe", "gpt") for word, _ in split.pre_tokenize_str(part)]
    merges, pieces = learn_merges(words, alphabet, vocab_size - 1)
    model = model_of(tmp_path)
    assert model["merges"] == [list(pair) for pair in merges]
    assert sorted(model["vocab"], key=model["vocab"].get) == ["<|endoftext|>", *pieces]
    for text in random_texts(100):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|endoftext|>", "")


def test_unigram_finds_the_likeliest_pieces(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("unigram", "t5"))
    scores = dict(model_of(folder_of("unigram", "t5"))["vocab"])
    special = special_of("unigram", "t5")
    assert max(scores[token] for token in special) < min(s for p, s in scores.items() if p not in special) - 100
    assert "▁the" in scores
    rng = random.Random(0)
    for _ in range(150):
        word = "▁" + "".join(rng.choices(["the", "walk", "ed", "ing", "日本", "語", "d"], k=rng.randint(1, 3)))
        best = {0: 0.0}  # of the first characters
        for end in range(1, len(word) + 1):
            best[end] = max(
                (best[start] + scores[word[start:end]] for start in range(end) if word[start:end] in scores),
                default=-np.inf,
            )
        pieces = tokenizer.pieces(tokenizer.encode(word[1:]))
        assert "".join(pieces) == word
        assert sum(scores[piece] for piece in pieces) == pytest.approx(best[len(word)], abs=1e-9)


@pytest.mark.parametrize("family", FIRST)
def test_unigram_gives_text_back_after_normalization(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of("unigram", family))
    for line in LINES:
        expected = " ".join(" ".join(plain("unigram", family, [line])).split())
        assert tokenizer.decode(tokenizer.encode(line)) == expected
    assert tokenizer.decode(tokenizer.encode("  ｔｈｅ\u3000\n dog  ")) == "the dog"


def test_unigram_skips_no_line(tmp_path):
    # The block is what SentencePiece puts for unknown characters; 4192 bytes are what it reads of a line by default.
    tokenizer = train(tmp_path, ["▅ dogs", "walking " * 2000], "unigram")
    for word in ("dogs", "walking"):
        assert tokenizer.unk_id not in tokenizer.encode(word)
    assert tokenizer.unk_id in tokenizer.encode("▅")


def test_full_width_letters_spell_no_special_token(tmp_path):
    tokenizer = train(tmp_path, [*LINES, "< / >"], "unigram", "t5")
    assert unicodedata.normalize("NFKC", "＜/s＞") == "</s>"
    assert tokenizer.eos_id in tokenizer.encode("the </s>")
    assert tokenizer.eos_id not in tokenizer.encode("the ＜/s＞")


@pytest.mark.parametrize("kind", ["characters", "words", "wordpiece", "unigram"])
def test_a_small_vocabulary_has_what_is_frequent(tmp_path, kind):
    lines = ["aaaa bbb cc d " * 9, "x▅y a\x00b", "日本語 " + "".join(map(chr, range(0x4E00, 0x4E40)))]
    for vocab_size in range(8, 30, 3):
        tokenizer = train(tmp_path / str(vocab_size), lines, kind, "bert", vocab_size)
        assert len(FIRST["bert"]) < tokenizer.vocab_size <= vocab_size
        assert tokenizer.encode("aaaa").count(tokenizer.unk_id) == 0
        assert tokenizer.unk_id in tokenizer.encode("\u4e3f")
    large = train(tmp_path / "large", lines, kind, "bert", 500)
    assert large.vocab_size < 500
    assert large.unk_id not in large.encode("aaaa 日本語 d")
    assert large.unk_id in large.encode("z")


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_the_text(folder_of, kind):
    rng = np.random.default_rng(0)
    for family in FIRST:
        tokenizer = load_folder_tokenizer(folder_of(kind, family))
        drawn = [rng.integers(0, tokenizer.vocab_size, rng.integers(0, 12)).tolist() for _ in range(60)]
        for ids in drawn + [tokenizer.encode(text) for text in random_texts(60)]:
            stream = tokenizer.stream()
            assert "".join([*(stream.push(index) for index in ids), stream.finish()]) == tokenizer.decode(ids)


# Files.


MAKE_ALL = """
import json, sys
from tfx_jax.data.tokenizers.train import train_or_load_folder
root, lines, kinds, family, vocab_size = json.loads(sys.argv[1])
for kind in kinds:
    train_or_load_folder(f"{root}/{kind}", lambda: lines, kind=kind, family=family, vocab_size=vocab_size)
"""


def test_the_same_text_gives_the_same_files_in_every_process(folder_of, tmp_path):
    for number in range(2):
        root = tmp_path / str(number)
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "TOKENIZERS_PARALLELISM": ["false", "true"][number]}
        arguments = json.dumps([str(root), LINES, KINDS, "t5", VOCAB_SIZE])
        subprocess.run([sys.executable, "-c", MAKE_ALL, arguments], check=True, env=environment)
        for kind in KINDS:
            assert {path.name for path in (root / kind).iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
            for file in ("tokenizer.json", "tokenizer_config.json"):
                assert (root / kind / file).read_bytes() == (folder_of(kind, "t5") / file).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_alphabet_is_the_same_each_time(tmp_path, kind):
    lines = ["".join(random.Random(seed).choices([chr(0x3041 + i) for i in range(80)], k=30)) for seed in range(60)]
    size = 300 if kind == "bpe" else 60
    made = [
        train(tmp_path / str(n), lines, kind, "gpt", size) and tmp_path / str(n) / "tokenizer.json" for n in range(4)
    ]
    assert len({path.read_bytes() for path in made}) == 1


def test_trains_once(tmp_path):
    calls = []

    def texts():
        calls.append(None)
        return iter(LINES)

    options = {"kind": "wordpiece", "family": "bert", "vocab_size": 200}
    first = train_or_load_folder(epath.Path(tmp_path / "new" / "folder"), texts, **options)
    assert calls
    calls.clear()
    second = train_or_load_folder(str(tmp_path / "new" / "folder"), texts, **options)
    assert not calls
    assert second.encode_batch(LINES) == first.encode_batch(LINES)
    assert max(map(max, second.encode_batch(LINES))) < second.vocab_size <= 200


def test_an_interrupted_run_leaves_nothing_half_made(tmp_path, monkeypatch):
    replaced = []
    replace = type(epath.Path(tmp_path)).replace

    def failing(self, target):
        if self.name.startswith("tokenizer.json"):
            raise KeyboardInterrupt
        replaced.append(self.name)
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(tmp_path)), "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, kind="words", family="bert")
    assert replaced
    assert not (tmp_path / "tokenizer.json").exists()
    assert train(tmp_path, kind="characters", family="gpt").encode("<|endoftext|>") == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_text_is_passed_on(tmp_path, kind):
    def texts():
        yield "the dog"
        raise UserError("cannot read it")

    with pytest.raises(UserError, match="cannot read it"):
        train_or_load_folder(tmp_path, texts, kind=kind, family="gpt", vocab_size=300)
    assert not list(tmp_path.iterdir())


def test_many_at_once(tmp_path):
    found, threads = [], []
    for _ in range(6):
        threads.append(
            threading.Thread(target=lambda: found.append(train(tmp_path, kind="unigram").encode_batch(LINES)))
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(ids == found[0] for ids in found)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_a_tokenizer_from_elsewhere_is_taken_as_it_is(folder_of, tmp_path):
    content = (folder_of("wordpiece", "bert") / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content)
    tokenizer = train(tmp_path, kind="bpe", family="gpt")
    assert tokenizer.encode(LINES[0]) == load_folder_tokenizer(folder_of("wordpiece", "bert")).encode(LINES[0])
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "letters"}, "unknown kind of tokenizer 'letters': use one of characters, words, wordpiece, bpe, uni"),
        ({"family": "vit"}, "unknown family of tokenizer 'vit': use one of gpt, bert, t5"),
        ({"kind": "bpe", "vocab_size": 256}, "vocab_size=256 must be at least 257 for bpe of the family gpt"),
        ({"kind": "words", "vocab_size": 2}, "vocab_size=2 must be at least 3 for words of the family gpt"),
        ({"kind": "unigram", "family": "t5", "vocab_size": 104}, "must be at least 105 for unigram of the family t5"),
        ({"lines": []}, "no text to train a tokenizer on"),
        ({"lines": ["", " \n", "<unk>"], "kind": "characters"}, "no text to train a tokenizer on"),
        ({"lines": ["\x01\x02"], "kind": "unigram"}, "no text to train a tokenizer on"),
        ({"lines": ["\x01\x02"], "kind": "wordpiece"}, "no text to train a tokenizer on"),
    ],
)
def test_what_cannot_be_trained(tmp_path, options, message):
    with pytest.raises(UserError) as caught:
        train(tmp_path / "new", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a", "ab", "dog " * 3000, "日本語" * 3000, " a\n\tb"], ids=len)
def test_short_and_long_texts(tmp_path, kind, text):
    tokenizer = train(tmp_path, [text], kind)
    ids = tokenizer.encode(text)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids).split() == (
        text.split() if kind != "wordpiece" else " ".join(bert_words(text)).split()
    )
    assert tokenizer.decode(ids) == text or kind not in ("characters", "bpe")


@pytest.mark.parametrize(
    ("family", "kind", "smallest"), [("gpt", "bpe", 257), ("t5", "unigram", 105), ("bert", "words", 6)]
)
def test_the_smallest_vocabulary(tmp_path, family, kind, smallest):
    assert train(tmp_path, kind=kind, family=family, vocab_size=smallest).vocab_size == smallest


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_all_there_is(tmp_path, kind):
    if kind not in ("characters", "words"):
        with pytest.raises(UserError, match=r"^vocab_size=0 must be at least "):
            train(tmp_path, kind=kind, vocab_size=0)
        return
    everything = train(tmp_path / "0", kind=kind, vocab_size=0)
    assert all_pieces(everything) == all_pieces(train(tmp_path / "large", kind=kind, vocab_size=10_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "characters"}, "was made as 'words, bert', not 'characters, bert'"),
        ({"family": "gpt"}, "was made as 'words, bert', not 'words, gpt'"),
        ({"vocab_size": 9}, "ids, but vocab_size is 9"),
    ],
)
def test_another_tokenizer_than_asked_for(folder_of, options, message):
    with pytest.raises(UserError, match=message):
        train(folder_of("words", "bert"), **{"kind": "words", "family": "bert", **options})


# Real text.


@pytest.mark.slow
@pytest.mark.data
def test_published_vocabularies(shared_data, tmp_path):
    shakespeare = read_text(shared_data / "tinyshakespeare" / "input.txt", 2 << 20)
    tokenizer = train(tmp_path / "characters", [shakespeare], "characters", "gpt", 256)
    assert tokenizer.vocab_size == 65 + 2
    ids = tokenizer.encode(shakespeare)
    assert len(ids) == 1_115_394
    assert min(ids) == 2
    assert tokenizer.decode(ids) == shakespeare
    lines = list(read_lines(shared_data / "wikitext2" / "train.txt.gz"))
    tokenizer = train(tmp_path / "words", lines, "words", "gpt", 33_278)
    assert tokenizer.vocab_size == 33_278  # with the end of text, which stands for <eos>
    assert all(tokenizer.pieces([index])[0] for index in range(33_278))
    for line, ids in zip(lines[:2000], tokenizer.encode_batch(lines[:2000]), strict=True):
        assert tokenizer.pieces(ids) == line.split()
        assert ids.count(1) == line.split().count("<unk>")


# Beside transformers.


@pytest.mark.parity
@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers(folder_of, tmp_path, kind, family):
    transformers = pytest.importorskip("transformers")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder_of(kind, family) / file).read_bytes())
    # A model in the folder makes no difference.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": {"gpt": "gpt2"}.get(family, family)}))
    ours = load_folder_tokenizer(tmp_path)
    texts = random_texts(200)
    for read in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = read.from_pretrained(tmp_path)
        assert len(theirs) == ours.vocab_size
        for role in ("pad", "bos", "eos", "unk", "mask", "cls", "sep"):
            assert getattr(theirs, f"{role}_token_id") == getattr(ours, f"{role}_id")
        assert set(theirs.all_special_tokens) == set(special_of(kind, family))
        for text, pair in itertools.pairwise(texts):
            pair = pair or None  # they take an empty one for none
            found, inputs = theirs(text, pair), ours.encode_with_specials(text, pair)
            assert found["input_ids"] == inputs.ids
            assert ("token_type_ids" in found) == (family == "bert")
            assert found.get("token_type_ids", inputs.token_types) == inputs.token_types
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
            assert theirs.decode(inputs.ids, skip_special_tokens=True) == ours.decode(inputs.ids)


@pytest.mark.parametrize(
    ("family", "roles", "expected"),
    [
        ("bert", ("cls_id", "sep_id"), (["[CLS]", "a", "[SEP]", "b", "[SEP]"], [0, 0, 0, 1, 1])),
        ("t5", (None, "eos_id"), (["a", "</s>", "b", "</s>"], [0, 0, 0, 0])),
    ],
)
def test_a_template_is_written_where_there_is_none(tmp_path, family, roles, expected):
    train_or_load_folder(tmp_path, lambda: ["a b a b"], kind="words", family=family, vocab_size=150)
    path = tmp_path / "tokenizer.json"
    whole = path.read_bytes()
    values = json.loads(whole)
    tokenizer = load_folder_tokenizer(tmp_path)
    first, last = (role and getattr(tokenizer, role) for role in roles)
    assert not write_template(tmp_path, tokenizer, first=first, last=last)
    assert path.read_bytes() == whole
    path.write_text(json.dumps(values | {"post_processor": None}))
    bare = load_folder_tokenizer(tmp_path)
    assert bare.pieces(bare.encode_with_specials("a", "b").ids) == ["a", "b"]
    assert write_template(tmp_path, bare, first=first, last=last)
    ids, types = load_folder_tokenizer(tmp_path).encode_with_specials("a", "b")
    assert (bare.pieces(ids), types) == expected
    assert len(load_folder_tokenizer(tmp_path).encode_with_specials("a").ids) == 2 + (first is not None)


@pytest.mark.parametrize("kind", ["words", "wordpiece", "unigram"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_forms_of_a_text_have_the_same_ids(tmp_path, kind, family):
    """Composed and decomposed letters, soft hyphens, and white space of all kinds; in training too."""
    lines = ["the café is über alles on the hill", "a café over the hill"] * 20
    plain = train_or_load_folder(tmp_path / "a", lambda: lines, kind=kind, family=family, vocab_size=200)
    decomposed = [unicodedata.normalize("NFD", line).replace("hill", "hi\xadll") for line in lines]
    other = train_or_load_folder(tmp_path / "b", lambda: decomposed, kind=kind, family=family, vocab_size=200)
    assert plain.pieces(range(200)) == other.pieces(range(200))
    ids = plain.encode(lines[0])
    assert plain.unk_id not in ids
    for form in (decomposed[0], lines[0].replace(" ", "\xa0"), lines[0].replace(" ", "\t \u3000")):
        assert plain.encode(form) == ids, ascii(form)
