r"""Text, byte by byte: which section of its article a passage of up to 4,000 bytes is from, with any attention.

Result: not yet run

The text task of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006) asks of reviews of films, byte by
byte, whether they praise: on the test set of IMDb they have 64.27 % for a Transformer, 65.90 for linear attention, the
best of ten, 65.40 for Performer and 52.98 for local attention. Those reviews are not read here. A passage of WikiText-2
is to be told by the heading of its section: Aftermath, Background, Description, History, Legacy, Plot, Production or
Reception. Its letters say little, so words have to be put together first, and few of these decide; articles of the
validation split are none of the training's. No figure of the paper can be compared.

    tfx-jax train --config=lra_text --workdir=runs/lra_text --config.task.data.data_dir=DIR
    tfx-jax plan --config=lra_text:paper --topology=v5e:2x2
    python -m experiments.benchmarks.long_range --workdir=runs/lra --data_dir=DIR --tasks=text

DIR holds train.txt.gz and valid.txt.gz, the articles of WikiText-2: 666 and 77 passages of 1,000 to 4,000 bytes, which
is little to learn from, or 7,819 and 869 of 128 to 256 bytes, of which two stand in both, where articles begin alike.
Those of WikiText-103, in the same format, have nearly fifty times as many. Variants: `paper`, the sizes and 20,000 steps of the authors; `small`, for a CPU core and the short
passages; `test`, on built-in sentences. What differs from the published protocol is in `lra_listops`.

Measured: not yet run.
"""

from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.tasks.long_range import LongRangeConfig
from tfx_jax.tasks.long_range_data import SectionData
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    data = SectionData(dataset="files", train_file="train.txt.gz", validation_file="valid.txt.gz")
    model = LongEncoderConfig(num_layers=4, d_model=256, num_heads=4, d_ff=1_024)
    config = ExperimentConfig(model, LongRangeConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.weight_decay, optimizer.clip_norm = "adamw", 0.1, 1.0
    optimizer.schedule, optimizer.warmup_steps = "cosine", 1_000
    optimizer.peak_learning_rate = 0.05 / 8_000**0.5  # that of the authors' schedule, after its 8,000 steps of warm-up
    config.num_steps, config.eval_every, config.log_every, config.checkpoint_every = 20_000, 500, 50, 500
    if variant == "test":
        return tiny_variant(config)
    if variant == "small":
        data.min_length, data.max_length, data.tokens_per_batch = 128, 256, 4_096
        model.num_layers, model.d_model, model.d_ff = 2, 64, 128
        optimizer.peak_learning_rate, optimizer.warmup_steps = 2e-3, 100
        config.num_steps, config.eval_every, config.checkpoint_every = 1_000, 200, 200
    elif variant != "paper":
        raise ValueError(f"unknown variant {variant!r}; there are small, paper, test")
    return config
