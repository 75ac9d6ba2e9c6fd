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
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, EvalResult, PlannedTask, TaskConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.word_characters import boundary_row, word_rows
from tfx_jax.tasks.token_prediction import TokenPredictionBase, first_cut


@documented
@dataclasses.dataclass
class BidirectionalLanguageModelConfig(TaskConfig):
    """Predicts every word of plain text from the words before it, and from the words after it.

    Words are separated by white space, and each line of a document is a sentence. Input words are read as characters.
    The tokenizer only defines the `model.vocab_size` most frequent words, which can be predicted.
    """

    data: TextData = dataclasses.field(default_factory=lambda: TextData(tokenizer="words"))

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is an ELMo, which reads words."""
        require_kind(model, "elmo", "bidirectional language modeling")
        if self.data.tokenizer != "words":
            raise UserError(f'config.task.data.tokenizer must be "words" for ELMo, got {self.data.tokenizer!r}')
        self.data.validate(model)

    def tiny(self) -> None:
        self.data.tiny()
        self.data.tokenizer = "words"

    def setup(
        self, model: ElmoConfig, splits: Splits[TextDocuments], artifacts: Artifacts
    ) -> "BidirectionalLanguageModelTask":
        """Builds or loads the vocabulary of words."""
        kind = self.data.tokenizer
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: splits["train"].to_train(kind), kind=kind, family="gpt"
        )
        return BidirectionalLanguageModelTask(self, model, splits, tokenizer)

    def planned(self, model: ElmoConfig, options: LoaderOptions) -> PlannedTask:
        arrays = {
            "characters": (np.int32, LENGTH, model.word_length),
            "targets": (np.int32, LENGTH, 2),
            "token_mask": (np.bool_, LENGTH),
        }
        batch = planned_batch(self.data, options, arrays)
        return PlannedTask(BidirectionalLanguageModelTask(self, model, NO_DATA, NO_DATA), batch)


class BidirectionalLanguageModelTask(TokenPredictionBase[BidirectionalLanguageModelConfig, ElmoConfig, TextDocuments]):
    """Bidirectional language modeling on a stream of words, which is cut at new positions in each epoch.

    Attributes:
      tokenizer: tokenizer of the words that can be predicted.
    """

    unit = "word"

    def make_model(self, *, rngs: nnx.Rngs) -> ElmoLanguageModel:
        """Builds the model, which has no attention to shard."""
        return ElmoLanguageModel(self.model_config, rngs=rngs)

    def make_epochs(self, seed: int) -> Callable[[int], "WordBlocks"]:
        """Returns `epoch_examples(epoch)`: the stream of words, cut at new positions in every epoch."""
        blocks = self.make_blocks("train")

        def cut(epoch: int) -> WordBlocks:
            length = min(self.config.data.max_length, blocks.num_words)
            return blocks.starting_at(first_cut(seed, epoch, length))

        return cut

    def make_eval_examples(self, split: Split) -> "WordBlocks":
        return self.make_blocks(split)

    def make_blocks(self, split: Split) -> "WordBlocks":
        """Returns all words of a split in blocks of `max_length`."""
        # Index of each distinct word, from 1 in order of appearance; 0 is the boundary of a sentence.
        word_indices: dict[str, int] = {}
        stream = DiskArray(np.int32)
        for line in document_lines(self._splits[split]):
            if words := line.split():
                stream.append([0, *(word_indices.setdefault(word, len(word_indices) + 1) for word in words)])
        stream.append([0])
        distinct_words = [*word_indices]
        ids = [self._id(tokens) for tokens in self.tokenizer.encode_batch(distinct_words)]
        width = self.model_config.word_length
        return WordBlocks(
            stream.mapped(),
            rows=np.concatenate([boundary_row(width)[None], word_rows(distinct_words, width)]),
            ids=np.array([cast(int, self.tokenizer.eos_id), *ids], np.int32),
            length=self.config.data.max_length,
        )

    def loss(self, model: ElmoLanguageModel, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return bidirectional_language_model_loss(model, batch, rngs)

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns the perplexity of words, each predicted once from either side."""
        nll = sums["nll"]  # a sum over two predictions of each word
        return super().result({"nll": Metric(nll.sum / 2, nll.weight / 2)})

    def _id(self, tokens: list[int]) -> int:
        """Returns the token of a word from its `tokens`: the unknown token unless it is exactly one."""
        return tokens[0] if len(tokens) == 1 else cast(int, self.tokenizer.unk_id)


class WordBlocks:
    """Consecutive blocks of a stream of words, as an `ExampleSource`.

    An example is "characters" [T, W] int32; "targets" [T, 2] int32, the tokens of the next and of the previous word,
    even across blocks; and "token_mask" [T], all True. The last block may be shorter.

    Attributes:
      num_words: number of words read: all but the first and the last of the stream, which are only predicted.
    """

    def __init__(self, stream: np.ndarray, rows: np.ndarray, ids: np.ndarray, length: int):
        """Wraps a stream of at least three words.

        Args:
          stream: index of each word among the distinct words, [number of words] int32.
          rows: characters of each distinct word, [number of distinct words, W] int32.
          ids: token of each distinct word, [number of distinct words] int32.
          length: T.
        """
        self._stream, self._rows, self._ids, self._length = stream, rows, ids, length
        self.num_words = len(stream) - 2
        starts = np.arange(0, self.num_words, length)
        self.lengths = np.minimum(length, self.num_words - starts)

    def starting_at(self, start: int) -> "WordBlocks":
        """Returns the blocks without the first `start` words."""
        return WordBlocks(self._stream[start:], self._rows, self._ids, self._length)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Returns block `index` of T words with the next and the previous word of each."""
        start = 1 + index * self._length  # the first word of the stream is only predicted
        positions = np.arange(start, start + self.lengths[index])
        neighbors = np.stack([positions + 1, positions - 1], axis=-1)  # next and previous word, [T, 2]
        targets = self._ids[self._stream[neighbors]]
        return {
            "characters": self._rows[self._stream[positions]],
            "targets": targets,
            "token_mask": np.ones(len(positions), bool),
        }


def bidirectional_language_model_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the cross entropy of the next and of the previous words (Peters et al., 2018, section 3.1).

    Args:
      model: `model(characters, token_mask=..., rngs=...)` returns the logits of both at each word, [B, T, 2, V].
      batch: "characters" [B, T, W] int32, "targets" [B, T, 2] int32, the next and the previous word, and "token_mask"
        [B, T] bool, False at padding.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      The output of `summed_cross_entropy` for both directions together; `num_tokens` counts the words.
    """
    logits = model(batch["characters"], token_mask=batch["token_mask"], rngs=rngs)
    weights = jnp.broadcast_to(batch["token_mask"][..., None], batch["targets"].shape).astype(jnp.float32)
    output = summed_cross_entropy(logits, batch["targets"], weights)
    return output._replace(num_tokens=batch["token_mask"].sum(dtype=jnp.float32))
