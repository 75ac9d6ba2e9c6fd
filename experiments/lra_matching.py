r"""Matching, byte by byte: are two passages of up to 4,000 bytes of one article or of two? With any attention.

Result: small: 50.7 to 51.3 % of dev with seven attentions, which is chance, minutes of a busy core; paper not yet run

The retrieval task of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006) asks of two papers whether
one cites the other; each is read byte by byte by the same encoder, and only its vector meets that of the other. On the
test set of the ACL Anthology they have 57.46 % for a Transformer, 59.59 for the best of ten, a sparse one, 59.29 for
BigBird and about 53 for local, linear and Performer's attention, where guessing gives 50. Those papers are not read
here: two passages of WikiText-2 are of one article, two different ones of it, or of two articles, every second pair. No
article of the validation split is one of the training's. No figure of the paper can be compared.

    tfx-jax train --config=lra_matching --workdir=runs/lra_matching --config.task.data.data_dir=DIR
    tfx-jax plan --config=lra_matching:paper --topology=v5e:2x2
    python -m benchmarks.long_range --workdir=runs/lra --data_dir=DIR --tasks=matching

DIR holds train.txt.gz and valid.txt.gz, the articles of WikiText-2; those of WikiText-103 have the same format. 20,000
pairs are drawn for training and 2,000 for validation, always the same ones. Variants: `paper`, the authors' sizes;
`small`, for a CPU core, with passages of 256 bytes; `test`, on built-in documents. What differs from the published
protocol is in `lra_listops`.

Measured: `small`, seed 0, on a CPU core, the other one idle or at work, 1,000 steps of sixteen pairs, minutes for
each attention (`--attentions=dense,window,favor,linear,bigbird,lsh,routing`). Accuracy is that of the 2,000 pairs
of the validation split after the last step, in percent, with a standard error of 1.1; a model has 124,290 parameters;
memory is what XLA plans for a step besides parameters and optimizer.

                             accuracy  tokens/s  MiB
    favor                       51.25    29,168  204
    linear                      51.10    35,314  169
    lsh, two rounds             51.05    22,204  164
    dense                       50.75    18,856  383
    routing, 16 clusters        50.75    29,730  186
    window, 16 to each side     50.70    32,121  201
    bigbird                     50.55    24,457  255

All are at chance, and so is the training loss, 0.693 nats: 256 bytes of an article, read once by a model of this size,
do not teach what two passages have in common. What can be compared is what a step costs, not what it teaches. `paper`:
not yet run; dense attention needs 7.0 of the 15.75 GiB of each of four v5e, and 86 ms a step by the compiler's
estimate, says the plan.
"""

from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.tasks import LongRangeConfig, PassagePairData
from tfx_jax.training import ExperimentConfig, tiny_variant


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
