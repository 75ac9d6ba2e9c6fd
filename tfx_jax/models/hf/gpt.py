"""GPT and GPT-2 in Hugging Face folders."""

import dataclasses
from typing import Any

from tfx_jax.models.gpt import GPT, GPTConfig
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field
from tfx_jax.models.hf.names import Row, norm, table, vector, with_zeros

# "gelu" of a GPT is the tanh approximation, which a GPT-2 calls "gelu_new".
_GPT1_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "swish": "swish", "silu": "swish"}


def read_gpt2_config(fields: Fields) -> GPTConfig:
    """Returns the configuration for the fields of a GPT-2."""
    fields.require(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    return GPTConfig(
        vocab_size=fields.get("vocab_size", 50_257),
        d_ff=fields.optional("n_inner", int),
        activation=fields.choose("activation_function", ACTIVATIONS, "gelu_new"),
        **_common(fields, max_length=1024),
    )


def read_gpt1_config(fields: Fields) -> GPTConfig:
    """Returns the configuration for the fields of a GPT."""
    return GPTConfig(
        vocab_size=fields.get("vocab_size", 40_478),
        pre_norm=False,
        activation=fields.choose("afn", _GPT1_ACTIVATIONS, "gelu"),
        **_common(fields, max_length=512),
    )


def _common(fields: Fields, max_length: int) -> dict[str, Any]:
    """Returns the options of GPT and GPT-2 that are in fields of the same names; `max_length` is the default of one."""
    dropout_rate, num_heads = fields.get("resid_pdrop", 0.1), fields.get("n_head", 12)
    fields.require(embd_pdrop=dropout_rate, num_attention_heads=num_heads)  # another name of n_head in transformers
    return {
        "max_length": fields.get("n_positions", max_length),
        "num_layers": fields.get("n_layer", 12),
        "d_model": fields.get("n_embd", 768),
        "num_heads": num_heads,
        "dropout_rate": float(dropout_rate),
        "attention_dropout_rate": float(fields.get("attn_pdrop", 0.1)),
        "layer_norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
    }


def with_offsets(model: GPT) -> GPT:
    """Returns an equivalent model with biases everywhere, as in Hugging Face's GPT; missing biases are 0."""
    return model if model.config.use_bias else with_zeros(model, dataclasses.replace(model.config, use_bias=True))


def write_config(config: GPTConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a GPT-2 or, without `pre_norm`, for a GPT.

    Raises:
      ValueError: if neither can express the configuration.
    """
    if config.d_k is not None and config.d_k * config.num_heads != config.d_model:
        d_k = config.d_model // config.num_heads
        raise ValueError(f"a Hugging Face GPT needs d_k = d_model / num_heads = {d_k}, got d_k={config.d_k}")
    names = ACTIVATIONS if config.pre_norm else _GPT1_ACTIVATIONS
    has_other_d_ff = config.d_ff not in (None, 4 * config.d_model)
    if config.activation not in names.values() or (not config.pre_norm and has_other_d_ff):
        raise ValueError("a Hugging Face GPT without pre_norm has d_ff = 4 * d_model, and not the exact gelu")
    common = {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_length,
        "n_layer": config.num_layers,
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "resid_pdrop": config.dropout_rate,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": config.attention_dropout_rate,
        "layer_norm_epsilon": config.layer_norm_epsilon,
    }
    if config.pre_norm:
        own = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_inner": config.d_ff}
        return own | {"activation_function": activation_field(config.activation, names)} | common
    own = {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]}
    return own | {"afn": activation_field(config.activation, names)} | common


def rows(config: GPTConfig) -> list[Row]:
    """Returns the table of names; GPT and GPT-2 differ in the names of the embeddings and in the last norm."""
    tokens, positions = ("wte", "wpe") if config.pre_norm else ("tokens_embed", "positions_embed")
    attention, feed_forward = "decoder_layers/self_attention", "decoder_layers/feed_forward"
    return [
        table("embedding/table", f"{tokens}.weight"),
        table("positions/table", f"{positions}.weight"),
        *norm("decoder_layers/self_attention_residual/norm", "h.{}.ln_1"),
        *(
            row
            for index, name in enumerate(("query", "key", "value"))
            for row in (
                Row(f"{attention}/{name}/kernel", "h.{}.attn.c_attn.weight", num_inputs=1, part=(index, 3)),
                vector(f"{attention}/{name}/bias", "h.{}.attn.c_attn.bias", part=(index, 3)),
            )
        ),
        # The matrices of this family are [inputs, outputs], those of all others are [outputs, inputs].
        Row(f"{attention}/out/kernel", "h.{}.attn.c_proj.weight", num_inputs=2),
        vector(f"{attention}/out/bias", "h.{}.attn.c_proj.bias"),
        *norm("decoder_layers/feed_forward_residual/norm", "h.{}.ln_2"),
        Row(f"{feed_forward}/up", "h.{}.mlp.c_fc.weight", num_inputs=1),
        vector(f"{feed_forward}/up_bias", "h.{}.mlp.c_fc.bias"),
        Row(f"{feed_forward}/down", "h.{}.mlp.c_proj.weight", num_inputs=1),
        vector(f"{feed_forward}/down_bias", "h.{}.mlp.c_proj.bias"),
        *(norm("norm", "ln_f") if config.pre_norm else []),
    ]
