r"""T5 pre-trained by span corruption on WikiText-2.

Result: validation loss 4.46 nats after 10 minutes on two cores

The objective of "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (Raffel et al.,
2020, sections 3.1.4 and 3.3): 15 % of the tokens are dropped in spans of 3 on average, and the model writes them down.
The paper's T5 reads 34 billion tokens of Common Crawl; here are two million of Wikipedia, with `<unk>` for rare words,
so that a loss compares with no published one. Adafactor's steps are relative to the scale of each parameter, as there.

    tfx-jax train --config=t5_wikitext2 --workdir=runs/t5_wikitext2 --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/t5_wikitext2
    tfx-jax plan --config=t5_wikitext2:small --topology=v5e:2x2

DIR holds train.txt.gz and valid.txt.gz. Variants: `tiny`, 3 + 3 layers of 128, for two CPU cores and ten minutes;
`small`, the sizes of t5-small but a vocabulary of 8,000, for an accelerator; `test`. The score is the loss of a token
of the targets, sentinels and end included, with spans that are the same for every seed.

Measured: `tiny`, seed 0, on two cores of a cloud machine that others used too, 10 min 14 s.

    step                            500  1,000  1,500  2,000
    training loss, nats            4.96   4.73   4.61   4.53
    validation loss, nats          4.84   4.63   4.52   4.46
    validation token accuracy, %  31.87  31.82  32.39  32.54

That is still near the frequencies of words: nearly all that it has right are sentinels and ends, which are a quarter of
the targets. What limits it is time. Planned for 6,000 steps, a run had 4.24 nats after 4,000, where it was stopped, and
bert_wikitext2.py needed twice as many before it looked at what stands beside a gap. Relative positions drawn ten times
as large did not change that (4.83 after 500 steps).

With half of the tokens dropped instead of 15 % (`--config.task.noise_density=0.5`), 1,200 steps on one core of an Intel
Xeon, 15 minutes. Its loss does not compare with the one above, as fewer of the targets are sentinels, and fine-tuning
gains nothing from it (t5_text_to_text.py).

    step                            200    400    600    800  1,000  1,200
    validation loss, nats          5.54   5.22   5.07   4.95   4.88   4.86
    validation token accuracy, %  17.75  22.64  23.21  24.59  25.06  25.32

The whole text as target (`--config.task.targets=text --config.num_steps=800`), seed 0, 12 min 36 s of a core of an
AMD EPYC (AVX-512) beside other work. It does not learn to copy either: 85 % of the tokens of a target stand in the
source, and 22 % are right.

    step                            200    400    600    800
    validation loss, nats          5.91   5.35   4.99   4.85
    validation token accuracy, %  13.30  17.92  21.16  22.44

`small`: not yet run.
"""

from tfx_jax.models.t5 import T5Config
from tfx_jax.tasks import SpanCorruptionConfig, TextData
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "tiny") -> ExperimentConfig:
    model = T5Config.published("t5-small")
    data = TextData(dataset="files", train_file="train.txt.gz", validation_file="valid.txt.gz")
    config = ExperimentConfig(model, SpanCorruptionConfig(data))
    data.documents = "articles"
    data.tokenizer = "unigram"
    model.vocab_size = 8_000
    config.optimizer.name = "adafactor"
    if variant == "small":
        data.max_length, data.tokens_per_batch = 512, 65_536
        config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 1_000  # the paper's peak
        config.num_steps, config.eval_every, config.patience = 5_000, 250, 4
        return accelerator_variant(config)
    if variant not in ("tiny", "test"):
        raise ValueError(f"unknown variant {variant!r}; there are tiny, small, test")
    model.num_layers, model.d_model, model.num_heads = 3, 128, 4
    model.d_k, model.d_ff = 32, 512
    model.dropout_rate = 0.0  # about one epoch
    data.max_length, data.tokens_per_batch = 128, 2_048
    config.optimizer.schedule, config.optimizer.peak_learning_rate = "linear", 0.02
    config.optimizer.warmup_steps = 100
    config.num_steps, config.eval_every = 2_000, 500
    return tiny_variant(config) if variant == "test" else config
