"""Tokenizers of Hugging Face folders: made in place, against oracles of our own and against transformers."""

import collections
import io
import itertools
import json
import random
import re
import string
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tfx_jax.data.tokenizers.hf_tokenizer import TOKENIZER_FILES, load_folder_tokenizer
from tfx_jax.errors import UserError

TEXT = [
    "The quick brown fox jumps over the lazy dog .",
    "Don't you think it's fine, isn't it? You're right, I've been there.",
    "Der schöne Hund läuft über die Straße, ein großer Bär und kleine Kätzchen!",
    "日本語の文章を少し書きます。",
    "東京は日本の首都である。",
    "hello 🙂 world 👍🏽 lowest newest 123",
] * 5
# fmt: off
PARTS = [
    "the", "The", "dog", "Hund", "ß", "ü", "Straße", "日本", "語", "の", "東京", "🙂", "👍🏽", "👩\u200d👩\u200d👧",
    "'s", "n't", ".", ",", "!", "?", "é", "e\u0301", "Ω", "Å", "1", "23", "ﬁ", "㌔", "ｶﾞ", "▁", "##", ">>deu<<",
    "<extra_id_0>", "</s>", "[MASK]", "[SEP]", "<|endoftext|>", "<unk>", "xxxxxxxxxxxxxxx", " ", "  ", " ", "\t", "\n",
    "\u3000", "\u200b", " The", "\x85",
]
# fmt: on
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# How GPT-2 writes bytes: those that can be seen as themselves, the others as characters from 256 on.
SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
SPELLED = {byte: chr(byte) for byte in SHOWN}
SPELLED |= {byte: chr(256 + number) for number, byte in enumerate(byte for byte in range(256) if byte not in SHOWN)}
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")


def random_texts(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choice(PARTS) for _ in range(rng.randint(0, 14))) for _ in range(count)]


def random_ids(count, size, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, size, rng.integers(0, 12)).tolist() for _ in range(count)]


def write_json(path, values):
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def sentencepiece_model(**options):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=written,
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def learn_merges(words, count):
    """The pairs that byte-pair encoding merges, most frequent first (Sennrich et al., 2016, algorithm 1)."""
    merges = []
    for _ in range(count):
        pairs = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = [merged(word, best) for word in words]
    return merges


def merged(word, pair):
    """A word in which a pair is one piece wherever it stands."""
    pieces, rest = [], list(word)
    while rest:
        size = 2 if tuple(rest[:2]) == pair else 1
        pieces.append("".join(rest[:size]))
        rest = rest[size:]
    return pieces


def write_merges(folder, tokens, merges):
    vocabulary = dict.fromkeys([*tokens, *("".join(pair) for pair in merges)])
    write_json(folder / "vocab.json", {token: index for index, token in enumerate(vocabulary)})
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_gpt2(folder):
    words = [[SPELLED[byte] for byte in word.encode()] for line in TEXT for word in re.findall(" ?[^ ]+", line)]
    write_merges(folder, ["<|endoftext|>", *SPELLED.values()], learn_merges(words, 150))


def make_gpt1(folder):
    words = [[*word[:-1], word[-1] + "</w>"] for line in TEXT for word in re.findall(r"\w+|[^\w ]", line.lower())]
    characters = sorted({character for word in words for character in word} | set("".join(TEXT).lower()))
    write_merges(folder, ["<unk>", *characters], learn_merges(words, 100))


def make_bert(folder, lower=True):
    words = re.findall(r"\w+|[^\w ]", " ".join(TEXT).lower() if lower else " ".join(TEXT))
    pieces = {piece for word in words for piece in (*word, word[:3], *(f"##{c}" for c in word), f"##{word[-3:]}")}
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *sorted(pieces)]) + "\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": lower, "model_max_length": 512})


def make_cased_bert(folder):
    make_bert(folder, lower=False)


def write_pipeline(folder, source):
    """A tokenizer.json as the library `tokenizers` writes it, from the files of a family; returns the pipeline."""
    if (source / "vocab.txt").exists():
        lower = json.loads((source / "tokenizer_config.json").read_text())["do_lower_case"]
        pipeline = tokenizers.BertWordPieceTokenizer(str(source / "vocab.txt"), lowercase=lower)
    elif "</w>" in (source / "merges.txt").read_text(encoding="utf-8"):
        files = str(source / "vocab.json"), str(source / "merges.txt")
        pipeline = tokenizers.Tokenizer(models.BPE.from_file(*files, unk_token="<unk>", end_of_word_suffix="</w>"))
        pipeline.normalizer = normalizers.BertNormalizer(lowercase=True)
        pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pipeline.decoder = decoders.BPEDecoder(suffix="</w>")
        pipeline.add_special_tokens(["<unk>"])
    else:
        pipeline = tokenizers.ByteLevelBPETokenizer(str(source / "vocab.json"), str(source / "merges.txt"))
        pipeline.add_special_tokens(["<|endoftext|>"])
    pipeline.save(str(folder / "tokenizer.json"))
    return pipeline


def make_t5(folder):
    (folder / "spiece.model").write_bytes(sentencepiece_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))


def make_marian(folder):
    """Some pieces of either side are not in the vocabulary, and its order is neither model's."""
    pieces = []
    for side, kind in (("source", "unigram"), ("target", "bpe")):
        data = sentencepiece_model(model_type=kind, eos_id=0, unk_id=1, bos_id=-1)
        (folder / f"{side}.spm").write_bytes(data)
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        pieces += [processor.id_to_piece(index) for index in range(2, processor.vocab_size())]
    kept = sorted({piece for number, piece in enumerate(pieces) if number % 5 or piece in string.ascii_lowercase})
    vocabulary = ["</s>", "<unk>", *kept, ">>deu<<", "<pad>"]
    write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(vocabulary)})


def make_m2m100(folder):
    """Some pieces are not in the vocabulary, behind which are the languages."""
    data = sentencepiece_model(model_type="bpe")
    (folder / "sentencepiece.bpe.model").write_bytes(data)
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = [processor.id_to_piece(index) for index in range(3, processor.vocab_size()) if index % 7]
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(vocabulary)})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer", "sep_token": "</s>"})


FAMILIES = {
    "gpt2": make_gpt2,
    "gpt1": make_gpt1,
    "bert": make_bert,
    "cased_bert": make_cased_bert,
    "t5": make_t5,
    "marian": make_marian,
    "m2m100": make_m2m100,
}
PIPELINES = ("gpt2", "gpt1", "bert", "cased_bert")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """The folder of a family, made once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            FAMILIES[family](made[family])
        return made[family]

    return get


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def refused(folder, match):
    with pytest.raises(UserError, match=match) as caught:
        load_folder_tokenizer(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def visible(text):
    """Without what some tokenizers drop: spaces, accents that are characters of their own, joiners."""
    return [character for character in text if unicodedata.category(character)[0] not in "ZCM" and character != "▁"]


# What each family does, by oracles of our own.


def test_gpt2_is_bytes_merged_by_rank(folder_of):
    """The algorithm of Sennrich et al. (2016) on bytes, written out: of all neighbors, the pair learned first."""
    folder = folder_of("gpt2")
    tokenizer = load_folder_tokenizer(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines) if not line.startswith("#version")}
    for word in ["lowest", " lowest", "Straße", " 東京", "🙂", "quick", "zzz", " 12345", "\x00"]:
        pieces = [SPELLED[byte] for byte in word.encode()]
        while len(pieces) > 1:
            pairs = list(itertools.pairwise(pieces))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            place = pairs.index(best)
            pieces[place : place + 2] = ["".join(best)]
        assert tokenizer.pieces(tokenizer.encode(word)) == pieces
        assert tokenizer.encode(word) == [vocabulary[piece] for piece in pieces]


def test_prompts_begin_with_the_special_token_of_the_template(tmp_path):
    """As Llama's do in transformers; what a template has after a text would end it."""
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    specials = [("<s>", 0), ("</s>", 1)]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=specials)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_folder_tokenizer(tmp_path)
    assert loaded.encode_prompt("ab") == [0, 2, 3]
    assert loaded.encode_prompt("") == [0]


def test_gpt2_gives_every_text_back(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("gpt2"))
    for text in random_texts(1_000):
        if "<|endoftext|>" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_with_specials("a", "b").ids == tokenizer.encode("a") + tokenizer.encode("b")
    text = "a<|endoftext|>b"
    assert tokenizer.encode(text) == [*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")]
    assert tokenizer.decode(tokenizer.encode(text)) == "ab"


@pytest.mark.parametrize("family", ["bert", "cased_bert"])
def test_bert_takes_the_longest_pieces_from_the_left(folder_of, family):
    folder = folder_of(family)
    tokenizer = load_folder_tokenizer(folder)
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    found = set()
    for word in ["lowest", "newest", "Straße", "HELLO", "schön", "foxjumps", "日", "qqq", "🙂"]:
        pieces, rest = [], word
        if family == "bert":
            decomposed = unicodedata.normalize("NFD", word.lower())
            rest = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
        while rest:
            mark = "##" if pieces else ""
            fitting = [end for end in range(1, len(rest) + 1) if mark + rest[:end] in vocabulary]
            if not fitting:
                pieces = ["[UNK]"]
                break
            pieces.append(mark + rest[: fitting[-1]])
            rest = rest[fitting[-1] :]
        assert tokenizer.pieces(tokenizer.encode(word)) == pieces
        found.add(len(pieces))
    assert len(found) > 2
    same = tokenizer.encode("Hund") == tokenizer.encode("hund")
    assert same == (family == "bert")


def test_bert_has_marks_around_and_types(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("bert"))
    first, second = tokenizer.encode("The dog"), tokenizer.encode("東京 fox")
    assert tokenizer.encode_with_specials("The dog") == ([2, *first, 3], [0] * (len(first) + 2))
    both = tokenizer.encode_with_specials("The dog", "東京 fox")
    assert both.ids == [2, *first, 3, *second, 3]
    assert both.token_types == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert tokenizer.encode_with_specials("", "").ids == [2, 3, 3]
    assert tokenizer.encode("a [MASK] b")[1] == tokenizer.mask_id == 4
    assert tokenizer.decode(both.ids) == "the dog 東 京 fox"


def test_t5_is_sentencepiece_with_sentinels_at_the_end(folder_of):
    folder = folder_of("t5")
    tokenizer = load_folder_tokenizer(folder)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    assert tokenizer.vocab_size == processor.vocab_size() + 100
    for text in ["", "  ", *TEXT[:6], "ｶﾞ ﬁ  x🙂"]:
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.encode_with_specials(text) == (
            [*processor.encode(text), 1],
            [0] * (len(processor.encode(text)) + 1),
        )
    sentinels = tokenizer.encode("".join(f"<extra_id_{number}>" for number in range(100)))
    assert sentinels == list(range(tokenizer.vocab_size - 1, tokenizer.vocab_size - 101, -1))
    fox, dog = processor.encode("fox"), processor.encode("dog")
    assert tokenizer.encode("fox <extra_id_7> dog") == [*fox, sentinels[7], *dog]
    assert tokenizer.decode([*fox, sentinels[7], *dog, 1, 0]) == "fox dog"
    assert tokenizer.encode_with_specials("fox", "dog").ids == [*fox, 1, *dog, 1]
    assert tokenizer.pieces([sentinels[3], 1]) == ["<extra_id_3>", "</s>"]


def test_t5_takes_a_next_line_for_a_space(folder_of):
    """As transformers does: SentencePiece alone knows no such character."""
    tokenizer = load_folder_tokenizer(folder_of("t5"))
    assert tokenizer.encode("the\x85fox\x85") == tokenizer.encode("the fox ")
    ids, offsets = tokenizer.encode_with_offsets("the\x85fox")
    assert ids == tokenizer.encode("the fox")
    assert offsets[-1].tolist()[1] == 7


def test_other_numbers_of_sentinels(folder_of, tmp_path):
    (tmp_path / "spiece.model").write_bytes((folder_of("t5") / "spiece.model").read_bytes())
    write_json(tmp_path / "tokenizer_config.json", {"extra_ids": 2})
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.pieces([tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]) == ["<extra_id_1>", "<extra_id_0>"]


def test_marian_splits_the_source_and_joins_the_target(folder_of):
    folder = folder_of("marian")
    tokenizer = load_folder_tokenizer(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm")) for side in ("source", "target")
    )
    unknown = 0
    for text in TEXT[:6]:
        ids = [vocabulary.get(piece, vocabulary["<unk>"]) for piece in source.encode(text, out_type=str)]
        unknown += ids.count(vocabulary["<unk>"])
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode_with_specials(text).ids == [*ids, vocabulary["</s>"]]
        pieces = [piece for piece in target.encode(text, out_type=str) if piece in vocabulary]
        assert tokenizer.decode(vocabulary[piece] for piece in pieces) == target.decode_pieces(pieces).strip()
    assert unknown > 10
    fox = tokenizer.encode("fox")
    assert tokenizer.encode(">>deu<< fox") == [vocabulary[">>deu<<"], *fox]
    assert tokenizer.encode(">>xyz<< fox") == [vocabulary["<unk>"], *fox]
    assert tokenizer.encode("fox >>deu<<")[-1] != vocabulary[">>deu<<"]
    assert tokenizer.encode_with_specials("fox", "fox").ids == [*fox, *fox, 0]


# What holds for all.


def test_batches_are_the_texts_one_by_one(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of(family))
    texts = random_texts(200)
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode("") == []


def test_offsets_say_where_the_characters_are(folder_of, family):
    """What the tokens cover is the whole text."""
    tokenizer = load_folder_tokenizer(folder_of(family))
    for text in random_texts(500, seed=1):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert offsets.shape == (len(ids), 2)
        assert offsets.dtype == np.int64
        assert (offsets[:, 0] < offsets[:, 1]).all()
        assert (np.diff(offsets, axis=0) >= 0).all()
        covered = "".join(text[place] for place in sorted({p for row in offsets for p in range(*row)}))
        assert visible(covered) == visible(text)
    assert tokenizer.encode_with_offsets("")[1].shape == (0, 2)


def test_offsets_of_a_sentence(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of(family))
    text = "The quick  fox"
    words = ["The", " quick", " ", " fox"] if family == "gpt2" else ["The", "quick", "fox"]
    starts = [text.index(word) for word in words if word.strip()]
    _, offsets = tokenizer.encode_with_offsets(text)
    assert set(starts) <= set(offsets[:, 0].tolist())
    assert offsets[0].tolist()[0] == 0
    assert offsets[-1].tolist()[1] == len(text)


def streamed(tokenizer, ids):
    """The parts of a text."""
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()]


def test_streams_are_the_text(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of(family))
    found = [tokenizer.encode(text) for text in random_texts(200, seed=2)]
    if family not in ("bert", "cased_bert"):  # whose spaces depend on what follows, and which do not generate
        found += random_ids(1_000, tokenizer.vocab_size + 3)
    for ids in found:
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_streams_of_gpt2_hold_no_broken_character(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("gpt2"))
    text = "Bär 👩‍👩‍👧 日本 𝄞"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    assert "\N{REPLACEMENT CHARACTER}" in tokenizer.decode(ids[:-1])
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_ids_that_the_vocabulary_lacks_have_no_text(folder_of, family):
    tokenizer = load_folder_tokenizer(folder_of(family))
    ids = tokenizer.encode("the fox")
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 27]
    assert tokenizer.pieces(beyond) == ["", ""]
    assert tokenizer.decode([*beyond, *ids, *beyond]) == tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode(np.array(ids, np.int32)) == "the fox"


@pytest.mark.parametrize("family", PIPELINES)
def test_tokenizer_json_comes_first_and_says_the_same(folder_of, tmp_path, family):
    write_pipeline(tmp_path, folder_of(family))
    write_json(tmp_path / "vocab.json", {"a": 0})
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.txt").write_text("")
    tokenizer, other = load_folder_tokenizer(tmp_path), load_folder_tokenizer(folder_of(family))
    assert tokenizer.vocab_size == other.vocab_size
    for text, pair in zip(random_texts(300), random_texts(300, seed=9), strict=True):
        assert tokenizer.encode(text) == other.encode(text)
        np.testing.assert_array_equal(tokenizer.encode_with_offsets(text)[1], other.encode_with_offsets(text)[1])
        assert tokenizer.decode(tokenizer.encode(text)) == other.decode(other.encode(text))
        if pair and family.endswith("bert"):
            assert tokenizer.encode_with_specials(text, pair) == other.encode_with_specials(text, pair)
    for role in ROLES:
        if (family, role) != ("gpt2", "unk"):  # which a text of bytes never has
            assert getattr(tokenizer, f"{role}_id") == getattr(other, f"{role}_id"), role


def test_texts_are_neither_cut_nor_filled(folder_of, tmp_path):
    pipeline = write_pipeline(tmp_path, folder_of("bert"))
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=8)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_folder_tokenizer(tmp_path)
    assert len(tokenizer.encode("the dog " * 20)) == 40
    assert len(tokenizer.encode("dog")) == 1
    assert len(tokenizer.encode_with_specials("the dog " * 20).ids) == 42


# Special tokens.


@pytest.mark.parametrize(
    ("family", "ids"),
    [
        ("gpt2", {"bos": 0, "eos": 0, "unk": 0}),
        ("gpt1", {"unk": 0}),
        ("bert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("t5", {"pad": 0, "eos": 1, "unk": 2}),
        ("marian", {"eos": 0, "unk": 1, "pad": -1}),
        ("m2m100", {"bos": 0, "pad": 1, "eos": 2, "sep": 2, "unk": 3}),
    ],
)
def test_special_ids(folder_of, family, ids):
    tokenizer = load_folder_tokenizer(folder_of(family))
    for role in ROLES:
        want = ids.get(role)
        assert getattr(tokenizer, f"{role}_id") == (tokenizer.vocab_size - 1 if want == -1 else want), role


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"pad_token": "fox", "eos_token": None}},
        {"tokenizer_config.json": {"pad_token": {"content": "fox", "lstrip": False, "__type": "AddedToken"}}},
        {"special_tokens_map.json": {"pad_token": {"content": "fox"}}},
        {"tokenizer_config.json": {"pad_token": "fox"}, "special_tokens_map.json": {"pad_token": "dog"}},
        {"config.json": {"pad_token_id": "fox"}},
        {"config.json": {"pad_token_id": None}, "generation_config.json": {"pad_token_id": ["fox"]}},
        {"config.json": {"pad_token_id": 10_000}, "generation_config.json": {"pad_token_id": "fox"}},
    ],
)
def test_where_ids_come_from(folder_of, tmp_path, files):
    write_pipeline(tmp_path, folder_of("gpt2"))
    fox = load_folder_tokenizer(tmp_path).encode("f")[0]
    name = load_folder_tokenizer(tmp_path).pieces([fox])[0]
    for file, values in files.items():
        (tmp_path / file).write_text(
            json.dumps(values)
            .replace('"fox"', str(fox) if "config.json" in file and "tok" not in file else json.dumps(name))
            .replace("dog", "e")
        )
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.pad_id == fox
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    is_named = any("token_id" not in json.dumps(values) for values in files.values())
    assert tokenizer.decode([fox]) == ("" if is_named else "f")


def test_a_special_token_without_an_id_is_none_and_a_warning_says_so(tmp_path, caplog):
    make_gpt2(tmp_path)
    load_folder_tokenizer(tmp_path)
    assert not caplog.messages  # names that no file states may be missing
    write_json(tmp_path / "tokenizer_config.json", {"pad_token": "<never seen>"})
    write_json(tmp_path / "config.json", {"pad_token_id": 0})
    assert load_folder_tokenizer(tmp_path).pad_id is None
    assert caplog.messages == [f"{tmp_path}: no token is the pad token, as the vocabulary lacks '<never seen>'"]


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "marian"])
def test_added_tokens(folder_of, tmp_path, name, file):
    for path in folder_of(name).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    size = load_folder_tokenizer(tmp_path).vocab_size
    options = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    if file == "added_tokens.json":
        write_json(tmp_path / file, {"<Ein>": size, "<Zwei>": size + 1})
        write_json(tmp_path / "special_tokens_map.json", {"additional_special_tokens": ["<Zwei>"]})
    else:
        tokens = {"<Ein>": False, "<Zwei>": True}
        added = {str(size + n): {"content": t, "special": s, **options} for n, (t, s) in enumerate(tokens.items())}
        write_json(tmp_path / file, {"added_tokens_decoder": added})
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.vocab_size == size + 2
    assert [index for index in tokenizer.encode("fox<Ein><Zwei>") if index >= size] == [size, size + 1]
    assert tokenizer.decode([size, size + 1]).lower() == "<ein>"
    assert tokenizer.pieces([size, size + 1]) == ["<Ein>", "<Zwei>"]
    write_json(tmp_path / "tokenizer_config.json", {})
    write_json(tmp_path / "added_tokens.json", {"<Ein>": size + 7} if name in ("gpt2", "bert") else {"<Ein>": 5})
    refused(tmp_path, "adds a token '<Ein>' as|belongs to another token too")


def test_spaces_before_punctuation_go_where_the_folder_says_so(folder_of, tmp_path):
    (tmp_path / "spiece.model").write_bytes((folder_of("t5") / "spiece.model").read_bytes())
    text = "it 's fine , is n't it ?"
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    write_json(tmp_path / "tokenizer_config.json", {"clean_up_tokenization_spaces": True})
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == "it's fine, isn't it?"
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


def test_the_space_of_the_first_word(folder_of, tmp_path):
    for path in folder_of("gpt2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_json(tmp_path / "tokenizer_config.json", {"add_prefix_space": True, "clean_up_tokenization_spaces": True})
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.encode("dog") == load_folder_tokenizer(folder_of("gpt2")).encode(" dog")
    assert tokenizer.decode(tokenizer.encode(" dog .")) == " dog ."  # whose spaces are those of the text


# What is refused.


@pytest.mark.parametrize(
    ("name", "file", "content", "match"),
    [
        ("gpt2", "vocab.json", "{", r"vocab\.json is damaged \(.*\): fetch it again$"),
        ("gpt2", "vocab.json", "[1]", r"vocab\.json must hold a JSON object, got a list: fetch it again$"),
        ("gpt2", "vocab.json", '{"a": "b"}', r"vocab\.json: the id of 'a' is 'b', not a number$"),
        ("gpt2", "vocab.json", '{"a": -1}', "the id of 'a' is -1"),
        ("gpt2", "vocab.json", '{"a": 0}', r"merges\.txt is damaged \(.*\): fetch it again$"),
        ("gpt2", "merges.txt", "a b c\n", r"merges\.txt is damaged \("),
        ("gpt2", "merges.txt", b"\xff\xfe", r"merges\.txt is damaged \("),
        ("bert", "vocab.txt", b"[UNK]\n\xff", r"vocab\.txt is damaged \("),
        ("bert", "vocab.txt", "[UNK]\n[CLS]\nfox\n", r"vocab\.txt has no \[SEP\], which every BERT needs"),
        ("bert", "vocab.txt", "", r"vocab\.txt has no \[UNK\]"),
        ("bert", "tokenizer_config.json", '{"do_lower_case": "yes"}', "do_lower_case is 'yes', not a bool$"),
        ("bert", "tokenizer_config.json", '{"mask_token": 3}', "the special token 3 has no name$"),
        ("bert", "tokenizer_config.json", '{"mask_token": {"text": "x"}}', "the special token .* has no name$"),
        ("bert", "special_tokens_map.json", "nonsense", r"special_tokens_map\.json is damaged"),
        ("bert", "added_tokens.json", '{"x": "y"}', r"added_tokens\.json is damaged: its added tokens are no names"),
        ("bert", "tokenizer_config.json", '{"added_tokens_decoder": [1]}', "its added tokens are no names with ids$"),
        (
            "bert",
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"5": {"content": "x", "lstrip": "no"}}}',
            "its added tokens are no names with ids$",
        ),
        ("t5", "spiece.model", "", r"spiece\.model is damaged"),
        ("t5", "spiece.model", "\x00" * 50, r"spiece\.model is damaged"),
        ("t5", "tokenizer_config.json", '{"extra_ids": "many"}', "extra_ids is 'many', not a int$"),
        ("marian", "target.spm", "nonsense", r"target\.spm is damaged"),
        ("marian", "vocab.json", '{"▁fox": 0}', "the vocabulary lacks the end of sentence or the unknown token$"),
        ("marian", "vocab.json", '{"</s>": 0, "<unk>": 0}', "the id 0 of '</s>' belongs to another token too$"),
        ("marian", "tokenizer_config.json", '{"separate_vocabs": true}', "separate_vocabs is true, but only"),
        ("m2m100", "tokenizer_config.json", '{"src_lang": "xx"}', "src_lang has no token __xx__$"),
        (
            "m2m100",
            "tokenizer_config.json",
            '{"language_codes": "wmt21"}',
            "language_codes is 'wmt21', but only 'm2m100'",
        ),
        ("gpt2", "tokenizer.json", "{}", r"tokenizer\.json is damaged \("),
        ("gpt2", "tokenizer.json", '{"version": "1.0", "model": null}', r"tokenizer\.json is damaged \("),
        (
            "gpt2",
            "tokenizer.json",
            '{"version": "1.0", "model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {}, '
            '"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}}',
            r"tokenizer\.json is damaged \(.*Missing \[UNK\]",
        ),
        (
            "gpt2",
            "config.json",
            '{"model_type": "roberta"}',
            r"vocab\.json belongs to a tokenizer of roberta, which is",
        ),
        ("gpt2", "tokenizer_config.json", '{"tokenizer_class": "BartTokenizerFast"}', "a tokenizer of bart, which is"),
        (
            "bert",
            "config.json",
            '{"tokenizer_class": "BertJapaneseTokenizer"}',
            "a tokenizer of bertjapanese, which is",
        ),
        (
            "t5",
            "config.json",
            '{"model_type": "big_bird"}',
            "a tokenizer of big_bird, which is read from tokenizer.json",
        ),
    ],
)
def test_damaged_and_foreign_files(folder_of, tmp_path, name, file, content, match):
    for path in folder_of(name).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(tmp_path, match)


def test_a_file_damaged_anywhere_is_read_or_refused(folder_of, tmp_path):
    """Rust's panics are no `Exception`, and must not come through either."""
    write_pipeline(tmp_path, folder_of("bert"))
    path = tmp_path / "tokenizer.json"
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refusals = 0
    for _ in range(200):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            damaged[place] = rng.choice(list(b'0-1[]{},:"nx'))
        path.write_bytes(damaged[: rng.integers(1, len(data))] if rng.random() < 0.3 else damaged)
        try:
            load_folder_tokenizer(tmp_path).encode("a fox")
        except UserError as error:
            refusals += "\n" not in str(error)
    assert refusals > 50


def test_nothing_there(tmp_path):
    refused(tmp_path, "has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt, nor")
    refused(tmp_path / "nowhere", "nowhere is not a folder$")
    write_json(tmp_path / "vocab.json", {"a": 0})
    refused(tmp_path, "has no tokenizer")


def test_the_files_are_those_that_are_read(folder_of, tmp_path):
    for name in FAMILIES:
        assert {path.name for path in folder_of(name).iterdir()} <= set(TOKENIZER_FILES)


# Beside transformers.


@pytest.fixture
def theirs_of(folder_of):
    transformers = pytest.importorskip("transformers")
    classes = {
        "gpt2": transformers.GPT2Tokenizer,
        "gpt1": transformers.OpenAIGPTTokenizer,
        "bert": transformers.BertTokenizer,
        "cased_bert": transformers.BertTokenizer,
        "t5": transformers.T5Tokenizer,
        "marian": transformers.MarianTokenizer,
        "m2m100": transformers.M2M100Tokenizer,
    }
    return lambda family, folder: classes[family].from_pretrained(folder)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_saved_by_them", [False, True])
def test_transformers(folder_of, theirs_of, tmp_path, family, is_saved_by_them):
    """The same folder in both, and the one that they save, which has a tokenizer.json wherever they can write one."""
    folder = folder_of(family)
    theirs = theirs_of(family, folder)
    if is_saved_by_them:
        theirs.save_pretrained(tmp_path)
        assert (tmp_path / "tokenizer.json").exists() == (family not in ("marian", "m2m100"))
        folder, theirs = tmp_path, theirs_of(family, tmp_path)
    ours = load_folder_tokenizer(folder)
    assert ours.vocab_size == len(theirs) + (100 if family == "m2m100" else 0)  # they do not count its languages
    for role in ROLES:
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_token_id"), role
    texts = random_texts(700, seed=3)
    pairs = [text or "fox" for text in random_texts(700, seed=4)]  # they take "" for no second text
    for text, pair in zip(texts, pairs, strict=True):
        ids, offsets = ours.encode_with_offsets(text)
        want = theirs(text, add_special_tokens=False, return_offsets_mapping=theirs.is_fast)
        assert ids == want["input_ids"], text
        # Of a letter and its accent they count the letter only, if it was SentencePiece's rules that joined them.
        if theirs.is_fast and not (family == "t5" and "e\u0301" in text):
            assert list(map(tuple, offsets.tolist())) == want["offset_mapping"], text
        assert ours.encode_with_specials(text).ids == theirs(text)["input_ids"]
        both = theirs(text, pair, return_token_type_ids=True)
        assert ours.encode_with_specials(text, pair).ids == both["input_ids"]
        if family not in ("marian", "m2m100"):  # whose models have no types
            assert ours.encode_with_specials(text, pair).token_types == both["token_type_ids"]
    # They leave a space where T5 begins with two, which SentencePiece removes.
    ending = str.lstrip if family == "t5" else str
    for ids in [ours.encode(text) for text in texts] + random_ids(700, len(theirs), seed=5):
        assert ending(ours.decode(ids)) == ending(theirs.decode(ids, skip_special_tokens=True)), ids
        assert ours.pieces(ids) == theirs.convert_ids_to_tokens(ids)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "language", "code", "size"),
    [("MBart", "de_DE", "de_DE", 25), ("MBart50", "de_DE", "de_DE", 52), ("Nllb", "deu_Latn", "deu_Latn", 202)]
    + [("M2M100", "de", "__de__", 100)],
)
def test_the_language_of_a_source_is_theirs(folder_of, tmp_path, name, language, code, size):
    """A folder that they save with one source language is read for another one."""
    cls = getattr(pytest.importorskip("transformers"), f"{name}Tokenizer")
    if name == "M2M100":
        theirs = cls.from_pretrained(folder_of("m2m100"))
    else:
        pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁fox"]
        is_bpe = name == "Nllb"  # the others are unigram models, with a score for each piece
        theirs = cls(
            vocab={p: n for n, p in enumerate(pieces)} if is_bpe else [(p, -1.0 * n) for n, p in enumerate(pieces)]
        )
    theirs.save_pretrained(tmp_path)
    ours = load_folder_tokenizer(tmp_path)
    assert len(ours.languages) == size or name == "Nllb"
    assert ours.language_id(language) == theirs.convert_tokens_to_ids(code)
    for text in ("the fox", "", f"the {code}"):
        assert ours.encode_source(text) == theirs(text)["input_ids"]
    theirs.src_lang = language
    for text in ("the fox", "", f"the {code}"):
        assert ours.encode_source(text, language) == theirs(text)["input_ids"]
    with pytest.raises(UserError, match="the tokenizer has no language 'xx'; its languages are: "):
        ours.encode_source("the fox", "xx")


def test_a_tokenizer_without_languages_marks_none(folder_of):
    tokenizer = load_folder_tokenizer(folder_of("t5"))
    assert tokenizer.encode_source("fox") == tokenizer.encode_with_specials("fox").ids
    with pytest.raises(UserError, match=r"the tokenizer has no language 'de'; its languages are: none$"):
        tokenizer.encode_source("fox", "de")


def test_a_language_needs_a_place_in_the_template(folder_of, tmp_path):
    """Here the languages are special tokens, but none is written around a text."""
    write_json(tmp_path / "tokenizer_config.json", {"additional_special_tokens": ["de_DE", "en_XX"]})
    pipeline = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "de_DE": 1, "en_XX": 2}, unk_token="<unk>"))
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.languages == {"de_DE": 1, "en_XX": 2}
    with pytest.raises(UserError, match=r"marks no language of a source, so there is no place for 'de_DE'$"):
        tokenizer.encode_source("fox", "de_DE")
