"""CLIP and SigLIP in Hugging Face folders."""

import dataclasses
from typing import Any

from tfx_jax.models.clip import ClipConfig, TowerConfig
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field
from tfx_jax.models.hf.names import Row, dense, feed_forward, linear, norm, projections, table, vector

ARCHITECTURES = {"CLIPModel": False, "SiglipModel": True}  # whether it is a SigLIP
MODEL_TYPES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
IGNORED = (r"(text|vision)_model\.embeddings\.position_ids",)  # constants in older folders

_NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


def fits(architecture: str, config: ClipConfig) -> bool:
    """Returns whether a Hugging Face folder of this architecture can express a configuration."""
    return config.is_siglip == ARCHITECTURES[architecture]


def _read_tower(fields: Fields, is_siglip: bool, **defaults: int) -> TowerConfig:
    """Returns the configuration of a tower for its fields."""
    return TowerConfig(
        num_layers=fields.get("num_hidden_layers", 12),
        d_model=fields.get("hidden_size", defaults["hidden_size"]),
        num_heads=fields.get("num_attention_heads", defaults["num_attention_heads"]),
        d_ff=fields.get("intermediate_size", 4 * defaults["hidden_size"]),
        activation=fields.choose("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh" if is_siglip else "quick_gelu"),
        attention_dropout_rate=float(fields.get("attention_dropout", 0.0)),
        layer_norm_epsilon=fields.get("layer_norm_eps", 1e-6 if is_siglip else 1e-5),
    )


def read_config(architecture: str, fields: Fields) -> ClipConfig:
    """Returns the configuration for the fields of a folder's config.json."""
    is_siglip = ARCHITECTURES[architecture]
    text, vision = fields.nested("text_config"), fields.nested("vision_config")
    d_model, num_heads = (768, 12) if is_siglip else (512, 8)
    vision.require(vision_use_head=True)
    config = ClipConfig(
        is_siglip=is_siglip,
        vocab_size=text.get("vocab_size", 32_000 if is_siglip else 49_408),
        max_length=text.get("max_position_embeddings", 64 if is_siglip else 77),
        eos_id=text.get("eos_token_id", 49_407),
        image_size=vision.get("image_size", 224),
        patch_size=vision.get("patch_size", 16 if is_siglip else 32),
        num_channels=vision.get("num_channels", 3),
        text=_read_tower(text, is_siglip, hidden_size=d_model, num_attention_heads=num_heads),
        image=_read_tower(vision, is_siglip, hidden_size=768, num_attention_heads=12),
    )
    output = text.get("projection_size", config.text.d_model) if is_siglip else fields.get("projection_dim", 512)
    return dataclasses.replace(config, d_output=output)


def _write_tower(config: TowerConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a tower."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": activation_field(config.activation),
        "attention_dropout": config.attention_dropout_rate,
        "layer_norm_eps": config.layer_norm_epsilon,
    }


def write_config(architecture: str, config: ClipConfig) -> dict[str, Any]:
    """Returns the fields of config.json."""
    c = config
    kind = next(kind for kind, name in MODEL_TYPES.items() if name == architecture)
    size = {"projection_size": c.d_output} if c.is_siglip else {"projection_dim": c.d_output}
    size_of_both = {} if c.is_siglip else size  # of a SigLIP, only the text model has it
    text = {"vocab_size": c.vocab_size, "max_position_embeddings": c.max_length, "eos_token_id": c.eos_id}
    vision = {"image_size": c.image_size, "patch_size": c.patch_size, "num_channels": c.num_channels}
    return {
        "model_type": kind,
        "architectures": [architecture],
        **size_of_both,
        "text_config": {"model_type": f"{kind}_text_model", **text, **size, **_write_tower(c.text)},
        "vision_config": {
            "model_type": f"{kind}_vision_model",
            **vision,
            **size_of_both,
            **_write_tower(c.image),
        },
    }


def _layer_rows(path: str, tensor: str) -> list[Row]:
    """Returns the rows of the layers of the tower at `path`; `tensor` is the start of the tensors' names."""
    path, tensor = f"{path}/encoder_layers", f"{tensor}.encoder.layers.{{}}"
    return [
        *projections(f"{path}/self_attention", f"{tensor}.self_attn", *_NAMES),
        *norm(f"{path}/self_attention_residual/norm", f"{tensor}.layer_norm1"),
        *feed_forward(f"{path}/feed_forward", f"{tensor}.mlp.fc1", f"{tensor}.mlp.fc2"),
        *norm(f"{path}/feed_forward_residual/norm", f"{tensor}.layer_norm2"),
    ]


def rows(config: ClipConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    patch = (config.patch_size, config.patch_size)
    patches = "vision_model.embeddings.patch_embedding"
    result = [
        table("text/embedding/table", "text_model.embeddings.token_embedding.weight"),
        table("text/positions/table", "text_model.embeddings.position_embedding.weight"),
        *_layer_rows("text", "text_model"),
        *norm("text/norm", "text_model.final_layer_norm"),
        Row("image/patches/kernel", f"{patches}.weight", 3, is_transposed=True, kernel_size=patch),
        table("image/positions/table", "vision_model.embeddings.position_embedding.weight"),
        *_layer_rows("image", "vision_model"),
        *norm("image/norm", "vision_model.post_layernorm"),
    ]
    if not config.is_siglip:
        return [
            *result,
            linear("text/projection/kernel", "text_projection.weight"),
            vector("image/class_token", "vision_model.embeddings.class_embedding"),
            *norm("image/embedding_norm", "vision_model.pre_layrnorm"),
            linear("image/projection/kernel", "visual_projection.weight"),
            Row("log_scale", "logit_scale", is_scalar=True),
        ]
    head, size = "vision_model.head", config.image.d_model
    pooling: list[Row] = []
    for index, name in enumerate(("query", "key", "value")):
        columns = (index * size, (index + 1) * size, 3 * size)
        path, tensor = f"image/pooling/attention/{name}", f"{head}.attention.in_proj"
        pooling.append(dataclasses.replace(linear(f"{path}/kernel", f"{tensor}_weight"), columns=columns))
        pooling.append(vector(f"{path}/bias", f"{tensor}_bias", columns=columns))
    return [
        *result,
        *dense("text/projection", "text_model.head"),
        vector("image/patches/bias", f"{patches}.bias"),
        vector("image/pooling/probe", f"{head}.probe", num_ones=2),
        *pooling,
        linear("image/pooling/attention/out/kernel", f"{head}.attention.out_proj.weight", 2),
        vector("image/pooling/attention/out/bias", f"{head}.attention.out_proj.bias"),
        *norm("image/pooling/feed_forward_residual/norm", f"{head}.layernorm"),
        *feed_forward("image/pooling/feed_forward", f"{head}.mlp.fc1", f"{head}.mlp.fc2"),
        vector("log_scale", "logit_scale"),
        vector("bias", "logit_bias"),
    ]
