"""BERT in Hugging Face folders, without a head and with each of its heads."""

import re
from collections.abc import Sequence
from typing import Any

from tfx_jax.models.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertMaskedLM,
    BertMultipleChoice,
    BertNextSentence,
    BertPretraining,
    BertQuestionAnswering,
    BertTagger,
)
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field, classifier_fields
from tfx_jax.models.hf.names import Row, dense, feed_forward, norm, projections, table, under, vector

_LAYERS = "encoder_layers"
# Options whose values differ between the families of `BertConfig`, with the values of BERT.
OPTIONS = {"first_position": 0, "share_layers": False, "pooler_activation": "tanh", "num_segments": True}
OPTIONS |= {"first_layer": False, "pre_norm": False, "use_bias": True, "is_gated": False, "rotary": None}
OPTIONS |= {"pooling": "first", "head_norm": False, "relative_buckets": 0}

EMBEDDINGS = [
    table("embedding/table", "embeddings.word_embeddings.weight"),
    table("token_types/table", "embeddings.token_type_embeddings.weight"),
    table("positions/table", "embeddings.position_embeddings.weight"),
    *norm("norm", "embeddings.LayerNorm"),
]
BODY = [
    *EMBEDDINGS,
    *projections(
        f"{_LAYERS}/self_attention",
        "encoder.layer.{}.attention",
        "self.query",
        "self.key",
        "self.value",
        "output.dense",
    ),
    *norm(f"{_LAYERS}/self_attention_residual/norm", "encoder.layer.{}.attention.output.LayerNorm"),
    *feed_forward(f"{_LAYERS}/feed_forward", "encoder.layer.{}.intermediate.dense", "encoder.layer.{}.output.dense"),
    *norm(f"{_LAYERS}/feed_forward_residual/norm", "encoder.layer.{}.output.LayerNorm"),
]
POOLER = dense("pooler", "pooler.dense")
MASKED_LM = [
    *dense("masked_lm/dense", "cls.predictions.transform.dense"),
    *norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
    vector("masked_lm/bias", "cls.predictions.bias"),
]
NEXT_SENTENCE = dense("next_sentence", "cls.seq_relationship")
CLASSIFIER = dense("classifier", "classifier")

# For each architecture: our class, and the rows of its head.
HEADS: dict[str, tuple[Any, list[Row]]] = {
    "BertModel": (Bert, []),
    "BertForMaskedLM": (BertMaskedLM, MASKED_LM),
    "BertForPreTraining": (BertPretraining, [*MASKED_LM, *NEXT_SENTENCE]),
    "BertForNextSentencePrediction": (BertNextSentence, NEXT_SENTENCE),
    "BertForSequenceClassification": (BertClassifier, CLASSIFIER),
    "BertForMultipleChoice": (BertMultipleChoice, CLASSIFIER),
    "BertForTokenClassification": (BertTagger, CLASSIFIER),
    "BertForQuestionAnswering": (BertQuestionAnswering, dense("span", "qa_outputs")),
}
_WITH_OUTPUT = ("ForMaskedLM", "ForPreTraining")
_WITH_LABELS = ("ForSequenceClassification", "ForTokenClassification")

# Copies of tied parameters, a constant, and the poolers and heads of other architectures: published files contain the
# pooler and both heads of pretraining, whatever architecture their config.json names.
IGNORED = [
    r"(bert\.)?embeddings\.position_ids",
    r"cls\.predictions\.decoder\.(weight|bias)",
    *sorted({f"(bert\\.)?{re.escape(row.tensor)}" for _, head in HEADS.values() for row in [*POOLER, *head]}),
]

COPIES = [
    (r"cls\.predictions\.decoder\.weight", "bert.embeddings.word_embeddings.weight"),
    (r"cls\.predictions\.decoder\.bias", "cls.predictions.bias"),
]


def renamed(architecture: str) -> list[tuple[str, str]]:
    """Returns (pattern, replacement) pairs of tensor names.

    The oldest folders have other names of the norms, and an encoder can be read from a folder with a head.
    """
    old_norms = [(r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")]
    return [*old_norms, (r"^bert\.", "")] if architecture == "BertModel" else old_norms


def fits(config: BertConfig) -> bool:
    """Returns whether a configuration is that of a BERT, not of another family of `BertConfig`."""
    if config.attention.name != "dense" or config.max_global_tokens or config.embedding_size is not None:
        return False
    values = {name: getattr(config, name) for name in OPTIONS} | {"num_segments": bool(config.num_segments)}
    return values == OPTIONS


def read_config(architecture: str, fields: Fields) -> BertConfig:
    """Returns the configuration for the fields of a BERT."""
    fields.require(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    return read_sizes(architecture, fields)


def read_sizes(architecture: str, fields: Fields, **defaults: Any) -> BertConfig:
    """Returns the configuration with the options that BERT shares with other families of encoders.

    Args:
      architecture: name in "architectures".
      fields: fields of config.json, under their names in a BERT.
      **defaults: values of absent fields, if they are not those of BERT.
    """
    classifier: dict[str, Any] = {}
    if architecture.endswith(_WITH_LABELS):
        classifier = fields.classifier_options()

    def get(name: str, bert_default: Any) -> Any:
        return fields.get(name, defaults.get(name, bert_default))

    head_dropout_rate = fields.optional("classifier_dropout", float)
    return BertConfig(
        vocab_size=get("vocab_size", 30_522),
        num_segments=get("type_vocab_size", 2),
        max_length=get("max_position_embeddings", 512),
        num_layers=get("num_hidden_layers", 12),
        d_model=get("hidden_size", 768),
        num_heads=get("num_attention_heads", 12),
        d_ff=get("intermediate_size", 3072),
        dropout_rate=float(get("hidden_dropout_prob", 0.1)),
        attention_dropout_rate=float(get("attention_probs_dropout_prob", 0.1)),
        is_tied=fields.get("tie_word_embeddings", True) or not architecture.endswith(_WITH_OUTPUT),
        head_dropout_rate=defaults.get("classifier_dropout") if head_dropout_rate is None else head_dropout_rate,
        activation=fields.choose("hidden_act", ACTIVATIONS, defaults.get("hidden_act", "gelu")),
        layer_norm_epsilon=fields.get("layer_norm_eps", 1e-12),
        **classifier,
    )


def write_config(architecture: str, config: BertConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a BERT."""
    classifier = {}
    if architecture.endswith(_WITH_LABELS):
        classifier = classifier_fields(config)
    return {
        "model_type": "bert",
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "type_vocab_size": config.num_segments,
        "max_position_embeddings": config.max_length,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "intermediate_size": 4 * config.d_model if config.d_ff is None else config.d_ff,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "classifier_dropout": config.head_dropout_rate,
        "hidden_act": activation_field(config.activation),
        "layer_norm_eps": config.layer_norm_epsilon,
        **({} if config.is_tied else {"tie_word_embeddings": False}),
        **classifier,
    }


def rows(architecture: str, config: BertConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model, head = HEADS[architecture]
    return table_of(model, config, "bert", BODY, POOLER, head, "cls.predictions.decoder")


def table_of(
    model: Any,
    config: BertConfig,
    prefix: str,
    body: Sequence[Row],
    pooler: Sequence[Row],
    head: Sequence[Row],
    output: str,
) -> list[Row]:
    """Returns the table of names of a BERT or a related encoder.

    Args:
      model: our class.
      config: the configuration; rows of `body` for parameters that it does not have are left out.
      prefix: start of the names of the encoder's tensors in a model with a head.
      body: rows of the encoder.
      pooler: rows of the pooler, if it is part of the encoder.
      head: rows of the head, which may include the pooler.
      output: name of the output layer, used if its matrix is not the embedding.
    """
    is_absent = {"token_types/": not config.num_segments, "projection/": config.embedding_size is None}
    absent = tuple(name for name in is_absent if is_absent[name])
    body = [row for row in body if not row.path.startswith(absent)]
    if model is Bert:
        return [*body, *(pooler if config.has_pooler else [])]
    is_pooler_in_head = any(row.path.startswith("bert/pooler/") for row in head)
    encoder = [*body, *(pooler if model.use_pooler and not is_pooler_in_head else [])]
    result = [*under("bert", prefix, encoder), *head]
    bias = next((row for row in head if row.path == "masked_lm/bias"), None)
    if bias is not None and not config.is_tied:
        # The bias is written under two names: transformers saves both and reads that of the output layer.
        result = [row for row in result if row is not bias]
        result += [
            vector("masked_lm/bias", f"{output}.bias"),
            table("masked_lm/output_embedding/table", f"{output}.weight"),
        ]
        result += [] if bias.tensor == f"{output}.bias" else [bias]
    return result
