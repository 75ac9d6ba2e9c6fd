"""Marian's Transformer, which the models of OPUS-MT are, in Hugging Face folders."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
from flax import nnx

from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field
from tfx_jax.models.hf.names import Row, feed_forward, linear, norm, projections, table, with_zeros
from tfx_jax.models.transformer import Transformer, TransformerConfig

# The table of sinusoids that transformers computes; ours has no end.
_MAX_POSITIONS = 1024
# Which axis of a parameter is the residual's, D, by the end of its path.
_RESIDUAL_AXES = {
    r"(query|key|value)/kernel": -3,
    "up": -2,
    r"table|out/(kernel|bias)|down|down_bias|norm/(scale|bias)": -1,
}


def read_config(fields: Fields) -> TransformerConfig:
    """From the fields of a Marian."""
    vocab_size, d_ff = fields.get("vocab_size", 58_101), fields.get("encoder_ffn_dim", 4096)
    num_heads, num_layers = fields.get("encoder_attention_heads", 16), fields.get("encoder_layers", 12)
    for name, value in (
        ("decoder_vocab_size", vocab_size),
        ("decoder_ffn_dim", d_ff),
        ("decoder_attention_heads", num_heads),
    ):
        fields.require(**{name: value})
    fields.require(
        is_encoder_decoder=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    return TransformerConfig.marian(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_decoder_layers=fields.get("decoder_layers", 12),
        d_model=fields.get("d_model", 1024),
        num_heads=num_heads,
        d_ff=d_ff,
        activation=fields.choose("activation_function", ACTIVATIONS, "gelu"),
        dropout_rate=float(fields.get("dropout", 0.1)),
        attention_dropout_rate=float(fields.get("attention_dropout", 0.0)),
        activation_dropout_rate=float(fields.get("activation_dropout", 0.0)),
        scale_embedding=fields.get("scale_embedding", False),
        pad_id=fields.get("pad_token_id", 58_100),
        start_id=fields.get("decoder_start_token_id", 58_100),
        eos_id=fields.get("eos_token_id", 0),
    )


def as_marian(model: Transformer) -> Transformer:
    """The same function as Marian's Transformer computes it: with offsets, which are 0, and all sines in front.

    Nothing but the sinusoids tells one place of the residual from another, so these may change places in all weights.

    Raises:
      ValueError: if it is none that `write_config` can express.
    """
    config = dataclasses.replace(model.config, attention_bias=True, logits_bias=True, interleaved_sinusoids=False)
    write_config(config)
    if config == model.config:
        return model
    graphdef, state = nnx.split(with_zeros(model, config))
    if model.config.interleaved_sinusoids:
        order = np.arange(config.d_model).reshape(-1, 2).T.reshape(-1)  # the even places, then the odd ones

        def moved(path: Any, leaf: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found = (axis for end, axis in _RESIDUAL_AXES.items() if re.search(f"/({end})$", name))
            axis = next(found, None)
            return leaf if axis is None else jax.device_put(np.take(np.asarray(leaf), order, axis=axis))

        state = jax.tree_util.tree_map_with_path(moved, nnx.to_pure_dict(state))
    return nnx.merge(graphdef, state)


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The fields of a Marian, for the configuration of what `as_marian` made.

    Raises:
      ValueError: for a configuration that these cannot express.
    """
    c = config
    wanted = {"pre_norm": False, "learned_positions": 0, "layer_norm_epsilon": 1e-5}
    differing = [f"{name}={value}" for name, value in wanted.items() if getattr(c, name) != value]
    differing += [
        f"{k}=d_model/num_heads" for k in ("d_k", "d_v") if getattr(c, k) not in (None, c.d_model / c.num_heads)
    ]
    if differing:
        raise ValueError(
            f"a Hugging Face MarianMTModel has {', '.join(differing)}; TransformerConfig.marian() is like this"
        )
    both = {
        f"{side}_{name}": value
        for side, num_layers in (("encoder", c.num_layers), ("decoder", c.num_decoder_layers or c.num_layers))
        for name, value in (("layers", num_layers), ("ffn_dim", c.d_ff), ("attention_heads", c.num_heads))
    }
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": _MAX_POSITIONS,
        "d_model": c.d_model,
        **both,
        "activation_function": activation_field(c.activation),
        "dropout": c.dropout_rate,
        "attention_dropout": c.attention_dropout_rate,
        "activation_dropout": c.activation_dropout_rate,
        "scale_embedding": c.scale_embedding,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "pad_token_id": c.pad_id,
        "decoder_start_token_id": c.start_id,
        "eos_token_id": c.eos_id,
        "forced_eos_token_id": c.eos_id,
        "bad_words_ids": [[c.pad_id]],
    }


def rows(_: TransformerConfig) -> list[Row]:
    """The table of names."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    attentions = {"encoder": {"self": "self_attn"}, "decoder": {"self": "self_attn", "cross": "encoder_attn"}}
    found = [table("embedding/table", "model.shared.weight")]
    for side, kinds in attentions.items():
        ours, theirs = f"{side}_layers", f"model.{side}.layers.{{}}"
        for kind, name in kinds.items():
            found += projections(f"{ours}/{kind}_attention", f"{theirs}.{name}", *names)
            found += norm(f"{ours}/{kind}_attention_residual/norm", f"{theirs}.{name}_layer_norm")
        found += feed_forward(f"{ours}/feed_forward", f"{theirs}.fc1", f"{theirs}.fc2")
        found += norm(f"{ours}/feed_forward_residual/norm", f"{theirs}.final_layer_norm")
    # A matrix of one output over there.
    return [*found, linear("logits_bias", "final_logits_bias")]
