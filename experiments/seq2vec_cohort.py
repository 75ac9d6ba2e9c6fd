r"""Attention finds the few events that decide, where a mean of all events cannot: a synthetic cohort.

Result: AUROC 0.9999 with attention, 0.7959 as a mean; 96 % of the attention is on planted events

Built-in records of 30 to 50 events, of 20 variables, at any time. A record has the label 1 if and only if variable 0
was found above 0.5 between the times 0.3 and 0.6, which is so for 44 % of them; no event tells that alone by its
variable, its value or its time, and each of these is in the vector of an event as a summand. So the additive score,
which has a hidden layer, has to find who goes together. A classifier that reads the mean of all events sees how many
there are of each kind. No download, and no published figure. The model is in the spirit of Rajkomar et al. (2018).

    tfx-jax train --config=seq2vec_cohort --workdir=runs/cohort
    tfx-jax train --config=seq2vec_cohort --workdir=runs/mean --config.model.pooling=mean
    tfx-jax attend --workdir=runs/cohort --row=1

The last one lists the events of a record of the validation split, those with most of the attention first: what share,
which variable, what was found, when. Variants: `small`, for two CPU cores; `test`.

Measured: `small`, seed 0, 600 steps of 64 records, under three minutes on two cores that many others shared; 1,000
records of the validation split, 436 of label 1, with the 95 % interval of the bootstrap. What the attention does is of
those 436 records: the share of their planted events, one to four in each, on average and at least, and how often a
planted event has the largest share.

    pooling    AUROC                         share of the planted events    largest share is planted
    additive   0.9999 (0.9998 to 1.0000)     0.960 (at least 0.58)          100 %
    mean       0.7959 (0.7692 to 0.8215)
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
