"""Sentence pairs of the built-in grammar whose first sentence entails, contradicts or is neutral to the second."""

import functools
from collections import defaultdict

from tfx_jax.data.sources.labeled import LabeledPair
from tfx_jax.synthetic.grammar import rules
from tfx_jax.synthetic.grammar.derivation import Derivation
from tfx_jax.synthetic.grammar.documents import exclude_each_other
from tfx_jax.synthetic.grammar.facts import Action, Quality, World
from tfx_jax.synthetic.grammar.inflection import be, inflect
from tfx_jax.synthetic.grammar.lexicon import Noun, Pair
from tfx_jax.synthetic.grammar.phrases import NounPhrase, definite, kind_of
from tfx_jax.synthetic.grammar.rules import CLAUSE, NOTHING, RELATIVE, STATEMENT, Rule, Slots

ENTAILMENT, NEUTRAL, CONTRADICTION = LABELS = ("ENTAILMENT", "NEUTRAL", "CONTRADICTION")
_NEGATIVE_PERCENT = 30  # percentage of negated second sentences, for each label, and of negated irrelevant clauses
_ALSO = Rule("CLAUSE CONJUNCTION OTHER .", "CLAUSE CONJUNCTION OTHER 。")
_ASIDE = Rule("NOUN , PRONOUN CLAUSE ,", "CLAUSE NOUN")  # non-restrictive relative clause


@functools.cache
def _deeds_of(world: World) -> dict[Noun, list[Action]]:
    """Returns the deeds of each noun, without pronouns: actions that are no state and have no recipient."""
    return {
        noun: deeds
        for noun, facts in world.done_by.items()
        if noun.form != "pronoun" and (deeds := [fact for fact in facts if _is_deed(fact)])
    }


def _is_deed(fact: Action) -> bool:
    """Returns whether an action is a deed, see `_deeds_of`."""
    has_pronoun = fact.object is not None and fact.object.form == "pronoun"
    return fact.verb.aspect != "state" and not fact.verb.takes_recipient and not has_pronoun


@functools.cache
def _deeds_to(world: World) -> dict[Noun, list[Action]]:
    """Returns the deeds whose object is each noun."""
    deeds = defaultdict(list)
    for facts in _deeds_of(world).values():
        for fact in facts:
            if fact.object is not None:
                deeds[fact.object].append(fact)
    return dict(deeds)


@functools.cache
def _qualities_of(world: World) -> dict[Noun, list[Quality]]:
    """Returns the qualities of each noun, without pronouns."""
    qualities = defaultdict(list)
    for facts in world.qualities.values():
        for fact in facts:
            if fact.noun.form != "pronoun":
                qualities[fact.noun].append(fact)
    return dict(qualities)


def entailment(draw: Derivation) -> LabeledPair | None:
    """Returns a labeled pair such as "The girl who saw a dog did not sleep", "The girl slept"; None on failure.

    Failure (too few facts for a first sentence) depends only on the second sentence, so that the labels remain equally
    likely for each second sentence.
    """
    negative = draw.dice.chance(_NEGATIVE_PERCENT)
    label = draw.dice.choose(LABELS)
    if draw.dice.chance(20):
        quality = draw.fact(draw.world.qualities)
        is_nameable = quality.noun.form in ("name", "kin", "count", "mass", "pair")
        if not is_nameable or quality.noun not in _deeds_to(draw.world):
            return None
        first, second = _about_quality(draw, quality, label, negative), _being(quality, negative)
    else:
        deeds = draw.dice.choose(tuple(_deeds_of(draw.world).values()))
        deed = draw.tell(draw.dice.choose(deeds))
        if not any(_is_independent(deed, other) for other in deeds):
            return None
        first, second = _about_deed(draw, deed, label, negative), _doing(draw, deed, negative)
    return LabeledPair(first.english, STATEMENT(CLAUSE=second).english, label)


def _is_independent(deed: Action, other: Action) -> bool:
    """Returns whether neither deed implies the other: meeting the girl implies seeing her, knowing the boy does not."""
    if other.object is deed.object:
        return False
    # Two entries of the lexicon may share an English verb; their deeds are not used together.
    return other.verb is deed.verb or other.verb.english != deed.verb.english


# Deeds ---------------------------------------------------------------------------------------------------------------


def _about_deed(draw: Derivation, deed: Action, label: str, negative: bool) -> Pair:
    """Returns a first sentence such that the label holds for the second sentence, which tells the deed.

    Args:
      draw: the derivation.
      deed: the fact of the second sentence.
      label: relation of the first sentence to the second one.
      negative: whether the second sentence is negated.
    """
    others = [other for other in _deeds_of(draw.world)[deed.subject] if _is_independent(deed, other)]
    other = draw.tell(draw.dice.choose(others))
    is_denied = draw.dice.chance(_NEGATIVE_PERCENT)
    if label != NEUTRAL:
        # An entailing sentence tells the deed with the same negation, a contradicting one with the opposite.
        is_negated = negative == (label == ENTAILMENT)
        clause = _doing(draw, deed, is_negated, without=deed)
        # Otherwise the clause equals the second sentence or its negation.
        is_longer = clause != _doing(draw, deed, is_negated)
        if draw.dice.chance(50) and (is_longer or (label == CONTRADICTION and draw.dice.chance(20))):
            return STATEMENT(CLAUSE=clause)
        return _both(draw, (deed, is_negated), (other, is_denied), without=deed)
    lookalike = _lookalike(draw, deed)
    if lookalike and draw.dice.chance(50):
        return lookalike
    same_verb = [other for other in others if other.verb is deed.verb]
    if same_verb and draw.dice.chance(50):
        other = draw.tell(draw.dice.choose(same_verb))
    if draw.dice.chance(50):
        return STATEMENT(CLAUSE=_doing(draw, other, is_denied, without=deed))
    third = draw.dice.choose(others)
    if third is other:
        return STATEMENT(CLAUSE=_doing(draw, other, is_denied, without=deed))
    return _both(draw, (other, is_denied), (draw.tell(third), draw.dice.chance(_NEGATIVE_PERCENT)), without=deed)


def _lookalike(draw: Derivation, deed: Action) -> Pair | None:
    """Returns a neutral sentence with the words of a deed but another subject; None if there are no such facts.

    For "the girl saw the dog": the boy who met the girl saw the dog.
    """
    if deed.object is None:
        return None
    deeds_to = _deeds_to(draw.world)
    rivals = [  # the same deed of another subject: the boy saw the dog
        rival
        for rival in deeds_to.get(deed.object, ())
        if rival.verb is deed.verb and rival.subject is not deed.subject
    ]
    pairs = [  # each with another deed of its subject, done to the deed's subject: the boy met the girl
        (rival, meeting)
        for rival in rivals
        for meeting in deeds_to.get(deed.subject, ())
        if meeting.subject is rival.subject and meeting != rival
    ]
    if not pairs:
        return None
    rival, meeting = draw.dice.choose(pairs)
    is_denied = draw.dice.chance(_NEGATIVE_PERCENT)
    return _both(draw, (draw.tell(rival), is_denied), (draw.tell(meeting), False), without=deed)


def _both(draw: Derivation, one: tuple[Action, bool], other: tuple[Action, bool], *, without: Action) -> Pair:
    """Returns a sentence about two deeds of one subject: the girl who slept did not see the dog.

    Args:
      draw: the derivation.
      one: (deed, whether it is negated).
      other: the same for another deed of the same subject. The order in the sentence is random.
      without: deed whose nouns must not be in the circumstances, see `_doing`.
    """
    first, second = (one, other) if draw.dice.chance(50) else (other, one)
    deed, _ = one
    subject = definite(deed.subject)
    if deed.subject.form == "count" and draw.dice.chance(60):
        pronoun = Pair("who" if "people" in deed.subject.tags else "that", "")
        clause = _doing(draw, *first, subject=NounPhrase("", ""))
        subject = NounPhrase(*RELATIVE(NOUN=Pair(*subject[:2]), PRONOUN=pronoun, CLAUSE=clause))
        return STATEMENT(CLAUSE=_doing(draw, *second, subject=subject, without=without))
    _, is_first_negated = first
    _, is_second_negated = second
    return _ALSO(
        CLAUSE=_doing(draw, *first),
        CONJUNCTION=Pair("and" if is_first_negated == is_second_negated else ", but", ""),
        OTHER=_doing(draw, *second, subject=NounPhrase("", ""), without=without),
    )


def _doing(
    draw: Derivation,
    deed: Action,
    negative: bool,
    *,
    subject: NounPhrase | None = None,
    thing: NounPhrase | None = None,
    without: Action | None = None,
) -> Pair:
    """Returns a clause such as "the girl saw the dog".

    Args:
      draw: the derivation.
      deed: the fact.
      negative: whether the verb is negated.
      subject: phrase of the subject; None means the definite phrase.
      thing: phrase of the object; None means the definite phrase.
      without: adds random circumstances (time, place, means) that do not contain the nouns of this deed; None adds
        none. Negative clauses have none: a girl who did not swim yesterday may have swum on another day.
    """
    slots: Slots = {}
    if without is not None and not negative:
        forbidden = {noun.english for noun in (without.subject, without.object) if noun is not None}
        slots = {
            name: pair
            for name, pair in draw.circumstances(deed, "past").items()
            if name in ("TIME", "PLACE", "MEANS") and not forbidden & set(pair.english.split())
        }
    if deed.object is not None:
        if thing is None:
            thing = kind_of(deed.object) if deed.verb.is_generic else definite(deed.object)
        slots["OBJECT"] = thing.marked(deed.verb.particle)
    return draw.clause(deed, "past", subject or definite(deed.subject), slots, negative=negative)


# Qualities -----------------------------------------------------------------------------------------------------------


def _about_quality(draw: Derivation, quality: Quality, label: str, negative: bool) -> Pair:
    """Returns a first sentence such that the label holds for the second sentence, which tells the quality.

    Args:
      draw: the derivation.
      quality: the fact of the second sentence.
      label: relation of the first sentence to the second one.
      negative: whether the second sentence is negated.
    """
    noun, adjective = quality
    deed = draw.tell(draw.dice.choose(_deeds_to(draw.world)[noun]))
    others = [other for other in _qualities_of(draw.world)[noun] if other.adjective is not adjective]
    opposites = [other for other in others if exclude_each_other(adjective, other.adjective)]
    if label == NEUTRAL:
        is_denied = draw.dice.chance(_NEGATIVE_PERCENT)
        of_other_nouns = [other for other in draw.world.qualities[adjective] if other.noun not in (noun, deed.subject)]
        neutral_qualities = [
            other for other in [*others, *of_other_nouns] if other not in opposites and other.noun.form != "pronoun"
        ]
        if not neutral_qualities or draw.dice.chance(30):
            return STATEMENT(CLAUSE=_doing(draw, deed, is_denied, without=deed))
        other_quality = draw.tell(draw.dice.choose(neutral_qualities))
        return _quality_sentence(draw, other_quality, is_denied, deed if other_quality.noun is noun else None)
    is_true = negative == (label == CONTRADICTION)  # whether the first sentence affirms the quality
    if not is_true and opposites and draw.dice.chance(50):
        return _quality_sentence(draw, draw.tell(draw.dice.choose(opposites)), negative=False, deed=deed)
    return _quality_sentence(draw, quality, not is_true, deed)


def _quality_sentence(draw: Derivation, quality: Quality, negative: bool, deed: Action | None) -> Pair:
    """Returns a sentence that tells a quality.

    With a deed done to the noun: "the dog that ken saw is big", "ken saw the big dog" or "the dog is very big". Without
    a deed: "the dog is big".
    """
    noun, adjective = quality
    if deed is None:
        return STATEMENT(CLAUSE=_being(quality, negative))
    is_named = noun.form in ("name", "kin")
    kind = 0 if negative else draw.dice.below(3)  # 0: relative clause, 1: "very", 2: adjective before the noun
    if kind == 1 and adjective.comparative:
        return STATEMENT(CLAUSE=_being(quality, negative, degree="very"))
    if kind == 2 and not is_named and not adjective.is_predicate:
        phrase = definite(noun)
        english = phrase.english.replace("the ", f"the {adjective.english} ", 1)
        thing = phrase._replace(english=english)
        return STATEMENT(CLAUSE=_doing(draw, deed, negative=False, thing=thing, without=deed))
    verb = draw.predicate(deed, "past", "singular")
    time = draw.time("past") if draw.dice.chance(50) else NOTHING
    clause = CLAUSE(SUBJECT=definite(deed.subject).marked("が"), TIME=time, **verb)
    rule = _ASIDE if is_named else RELATIVE
    phrase = definite(noun)
    pronoun = Pair("who" if "people" in noun.tags else "that", "")
    noun_pair = Pair(phrase.english, phrase.japanese)
    subject = NounPhrase(*rule(NOUN=noun_pair, PRONOUN=pronoun, CLAUSE=clause), phrase.agreement)
    return STATEMENT(CLAUSE=_being(quality, negative, subject=subject))


def _being(quality: Quality, negative: bool, *, degree: str = "", subject: NounPhrase | None = None) -> Pair:
    """Returns a clause and its Japanese, such as "the dog is very big" and 犬 は 大きい.

    `degree` is an adverb such as "very", of which only the English side has a word.
    """
    subject = subject or definite(quality.noun)
    verb = be("present", subject.agreement)
    return rules.BE(
        SUBJECT=subject.topic(),
        BE=Pair(f"{verb} not" if negative else verb, ""),
        DEGREE=Pair(degree, ""),
        COMPLEMENT=Pair(quality.adjective.english, inflect(quality.adjective.japanese, "present", negative=negative)),
    )
