"""BigBird in Hugging Face folders: a BERT with BigBird's attention, as transformers computes it in evaluation."""

from typing import Any

from tfx_jax.models.bert import Bert, BertConfig, BertMaskedLM, BertPretraining, BertTagger
from tfx_jax.models.hf import bert
from tfx_jax.models.hf.folder import Fields
from tfx_jax.models.hf.names import Row, dense
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions

_POOLER = dense("pooler", "pooler")

# For each architecture: our class, and the rows of its head.
HEADS: dict[str, tuple[Any, list[Row]]] = {
    "BigBirdModel": (Bert, []),
    "BigBirdForMaskedLM": (BertMaskedLM, bert.MASKED_LM),
    "BigBirdForPreTraining": (BertPretraining, [*bert.MASKED_LM, *bert.NEXT_SENTENCE]),
    "BigBirdForTokenClassification": (BertTagger, bert.CLASSIFIER),
}

IGNORED = [*bert.IGNORED, r"(bert\.)?pooler\.(weight|bias)"]
COPIES = bert.COPIES


def renamed(architecture: str) -> list[tuple[str, str]]:
    """Returns (pattern, replacement) pairs of tensor names: an encoder may be read from a folder with a head."""
    return [(r"^bert\.", "")] if architecture == "BigBirdModel" else []


def fits(config: BertConfig) -> bool:
    """Returns whether a configuration has dense attention, or BigBird's with the options that `_attention` sets."""
    options = config.attention.options
    if config.attention.name == "dense":
        return bert.fits(config)
    if config.attention.name != "bigbird" or config.max_global_tokens or config.first_position:
        return False
    return config.attention == _attention(
        block_size=options.block_size or 1, num_random_blocks=(options.first_block_times or 1) - 1
    )


def _attention(block_size: int, num_random_blocks: int) -> AttentionConfig:
    """Returns the attention of transformers in evaluation.

    The first and the last block are global. Each random block is replaced by one more copy of the first block, hence
    `first_block_times`. Sequences of up to `dense_length` tokens get dense attention.
    """
    options = AttentionOptions(
        block_size=block_size,
        num_global_blocks=1,
        num_last_global_blocks=1,
        num_window_blocks=3,
        num_random_blocks=0,
        first_block_times=1 + num_random_blocks,
        dense_length=(5 + 2 * num_random_blocks) * block_size,
    )
    return AttentionConfig("bigbird", options)


def read_config(architecture: str, fields: Fields) -> BertConfig:
    """Returns the configuration for the fields of a BigBird."""
    fields.require(is_decoder=False, add_cross_attention=False, use_bias=True, rescale_embeddings=False)
    defaults = {"vocab_size": 50_358, "max_position_embeddings": 4_096, "hidden_act": "gelu_new"}
    config = bert.read_sizes(architecture, fields, **defaults)
    kinds = {"block_sparse": "bigbird", "original_full": "dense"}
    if fields.choose("attention_type", kinds, "block_sparse") == "bigbird":
        config.attention = _attention(fields.get("block_size", 64), fields.get("num_random_blocks", 3))
    return config


def write_config(architecture: str, config: BertConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a BigBird."""
    options = config.attention.options
    fields = bert.write_config(architecture, config) | {"model_type": "big_bird"}
    if config.attention.name == "dense":
        return fields | {"attention_type": "original_full"}
    return fields | {
        "attention_type": "block_sparse",
        "block_size": options.block_size,
        "num_random_blocks": (options.first_block_times or 1) - 1,
    }


def rows(architecture: str, config: BertConfig) -> list[Row]:
    """Returns the table of names: which tensor of a folder holds which parameter."""
    model, head = HEADS[architecture]
    return bert.table_of(model, config, "bert", bert.BODY, _POOLER, head, "cls.predictions.decoder")
