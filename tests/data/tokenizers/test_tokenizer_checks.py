"""A tokenizer.json that would take the memory or end the program is refused, or what it asks for is left out."""

import json

import pytest
import tokenizers

from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError

PADDING = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.fixture
def folder(tmp_path):
    """`folder(**parts)`: with a tokenizer of three words, parts of which are others."""
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    values = json.loads(pipeline.to_str())

    def make(**parts):
        (tmp_path / "tokenizer.json").write_text(json.dumps(values | parts))
        (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "?"}')
        return tmp_path

    return make


@pytest.mark.parametrize(
    "padding",
    [
        {"strategy": {"Fixed": 10**12}, "pad_to_multiple_of": None},
        {"strategy": "BatchLongest", "pad_to_multiple_of": 10**12},
    ],
)
def test_nothing_is_filled_or_cut(folder, padding):
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 10}
    tokenizer = load_folder_tokenizer(folder(padding=PADDING | padding, truncation=truncation))
    assert tokenizer.encode("a b a") == [0, 1, 0]
    assert tokenizer.encode_batch(["a b", "c"]) == [[0, 1], [2]]


def replacing(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize(
    "steps",
    [
        [replacing("a", "a" * 10)] * 9,
        [{"type": "Sequence", "normalizers": [replacing("a", "a" * 100)]}, replacing("aa", "b" * 100)],
        [{"type": "Prepend", "prepend": "x" * 10_000}],
    ],
)
def test_texts_do_not_explode(folder, steps):
    normalizer = {"type": "Sequence", "normalizers": steps}
    with pytest.raises(UserError, match="normalizers would make a text more than 1,000 times as long"):
        load_folder_tokenizer(folder(normalizer=normalizer))


def test_ordinary_replacements_are_taken(folder):
    normalizer = {"type": "Sequence", "normalizers": [replacing("``", '"'), replacing("c", "a b"), {"type": "NFKC"}]}
    assert load_folder_tokenizer(folder(normalizer=normalizer)).encode("c a") == [0, 1, 0]


def test_a_template_has_few_parts(folder):
    template = {"type": "TemplateProcessing", "single": [SEQUENCE] * 101, "pair": [SEQUENCE], "special_tokens": {}}
    with pytest.raises(UserError, match="its template for a single has 101 parts: no model needs those"):
        load_folder_tokenizer(folder(post_processor=template))


def test_a_pattern_that_gives_up_says_so(folder):
    """It tries more ways than the library allows, but not on the text that every tokenizer is tried with."""
    split = {"type": "Split", "pattern": {"Regex": "((a|b| )+)+c"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_folder_tokenizer(folder(pre_tokenizer=split))
    for encode in (tokenizer.encode, tokenizer.encode_with_specials, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="the tokenizer cannot read a text: "):
            encode("a b " * 50)


@pytest.mark.parametrize("text", ["[]", "3", '{"normalizer": 3, "post_processor": [1]}', "[" * 100_000])
def test_what_is_no_tokenizer_is_refused(folder, text):
    path = folder()
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_folder_tokenizer(path)
