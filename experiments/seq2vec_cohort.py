r"""Attention finds the few events that decide, where a mean of all events cannot: a synthetic cohort.

Result: AUROC 0.9999 with attention, 0.7959 as a mean; 96 % of the attention is on planted events

Built-in records of 30 to 50 events, of 20 variables, at any time. A record has the label 1 if and only if variable 0
was found above 0.5 between the times 0.3 and 0.6, which is so for 44 % of them; no event tells that alone by its
variable, its value or its time, and each of these is in the vector of an event as a summand. So the additive score,
which has a hidden layer, has to find who goes together. A classifier that reads the mean of all events sees how many
there are of each kind. No download, and no published figure. The model is in the spirit of Rajkomar et al. (2018).

    tfx-jax train --config=seq2vec_cohort --workdir=runs/cohort
    tfx-jax train --config=seq2vec_cohort --workdir=runs/mean --config.model.pooling=mean
    tfx-jax train --config=seq2vec_cohort --workdir=runs/hops --config.model.pooling=structured
    tfx-jax attend --workdir=runs/cohort --row=1

The last one lists the events of a record of the validation split, those with most of the attention first: what share,
which variable, what was found, when. "structured" (Lin et al., 2017) has `num_hops` rows of attention, and `penalty`
keeps them apart; of runs/hops, the share is the mean of the rows, and the share in each row is listed as well.
Variants: `small`, for two CPU cores; `test`.

Measured: `small`, seed 0, 600 steps of 64 records, under three minutes on two cores that many others shared; 1,000
records of the validation split, 436 of label 1, with the 95 % interval of the bootstrap. What the attention does is of
those 436 records: the share of their planted events, one to four in each, on average and at least, and how often a
planted event has the largest share.

    pooling    AUROC                         share of the planted events    largest share is planted
    additive   0.9999 (0.9998 to 1.0000)     0.960 (at least 0.58)          100 %
    mean       0.7959 (0.7692 to 0.8215)

Of "structured" with its four rows, likewise, but on one core; the share is that of each row, in falling order, and the
last column the mean of ||A A^T - I||_F^2. Without the penalty all rows look at the same events. With it one row finds
the planted events and the others look elsewhere, so that the mean of the rows, by which `attend` sorts, says little.

    penalty    AUROC                         share of the planted events       ||A A^T - I||_F^2
    1          0.9996 (0.9992 to 0.9999)     0.966, 0.024, 0.001 and 0.000     0.72
    0.1        0.9998 (0.9996 to 1.0000)     0.940, 0.355, 0.049 and 0.002     2.16
    0          0.9999 (0.9996 to 1.0000)     0.975, 0.974, 0.969 and 0.918     6.13
"""

from tfx_jax.models.seq2vec import Seq2VecConfig
from tfx_jax.tasks import EventClassificationConfig, EventData
from tfx_jax.training import ExperimentConfig, tiny_variant


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
