r"""A small Transformer on small_parallel_enja, 50,000 short English-Japanese pairs (variants `enja` and `jaen`).

Result: dev BLEU 41.37 Ja-En and 39.68 En-Ja in 13,000 steps, two hours of a core; in 7,000 39.94 and 37.87

The corpus (github.com/odashi/small_parallel_enja) is an extract of the Tanaka corpus, tokenized, 4 to 16 words a
sentence. The sizes are a textbook's for this corpus (3 + 3 layers, 4 heads, d_model 128, d_ff 256: yusugomori's
`deeplearning-keras-tf2-torch`), label smoothing the paper's; the learning rate falls to zero. It prints no BLEU; an RNN
with attention is reported at about 37 without beam search, its direction not stated.

    tfx-jax train --config=transformer_enja:jaen --workdir=runs/jaen --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/jaen

DIR holds train.en.gz, train.ja.gz, dev.en and dev.ja.

Measured of `jaen`, seed 0, in 59 minutes on one core of an Intel Xeon beside other work (2,677 target tokens a second):
tokenized BLEU on the 500 lines of dev, beam 4. At last **39.94** (sacreBLEU 39.90, 17.0 % exactly right); the mean of
the last five checkpoints, each 250 steps apart, has 39.15. The loss is smoothed, in nats, the mean of 200 steps.

    step            1,000  2,000  3,000  4,000  5,000  6,000  7,000
    training loss    3.61   2.95   2.66   2.51   2.39   2.29   2.21
    dev BLEU        16.87  27.01  32.68  35.35  37.65  38.68  39.94

Measured of `enja`, seed 0, in 95 minutes on one core of an AMD EPYC with AVX2 beside other work (2,303 target tokens a
second): **37.87** at last (sacreBLEU by characters 41.85, 4.0 % exactly right); the mean of the last five has 37.75.

    step            1,000  2,000  3,000  4,000  5,000  6,000  7,000
    training loss    3.24   2.77   2.56   2.43   2.29   2.25   2.20
    dev BLEU        18.49  28.03  31.69  34.45  34.17  36.79  37.87

With 13,000 steps (`--config.num_steps=13000`), whose learning rate falls for longer, both are better; seed 0, each on
one core of an AMD EPYC (AVX-512) beside other work. `jaen`, in 122 minutes (2,410 target tokens a second): **41.37** at
last (sacreBLEU 41.44, 18.8 % exactly right), the mean of the last five checkpoints 40.99. `enja`, in 111 minutes
(3,613): **39.68** (sacreBLEU by characters 43.84, 4.6 % exactly right), the mean of the last five 39.55.

    step                1,000  3,000  5,000  7,000  9,000 11,000 12,000 13,000
    Ja-En training loss  3.62   2.71   2.48   2.35   2.21   2.13   2.09   2.06
          dev BLEU      15.44  30.55  36.42  36.95  39.44  40.23  40.84  41.37
    En-Ja training loss  3.29   2.58   2.41   2.32   2.20   2.14   2.10   2.08
          dev BLEU      17.64  30.85  34.09  35.93  36.49  38.21  38.66  39.68

More steps do not help En-Ja further: 16,000 (seed 0, 136 minutes of a core, 3,604 target tokens a second) gave
**39.38** at last (sacreBLEU by characters 43.21), 39.68 the mean of the last five checkpoints; training loss is lower.

    step             1,000  3,000  5,000  7,000  9,000 11,000 13,000 14,000 15,000 16,000
    training loss     3.29   2.58   2.43   2.35   2.24   2.19   2.14   2.09   2.07   2.04
    dev BLEU         17.64  31.23  32.39  35.61  36.04  36.68  38.75  39.01  38.37  39.38

Before, with the paper's schedule (`--config.optimizer.schedule=inverse_sqrt --config.num_steps=5000`), seed 0, each
direction on a core that other work shared, the average being that of steps 4,000 to 5,000 (sacreBLEU 38.43 by
characters, and 37.19):

    step                1,000  2,000  3,000  4,000  5,000  average
    En-Ja training loss  3.30   2.75   2.54   2.45   2.38
          dev BLEU      18.32  28.29  32.42  34.62  32.74    34.72
    Ja-En training loss  3.63   2.92   2.64   2.51   2.42
          dev BLEU      16.14  28.28  31.98  36.48  36.07    37.36

R-Drop (`--config.task.r_drop=5`), whose steps take 2.7 times as long, is behind at the same step of a schedule of
5,000: Ja-En 11.62 after 1,000, 24.39 after 2,000, where it was stopped. So is BPE-dropout
(`--config.task.data.bpe_dropout=0.1`), of a schedule of 10,000: En-Ja 10.22 after 1,000, 17.08 after 2,000, 19.73 after
3,000, where it was stopped. And so is a model of twice the width (`--config.model.d_model=256 --config.model.d_ff=512
--config.model.dropout_rate=0.3 --config.optimizer.peak_learning_rate=0.002`), of a schedule of 5,500: En-Ja 17.64 after
1,000, 26.19 after 2,000, where it was stopped.
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "enja") -> ExperimentConfig:
    model, task = TransformerConfig(), TranslationConfig()
    config, data = ExperimentConfig(model, task), task.data
    model.num_layers = 3
    model.d_model = 128
    model.num_heads = 4
    model.d_ff = 256
    model.dropout_rate = 0.2
    model.vocab_size = 8_000
    data.dataset = "files"
    data.source_language, data.target_language = ("ja", "en") if variant == "jaen" else ("en", "ja")
    for side in ("source", "target"):
        language = getattr(task.data, f"{side}_language")
        setattr(task.data, f"train_{side}", f"train.{language}.gz")
        setattr(task.data, f"validation_{side}", f"dev.{language}")
    data.is_tokenized = True
    data.max_length = 64
    data.tokens_per_batch = 2_048
    config.optimizer.schedule = "linear"
    config.optimizer.peak_learning_rate = 0.0035
    config.optimizer.warmup_steps = 1_000
    config.num_steps = 7_000
    config.eval_every = 1_000
    config.checkpoint_every = 250
    if variant == "test":
        return tiny_variant(config)
    if variant not in ("enja", "jaen"):
        raise ValueError(f"unknown variant {variant!r}; there are enja, jaen, test")
    return config
