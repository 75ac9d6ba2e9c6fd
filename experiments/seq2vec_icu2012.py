r"""Attention over the measurements of a stay in intensive care tells who will die in hospital: PhysioNet 2012.

Result: not yet run
"""

from tfx_jax.models.seq2vec import Seq2VecConfig
from tfx_jax.tasks.event_classification import EventClassificationConfig
from tfx_jax.tasks.event_data import EventData
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = Seq2VecConfig(num_knots=4, dropout_rate=0.5, event_dropout_rate=0.2)
    data = EventData(dataset="files", train_file="train.csv.gz", validation_file="dev.csv.gz")
    data.label_column = "In-hospital_death"
    data.exclude_columns = "recordid,SAPS-I,SOFA,Length_of_stay,Survival"  # known at discharge only, or other scores
    data.max_length, data.tokens_per_batch = 120, 64 * 120
    config = ExperimentConfig(model, EventClassificationConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.weight_decay = "adamw", 0.01
    optimizer.schedule, optimizer.peak_learning_rate, optimizer.warmup_steps = "cosine", 1e-2, 100
    config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 400, 50, 50, 50
    if variant == "test":
        return tiny_variant(config)
    if variant != "small":
        raise ValueError(f"unknown variant {variant!r}; there are small, test")
    return config
