"""Reading comprehension in the built-in grammar: a context of several sentences, and a question that one answers."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence

from tfx_jax.data.sources.squad import Answer, Question
from tfx_jax.synthetic.grammar import rules
from tfx_jax.synthetic.grammar.derivation import Derivation
from tfx_jax.synthetic.grammar.facts import Action, World
from tfx_jax.synthetic.grammar.inflection import english_number
from tfx_jax.synthetic.grammar.lexicon import NOUNS, Noun, Pair, select
from tfx_jax.synthetic.grammar.phrases import THE, NounPhrase, definite, described, plural
from tfx_jax.synthetic.grammar.rules import NOTHING, STATEMENT, Slots

# The slot that answers each question word.
_ANSWERING = {"who": "SUBJECT", "what": "OBJECT", "how many": "OBJECT", "where": "PLACE", "when": "TIME"}
_OPEN, _CLOSE = "<", ">"  # marks around the answer, until its position in the context is known

Names = dict[Noun, NounPhrase]  # phrase for each noun that the context has already mentioned


@functools.cache
def _deeds(world: World) -> dict[str, list[Action]]:
    """Returns the actions that may be asked about, by English verb: with an object and without pronouns."""
    deeds = defaultdict(list)
    for verb, facts in world.handlings.items():
        if verb.aspect != "state":
            deeds[verb.english] += [
                fact
                for fact in facts
                if not any(noun and noun.form == "pronoun" for noun in (fact.subject, fact.object))
            ]
    return {verb: facts for verb, facts in deeds.items() if facts}


@functools.cache
def _deeds_of(world: World) -> dict[Noun | None, list[Action]]:
    """Returns the actions of `_deeds` by noun, for subject and object."""
    deeds = defaultdict(list)
    for facts in _deeds(world).values():
        for fact in facts:
            deeds[fact.subject].append(fact)
            deeds[fact.object].append(fact)
    return dict(deeds)


def reading(draw: Derivation) -> Question | None:
    """Returns a question with its context, such as: Taro saw a cat. The girl saw a dog. What did the girl see?

    The context tells the deed that the question is about, a *rival* (a deed with the same verb but other nouns), and up
    to three other facts. Returns None if there is no rival, places run out, or a wrong sentence has the right answer.
    """
    facts = draw.dice.choose(tuple(_deeds(draw.world).values()))
    deed = draw.dice.choose(facts)
    rivals = [fact for fact in facts if not _share(fact, deed)]
    if not rivals:
        return None
    rival = draw.dice.choose(rivals)
    asked = draw.dice.choose(_askable(deed, rival))
    context = [deed, rival]
    for _ in range(draw.dice.below(4)):
        noun = draw.dice.choose((deed.subject, rival.subject, deed.object))
        other = draw.dice.choose(_deeds_of(draw.world)[noun])
        # Another fact with the same verb and a common noun could answer the question too.
        is_unambiguous = all(other.verb.english != fact.verb.english or not _share(other, fact) for fact in context)
        if is_unambiguous and not (asked == "how many" and deed.object in other):
            context.append(other)

    names: Names = {}
    sentences = []
    while context:
        fact = context.pop(draw.dice.below(len(context)))
        sentence = _context_sentence(draw, draw.tell(fact), asked, names, is_asked=fact is deed)
        if sentence is None:
            return None
        sentences.append(sentence)
    # The marks around the answer give its position, and are removed from the context.
    before, _, rest = " ".join(sentences).partition(_OPEN)
    answer, _, after = rest.partition(_CLOSE)
    if asked in ("when", "how many") and answer in before + after:  # another sentence has the same answer
        return None
    question = _question(draw, deed, asked, names)
    return Question("", question.english, before + answer + after, (Answer(answer, len(before)),))


def _share(one: Action, other: Action) -> bool:
    """Returns whether both actions have a noun in common."""
    return bool({one.subject, one.object} & {other.subject, other.object})


def _askable(deed: Action, rival: Action) -> Sequence[str]:
    """Returns the question words for the deed to which the rival has an answer as well."""
    is_askable = {
        "who": "people" in deed.subject.tags and "people" in rival.subject.tags,
        "what": bool(deed.verb.asks) or deed.verb.particle != "へ",  # not "where did she come?"
        "how many": _is_countable(deed.object) and _is_countable(rival.object),
        "where": bool(deed.verb.places and rival.verb.places),
        "when": True,
    }
    return [asked for asked in is_askable if is_askable[asked]]


def _is_countable(noun: Noun | None) -> bool:
    """Returns whether "how many" can be asked about a noun."""
    return noun is not None and noun.form == "count" and bool(noun.counter)


def _context_sentence(draw: Derivation, fact: Action, asked: str, names: Names, *, is_asked: bool) -> str | None:
    """Returns a sentence of the context; None if no place is left.

    Args:
      draw: the derivation.
      fact: the fact that the sentence tells.
      asked: question word, such as "where"; the sentence must have such a part.
      names: phrases of the nouns mentioned so far, to which those of this sentence are added.
      is_asked: whether the question is about this fact; then the answer is marked.
    """
    subject = names.setdefault(fact.subject, definite(fact.subject))
    slots: Slots = {"OBJECT": _object(draw, fact, names, is_counted=asked == "how many")}
    if fact.verb.places and (asked == "where" or draw.dice.chance(40)):
        places = [place for place in select(fact.verb.places) if place not in names]
        if not places:  # all are used, and two sentences must not have the same answer
            return None
        place = draw.dice.choose(places)
        slots["PLACE"] = draw.place(place)
        names[place] = definite(place)
    if asked == "when" or draw.dice.chance(40):
        slots["TIME"] = draw.time("past")
    if is_asked:
        slot = _ANSWERING[asked]
        slots[slot] = _mark({"SUBJECT": subject.topic(), **slots}[slot], is_number=asked == "how many")
    return STATEMENT(CLAUSE=draw.clause(fact, "past", subject, slots)).english


def _object(draw: Derivation, fact: Action, names: Names, *, is_counted: bool) -> Pair:
    """Returns the object's phrase; its later mentions have "the"."""
    noun = fact.object
    assert noun is not None
    if noun in names:
        phrase = names[noun]
    elif is_counted and _is_countable(noun):
        phrase = described(noun, Pair(english_number(2 + draw.dice.below(8)), ""), NOTHING, is_plural=True)
    elif noun.form == "kin":
        phrase = definite(noun)
    else:
        phrase = draw.noun_phrase(noun, is_object=True, is_new=True)
    is_plural = phrase.agreement == "plural" and noun.form == "count"
    names.setdefault(noun, described(noun, THE, NOTHING, is_plural=True) if is_plural else definite(noun))
    return phrase.marked(fact.verb.particle)


def _mark(pair: Pair, *, is_number: bool) -> Pair:
    """Marks the number of a phrase, or all but its preposition: in <the park>, <three> dogs."""
    first, _, rest = pair.english.partition(" ")
    if is_number:
        return pair._replace(english=f"{_OPEN}{first}{_CLOSE} {rest}")
    if first in ("in", "at", "on"):
        return pair._replace(english=f"{first} {_OPEN}{rest}{_CLOSE}")
    return pair._replace(english=f"{_OPEN}{pair.english}{_CLOSE}")


def _question(draw: Derivation, deed: Action, asked: str, names: Names) -> Pair:
    """Returns the question about a deed with the question word `asked`; it reveals no more than the context does."""
    noun, verb = deed.object, deed.verb
    assert noun is not None
    slots: Slots = {} if _ANSWERING[asked] == "OBJECT" else {"OBJECT": names[noun].marked(verb.particle)}
    if asked == "who":
        somebody = NounPhrase("who", NOUNS["who"].japanese, is_known=False)
        return rules.WHO(CLAUSE=draw.clause(deed, "past", somebody, slots))
    if asked == "how many":
        asked = f"how many {plural(noun)}"
    elif asked == "what" and "people" in noun.tags:
        asked = "who"
    elif asked == "what" and "place" in noun.tags and " " in verb.english:  # where did she go, not "go to"
        asked = "where"
        verb = dataclasses.replace(verb, english=verb.english.split()[0])
    subject = names[deed.subject]
    predicate = draw.predicate(deed._replace(verb=verb), "past", subject.agreement, inverted=True)
    return rules.QUESTION(ASKED=Pair(asked, ""), SUBJECT=subject.topic(), **predicate, **slots)
