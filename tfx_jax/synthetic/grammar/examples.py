"""English examples for BERT, GPT and T5, made from the built-in grammar: no task needs a download to be tried.

They tell facts as the sentence pairs do, and under the same rule: facts that one split tells are told in no other. A
question tells nothing but what its context does. In training examples may repeat; in the other splits they are
distinct. All is a function of split, seed and size, and the first examples stay when there are to be more.

>>> for pair in grammar_labeled_pairs("test", 2):
...     print(*pair, sep=" | ")
my mother did not buy the meat and did not visit osaka . | my mother bought the meat . | CONTRADICTION
my grandfather met taro , but did not wait for the doctor . | my grandfather did not wait for the doctor . | ENTAILMENT
"""

import itertools
from collections.abc import Callable
from typing import TypeVar

from tfx_jax.data.sources.conll import TaggedSentence
from tfx_jax.data.sources.labeled import LabeledPair, LabeledText
from tfx_jax.data.sources.splits import Split
from tfx_jax.data.sources.squad import Question
from tfx_jax.data.sources.trees import Tree
from tfx_jax.synthetic.grammar import bracketed_sentences, labeled_texts, tagged_sentences
from tfx_jax.synthetic.grammar.derivation import Derivation, Dice
from tfx_jax.synthetic.grammar.documents import document
from tfx_jax.synthetic.grammar.entailment import entailment
from tfx_jax.synthetic.grammar.facts import world
from tfx_jax.synthetic.grammar.questions import reading
from tfx_jax.synthetic.grammar.sentence_pairs import check_request

Example = TypeVar("Example")
Drawn = TypeVar("Drawn", bound=Derivation)


def grammar_documents(split: Split, size: int, *, seed: int = 0) -> list[list[str]]:
    """Documents of four to ten sentences that all are about one noun, named in each, for pretraining.

    Args:
      split: "train", "validation" or "test".
      size: how many.
      seed: chooses others about the same facts.

    Raises:
      UserError: if there is no such split, or `size` is not positive.
    """
    return _examples(document, Derivation, "document", split, size, seed)


def grammar_labeled(split: Split, size: int, *, seed: int = 0) -> list[LabeledText]:
    """Sentences and what they do: `labeled_texts.KINDS` lists the labels, all equally likely.

    For some labels there is a word that gives them away ("than" for a comparison); others take a look at the whole:
    "who", "that" and "not" may stand in a relative clause, "when" may ask for the time or tell it.

    Args and Raises: those of `grammar_documents`.
    """
    return _examples(labeled_texts.labeled, Derivation, "labelled text", split, size, seed)  # a seed: not respelled


def grammar_labeled_pairs(split: Split, size: int, *, seed: int = 0) -> list[LabeledPair]:
    """Pairs of which the first entails, contradicts or leaves open the second: ENTAILMENT, CONTRADICTION, NEUTRAL.

    The labels are equally likely, whatever the second sentence is: it is drawn first, and nothing in it tells.

    Args and Raises: those of `grammar_documents`.
    """
    return _examples(entailment, Derivation, "labelled pair", split, size, seed)  # a seed: not respelled


def grammar_tagged(split: Split, size: int, *, seed: int = 0) -> list[TaggedSentence]:
    """Sentences with a BIO tag for each word; an entity is a person, an animal, a place, a thing or a time.

    It is a noun with all words that belong to it ("my mother 's red bag" is one thing), but for relative clauses,
    which have entities of their own. No entities are pronouns, what is studied or played, how one goes ("by bus") and
    what somebody is ("a nurse").

    Args and Raises: those of `grammar_documents`.
    """
    return _examples(tagged_sentences.tagged, tagged_sentences.MarkedDerivation, "tagged sentence", split, size, seed)


def grammar_trees(split: Split, size: int, *, seed: int = 0) -> list[Tree]:
    """Sentences with their noun phrases, but for pronouns, and their places and times as constituents.

    A relative clause belongs to the phrase of its noun. Punctuation marks have their tags, other words XX.

    Args and Raises: those of `grammar_documents`.
    """
    return _examples(bracketed_sentences.bracketed, bracketed_sentences.BracketedDerivation, "tree", split, size, seed)


def grammar_questions(split: Split, size: int, *, seed: int = 0) -> list[Question]:
    """Questions on a context of two to five sentences, another of which tells of the same deed by someone else.

    They ask who, what, where, when or how many; the answer is a part of one sentence, without a preposition.

    Args and Raises: those of `grammar_documents`.
    """
    questions = _examples(reading, Derivation, "question", split, size, seed)
    return [question._replace(name=f"{split}-{seed}-{number}") for number, question in enumerate(questions)]


def _examples(
    make: Callable[[Drawn], Example | None],
    derivation: Callable[..., Drawn],
    what: str,
    split: Split,
    size: int,
    seed: int,
) -> list[Example]:
    """The first examples that could be made, and outside training did not repeat an earlier one."""
    check_request(split, size, what)
    examples: list[Example] = []
    seen: set[str] = set()
    for number in itertools.count():
        example = make(derivation(Dice(f"{what}/{seed}/{split}/{number}"), world(split)))
        spelled = str(example)
        if example is None or spelled in seen:
            continue
        if split != "train":
            seen.add(spelled)
        examples.append(example)
        if len(examples) == size:
            break
    return examples
