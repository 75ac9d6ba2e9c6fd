"""The grammar's English examples are what they say, and tell no fact in two splits."""

import collections
import functools
import math
import re
import time
from typing import Any

import pytest

from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.metrics.entities import entities_of_tags, repair_tags
from tfx_jax.synthetic import grammar as toy_grammar
from tfx_jax.synthetic.grammar import derivation, facts, labeled_texts, lexicon, phrases, tagged_sentences

MAKERS = {
    "documents": toy_grammar.grammar_documents,
    "labeled": toy_grammar.grammar_labeled,
    "pairs": toy_grammar.grammar_labeled_pairs,
    "tagged": toy_grammar.grammar_tagged,
    "questions": toy_grammar.grammar_questions,
    "trees": toy_grammar.grammar_trees,
}


SPLITS: tuple[Any, ...] = ("train", "validation", "test")
LABELS = {"ENTAILMENT", "NEUTRAL", "CONTRADICTION"}


@functools.cache
def _train(name):
    """The first examples to learn from: as many as any test reads; they begin alike, however many are asked for."""
    return MAKERS[name]("train", 8_000 if name == "pairs" else 3_000)


# Access --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("split", SPLITS)
def test_examples_are_a_function_of_split_seed_and_index(name, split):
    make = MAKERS[name]
    examples = make(split, 60, seed=3)
    assert len(examples) == 60
    assert make(split, 30, seed=3) == examples[:30]
    assert make(split, 60, seed=4) != examples


@pytest.mark.parametrize("name", MAKERS)
def test_held_out_examples_are_distinct(name):
    for split in ("validation", "test"):
        examples = MAKERS[name](split, 500)
        if name == "questions":
            examples = [example._replace(name="") for example in examples]
        assert len(set(map(str, examples))) == 500


@pytest.mark.parametrize("name", MAKERS)
def test_mistakes_are_named(name):
    wrong: Any = "dev"
    with pytest.raises(UserError, match=r"unknown split 'dev' of the grammar: choose one of train, validation, test"):
        MAKERS[name](wrong, 3)
    with pytest.raises(UserError, match=r"size=0 of the grammar's test split is not positive: ask for at least one "):
        MAKERS[name]("test", 0)


@pytest.mark.parametrize("name", MAKERS)
def test_a_thousand_take_about_a_second(name):
    start = time.process_time()
    MAKERS[name]("train", 1_000)
    assert time.process_time() - start < 5  # 0.05 to 0.3 on an idle machine


# Splits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_every_fact_belongs_to_its_split(name, monkeypatch):
    told: list[tuple] = []

    def tell(self, fact):
        told.append(fact)
        return fact

    monkeypatch.setattr(derivation.Derivation, "tell", tell)
    for split in SPLITS:
        told.clear()
        MAKERS[name](split, 200)
        assert len(told) > 100
        assert {facts.owner(fact) for fact in told} == {split}


PAST = {verb.past: verb.english for verb in lexicon.VERBS if verb.past not in ("read", "opened", "closed")}


def _texts(name, split):
    for example in _train(name)[:3_000] if split == "train" else MAKERS[name](split, 500):
        if name == "documents":
            yield from example
        elif name == "labeled":
            yield example.text
        elif name == "pairs":
            yield from (example.first, example.second)
        elif name in ("tagged", "trees"):
            yield " ".join(example.words)
        else:
            yield from re.findall(r"[^.]+\.", example.context)


def _deeds(text):
    """Who did what to what, read from a sentence of this shape alone."""
    found = re.match(
        r"(?:the |my )?(\w+) (?:did not )?(.+?) (?:(?:the|a|an) )?(\w+)(?= (?:\.|,|and|in|at|on|yesterday))", text
    )
    if found and found[1] in lexicon.NOUNS and found[3] in lexicon.NOUNS:
        verb = PAST.get(found[2], found[2])
        if verb in PAST.values():
            yield (found[1], verb, found[3])


@pytest.mark.parametrize("name", slow_but(MAKERS, "pairs"))
def test_deeds_read_from_the_text_are_held_apart(name):
    deeds = {split: {deed for text in _texts(name, split) for deed in _deeds(text.strip())} for split in SPLITS}
    assert min(map(len, deeds.values())) > 10
    assert not deeds["train"] & deeds["validation"]
    assert not deeds["train"] & deeds["test"]
    assert not deeds["validation"] & deeds["test"]


# Documents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_sentences_of_a_document_share_their_noun(split):
    names = [f" {phrases.definite(noun).english} " for noun in lexicon.NOUNS.values() if noun.form != "pronoun"]
    topics = collections.Counter()
    for document in toy_grammar.grammar_documents(split, 300):
        assert 4 <= len(document) <= 10
        assert len(set(document)) == len(document)
        assert all(re.fullmatch(r"[a-z0-9',]+( [a-z0-9',]+)* \.", sentence) for sentence in document)
        shared = [name for name in names if all(name in f" {sentence}" for sentence in document)]
        assert shared
        topics.update(shared)
    assert len(topics) > 50
    assert max(topics.values()) < 30


def test_a_document_does_not_contradict_itself():
    for document in _train("documents")[:1_000]:
        said = {match[1] for sentence in document if (match := re.search(r" (?:is|are) (\w+) \.$", sentence))}
        for group in ("big small", "new old", "long short", "expensive cheap", "hot cold", "red white black"):
            assert len(said & set(group.split())) <= 1


# Labeled ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_labels_are_balanced(split):
    counts = collections.Counter(example.label for example in toy_grammar.grammar_labeled(split, 600))
    assert set(counts) == set(labeled_texts.KINDS)
    assert 25 <= min(counts.values()) <= max(counts.values()) <= 80  # 50 on average


def test_labels_suit_their_sentences():
    shapes = {
        "comparison": r" than ",
        "reason": r" because ",
        "moment": r"^(?!when).* when ",
        "thought": r" thinks? that ",
        "compound": r" and | , but ",
        "request": r"^please ",
        "position": r" (on|under|in|in front of|behind|near) (the )?\w+ \.$",
        "denial": r" (not|cannot) ",
        "description": r" (is|are|am|was|were) ",
        "yes-no question": r"^(did|does|do|will|can|is|was|am|are|were) .* \?$",
        "open question": r"^(who|what|where|when|how many) .* \?$",
    }
    for text, label in _train("labeled"):
        assert text.endswith("?") == label.endswith("question")
        assert re.search(shapes.get(label, ""), text), text
        for other in ("comparison", "reason", "moment", "thought", "compound", "request"):
            assert label in (other, "open question") or not re.search(shapes[other], text)


def test_some_labels_take_more_than_a_word():
    examples = _train("labeled")
    having: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for text, label in examples:
        for word in set(text.split()):
            having[word][label] += 1
    totals = collections.Counter(example.label for example in examples)
    best = {
        label: max(2 * counts[label] / (totals[label] + counts.total()) for counts in having.values())
        for label in totals
    }
    for label in ("action", "denial", "description", "position", "yes-no question", "open question"):
        assert best[label] < 0.85


# Pairs ---------------------------------------------------------------------------------------------------------------


def _accuracy(train, test, text):
    """Of naive Bayes on the words of a text."""
    having = {label: collections.Counter() for label in LABELS}
    totals = collections.Counter(pair.label for pair in train)
    for pair in train:
        having[pair.label].update(set(text(pair).split()))

    def score(words, label):
        return math.log(totals[label]) + sum(
            math.log((having[label][word] + 1) / (totals[label] + 2)) for word in words
        )

    hits = sum(
        max(sorted(LABELS), key=lambda label: score(set(text(pair).split()), label)) == pair.label for pair in test
    )
    return hits / len(test)


def test_the_second_sentence_alone_does_not_tell():
    train, test = _train("pairs"), toy_grammar.grammar_labeled_pairs("train", 4_000, seed=1)
    chance, error = 1 / 3, math.sqrt(2 / 9 / 4_000)
    assert abs(_accuracy(train, test, lambda pair: pair.second) - chance) < 4 * error
    for pairs in (test, toy_grammar.grammar_labeled_pairs("test", 1_000)):
        assert _accuracy(train, pairs, lambda pair: pair.second) < 0.4
        assert _accuracy(train, pairs, lambda pair: f"{pair.first} {pair.second}") < 0.6


@pytest.mark.parametrize("split", SPLITS)
def test_pairs_are_balanced(split):
    pairs = toy_grammar.grammar_labeled_pairs(split, 600)
    counts = collections.Counter(pair.label for pair in pairs)
    assert set(counts) == LABELS
    assert 150 < min(counts.values()) <= max(counts.values()) < 250
    assert all(pair.first != pair.second for pair in pairs)


def test_simple_pairs_are_judged_as_a_reader_would():
    """Where the first is the second with something appended, it entails; denied, it contradicts."""
    checked = collections.Counter()
    for first, second, label in _train("pairs")[:6_000]:
        stem = second.removesuffix(" .")
        if first.startswith(stem + " ") and not re.search(r"\b(who|that)\b", first):
            assert label == "ENTAILMENT", (first, second)
            checked[label] += 1
        if re.fullmatch(r"(.*) (is|are) not (\w+) \.", first) and first.replace(" not ", " ") == second:
            assert label == "CONTRADICTION"
            checked[label] += 1
        if "not" not in first.split() and "not" in second.split() and "did" in second.split():
            assert label != "ENTAILMENT"
    assert checked["ENTAILMENT"] > 300


# Tags ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_tags_spell_entities(split):
    found = collections.Counter()
    lengths = collections.Counter()
    for words, tags in toy_grammar.grammar_tagged(split, 600):
        assert len(words) == len(tags)
        assert repair_tags(tags) == tags
        assert all(re.fullmatch(r"[a-z0-9',.?]+", word) for word in words)
        for entity in entities_of_tags(tags):
            found[entity.label] += 1
            lengths[entity.end - entity.start] += 1
    assert set(found) == set(tagged_sentences.ENTITIES)
    assert min(found.values()) > 50
    assert lengths[2] > 300
    assert lengths[3] > 20


def test_every_noun_of_a_person_animal_or_thing_is_tagged():
    """But "by bus" says how, "a nurse" what somebody is, and a possessor is a part of what it has."""
    expected = {"person": "person", "animal": "animal"}
    for words, tags in _train("tagged")[:2_000]:
        for index, (word, tag) in enumerate(zip(words, tags, strict=True)):
            noun = lexicon.NOUNS.get(word)
            ends = index + 1 == len(words) or not tags[index + 1].startswith("I-")
            if noun is None or not ends or word == "watch" or words[index - 1] == "by":
                continue
            for noun_tag, label in expected.items():
                if noun_tag in noun.tags and "job" not in noun.tags:
                    assert tag[2:] == label, (words, tags)
            if noun.form == "pronoun":
                assert tag == "O"
            if "goods" in noun.tags:
                assert tag[2:] == "thing", (words, tags)


# Questions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_answers_stand_where_they_say(split):
    questions = toy_grammar.grammar_questions(split, 400)
    assert len({question.name for question in questions}) == 400
    asked = collections.Counter()
    for _, question, context, answers in questions:
        ((text, start),) = answers
        assert text
        assert context[start : start + len(text)] == text
        assert re.search(rf"(?<!\S){re.escape(text)}(?!\S)", context)
        assert re.fullmatch(r"[a-z0-9' ]+ \?", question)
        assert not set("<>") & set(context)
        sentences = re.findall(r"[^.]+ \.", context)
        assert 2 <= len(sentences) <= 5
        assert text.split()[0] not in ("in", "at", "on")
        asked[question.split()[0]] += 1
        if question.split()[0] in ("when", "how"):  # where may ask for an object: where did she go?
            assert context.count(text) == 1
    assert set(asked) == {"who", "what", "where", "when", "how"}
    assert min(asked.values()) > 20


def test_one_sentence_answers_and_another_distracts():
    past = {verb.english: verb.past for verb in lexicon.VERBS}
    checked = collections.Counter()
    for _, question, context, ((_, start),) in _train("questions")[:1_500]:
        sentences = re.findall(r"[^.]+ \.", context)
        place = sum(context[:start].count(mark) for mark in ".")
        if found := re.fullmatch(rf"who ({'|'.join(past.values())}) (.+) \?", question):
            noun = found[2].split()[-1]
            verbs = [index for index, sentence in enumerate(sentences) if f" {found[1]} " in sentence]
            answering = [index for index in verbs if re.search(rf" {noun}\b", sentences[index].split(found[1], 1)[1])]
        elif found := re.fullmatch(r"(?:what|who|when|where) did ((?:the |my )?\w+) (.+?)( the \w+)? \?", question):
            verb = past.get(found[2])
            if verb is None:
                continue
            verbs = [index for index, sentence in enumerate(sentences) if f" {verb} " in sentence]
            answering = [index for index in verbs if f" {sentences[index].strip()}".startswith(f" {found[1]} {verb}")]
        else:
            continue
        assert answering == [place], (question, context)
        assert len(verbs) > 1, (question, context)
        checked[question.split()[0]] += 1
    assert min(checked[word] for word in ("who", "what", "when", "where")) > 50
