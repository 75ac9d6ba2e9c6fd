"""Mixtures of several sources of training examples in fixed shares."""

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tfx_jax.data.batching.batches import Example, ExampleSource
from tfx_jax.errors import UserError


class JoinedExamples:
    """Selected examples of several sources, one after the other; an `ExampleSource`."""

    def __init__(self, parts: Sequence[tuple[ExampleSource, np.ndarray]]):
        """Joins sources.

        Args:
          parts: pairs of a source and the indices of its selected examples, [number of examples] int.
        """
        self._parts = parts
        self._ends = [*itertools.accumulate(len(indices) for _, indices in parts)]

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the examples, [number of examples] int."""
        return np.concatenate([examples.lengths[indices] for examples, indices in self._parts])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no example {index}: examples are numbered from 0 to {len(self) - 1}")
        number = bisect.bisect_right(self._ends, index)
        examples, indices = self._parts[number]
        return examples[int(indices[index - self._ends[number]])]  # a negative index, from the end of this part


def mixed_epochs(
    sources: Sequence[Callable[[int], ExampleSource]], shares: Sequence[float], *, seed: int
) -> Callable[[int], ExampleSource]:
    """Mixes sources so that epochs have examples of each in proportion to its share.

    A fraction of an example is carried to the next epoch, so that shares are exact over several epochs. An epoch reads
    at most one pass of each source: the source that is smallest for its share once, and of the others a part. The next
    epoch continues where this one stopped in them. Each source is read in a new order when all its examples were used.
    Where an epoch crosses into a new pass, whose order differs, an example may occur twice. The result depends on the
    number of the epoch only, so a run can resume at any epoch.

    Args:
      sources: for each source, a function that returns its examples in its n-th pass, counted from 0.
      shares: share of each source in the number of examples, above 0; they need not sum to 1.
      seed: seed of the orders.

    Returns:
      A function from the number of an epoch, counted from 0, to its examples.

    Raises:
      UserError: if a source has no examples.

    >>> from tfx_jax.data.batching.batches import ExampleList
    >>> one, two = (ExampleList([{"tokens": np.array([n])} for n in range(first, first + 4)]) for first in (0, 10))
    >>> epoch = mixed_epochs([lambda _: one, lambda _: two], [2, 1], seed=0)(0)
    >>> [int(example["tokens"][0]) >= 10 for example in epoch]
    [False, False, False, False, True, True]
    """
    sizes = [len(source(0)) for source in sources]
    if 0 in sizes:
        raise UserError(f"source {sizes.index(0) + 1} of the mixture has no examples: its documents are too short")
    examples_per_share = min(size / share for size, share in zip(sizes, shares, strict=True))
    rates = [examples_per_share * share for share in shares]  # examples of each source in an epoch

    def epoch_examples(epoch: int) -> JoinedExamples:
        """Selects the examples of an epoch: of each source the next ones of its shuffled passes."""
        parts: list[tuple[ExampleSource, np.ndarray]] = []
        for number, (source, size, rate) in enumerate(zip(sources, sizes, rates, strict=True)):
            # Places of this epoch's examples in the endless sequence of passes over the source. The small summand keeps
            # rounding errors from moving an example to the next epoch.
            places = np.arange(*(int(end * rate + 1e-6) for end in (epoch, epoch + 1)))
            for pass_number in np.unique(places // size).tolist():
                examples = source(pass_number)
                order = np.random.default_rng((seed, number, pass_number)).permutation(len(examples))
                places_in_pass = places[places // size == pass_number] % size
                # The modulo is needed because a pass may be an example shorter than the first.
                parts.append((examples, order[places_in_pass % len(order)]))
        return JoinedExamples(parts)

    return epoch_examples
