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

>>> pairs = GrammarPairs("test")
>>> for index in (23, 48, 50, 51, 75, 100):
...     print(pairs[index]["source"], "|", pairs[index]["target"])
yumi danced at the party last week . | 先週 由美 は パーティー で 踊り まし た 。
osaka is more beautiful than london . | 大阪 は ロンドン より きれい です 。
how many eggs did this nurse break ? | この 看護師 は 卵 を 何 個 割り まし た か 。
this dog ate meat because it was hungry . | お腹 が すい て い た ので 、 この 犬 は 肉 を 食べ まし た 。
the bag that yumi bought is light . | 由美 が 買っ た かばん は 軽い です 。
hanako went to the bank and bought two carrots . | 花子 は 銀行 へ 行っ て 、 にんじん を 二 本 買い まし た 。
"""

from tfx_jax.data.grammar.facts import Split
from tfx_jax.data.grammar.pairs import GrammarPairs

__all__ = ["GrammarPairs", "Split"]
