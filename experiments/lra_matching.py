r"""Matching, byte by byte: are two passages of up to 4,000 bytes of one article or of two? With any attention.

Result: not yet run

The retrieval task of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006) asks of two papers whether
one cites the other; each is read byte by byte by the same encoder, and only its vector meets that of the other. On the
test set of the ACL Anthology they have 57.46 % for a Transformer, 59.59 for the best of ten, a sparse one, 59.29 for
BigBird and about 53 for local, linear and Performer's attention, where guessing gives 50. Those papers are not read
here: two passages of WikiText-2 are of one article, two different ones of it, or of two articles, every second pair. No
article of the validation split is one of the training's. No figure of the paper can be compared.

    tfx-jax train --config=lra_matching --workdir=runs/lra_matching --config.task.data.data_dir=DIR
    tfx-jax plan --config=lra_matching:paper --topology=v5e:2x2
    python -m experiments.benchmarks.long_range --workdir=runs/lra --data_dir=DIR --tasks=matching

DIR holds train.txt.gz and valid.txt.gz, the articles of WikiText-2; those of WikiText-103 have the same format. 20,000
pairs are drawn for training and 2,000 for validation, always the same ones. Variants: `paper`, the authors' sizes;
`small`, for a CPU core, with passages of 256 bytes; `test`, on built-in documents. What differs from the published
protocol is in `lra_listops`.

Measured: not yet run. On paper, `paper` with dense attention needs 7.0 of the 15.75 GiB of each of four v5e, and 86 ms
a step by the compiler's estimate, says the plan.
"""

from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.tasks.long_range import LongRangeConfig
from tfx_jax.tasks.long_range_data import PassagePairData
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    data = PassagePairData(dataset="files", train_file="train.txt.gz", validation_file="valid.txt.gz")
    model = LongEncoderConfig(num_layers=4, d_model=128, num_heads=4, d_ff=512)
    config = ExperimentConfig(model, LongRangeConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.weight_decay, optimizer.clip_norm = "adamw", 0.1, 1.0
    optimizer.schedule, optimizer.warmup_steps = "cosine", 500
    optimizer.peak_learning_rate = 0.05 / 8_000**0.5  # that of the authors' schedule, after its 8,000 steps of warm-up
    config.num_steps, config.eval_every, config.log_every, config.checkpoint_every = 5_000, 500, 50, 500
    if variant == "test":
        return tiny_variant(config)
    if variant == "small":
        data.min_length, data.max_length, data.tokens_per_batch = 256, 256, 4_096
        model.num_layers, model.d_model, model.d_ff = 2, 64, 128
        optimizer.peak_learning_rate, optimizer.warmup_steps = 2e-3, 100
        config.num_steps, config.eval_every, config.checkpoint_every = 1_000, 200, 200
    elif variant != "paper":
        raise ValueError(f"unknown variant {variant!r}; there are small, paper, test")
    return config
