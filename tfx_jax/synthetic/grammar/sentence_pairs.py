"""The built-in grammar as a data source: sentence pairs at random access."""

import itertools
from collections.abc import Sequence
from typing import Any

from tfx_jax.data.sources.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.synthetic.grammar.derivation import Derivation, Dice
from tfx_jax.synthetic.grammar.facts import spell, world
from tfx_jax.synthetic.grammar.lexicon import Pair
from tfx_jax.synthetic.grammar.sentences import CONSTRUCTIONS


def check_request(split: str, size: int, what: str) -> None:
    """Raises UserError for an unknown split or a size below 1; `what` names an example in the message."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r} of the grammar: choose one of {', '.join(SPLITS)}")
    if size < 1:
        raise UserError(f"size={size} of the grammar's {split} split is not positive: ask for at least one {what}")


class GrammarPairs:
    """English sentences with their Japanese translations, each a pure function of seed, split and index.

    No fact is told in two splits, for any seeds. Training sentences may repeat; those of other splits are distinct.

    Args:
      split: "train", "validation" or "test".
      seed: sampling seed; other seeds give other sentences about the same facts.
      size: number of sentences, by default 2**30 for training and 500 for the other splits.

    Raises:
      UserError: if the split is unknown, or `size` is below 1.

    >>> pairs = GrammarPairs("train", size=1000)
    >>> len(pairs), pairs[3] == pairs[3]
    (1000, True)
    """

    def __init__(self, split: Split = "train", *, seed: int = 0, size: int | None = None):
        if size is None:
            size = 2**30 if split == "train" else 500
        check_request(split, size, "sentence")
        self._split: Split = split
        self._seed = seed
        # Number of the draw of each sentence; outside training, draws that repeat a sentence are skipped.
        self._draws = range(size) if split == "train" else self._distinct_draws(size)

    def __len__(self) -> int:
        return len(self._draws)

    def __getitem__(self, index: int) -> dict[str, str]:
        pair, _ = self._derive(self._draws[index])
        return {"source": pair.english, "target": pair.japanese}

    def __repr__(self) -> str:  # grain compares it with that of the checkpoint when it resumes
        return f"GrammarPairs({self._split!r}, seed={self._seed}, size={len(self)})"

    def facts(self, index: int) -> list[str]:
        """Returns the facts of a sentence: the combinations of content words, each of which belongs to one split.

        >>> pairs = GrammarPairs("test")
        >>> pairs[192]["source"], pairs.facts(192)
        ('my son wore the hat that they found last week .', ['son wear hat', 'they find hat'])
        """
        _, facts = self._derive(self._draws[index])
        return list(map(spell, facts))

    def _derive(self, draw: int) -> tuple[Pair, Sequence[tuple[Any, ...]]]:
        """Returns (sentence in both languages, facts that it tells) of a draw, numbered from 0."""
        derivation = Derivation(Dice(f"{self._seed}/{self._split}/{draw}"), world(self._split))
        construct = derivation.dice.choose(CONSTRUCTIONS)
        return construct(derivation), derivation.facts

    def _distinct_draws(self, size: int) -> list[int]:
        """Returns the numbers of the first `size` draws that do not repeat an earlier sentence."""
        draws: dict[str, int] = {}
        for draw in itertools.count():
            pair, _ = self._derive(draw)
            draws.setdefault(pair.english, draw)
            if len(draws) == size:
                break
        return list(draws.values())
