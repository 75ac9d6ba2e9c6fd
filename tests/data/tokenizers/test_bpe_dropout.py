"""BPE-dropout: the same text in other pieces, as often as the probability says, and the same for the same seed."""

import concurrent.futures

import numpy as np
import pytest

from tests.data.tokenizers.test_hf_tokenizer import TEXT, random_texts
from tests.data.tokenizers_made_here import EOS_ID, UNK_ID, make_tokenizer
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError

# Merges of its five pairs of lines, without the parts of `random_texts` that no line has.
TOKENIZER = make_tokenizer(TEXT, "sentencepiece", vocab_size=200)
TEXTS = [*TEXT, *random_texts(300)]


def sample(texts, bpe_dropout=0.3, seed=0, tokenizer: HFTokenizer = TOKENIZER):
    return tokenizer.sample_batch(texts, bpe_dropout=bpe_dropout, seed=seed)


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


def test_a_seed_gives_the_same_pieces_in_every_thread():
    expected = [sample(TEXTS, seed=seed) for seed in range(6)]
    assert len({str(ids) for ids in expected}) == 6
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda seed: sample(TEXTS, seed=seed % 6), range(12))) == expected * 2


@pytest.mark.parametrize(
    ("kind", "family"), [("words", "marian"), ("characters", "marian"), ("unigram", "t5"), ("bpe", "gpt")]
)
def test_others_have_no_merges_that_sentencepiece_could_leave_out(kind, family):
    with pytest.raises(UserError, match=r"bpe_dropout needs a tokenizer of byte pairs from SentencePiece"):
        sample(TEXT, tokenizer=make_tokenizer(TEXT, kind, vocab_size=500, family=family))
