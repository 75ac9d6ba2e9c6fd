"""Noun phrases in both languages; their random parts are in `derivation`."""

from typing import NamedTuple

from tfx_jax.synthetic.grammar.inflection import Agreement, with_s
from tfx_jax.synthetic.grammar.lexicon import PRONOUNS, Noun, Pair
from tfx_jax.synthetic.grammar.rules import NOTHING, NOUN_PHRASE

THE = Pair("the", "")


class NounPhrase(NamedTuple):
    """A noun phrase without its Japanese particle.

    Attributes:
      english: the English phrase.
      japanese: the Japanese phrase.
      agreement: form of the English verb that the phrase needs as a subject.
      is_known: whether the reader knows it already: the girl (女の子 は), not a girl (女の子 が).
      count: Japanese numeral with its counter, such as 三 冊; empty for none.
    """

    english: str
    japanese: str
    agreement: Agreement = "singular"
    is_known: bool = True
    count: str = ""

    def marked(self, particle: str) -> Pair:
        """Returns the phrase with its particle.

        A count follows the particle を, as in 本 を 三 冊; with other particles it is before the noun.
        """
        if not self.count:
            return Pair(self.english, f"{self.japanese} {particle}")
        if particle == "を":
            return Pair(self.english, f"{self.japanese} を {self.count}")
        return Pair(self.english, f"{self.count} の {self.japanese} {particle}")

    def topic(self) -> Pair:
        """Returns the phrase as the subject of a main clause, marked with は if known, otherwise with が."""
        return self.marked("は" if self.is_known else "が")


def described(
    noun: Noun, determiner: Pair, adjective: Pair, *, is_plural: bool = False, is_group: bool = False
) -> NounPhrase:
    """Returns determiner, adjective and noun, in this order in both languages.

    With `is_group`, たち marks a group of persons or animals in Japanese.
    """
    english = plural(noun) if is_plural else noun.english
    japanese = f"{noun.japanese} たち" if is_group and noun.tags & {"people", "animal"} else noun.japanese
    pair = NOUN_PHRASE(DETERMINER=determiner, ADJECTIVE=adjective, NOUN=Pair(english, japanese))
    return NounPhrase(*pair, "plural" if is_plural else "singular")


def plural(noun: Noun) -> str:
    """Returns the English plural of a noun; for a mass noun, the plural of its portion.

    >>> from tfx_jax.synthetic.grammar.lexicon import select
    >>> [plural(noun) for noun in select("child tomato coffee")]
    ['children', 'tomatoes', 'cups of coffee']
    """
    if noun.form == "mass":
        return f"{'cups' if 'cup' in noun.tags else 'glasses'} of {noun.english}"
    return noun.plural or with_s(noun.english)


def the(noun: Noun, adjective: Pair = NOTHING) -> NounPhrase:
    """Returns the phrase for the only thing of its kind, with "the", or a name, without it.

    >>> from tfx_jax.synthetic.grammar.lexicon import select
    >>> the(select("station")[0]).english, the(select("tokyo")[0]).english
    ('the station', 'tokyo')
    """
    return described(noun, NOTHING if noun.form in ("bare", "name") else THE, adjective)


def definite(noun: Noun) -> NounPhrase:
    """Returns the phrase for a noun that the reader knows: a name, my mother, the dog, the shoes.

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
    """Returns the possessive of an owner: my, the girl's.

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
    """Returns the phrase for the place of an action: in the park.

    >>> from tfx_jax.synthetic.grammar.lexicon import select
    >>> at(select("park")[0])
    Pair(english='in the park', japanese='公園 で')
    """
    return Pair(f"{'at' if 'at' in place.tags else 'in'} {the(place).english}", f"{place.japanese} で")


def kind_of(noun: Noun) -> NounPhrase:
    """Returns the phrase for all things of a kind: dogs, coffee, tennis; but one plays *the* piano."""
    if "instrument" in noun.tags:
        return the(noun)
    return described(noun, NOTHING, NOTHING, is_plural=noun.form == "count")
