"""Associative recall: a model reads pairs of a key and a value, and predicts the value of each key that occurs again.

Multi-query associative recall of "Zoology: Measuring and Improving Recall in Efficient Language Models" (Arora et al.,
2023, https://arxiv.org/abs/2312.04927, section 4). Attention with a state of constant size must store all pairs in it;
linear attention fails to, delta rules succeed. Every sequence is generated from the seed, the split, the epoch and its
index.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfx_jax.data.batching.batches import Example
from tfx_jax.data.sources.splits import SPLITS, Split
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented
from tfx_jax.models.config import ModelConfig, check_max_length, require_kind
from tfx_jax.tasks.sequence.duplication import DrawnConfig, DrawnSequences, DrawnTask, DrawSequences
from tfx_jax.tasks.task import MetricInfo


@documented
@dataclasses.dataclass
class RecallData:
    """Random pairs of keys and values, followed by the keys again."""

    num_keys: int = at_least(1, 4_096)  # number of keys; the number of values is the same
    num_pairs: int = at_least(1, 64)  # pairs per sequence, with different keys
    max_length: int = at_least(2, 512)  # tokens of a sequence, at least three per pair
    train_sequences: int = at_least(1, 16_384)  # sequences per epoch; each epoch has new ones
    eval_sequences: int = at_least(
        1, 1_024
    )  # sequences of the validation and of the test split, independent of the seed
    tokens_per_batch: int = at_least(1, 16_384)  # positions of a global batch

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 0, which fills gaps, the keys and the values."""
        return 1 + 2 * self.num_keys

    def draw(self, split: Split) -> DrawSequences:
        """Returns `draw(seed, epoch)`, which generates the sequences of a split; splits have none in common."""
        return lambda seed, epoch: RecallSequences(self, split, key=(seed, SPLITS.index(split), epoch))


class RecallSequences(DrawnSequences):
    """Sequences of associative recall; see `recall_example`."""

    def __init__(self, data: RecallData, split: Split, *, key: Sequence[int]):
        count = data.train_sequences if split == "train" else data.eval_sequences
        super().__init__(count, data.max_length, key=key)
        self._data = data

    def draw(self, rng: np.random.Generator) -> Example:
        return recall_example(self._data, rng)


def recall_example(data: RecallData, rng: np.random.Generator) -> Example:
    """Generates an example: all pairs, then every key once more, in another order and with gaps in between.

    Returns:
      "inputs" and "targets", [T] int32, and "weights", [T] float32: 1 at the second occurrence of a key, where the
      target is its value.

    >>> data = RecallData(num_keys=8, num_pairs=2, max_length=8)
    >>> example = recall_example(data, np.random.default_rng(0))
    >>> example["inputs"].tolist(), example["targets"].tolist()
    ([6, 11, 8, 11, 6, 0, 0, 8], [0, 0, 0, 0, 11, 0, 0, 11])
    """
    # Token 0 fills gaps; then come the keys, and then the values.
    keys = 1 + rng.choice(data.num_keys, data.num_pairs, replace=False)
    values = 1 + data.num_keys + rng.integers(data.num_keys, size=data.num_pairs)
    pairs_length = 2 * data.num_pairs  # tokens of all pairs: key, value, key, value, ...
    inputs, targets = np.zeros((2, data.max_length), np.int32)
    inputs[0:pairs_length:2], inputs[1:pairs_length:2] = keys, values
    # Where the keys occur again, after the pairs, and which key is at each position.
    positions = pairs_length + np.sort(rng.choice(data.max_length - pairs_length, data.num_pairs, replace=False))
    order = rng.permutation(data.num_pairs)
    inputs[positions], targets[positions] = keys[order], values[order]
    weights = np.zeros(data.max_length, np.float32)
    weights[positions] = 1
    return {"inputs": inputs, "targets": targets, "weights": weights}


class RecallTask(DrawnTask["RecallConfig"]):
    """Associative recall, with new pairs in every epoch."""

    metrics = (
        MetricInfo("accuracy", "accuracy", " %", note="values of keys that come again"),
        MetricInfo("exact_match", "exact match", " %", note="sequences whose values are all right"),
        MetricInfo("loss", "loss", " nats", digits=4, is_loss=True),
    )


@documented
@dataclasses.dataclass
class RecallConfig(DrawnConfig):
    """Recalls the value of each key."""

    data: RecallData = dataclasses.field(default_factory=RecallData)

    task_class = RecallTask

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is a decoder with enough positions, and that all pairs fit into an example."""
        require_kind(model, "decoder", "recall")
        data = self.data
        if data.num_pairs > data.num_keys:
            raise UserError(f"config.task.data.num_pairs={data.num_pairs} must be at most num_keys={data.num_keys}")
        if data.max_length < 3 * data.num_pairs:
            raise UserError(
                f"config.task.data.max_length={data.max_length} must be at least 3 * num_pairs={data.num_pairs}: a "
                "pair and its key again are three tokens"
            )
        check_max_length(model, data.max_length)

    def tiny(self) -> None:
        data = self.data
        data.num_keys, data.num_pairs, data.max_length = 16, 2, 8
        data.train_sequences, data.eval_sequences, data.tokens_per_batch = 64, 16, 128
