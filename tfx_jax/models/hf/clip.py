"""CLIP and SigLIP in Hugging Face folders, and their towers alone."""

import dataclasses
from typing import Any

from tfx_jax.models.clip import Clip, ClipConfig, ImageTower, TextTower, TowerConfig
from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field
from tfx_jax.models.hf.names import Row, dense, feed_forward, linear, norm, projections, table, vector

# For each architecture: our class, whether it is a SigLIP, and whether the folder has a projection of the output.
ARCHITECTURES: dict[str, tuple[Any, bool, bool]] = {
    "CLIPModel": (Clip, False, True),
    "SiglipModel": (Clip, True, True),
    "CLIPTextModel": (TextTower, False, False),
    "CLIPTextModelWithProjection": (TextTower, False, True),
    "CLIPVisionModel": (ImageTower, False, False),
    "CLIPVisionModelWithProjection": (ImageTower, False, True),
    "SiglipTextModel": (TextTower, True, True),
    "SiglipVisionModel": (ImageTower, True, False),
}
MODEL_TYPES = {
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "clip_text_model": "CLIPTextModel",
    "clip_vision_model": "CLIPVisionModel",
    "siglip_text_model": "SiglipTextModel",
    "siglip_vision_model": "SiglipVisionModel",
}
_POSITIONS = r"(text|vision)_model\.embeddings\.position_ids"  # constants in older folders
_HEADS = (r"(text|visual)_projection\.weight", "logit_scale", "logit_bias")
# Tensors of a whole model that a tower does not read; its projection only if it has none.
_OTHERS = {Clip: (), TextTower: (r"vision_model\..*", *_HEADS), ImageTower: (r"text_model\..*", *_HEADS)}

_NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


def ignored(architecture: str) -> tuple[str, ...]:
    """Returns patterns of tensors that are not read."""
    return (_POSITIONS, *_OTHERS[ARCHITECTURES[architecture][0]])


def renamed(architecture: str) -> list[tuple[str, str]]:
    """Returns (pattern, replacement) pairs of tensor names: transformers 5 leaves out the prefix of a tower."""
    model, _, _ = ARCHITECTURES[architecture]
    side = {TextTower: "text_model", ImageTower: "vision_model"}.get(model)
    if side is None:
        return []
    # "layrnorm": as in the files.
    return [(r"^(embeddings|encoder|final_layer_norm|pre_layrnorm|post_layernorm|head)\.", rf"{side}.\g<0>")]


def fits(architecture: str, config: ClipConfig) -> bool:
    """Returns whether a folder can express a configuration."""
    model, is_siglip, has_projection = ARCHITECTURES[architecture]
    # The output of SigLIP's image tower is its pooling.
    is_pooled = model is ImageTower and is_siglip
    return config.is_siglip == is_siglip and (is_pooled or has_projection == (config.d_output is not None))


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
    """Returns the configuration for the fields of a folder; of a tower alone, the other has its default values."""
    model, is_siglip, has_projection = ARCHITECTURES[architecture]
    is_whole = bool(fields.get("text_config", {}) or fields.get("text_config_dict", {}) or model is Clip)
    text, vision = (fields.nested(f"{side}_config") if is_whole else fields for side in ("text", "vision"))
    config = ClipConfig(is_siglip=is_siglip)
    if model is not ImageTower:
        d_model, num_heads = (768, 12) if is_siglip else (512, 8)
        config.vocab_size = text.get("vocab_size", 32_000 if is_siglip else 49_408)
        config.max_length = text.get("max_position_embeddings", 64 if is_siglip else 77)
        config.eos_id = text.get("eos_token_id", 49_407)
        config.text = _read_tower(text, is_siglip, hidden_size=d_model, num_attention_heads=num_heads)
    if model is not TextTower:
        vision.require(vision_use_head=True)
        config.image_size = vision.get("image_size", 224)
        config.patch_size = vision.get("patch_size", 16 if is_siglip else 32)
        config.num_channels = vision.get("num_channels", 3)
        config.image = _read_tower(vision, is_siglip, hidden_size=768, num_attention_heads=12)
    output = text.get("projection_size", config.text.d_model) if is_siglip else fields.get("projection_dim", 512)
    return dataclasses.replace(config, d_output=output if has_projection else None)


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
    c, (model, _, _) = config, ARCHITECTURES[architecture]
    kind = "siglip" if c.is_siglip else "clip"
    size = {} if c.d_output is None else {"projection_size" if c.is_siglip else "projection_dim": c.d_output}
    own_size = {} if c.is_siglip else size  # of a SigLIP, only the text model has it
    text = {
        "model_type": f"{kind}_text_model",
        **{"vocab_size": c.vocab_size, "max_position_embeddings": c.max_length, "eos_token_id": c.eos_id},
        **size,
        **_write_tower(c.text),
    }
    vision = {
        "model_type": f"{kind}_vision_model",
        **{"image_size": c.image_size, "patch_size": c.patch_size, "num_channels": c.num_channels},
        **own_size,
        **_write_tower(c.image),
    }
    named = {"architectures": [architecture]}
    if model is not Clip:
        return {**(text if model is TextTower else vision), **named}
    return {"model_type": kind, **named, **own_size, "text_config": text, "vision_config": vision}


def _layer_rows(prefix: str, tensor: str) -> list[Row]:
    """Returns the rows of a tower's layers; paths start with `prefix`, names of tensors with `tensor`."""
    path, tensor = f"{prefix}encoder_layers", f"{tensor}.encoder.layers.{{}}"
    return [
        *projections(f"{path}/self_attention", f"{tensor}.self_attn", *_NAMES),
        *norm(f"{path}/self_attention_residual/norm", f"{tensor}.layer_norm1"),
        *feed_forward(f"{path}/feed_forward", f"{tensor}.mlp.fc1", f"{tensor}.mlp.fc2"),
        *norm(f"{path}/feed_forward_residual/norm", f"{tensor}.layer_norm2"),
    ]


def rows(architecture: str, config: ClipConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model, _, _ = ARCHITECTURES[architecture]
    if model is TextTower:
        return _text_rows("", config)
    if model is ImageTower:
        return _image_rows("", config)
    result = [*_text_rows("text/", config), *_image_rows("image/", config)]
    if config.is_siglip:
        return [*result, vector("log_scale", "logit_scale"), vector("bias", "logit_bias")]
    return [*result, Row("log_scale", "logit_scale", is_scalar=True)]


def _text_rows(prefix: str, config: ClipConfig) -> list[Row]:
    """Returns the rows of the text tower, whose parameters' paths start with `prefix`."""
    result = [
        table(f"{prefix}embedding/table", "text_model.embeddings.token_embedding.weight"),
        table(f"{prefix}positions/table", "text_model.embeddings.position_embedding.weight"),
        *_layer_rows(prefix, "text_model"),
        *norm(f"{prefix}norm", "text_model.final_layer_norm"),
    ]
    if config.is_siglip:
        return [*result, *dense(f"{prefix}projection", "text_model.head")]
    projection = [linear(f"{prefix}projection/kernel", "text_projection.weight")]
    return result if config.d_output is None else [*result, *projection]


def _image_rows(prefix: str, config: ClipConfig) -> list[Row]:
    """Returns the rows of the image tower, whose parameters' paths start with `prefix`."""
    patch = (config.patch_size, config.patch_size)
    patches = "vision_model.embeddings.patch_embedding"
    result = [
        Row(f"{prefix}patches/kernel", f"{patches}.weight", 3, is_transposed=True, kernel_size=patch),
        table(f"{prefix}positions/table", "vision_model.embeddings.position_embedding.weight"),
        *_layer_rows(prefix, "vision_model"),
        *norm(f"{prefix}norm", "vision_model.post_layernorm"),
    ]
    if not config.is_siglip:
        return [
            *result,
            vector(f"{prefix}class_token", "vision_model.embeddings.class_embedding"),
            *norm(f"{prefix}embedding_norm", "vision_model.pre_layrnorm"),
            *([] if config.d_output is None else [linear(f"{prefix}projection/kernel", "visual_projection.weight")]),
        ]
    head, size = "vision_model.head", config.image.d_model
    pooling: list[Row] = []
    for index, name in enumerate(("query", "key", "value")):
        place: dict[str, Any] = {"outputs": range(index * size, (index + 1) * size), "num_outputs": 3 * size}
        path, tensor = f"{prefix}pooling/attention/{name}", f"{head}.attention.in_proj"
        pooling.append(dataclasses.replace(linear(f"{path}/kernel", f"{tensor}_weight"), **place))
        pooling.append(vector(f"{path}/bias", f"{tensor}_bias", **place))
    return [
        *result,
        vector(f"{prefix}patches/bias", f"{patches}.bias"),
        vector(f"{prefix}pooling/probe", f"{head}.probe", num_ones=2),
        *pooling,
        linear(f"{prefix}pooling/attention/out/kernel", f"{head}.attention.out_proj.weight", 2),
        vector(f"{prefix}pooling/attention/out/bias", f"{head}.attention.out_proj.bias"),
        *norm(f"{prefix}pooling/feed_forward_residual/norm", f"{head}.layernorm"),
        *feed_forward(f"{prefix}pooling/feed_forward", f"{head}.mlp.fc1", f"{head}.mlp.fc2"),
    ]
