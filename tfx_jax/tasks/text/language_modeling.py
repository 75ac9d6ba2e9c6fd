"""Language modeling: a model reads a text and predicts every token from those before it (Radford et al., 2018)."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching.batches import ExampleSource, LoaderOptions
from tfx_jax.data.batching.conversations import encode_conversations
from tfx_jax.data.batching.documents import TextDocuments, encode_documents
from tfx_jax.data.batching.mixture import mixed_epochs
from tfx_jax.data.batching.packing import PackedDocuments, TokenBlocks
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.tokenizers.chat import ChatTemplate, load_chat_template
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction
from tfx_jax.models.config import DecoderConfig, ModelConfig, require_kind
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.loss import LossOutput, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, PlannedTask, TaskConfig
from tfx_jax.tasks.text.text_attention import TextAttention
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.token_prediction import TokenPredictionBase, first_cut, token_stream


@documented
@dataclasses.dataclass
class LanguageModelConfig(TaskConfig):
    """Predicts every next token of plain text."""

    data: TextData = dataclasses.field(default_factory=TextData)
    is_packed: bool = False  # whether to pack documents, which do not attend to each other; else all are one stream
    # Shares of the training rows that come from each entry of data.train_file, such as (3, 1); (): all are one text.
    mixture: tuple[float, ...] = ()
    label_smoothing: float = fraction(0.0)
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token; PaLM has 1e-4

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is a decoder, and that packing, mixture and files are consistent."""
        require_kind(model, "decoder", "language modeling")
        self.data.validate(model, may_have_messages=True)
        if self.data.documents == "messages" and not self.is_packed:
            raise UserError('config.task.data.documents="messages" needs config.task.is_packed=True')
        entries = self.data.train_file.split(",") if self.data.dataset == "files" else []
        if self.mixture and (len(self.mixture) != len(entries) or min(self.mixture) <= 0):
            raise UserError(
                f"config.task.mixture={self.mixture} must have one number above 0 for each of the {len(entries)} "
                "entries of config.task.data.train_file, which commas separate"
            )
        if self.mixture and self.data.validation_share:
            raise UserError("config.task.mixture and data.validation_share must not both be set: set validation_file")

    def setup(self, model: DecoderConfig, splits: Splits[TextDocuments], artifacts: Artifacts) -> "LanguageModelTask":
        """Trains or loads the tokenizer, and loads the chat template if the documents are conversations."""
        kind = self.data.tokenizer
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: splits["train"].to_train(kind), kind=kind, family="gpt"
        )
        template = None
        if self.data.documents == "messages":
            if not artifacts.starts_from_model:
                raise UserError(
                    'config.task.data.documents="messages" needs config.init_from, a model with a chat template'
                )
            template = load_chat_template(artifacts.folder / "tokenizer")
        return LanguageModelTask(self, model, splits, tokenizer, template)

    def planned(self, model: DecoderConfig, options: LoaderOptions) -> PlannedTask:
        names = ("inputs", "targets", "segment_ids", "positions") if self.is_packed else ("inputs", "targets")
        arrays = dict.fromkeys(names, (np.int32, LENGTH)) | {"weights": (np.float32, LENGTH)}
        batch = planned_batch(self.data, options, arrays)
        return PlannedTask(LanguageModelTask(self, model, NO_DATA, NO_DATA), batch)


class LanguageModelTask(TextAttention, TokenPredictionBase[LanguageModelConfig, DecoderConfig, TextDocuments]):
    """Language modeling on a text. A stream is cut at new positions in each epoch.

    Packed documents are packed only once. Of conversations, only the replies are predicted.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        model_config: DecoderConfig,
        splits: Splits[TextDocuments],
        tokenizer: HFTokenizer,
        template: ChatTemplate | None = None,
    ):
        """Combines the parts; `template` writes conversations."""
        super().__init__(config, model_config, splits, tokenizer)
        self._template = template

    def make_epochs(self, seed: int) -> Callable[[int], ExampleSource]:
        """Returns `epoch_examples(epoch)`: blocks cut at new positions in every epoch, or the same packed documents.

        With a mixture, these are the passes over each source, of which epochs have shares.
        """
        if not self.config.mixture:
            return self._epochs(self._splits["train"], seed)
        sources = [self._epochs(documents, seed) for documents in self.config.data.train_sources()]
        return mixed_epochs(sources, self.config.mixture, seed=seed)

    def _epochs(self, texts: TextDocuments, seed: int) -> Callable[[int], ExampleSource]:
        """Returns the function from an epoch to the examples of one source in it.

        The text is cut into blocks of `max_length` tokens, in each epoch from another offset. Packed
        documents are packed once, and are the same in each epoch.
        """
        length = self.config.data.max_length
        if self.config.is_packed:
            packed = self._packed(texts)
            return lambda epoch: packed
        stream = token_stream(self.tokenizer, texts, documents=self.config.data.documents)

        def cut(epoch: int) -> TokenBlocks:
            start = first_cut(seed, epoch, length)
            last_start = max(len(stream) - length - 1, 0)  # leaves one block and the token after it
            return TokenBlocks(stream[min(start, last_start) :], length)

        cut(0)  # raises for a text that is too short here, not in a thread
        return cut

    def attention_inputs(self) -> Iterator[Sequence[str]]:
        """Yields the beginnings of validation lines, at most 12 words each."""
        if self._template is not None:  # the lines are JSON, which the model never reads
            return iter(())
        lines = (line for text in self._splits["validation"] for line in text.splitlines())
        return ((" ".join(line.split()[:12]),) for line in lines)

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return language_model_loss(
            model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def _packed(self, texts: TextDocuments) -> PackedDocuments:
        """Returns the documents or conversations of a text, packed into rows."""
        is_target = None
        if self._template is None:
            documents = encode_documents(self.tokenizer, texts, eos_id=self.tokenizer.eos_id)
        else:
            documents, is_target = encode_conversations(self.tokenizer, self._template, texts)
        # A document of one token, such as EOS alone, is nothing to learn.
        return PackedDocuments(*documents, self.config.data.max_length, pad_id=0, min_tokens=2, is_target=is_target)

    def make_eval_examples(self, split: Split) -> ExampleSource:
        """Returns all tokens of a split in blocks of `max_length`; a block's first prediction sees only one token.

        Where documents are packed for training, they are packed here too: what a document predicts depends on itself.
        """
        if self.config.is_packed:
            return self._packed(self._splits[split])
        stream = token_stream(self.tokenizer, self._splits[split], documents=self.config.data.documents)
        return TokenBlocks(stream, self.config.data.max_length, pad_id=0)


def language_model_loss(
    model: Any,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Sums the cross entropy of the tokens that follow (Radford et al., 2018, equation 1).

    Args:
      model: model of the kind "decoder": `model(inputs, positions=..., segment_ids=..., rngs=...)` returns the logits
        of the next token at each position.
      batch: "inputs" and "targets" [B, T] int32, "weights" [B, T] float32, and for packed documents "segment_ids" and
        "positions" [B, T] int32, as in `tfx_jax.data.batching.packing`. Padding has weight 0, and follows the tokens or
        has segment 0.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.
      z_loss_weight: see `summed_cross_entropy`.

    Returns:
      The output of `summed_cross_entropy`. With segments, `num_tokens` counts the tokens read; the last token of a
      document predicts nothing.
    """
    segment_ids = batch.get("segment_ids")
    logits = model(batch["inputs"], positions=batch.get("positions"), segment_ids=segment_ids, rngs=rngs)
    output = summed_cross_entropy(
        logits, batch["targets"], batch["weights"], label_smoothing=label_smoothing, z_loss_weight=z_loss_weight
    )
    if segment_ids is None:
        return output
    return output._replace(num_tokens=(segment_ids != 0).sum(dtype=jnp.float32))
