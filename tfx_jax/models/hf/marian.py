"""Marian (OPUS-MT), BART, mBART, PEGASUS and M2M-100 (NLLB) in Hugging Face folders."""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfx_jax.arrays import path_name
from tfx_jax.errors import UserError
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, Tensors, activation_field, classifier_fields
from tfx_jax.models.hf.names import Row, dense, feed_forward, linear, norm, projections, table, under, with_zeros
from tfx_jax.models.transformer import Transformer, TransformerConfig

_POSITIONS = re.compile(r"model\.(encoder|decoder)\.embed_positions\.weight")
# Number of sinusoids that transformers computes; ours are unlimited.
_MAX_POSITIONS = 1024
# Which axis of a parameter indexes the features of the residual, D; by a pattern of the end of its path.
_RESIDUAL_AXES = {
    r"(query|key|value)/kernel": -3,
    "up": -2,
    r"table|out/(kernel|bias)|down|down_bias|(encoder_|decoder_)?norm/(scale|bias)": -1,
}
# Options of each architecture that config.json does not contain. With `learned_positions`, their number is read from
# it.
_OPTIONS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {"learned_positions": True, "first_position": 2, "embedding_norm": True},
    "MBartForConditionalGeneration": {"learned_positions": True, "first_position": 2, "embedding_norm": True}
    | {"pre_norm": True},
    "PegasusForConditionalGeneration": {"pre_norm": True},
    "M2M100ForConditionalGeneration": {"pre_norm": True, "first_position": 2, "sinusoids_reach_base": True},
    "MarianMTModel": {},
}
MODEL_TYPES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "marian": "MarianMTModel",
}
ARCHITECTURES = tuple(_OPTIONS)
# Classifiers, and the architecture whose options and names each has below its head.
CLASSIFIERS = {"BartForSequenceClassification": "BartForConditionalGeneration"}
# Defaults of fields: vocabulary size, and the ids of PAD, the first decoder input and EOS.
_TOKENS = {
    "BartForConditionalGeneration": (50_265, 1, 2, 2),
    "MBartForConditionalGeneration": (50_265, 1, 2, 2),
    "PegasusForConditionalGeneration": (50_265, 0, 0, 1),
    "M2M100ForConditionalGeneration": (128_112, 1, 2, 2),
    "MarianMTModel": (58_101, 58_100, 58_100, 0),
}


def read_config(architecture: str, fields: Fields) -> TransformerConfig:
    """Returns the configuration for the fields of a folder's config.json."""
    vocab_size, pad_id, start_id, eos_id = _TOKENS[architecture]
    is_marian = architecture == "MarianMTModel"
    fields = fields.with_defaults({"decoder_ffn_dim": 4096, "decoder_attention_heads": 16})
    vocab_size, d_ff = fields.get("vocab_size", vocab_size), fields.get("encoder_ffn_dim", 4096)
    num_heads, num_layers = fields.get("encoder_attention_heads", 16), fields.get("encoder_layers", 12)
    options = dict(_OPTIONS[architecture])
    if options.get("learned_positions"):
        options["learned_positions"] = fields.get("max_position_embeddings", 1024)
    if is_marian and not fields.get("share_encoder_decoder_embeddings", True):
        options |= {"source_vocab_size": vocab_size, "is_tied": fields.get("tie_word_embeddings", True)}
        vocab_size = fields.get("decoder_vocab_size", vocab_size)
    else:
        fields.require(tie_word_embeddings=True)
        if is_marian:
            fields.require(decoder_vocab_size=vocab_size)
    fields.require(is_encoder_decoder=True, decoder_ffn_dim=d_ff, decoder_attention_heads=num_heads)
    fields.require(num_attention_heads=num_heads)  # another name of "encoder_attention_heads" in transformers
    if is_marian:
        fields.require(encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    if architecture == "M2M100ForConditionalGeneration":
        fields.require(pad_token_id=1)  # positions start after the padding id
        if fields.get("decoder_start_token_id", start_id) == 1:
            raise fields.error("decoder_start_token_id is that of padding, where transformers counts no position")
    return TransformerConfig.marian(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_decoder_layers=fields.get("decoder_layers", 12),
        d_model=fields.get("d_model", 1024),
        num_heads=num_heads,
        d_ff=d_ff,
        activation=fields.choose("activation_function", ACTIVATIONS, _activation(architecture)),
        dropout_rate=float(fields.get("dropout", 0.1)),
        attention_dropout_rate=float(fields.get("attention_dropout", _attention_dropout(architecture))),
        activation_dropout_rate=float(fields.get("activation_dropout", 0.0)),
        scale_embedding=fields.get("scale_embedding", architecture == "M2M100ForConditionalGeneration"),
        pad_id=fields.get("pad_token_id", pad_id),
        start_id=fields.get("decoder_start_token_id", start_id),
        eos_id=fields.get("eos_token_id", eos_id),
        logits_bias=architecture != "M2M100ForConditionalGeneration",
        **options,
    )


def check_sinusoids(config: TransformerConfig, tensors: Tensors) -> None:
    """Raises UserError for stored positions that are not the sinusoids that the model computes."""
    for name in sorted(tensors.shapes):
        if config.learned_positions or not _POSITIONS.fullmatch(name):
            continue
        (values,) = tensors.read([name])
        want = sinusoidal_positions(jnp.arange(len(values)), config.d_model, is_interleaved=False)
        if values.shape != want.shape or not np.allclose(values.astype(np.float32), want, atol=1e-2):  # bfloat16
            raise UserError(f"the tensor {name} has other values than the sinusoids, which are computed here")


def read_classifier_config(architecture: str, fields: Fields) -> TransformerConfig:
    """Returns the configuration for the fields of a folder with one of `CLASSIFIERS`."""
    fields = fields.with_defaults({"num_labels": 3})
    return dataclasses.replace(
        read_config(CLASSIFIERS[architecture], fields),
        logits_bias=False,
        head_dropout_rate=float(fields.get("classifier_dropout", 0.0)),
        **fields.classifier_options(),
    )


def _activation(architecture: str) -> str:
    """Returns the activation that a config.json means if it names none."""
    return "relu" if architecture == "M2M100ForConditionalGeneration" else "gelu"


def _attention_dropout(architecture: str) -> float:
    """Returns the dropout rate of attention weights that a config.json means if it has none."""
    return 0.1 if architecture == "M2M100ForConditionalGeneration" else 0.0


def completed_config(config: TransformerConfig, names: Collection[str]) -> TransformerConfig:
    """Removes the bias of the logits from the configuration if the tensors `names` lack it, as in older folders."""
    return dataclasses.replace(config, logits_bias=config.logits_bias and "final_logits_bias" in names)


def fits(architecture: str, config: TransformerConfig) -> bool:
    """Returns whether a folder can express a configuration; for Marian, after `as_marian`, which checks the rest."""
    if config.attention.name != "dense":
        return False
    if architecture == "MarianMTModel":
        return True
    c, options = config, _OPTIONS[architecture]
    names = ("first_position", "sinusoids_reach_base", "embedding_norm", "pre_norm")
    if any(getattr(c, name) != options.get(name, getattr(_DEFAULTS, name)) for name in names):
        return False
    if bool(c.learned_positions) != options.get("learned_positions", False) or c.source_vocab_size or not c.is_tied:
        return False
    if architecture == "M2M100ForConditionalGeneration" and (c.logits_bias or c.pad_id != 1):
        return False
    has_plain_heads = all(size in (None, c.d_model / c.num_heads) for size in (c.d_k, c.d_v))
    return has_plain_heads and c.attention_bias and not c.interleaved_sinusoids and c.layer_norm_epsilon == 1e-5


_DEFAULTS = TransformerConfig.marian()


def as_marian(model: Transformer) -> Transformer:
    """Returns a model that computes the same and has the form of Marian's Transformer; or the model, if another fits.

    With `pre_norm` the form is that of Pegasus, which differs from Marian in this alone. Missing biases become zeros.
    Interleaved sinusoids become all sines, then all cosines: the features of the residual are permuted in all
    parameters, which changes nothing else, since only the sinusoids depend on their order.

    Raises:
      ValueError: if `write_config` cannot express the model.
    """
    if any(fits(architecture, model.config) for architecture in ARCHITECTURES if architecture != "MarianMTModel"):
        return model
    config = dataclasses.replace(model.config, attention_bias=True, logits_bias=True, interleaved_sinusoids=False)
    if not (config.pre_norm and fits("PegasusForConditionalGeneration", config)):
        write_config("MarianMTModel", config)
    if config == model.config:
        return model
    graphdef, state = nnx.split(with_zeros(model, config))
    if model.config.interleaved_sinusoids:
        # First the even features, sines, then the odd features, cosines.
        order = np.arange(config.d_model).reshape(-1, 2).T.reshape(-1)

        def reorder(path: Any, leaf: jax.Array) -> jax.Array:
            """Permutes the features of the residual in a parameter; returns one without such an axis unchanged."""
            name = path_name(path)
            axes = (axis for end, axis in _RESIDUAL_AXES.items() if re.search(f"(^|/)({end})$", name))
            axis = next(axes, None)
            return leaf if axis is None else jax.device_put(np.take(np.asarray(leaf), order, axis=axis))

        state = jax.tree_util.tree_map_with_path(reorder, nnx.to_pure_dict(state))
    return nnx.merge(graphdef, state)


def write_config(architecture: str, config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of config.json; for Marian, of a configuration that `as_marian` has converted.

    Raises:
      ValueError: if a Marian cannot express the configuration.
    """
    c, is_marian = config, architecture == "MarianMTModel"
    required = {"pre_norm": False, "learned_positions": 0, "first_position": 0, "embedding_norm": False}
    required |= {"sinusoids_reach_base": False, "layer_norm_epsilon": 1e-5}
    differing = [f"{name}={value}" for name, value in required.items() if getattr(c, name) != value]
    for name in ("d_k", "d_v"):
        if getattr(c, name) not in (None, c.d_model / c.num_heads):
            differing.append(f"{name}=d_model/num_heads")
    differing += ["is_tied=True"] if not c.is_tied and c.source_vocab_size is None else []
    if differing and is_marian:
        raise ValueError(
            f"a Hugging Face MarianMTModel has {', '.join(differing)}; TransformerConfig.marian() is like this"
        )
    # Fields of both sides, such as "encoder_layers".
    side_fields = {
        f"{side}_{name}": value
        for side, num_layers in (("encoder", c.num_layers), ("decoder", c.num_decoder_layers or c.num_layers))
        for name, value in (("layers", num_layers), ("ffn_dim", c.d_ff), ("attention_heads", c.num_heads))
    }
    marian_fields: dict[str, Any] = {}
    if is_marian:
        marian_fields = {
            "share_encoder_decoder_embeddings": c.source_vocab_size is None,
            "forced_eos_token_id": c.eos_id,
            "bad_words_ids": [[c.pad_id]],
        }
    return {
        "model_type": next(kind for kind, name in MODEL_TYPES.items() if name == architecture),
        "architectures": [architecture],
        "is_encoder_decoder": True,
        "vocab_size": c.source_vocab_size or c.vocab_size,
        "max_position_embeddings": c.learned_positions or _MAX_POSITIONS,
        "d_model": c.d_model,
        **side_fields,
        "activation_function": activation_field(c.activation),
        "dropout": c.dropout_rate,
        "attention_dropout": c.attention_dropout_rate,
        "activation_dropout": c.activation_dropout_rate,
        "scale_embedding": c.scale_embedding,
        "tie_word_embeddings": c.is_tied,
        "pad_token_id": c.pad_id,
        "decoder_start_token_id": c.start_id,
        "eos_token_id": c.eos_id,
        **marian_fields,
        **({} if c.source_vocab_size is None else {"decoder_vocab_size": c.vocab_size}),
    }


def write_classifier_config(architecture: str, config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of config.json for one of `CLASSIFIERS`."""
    head = {"classifier_dropout": config.head_dropout_rate, **classifier_fields(config)}
    return {**write_config(CLASSIFIERS[architecture], config), "architectures": [architecture], **head}


def classifier_rows(config: TransformerConfig) -> list[Row]:
    """Returns the table of names of a classifier."""
    body = under("transformer", "", rows(dataclasses.replace(config, logits_bias=False)))
    head = "classification_head"
    return [*body, *dense("dense", f"{head}.dense"), *dense("classifier", f"{head}.out_proj")]


def rows(config: TransformerConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    result = [table("embedding/table", "model.shared.weight")]
    if config.source_vocab_size is not None:
        result = [
            table("embedding/table", "model.decoder.embed_tokens.weight"),
            table("source_embedding/table", "model.encoder.embed_tokens.weight"),
            *([] if config.is_tied else [table("output_embedding/table", "lm_head.weight")]),
        ]
    for side, name in (("encoder", "source"), ("decoder", "target")):
        if config.learned_positions:
            result.append(table(f"{name}_positions/table", f"model.{side}.embed_positions.weight"))
        if config.embedding_norm:
            result += norm(f"{name}_embedding_norm", f"model.{side}.layernorm_embedding")
        if config.pre_norm:
            result += norm(f"{side}_norm", f"model.{side}.layer_norm")
    result += layer_rows()
    # Their tensor has shape [1, V], a matrix with one output.
    return [*result, linear("logits_bias", "final_logits_bias")] if config.logits_bias else result


def layer_rows() -> list[Row]:
    """Returns the rows of the layers of encoder and decoder, which all architectures have."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    attentions = {"encoder": {"self": "self_attn"}, "decoder": {"self": "self_attn", "cross": "encoder_attn"}}
    result: list[Row] = []
    for side, kinds in attentions.items():
        path, tensor = f"{side}_layers", f"model.{side}.layers.{{}}"
        for kind, name in kinds.items():
            result += projections(f"{path}/{kind}_attention", f"{tensor}.{name}", *names)
            result += norm(f"{path}/{kind}_attention_residual/norm", f"{tensor}.{name}_layer_norm")
        result += feed_forward(f"{path}/feed_forward", f"{tensor}.fc1", f"{tensor}.fc2")
        result += norm(f"{path}/feed_forward_residual/norm", f"{tensor}.final_layer_norm")
    return result
