r"""Attention finds the few events that decide, where a mean of all events cannot: a synthetic cohort.

Result: not yet run
"""

from tfx_jax.models.seq2vec import Seq2VecConfig
from tfx_jax.tasks.event_classification import EventClassificationConfig
from tfx_jax.tasks.event_data import EventData
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = Seq2VecConfig(dropout_rate=0.0)  # there are more records than it needs
    config = ExperimentConfig(model, EventClassificationConfig(EventData()))
    optimizer = config.optimizer
    optimizer.schedule, optimizer.peak_learning_rate, optimizer.warmup_steps = "cosine", 1e-2, 100
    config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 600, 200, 200, 50
    if variant == "test":
        return tiny_variant(config)
    if variant != "small":
        raise ValueError(f"unknown variant {variant!r}; there are small, test")
    return config
