"""The sentences of the built-in grammar are right in both languages, by rules of our own here."""

import collections
import re
from typing import Any

import pytest

from tfx_jax.synthetic.grammar import GrammarPairs, inflection, lexicon


@pytest.fixture(scope="module")
def everything():
    splits: dict[Any, int] = {"train": 20_000, "validation": 500, "test": 500}
    samples = [GrammarPairs(split, size=size) for split, size in splits.items()]
    return [(pair["source"], pair["target"]) for pairs in samples for pair in (pairs[i] for i in range(len(pairs)))]


# Japanese ------------------------------------------------------------------------------------------------------------

TRANSLATED_BY_HAND = {
    "we swam because it was hot .": "暑かっ た ので 、 私 たち は 泳ぎ まし た 。",
    "he was playing tennis when we got up .": "私 たち が 起き た とき 、 彼 は テニス を し て い まし た 。",
    "i ate a tomato , but taro ate bread .": "私 は トマト を 食べ まし た が 、 太郎 は パン を 食べ まし た 。",
    "taro went to london and met me .": "太郎 は ロンドン へ 行っ て 、 私 に 会い まし た 。",
    "i think that ken is sick .": "私 は 健 が 病気 だ と 思い ます 。",
    "ken thinks that i am sick .": "健 は 私 が 病気 だ と 思っ て い ます 。",
    "i am taller than taro .": "私 は 太郎 より 背 が 高い です 。",
    "there is a cat in the bag .": "かばん の 中 に 猫 が い ます 。",
    "there was no key on the bed .": "ベッド の 上 に 鍵 は あり ませ ん でし た 。",
    "how many cars did you see ?": "あなた は 車 を 何 台 見 まし た か 。",
    "please buy tea .": "お茶 を 買っ て ください 。",
    "please do not run .": "走ら ない で ください 。",
    "who got up ?": "誰 が 起き まし た か 。",
    "who did they meet ?": "彼 ら は 誰 に 会い まし た か 。",
    "what can you eat ?": "あなた は 何 を 食べる こと が でき ます か 。",
    "where did she go ?": "彼女 は どこ へ 行き まし た か 。",
    "where does yumi live ?": "由美 は どこ に 住ん で い ます か 。",
    "when will ken swim ?": "健 は いつ 泳ぎ ます か 。",
    "taro cannot get up .": "太郎 は 起きる こと が でき ませ ん 。",
    "he must not swim .": "彼 は 泳い で は いけ ませ ん 。",
    "she must run .": "彼女 は 走ら なけれ ば なり ませ ん 。",
    "i want to drink tea .": "私 は お茶 を 飲み たい です 。",
    "taro wants to run .": "太郎 は 走り たがっ て い ます 。",
    "the man who went home is busy .": "家 へ 帰っ た 男の人 は 忙しい です 。",
    "the man who the child met was busy .": "子供 が 会っ た 男の人 は 忙しかっ た です 。",
    "the coffee that i like is hot .": "私 が 好き な コーヒー は 熱い です 。",
    "yumi is forty years old .": "由美 は 四 十 歳 です 。",
    "my birthday is may 26 .": "私 の 誕生日 は 五 月 二 十 六 日 です 。",
    "the meeting starts at six thirty .": "六 時 半 に 会議 は 始まり ます 。",
    "we came to london by train .": "私 たち は 電車 で ロンドン へ 来 まし た 。",
    "he has two birds .": "彼 は 鳥 を 二 羽 飼っ て い ます 。",
    "ken drank nine cups of tea .": "健 は お茶 を 九 杯 飲み まし た 。",
    "he is not tall .": "彼 は 背 が 高く ない です 。",
    "she is swimming .": "彼女 は 泳い で い ます 。",
    "my mother 's car was big .": "母 の 車 は 大きかっ た です 。",
    "a boy got up .": "男の子 が 起き まし た 。",
    "two dogs ate the egg .": "二 匹 の 犬 が 卵 を 食べ まし た 。",
    "you read a book .": "あなた は 本 を 読み まし た 。",
}


def test_translations_by_hand(everything):
    translations = dict(everything)
    found = {source: translations[source] for source in TRANSLATED_BY_HAND if source in translations}
    assert len(found) > 30  # another sample may lack a few
    assert found.items() <= TRANSLATED_BY_HAND.items()


COUNTERS = {
    "人": "男の子 男の人 女の子 女の人 子供 先生 医者 学生 看護師",
    "匹": "犬 猫 ウサギ ネズミ 猿 魚",
    "羽": "鳥",
    "頭": "馬 牛 象",
    "個": "リンゴ 卵 トマト ケーキ 時計 帽子 箱 かばん",
    "本": "バナナ ニンジン ペン 傘 花 ナイフ 鍵 ギター 映画",
    "杯": "コーヒー お茶 水 ミルク",
    "冊": "本 雑誌 辞書",
    "枚": "切符 皿 シャツ 写真 絵",
    "台": "カメラ パソコン 車 自転車 ピアノ バス",
    "着": "コート",
    "通": "手紙",
    "曲": "歌",
}
COUNTER_OF = {noun: counter for counter, nouns in COUNTERS.items() for noun in nouns.split()}
NUMERAL = "(?:(?:[一二三四五六七八九十] )+|何 )"


def test_counters_suit_what_they_count(everything):
    counters = "".join(COUNTERS)
    after, before = collections.Counter(), collections.Counter()
    for _, target in everything:
        after.update(re.findall(rf"(\S+) [をが] {NUMERAL}([{counters}]) (?!の )", target))  # 本 を 三 冊
        for counter, described in re.findall(rf"{NUMERAL}([{counters}]) の (.*?) [がに] ", target):
            before[described.split()[-1], counter] += 1  # 三 匹 の 大きい 犬 が
    assert all(COUNTER_OF[noun] == counter for noun, counter in [*after, *before])
    assert {noun for noun, _ in after} >= set(COUNTER_OF) - {"女の人", "男の人", "ギター", "ピアノ"}
    assert len(before) > 10


def test_the_predicate_comes_last(everything):
    polite = r" (ます|まし た|ませ ん|ませ ん でし た|です|でし た|ください)( か)? 。$"
    assert all(re.search(polite, target) for _, target in everything)


def test_only_questions_end_in_ka(everything):
    assert all(source.endswith("?") == target.endswith(" か 。") for source, target in everything)


def test_the_object_goes_before_the_verb(everything):
    stems = {
        **{"ate": "食べ", "bought": "買い", "washed": "洗い", "closed": "閉め", "used": "使い", "opened": "開け"},
        **{"drew": "描き", "made": "作り", "wrote": "書き", "found": "見つけ", "watched": "見", "cooked": "料理 し"},
    }
    seen = 0
    for source, target in everything:
        found = re.fullmatch(rf"(?:the )?(\w+) ({'|'.join(stems)}) (?:the|a|an) (\w+) \.", source)
        if found and {found[1], found[3]} <= lexicon.NOUNS.keys():
            subject, thing = lexicon.NOUNS[found[1]].japanese, lexicon.NOUNS[found[3]].japanese
            assert target == f"{subject} は {thing} を {stems[found[2]]} まし た 。"
            seen += 1
    assert seen > 15


ALIGNED = {  # as often on one side as on the other
    "dogs?": "犬",
    "girls?": "女の子",
    "(man|men)": "男の人",
    "teachers?": "先生",
    "apples?": "リンゴ",
    "yumi": "由美",
    "tokyo": "東京",
    "monday": "月曜日",
    "yesterday": "昨日",
    "tomorrow": "明日",
    "every day": "毎日",
    "often": "よく",
    "because": "ので",
    "(?<!^)when": "とき",
    "(?<=^)when": "いつ",
    "where": "どこ",
    "(?<=^)who": "誰",
    "than": "より",
    "very": "とても",
    "yen": "円",
    "years old": "歳",
    "birthday": "誕生日",
    "under": "の 下",
    "in front of": "の 前",
    "by (bus|train|car|bicycle)": "(バス|電車|車|自転車) で",
    "please": "ください",
    "wants? to": "(たい|たく|たがっ)",
    "can(not)?": "こと が でき",
    "must": "(なけれ|は いけ)",
}


@pytest.mark.parametrize("english", ALIGNED)
def test_words_correspond(english, everything):
    in_english, in_japanese = (re.compile(rf"(?<!\S){words}(?!\S)").findall for words in (english, ALIGNED[english]))
    counts = [len(in_english(source)) for source, _ in everything]
    assert counts == [len(in_japanese(target)) for _, target in everything]
    assert sum(counts) > 50


@pytest.mark.parametrize(
    ("word", "polite", "te", "past", "negative"),
    [
        ("食べ-る", "食べ ます", "食べ て", "食べ た", "食べ ない"),
        ("買う", "買い ます", "買っ て", "買っ た", "買わ ない"),
        ("書く", "書き ます", "書い て", "書い た", "書か ない"),
        ("行く", "行き ます", "行っ て", "行っ た", "行か ない"),
        ("泳ぐ", "泳ぎ ます", "泳い で", "泳い だ", "泳が ない"),
        ("貸す", "貸し ます", "貸し て", "貸し た", "貸さ ない"),
        ("待つ", "待ち ます", "待っ て", "待っ た", "待た ない"),
        ("読む", "読み ます", "読ん で", "読ん だ", "読ま ない"),
        ("遊ぶ", "遊び ます", "遊ん で", "遊ん だ", "遊ば ない"),
        ("帰る", "帰り ます", "帰っ て", "帰っ た", "帰ら ない"),
        ("来る", "来 ます", "来 て", "来 た", "来 ない"),
        ("する", "し ます", "し て", "し た", "し ない"),
        ("掃除 する", "掃除 し ます", "掃除 し て", "掃除 し た", "掃除 し ない"),
    ],
)
def test_japanese_verbs_inflect(word, polite, te, past, negative):
    assert inflection.inflect(word, "present") == polite
    assert inflection.inflect(word, "and") == te
    assert inflection.inflect(word, "past", style="plain") == past
    assert inflection.inflect(word, "present", style="plain", negative=True) == negative


KEEP_THEIR_STEM = {
    *("食べ", "着", "見", "寝", "起き", "出", "開け", "閉め", "教え", "見せ", "見つけ", "助け", "訪れ", "あげ"),
    *("持っ て い", "飼っ て い", "住ん で い", "疲れ て い", "お腹 が すい て い"),
}


def test_verbs_that_keep_their_stem_are_marked_so():
    """Of verbs in -eru and -iru, the spelling does not tell: 着る keeps its stem, 帰る does not."""
    words = {word.japanese for word in (*lexicon.VERBS, *lexicon.SCHEDULED_VERBS, *lexicon.ADJECTIVES)}
    kept = {word.removesuffix("-る") for word in words if word.endswith("-る")}
    assert kept == KEEP_THEIR_STEM


# English -------------------------------------------------------------------------------------------------------------

BASES = {verb.english.split()[0] for verb in lexicon.VERBS} | {"want"}
THIRD_PERSONS = {
    *("has", "goes", "studies", "teaches", "watches", "washes", "eats", "drinks", "reads", "buys", "plays", "wants"),
    *("lives", "likes", "understands", "opens", "uses", "cries", "cooks", "draws", "sleeps", "gets", "comes"),
}
IRREGULAR = {
    *(
        "ate",
        "drank",
        "made",
        "read",
        "wrote",
        "drew",
        "bought",
        "sold",
        "gave",
        "sent",
        "lent",
        "taught",
        "saw",
        "found",
    ),
    *(
        "met",
        "broke",
        "sang",
        "rode",
        "wore",
        "had",
        "understood",
        "went",
        "came",
        "got",
        "slept",
        "swam",
        "ran",
        "left",
    ),
}
WRONG = {
    "article before a vowel": r"\ba [aeiou]",
    "article before a consonant": r"\ban [^aeiou]",
    "to be after i": r"^i (is|are|were) |^(is|are|were) i ",
    "to be after a third person": r"^(he|she|taro|yumi|my (mother|son)) (am|are|were) |^(am|are|were) (he|she|taro) ",
    "to be after a plural": r"^(we|you|they|these \w+) (am|is|was) |^(am|is|was) (we|you|they|these) ",
    "base after a third person": rf"^(he|she|taro|hanako|yumi|my (mother|son)) ({'|'.join(BASES - IRREGULAR)}) ",
    "third person after a plural": rf"^(i|we|you|they) ({'|'.join(THIRD_PERSONS)}) ",
    "do after a third person": r"^(he|she|taro|yumi) do |^do (he|she|taro|yumi|this|that) ",
    "does after a plural": r"^(i|we|you|they) does |^does (i|we|you|they|these|those) ",
    "form after an auxiliary": rf"\b(not|will|can|cannot|must|to) ({'|'.join((IRREGULAR | THIRD_PERSONS) - BASES)}) ",
    "demonstrative before a plural": r"\bthis (men|women|children|mice|\w+[^su]s) ",
    "demonstrative before a singular": r"\b(these|those) (man|woman|child|mouse|knife|dog|cat|book|girl|boy) ",
    "numeral before a singular": r"\b(two|three|four|five|six|ten) (man|woman|child|mouse|dog|book|pen|girl) ",
    "plural after one": r"(?<!twenty )\bone (men|women|children|mice|dogs|books|pens|girls|boys|apples) ",
    "object pronoun as subject": r"^(me|him|us|them) ",
    "subject pronoun as object": r" (for|to|than|met|helped|saw) (i|he|she|we|they) ",
}


@pytest.mark.parametrize("mistake", WRONG)
def test_english_has_no(mistake, everything):
    assert not [source for source, _ in everything if re.search(WRONG[mistake], source)]


def test_read_is_past_where_it_could_be_either(everything):
    readers = [
        target for source, target in everything if re.match("(i|you|we|they|the (boys|girls|men)) read ", source)
    ]
    assert len(readers) > 2
    assert all(" 読み まし た " in target for target in readers)


def test_past_forms():
    for verb in (*lexicon.VERBS, *lexicon.SCHEDULED_VERBS):
        base, past = verb.english.split()[0], verb.past.split()[0]
        regular = base + "d" if base[-1] == "e" else re.sub("([^aeiou])y$", r"\1i", base) + "ed"
        assert past in IRREGULAR or past == regular
        assert verb.english.split()[1:] == verb.past.split()[1:]


@pytest.mark.parametrize(
    ("tense", "negative", "inverted", "expected"),
    [
        ("past", False, False, ("", "ate")),
        ("past", True, False, ("did not", "eat")),
        ("past", False, True, ("did", "eat")),
        ("present", False, False, ("", "eats")),
        ("present", True, False, ("does not", "eat")),
        ("present", False, True, ("does", "eat")),
        ("future", True, False, ("will not", "eat")),
        ("progressive", False, True, ("is", "eating")),
        ("past progressive", True, False, ("was not", "eating")),
        ("can", True, False, ("cannot", "eat")),
        ("must", False, False, ("must", "eat")),
        ("want", True, False, ("does not", "want to eat")),
        ("want", False, True, ("does", "want to eat")),
    ],
)
def test_english_verb_groups(tense, negative, inverted, expected):
    group = inflection.verb_group("eat", "ate", tense, "singular", negative=negative, inverted=inverted)
    assert group == expected


# Numbers -------------------------------------------------------------------------------------------------------------

ONES = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
VALUES = {name: 10 * value for value, name in enumerate(TENS, 1)} | {name: value for value, name in enumerate(ONES, 1)}


def _read_english(words):
    total = pending = 0
    for word in words.split():
        if word in ("thousand", "hundred"):
            total, pending = total + pending * (1000 if word == "thousand" else 100), 0
        else:
            pending += VALUES[word]
    return total + pending


def _read_japanese(numerals):
    total, digit = 0, 0
    for numeral in numerals.split():
        if numeral in "十百千":
            total, digit = total + max(digit, 1) * 10 ** ("十百千".index(numeral) + 1), 0
        else:
            digit = "〇一二三四五六七八九".index(numeral)
    return total + digit


def test_numbers_mean_the_same_in_both_languages():
    for number in range(1, 10_000):
        assert _read_english(inflection.english_number(number)) == number
        assert _read_japanese(inflection.japanese_number(number)) == number
    assert inflection.japanese_number(1111) == "千 百 十 一"  # no 一 before a unit


def test_prices_and_ages_keep_their_value(everything):
    seen = 0
    for source, target in everything:
        found = re.search(r" (?:costs?|is|are|am) ([a-z ]+) (?:yen|years old) \.$", source)
        if found:
            numerals = re.findall(r" は ((?:\S )+)[円歳] ", target)
            assert list(map(_read_japanese, numerals)) == [_read_english(found[1])]
            seen += 1
    assert seen > 300


DAYS = {
    **{"january": 31, "february": 29, "march": 31, "april": 30, "may": 31, "june": 30},
    **{"july": 31, "august": 31, "september": 30, "october": 31, "november": 30, "december": 31},
}


def test_dates_exist(everything):
    months = list(DAYS)
    dates = [re.search(rf"\b({'|'.join(months)}) (\d+) ", source) for source, _ in everything]
    for found, (_, target) in zip(dates, everything, strict=True):
        if found:
            [(month, day)] = re.findall(rf"({NUMERAL})月 ({NUMERAL})日", target)
            assert _read_japanese(month) == months.index(found[1]) + 1
            assert _read_japanese(day) == int(found[2]) <= DAYS[found[1]]
    assert sum(map(bool, dates)) > 500
