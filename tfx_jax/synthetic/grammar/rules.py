"""The grammar at a glance: every synchronous rule. Compare its two sides to see how the word order changes.

A slot is in capitals and stands for a phrase in both languages; Japanese particles that mark a phrase are part of it.
"""

from tfx_jax.synthetic.grammar.lexicon import Pair

Slots = dict[str, Pair]

NOTHING = Pair("", "")


class Rule:
    """A synchronous rule: an English and a Japanese right-hand side over the same slots, which are in capitals.

    >>> compare = Rule("THIS is bigger than THAT .", "THIS は THAT より 大きい です 。")
    >>> compare(THIS=Pair("the dog", "犬"), THAT=Pair("the cat", "猫"))
    Pair(english='the dog is bigger than the cat .', japanese='犬 は 猫 より 大きい です 。')
    """

    def __init__(self, english: str, japanese: str):
        self._english, self._japanese = english.split(), japanese.split()
        words = {*self._english, *self._japanese}
        # Slots are empty by default, and other words stand for themselves in the language that has them.
        self._fillers = {word: NOTHING if word.isupper() else Pair(word, word) for word in words}

    def __call__(self, **slots: Pair) -> Pair:
        """Returns the sentence or phrase with its slots filled; slots that are not given stay empty."""
        fillers = self._fillers | slots
        english = [fillers[word][0] for word in self._english]
        japanese = [fillers[word][1] for word in self._japanese]
        return Pair(" ".join(filter(None, english)), " ".join(filter(None, japanese)))


# Phrases and clauses
NOUN_PHRASE = Rule("DETERMINER ADJECTIVE NOUN", "DETERMINER ADJECTIVE NOUN")
RELATIVE = Rule("NOUN PRONOUN CLAUSE", "CLAUSE NOUN")
CLAUSE = Rule(
    "SUBJECT FREQUENCY VERB OBJECT RECIPIENT PLACE COMPANION MEANS TIME",
    "TIME SUBJECT FREQUENCY COMPANION MEANS PLACE RECIPIENT OBJECT VERB",
)
CLAUSE_OF_LONG_SUBJECT = Rule(  # before a relative clause, the time would seem to belong to it
    "SUBJECT FREQUENCY VERB OBJECT RECIPIENT PLACE COMPANION MEANS TIME",
    "SUBJECT TIME FREQUENCY COMPANION MEANS PLACE RECIPIENT OBJECT VERB",
)
BE = Rule("SUBJECT BE DEGREE COMPLEMENT", "SUBJECT DEGREE COMPLEMENT")

# Statements, questions, requests
STATEMENT = Rule("CLAUSE .", "CLAUSE 。")
WHO = Rule("CLAUSE ?", "CLAUSE か 。")
QUESTION = Rule(
    "ASKED AUXILIARY SUBJECT FREQUENCY VERB OBJECT RECIPIENT PLACE COMPANION MEANS TIME ?",
    "SUBJECT TIME FREQUENCY COMPANION MEANS PLACE RECIPIENT OBJECT VERB か 。",
)
REQUEST = Rule("please NEGATION VERB OBJECT RECIPIENT .", "RECIPIENT OBJECT VERB 。")
AND = Rule("CLAUSE and OTHER .", "CLAUSE 、 OTHER 。")
BUT = Rule("CLAUSE , but OTHER .", "CLAUSE が 、 OTHER 。")
BECAUSE = Rule("CLAUSE because REASON .", "REASON ので 、 CLAUSE 。")
WHEN = Rule("CLAUSE when OTHER .", "OTHER とき 、 CLAUSE 。")
THINK = Rule("SUBJECT THINK that CLAUSE .", "SUBJECT CLAUSE と THINK 。")
IS_IT = Rule("BE SUBJECT COMPLEMENT ?", "SUBJECT COMPLEMENT か 。")
COMPARED = Rule("SUBJECT BE ADJECTIVE than OTHER .", "SUBJECT OTHER より ADJECTIVE 。")
LOCATED = Rule("SUBJECT BE PLACE .", "SUBJECT PLACE BE 。")
THERE_IS = Rule("there BE THING PLACE .", "PLACE THING BE 。")
IS_THERE = Rule("ASKED BE there THING PLACE ?", "PLACE THING BE か 。")
COST = Rule("SUBJECT COST AMOUNT yen .", "SUBJECT AMOUNT 円 です 。")
AGE = Rule("SUBJECT BE AGE years old .", "SUBJECT AGE 歳 です 。")
BIRTHDAY = Rule("OWNER birthday is DATE .", "OWNER 誕生日 は DATE です 。")
