"""Other models on a mesh as on one device: their stacks may lie inside other modules, their units be gated."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.models import (
    GPT,
    T5,
    BertConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    LongEncoder,
    LongEncoderConfig,
    Reformer,
    ReformerConfig,
    SanCTC,
    SanCTCConfig,
    T5Config,
    Transformer,
    TransformerConfig,
)
from tfx_jax.models.bert import BertPretraining
from tfx_jax.nn import AttentionConfig, AttentionOptions, ExpertsConfig
from tfx_jax.tasks.sequence.long_range import long_range_loss
from tfx_jax.tasks.speech.speech_recognition import recognition_loss
from tfx_jax.tasks.text.bert_pretraining import pretraining_loss
from tfx_jax.tasks.text.language_modeling import language_model_loss
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding.strategies import make_mesh, shard_batch, shard_training

B, T, V = 8, 8, 24
SIZES = {"vocab_size": V, "num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 32, "dropout_rate": 0.1}
DROPOUT = {"attention_dropout_rate": 0.1, "max_length": T}


def text(low=1):
    return np.random.default_rng(0).integers(low, V, (B, T)).astype(np.int32)


def chosen():
    weights = np.zeros((B, T), np.float32)
    weights[:, 3] = 1
    return {
        "tokens": text(),
        "token_type_ids": np.zeros((B, T), np.int32),
        "token_mask": np.arange(T) < np.arange(4, 4 + B)[:, None],
        "targets": text(),
        "weights": weights,
        "next_sentence_label": np.arange(B, dtype=np.int32) % 2,
        "row_weights": np.ones(B, np.float32),
    }


def passages():
    sides = {"tokens": text() * (np.arange(T) < np.arange(3, 3 + B)[:, None]), "other_tokens": text(0)}
    return sides | {"label": np.arange(B, dtype=np.int32) % 2, "row_weights": np.ones(B, np.float32)}


def speech():
    rng = np.random.default_rng(0)
    return {
        "frames": rng.normal(size=(B, 2 * T, 5)).astype(np.float32),
        "num_frames": np.arange(2 * T - B, 2 * T, dtype=np.int32),
        "labels": rng.integers(1, V, (B, 3)).astype(np.int32),
        "num_labels": np.arange(B, dtype=np.int32) % 3,
    }


# A model, its configuration, its loss, a batch; a matrix that "fsdp" and "tensor" divide; and a mesh.
FAMILIES = {
    "gpt": (
        GPT,
        GPTConfig(**SIZES, **DROPOUT | {"attention_dropout_rate": 0.0}),  # ring attention has none
        language_model_loss,
        lambda: {"inputs": text(), "targets": text(), "weights": np.ones((B, T), np.float32)},
        ("decoder_layers", "feed_forward", "up"),
        {"fsdp": 2, "sequence": 2, "tensor": 2},
    ),
    "llama": (
        Llama,
        LlamaConfig(**SIZES, num_kv_heads=2, qk_norm="all", norms="both"),
        language_model_loss,
        lambda: {"inputs": text(), "targets": text(), "weights": np.ones((B, T), np.float32)},
        ("decoder_layers", "feed_forward", "gate"),
        {"fsdp": 2, "sequence": 2, "tensor": 2},
    ),
    "deepseek": (
        Llama,
        LlamaConfig(
            **SIZES | {"num_layers": 4},
            num_dense_layers=1,
            experts=ExpertsConfig(num_experts=4, every=1, num_groups=4, shared_d_ff=16),
            num_kv_heads=1,
            use_value_norm=True,
            query_rank=8,
            attention=AttentionConfig("latent", AttentionOptions(rope_size=2, latent_size=8, value_size=6)),
        ),
        language_model_loss,
        lambda: {"inputs": text(), "targets": text(), "weights": np.ones((B, T), np.float32)},
        ("decoder_layers", "self_attention", "attention_fn", "key_up"),
        {"expert": 2, "fsdp": 2, "tensor": 2},
    ),
    "bert": (
        BertPretraining,
        BertConfig(**SIZES, **DROPOUT),
        pretraining_loss,
        chosen,
        ("bert", "encoder_layers", "feed_forward", "up"),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ),
    "t5": (
        T5,
        T5Config(**SIZES, d_k=4, activation="gelu_tanh", is_gated=True, is_tied=False),
        translation_loss,
        lambda: {"source": text(), "target": text()},
        ("decoder_layers", "feed_forward", "gate"),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ),
    "switch": (
        Transformer,
        TransformerConfig(
            **SIZES,
            attention=AttentionConfig("window,dense", AttentionOptions(window=3)),
            experts=ExpertsConfig(num_experts=4, every=1, num_groups=4, shared_d_ff=16, use_shared_gate=True),
        ),
        translation_loss,
        lambda: {"source": text(), "target": text()},
        ("decoder_layers", "layers", 1, "feed_forward", "experts", "up"),
        {"expert": 4, "tensor": 2},
    ),
    "long_encoder": (
        LongEncoder,
        LongEncoderConfig(**SIZES, num_sequences=2, labels=("a", "b")),
        long_range_loss,
        passages,
        ("encoder_layers", "feed_forward", "up"),
        {"fsdp": 2, "sequence": 2, "tensor": 2},
    ),
    "reformer": (
        Reformer,
        ReformerConfig(**SIZES, **DROPOUT, num_buckets=4, chunk_size=2, feed_forward_chunk_size=4),
        language_model_loss,
        lambda: {"inputs": text(), "targets": text(), "weights": np.ones((B, T), np.float32)},
        ("feed_forward_layers", "feed_forward", "up"),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ),
    "san_ctc": (
        SanCTC,
        SanCTCConfig(**SIZES, attention_dropout_rate=0.1, num_features=5, subsampling=2),
        recognition_loss,
        speech,
        ("encoder_layers", "feed_forward", "up"),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ),
}


SHARES = {
    "switch": (1, 1, 16, 16),  # of one repetition, four experts and two groups of hidden units
    "deepseek": (3, 2, 4, 2),  # of four heads and eight features of a latent
}


def laid_out(family, mesh):
    model, config, loss_fn, *_ = FAMILIES[family]
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=2, peak_learning_rate=0.01), config.d_model)
    return shard_training(mesh, lambda: model(config, rngs=nnx.Rngs(params=0)), loss_fn, optimizer)


def matrix_of(family, params):
    *path, name = FAMILIES[family][4]
    return functools.reduce(lambda tree, key: tree[key], path, params)[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_in_a_stack_is_divided_wherever_the_stack_lies(family):
    matrix = matrix_of(family, laid_out(family, make_mesh(**FAMILIES[family][5])).abstract_state.params)
    assert matrix.sharding.shard_shape(matrix.shape) == SHARES.get(family, (2, 8, 16))


def train(family, mesh):
    training = laid_out(family, mesh)
    state, losses = training.first_state(), []
    batch = shard_batch(FAMILIES[family][3](), mesh)
    for _ in range(4):
        state, metrics = training.step_fn(state, batch, jax.random.key(3))
        losses.append(float(metrics.means["loss"].mean))
    return state, losses


@pytest.mark.parametrize(
    "family",
    [
        "gpt",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("deepseek", "bert", "t5", "san_ctc", "switch", "long_encoder", "reformer")
        ),
    ],
)
def test_training_on_a_mesh_is_that_on_one_device(family):
    state, losses = train(family, make_mesh(**FAMILIES[family][5]))
    _, expected = train(family, make_mesh(1))
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses, expected, atol=2e-5)
    matrix = matrix_of(family, state.params)
    assert matrix.sharding.shard_shape(matrix.shape) == SHARES.get(family, (2, 8, 16))
