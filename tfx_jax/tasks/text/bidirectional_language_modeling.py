"""Language modeling in both directions: each word predicts the next one and the one before (Peters et al., 2018)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching.batches import Example, LoaderOptions
from tfx_jax.data.batching.documents import TextDocuments, document_lines
from tfx_jax.data.sources.disk_array import DiskArray
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import documented
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.elmo import ElmoConfig, ElmoLanguageModel
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.loss import LossOutput, Metric, summed_cross_entropy
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, EvalResult, PlannedTask, TaskConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.word_characters import boundary_row, word_rows
from tfx_jax.tasks.token_prediction import TokenPredictionBase, first_cut


@documented
@dataclasses.dataclass
class BidirectionalLanguageModelConfig(TaskConfig):
    """To predict every word of plain text from those before it, and from those behind it.

    Words stand between white space, and a line of a document is a sentence. The most frequent `model.vocab_size` words
    are told apart when they are predicted, which is all that the tokenizer is for; those that are read are characters.
    """

    data: TextData = dataclasses.field(default_factory=lambda: TextData(tokenizer="words"))

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "elmo", "bidirectional language modeling")
        if self.data.tokenizer != "words":
            raise UserError(f'config.task.data.tokenizer must be "words" for an ELMo, got {self.data.tokenizer!r}')
        self.data.validate(model)

    def tiny(self) -> None:
        self.data.tiny()
        self.data.tokenizer = "words"

    def setup(
        self, model: ElmoConfig, splits: Splits[TextDocuments], artifacts: Artifacts
    ) -> "BidirectionalLanguageModelTask":
        kind = self.data.tokenizer
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: splits["train"].to_train(kind), kind=kind, family="gpt"
        )
        return BidirectionalLanguageModelTask(self, model, splits, tokenizer)

    def planned(self, model: ElmoConfig, options: LoaderOptions) -> PlannedTask:
        batch = planned_batch(
            self.data,
            options,
            dtypes={"characters": np.int32, "targets": np.int32, "token_mask": np.bool_},
            sizes={"characters": model.word_length, "targets": 2},
        )
        return PlannedTask(BidirectionalLanguageModelTask(self, model, NO_DATA, NO_DATA), batch)


class BidirectionalLanguageModelTask(TokenPredictionBase[BidirectionalLanguageModelConfig, ElmoConfig, TextDocuments]):
    """Bidirectional language modeling on a stream of words, which is cut into rows at other places in each epoch.

    Attributes:
      tokenizer: knows the words that are told apart.
    """

    unit = "word"

    def make_model(self, *, rngs: nnx.Rngs) -> ElmoLanguageModel:
        """See `tfx_jax.tasks.task.Task`; there is no attention to shard."""
        return ElmoLanguageModel(self.model_config, rngs=rngs)

    def make_epochs(self, seed: int) -> Callable[[int], "WordBlocks"]:
        """Returns the training examples by the number of the epoch: the stream, cut at other places."""
        blocks = self.make_blocks("train")

        def cut(epoch: int) -> WordBlocks:
            length = min(self.config.data.max_length, blocks.num_words)
            return blocks.starting_at(first_cut(seed, epoch, length))

        return cut

    def make_eval_examples(self, split: Split) -> "WordBlocks":
        return self.make_blocks(split)

    def make_blocks(self, split: Split) -> "WordBlocks":
        """Returns all words of a split as rows of `max_length`.

        Raises:
          UserError: if there are none.
        """
        types: dict[str, int] = {}  # number of each, in the order in which they come, from 1
        stream = DiskArray(np.int32)
        for line in document_lines(self._splits[split]):
            if words := line.split():
                stream.append([0, *(types.setdefault(word, len(types) + 1) for word in words)])
        if not types:
            raise UserError(f"the {split} split has no words: all of its lines are empty")
        stream.append([0])
        ids = [self._id(pieces) for pieces in self.tokenizer.encode_batch([*types])]
        width = self.model_config.word_length
        return WordBlocks(
            stream.mapped(),
            np.concatenate([boundary_row(width)[None], word_rows([*types], width)]),
            np.array([cast(int, self.tokenizer.eos_id), *ids], np.int32),
            self.config.data.max_length,
        )

    def loss(self, model: ElmoLanguageModel, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return bidirectional_language_model_loss(model, batch, rngs)

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns the perplexity of words, each of which is predicted twice: from either side."""
        nll = sums["nll"]
        return super().result({"nll": Metric(nll.sum / 2, nll.weight / 2)})

    def _id(self, pieces: list[int]) -> int:
        """Returns the token of a word; of one whose characters the tokenizer cuts apart or drops, the unknown one."""
        return pieces[0] if len(pieces) == 1 else cast(int, self.tokenizer.unk_id)


class WordBlocks:
    """Rows of a stream of words, one behind the other, as an `ExampleSource`.

    An example is "characters" [T, W] int32; "targets" [T, 2] int32, the token of the next word and of the one before,
    which may stand in other rows; and "token_mask" [T], all True. The last row may be shorter than the others.

    Attributes:
      num_words: that are read: all but the first and the last of the stream, which are only predicted.
    """

    def __init__(self, stream: np.ndarray, rows: np.ndarray, ids: np.ndarray, length: int):
        """Takes a stream, of three words at least.

        Args:
          stream: the number of each word among all different ones, [number of words] int32.
          rows: characters of each different word, [number of different words, W] int32.
          ids: token of each, [number of different words] int32.
          length: T.
        """
        self._stream, self._rows, self._ids, self._length = stream, rows, ids, length
        self.num_words = len(stream) - 2
        starts = np.arange(0, self.num_words, length)
        self.lengths = np.minimum(length, self.num_words - starts)

    def starting_at(self, start: int) -> "WordBlocks":
        """Leaves out the first words."""
        return WordBlocks(self._stream[start:], self._rows, self._ids, self._length)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        start = 1 + index * self._length
        places = np.arange(start, start + self.lengths[index])
        targets = self._ids[self._stream[np.stack([places + 1, places - 1], axis=-1)]]
        return {
            "characters": self._rows[self._stream[places]],
            "targets": targets,
            "token_mask": np.ones(len(places), bool),
        }


def bidirectional_language_model_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the cross entropy of the words that follow and of those that precede (Peters et al., 2018, section 3.1).

    Args:
      model: `model(characters, token_mask=..., rngs=...)` gives the logits of both at each word, [B, T, 2, V].
      batch: "characters" [B, T, W] int32, "targets" [B, T, 2] int32, the next word and the one before, and "token_mask"
        [B, T] bool, which words there are.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      What `summed_cross_entropy` gives for the predictions of both directions together; `num_tokens` counts the words.
    """
    logits = model(batch["characters"], token_mask=batch["token_mask"], rngs=rngs)
    weights = jnp.broadcast_to(batch["token_mask"][..., None], batch["targets"].shape).astype(jnp.float32)
    output = summed_cross_entropy(logits, batch["targets"], weights)
    return output._replace(num_tokens=batch["token_mask"].sum(dtype=jnp.float32))
