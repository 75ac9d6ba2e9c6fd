"""Longformer in Hugging Face folders: a BERT with a window, and with global tokens that have their own projections."""

import re
from typing import Any

from tfx_jax.models.bert import Bert, BertClassifier, BertConfig, BertMaskedLM, BertQuestionAnswering, BertTagger
from tfx_jax.models.hf import bert
from tfx_jax.models.hf.folder import Fields
from tfx_jax.models.hf.names import Row, dense, linear, norm, vector
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions

_FIRST_POSITION = 2  # positions 0 and 1 of the table are unused, since positions start after the padding id, 1
_BODY = [
    *bert.BODY,
    *(
        row
        for name in ("query", "key", "value")
        for row in (
            linear(
                f"encoder_layers/self_attention/global_{name}/kernel",
                f"encoder.layer.{{}}.attention.self.{name}_global.weight",
            ),
            vector(
                f"encoder_layers/self_attention/global_{name}/bias",
                f"encoder.layer.{{}}.attention.self.{name}_global.bias",
            ),
        )
    ),
]
_MASKED_LM = [
    *dense("masked_lm/dense", "lm_head.dense"),
    *norm("masked_lm/norm", "lm_head.layer_norm"),
    vector("masked_lm/bias", "lm_head.bias"),
]

# For each architecture: our class, and the rows of its head. The head of a classifier includes the pooler.
HEADS: dict[str, tuple[Any, list[Row]]] = {
    "LongformerModel": (Bert, []),
    "LongformerForMaskedLM": (BertMaskedLM, _MASKED_LM),
    "LongformerForSequenceClassification": (
        BertClassifier,
        [*dense("bert/pooler", "classifier.dense"), *dense("classifier", "classifier.out_proj")],
    ),
    "LongformerForTokenClassification": (BertTagger, bert.CLASSIFIER),
    "LongformerForQuestionAnswering": (BertQuestionAnswering, dense("span", "qa_outputs")),
}

IGNORED = [
    r"(longformer\.)?embeddings\.position_ids",
    r"lm_head\.decoder\.(weight|bias)",
    *sorted(
        {f"(longformer\\.)?{re.escape(row.tensor)}" for _, head in HEADS.values() for row in [*bert.POOLER, *head]}
    ),
]

COPIES = [
    (r"lm_head\.decoder\.weight", "longformer.embeddings.word_embeddings.weight"),
    (r"lm_head\.decoder\.bias", "lm_head.bias"),
]


def renamed(architecture: str) -> list[tuple[str, str]]:
    """Returns (pattern, replacement) pairs of tensor names: an encoder may be read from a folder with a head."""
    return [(r"^longformer\.", "")] if architecture == "LongformerModel" else []


def fits(config: BertConfig) -> bool:
    """Returns whether a Hugging Face folder of this architecture can express a configuration."""
    is_window = config.attention == AttentionConfig("window", AttentionOptions(window=config.attention.options.window))
    return is_window and config.max_global_tokens > 0 and config.first_position == _FIRST_POSITION


def read_config(architecture: str, fields: Fields) -> BertConfig:
    """Returns the configuration for the fields of a Longformer."""
    fields.require(pad_token_id=1, position_embedding_type="absolute")
    if architecture == "LongformerForMaskedLM":
        fields.require(hidden_act="gelu")
    config = bert.read_sizes(architecture, fields)
    config.first_position = _FIRST_POSITION
    config.max_length -= _FIRST_POSITION
    config.attention = AttentionConfig("window", AttentionOptions(window=fields.window() // 2))
    config.max_global_tokens = 64  # no field has it, and no parameter depends on it
    config.sep_id = fields.get("sep_token_id", 2)
    return config


def write_config(architecture: str, config: BertConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a Longformer."""
    fields = bert.write_config(architecture, config)
    del fields["classifier_dropout"]  # this family has no separate dropout rate of the head
    if config.sep_id is not None:
        fields["sep_token_id"] = config.sep_id
    return fields | {
        "model_type": "longformer",
        "pad_token_id": 1,
        "max_position_embeddings": config.max_length + _FIRST_POSITION,
        "attention_window": [2 * (config.attention.options.window or 0)] * config.num_layers,
    }


def rows(architecture: str, config: BertConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model, head = HEADS[architecture]
    return bert.table_of(model, config, "longformer", _BODY, bert.POOLER, head, "lm_head.decoder")
