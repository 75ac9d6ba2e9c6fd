"""Tokenizers of the families whose folders load, made small by transformers, on 2,000 awkward strings each."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.data.tokenizers.test_hf_tokenizer import ROLES, TEXT, random_ids, random_texts
from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
OF_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# How o200k, the tokenizer of gpt-oss, divides texts into words.
WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(model, pre_tokenizer, trainer):
    """The model of a pipeline that has learned its pieces from a few sentences, as in tokenizer.json."""
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = pre_tokenizer
    pipeline.train_from_iterator(TEXT, trainer)
    return json.loads(pipeline.to_str())["model"]


def byte_level(special):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model = trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), trainer)
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def with_bytes(special):
    """BPE of characters, with bytes for unknown ones."""
    special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    options = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    model = trained(models.BPE(**options), pre_tokenizers.Metaspace(), trainer)
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def unigram(special):
    trainer = trainers.UnigramTrainer(vocab_size=250, special_tokens=special, unk_token="<unk>", show_progress=False)
    return {"vocab": list(map(tuple, trained(models.Unigram(), pre_tokenizers.Metaspace(), trainer)["vocab"]))}


def word_piece(special):
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    return {"vocab": trained(models.WordPiece(unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer(), trainer)["vocab"]}


# For each family, how its pieces are learned, and its special tokens in the order of their ids.
FAMILIES = {
    "Roberta": (byte_level, [*MARKS, "<mask>"]),
    "XLMRoberta": (unigram, [*MARKS, "<mask>"]),
    "Albert": (unigram, ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]),
    "Electra": (word_piece, OF_BERT),
    "DistilBert": (word_piece, OF_BERT),
    "Bart": (byte_level, [*MARKS, "<mask>"]),
    "MBart": (unigram, MARKS),
    "Nllb": (with_bytes, MARKS),
    "Pegasus": (unigram, ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"]),
    "T5": (unigram, ["<pad>", "</s>", "<unk>"]),
    "Llama": (with_bytes, ["<unk>", "<s>", "</s>"]),
    "Qwen2": (byte_level, ["<|endoftext|>"]),
    "Gemma": (with_bytes, ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]),
    "Whisper": (byte_level, ["<|endoftext|>"]),
    "GptOss": (byte_level, ["<|startoftext|>", "<|endoftext|>", "<|return|>"]),
}


def make_theirs(family):
    learn, special = FAMILIES[family]
    if family != "GptOss":
        return getattr(transformers, f"{family}Tokenizer")(**learn(special))
    pipeline = tokenizers.Tokenizer(models.BPE(*learn(special).values(), ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    pipeline.add_special_tokens(special)
    names = dict(zip(("bos_token", "pad_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pipeline, **names)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(tmp_path, family):
    make_theirs(family).save_pretrained(tmp_path)
    ours, theirs = load_folder_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for role in ROLES:
        if (family, role) != ("Qwen2", "bos"):  # which has one token for both ends, and names one end
            assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_token_id"), role
    texts = random_texts(2000, seed=3)
    ids = [ours.encode(text) for text in texts]
    assert ids == theirs(texts, add_special_tokens=False)["input_ids"]
    assert [ours.encode_with_specials(text).ids for text in texts] == theirs(texts)["input_ids"]
    pairs = theirs(texts, ["fox"] * len(texts))["input_ids"]
    assert [ours.encode_with_specials(text, "fox").ids for text in texts] == pairs
    for row in [*ids, *random_ids(500, len(theirs), seed=5)]:
        assert ours.decode(row) == theirs.decode(row, skip_special_tokens=True)
    assert len({tuple(row) for row in ids}) > 1500


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("Electra", "do_lower_case"),
        ("DistilBert", "strip_accents"),
        ("DistilBert", "tokenize_chinese_chars"),
        ("Roberta", "add_prefix_space"),
        ("Bart", "add_prefix_space"),
        ("Qwen2", "add_prefix_space"),
        ("Whisper", "add_prefix_space"),
        ("GptOss", "add_prefix_space"),
    ],
)
def test_options_beside_a_tokenizer_json_override_it(tmp_path, family, option, value):
    """But for that of no family, the last."""
    make_theirs(family).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {option: value}))
    ours, theirs = load_folder_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["Fox", "the café", "a你好", *random_texts(200, seed=3)]
    assert [ours.encode(text) for text in texts] == theirs(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("value", [False, True])
def test_a_gpt2_without_tokenizer_json_begins_texts_where_it_says_so(tmp_path, value):
    learned = byte_level(["<|endoftext|>"])
    (tmp_path / "vocab.json").write_text(json.dumps(learned["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, learned["merges"])))
    options = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options | {"add_bos_token": value}))
    ours, theirs = load_folder_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in random_texts(50, seed=3):
        assert ours.encode_with_specials(text).ids == theirs(text)["input_ids"]
        assert ours.encode_with_specials(text, "fox").ids == theirs(text, "fox")["input_ids"]
