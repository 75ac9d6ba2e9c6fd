"""Noun phrases in both languages; their random parts are in `derivation`. Docstrings show examples."""

from typing import NamedTuple

from tfx_jax.synthetic.grammar.inflection import Agreement, with_s
from tfx_jax.synthetic.grammar.lexicon import PRONOUNS, Noun, Pair
from tfx_jax.synthetic.grammar.rules import NOTHING, NOUN_PHRASE

THE = Pair("the", "")


class NounPhrase(NamedTuple):
    """A noun phrase without its Japanese particle.

    `is_known` distinguishes the girl (女の子 は) from a girl (女の子 が). `count` is a numeral with its counter,
    such as 三 冊.
    """

    english: str
    japanese: str
    agreement: Agreement = "singular"
    is_known: bool = True
    count: str = ""

    def marked(self, particle: str) -> Pair:
        """The phrase with its particle; a count follows を, as in 本 を 三 冊, and goes before the noun elsewhere."""
        if not self.count:
            return Pair(self.english, f"{self.japanese} {particle}")
        if particle == "を":
            return Pair(self.english, f"{self.japanese} を {self.count}")
        return Pair(self.english, f"{self.count} の {self.japanese} {particle}")

    def topic(self) -> Pair:
        """The phrase as the subject of a main clause."""
        return self.marked("は" if self.is_known else "が")


def described(
    noun: Noun, determiner: Pair, adjective: Pair, *, is_plural: bool = False, is_group: bool = False
) -> NounPhrase:
    """Determiner, adjective and noun, in this order in both languages; たち marks a group of persons or animals."""
    english = plural(noun) if is_plural else noun.english
    japanese = f"{noun.japanese} たち" if is_group and noun.tags & {"people", "animal"} else noun.japanese
    pair = NOUN_PHRASE(DETERMINER=determiner, ADJECTIVE=adjective, NOUN=Pair(english, japanese))
    return NounPhrase(*pair, "plural" if is_plural else "singular")


def plural(noun: Noun) -> str:
    """The English plural, of a portion if the noun itself has none.

    >>> from tfx_jax.synthetic.grammar.lexicon import select
    >>> [plural(noun) for noun in select("child tomato coffee")]
    ['children', 'tomatoes', 'cups of coffee']
    """
    if noun.form == "mass":
        return f"{'cups' if 'cup' in noun.tags else 'glasses'} of {noun.english}"
    return noun.plural or with_s(noun.english)


def the(noun: Noun, adjective: Pair = NOTHING) -> NounPhrase:
    """The one thing of its kind, or a name.

    >>> from tfx_jax.synthetic.grammar.lexicon import select
    >>> the(select("station")[0]).english, the(select("tokyo")[0]).english
    ('the station', 'tokyo')
    """
    return described(noun, NOTHING if noun.form in ("bare", "name") else THE, adjective)


def definite(noun: Noun) -> NounPhrase:
    """The one that is spoken of: a name, my mother, the dog, the shoes.

    >>> from tfx_jax.synthetic.grammar.lexicon import NOUNS
    >>> [definite(NOUNS[noun]).english for noun in ("taro", "mother", "dog", "shoes")]
    ['taro', 'my mother', 'the dog', 'the shoes']
    """
    if noun.form == "kin":
        return NounPhrase(f"my {noun.english}", noun.japanese.split("/")[0])
    if noun.form == "pair":
        return described(noun, THE, NOTHING, is_plural=True)
    return the(noun)


def possessive(owner: Noun) -> Pair:
    """Whose: my, the girl's.

    >>> from tfx_jax.synthetic.grammar.lexicon import NOUNS
    >>> [possessive(NOUNS[owner]).english for owner in ("i", "girl", "mother")]
    ['my', "the girl 's", "my mother 's"]
    """
    if owner.form == "pronoun":
        return Pair(PRONOUNS[owner.english][1], f"{owner.japanese} の")
    if owner.form == "kin":
        return Pair(f"my {owner.english} 's", f"{owner.japanese.split('/')[0]} の")
    return Pair(f"{the(owner).english} 's", f"{owner.japanese} の")


def at(place: Noun) -> Pair:
    """Where something is done.

    >>> from tfx_jax.synthetic.grammar.lexicon import select
    >>> at(select("park")[0])
    Pair(english='in the park', japanese='公園 で')
    """
    return Pair(f"{'at' if 'at' in place.tags else 'in'} {the(place).english}", f"{place.japanese} で")


def kind_of(noun: Noun) -> NounPhrase:
    """All things of a kind: dogs, coffee, tennis; but one plays *the* piano."""
    if "instrument" in noun.tags:
        return the(noun)
    return described(noun, NOTHING, NOTHING, is_plural=noun.form == "count")
