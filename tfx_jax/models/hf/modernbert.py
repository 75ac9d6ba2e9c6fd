"""ModernBERT in Hugging Face folders: a BERT with rotary positions, gated feed-forward layers, windows and pre-norm."""

import dataclasses
import math
from typing import Any

from tfx_jax.models.bert import POOLERS, Bert, BertClassifier, BertConfig, BertMaskedLM, BertTagger
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field, classifier_fields
from tfx_jax.models.hf.names import Row, dense, linear, table, under, vector
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions, RotaryConfig

MODEL_TYPE = "modernbert"
_HEAD = [
    linear("masked_lm/dense/kernel", "head.dense.weight"),
    vector("masked_lm/norm/scale", "head.norm.weight"),
    vector("masked_lm/bias", "decoder.bias"),
]
_CLASSIFIER = [vector("norm/scale", "head.norm.weight"), *dense("classifier", "classifier")]

# For each architecture: our class, and the rows of its head.
HEADS: dict[str, tuple[Any, list[Row]]] = {
    "ModernBertModel": (Bert, []),
    "ModernBertForMaskedLM": (BertMaskedLM, _HEAD),
    "ModernBertForSequenceClassification": (
        BertClassifier,
        [linear("bert/pooler/kernel", "head.dense.weight"), *_CLASSIFIER],
    ),
    "ModernBertForTokenClassification": (BertTagger, [linear("dense/kernel", "head.dense.weight"), *_CLASSIFIER]),
}
_WITH_LABELS = ("ForSequenceClassification", "ForTokenClassification")
IGNORED = [r"decoder\.(weight|bias)", r"head\.(dense|norm)\.weight", r"classifier\.(weight|bias)"]
COPIES = [(r"decoder\.weight", "model.embeddings.tok_embeddings.weight")]

# Options that all models have and config.json does not contain.
_OPTIONS: dict[str, Any] = {"num_segments": 0, "has_pooler": False, "first_layer": True, "pre_norm": True}
_OPTIONS |= {"use_bias": False, "is_gated": True, "head_norm": True}
_LAYER_TYPES = {"full_attention": "dense", "sliding_attention": "window"}
_POOLINGS = {"cls": "first", "mean": "mean"}


def renamed(architecture: str) -> list[tuple[str, str]]:
    """Returns (pattern, replacement) pairs of tensor names: an encoder may be read from a folder with a head."""
    return [(r"^model\.", "")] if architecture == "ModernBertModel" else []


def fits(config: BertConfig) -> bool:
    """Returns whether a Hugging Face folder of this architecture can express a configuration."""
    required = {name: value for name, value in _OPTIONS.items() if name != "has_pooler"}
    # Rotary positions without options other than the base; False if there are none.
    has_plain_rotary = config.rotary == RotaryConfig(base=0.0 if config.rotary is None else config.rotary.base)
    return has_plain_rotary and all(getattr(config, name) == value for name, value in required.items())


def read_config(architecture: str, fields: Fields) -> BertConfig:
    """Returns the configuration for the fields of a ModernBERT.

    Raises:
      UserError: for an option that the model does not support.
    """
    fields = fields.with_defaults({"classifier_activation": "gelu"})
    fields.require(attention_bias=False, mlp_bias=False, norm_bias=False, decoder_bias=True, classifier_bias=False)
    fields.require(rope_scaling=None, attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0)
    activation = fields.choose("hidden_activation", ACTIVATIONS, "gelu")
    if "ForMaskedLM" in architecture:
        fields.require(classifier_activation=fields.get("hidden_activation", "gelu"))
    classifier: dict[str, Any] = {}
    if architecture.endswith(_WITH_LABELS):
        classifier = {
            **fields.classifier_options(),
            "pooling": fields.choose("classifier_pooling", _POOLINGS, "cls"),
            "pooler_activation": fields.choose("classifier_activation", {name: name for name in POOLERS}, "gelu"),
            "head_dropout_rate": float(fields.get("classifier_dropout", 0.0)),
        }
    num_layers, every = fields.get("num_hidden_layers", 22), fields.get("global_attn_every_n_layers", 3)
    if num_layers < 2 or every < 1:
        raise fields.error(f"num_hidden_layers is {num_layers} and global_attn_every_n_layers {every}: too few")
    types = fields.get("layer_types", []) or [
        "sliding_attention" if index % every else "full_attention" for index in range(num_layers)
    ]
    if types[0] != "full_attention" or len(types) != num_layers:
        raise fields.error(f"layer_types is {types!r}, but the first of {num_layers} layers must see all")
    names = [fields.chosen("layer_types", kind, _LAYER_TYPES) for kind in types[1:]]
    # The first layer is separate. The others repeat a pattern: the shortest that gives the attentions of all.
    count = len(names)
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    period = next(size for size in divisors if names == names[:size] * (count // size))
    has_windows = "window" in names
    radius = fields.get("local_attention", 128) // 2
    fields.require(sliding_window=radius)  # which takes precedence in transformers
    window = AttentionOptions(window=radius) if has_windows else AttentionOptions()
    bases = {"full_attention": fields.get("global_rope_theta", 160_000.0)}
    bases["sliding_attention"] = fields.get("local_rope_theta", 10_000.0)
    for kind, values in fields.get("rope_parameters", {}).items():
        is_known = kind in bases and isinstance(values, dict)
        if not is_known or values.get("rope_type", values.get("type", "default")) != "default":
            raise fields.error(f"rope_parameters has {kind}: {values!r}, but only the default rope_type is supported")
        base = values.get("rope_theta", bases[kind])
        if type(base) not in (int, float) or not math.isfinite(base):
            raise fields.error(f"rope_parameters has {kind}: {values!r}, whose rope_theta is no number")
        bases[kind] = base
    return BertConfig(
        vocab_size=fields.get("vocab_size", 50_368),
        max_length=fields.get("max_position_embeddings", 8192),
        num_layers=num_layers - 1,
        d_model=fields.get("hidden_size", 768),
        num_heads=fields.get("num_attention_heads", 12),
        d_ff=fields.get("intermediate_size", 1152),
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        activation=activation,
        layer_norm_epsilon=fields.get("norm_eps", 1e-5),
        is_tied=fields.get("tie_word_embeddings", True) or "ForMaskedLM" not in architecture,
        rotary=RotaryConfig(base=float(bases["full_attention"])),
        window_rotary_base=float(bases["sliding_attention"]) if has_windows else None,
        attention=AttentionConfig(",".join(names[:period]), window),
        **_OPTIONS,
        **classifier,
    )


def write_config(architecture: str, config: BertConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a ModernBERT."""
    kinds = {name: kind for kind, name in _LAYER_TYPES.items()}
    names = ["dense", *config.attention.names * (config.num_layers // len(config.attention.names))]
    base = 0.0 if config.rotary is None else config.rotary.base
    bases = {"full_attention": base, "sliding_attention": config.window_rotary_base or base}
    activation = activation_field(config.activation, {"gelu": "gelu", **ACTIVATIONS})
    classifier = {}
    if architecture.endswith(_WITH_LABELS):
        classifier = {
            **classifier_fields(config),
            "classifier_pooling": activation_field(config.pooling, _POOLINGS),
            "classifier_activation": config.pooler_activation,
            "classifier_dropout": config.head_dropout_rate or 0.0,
        }
    return {
        "model_type": MODEL_TYPE,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "num_hidden_layers": config.num_layers + 1,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "intermediate_size": 4 * config.d_model if config.d_ff is None else config.d_ff,
        "hidden_activation": activation,
        "classifier_activation": activation,
        **classifier,
        "norm_eps": config.layer_norm_epsilon,
        "local_attention": 2 * (config.attention.options.window or 64),
        "layer_types": [kinds[name] for name in names],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "tie_word_embeddings": config.is_tied,
        **({"pad_token_id": 0} if config.vocab_size <= 50_283 else {}),  # a small vocabulary lacks the default id
    }


def rows(architecture: str, config: BertConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model, head = HEADS[architecture]
    period = len(config.attention.names)
    body = [
        table("embedding/table", "embeddings.tok_embeddings.weight"),
        vector("norm/scale", "embeddings.norm.weight"),
    ]
    body += [row for row in _layer_rows("first_layer", "layers.0", config) if "self_attention_residual" not in row.path]
    for kind in range(period):
        path = "encoder_layers" if period == 1 else f"encoder_layers/layers/{kind}"
        layer = _layer_rows(path, "layers.{}", config)
        body += [dataclasses.replace(row, first_layer=1 + kind, layer_step=period) for row in layer]
    body.append(vector("last_norm/scale", "final_norm.weight"))
    if model is Bert:
        return body
    output = [] if config.is_tied else [table("masked_lm/output_embedding/table", "decoder.weight")]
    return [*under("bert", "model", body), *head, *output]


def _layer_rows(path: str, tensor: str, config: BertConfig) -> list[Row]:
    """Returns the rows of the layers at `path`; `tensor` is the start of the tensors' names."""
    d_ff = 4 * config.d_model if config.d_ff is None else config.d_ff
    joined = [linear(f"{path}/feed_forward/{name}", f"{tensor}.mlp.Wi.weight") for name in ("up", "gate")]
    projections = [
        linear(f"{path}/self_attention/{name}/kernel", f"{tensor}.attn.Wqkv.weight")
        for name in ("query", "key", "value")
    ]
    sizes = [(row, config.d_model, 3) for row in projections]
    # Query, key and value are column blocks of one tensor, up and gate of another.
    blocks = [
        dataclasses.replace(row, outputs=range(index * size, (index + 1) * size), num_outputs=count * size)
        for group in (sizes, [(row, d_ff, 2) for row in joined])
        for index, (row, size, count) in enumerate(group)
    ]
    return [
        *blocks,
        linear(f"{path}/self_attention/out/kernel", f"{tensor}.attn.Wo.weight", 2),
        linear(f"{path}/feed_forward/down", f"{tensor}.mlp.Wo.weight"),
        vector(f"{path}/self_attention_residual/norm/scale", f"{tensor}.attn_norm.weight"),
        vector(f"{path}/feed_forward_residual/norm/scale", f"{tensor}.mlp_norm.weight"),
    ]
