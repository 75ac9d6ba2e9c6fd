"""The Vision Transformer and DeiT in Hugging Face folders, without a head and as classifiers."""

from typing import Any

from tfx_jax.models.hf.folder import ACTIVATIONS, Fields, activation_field, classifier_fields
from tfx_jax.models.hf.names import Row, dense, feed_forward, norm, projections, under, vector
from tfx_jax.models.vit import ViT, ViTClassifier, ViTConfig

_LAYERS = "encoder_layers"
_POOLER = dense("pooler", "pooler.dense")

# For each architecture: our class, and the rows of its head.
HEADS: dict[str, tuple[Any, list[Row]]] = {
    "ViTModel": (ViT, []),
    "ViTForImageClassification": (ViTClassifier, dense("classifier", "classifier")),
    "DeiTModel": (ViT, []),
    "DeiTForImageClassification": (ViTClassifier, dense("classifier", "classifier")),
    "DeiTForImageClassificationWithTeacher": (
        ViTClassifier,
        [*dense("classifier", "cls_classifier"), *dense("distillation_classifier", "distillation_classifier")],
    ),
}

# Tensors of other architectures in the same file.
IGNORED = [
    r"((vit|deit)\.)?embeddings\.mask_token",
    r"((vit|deit)\.)?pooler\.dense\.(weight|bias)",
    r"(cls_|distillation_)?classifier\.(weight|bias)",
]


def _prefix(architecture: str) -> str:
    """Returns the start of the names of the encoder's tensors in a model with a head; also its "model_type"."""
    return "deit" if architecture.startswith("DeiT") else "vit"


def renamed(architecture: str) -> list[tuple[str, str]]:
    """Returns (pattern, replacement) pairs of tensor names: an encoder may be read from a folder with a head."""
    return [(rf"^{_prefix(architecture)}\.", "")] if architecture.endswith("Model") else []


def fits(architecture: str, config: ViTConfig) -> bool:
    """Returns whether a Hugging Face folder of this architecture can express a configuration."""
    tokens = config.distillation_token, config.distillation_head
    return config.attention.name == "dense" and tokens == _tokens(architecture)


def _tokens(architecture: str) -> tuple[bool, bool]:
    """Returns (distillation_token, distillation_head): whether there is such a token, and a classifier of it."""
    return architecture.startswith("DeiT"), architecture.endswith("WithTeacher")


def read_config(architecture: str, fields: Fields) -> ViTConfig:
    """Returns the configuration for the fields of a ViT."""
    d_model = fields.get("hidden_size", 768)
    fields.require(qkv_bias=True)
    if architecture.endswith("Model"):
        fields.require(pooler_act="tanh", pooler_output_size=d_model)
    classifier: dict[str, Any] = {}
    if "ForImageClassification" in architecture:
        classifier = fields.classifier_options()
    has_token, has_head = _tokens(architecture)
    return ViTConfig(
        image_size=fields.get("image_size", 224),
        patch_size=fields.get("patch_size", 16),
        num_channels=fields.get("num_channels", 3),
        num_layers=fields.get("num_hidden_layers", 12),
        d_model=d_model,
        num_heads=fields.get("num_attention_heads", 12),
        d_ff=fields.get("intermediate_size", 3072),
        dropout_rate=float(fields.get("hidden_dropout_prob", 0.0)),
        attention_dropout_rate=float(fields.get("attention_probs_dropout_prob", 0.0)),
        activation=fields.choose("hidden_act", ACTIVATIONS, "gelu"),
        layer_norm_epsilon=fields.get("layer_norm_eps", 1e-12),
        distillation_token=has_token,
        distillation_head=has_head,
        **classifier,
    )


def write_config(architecture: str, config: ViTConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a ViT."""
    classifier = {}
    if "ForImageClassification" in architecture:
        classifier = classifier_fields(config)
    return {
        "model_type": _prefix(architecture),
        "architectures": [architecture],
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "intermediate_size": 4 * config.d_model if config.d_ff is None else config.d_ff,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "hidden_act": activation_field(config.activation),
        "layer_norm_eps": config.layer_norm_epsilon,
        "qkv_bias": True,
        **classifier,
    }


def rows(architecture: str, config: ViTConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model, head = HEADS[architecture]
    distillation_token = [vector("distillation_token", "embeddings.distillation_token", num_ones=2)]
    distillation_token = distillation_token if config.distillation_token else []
    body = [
        vector("class_token", "embeddings.cls_token", num_ones=2),
        *distillation_token,
        Row("positions/table", "embeddings.position_embeddings", num_inputs=1, num_ones=1),
        Row(
            "patches/kernel",
            "embeddings.patch_embeddings.projection.weight",
            num_inputs=3,
            is_transposed=True,
            kernel_size=(config.patch_size, config.patch_size),
        ),
        vector("patches/bias", "embeddings.patch_embeddings.projection.bias"),
        *norm(f"{_LAYERS}/self_attention_residual/norm", "encoder.layer.{}.layernorm_before"),
        *projections(
            f"{_LAYERS}/self_attention",
            "encoder.layer.{}.attention",
            "attention.query",
            "attention.key",
            "attention.value",
            "output.dense",
        ),
        *norm(f"{_LAYERS}/feed_forward_residual/norm", "encoder.layer.{}.layernorm_after"),
        *feed_forward(
            f"{_LAYERS}/feed_forward", "encoder.layer.{}.intermediate.dense", "encoder.layer.{}.output.dense"
        ),
        *norm("norm", "layernorm"),
    ]
    if model is ViT:
        return [*body, *(_POOLER if config.has_pooler else [])]
    return [*under("vit", _prefix(architecture), body), *head]
