"""Language modeling of a text that continues from batch to batch, with a recurrent memory (Dai et al., 2019)."""

import dataclasses
from typing import Any, Protocol, TypeVar

import grain
import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching.batches import Batch, BatchSpec, LoaderOptions
from tfx_jax.data.batching.documents import TextDocuments
from tfx_jax.data.batching.packing import TokenBlocks
from tfx_jax.data.batching.text_streams import StreamDataset, TextStreams
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction
from tfx_jax.models.config import MakesModel, ModelConfig, require_kind
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.loss import LossOutput, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, PlannedTask, TaskConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.token_prediction import TokenPredictionBase, token_stream

Self = TypeVar("Self", bound="Memory")


class Memory(Protocol):
    """Memory of a model for B texts: a pytree of arrays [B, ...]."""

    def forget(self: Self, rows: Array) -> Self:
        """Empties the memory of the examples selected by `rows`, [B] bool."""
        ...


class RecurrentDecoderConfig(MakesModel, Protocol):
    """Configuration of a model of the kind "recurrent_decoder"."""

    @property
    def memory_length_of_evaluation(self) -> int:
        """Number of positions remembered during evaluation."""
        ...

    def init_memories(self, rows: int, memory_length: int | None = None) -> Memory:
        """Returns empty memories of `rows` texts; None means the memory length of training."""
        ...


@documented
@dataclasses.dataclass
class RecurrentLanguageModelConfig(TaskConfig):
    """Predicts every next token of plain text; each row of a batch continues the same row of the previous batch.

    `data.max_length` is the length of a segment; a batch has `data.tokens_per_batch // data.max_length` rows.
    """

    data: TextData = dataclasses.field(default_factory=TextData)
    eval_rows: int = at_least(1, 8)  # parts of a text evaluated in parallel, each starting with an empty memory
    label_smoothing: float = fraction(0.0)
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token; PaLM has 1e-4

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "recurrent_decoder", "recurrent language modeling")
        self.data.validate(model)

    def setup(
        self, model: RecurrentDecoderConfig, splits: Splits[TextDocuments], artifacts: Artifacts
    ) -> "RecurrentLanguageModelTask":
        """Trains or loads the tokenizer."""
        kind = self.data.tokenizer
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: splits["train"].to_train(kind), kind=kind, family="gpt"
        )
        return RecurrentLanguageModelTask(self, model, splits, tokenizer)

    def planned(self, model: RecurrentDecoderConfig, options: LoaderOptions) -> PlannedTask:
        arrays = dict.fromkeys(("inputs", "targets"), (np.int32, LENGTH))
        arrays |= {"weights": (np.float32, LENGTH), "begins": (np.bool_,)}
        batch = planned_batch(self.data, options, arrays)
        return PlannedTask(RecurrentLanguageModelTask(self, model, NO_DATA, NO_DATA), batch)


class RecurrentLanguageModelTask(
    TokenPredictionBase[RecurrentLanguageModelConfig, RecurrentDecoderConfig, TextDocuments]
):
    """Language modeling whose carry is the memory of each row.

    Attributes:
      rows: rows of a training batch, independent of the mesh, so that memories fit if a run resumes on another mesh.
    """

    def __init__(
        self,
        config: RecurrentLanguageModelConfig,
        model_config: RecurrentDecoderConfig,
        splits: Splits[TextDocuments],
        tokenizer: HFTokenizer,
    ):
        super().__init__(config, model_config, splits, tokenizer)
        self.rows = config.data.tokens_per_batch // config.data.max_length

    def make_carry(self) -> Memory:
        """Returns the carry of the first batch: empty memories."""
        return self.model_config.init_memories(self.rows)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns the training data: the text in order, whatever the seed.

        Raises:
          UserError: if the devices cannot share the rows equally, or the text is too short.
        """
        if self.rows % options.batch_multiple:
            raise UserError(
                f"config.task.data.tokens_per_batch={self.config.data.tokens_per_batch} makes {self.rows} rows of "
                f"max_length={self.config.data.max_length}, which must be a multiple of {options.batch_multiple}, the "
                "devices that share them times config.accumulate"
            )
        streams = TextStreams(self._stream("train"), self.rows, self.config.data.max_length)
        return StreamDataset(streams, options.shard)

    def loss(
        self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None, carry: Memory | None = None
    ) -> LossOutput:
        config = self.config
        return recurrent_language_model_loss(
            model, batch, rngs, carry, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def make_eval_examples(self, split: Split) -> TokenBlocks:
        """Returns a split as `eval_rows` long rows of whole segments."""
        stream, segment, rows = self._stream(split), self.config.data.max_length, self.config.eval_rows
        num_segments = -(-(len(stream) - 1) // (rows * segment))  # of a row, rounded up
        length = max(num_segments, 1) * segment
        return TokenBlocks(stream, length, pad_id=0)

    def predict_metrics(self, model: Any, batch: dict[str, Array]) -> dict[str, Any]:
        """Returns the metrics of long rows, read segment by segment with the memory length of evaluation."""
        rows, length = batch["inputs"].shape
        segment, memory_length = self.config.data.max_length, self.model_config.memory_length_of_evaluation
        segments = {  # [segments, rows, segment length]
            name: batch[name].reshape(rows, length // segment, segment).swapaxes(0, 1)
            for name in ("inputs", "targets", "weights")
        }

        def read_segment(memories: Memory, segment: dict[str, Array]) -> tuple[Memory, Any]:
            """Body of a scan whose carry is the memory of each row."""
            output = recurrent_language_model_loss(model, segment, rngs=None, carry=memories)
            return output.carry, output.metrics

        _, metrics = jax.lax.scan(read_segment, self.model_config.init_memories(rows, memory_length), segments)
        return jax.tree.map(lambda parts: parts.sum(axis=0), metrics)  # the scan stacks those of all segments

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Computes the metrics of all tokens of a split but the first, with all long rows in one batch."""
        examples = self.eval_examples(split)
        length = int(examples.lengths.max())
        spec = BatchSpec((length,), self.config.eval_rows * length)
        return self.result(model.sum_metrics(self.predict_metrics, examples, spec))

    def _stream(self, split: Split) -> np.ndarray:
        """Returns the tokens of all documents of a split, [number of tokens] int32."""
        return token_stream(self.tokenizer, self._splits[split], documents=self.config.data.documents)


def recurrent_language_model_loss(
    model: Any,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    carry: Memory | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Sums the cross entropy of the next tokens, given the tokens before them and the memory.

    Args:
      model: model of the kind "recurrent_decoder": `model(inputs, memories, rngs=...)` returns the logits of the next
        token at each position, and the next memories.
      batch: "inputs" and "targets" [B, T] int32, "weights" [B, T] float32, and optionally "begins" [B] bool: rows that
        begin a text, whose memory is emptied.
      rngs: stream `dropout`; None means evaluation.
      carry: memory of each row; None means empty.
      label_smoothing: see `summed_cross_entropy`.
      z_loss_weight: see `summed_cross_entropy`.

    Returns:
      The output of `summed_cross_entropy`, with the next memories as the carry.
    """
    if carry is not None and "begins" in batch:
        carry = carry.forget(batch["begins"])
    logits, memories = model(batch["inputs"], carry, rngs=rngs)
    output = summed_cross_entropy(
        logits, batch["targets"], batch["weights"], label_smoothing=label_smoothing, z_loss_weight=z_loss_weight
    )
    return output._replace(carry=memories)
