r"""The Transformer as a constituency parser: 4 layers on a treebank (variants `wsj`, the paper's, and `craft`).

Result: not yet run
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks.parsing import ParsingConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "craft") -> ExperimentConfig:
    if variant not in ("craft", "wsj", "test"):
        raise ValueError(f"unknown variant {variant!r}; there are craft, wsj, test")
    model, task = TransformerConfig(num_layers=4), ParsingConfig()
    config, data = ExperimentConfig(model, task), task.data
    data.dataset = "files"
    data.train_file, data.validation_file = "train.ptb.gz", "dev.ptb.gz"
    model.d_model, model.num_heads, model.d_ff = 128, 4, 512
    model.vocab_size = 4_000
    model.pre_norm = True
    model.dropout_rate = 0.1
    data.max_length, data.tokens_per_batch = 128, 1_024
    task.write_tags = True
    task.decoding.beam_size = 1
    config.optimizer.peak_learning_rate = 0.002
    config.optimizer.warmup_steps = 500
    config.num_steps, config.eval_every, config.checkpoint_every = 12_000, 2_000, 500
    return tiny_variant(config) if variant == "test" else config
