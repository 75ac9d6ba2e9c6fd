"""The built-in grammar is deterministic, and tells no fact in two splits."""

import collections
import hashlib
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.errors import UserError
from tfx_jax.synthetic.grammar import GrammarPairs, inflection, lexicon, sentences
from tfx_jax.synthetic.grammar.derivation import Dice

TRAINING_SIZE = 20_000
GOLDEN: dict[Any, str] = {  # the first thousand pairs
    "train": "9322d1059db071cb",
    "validation": "891ebbe5b11367ac",
    "test": "5c0110cf37236854",
}


def _sentences(split: Any, size, **options):
    pairs = GrammarPairs(split, size=size, **options)
    return [(pair["source"], pair["target"]) for pair in (pairs[index] for index in range(size))]


@pytest.fixture(scope="module")
def training():
    return _sentences("train", TRAINING_SIZE)


@pytest.fixture(scope="module")
def held_out():
    return {split: _sentences(split, 500) for split in ("validation", "test")}


@pytest.fixture(scope="module")
def everything(training, held_out):
    return [*training, *held_out["validation"], *held_out["test"]]


# Access --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", GOLDEN)
def test_sentences_never_change(split):
    lines = "".join(f"{source}\t{target}\n" for source, target in _sentences(split, 1_000))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == GOLDEN[split]


def test_another_process_derives_the_same_sentences():
    program = (
        "from tfx_jax.synthetic.grammar import GrammarPairs; pairs = GrammarPairs(seed=5);"
        "print(ascii([pairs[index] for index in range(50)]))"
    )
    environment = {"PYTHONHASHSEED": "1"}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    pairs = GrammarPairs(seed=5)
    assert output.stdout.strip() == ascii([pairs[index] for index in range(50)])


def test_seeds_give_other_sentences():
    one, other = _sentences("train", 100, seed=0), _sentences("train", 100, seed=1)
    assert len(set(one) & set(other)) < 10


def test_size_does_not_change_the_sentences_before_it():
    for split in GOLDEN:
        assert _sentences(split, 20) == _sentences(split, 40)[:20]


def test_length_is_the_number_of_addressable_sentences():
    assert [len(GrammarPairs(split)) for split in GOLDEN] == [2**30, 500, 500]
    assert set(GrammarPairs()[2**30 - 1]) == {"source", "target"}
    for split in GOLDEN:
        with pytest.raises(IndexError):
            GrammarPairs(split, size=7)[7]


def test_representation_names_what_decides_the_sentences():  # grain compares it before it resumes
    assert repr(GrammarPairs("test", seed=3, size=9)) == "GrammarPairs('test', seed=3, size=9)"


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"unknown split 'dev' of the grammar: choose one of train, validation, test"):
        GrammarPairs("dev")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"size=0 of the grammar's test split is not positive"):
        GrammarPairs("test", size=0)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**40), split=st.sampled_from(sorted(GOLDEN)), index=st.integers(0, 5))
def test_every_sentence_is_well_formed(seed, split, index):
    pair = GrammarPairs(split, seed=seed, size=6)[index]
    source, target = pair["source"], pair["target"]
    assert re.fullmatch(r"[a-z0-9',]+( [a-z0-9',]+)* [.?]", source)
    assert re.fullmatch(r"[^\s a-zA-Z0-9]+( [^\sa-zA-Z0-9]+)* 。", target)
    assert 3 <= len(source.split()) <= 32
    assert 3 <= len(target.split()) <= 40


def test_dice_are_even_and_never_run_out():
    dice = Dice("a name")
    counts = collections.Counter(dice.below(7) for _ in range(7_000))
    assert set(counts) == set(range(7))
    assert all(abs(count - 1_000) < 150 for count in counts.values())


# Splits --------------------------------------------------------------------------------------------------------------


def test_english_determines_japanese(everything):
    translations = dict(everything)
    assert all(translations[source] == target for source, target in everything)


def test_held_out_sentences_are_distinct_and_new(training, held_out):
    seen = {source for source, _ in training}
    for pairs in held_out.values():
        assert len({source for source, _ in pairs}) == len(pairs) == 500
        assert not seen.intersection(source for source, _ in pairs)


def test_no_fact_is_told_in_two_splits():
    told: dict[Any, set[str]] = {split: set() for split in GOLDEN}
    for split, facts in told.items():
        for seed in (0, 1):
            pairs = GrammarPairs(split, seed=seed, size=5_000 if split == "train" else 500)
            facts.update(fact for index in range(len(pairs)) for fact in pairs.facts(index))
    assert min(map(len, told.values())) > 300
    assert not told["train"] & told["validation"]
    assert not told["train"] & told["test"]
    assert not told["validation"] & told["test"]


PEOPLE = "(girl|boy|man|woman|teacher|doctor|nurse|student|child|taro|ken|hanako|yumi|i|you|he|she|we|they)"
DEEDS = (
    "(ate|drank|cooked|made|read|wrote|drew|bought|sold|gave|showed|sent|lent|saw|watched|found|helped|used|opened|closed|"
    "washed|broke|rode|wore|had|met)"
)
CLAUSES = (  # (pattern, group of the subject, of the verb, of the object)
    (rf"\b{PEOPLE} {DEEDS} (?:the|a|an|this|that|my) (\w+)\b", 1, 2, 3),
    (rf"\b{PEOPLE} who {DEEDS} (?:the|a|an|this|that|my) (\w+)\b", 1, 2, 3),
    (rf"\b(\w+) that (?:the |this |that )?{PEOPLE} {DEEDS}\b", 2, 3, 1),
)


def _combinations(pairs):
    """Who did what to what, read from the English text alone."""
    found = set()
    for source, _ in pairs:
        for pattern, *groups in CLAUSES:
            found.update(tuple(match[group] for group in groups) for match in re.finditer(pattern, source))
    adjectives = {adjective.english for adjective in lexicon.ADJECTIVES}
    return {combination for combination in found if combination[2] not in adjectives}


def test_combinations_read_from_the_text_are_held_out(training, held_out):
    known = _combinations(training)
    assert len(known) > 1_000
    for pairs in held_out.values():
        combinations = _combinations(pairs)
        assert len(combinations) > 15
        assert not combinations & known


def test_training_has_every_word(training, held_out):
    for side in (0, 1):
        known = {word for pair in training for word in pair[side].split()}
        for pairs in held_out.values():
            assert not {word for pair in pairs for word in pair[side].split()} - known
    english = {word for source, _ in training for word in source.split()}
    japanese = {word for _, target in training for word in target.split()}
    for noun in lexicon.NOUNS.values():
        assert noun.english in english
        assert noun.japanese.split("/")[0].split()[0] in japanese
    for verb in (*lexicon.VERBS, *lexicon.SCHEDULED_VERBS):
        assert verb.past.split()[0] in english
        assert inflection.inflect(verb.japanese, "past").split()[0] in japanese
    for adjective in lexicon.ADJECTIVES:
        assert adjective.english in english


CONSTRUCTIONS = {  # what English of each construction looks like
    "relative clause about the agent": r"^the (\w+) (who|that) (is|are|did|\w+ed|saw|bought|ate|found|met|went|came) ",
    "relative clause about the object": r" (that|who) (the|my|your|taro|hanako|she|he|they) .*\w+",
    "reason": r" because ",
    "moment": r"^(?!when).* when ",
    "contrast": r" , but ",
    "sequence": r" and \w+",
    "thought": r" thinks? that ",
    "comparison": r" than ",
    "existence": r"^there (is|are|was|were) ",
    "request": r"^please ",
    "who": r"^who ",
    "what": r"^what ",
    "where": r"^where ",
    "when": r"^when ",
    "how many": r"^how many ",
    "question": r"^(did|does|do|will|can|is|was|are|were) ",
    "price": r" yen \.$",
    "age": r" years old \.$",
    "birthday": r" birthday is ",
    "clock": r" at \w+ (o'clock|thirty|ten|twenty)",
    "date": r" on \w+ \d+",
    "weekday": r" on \w+day",
    "possession": r" 's ",
    "wish": r" wants? to ",
    "ability": r"\bcan(not)?\b",
    "duty": r" must ",
    "negation": r" not ",
    "progressive": r" (is|are|am) \w+ing ",
    "numeral": r" (two|three|four|five|six) \w+s\b",
}


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_all_splits_have_every_construction(construction, training, held_out):
    for pairs in (training[:2_000], *held_out.values()):
        assert any(re.search(CONSTRUCTIONS[construction], source) for source, _ in pairs)


def test_every_construction_is_in_use():
    functions = {name for name, value in vars(sentences).items() if inspect.isfunction(value)}
    local = {name for name in functions if getattr(sentences, name).__module__ == sentences.__name__}
    assert {construction.__name__ for construction in sentences.CONSTRUCTIONS} == {
        name for name in local if not name.startswith("_")
    }
