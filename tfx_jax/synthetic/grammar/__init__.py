"""Sentence pairs without end: a synchronous grammar that writes English and Japanese at once.

A rule has two sides that share their slots, so one derivation yields both sentences, each in its own order:

    SUBJECT  VERB OBJECT PLACE       TIME        |  TIME SUBJECT  PLACE   OBJECT VERB
    the girl saw  a dog  in the park yesterday . |  昨日 女の子 は 公園 で 犬 を 見 まし た 。

The verb moves to the end, time and place to the front, a relative clause from behind its noun to before it, "because"
and "when" clauses ahead of what they explain; particles (は が を に で へ と より) say what English says by word
order, and a numeral brings the counter of its noun. A model that has learned this shows it: the map of its cross
attention is full of crossing lines. English determines Japanese, but not the other way round, for "a", "the" and
most plurals are lost. Without its spaces the Japanese sentence is fit for display.

What a sentence tells are facts (a girl sees a dog; a dog is big), and every fact belongs to one split, whether a verb
tells it, an adjective before a noun or a relative clause. So a test sentence puts words together that training never
does, though training has every word and every construction. Free to vary are determiners, owners, numbers of things,
times, places, company and reasons.

Read `rules` first, then `lexicon` and `sentences`. What they lack is in `inflection` (forms of words), `phrases`
(noun phrases), `facts` (who may tell what) and `derivation` (chance).

English alone serves the models that do not translate: `examples` makes documents, labeled sentences and pairs, tagged
sentences and questions of the same facts.

>>> pairs = GrammarPairs("test")
>>> for index in (63, 83, 98, 134, 139, 192):
...     print(pairs[index]["source"], "|", pairs[index]["target"])
taro 's dog ate meat because it was hungry . | お腹 が すい て い た ので 、 太郎 の 犬 は 肉 を 食べ まし た 。
how many dogs are there in front of the store ? | 店 の 前 に 犬 が 何 匹 い ます か 。
there are three bicycles in front of the hospital . | 病院 の 前 に 自転車 が 三 台 あり ます 。
yumi danced at the party with my father . | 由美 は 父 と パーティー で 踊り まし た 。
the bus is faster than the bicycle . | バス は 自転車 より 速い です 。
my son wore the hat that they found last week . | 息子 は 先週 彼 ら が 見つけ た 帽子 を かぶり まし た 。
"""

from tfx_jax.synthetic.grammar.examples import (
    grammar_documents,
    grammar_labeled,
    grammar_labeled_pairs,
    grammar_questions,
    grammar_tagged,
    grammar_trees,
)
from tfx_jax.synthetic.grammar.sentence_pairs import GrammarPairs

__all__ = [
    "GrammarPairs",
    "grammar_documents",
    "grammar_labeled",
    "grammar_labeled_pairs",
    "grammar_questions",
    "grammar_tagged",
    "grammar_trees",
]
