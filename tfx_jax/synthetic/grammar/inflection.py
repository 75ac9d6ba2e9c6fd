"""Inflection of the words of the built-in English-Japanese grammar.

A Japanese predicate is written in the dictionary form, which alone decides how it inflects:

  食べ-る   a hyphen before the る: one stem for everything (食べ ます, 食べ ない, 食べ て)
  読む      a stem that moves through a row of the kana table (読み ます, 読ま ない, 読ん で)
  大きい    an adjective that inflects by itself (大きく ない, 大きかっ た)
  静か な   an adjective that leans on だ (静か です, 静か だっ た, 静か な 部屋)

>>> inflect("読む", "past"), inflect("読む", "past", negative=True), inflect("読む", "past", style="plain")
('読み まし た', '読み ませ ん でし た', '読ん だ')
>>> inflect("静か な", "present"), inflect("大きい", "present", negative=True)
('静か です', '大きく ない です')
>>> verb_group("look for", "looked for", "past", "singular")
('', 'looked for')
>>> verb_group("eat", "ate", "past", "singular", negative=True)
('did not', 'eat')
>>> english_number(3205), japanese_number(3205)
('three thousand two hundred five', '三 千 二 百 五')
"""

import functools
import re
from typing import Literal

Tense = Literal["past", "present", "future", "progressive", "past progressive", "can", "must", "want"]
Agreement = Literal["i", "singular", "plural"]
Style = Literal["polite", "plain", "attributive"]  # at the end of a sentence, inside one, before a noun

# Japanese ------------------------------------------------------------------------------------------------------------

_VERB_FORMS = {  # tense: (polite, polite negative, plain, plain negative)
    "present": ("{masu} ます", "{masu} ませ ん", "{plain}", "{nai} ない"),
    "past": ("{masu} まし た", "{masu} ませ ん でし た", "{ta}", "{nai} なかっ た"),
    "progressive": ("{te} い ます", "{te} い ませ ん", "{te} いる", "{te} い ない"),
    "past progressive": ("{te} い まし た", "{te} い ませ ん でし た", "{te} い た", "{te} い なかっ た"),
    "can": ("{plain} こと が でき ます", "{plain} こと が でき ませ ん"),
    "must": ("{nai} なけれ ば なり ませ ん", "{te} は いけ ませ ん"),
    "want": ("{masu} たい です", "{masu} たく ない です"),
    "seem to want": ("{masu} たがっ て い ます", "{masu} たがっ て い ませ ん"),  # of a third person
    "request": ("{te} ください", "{nai} ない で ください"),
    "and": ("{te}",),
}
_ADJECTIVE_FORMS = {
    "い": {
        "present": ("{stem}い です", "{stem}く ない です", "{stem}い", "{stem}く ない"),
        "past": ("{stem}かっ た です", "{stem}く なかっ た です", "{stem}かっ た", "{stem}く なかっ た"),
    },
    "な": {
        "present": ("{stem} です", "{stem} で は あり ませ ん", "{stem} だ", "{stem} で は ない"),
        "past": ("{stem} でし た", "{stem} で は あり ませ ん でし た", "{stem} だっ た", "{stem} で は なかっ た"),
    },
}
_KANA_ROWS = {  # last kana of the dictionary form: (before ます, before ない, before て, て itself)
    "う": ("い", "わ", "っ", "て"),
    "く": ("き", "か", "い", "て"),
    "ぐ": ("ぎ", "が", "い", "で"),
    "す": ("し", "さ", "し", "て"),
    "つ": ("ち", "た", "っ", "て"),
    "ぶ": ("び", "ば", "ん", "で"),
    "む": ("み", "ま", "ん", "で"),
    "る": ("り", "ら", "っ", "て"),
}


def _stems(verb: str) -> dict[str, str]:
    """Returns the stems from which all forms of a Japanese verb are built, by their names in `_VERB_FORMS`."""
    if verb.endswith("-る"):
        masu = nai = te_stem = verb.removesuffix("-る")
        te = "て"
    elif verb.endswith("する"):  # irregular
        masu = nai = te_stem = verb.removesuffix("する") + "し"
        te = "て"
    elif verb.endswith("来る"):  # irregular
        masu = nai = te_stem = verb.removesuffix("る")
        te = "て"
    else:
        masu_kana, nai_kana, te_kana, te = _KANA_ROWS[verb[-1]]
        stem = verb[:-1]
        masu, nai = stem + masu_kana, stem + nai_kana
        te_stem = stem + ("っ" if verb == "行く" else te_kana)  # 行く is irregular
    ta = {"て": "た", "で": "だ"}[te]
    return {
        "masu": masu,
        "nai": nai,
        "plain": verb.replace("-", ""),
        "te": f"{te_stem} {te}",
        "ta": f"{te_stem} {ta}",
    }


@functools.cache
def inflect(word: str, tense: str, *, negative: bool = False, style: Style = "polite") -> str:
    """Returns a Japanese verb or adjective in a tense and style.

    Args:
      word: dictionary form, spelled as the docstring of this module explains.
      tense: a `Tense`, or "seem to want", "request" or "and" (the form before a second verb).
      negative: whether the word is negated.
      style: "polite" at the end of a sentence, "plain" inside one, "attributive" before a noun.

    >>> inflect("行く", "and"), inflect("来る", "past"), inflect("待つ", "past", style="plain")
    ('行っ て', '来 まし た', '待っ た')
    >>> inflect("静か な", "present", style="attributive")
    '静か な'
    """
    column = 2 * (style != "polite") + negative  # index of the form: polite, its negative, plain, its negative
    if word[-1] not in _ADJECTIVE_FORMS:
        return _VERB_FORMS["present" if tense == "future" else tense][column].format(**_stems(word))
    if word.endswith(" な") and (style, tense, negative) == ("attributive", "present", False):
        return word
    stem = word.removesuffix(" な") if word.endswith(" な") else word[:-1]
    return _ADJECTIVE_FORMS[word[-1]][tense][column].format(stem=stem)


# English -------------------------------------------------------------------------------------------------------------

_BE = {
    "present": {"i": "am", "singular": "is", "plural": "are"},
    "past": {"i": "was", "singular": "was", "plural": "were"},
}


def be(tense: str, agreement: str) -> str:
    """Returns the form of "to be" for a subject.

    >>> be("present", "i"), be("past", "plural")
    ('am', 'were')
    """
    return _BE[tense][agreement]


def with_s(word: str) -> str:
    """Returns the regular plural of a noun, or third person singular of a verb.

    >>> [with_s(word) for word in ("dog", "box", "study", "play", "go")]
    ['dogs', 'boxes', 'studies', 'plays', 'goes']
    """
    if word == "have":
        return "has"
    if re.search("[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search("(s|x|ch|sh|go)$", word) else "s")


def with_ing(verb: str) -> str:
    """Returns the present participle of a verb.

    >>> [with_ing(verb) for verb in ("read", "write", "run", "see", "open", "draw")]
    ['reading', 'writing', 'running', 'seeing', 'opening', 'drawing']
    """
    if re.search("[^e]e$", verb):
        return verb[:-1] + "ing"
    doubles = re.fullmatch("[^aeiou]*[aeiou][^aeiouwxy]", verb)  # one short syllable: run, swim, get
    return verb + (verb[-1] if doubles else "") + "ing"


def with_article(words: str) -> str:
    """Puts "a" or "an" before a phrase; no word of the lexicon is written with one sound and said with the other.

    >>> with_article("old dog"), with_article("dog")
    ('an old dog', 'a dog')
    """
    return ("an " if words[0] in "aeiou" else "a ") + words


@functools.cache
def verb_group(
    verb: str, past: str, tense: str, agreement: str, *, negative: bool = False, inverted: bool = False
) -> tuple[str, str]:
    """Returns an English verb in a tense as (auxiliary, rest); the auxiliary is empty if none is needed.

    Args:
      verb: base form; only its first word inflects.
      past: past form.
      tense: a `Tense`.
      agreement: agreement with the subject: "i", "singular" or "plural".
      negative: whether "not" follows the auxiliary.
      inverted: whether the subject comes between auxiliary and rest, as in a question.

    >>> verb_group("go to", "went to", "want", "singular"), verb_group("go to", "went to", "can", "i", negative=True)
    (('', 'wants to go to'), ('cannot', 'go to'))
    """
    if tense == "want":
        auxiliary, rest = verb_group("want", "wanted", "present", agreement, negative=negative, inverted=inverted)
        return auxiliary, f"{rest} to {verb}"
    head, *tail = verb.split()
    is_singular = agreement == "singular"
    if tense in ("progressive", "past progressive"):
        auxiliary = be("past" if tense == "past progressive" else "present", agreement)
        head = with_ing(head)
    elif tense in ("past", "present") and not (negative or inverted):
        auxiliary = ""
        if tense == "past":
            head = past.split()[0]
        elif is_singular:
            head = with_s(head)
    else:  # "can" and "must" are themselves the auxiliary
        auxiliary = {"past": "did", "present": "does" if is_singular else "do", "future": "will"}.get(tense, tense)
    if negative:
        auxiliary = "cannot" if auxiliary == "can" else f"{auxiliary} not"
    return auxiliary, " ".join([head, *tail])


# Numbers -------------------------------------------------------------------------------------------------------------

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_DIGITS = "〇一二三四五六七八九"


@functools.cache
def english_number(number: int) -> str:
    """Returns a number from 1 to 9999 in English words.

    >>> english_number(32), english_number(9999)
    ('thirty two', 'nine thousand nine hundred ninety nine')
    """
    if number < 20:
        return _SMALL[number]
    if number >= 1000:
        count, rest = divmod(number, 1000)
        words = f"{_SMALL[count]} thousand"
    elif number >= 100:
        count, rest = divmod(number, 100)
        words = f"{_SMALL[count]} hundred"
    else:
        count, rest = divmod(number, 10)
        words = _TENS[count]
    return f"{words} {english_number(rest)}" if rest else words


@functools.cache
def japanese_number(number: int) -> str:
    """Returns a number from 1 to 9999 in Japanese numerals, one per token.

    >>> japanese_number(32), japanese_number(1010)
    ('三 十 二', '千 十')
    """
    numerals = []
    for unit, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // unit % 10
        if digit and (digit > 1 or unit == 1):  # one hundred is just 百
            numerals.append(_DIGITS[digit])
        if digit and name:
            numerals.append(name)
    return " ".join(numerals)
