"""BPE-dropout: the same text in other pieces, as often as the probability says, and the same for the same seed."""

import collections
import functools
import subprocess
import sys

import numpy as np
import pytest

from tests.data.tokenizers.test_hf_tokenizer import TEXT, random_texts, sentencepiece_model
from tests.data.tokenizers_made_here import EOS_ID, UNK_ID, make_tokenizer
from tfx_jax.data.tokenizers.bpe_dropout import Merges
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, load_folder_tokenizer
from tfx_jax.errors import UserError

# Trained on TEXT alone, so that it does not know all characters of `random_texts`.
TOKENIZER = make_tokenizer(TEXT, "sentencepiece", vocab_size=200)
TEXTS = [*TEXT, *random_texts(300)]


def sample(texts, bpe_dropout=0.3, seed=0, tokenizer: HFTokenizer = TOKENIZER):
    return tokenizer.sample_batch(texts, bpe_dropout=bpe_dropout, rng=np.random.default_rng(seed))


def test_the_pieces_are_others_and_the_text_is_the_same():
    plain, sampled = TOKENIZER.encode_batch(TEXT), sample(TEXT)
    assert sampled != plain
    assert sum(map(len, sampled)) > sum(map(len, plain))
    assert list(map(TOKENIZER.decode, sampled)) == list(map(TOKENIZER.decode, plain))
    assert EOS_ID not in {index for ids in sampled for index in ids}


def test_without_dropout_the_ids_are_those_of_evaluation():
    plain = TOKENIZER.encode_batch(TEXTS)
    assert UNK_ID in {index for ids in plain for index in ids}
    assert sample(TEXTS, bpe_dropout=0.0) == plain


def test_a_merge_is_left_out_as_often_as_the_probability_says():
    # One merge of "b" and "a", as "ba" is the only pair twice: 4 special tokens, "▁", "b", "a", and "ba".
    one_merge = make_tokenizer(["baba"], "sentencepiece", vocab_size=8)
    assert one_merge.pieces(one_merge.encode("bababa")) == ["▁", "ba", "ba", "ba"]
    [ids] = sample(["ba" * 10_000], 0.25, tokenizer=one_merge)
    left_out = 1 - one_merge.pieces(ids).count("ba") / 10_000
    assert abs(left_out - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 10_000)


SCORES = {"▁": -9, "a": -9, "b": -9, "aa": 0, "ab": -1, "aab": -2, "ba": -3, "▁a": -4, "aaab": -5}


@functools.cache
def distribution(symbols, left_out, dropout):
    """The exact probability of each split of a word, one merge at a time: the best place, from the left."""
    places = [place for place in range(len(symbols) - 1) if place not in left_out]
    places = [place for place in places if symbols[place] + symbols[place + 1] in SCORES]
    if not places:
        return {symbols: 1.0}
    at = max(places, key=lambda place: (SCORES[symbols[place] + symbols[place + 1]], -place))
    merged = (*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :])
    # Places behind the merged pair move by one, and those of the pair with its neighbors are new.
    others = frozenset(place - (place > at) for place in left_out if place not in (at - 1, at, at + 1))
    result = collections.Counter()
    for weight, (following, now) in ((1 - dropout, (merged, others)), (dropout, (symbols, left_out | {at}))):
        for split, probability in distribution(following, now, dropout).items():
            result[split] += weight * probability
    return result


@pytest.mark.parametrize("word", ["▁aab", "▁aaaaab", "abab", "aaaa", "▁baabaaab"])
@pytest.mark.parametrize("dropout", [0.1, 0.6])
def test_every_split_is_as_probable_as_one_merge_after_the_other_makes_it(word, dropout):
    merges, count = Merges(SCORES), 20_000
    rows = merges.split([word, "b"] * count, dropout=dropout, rng=np.random.default_rng(0))
    found = collections.Counter(tuple(merges.symbols[number] for number in row) for row in rows[::2])
    assert all(merges.symbols[number] == "b" for row in rows[1::2] for number in row)
    expected = distribution(tuple(word), frozenset(), dropout)
    assert found.keys() <= expected.keys()
    for split, probability in expected.items():
        error = 5 * np.sqrt(probability * (1 - probability) / count) + 1e-12
        assert abs(found[split] / count - probability) < error, (split, probability)


def test_a_long_text_without_spaces_is_split_soon():
    rng = np.random.default_rng(0)
    letters = "".join(rng.choice(["a", "b"], 50_000))
    (row,) = Merges(SCORES).split([letters], dropout=0.1, rng=rng)
    assert 10_000 < len(row) < 40_000


_IN_A_PROCESS = """
from tests.data.tokenizers.test_bpe_dropout import TEXTS, sample
print([sample(TEXTS, seed=seed) for seed in (0, 2**32 - 1, 2**64)])
"""


def test_a_seed_gives_the_same_pieces_in_every_process():
    """Or a run that is resumed would be another run, and processes that train together would have other batches."""
    expected = [sample(TEXTS, seed=seed) for seed in (0, 2**32 - 1, 2**64)]
    assert len({str(ids) for ids in expected}) == 3
    done = subprocess.run([sys.executable, "-c", _IN_A_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


@pytest.mark.parametrize(
    ("kind", "family"), [("words", "marian"), ("characters", "marian"), ("unigram", "t5"), ("bpe", "gpt")]
)
def test_others_have_no_merges_that_sentencepiece_could_leave_out(kind, family):
    with pytest.raises(UserError, match=r"bpe_dropout needs a tokenizer of byte pairs from SentencePiece"):
        sample(TEXT, tokenizer=make_tokenizer(TEXT, kind, vocab_size=500, family=family))


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [({}, False), ({"user_defined_symbols": "qu"}, True), ({"split_by_whitespace": False}, True)],
)
def test_pieces_that_no_merge_within_a_word_makes_are_refused(tmp_path, options, is_refused):
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    (tmp_path / "spiece.model").write_bytes(sentencepiece_model(model_type="bpe", **ids, **options))
    tokenizer = load_folder_tokenizer(tmp_path)
    if is_refused:
        with pytest.raises(UserError, match=r"bpe_dropout needs a tokenizer of byte pairs from SentencePiece"):
            sample(TEXT, tokenizer=tokenizer)
    else:
        assert sample(TEXT, 0.0, tokenizer=tokenizer) == tokenizer.encode_batch(TEXT)
