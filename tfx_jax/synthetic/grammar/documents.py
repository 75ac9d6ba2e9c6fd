"""Documents of the built-in grammar: several sentences about one noun."""

import functools
from collections import defaultdict
from typing import Any

from tfx_jax.synthetic.grammar import rules
from tfx_jax.synthetic.grammar.derivation import Derivation
from tfx_jax.synthetic.grammar.facts import Action, Comparison, Position, Profession, Quality, World
from tfx_jax.synthetic.grammar.inflection import be, inflect, with_article
from tfx_jax.synthetic.grammar.lexicon import Adjective, Noun, Pair
from tfx_jax.synthetic.grammar.phrases import definite
from tfx_jax.synthetic.grammar.rules import STATEMENT

_SHORTEST, _LONGEST = 4, 10  # number of sentences of a document
# Groups of adjectives of which only one can be true of a noun.
_EXCLUSIVE = ("big small", "new old", "long short", "expensive cheap", "hot cold", "red white black")

# Facts about a noun --------------------------------------------------------------------------------------------------


def exclude_each_other(one: Adjective, other: Adjective) -> bool:
    """Returns whether two adjectives exclude each other, such as big and small, red and white."""
    pair = {one.english, other.english}
    return len(pair) == 2 and any(pair <= set(group.split()) for group in _EXCLUSIVE)


@functools.cache
def _topics(world: World) -> dict[Noun, dict[str, list[Any]]]:
    """Returns the facts about each noun by kind ("done by", "quality", ...), for nouns with enough facts."""
    topics: dict[Noun, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for noun, facts in world.done_by.items():
        topics[noun]["done by"] = [fact for fact in facts if fact.verb.aspect != "state"]
    for noun, facts in world.done_to.items():
        if noun is not None:
            topics[noun]["done to"] = [
                fact for fact in facts if fact.verb.aspect != "state" and not fact.verb.is_generic
            ]
    for kind, groups in (
        ("quality", world.qualities),
        ("comparison", world.comparisons),
        ("position", world.positions),
        ("profession", world.professions),
    ):
        for facts in groups.values():
            for fact in facts:
                topics[fact.noun][kind].append(fact)
    return {
        noun: {kind: facts for kind, facts in kinds.items() if facts}
        for noun, kinds in topics.items()
        if noun.form in ("name", "kin", "count", "mass", "pair")
        and len(kinds["done by"]) + len(kinds["done to"]) >= _SHORTEST
    }


# Documents -----------------------------------------------------------------------------------------------------------


def document(derivation: Derivation) -> list[str] | None:
    """Samples a document, sentences about one noun, such as: The girl saw a dog. My mother met the girl.

    Args:
      derivation: source of random choices; the facts of the document are appended to `derivation.facts`.

    Returns:
      `_SHORTEST` to `_LONGEST` English sentences; None if too few sampled facts can be in one document.
    """
    topics = _topics(derivation.world)
    topic = derivation.dice.choose(tuple(topics))
    num_sentences = _SHORTEST + derivation.dice.below(_LONGEST - _SHORTEST + 1)
    used_facts: list[tuple[Any, ...]] = []
    sentences = []
    # Some facts repeat or contradict earlier ones and are dropped, so up to three are sampled for each sentence.
    for _ in range(3 * num_sentences):
        kind = derivation.dice.choose(tuple(topics[topic]))
        fact = derivation.dice.choose(topics[topic][kind])
        if all(_go_together(fact, other) for other in used_facts):
            used_facts.append(derivation.tell(fact))
            sentences.append(_sentence(derivation, topic, fact).english)
        if len(sentences) == num_sentences:
            break
    return sentences if len(sentences) >= _SHORTEST else None


def _go_together(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Returns whether two facts may be in one document: they must neither be equal nor contradict each other."""
    if type(one) is not type(other):
        return True
    if isinstance(one, Position | Profession):
        return False
    if isinstance(one, Quality) and isinstance(other, Quality):
        return one.adjective is not other.adjective and not exclude_each_other(one.adjective, other.adjective)
    if isinstance(one, Comparison) and isinstance(other, Comparison):
        return one.other is not other.other
    return one != other


def _sentence(derivation: Derivation, topic: Noun, fact: tuple[Any, ...]) -> Pair:
    """Returns a sentence that tells a fact about the topic."""
    topic_phrase = definite(topic)
    if isinstance(fact, Action):
        tense = "past"
        if fact.verb.aspect == "activity" and derivation.dice.chance(15):
            tense = "past progressive"
        negative = derivation.dice.chance(10)
        extra_slots = derivation.circumstances(fact, tense)
        subject = topic_phrase
        if fact.object is topic:
            extra_slots["OBJECT"] = topic_phrase.marked(fact.verb.particle)
            subject = derivation.noun_phrase(fact.subject)
        return STATEMENT(CLAUSE=derivation.clause(fact, tense, subject, extra_slots, negative=negative))
    present_be = Pair(be("present", topic_phrase.agreement), "")
    if isinstance(fact, Comparison):
        adjective = Pair(fact.adjective.comparative, inflect(fact.adjective.japanese, "present"))
        other = derivation.noun_phrase(fact.other, is_object=True, is_plain=True)
        other_pair = Pair(other.english, other.japanese)
        return rules.COMPARED(SUBJECT=topic_phrase.topic(), BE=present_be, OTHER=other_pair, ADJECTIVE=adjective)
    if isinstance(fact, Position):
        landmark = definite(fact.landmark)
        exists = "い-る" if topic.tags & {"people", "animal"} else "ある"
        place = Pair(
            f"{fact.preposition.english} {landmark.english}",
            " ".join(filter(None, (landmark.japanese, fact.preposition.japanese, "に"))),
        )
        existence = present_be._replace(japanese=inflect(exists, "present"))
        return rules.LOCATED(SUBJECT=topic_phrase.topic(), BE=existence, PLACE=place)
    if isinstance(fact, Profession):
        complement = Pair(with_article(fact.job.english), inflect(f"{fact.job.japanese} な", "present"))
    else:
        _, adjective = fact  # a `Quality`
        complement = Pair(adjective.english, inflect(adjective.japanese, "present"))
    return STATEMENT(CLAUSE=rules.BE(SUBJECT=topic_phrase.topic(), BE=present_be, COMPLEMENT=complement))
