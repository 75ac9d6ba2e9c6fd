import functools
import logging
import math
import operator
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.errors import UserError
from tfx_jax.metrics.bleu import bleu_scores, split_compounds


def _oracle(hypotheses, references):
    """`_oracle_of_several` with one reference each."""
    return _oracle_of_several(hypotheses, [[reference] for reference in references])


def _oracle_of_several(hypotheses, references):
    """Papineni et al. (2002), section 2.3: four clipped precisions over the whole set and the brevity penalty."""
    matched, proposed, wanted = np.zeros(4), np.zeros(4), 0
    for hypothesis, several in zip(hypotheses, references, strict=True):
        for order in range(4):
            found, *allowed = (
                Counter(tuple(words[start : start + order + 1]) for start in range(len(words) - order))
                for words in (hypothesis, *several)
            )
            most = functools.reduce(operator.or_, allowed)  # of each n-gram its largest count in any reference
            matched[order] += sum((found & most).values())
            proposed[order] += sum(found.values())
        wanted += min((abs(len(words) - len(hypothesis)), len(words)) for words in several)[1]
    if not matched.all():
        return 0.0
    length = sum(len(words) for words in hypotheses)
    brevity = 1.0 if length >= wanted else math.exp(1 - wanted / length)
    return 100 * brevity * float(np.exp(np.log(matched / proposed).mean()))


# Few words, so that n-grams repeat and clipping matters.
_sentences = st.lists(st.sampled_from(["ab", "c-d", "ef", "g-h-i"]), max_size=9)
_pairs = st.lists(st.tuples(_sentences, _sentences), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(_sentences, st.lists(_sentences, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_several_references_are_those_of_papineni(pairs):
    """However many a sentence has."""
    hypotheses, references = zip(*pairs, strict=True)
    scores = bleu_scores(
        [" ".join(words) for words in hypotheses],
        [[" ".join(words) for words in several] for several in references],
        is_tokenized=True,
    )
    assert scores.tokenized == pytest.approx(_oracle_of_several(hypotheses, references), abs=1e-6)
    exact = [words in several for words, several in pairs]
    assert scores.exact_match == pytest.approx(100 * np.mean(exact))


@settings(deadline=None, max_examples=150)
@given(_pairs)
def test_equals_papineni_on_tokens(pairs):
    hypotheses, references = zip(*pairs, strict=True)
    joined = [[" ".join(words) for words in side] for side in (hypotheses, references)]
    scores = bleu_scores(*joined, is_tokenized=True)
    assert scores.tokenized == pytest.approx(_oracle(hypotheses, references))
    parts = {"ab": ["ab"], "ef": ["ef"], "c-d": ["c", "-", "d"], "g-h-i": ["g", "-", "h-i"]}
    split = [[[part for word in words for part in parts[word]] for words in side] for side in (hypotheses, references)]
    assert scores.compound_split == pytest.approx(_oracle(*split))
    assert scores.exact_match == pytest.approx(100 * np.mean([h == r for h, r in pairs]))


@pytest.mark.data
def test_tokenized_bleu_of_plain_text_is_that_of_the_published_tokens(shared_data):
    plain = (shared_data / "multi30k" / "val.de").read_text(encoding="utf-8").lower().splitlines()
    marked = (shared_data / "multi30k-bpe" / "valid.de").read_text(encoding="utf-8").splitlines()
    # The publisher normalized German quotation marks before the tokenizer ran, which is not ours to do.
    pairs = [(line, tokens.replace("@@ ", "")) for line, tokens in zip(plain, marked, strict=True) if "„" not in line]
    rng = random.Random(0)
    wrong = [rng.choice(pairs) if rng.random() < 0.3 else pair for pair in pairs]
    scores = bleu_scores([line for line, _ in wrong], [line for line, _ in pairs], language="de")
    expected = _oracle(*([tokens.split() for _, tokens in side] for side in (wrong, pairs)))
    assert scores.tokenized == pytest.approx(expected, abs=1e-9)
    assert 60 < scores.tokenized < 80
    assert len({scores.sacrebleu, scores.tokenized, scores.compound_split}) == 3


def test_identical_text_scores_100():
    lines = ["Ein „rot-weißer“ Ball & zwei Hunde [sic], ca. 3,5 kg.", "Wer ist's?", ""]
    scores = bleu_scores(lines, lines)
    assert (scores.sacrebleu, scores.tokenized, scores.compound_split, scores.exact_match) == (100, 100, 100, 100)


def test_nothing_in_common_scores_0():
    scores = bleu_scores(["a b c d e"], ["v w x y z"])
    assert (scores.sacrebleu, scores.tokenized, scores.compound_split, scores.exact_match) == (0, 0, 0, 0)
    assert bleu_scores(["", ""], ["v w x y z", "u"]).tokenized == 0


def test_compound_split_by_hand():
    # Words: 4 of 5, 3 of 4, 2 of 3 and 1 of 2 n-grams match. Split, "rot - weiße" adds two words that match.
    scores = bleu_scores(["zwei kleine rot-weiße Bälle dort"], ["zwei kleine rot-weiße Bälle hier"])
    assert scores.tokenized == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert scores.compound_split == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25)


def test_brevity_penalty_by_hand():
    scores = bleu_scores(["one two three four"], ["one two three four five six"], language="en")
    for score in (scores.sacrebleu, scores.tokenized):
        assert score == pytest.approx(100 * math.exp(1 - 6 / 4))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("U-Bahn", "U ##AT##-##AT## Bahn"),
        ("Aix-en-Provence", "Aix ##AT##-##AT## en ##AT##-##AT## Provence"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # "b" is used up: the quirk of the original
        ("Bau- und - Haus -los", "Bau- und - Haus -los"),
    ],
)
def test_split_compounds(tokens, expected):
    assert split_compounds(tokens) == expected


def test_sacrebleu_signature_names_version_and_tokenizer():
    import sacrebleu

    german = bleu_scores(["ein Haus"], ["ein Hof"])
    assert german.signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert "tok:intl" in bleu_scores(["ein Haus"], ["ein Hof"], sacrebleu_tokenizer="intl").signature


def test_japanese_is_scored_by_characters():
    hypotheses, references = ["私は本を三冊 読んだ。"], ["私は本を二冊読んだ。"]
    scores = bleu_scores(hypotheses, references, language="ja")
    expected = _oracle([list("私は本を三冊読んだ。")], [list("私は本を二冊読んだ。")])
    assert "tok:char" in scores.signature
    assert scores.sacrebleu == pytest.approx(expected)
    assert scores.tokenized == pytest.approx(expected)


def test_tokenized_text_is_detokenized_for_sacrebleu():
    plain = ['The man\'s hat says "hello", you know.'], ['The dog\'s hat says "hello", you know.']
    tokens = (
        ["The man &apos;s hat says &quot; hello &quot; , you know ."],
        ["The dog &apos;s hat says &quot; hello &quot; , you know ."],
    )
    from_plain, from_tokens = (
        bleu_scores(*plain, language="en"),
        bleu_scores(*tokens, language="en", is_tokenized=True),
    )
    assert from_tokens.sacrebleu == pytest.approx(from_plain.sacrebleu)
    assert from_tokens.tokenized == from_plain.tokenized
    assert from_tokens.tokenized == pytest.approx(_oracle([tokens[0][0].split()], [tokens[1][0].split()]))


def test_exact_match_ignores_white_space_only():
    scores = bleu_scores(["a  b ", "a b", "A b", "ab"], ["a b", "a b", "a b", "a b"])
    assert scores.exact_match == 50


def test_no_warning_about_tokenized_text(caplog, capfd):
    lines = ["so ist es ."] * 120
    with caplog.at_level(logging.DEBUG):
        bleu_scores(lines, lines)
        bleu_scores(lines, lines, is_tokenized=True)
        bleu_scores(lines, lines, language="ja")
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_rejects_what_cannot_be_scored():
    with pytest.raises(ValueError, match="3 hypotheses but 2 references"):
        bleu_scores(["a", "b", "c"], ["a", "b"])
    with pytest.raises(ValueError, match="no hypotheses"):
        bleu_scores([], [])
    with pytest.raises(ValueError, match="hypothesis 1 has no reference"):
        bleu_scores(["a", "b"], [["a"], []])


def test_unknown_tokenizer_is_one_line():
    with pytest.raises(UserError, match=r"'moses': choose from .*13a") as caught:
        bleu_scores(["a"], ["a"], sacrebleu_tokenizer="moses")
    assert "\n" not in str(caught.value)


def test_import_is_cheap():
    program = "import sys, tfx_jax.metrics.bleu; print(sorted({'sacrebleu', 'sacremoses', 'jax'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


# A sentence of ten words or so with one wrong one, without spaces.
UNSPACED = {
    "th": ("แมวสีดำกำลังนอนหลับอยู่บนโซฟาในห้องนั่งเล่น", "แมวสีขาวกำลังนอนหลับอยู่บนโซฟาในห้องนั่งเล่น"),
    "km": ("ឆ្មាខ្មៅកំពុងដេកនៅលើសាឡុងក្នុងបន្ទប់ទទួលភ្ញៀវ", "ឆ្មាសកំពុងដេកនៅលើសាឡុងក្នុងបន្ទប់ទទួលភ្ញៀវ"),
    "lo": ("ແມວດຳກຳລັງນອນຢູ່ເທິງໂຊຟາໃນຫ້ອງຮັບແຂກ", "ແມວຂາວກຳລັງນອນຢູ່ເທິງໂຊຟາໃນຫ້ອງຮັບແຂກ"),
    "my": ("ကြောင်အနက်ကလေးသည်ဧည့်ခန်းထဲကဆိုဖာပေါ်မှာအိပ်နေသည်", "ကြောင်အဖြူကလေးသည်ဧည့်ခန်းထဲကဆိုဖာပေါ်မှာအိပ်နေသည်"),
    "ja": ("黒い猫が居間のソファの上で静かに眠っています。", "白い猫が居間のソファの上で静かに眠っています。"),
    "zh": ("黑猫正在客厅的沙发上安静地睡觉。", "白猫正在客厅的沙发上安静地睡觉。"),
    "bo": ("བྱི་ལ་ནག་པོ་ཁང་པའི་ནང་དུ་ཉལ་བཞིན་འདུག", "བྱི་ལ་དཀར་པོ་ཁང་པའི་ནང་དུ་ཉལ་བཞིན་འདུག"),
}
THREE_LETTERS = {"th": "tha", "km": "khm", "lo": "lao", "my": "mya", "ja": "jpn", "zh": "cmn", "bo": "bod"}


@pytest.mark.parametrize("language", UNSPACED)
def test_one_wrong_word_costs_little_without_spaces(language):
    wrong, right = UNSPACED[language]
    scores = bleu_scores([wrong], [right], language=language)
    tokens = [[*side] for side in (wrong, right)]
    assert scores.tokenized == pytest.approx(_oracle([tokens[0]], [tokens[1]]))
    assert 50 < scores.tokenized < 100
    assert 50 < scores.sacrebleu < 100
    assert f"|tok:{'zh' if language == 'zh' else 'char'}|" in scores.signature
    assert bleu_scores([wrong], [right], language=THREE_LETTERS[language]) == scores
    assert bleu_scores([right], [right], language=language).sacrebleu == 100


@pytest.mark.parametrize("language", ["zh-CN", "zh_Hans", "ZH"])
def test_region_and_script_do_not_count(language):
    pair = ["一只狗在草地上跑"], ["一只猫在草地上跑"]
    assert bleu_scores(*pair, language=language) == bleu_scores(*pair, language="zh")


def test_korean_has_spaces():
    right, wrong = (
        "검은 고양이가 거실 소파 위에서 조용히 자고 있습니다 .",
        "흰 고양이가 거실 소파 위에서 조용히 자고 있습니다 .",
    )
    scores = bleu_scores([wrong], [right], language="ko")
    assert 50 < scores.sacrebleu < 100
    assert "|tok:13a|" in scores.signature


def test_composed_and_decomposed_letters_are_the_same():
    for language in ("de", "ja"):
        scores = bleu_scores(
            ["Café für alle hier am See が"], ["Cafe\u0301 fu\u0308r alle hier am See か\u3099"], language=language
        )
        assert (scores.sacrebleu, scores.tokenized, scores.exact_match) == (100, 100, 100)
