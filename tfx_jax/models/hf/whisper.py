"""Whisper in Hugging Face folders."""

from typing import Any

from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field
from tfx_jax.models.hf.marian import layer_rows
from tfx_jax.models.hf.names import Row, norm, table, vector
from tfx_jax.models.whisper import WhisperConfig

ARCHITECTURE = "WhisperForConditionalGeneration"


def read_config(fields: Fields) -> WhisperConfig:
    """Returns the configuration for the fields of a folder's config.json."""
    fields = fields.with_defaults({"decoder_ffn_dim": 1536, "decoder_attention_heads": 6})
    num_heads, d_ff = fields.get("encoder_attention_heads", 6), fields.get("encoder_ffn_dim", 1536)
    fields.require(decoder_attention_heads=num_heads, decoder_ffn_dim=d_ff, is_encoder_decoder=True)
    # Other names of "encoder_attention_heads" in transformers.
    fields.require(num_attention_heads=num_heads, num_key_value_heads=num_heads)
    fields.require(scale_embedding=False, tie_word_embeddings=True, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    return WhisperConfig(
        vocab_size=fields.get("vocab_size", 51_865),
        num_bands=fields.get("num_mel_bins", 80),
        source_positions=fields.get("max_source_positions", 1500),
        learned_positions=fields.get("max_target_positions", 448),
        num_layers=fields.get("encoder_layers", 4),
        num_decoder_layers=fields.get("decoder_layers", 4),
        d_model=fields.get("d_model", 384),
        num_heads=num_heads,
        d_ff=d_ff,
        activation=fields.choose("activation_function", ACTIVATIONS, "gelu"),
        dropout_rate=float(fields.get("dropout", 0.0)),
        attention_dropout_rate=float(fields.get("attention_dropout", 0.0)),
        activation_dropout_rate=float(fields.get("activation_dropout", 0.0)),
        pad_id=fields.get("pad_token_id", 50_256),
        start_id=fields.get("decoder_start_token_id", 50_257),
        eos_id=fields.get("eos_token_id", 50_256),
    )


def write_config(config: WhisperConfig) -> dict[str, Any]:
    """Returns the fields of config.json."""
    c = config
    # Fields of both sides, such as "encoder_layers".
    sides = {
        f"{side}_{name}": value
        for side, num_layers in (("encoder", c.num_layers), ("decoder", c.num_decoder_layers))
        for name, value in (("layers", num_layers), ("ffn_dim", c.d_ff), ("attention_heads", c.num_heads))
    }
    return {
        "model_type": "whisper",
        "architectures": [ARCHITECTURE],
        "is_encoder_decoder": True,
        "vocab_size": c.vocab_size,
        "num_mel_bins": c.num_bands,
        "max_source_positions": c.source_positions,
        "max_target_positions": c.learned_positions,
        "d_model": c.d_model,
        **sides,
        "activation_function": activation_field(c.activation),
        "dropout": c.dropout_rate,
        "attention_dropout": c.attention_dropout_rate,
        "activation_dropout": c.activation_dropout_rate,
        "pad_token_id": c.pad_id,
        "decoder_start_token_id": c.start_id,
        "eos_token_id": c.eos_id,
    }


def rows(config: WhisperConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    del config  # all have the same
    result = [
        table("embedding/table", "model.decoder.embed_tokens.weight"),
        table("source_positions/table", "model.encoder.embed_positions.weight"),
        table("target_positions/table", "model.decoder.embed_positions.weight"),
        *norm("encoder_norm", "model.encoder.layer_norm"),
        *norm("decoder_norm", "model.decoder.layer_norm"),
        *(row for row in layer_rows() if not row.path.endswith("/key/bias")),
    ]
    for path, tensor in (("convolution", "model.encoder.conv1"), ("halving", "model.encoder.conv2")):
        kernel = Row(f"{path}/kernel", f"{tensor}.weight", 2, is_transposed=True, kernel_size=(3,))
        result += [kernel, vector(f"{path}/bias", f"{tensor}.bias")]
    return result
