"""English examples of the built-in grammar for the tasks of BERT, GPT and T5, so that they need no download.

Examples tell facts as the sentence pairs do, with the same rule: no fact is told in two splits. A question tells only
facts of its context. Training examples may repeat; in the other splits they are distinct. Examples are a function of
split, seed and size; a larger size keeps the first examples.

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
DerivationKind = TypeVar("DerivationKind", bound=Derivation)


def grammar_documents(split: Split, size: int, *, seed: int = 0) -> list[list[str]]:
    """Returns documents for pretraining: four to ten sentences that all mention the same noun.

    Args:
      split: "train", "validation" or "test".
      size: number of examples.
      seed: sampling seed; other seeds give other examples about the same facts.

    Raises:
      UserError: if the split is unknown, or `size` is below 1.
    """
    return _examples(document, Derivation, "document", split=split, size=size, seed=seed)


def grammar_labeled(split: Split, size: int, *, seed: int = 0) -> list[LabeledText]:
    """Returns sentences labeled by their kind; the labels of `labeled_texts.KINDS` are equally likely.

    Some labels are determined by one word ("than" for a comparison). Others need the whole sentence: "who", "that" and
    "not" may be in a relative clause, and "when" may be a question word or a conjunction.

    Args and Raises: those of `grammar_documents`.
    """
    kind = "labelled text"  # a seed: not respelled
    return _examples(labeled_texts.labeled, Derivation, kind, split=split, size=size, seed=seed)


def grammar_labeled_pairs(split: Split, size: int, *, seed: int = 0) -> list[LabeledPair]:
    """Returns pairs whose first sentence entails, contradicts or is neutral to the second.

    The labels ENTAILMENT, CONTRADICTION and NEUTRAL are equally likely for every second sentence, which is sampled
    before the label, so that the second sentence alone does not reveal it.

    Args and Raises: those of `grammar_documents`.
    """
    kind = "labelled pair"  # a seed: not respelled
    return _examples(entailment, Derivation, kind, split=split, size=size, seed=seed)


def grammar_tagged(split: Split, size: int, *, seed: int = 0) -> list[TaggedSentence]:
    """Returns sentences with a BIO tag for each word; entities are persons, animals, places, things and times.

    An entity is a noun with all words that belong to it ("my mother 's red bag" is one thing), without relative
    clauses, which have their own entities. Not entities: pronouns, subjects studied, sports and games, means of
    transport ("by bus") and professions as predicates ("a nurse").

    Args and Raises: those of `grammar_documents`.
    """
    return _examples(
        tagged_sentences.tagged, tagged_sentences.MarkedDerivation, "tagged sentence", split=split, size=size, seed=seed
    )


def grammar_trees(split: Split, size: int, *, seed: int = 0) -> list[Tree]:
    """Returns sentences as trees whose constituents are noun phrases (without pronouns), places and times.

    A relative clause belongs to the phrase of its noun. Punctuation marks have their tags, other words have XX.

    Args and Raises: those of `grammar_documents`.
    """
    return _examples(
        bracketed_sentences.bracketed,
        bracketed_sentences.BracketedDerivation,
        "tree",
        split=split,
        size=size,
        seed=seed,
    )


def grammar_questions(split: Split, size: int, *, seed: int = 0) -> list[Question]:
    """Returns questions about a context of two to five sentences, two of which tell similar deeds of other nouns.

    They ask who, what, where, when or how many; the answer is a part of one sentence, without a preposition.

    Args and Raises: those of `grammar_documents`.
    """
    questions = _examples(reading, Derivation, "question", split=split, size=size, seed=seed)
    return [question._replace(name=f"{split}-{seed}-{number}") for number, question in enumerate(questions)]


def _examples(
    make: Callable[[DerivationKind], Example | None],
    derivation: Callable[..., DerivationKind],
    kind: str,
    *,
    split: Split,
    size: int,
    seed: int,
) -> list[Example]:
    """Returns the first `size` examples that `make` succeeds in making; outside training without repetitions.

    Args:
      make: returns an example or, if that fails, None.
      derivation: class of the derivations that `make` gets.
      kind: name of an example in messages; also part of the seed, so it must not change.
      split: split of the facts.
      size: number of examples.
      seed: sampling seed.
    """
    check_request(split, size, kind)
    examples: list[Example] = []
    seen: set[str] = set()
    for number in itertools.count():
        example = make(derivation(Dice(f"{kind}/{seed}/{split}/{number}"), world(split)))
        spelled = str(example)
        if example is None or spelled in seen:
            continue
        if split != "train":
            seen.add(spelled)
        examples.append(example)
        if len(examples) == size:
            break
    return examples
