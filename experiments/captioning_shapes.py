r"""Soft and hard attention describe built-in images of coloured shapes.

Result: not yet run

Measured here: not yet run.
"""

from tfx_jax.models.captioning import CaptionerConfig
from tfx_jax.tasks.captioning import CaptioningConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "soft") -> ExperimentConfig:
    config = ExperimentConfig(CaptionerConfig(vocab_size=100, channels=(16, 32, 64), d_model=64), CaptioningConfig())
    optimizer = config.optimizer
    optimizer.peak_learning_rate, optimizer.warmup_steps, optimizer.clip_norm = 2e-3, 200, 1.0
    optimizer.schedule = "cosine"
    config.num_steps, config.eval_every, config.checkpoint_every = 5_000, 500, 500
    if variant == "test":
        return tiny_variant(config)
    if variant not in ("soft", "hard"):
        raise ValueError(f"unknown variant {variant!r}; there are soft, hard, test")
    config.model.variant = variant
    return config
