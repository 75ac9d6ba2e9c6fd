"""What scores the output of a BERT: pre-training and the tasks of Devlin et al. (2019, sections 3.1 and 4)."""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.models.bert import Bert, BertConfig, BertOutput, make_dense
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.nn.cores import AttentionFn
from tfx_jax.nn.dropout import drop
from tfx_jax.nn.embedding import Embedding
from tfx_jax.nn.feed_forward import ACTIVATIONS
from tfx_jax.nn.linear import Linear
from tfx_jax.nn.normalization import LayerNorm


class PretrainingLogits(NamedTuple):
    """Of the two tasks of pre-training.

    Attributes:
      masked_lm: of every token of the vocabulary, [B, T, V].
      next_sentence: [B, 2]; 0: the second text follows the first, 1: it is another.
    """

    masked_lm: Float[Array, "B T V"]
    next_sentence: Float[Array, "B 2"]


class SpanLogits(NamedTuple):
    """Where an answer starts, [B, T], and where its last token is, [B, T]."""

    start: Float[Array, "B T"]
    end: Float[Array, "B T"]


class MaskedLMHead(nnx.Module):
    """Dense layer, activation and norm, then the product with the embedding and an offset for each token."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dense = make_dense(config, config.d_model, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.norm = LayerNorm(config.d_model, epsilon=config.layer_norm_epsilon)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.activation_fn = ACTIVATIONS[config.activation]

    def __call__(self, x: Float[Array, "B T D"], embedding: Embedding) -> Float[Array, "B T V"]:
        """Scores every token of the vocabulary; `x` may be those positions alone whose tokens are to be predicted."""
        x = self.norm(self.activation_fn(self.dense(x)))
        return embedding.attend(x) + self.bias[...][None, None]


class BertWithHead(nnx.Module):
    """A BERT, as `bert`, and what scores its output: a subclass says what that is in `_make_head` and `_score`.

    `tagger.load_encoder(masked_lm)` puts a pre-trained body below another head.
    """

    use_pooler = False
    first_is_global = False

    def __init__(
        self,
        config: BertConfig,
        *,
        attention_fn: AttentionFn | None = None,
        shard_attention: ShardAttention | None = None,
        rngs: nnx.Rngs,
    ):
        """Draws the parameters.

        Args:
          config: the sizes; `labels` are those of a classifier or tagger.
          attention_fn: the attention of every layer, with the signature of `dot_product_attention`; None means what
            `config.attention` names.
          shard_attention: calls it on a mesh, see `tfx_jax.nn.MultiHeadAttention`.
          rngs: stream `params`.

        Raises:
          ValueError: as a `Bert`, and if a classifier has no labels.
        """
        self.bert = Bert(
            config, use_pooler=self.use_pooler, attention_fn=attention_fn, shard_attention=shard_attention, rngs=rngs
        )
        self._make_head(config, rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        global_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores texts: float32 logits as the class says; with `return_attention` a pair of these and the maps.

        Arguments and maps are those of a `Bert`. Of a Longformer that classifies, the first token is global unless
        `global_mask` says otherwise.
        """
        if global_mask is None and self.first_is_global and self.config.max_global_tokens:
            first = (
                jnp.zeros((tokens.shape[0], 1), int) if token_mask is None else jnp.argmax(token_mask, 1, keepdims=True)
            )
            global_mask = jnp.arange(tokens.shape[1])[None] == first
        result = self.bert(
            tokens,
            token_type_ids,
            token_mask=token_mask,
            positions=positions,
            global_mask=global_mask,
            rngs=rngs,
            return_attention=return_attention,
        )
        output, maps = result if return_attention else (result, None)
        logits = self._score(output, rngs)
        return (logits, maps) if return_attention else logits

    def load_encoder(self, other: "Bert | BertWithHead") -> None:
        """Gives the body the parameters of another, which stays as it is; dropout, dtype and attention remain its own.

        A pooler is left out that this head does not read, and stays as it was drawn if the other has none.

        Args:
          other: a body of the same sizes, or what has one.

        Raises:
          ValueError: if the sizes differ.
        """
        body = other if isinstance(other, Bert) else other.bert
        mine, taken = (nnx.to_pure_dict(nnx.state(module)) for module in (self.bert, body))
        params = {name: taken.get(name, drawn) for name, drawn in mine.items()}
        if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, mine):
            raise ValueError(f"{body.config} is a body of other sizes than {self.bert.config}")
        self.bert = nnx.merge(nnx.graphdef(self.bert), params)

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        raise NotImplementedError

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Any:
        raise NotImplementedError


class BertMaskedLM(BertWithHead):
    """Says which token stands at a position, hidden or not: logits [B, T, V]."""

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.masked_lm = MaskedLMHead(config, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B T V"]:
        return self.masked_lm(output.sequence, self.bert.embedding)


class BertNextSentence(BertWithHead):
    """Says whether the second text follows the first, class 0, or is another, class 1: logits [B, 2]."""

    use_pooler = True

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.next_sentence = make_dense(config, 2, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B 2"]:
        return self.next_sentence(output.pooled)


class BertPretraining(BertWithHead):
    """Both tasks of pre-training at once: `PretrainingLogits`."""

    use_pooler = True

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.masked_lm = MaskedLMHead(config, rngs=rngs)
        self.next_sentence = make_dense(config, 2, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> PretrainingLogits:
        return PretrainingLogits(
            self.masked_lm(output.sequence, self.bert.embedding), self.next_sentence(output.pooled)
        )


class BertClassifier(BertWithHead):
    """Gives a text, or a pair of them, one of `config.labels`: logits [B, labels]."""

    use_pooler = True
    first_is_global = True

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.classifier = _make_classifier(config, rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B C"]:
        return self.classifier(_drop(output.pooled, self.config, rngs))


class BertTagger(BertWithHead):
    """Gives every token one of `config.labels`: logits [B, T, labels]."""

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.classifier = _make_classifier(config, rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B T C"]:
        return self.classifier(_drop(output.sequence, self.config, rngs))


class BertQuestionAnswering(BertWithHead):
    """Finds the answer to a question in a text, as a span of its tokens: `SpanLogits`."""

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.span = make_dense(config, 2, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> SpanLogits:
        logits = self.span(output.sequence)
        return SpanLogits(logits[..., 0], logits[..., 1])


def _make_classifier(config: BertConfig, rngs: nnx.Rngs) -> Linear:
    if not config.labels:
        raise ValueError("a model that classifies needs labels, but its configuration has none")
    return make_dense(config, len(config.labels), rngs=rngs)


def _drop(x: Float[Array, "*batch D"], config: BertConfig, rngs: nnx.Rngs | None) -> Float[Array, "*batch D"]:
    rate = config.dropout_rate if config.head_dropout_rate is None else config.head_dropout_rate
    return drop(x, rate, rngs)
