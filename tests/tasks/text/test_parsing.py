"""A sentence in, a tree out: what is encoded, what is read of what a model writes, and how that is scored."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.data.tokenizers_made_here import EOS_ID, PAD_ID, make_tokenizer
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.sources.trees import delinearize, linearize, parse_tree, write_tree
from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import DecodingConfig
from tfx_jax.models import T5Config, TransformerConfig
from tfx_jax.synthetic.grammar import grammar_trees
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.text.parsing import ParsingConfig, ParsingTask, SentenceParser, TreeConstraint, TreeData

TREES = [
    parse_tree(text)
    for text in (
        "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))",
        "(TOP (NP (NN dog)))",
        "(TOP (S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT the) (NN dog))) (. .)))",
    )
]
TOKENIZER = make_tokenizer([" ".join(tree.words) for tree in TREES])
V = TOKENIZER.vocab_size
SYMBOLS = sorted({symbol for tree in TREES for symbol in linearize(tree)})
ID_OF = {symbol: V + place for place, symbol in enumerate(SYMBOLS)}
MAX_SYMBOLS = 8  # of a tree, with EOS, where all trees are listed


class Translator:
    """Stands in for a model and its search: writes what it is told, and notes what it reads."""

    tokenizer = TOKENIZER

    def __init__(self, written):
        self.written, self.lines = dict(written), []

    def translate_ids(self, params, lines, num_words):
        assert params == "decoder"
        assert all(len(line.split()) == number for line, number in zip(lines, num_words, strict=True) if line)
        self.lines += lines
        return [self.written.get(line, []) if line else [] for line in lines]


def task(trees=TREES, symbols=SYMBOLS, **options):
    data = TreeData(**{"max_length": 16, "tokens_per_batch": 48} | options)
    splits = {"train": trees, "validation": trees}
    return ParsingTask(ParsingConfig(data), TransformerConfig(), splits, TOKENIZER, symbols)


def ids(tree):
    return [*map(ID_OF.__getitem__, linearize(tree)), EOS_ID]


def told(written, max_length=16):
    """A task whose model writes this for each sentence, and the model."""
    translator, parsing, model = Translator(written), task(), TrainedModel(None, "params")
    parser = SentenceParser(translator, SYMBOLS, max_length=max_length)
    parsing.translator, model.decoder = lambda graphdef: parser, "decoder"
    return parsing, model, translator


def test_examples_are_words_and_symbols_each_with_an_end():
    for tree, example in zip(TREES, task().encode(TREES), strict=True):
        assert example["source"].tolist() == [*TOKENIZER.encode(" ".join(tree.words)), EOS_ID]
        assert example["source"].max() < V <= example["target"][:-1].min()
        assert [SYMBOLS[token - V] for token in example["target"][:-1]] == linearize(tree)
        assert example["target"][-1] == EOS_ID
        assert {array.dtype.name for array in example.values()} == {"int32"}


def test_tags_are_written_where_it_is_wanted():
    config = ParsingConfig(write_tags=True)
    assert " ".join(config.target(TREES[1])) == "(TOP (NP NN )NP )TOP"
    assert " ".join(ParsingConfig().target(TREES[1])) == "(TOP (NP XX )NP )TOP"


def test_a_symbol_that_training_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"the symbol '\(X' of a tree does not occur in the training split"):
        task().encode([parse_tree("(TOP (X (NN dog)))")])


def test_training_has_every_tree_that_is_short_enough():
    """The last tree has 16 symbols and an end, the first 12, the second 5."""
    for limit, wanted in ((17, TREES), (13, TREES[:2]), (8, TREES[1:2])):
        batches = iter(task(max_length=limit).train_data(LoaderOptions(seed=0)))
        found = [next(batches) for _ in range(8)]
        targets = {tuple(row[row != PAD_ID]) for batch in found for row in batch["target"] if row.any()}
        assert targets == {tuple(example["target"]) for example in task().encode(wanted)}
        assert all(batch["source"].shape == batch["target"].shape for batch in found)
    with pytest.raises(
        UserError,
        match=r"^every training tree or its sentence has more than 2 tokens: raise config.task.data.max_length$",
    ):
        task(max_length=2).train_data(LoaderOptions(seed=0))


def test_who_writes_the_targets_has_everything_right():
    parsing, model, _ = told((" ".join(tree.words), ids(tree)) for tree in TREES)
    metrics, summary = parsing.evaluate(model)
    assert metrics == {"f1": 100, "precision": 100, "recall": 100, "exact_match": 100, "repaired": 0}
    assert summary == (
        "bracket F1 100.00 %, precision 100.00 %, recall 100.00 %, exact match 100.0 %, 0.0 % of 3 trees repaired"
    )


def test_what_is_wrong_costs_and_what_is_malformed_is_repaired_and_counted():
    """By hand: of the first S and NP are right of S, NP and VP; of the second nothing is there; the third is right."""
    first, second, third = (" ".join(tree.words) for tree in TREES)
    open_only = [ID_OF[symbol] for symbol in ("(S", "(NP", "XX", "XX", ")NP")]
    written = {first: [*open_only, V - 1, ID_OF["XX"], EOS_ID], second: [EOS_ID], third: ids(TREES[2])}
    parsing, model, _ = told(written)
    found = parsing.evaluate(model).metrics
    right, given, wanted = 2 + 0 + 4, 2 + 0 + 4, 3 + 1 + 4
    assert found["precision"] == pytest.approx(100 * right / given)
    assert found["recall"] == pytest.approx(100 * right / wanted)
    assert found["f1"] == pytest.approx(200 * right / (given + wanted))
    assert found["exact_match"] == pytest.approx(100 / 3)
    assert found["repaired"] == pytest.approx(200 / 3)


def test_predictions_are_trees_over_the_words_that_were_given():
    line = "the dog barks ."
    parsing, model, translator = told({line: ids(TREES[0]), "the ( dog )": ids(TREES[0])})
    assert parsing.predict(model, [line, "", "the  dog barks .", "f(x)"]) == [
        write_tree(TREES[0]).replace("DT", "XX").replace("NN", "XX").replace("VBZ", "XX").replace("(. ", "(XX "),
        "",
        write_tree(TREES[0]).replace("DT", "XX").replace("NN", "XX").replace("VBZ", "XX").replace("(. ", "(XX "),
        "(TOP (XX f-LRB-x-RRB-))",
    ]
    assert translator.lines == [line, "", line, "f-LRB-x-RRB-"]


def test_a_sentence_that_is_too_long_is_not_read_and_its_tree_is_flat():
    """Four words and an end are as many as there may be."""
    parsing, model, translator = told({"the dog barks .": ids(TREES[0])}, max_length=5)
    short, long = parsing.parse(model, ["the dog barks .", "the dog barks . ."])
    assert not short.is_repaired
    assert long.is_repaired
    assert write_tree(long.tree) == "(TOP (XX the) (XX dog) (XX barks) (XX .) (XX .))"
    assert translator.lines == ["the dog barks .", ""]


def sequences_of(constraint, num_words, limit, max_rows=4_096):
    """All sequences, without EOS, that a constraint lets end."""
    state = constraint.init(jnp.full(max_rows, num_words), jnp.full(max_rows, limit), MAX_SYMBOLS)
    texts, found, tokens, rows = [()], set(), np.zeros(0, int), np.zeros(0, int)
    for _ in range(limit):
        unused = (0, max_rows - len(tokens))
        state, allowed = advanced(constraint, state, np.pad(rows, unused), np.pad(tokens, unused))
        allowed = np.asarray(allowed)[: len(texts)]
        found |= {texts[row] for row in range(len(texts)) if allowed[row, EOS_ID]}
        rows, tokens = np.nonzero(allowed & (np.arange(constraint.vocab_size) != EOS_ID))
        texts = [(*texts[row], constraint.symbols[token - V]) for row, token in zip(rows, tokens, strict=True)]
    return found


@functools.partial(jax.jit, static_argnums=0)
def advanced(constraint, state, rows, tokens):
    """The state of these rows after these tokens, and what may follow; token 0 is no symbol and changes nothing."""
    state = constraint.advance(jax.tree.map(operator.itemgetter(rows), state), tokens)
    return state, constraint.allowed(state)


@pytest.mark.parametrize("num_words", [1, 2, 3])
def test_the_constraint_allows_every_tree_over_the_words_that_fits_and_nothing_else(num_words):
    symbols, limit = ("(A", "(B", ")A", ")B", "XX", "YY"), MAX_SYMBOLS
    constraint = TreeConstraint(symbols, first_id=V, eos_id=EOS_ID, vocab_size=V + len(symbols) + 1)
    every = itertools.chain.from_iterable(itertools.product(symbols, repeat=length) for length in range(3, limit))
    trees = {
        text
        for text in every
        if text[0][0] == "("
        and text.count("XX") + text.count("YY") == num_words
        and not delinearize(text, ["w"] * num_words).is_repaired
    }
    assert len(trees) > 20
    assert sequences_of(constraint, num_words, limit) == trees
    assert sequences_of(constraint, num_words, num_words + 2) == set()  # the flat tree and EOS are one token more
    flat = {text for text in trees if len(text) == num_words + 2}
    assert sequences_of(constraint, num_words, num_words + 3) == flat


@pytest.mark.compiles(30, "a model is made, and searched with the constraint and without")
@pytest.mark.parametrize("beam_size", [1, 3])
def test_every_search_writes_a_tree_over_the_words(beam_size):
    """The model is untrained: without the constraint nothing that it writes is a tree."""
    parsing = task(max_length=12)
    parsing.config.decoding = DecodingConfig(beam_size, length_penalty=0.3, extra_length=9)
    parsing.model_config = TransformerConfig(
        vocab_size=V + len(SYMBOLS), num_layers=1, d_model=16, num_heads=2, d_ff=32
    )
    sentences = ["dog", "the dog", "the dog sees the cat .", "dog " * 10]
    model = TrainedModel(*nnx.split(parsing.make_model(rngs=nnx.Rngs(0))))
    parses = parsing.parse(model, sentences)
    assert [parse.is_repaired for parse in parses] == [False] * len(sentences)
    assert [parse.tree.words for parse in parses] == [sentence.split() for sentence in sentences]
    parsing.config.only_trees = False
    assert all(parse.is_repaired for parse in parsing.parse(model, sentences))


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"tokens_per_batch=63 must be at least max_length=64, the size of one tree$"):
        ParsingConfig(TreeData(max_length=64, tokens_per_batch=63)).validate(T5Config())
    config = ParsingConfig(TreeData(max_length=64))
    config.validate(TransformerConfig(learned_positions=364))
    message = r"learned_positions=363 is less than data.max_length \+ decoding.extra_length = 364: a tree may be that"
    with pytest.raises(UserError, match=message):
        config.validate(TransformerConfig(learned_positions=363))


def test_the_grammar_is_a_treebank():
    trees = grammar_trees("train", 300)
    for tree in trees:
        assert parse_tree(write_tree(tree)) == tree
        assert set(tree.tags) <= {"XX", ".", ","}
        assert tree.tags[-1] == "."
    symbols = {symbol for tree in trees for symbol in tree.symbols}
    assert symbols == {"XX", ".", ",", *(side + label for side in "()" for label in ("TOP", "S", "SQ", "NP", "PP"))}
    assert np.mean([len(linearize(tree)) for tree in trees]) < 30
