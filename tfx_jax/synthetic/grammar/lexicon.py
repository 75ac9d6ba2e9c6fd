"""The words of the built-in English-Japanese grammar, one row for both languages.

The lexicon also states which words go together (people read books, books are counted in 冊): a verb or an adjective
lists the nouns it accepts by English name or tag. An underscore is a space between the morphemes of one Japanese noun.
`inflection` explains the spelling of a predicate's dictionary form.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

from tfx_jax.synthetic.grammar.inflection import Agreement, Tense


class Pair(NamedTuple):
    """The same phrase in both languages, with words separated by spaces."""

    english: str
    japanese: str


@dataclasses.dataclass(frozen=True, eq=False)
class Noun:
    """A noun.

    Attributes:
      english: English singular.
      japanese: Japanese word.
      form: kind of its phrase (see `phrases`): "pronoun", "name", "kin", "count", "mass", "pair", "bare" (without
        article) or "question".
      tags: classes to which it belongs, such as "people" or "food".
      counter: the Japanese classifier after a numeral: 本 を 三 冊, 犬 を 二 匹; empty for none.
      plural: irregular English plural; empty if regular.
    """

    english: str
    japanese: str
    form: str
    tags: frozenset[str]
    counter: str = ""
    plural: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Verb:
    """A verb and the nouns it accepts.

    Attributes:
      english: the base form; a second word (look *for*) is the preposition before the object.
      past: the English past form.
      japanese: dictionary form.
      objects: names or tags of nouns; empty for an intransitive verb.
      particle: marks the Japanese object.
      subjects: names or tags of nouns.
      places: names or tags of the places where the action happens.
      asks: question word for the object, if any; of two verbs with the same English name, only one may have it.
      aspect: an "activity" has every tense, an "event" no progressive, a "state" only present and past, an "accident"
        only past; a "reaction" has no modal verbs, because it is not voluntary.
      is_generic: whether the object is a kind, not a thing: she likes dogs, he plays tennis.
      takes_recipient: whether somebody receives the object: he gave a book *to the girl*.
    """

    english: str
    past: str
    japanese: str
    objects: str = ""
    particle: str = "を"
    subjects: str = "people"
    places: str = ""
    asks: Literal["who", "what", "where", ""] = "what"
    aspect: Literal["activity", "event", "state", "accident", "reaction"] = "activity"
    is_generic: bool = False
    takes_recipient: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective and the nouns it describes.

    Attributes:
      english: base form.
      comparative: English comparative; empty if it is not used in comparisons.
      japanese: dictionary form.
      nouns: names or tags of nouns.
      is_predicate: whether it is only used as a predicate, not before a noun.
    """

    english: str
    comparative: str
    japanese: str
    nouns: str
    is_predicate: bool = False


# Nouns ---------------------------------------------------------------------------------------------------------------


def _nouns(form_and_tags: str, *rows: str) -> list[Noun]:
    """Parses nouns with the same form and tags.

    Args:
      form_and_tags: the form, followed by the tags.
      rows: `english[/irregular plural] japanese [counter]` of each noun.
    """
    form, *tags = form_and_tags.split()
    nouns = []
    for row in rows:
        english, japanese, *counter = row.split()
        singular, _, plural = english.partition("/")
        nouns.append(Noun(singular, japanese.replace("_", " "), form, frozenset(tags), "".join(counter), plural))
    return nouns


NOUNS = {
    noun.english: noun
    for noun in (
        *_nouns("pronoun people", "i 私", "you あなた", "he 彼", "she 彼女", "we 私_たち", "they 彼_ら"),
        *_nouns("name people male", "taro 太郎", "ken 健"),
        *_nouns("name people female", "hanako 花子", "yumi 由美"),
        # Humble form for one's own family, honorific form for another's: 父 is my father, お父さん yours.
        *_nouns("kin people male", "father 父/お父さん", "grandfather 祖父/おじいさん", "uncle おじ/おじさん"),
        *_nouns("kin people female", "mother 母/お母さん", "grandmother 祖母/おばあさん", "aunt おば/おばさん"),
        *_nouns("kin people male offspring", "son 息子/息子さん"),
        *_nouns("kin people female offspring", "daughter 娘/娘さん"),
        *_nouns("kin people", "friend 私_の_友達/友達"),
        *_nouns("count people person male", "boy 男の子 人", "man/men 男の人 人"),
        *_nouns("count people person female", "girl 女の子 人", "woman/women 女の人 人"),
        *_nouns("count people person", "child/children 子供 人"),
        *_nouns("count people person job", "teacher 先生 人", "doctor 医者 人", "student 学生 人", "nurse 看護師 人"),
        *_nouns("count job", "singer 歌手 人", "writer 作家 人", "pilot パイロット 人"),
        *_nouns("count animal pet own", "dog 犬 匹", "cat 猫 匹", "rabbit ウサギ 匹", "bird 鳥 羽"),
        *_nouns("count animal own", "horse 馬 頭", "cow 牛 頭"),
        *_nouns("count animal", "mouse/mice ネズミ 匹", "monkey 猿 匹", "elephant 象 頭"),
        *_nouns("count food small", "apple リンゴ 個", "egg 卵 個", "tomato/tomatoes トマト 個"),
        *_nouns("count food small", "banana バナナ 本", "carrot ニンジン 本"),
        *_nouns("count food small sweet", "cake ケーキ 個"),
        *_nouns("count food", "fish/fish 魚 匹"),
        *_nouns("mass food", "bread パン", "rice ご飯", "meat 肉"),
        *_nouns("mass soup", "soup スープ"),
        *_nouns("mass drink cup", "coffee コーヒー 杯", "tea お茶 杯"),
        *_nouns("mass drink glass", "water 水 杯", "milk ミルク 杯"),
        *_nouns("count small own goods text", "book 本 冊", "magazine 雑誌 冊", "dictionary 辞書 冊"),
        *_nouns("count small own goods", "pen ペン 本", "umbrella 傘 本", "flower 花 本", "knife/knives ナイフ 本"),
        *_nouns("count small own goods", "ticket 切符 枚", "plate 皿 枚", "watch 時計 個"),
        *_nouns("count small own goods machine", "camera カメラ 台", "computer パソコン 台"),
        *_nouns("count small own goods garment", "shirt シャツ 枚", "coat コート 着", "hat 帽子 個"),
        *_nouns("pair own goods garment", "shoes/shoes 靴"),
        *_nouns("count small own", "letter 手紙 通", "key 鍵 本", "photo 写真 枚", "picture 絵 枚"),
        *_nouns("count own goods container", "bag かばん 個", "box 箱 個"),
        *_nouns("count own goods vehicle machine", "car 車 台", "bicycle 自転車 台"),
        *_nouns("count own goods instrument", "piano ピアノ 台", "guitar ギター 本"),
        *_nouns("count vehicle", "bus バス 台", "train 電車"),
        *_nouns("count furniture", "table テーブル", "desk 机", "chair 椅子", "bed ベッド"),
        *_nouns("count", "door ドア", "window 窓", "song 歌 曲", "movie 映画 本"),
        *_nouns("count place in building", "library 図書館", "hospital 病院", "museum 美術館", "restaurant レストラン"),
        *_nouns("count place at building", "station 駅", "school 学校", "store 店"),
        *_nouns("count place in", "park 公園", "garden 庭", "room 部屋", "kitchen 台所", "pool プール"),
        *_nouns("bare place in city", "tokyo 東京", "kyoto 京都", "osaka 大阪", "london ロンドン"),
        *_nouns("bare sport", "tennis テニス", "soccer サッカー"),
        *_nouns("bare subject", "english 英語", "japanese 日本語", "math 数学"),
        *_nouns("bare", "music 音楽"),
        *_nouns("count at event", "meeting 会議", "concert コンサート", "party パーティー", "class 授業"),
        *_nouns("question", "who 誰", "what 何", "where どこ"),
    )
}


@functools.cache
def select(names_or_tags: str) -> tuple[Noun, ...]:
    """Returns the nouns with one of these names or tags, in the order of the lexicon.

    >>> [noun.english for noun in select("sport music")]
    ['tennis', 'soccer', 'music']
    """
    allowed = set(names_or_tags.split())
    return tuple(noun for noun in NOUNS.values() if allowed & {noun.english, noun.form, *noun.tags})


# Determiners ---------------------------------------------------------------------------------------------------------

PRONOUNS: dict[str, tuple[str, str, Agreement]] = {  # subject form: (object form, possessive, agreement)
    "i": ("me", "my", "i"),
    "you": ("you", "your", "plural"),
    "he": ("him", "his", "singular"),
    "she": ("her", "her", "singular"),
    "we": ("us", "our", "plural"),
    "they": ("them", "their", "plural"),
}
DEMONSTRATIVES = (("this", "these", "この"), ("that", "those", "あの"))

# Predicates ----------------------------------------------------------------------------------------------------------

_EVENT, _STATE, _ACCIDENT, _REACTION = "event", "state", "accident", "reaction"

VERBS = (
    Verb("eat", "ate", "食べ-る", "food", places="restaurant kitchen park"),
    Verb("eat", "ate", "食べ-る", "meat fish egg bread", subjects="dog cat bird mouse", places="kitchen garden"),
    Verb("eat", "ate", "食べ-る", "apple carrot banana", subjects="rabbit monkey horse cow elephant"),
    Verb("eat", "ate", "飲む", "soup", places="restaurant kitchen", asks=""),  # in Japan one drinks it
    Verb("drink", "drank", "飲む", "drink", places="restaurant kitchen park"),
    Verb("drink", "drank", "飲む", "water milk", subjects="dog cat horse cow", places="kitchen garden"),
    Verb("make", "made", "作る", "sweet soup bread box", places="kitchen school"),
    Verb("read", "read", "読む", "book magazine letter", places="library room park"),
    Verb("write", "wrote", "書く", "book letter song", places="room library"),
    Verb("draw", "drew", "描く", "picture flower animal", places="park school room"),
    Verb("buy", "bought", "買う", "goods food drink", places="store tokyo osaka london", aspect=_EVENT),
    Verb("sell", "sold", "売る", "goods", aspect=_EVENT, takes_recipient=True),
    Verb("give", "gave", "あげ-る", "small pet bag", aspect=_EVENT, takes_recipient=True),
    Verb("show", "showed", "見せ-る", "photo picture ticket letter", aspect=_EVENT, takes_recipient=True),
    Verb("send", "sent", "送る", "letter photo book flower", aspect=_EVENT, takes_recipient=True),
    Verb("teach", "taught", "教え-る", "subject music", takes_recipient=True),
    Verb(
        "see", "saw", "見-る", "animal person taro hanako vehicle picture", places="park garden station", aspect=_EVENT
    ),
    Verb("watch", "watched", "見-る", "movie", places="school room"),
    Verb("find", "found", "見つけ-る", "small animal container", places="park garden room library", aspect=_ACCIDENT),
    Verb("look for", "looked for", "探す", "small animal container child", places="park garden room station"),
    Verb("wait for", "waited for", "待つ", "bus train people", places="station park library", asks="who"),
    Verb("meet", "met", "会う", "people", "に", places="station park museum city", aspect=_EVENT, asks="who"),
    Verb("help", "helped", "助け-る", "people animal", aspect=_EVENT, asks="who"),
    Verb("visit", "visited", "訪れ-る", "museum city school hospital", aspect=_EVENT, asks="where"),
    Verb("use", "used", "使う", "machine dictionary pen knife umbrella", places="school library kitchen"),
    Verb("open", "opened", "開け-る", "door window container letter", aspect=_EVENT),
    Verb("close", "closed", "閉め-る", "door window container", aspect=_EVENT),
    Verb("wash", "washed", "洗う", "plate car dog horse shirt apple knife", places="garden kitchen"),
    Verb("clean", "cleaned", "掃除 する", "room kitchen garden pool library school"),
    Verb("break", "broke", "壊す", "machine watch box chair", aspect=_ACCIDENT),
    Verb("break", "broke", "割る", "plate window egg", aspect=_ACCIDENT, asks=""),
    Verb("study", "studied", "勉強 する", "subject music", places="library school room", is_generic=True),
    Verb("play", "played", "弾く", "instrument", places="room school concert", is_generic=True, asks=""),
    Verb("play", "played", "する", "sport", places="park school", is_generic=True, asks=""),
    Verb("listen to", "listened to", "聞く", "music song", places="room park"),
    Verb("sing", "sang", "歌う", "song", places="park room school party"),
    Verb("ride", "rode", "乗る", "bicycle horse elephant", "に", places="park"),
    Verb("wear", "wore", "着-る", "shirt coat"),
    Verb("wear", "wore", "かぶる", "hat", asks=""),
    Verb("wear", "wore", "履く", "shoes", asks=""),
    Verb("have", "had", "持っ て い-る", "goods", aspect=_STATE),
    Verb("have", "had", "飼っ て い-る", "pet horse cow", aspect=_STATE, asks=""),
    Verb("live in", "lived in", "住ん で い-る", "city", "に", aspect=_STATE, asks="where"),
    Verb("like", "liked", "好き な", "animal food drink sport subject music", "が", aspect=_STATE, is_generic=True),
    Verb("understand", "understood", "分かる", "subject", "が", aspect=_STATE, is_generic=True),
    Verb("go to", "went to", "行く", "place", "へ", aspect=_EVENT, asks="where"),
    Verb("come to", "came to", "来る", "place", "へ", aspect=_EVENT, asks=""),
    Verb("go home", "went home", "家 へ 帰る", aspect=_EVENT),
    Verb("get up", "got up", "起き-る", aspect=_EVENT),
    Verb("sleep", "slept", "寝-る", subjects="people animal", places="room garden park"),
    Verb("swim", "swam", "泳ぐ", subjects="people dog elephant", places="pool"),
    Verb("run", "ran", "走る", subjects="people animal", places="park garden"),
    Verb("walk in", "walked in", "歩く", "park garden city", subjects="people dog", asks="where"),
    Verb("work", "worked", "働く", places="hospital station school city library"),
    Verb("dance", "danced", "踊る", subjects="people monkey", places="park room party"),
    Verb("laugh", "laughed", "笑う", places="school restaurant", aspect=_REACTION),
)

SCHEDULED_VERBS = (  # verbs of sentences with a time of day
    Verb("start", "started", "始まる", subjects="event"),
    Verb("end", "ended", "終わる", subjects="event"),
    Verb("open", "opened", "開く", subjects="library museum store restaurant pool"),
    Verb("close", "closed", "閉まる", subjects="library museum store restaurant pool"),
    Verb("leave", "left", "出-る", subjects="bus train"),
    Verb("arrive", "arrived", "着く", subjects="bus train"),
)

ADJECTIVES = (
    Adjective("big", "bigger", "大きい", "animal container vehicle building room table dictionary bed"),
    Adjective("small", "smaller", "小さい", "animal container room garden machine key"),
    Adjective("new", "newer", "新しい", "machine book dictionary bag bed building shirt hat movie"),
    Adjective("old", "older", "古い", "vehicle piano watch building book photo table chair"),
    Adjective("long", "longer", "長い", "letter movie song event"),
    Adjective("short", "shorter", "短い", "letter movie song event"),
    Adjective("expensive", "more expensive", "高い", "goods meat"),
    Adjective("cheap", "cheaper", "安い", "goods meat"),
    Adjective("heavy", "heavier", "重い", "container dictionary machine furniture"),
    Adjective("red", "", "赤い", "apple flower bag car hat umbrella shirt bird"),
    Adjective("white", "", "白い", "dog cat rabbit horse flower shirt plate box"),
    Adjective("black", "", "黒い", "dog cat horse bag shoes car coat"),
    Adjective("hot", "hotter", "熱い", "soup drink"),
    Adjective("cold", "colder", "冷たい", "soup drink"),
    Adjective("delicious", "more delicious", "おいしい", "food soup coffee tea"),
    Adjective("interesting", "more interesting", "面白い", "book magazine letter movie class museum subject"),
    Adjective("difficult", "more difficult", "難しい", "book song class subject"),
    Adjective("cute", "cuter", "可愛い", "pet monkey mouse child hat"),
    Adjective("fast", "faster", "速い", "vehicle horse computer"),
    Adjective("tall", "taller", "背 が 高い", "people", is_predicate=True),
    Adjective("kind", "kinder", "親切 な", "people"),
    Adjective("quiet", "quieter", "静か な", "library museum park room garden child"),
    Adjective("famous", "more famous", "有名 な", "museum restaurant city picture song doctor"),
    Adjective("beautiful", "more beautiful", "美しい", "flower garden picture park city plate bird song"),
    Adjective("busy", "busier", "忙しい", "people"),
    Adjective("happy", "happier", "幸せ な", "people"),
    Adjective("tired", "", "疲れ て い-る", "people horse"),
    Adjective("sleepy", "", "眠い", "people pet"),
    Adjective("hungry", "", "お腹 が すい て い-る", "people pet", is_predicate=True),
    Adjective("sick", "", "病気 な", "people", is_predicate=True),
)

# Where, when and why -------------------------------------------------------------------------------------------------

POSITIONS = (  # (preposition, nouns that are there, nouns of the landmark)
    (Pair("on", "の 上"), "small cat bag box", "table desk chair bed box"),
    (Pair("under", "の 下"), "dog cat mouse bag box shoes", "table desk chair bed"),
    (Pair("in", "の 中"), "small cat mouse", "container"),
    (Pair("in front of", "の 前"), "person car bicycle bus dog", "building"),
    (Pair("behind", "の 後ろ"), "person car bicycle dog", "building"),
    (Pair("behind", "の 後ろ"), "dog cat mouse rabbit box", "bed chair table car"),
    (Pair("near", "の 近く"), "building park person", "building park"),
    (Pair("in", ""), "person animal piano", "park garden room kitchen"),
)

TIMES = {
    "past": (
        Pair("yesterday", "昨日"),
        Pair("this morning", "今朝"),
        Pair("last week", "先週"),
        Pair("last night", "昨夜"),
    ),
    "present": (Pair("every day", "毎日"), Pair("every morning", "毎朝"), Pair("every week", "毎週")),
    "future": (Pair("tomorrow", "明日"), Pair("next week", "来週"), Pair("tonight", "今夜")),
    "progressive": (Pair("now", "今"),),
    "must": (Pair("tomorrow", "明日"), Pair("today", "今日"), Pair("every day", "毎日")),
}
MEANS = {  # means of transport by the tag of the destination
    "city": (Pair("by train", "電車 で"), Pair("by bus", "バス で"), Pair("by car", "車 で")),
    "building": (Pair("by bicycle", "自転車 で"), Pair("by bus", "バス で"), Pair("by car", "車 で")),
}
FREQUENCIES = (Pair("often", "よく"), Pair("sometimes", "時々"), Pair("always", "いつも"), Pair("usually", "たいてい"))
WEEKDAYS = ("monday 月", "tuesday 火", "wednesday 水", "thursday 木", "friday 金", "saturday 土", "sunday 日")
MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
SCHEDULED_DAYS: tuple[tuple[Tense, Pair], ...] = (
    ("present", Pair("", "")),
    ("present", Pair("every day", "毎日")),
    ("past", Pair("yesterday", "昨日 の")),
    ("future", Pair("tomorrow", "明日 の")),
    ("future", Pair("on sunday", "日曜日 の")),
    ("past", Pair("on monday", "月曜日 の")),
)

# Reasons for doing something (REASONS) and for not doing it (EXCUSES), by verb: adjectives of the subject and weather.
WEATHER = {
    "rain": Pair("it was raining", "雨 が 降っ て い た"),
    "snow": Pair("it was snowing", "雪 が 降っ て い た"),
    "heat": Pair("it was hot", "暑かっ た"),
    "chill": Pair("it was cold", "寒かっ た"),
}
REASONS = {
    "eat": "hungry",
    "drink": "heat chill",
    "sleep": "tired sleepy sick",
    "go home": "tired sick busy sleepy rain snow",
    "laugh": "happy",
    "sing": "happy",
    "dance": "happy",
    "swim": "heat",
}
EXCUSES = {
    "go to": "tired sick busy sleepy rain snow",
    "come to": "tired sick busy sleepy rain snow",
    "walk in": "tired sick busy rain snow",
    "run": "tired sick busy rain heat",
    "work": "tired sick snow",
    "study": "tired sick busy sleepy",
    "play": "tired sick busy",
    "clean": "tired sick busy",
    "visit": "tired sick busy rain",
}

# Verbs of polite requests, ranges of ages, and prices.
REQUESTED = frozenset(
    (
        *("open", "close", "wash", "clean", "read", "write", "buy", "show", "send", "make", "use"),
        *("help", "wait for", "look for", "study", "sing", "come to", "listen to", "teach", "visit", "run", "walk in"),
    )
)
ERRANDS = frozenset(  # verbs of purposes of going somewhere
    (
        *("eat", "drink", "read", "draw", "buy", "see", "watch", "find", "look for", "wait for", "meet"),
        *("use", "study", "play", "listen to", "sing"),
    )
)
AGES = (
    ("son daughter child boy girl", 2, 18),  # names or tags of nouns, lowest and highest age
    ("name father mother uncle aunt", 19, 60),
    ("grandfather grandmother", 61, 99),
)
