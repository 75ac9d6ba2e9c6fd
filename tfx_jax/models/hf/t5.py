"""T5, its version 1.1, mT5, UMT5 and LongT5 in Hugging Face folders; their encoders, classifiers and taggers."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tfx_jax.models.hf.folder import Fields, classifier_fields
from tfx_jax.models.hf.names import Row, dense, linear, table, under, vector
from tfx_jax.models.t5 import T5, T5Classifier, T5Config, T5Encoder, T5Tagger

# For each architecture: our class, options that config.json does not contain, and values of absent fields.
_T5 = {"vocab_size": 32_128, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "feed_forward_proj": "relu"}
_MT5 = {"vocab_size": 250_112, "num_layers": 8, "num_heads": 6, "d_ff": 1024, "feed_forward_proj": "gated-gelu"}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "T5ForConditionalGeneration": (T5, {}, _T5),
    "T5WithLMHeadModel": (T5, {}, _T5),  # its former name
    "T5EncoderModel": (T5Encoder, {}, _T5),
    "T5ForSequenceClassification": (T5Classifier, {}, _T5),
    "T5ForTokenClassification": (T5Tagger, {}, _T5),
    "LongT5ForConditionalGeneration": (T5, {}, _T5),
    "LongT5EncoderModel": (T5Encoder, {}, _T5),
    "MT5ForConditionalGeneration": (T5, {"is_tied": False}, _MT5),
    "MT5EncoderModel": (T5Encoder, {}, _MT5),
    "MT5ForSequenceClassification": (T5Classifier, {}, _MT5),
    "MT5ForTokenClassification": (T5Tagger, {}, _MT5),
    "UMT5ForConditionalGeneration": (T5, {"layers_have_biases": True}, _MT5),
    "UMT5EncoderModel": (T5Encoder, {"layers_have_biases": True}, _MT5),
    "UMT5ForSequenceClassification": (T5Classifier, {"layers_have_biases": True}, _MT5),
    "UMT5ForTokenClassification": (T5Tagger, {"layers_have_biases": True}, _MT5),
}
MODEL_TYPES = {
    "t5": "T5ForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}

# The rows of the heads by our class.
HEADS: dict[Any, list[Row]] = {
    T5Classifier: [
        *dense("dense", "classification_head.dense"),
        *dense("classifier", "classification_head.out_proj"),
    ],
    T5Tagger: dense("classifier", "classifier"),
}

# (`activation`, `is_gated`) by the name of the feed-forward layer in config.json.
_FEED_FORWARD = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("swish", False),
    "gated-relu": ("relu", True),
    "gated-gelu": ("gelu_tanh", True),  # the tanh approximation, despite the name
    "gated-silu": ("swish", True),
}


def fits(architecture: str, config: T5Config) -> bool:
    """Returns whether a Hugging Face folder of this architecture can express a configuration."""
    _, options, _ = ARCHITECTURES[architecture]
    has_same_biases = options.get("layers_have_biases", False) == config.layers_have_biases
    is_tied_alike = options.get("is_tied", config.is_tied) == config.is_tied
    is_long_alike = (config.local_radius is not None) == architecture.startswith("LongT5")
    return config.attention.name == "dense" and has_same_biases and is_tied_alike and is_long_alike


def read_config(architecture: str, fields: Fields) -> T5Config:
    """Returns the configuration for the fields of a T5.

    Version 1.1 has `tie_word_embeddings=False` or, if transformers 5 has written the folder,
    `scale_decoder_outputs=False`. transformers 5 decides from the weights whether the output layer is the embedding.
    """
    model, fixed_options, defaults = ARCHITECTURES[architecture]
    fields.require(is_decoder=False)
    num_decoder_layers = 1  # unused without a decoder
    options: dict[str, Any] = {"is_tied": True} | fixed_options
    if model in HEADS:
        head_dropout_rate = float(fields.get("classifier_dropout", 0.0))
        options |= {"head_dropout_rate": head_dropout_rate, **fields.classifier_options()}
    if model in (T5, T5Classifier):
        num_decoder_layers = fields.optional("num_decoder_layers", int)
    if model is T5:
        fields.require(is_encoder_decoder=True)
        is_tied = fields.get("tie_word_embeddings", True) and fields.get("scale_decoder_outputs", True)
        options = {"is_tied": is_tied} | fixed_options
    if architecture.startswith("LongT5"):
        kinds = {"local": "local", "transient-global": "transient-global"}
        is_global = fields.choose("encoder_attention_type", kinds, "local") == "transient-global"
        options["local_radius"] = fields.get("local_radius", 127)
        options["global_block_size"] = fields.get("global_block_size", 16) if is_global else 0
    name = fields.choose("feed_forward_proj", {name: name for name in _FEED_FORWARD}, defaults["feed_forward_proj"])
    activation, is_gated = _FEED_FORWARD[name]
    fields.require(is_gated_act=is_gated, dense_act_fn="gelu_new" if name == "gated-gelu" else name.split("-")[-1])
    pad_id = fields.get("pad_token_id", 0)
    return T5Config(
        vocab_size=fields.get("vocab_size", defaults["vocab_size"]),
        num_layers=fields.get("num_layers", defaults["num_layers"]),
        num_decoder_layers=num_decoder_layers,
        d_model=fields.get("d_model", 512),
        num_heads=fields.get("num_heads", defaults["num_heads"]),
        d_k=fields.get("d_kv", 64),
        d_ff=fields.get("d_ff", defaults["d_ff"]),
        activation=activation,
        is_gated=is_gated,
        **options,
        num_buckets=fields.get("relative_attention_num_buckets", 32),
        max_distance=fields.get("relative_attention_max_distance", 128),
        dropout_rate=float(fields.get("dropout_rate", 0.1)),
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-6),
        pad_id=pad_id,
        start_id=fields.get("decoder_start_token_id", pad_id),
        eos_id=fields.get("eos_token_id", 1),
    )


def write_config(architecture: str, config: T5Config) -> dict[str, Any]:
    """Returns the fields of config.json for a T5.

    Raises:
      ValueError: if config.json cannot express the feed-forward layer.
    """
    names = {ours: theirs for theirs, ours in _FEED_FORWARD.items()}
    kind = (config.activation, config.is_gated)
    if kind not in names:
        raise ValueError(f"a Hugging Face T5 has no feed-forward layer with {kind[0]} and is_gated={kind[1]}")
    if architecture == "T5WithLMHeadModel":
        architecture = "T5ForConditionalGeneration"
    model = ARCHITECTURES[architecture][0]
    head = {"classifier_dropout": config.head_dropout_rate, **classifier_fields(config)} if model in HEADS else {}
    long_fields: dict[str, Any] = {}
    if config.local_radius is not None:
        long_fields = {"encoder_attention_type": "local", "local_radius": config.local_radius}
        if config.global_block_size:
            long_fields |= {"encoder_attention_type": "transient-global", "global_block_size": config.global_block_size}
    return long_fields | {
        "model_type": architecture.partition("T5")[0].lower() + "t5",
        "architectures": [architecture],
        "is_encoder_decoder": model in (T5, T5Classifier),
        **head,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "d_model": config.d_model,
        "num_heads": config.num_heads,
        "d_kv": config.d_k,
        "d_ff": config.d_ff,
        "feed_forward_proj": names[kind],
        "tie_word_embeddings": config.is_tied,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": config.norm_epsilon,
        "pad_token_id": config.pad_id,
        "decoder_start_token_id": config.start_id,
        "eos_token_id": config.eos_id,
    }


def rows_of(architecture: str, fields: Fields) -> Callable[[T5Config], list[Row]]:
    """Returns a function from a configuration to the table of names, for a folder that transformers 5 may have written.

    In such a folder the output of an untied output layer may be scaled by d_model^-0.5; we scale its matrix instead. An
    output layer that is not scaled may be the embedding, so its tensor may be missing.
    """
    is_scaled = fields.optional("scale_decoder_outputs", bool)
    if architecture == "MT5ForConditionalGeneration":  # it never scales the output
        is_scaled = False
    may_be_tied = is_scaled is False and fields.get("tie_word_embeddings", True)
    if architecture.startswith("LongT5"):  # published folders have no such tensor, though they say that it is not tied
        may_be_tied = True
    head = {"instead": "shared.weight"} if may_be_tied else {}

    def table_of(config: T5Config) -> list[Row]:
        """Returns the rows, with the scale and the other name of the output layer's matrix."""
        scale = config.d_model**-0.5 if is_scaled else 1.0
        return [
            dataclasses.replace(row, scale=scale, **head) if row.path == "output_embedding/table" else row
            for row in rows(architecture, config)
        ]

    return table_of


def rows(architecture: str, config: T5Config) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model = ARCHITECTURES[architecture][0]
    result = [table("embedding/table", "shared.weight"), *_stack("encoder", config, ("self",))]
    if model in (T5, T5Classifier):
        result += _stack("decoder", config, ("self", "cross"))
    if model is T5 and not config.is_tied:
        result.append(table("output_embedding/table", "lm_head.weight"))
    if model in HEADS:
        result = [*under("transformer", "transformer", result), *HEADS[model]]
    return result


def _stack(side: str, config: T5Config, attentions: tuple[str, ...]) -> list[Row]:
    """Returns the rows of the encoder or the decoder.

    Their relative position biases are in the first layer or in each layer, and the sublayers of a layer have numbers.

    Args:
      side: "encoder" or "decoder".
      config: the configuration.
      attentions: "self" and, in a decoder, "cross", in the order of the sublayers.
    """
    names = {"self": "SelfAttention", "cross": "EncDecAttention"}
    if side == "encoder" and config.local_radius is not None:
        names["self"] = "TransientGlobalSelfAttention" if config.global_block_size else "LocalSelfAttention"
    layers, block = f"{side}_layers", f"{side}.block.{{}}.layer"
    last = len(attentions)  # index of the feed-forward sublayer
    matrices = {"up": "wi_0", "gate": "wi_1", "down": "wo"} if config.is_gated else {"up": "wi", "down": "wo"}
    layer_with_bias = "{}" if config.layers_have_biases else "0"
    first = f"{side}.block.{layer_with_bias}.layer.0.{names['self']}"
    result = [table(f"{side}_bias/table", f"{first}.relative_attention_bias.weight")]
    if side == "encoder" and config.global_block_size:
        result.append(table("encoder_summary_bias/table", f"{first}.global_relative_attention_bias.weight"))
        norm = f"{block}.0.{names['self']}.global_input_layer_norm.weight"
        result.append(vector(f"{layers}/self_attention/summary_norm/scale", norm))
    for index, kind in enumerate(attentions):
        path, sublayer = f"{layers}/{kind}_attention", f"{block}.{index}"
        result.append(vector(f"{path}_residual/norm/scale", f"{sublayer}.layer_norm.weight"))
        for name in ("query", "key", "value", "out"):
            tensor = f"{sublayer}.{names[kind]}.{name[0]}.weight"  # q, k, v and o
            result.append(linear(f"{path}/{name}/kernel", tensor, num_inputs=2 if name == "out" else 1))
    result.append(vector(f"{layers}/feed_forward_residual/norm/scale", f"{block}.{last}.layer_norm.weight"))
    for name, their_name in matrices.items():
        tensor = f"{block}.{last}.DenseReluDense.{their_name}.weight"
        result.append(linear(f"{layers}/feed_forward/{name}", tensor))
    result.append(vector(f"{side}_norm/scale", f"{side}.final_layer_norm.weight"))
    return result
