"""RoBERTa, CamemBERT, XLM-R, MPNet, DistilBERT, ELECTRA and ALBERT in Hugging Face folders.

They are BERTs with other names and options.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfx_jax.models.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertMaskedLM,
    BertMultipleChoice,
    BertPretraining,
    BertQuestionAnswering,
    BertReplacedTokens,
    BertTagger,
)
from tfx_jax.models.hf import bert
from tfx_jax.models.hf.folder import Fields
from tfx_jax.models.hf.names import Row, dense, feed_forward, norm, projections, table, vector

_LAYERS = "encoder_layers"
Heads = dict[str, tuple[Any, list[Row]]]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """One family of encoders, with the attributes and functions of a module such as `bert`.

    Attributes:
      MODEL_TYPE: "model_type" in config.json.
      HEADS: for each architecture our class and the rows of its head; the first architecture has no head.
      prefix: start of the names of the encoder's tensors in a model with a head.
      body: rows of the encoder; rows for parameters that a configuration does not have are left out.
      pooler: rows of the pooler.
      output: name of the output layer, used if its matrix is not the embedding.
      options: options of `BertConfig` that all models of the family have and config.json does not contain; they differ
        from those of every other family.
      fields: names of fields in config.json by their names in a BERT, if they differ.
      defaults: values of absent fields by their names in a BERT, if they are not those of BERT.
    """

    MODEL_TYPE: str
    HEADS: Heads
    prefix: str
    body: Sequence[Row]
    pooler: Sequence[Row]
    output: str
    options: Mapping[str, Any]
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def IGNORED(self) -> list[str]:  # noqa: N802, the name that modules of other families use
        """Patterns of copies of tied parameters, a constant, and heads of other architectures in the same file."""
        heads = [row for _, head in self.HEADS.values() for row in [*self.pooler, *head]]
        of_others = sorted({f"({self.prefix}\\.)?{re.escape(row.tensor)}" for row in heads})
        output = re.escape(self.output)
        return [rf"({self.prefix}\.)?embeddings\.position_ids", rf"{output}\.(weight|bias)", *of_others]

    @property
    def COPIES(self) -> list[tuple[str, str]]:  # noqa: N802
        """Pairs (pattern, original): older folders repeat the tensor `original` under names that match the pattern."""
        bias = next(row.tensor for _, head in self.HEADS.values() for row in head if row.path == "masked_lm/bias")
        copies = [(rf"{re.escape(self.output)}\.weight", f"{self.prefix}.embeddings.word_embeddings.weight")]
        return copies if bias == f"{self.output}.bias" else [*copies, (rf"{re.escape(self.output)}\.bias", bias)]

    def renamed(self, architecture: str) -> list[tuple[str, str]]:
        """Returns (pattern, replacement) pairs of tensor names: an encoder may be read from a folder with a head."""
        return [(rf"^{self.prefix}\.", "")] if self.HEADS[architecture][0] is Bert else []

    def fits(self, config: BertConfig) -> bool:
        """Returns whether a Hugging Face folder of this architecture can express a configuration."""
        required = {**bert.OPTIONS, **self.options}
        values = {name: getattr(config, name) for name in required}
        values["num_segments"] = bool(config.num_segments)
        return config.attention.name == "dense" and values == required

    def read_config(self, architecture: str, fields: Fields) -> BertConfig:
        """Returns the configuration for the fields of a folder; an unsupported value is a UserError.

        Sizes are those of the folder or, where it leaves them out, `self.defaults`. What all folders of the family have
        in common, such as shared layers, is in `self.options`.
        """
        in_file, fields = fields, fields.renamed(self.fields)
        config = bert.read_sizes(architecture, fields, **self.defaults)
        in_file.require(num_attention_heads=config.num_heads)  # another name of "n_heads" in transformers
        options = dict(self.options)
        # This option only says whether there are segments, the configuration counts them.
        if options.pop("num_segments", True) is False:
            options["num_segments"] = 0
        if config.first_position != options.get("first_position", 0):
            # RoBERTa and its relatives count positions from 2: the first rows of their table are never used.
            config.max_length -= options["first_position"]
        if options.get("share_layers") or "embedding_size" in self.defaults:
            size = fields.get("embedding_size", self.defaults["embedding_size"])
            # ALBERT always projects from the size of the embeddings, ELECTRA only where the sizes differ.
            options["embedding_size"] = size if options.get("share_layers") or size != config.d_model else None
        if self.HEADS[architecture][0] is Bert and not self.pooler:
            options["has_pooler"] = False
        if architecture == "DistilBertForTokenClassification":
            options["head_dropout_rate"] = None  # that of the layers, unlike before its other heads
        config = dataclasses.replace(config, **options)
        self._check(architecture, fields, config)
        return config

    def _check(self, architecture: str, fields: Fields, config: BertConfig) -> None:
        """Raises UserError for fields with values that our models do not support."""
        fields.require(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        if config.first_position:
            fields.require(pad_token_id=1)
        if config.relative_buckets:
            fields.require(relative_attention_num_buckets=config.relative_buckets)
        if config.share_layers:
            fields.require(num_hidden_groups=1, inner_group_num=1)
        if "ForMaskedLM" in architecture and self.MODEL_TYPE not in ("distilbert", "albert"):
            fields.require(hidden_act="gelu")  # the head has gelu whatever the field says, ours has the encoder's

    def write_config(self, architecture: str, config: BertConfig) -> dict[str, Any]:
        """Returns the fields of config.json for a folder."""
        result = bert.write_config(architecture, config)
        result["model_type"] = self.MODEL_TYPE
        result["max_position_embeddings"] += config.first_position
        if config.first_position:
            result["pad_token_id"] = 1
        if "embedding_size" in self.defaults:
            result["embedding_size"] = config.embedding_size or config.d_model
        if not config.num_segments:
            del result["type_vocab_size"]
        if self.MODEL_TYPE == "distilbert":
            del result["layer_norm_eps"]
        if config.head_dropout_rate is None:
            del result["classifier_dropout"]  # some of the families do not accept null
        return {self.fields.get(name, name): value for name, value in result.items()}

    def rows(self, architecture: str, config: BertConfig) -> list[Row]:
        """Returns the table of names: which tensor of a folder holds which parameter."""
        model, head = self.HEADS[architecture]
        return bert.table_of(model, config, self.prefix, self.body, self.pooler, head, self.output)


def _masked_lm(transform: str, layer_norm: str, bias: str) -> list[Row]:
    """Returns the rows of the head for masked tokens, for the names of its tensors."""
    return [*dense("masked_lm/dense", transform), *norm("masked_lm/norm", layer_norm), vector("masked_lm/bias", bias)]


def _heads(name: str, masked_lm: list[Row], classifier: list[Row], **more: tuple[Any, list[Row]]) -> Heads:
    """Returns `HEADS` with the architectures that all families have.

    Args:
      name: start of the architectures' names.
      masked_lm: rows of the head for masked tokens.
      classifier: rows of the head for sequences.
      **more: further architectures, class and rows by the rest of their names.
    """
    return {
        f"{name}Model": (Bert, []),
        f"{name}ForMaskedLM": (BertMaskedLM, masked_lm),
        f"{name}ForSequenceClassification": (BertClassifier, classifier),
        f"{name}ForTokenClassification": (BertTagger, bert.CLASSIFIER),
        f"{name}ForQuestionAnswering": (BertQuestionAnswering, dense("span", "qa_outputs")),
        **{f"{name}{head}": rows for head, rows in more.items()},
    }


_CHOICE = (BertMultipleChoice, bert.CLASSIFIER)
# Here the pooler is part of the classifier's head.
_CLASSIFIER = [*dense("bert/pooler", "classifier.dense"), *dense("classifier", "classifier.out_proj")]

_ROBERTA = Encoder(
    MODEL_TYPE="roberta",
    HEADS=_heads(
        "Roberta",
        _masked_lm("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
        _CLASSIFIER,
        ForMultipleChoice=_CHOICE,
    ),
    prefix="roberta",
    body=bert.BODY,
    pooler=bert.POOLER,
    output="lm_head.decoder",
    options={"first_position": 2},  # positions start after the padding id, 1
    defaults={"vocab_size": 50_265, "pad_token_id": 1},
)
_XLM_R = dataclasses.replace(
    _ROBERTA,
    MODEL_TYPE="xlm-roberta",
    HEADS={f"XLM{name}": head for name, head in _ROBERTA.HEADS.items()},
    defaults={"vocab_size": 30_522},
)
_CAMEMBERT = dataclasses.replace(
    _ROBERTA,
    MODEL_TYPE="camembert",
    HEADS={name.replace("Roberta", "Camembert"): head for name, head in _ROBERTA.HEADS.items()},
    defaults={"vocab_size": 30_522},
)

_MPNET_LAYER = "encoder.layer.{}"
_MPNET = dataclasses.replace(
    _ROBERTA,
    MODEL_TYPE="mpnet",
    HEADS={name.replace("Roberta", "MPNet"): head for name, head in _ROBERTA.HEADS.items()},
    prefix="mpnet",
    body=[
        *bert.EMBEDDINGS,
        table("relative_bias", "encoder.relative_attention_bias.weight"),
        *projections(f"{_LAYERS}/self_attention", f"{_MPNET_LAYER}.attention.attn", "q", "k", "v", "o"),
        *norm(f"{_LAYERS}/self_attention_residual/norm", f"{_MPNET_LAYER}.attention.LayerNorm"),
        *feed_forward(f"{_LAYERS}/feed_forward", f"{_MPNET_LAYER}.intermediate.dense", f"{_MPNET_LAYER}.output.dense"),
        *norm(f"{_LAYERS}/feed_forward_residual/norm", f"{_MPNET_LAYER}.output.LayerNorm"),
    ],
    options={"first_position": 2, "num_segments": False, "relative_buckets": 32},
    defaults={"vocab_size": 30_527},
)

_ELECTRA = Encoder(
    MODEL_TYPE="electra",
    HEADS=_heads(
        "Electra",
        _masked_lm("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
        _CLASSIFIER,
        ForPreTraining=(
            BertReplacedTokens,
            [
                *dense("dense", "discriminator_predictions.dense"),
                *dense("is_replaced", "discriminator_predictions.dense_prediction"),
            ],
        ),
    ),
    prefix="electra",
    body=[*bert.BODY, *dense("projection", "embeddings_project")],
    pooler=[],
    output="generator_lm_head",
    options={"pooler_activation": "gelu"},
    defaults={"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
)

_ALBERT_LAYER = "encoder.albert_layer_groups.{}.albert_layers.0"
_ALBERT_LM = _masked_lm("predictions.dense", "predictions.LayerNorm", "predictions.bias")
_ALBERT = Encoder(
    MODEL_TYPE="albert",
    HEADS=_heads(
        "Albert",
        _ALBERT_LM,
        bert.CLASSIFIER,
        ForMultipleChoice=_CHOICE,
        ForPreTraining=(BertPretraining, [*_ALBERT_LM, *dense("next_sentence", "sop_classifier.classifier")]),
    ),
    prefix="albert",
    body=[
        *bert.EMBEDDINGS,
        *dense("projection", "encoder.embedding_hidden_mapping_in"),
        *projections(f"{_LAYERS}/self_attention", f"{_ALBERT_LAYER}.attention", "query", "key", "value", "dense"),
        *norm(f"{_LAYERS}/self_attention_residual/norm", f"{_ALBERT_LAYER}.attention.LayerNorm"),
        *feed_forward(f"{_LAYERS}/feed_forward", f"{_ALBERT_LAYER}.ffn", f"{_ALBERT_LAYER}.ffn_output"),
        *norm(f"{_LAYERS}/feed_forward_residual/norm", f"{_ALBERT_LAYER}.full_layer_layer_norm"),
    ],
    pooler=dense("pooler", "pooler"),
    output="predictions.decoder",
    options={"share_layers": True},
    fields={"classifier_dropout": "classifier_dropout_prob"},
    defaults={"vocab_size": 30_000, "embedding_size": 128, "hidden_size": 4096, "num_attention_heads": 64}
    | {"intermediate_size": 16_384, "hidden_act": "gelu_new", "hidden_dropout_prob": 0.0}
    | {"attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.1},
)

_DISTIL_LAYER = "transformer.layer.{}"
_DISTIL_CLASSIFIER = [*dense("bert/pooler", "pre_classifier"), *bert.CLASSIFIER]
_DISTILBERT = Encoder(
    MODEL_TYPE="distilbert",
    HEADS=_heads(
        "DistilBert",
        _masked_lm("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        _DISTIL_CLASSIFIER,
        ForMultipleChoice=(BertMultipleChoice, _DISTIL_CLASSIFIER),
    ),
    prefix="distilbert",
    body=[
        *bert.EMBEDDINGS,
        *projections(f"{_LAYERS}/self_attention", f"{_DISTIL_LAYER}.attention", "q_lin", "k_lin", "v_lin", "out_lin"),
        *norm(f"{_LAYERS}/self_attention_residual/norm", f"{_DISTIL_LAYER}.sa_layer_norm"),
        *feed_forward(f"{_LAYERS}/feed_forward", f"{_DISTIL_LAYER}.ffn.lin1", f"{_DISTIL_LAYER}.ffn.lin2"),
        *norm(f"{_LAYERS}/feed_forward_residual/norm", f"{_DISTIL_LAYER}.output_layer_norm"),
    ],
    pooler=[],
    output="vocab_projector",
    options={"pooler_activation": "relu", "num_segments": False, "layer_norm_epsilon": 1e-12},
    fields={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_act": "activation",
        "classifier_dropout": "seq_classif_dropout",
    },
    defaults={"num_hidden_layers": 6, "classifier_dropout": 0.2},
)

ENCODERS = (_ROBERTA, _XLM_R, _CAMEMBERT, _MPNET, _ELECTRA, _ALBERT, _DISTILBERT)
