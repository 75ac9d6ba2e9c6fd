r"""ListOps of Long Range Arena: the digit that a nested list of up to 2,000 tokens comes to, with any attention.

Result: not yet run

    tfx-jax train --config=lra_listops --workdir=runs/lra_listops
    tfx-jax plan --config=lra_listops:paper --topology=v5e:2x2

Measured: not yet run.
"""

from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.tasks.long_range import LongRangeConfig
from tfx_jax.tasks.long_range_data import ListOpsData
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    data, model = ListOpsData(), LongEncoderConfig()
    config = ExperimentConfig(model, LongRangeConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.weight_decay, optimizer.clip_norm = "adamw", 0.1, 1.0
    optimizer.schedule, optimizer.warmup_steps = "cosine", 1_000
    optimizer.peak_learning_rate = 0.05 / 1_000**0.5  # where the authors' schedule has its peak
    config.num_steps, config.eval_every, config.log_every, config.checkpoint_every = 5_000, 500, 50, 500
    if variant == "test":
        return tiny_variant(config)
    if variant == "small":
        data.max_depth, data.max_args, data.min_length, data.max_length = 5, 5, 24, 64
        data.num_train, data.tokens_per_batch = 20_000, 4_096
        model.num_layers, model.d_model, model.num_heads, model.d_ff = 2, 64, 4, 128
        optimizer.peak_learning_rate, optimizer.warmup_steps = 2e-3, 100
        config.num_steps, config.eval_every, config.checkpoint_every = 1_500, 300, 300
    elif variant != "paper":
        raise ValueError(f"unknown variant {variant!r}; there are small, paper, test")
    return config
