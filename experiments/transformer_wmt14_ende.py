r"""The Transformer on WMT14 English-German: 27.3 BLEU (base) and 28.4 (big) on newstest2014, and every row of Table 3.

Result: not yet run

"Attention Is All You Need" (Vaswani et al., 2017), sections 5 and 6: 4.5 million pairs, one vocabulary of about 37,000
subwords, batches of about 25,000 source and as many target tokens, Adam with 4,000 steps of warm-up, label smoothing
0.1, beam 4 with length penalty 0.6. The paper trained on 8 NVIDIA P100: base 100,000 steps of 0.4 s (12 hours), big
300,000 steps of 1.0 s (3.5 days).

It averaged the last 5 (base) or 20 (big) checkpoints, written every 10 minutes. A step on other hardware takes another
time, so ten minutes are counted in steps here: 1,500 of 0.4 s, 600 of 1.0 s. The subwords are
byte pairs, as in the paper, learned by SentencePiece.

    tfx-jax prepare wmt14_translate/de-en --data-dir=DIR
    tfx-jax train --config=transformer_wmt14_ende:big --workdir=gs://BUCKET/RUN \
        --config.task.data.data_dir=DIR
    tfx-jax average --workdir=gs://BUCKET/RUN
    tfx-jax evaluate --workdir=gs://BUCKET/RUN --step=average
    tfx-jax plan --config=transformer_wmt14_ende:big-pod --topology=v5e:4x4

The first command downloads 1.7 GB from statmt.org, checks them against TFDS's checksums and builds array records in
DIR, without TensorFlow (with the extra `tfds` of tfx-jax). Interrupted, it goes on when it is run again; it takes about
3 GB of memory. For other machines, copy DIR/wmt14_translate to gs://BUCKET/DATA and train with that data_dir: each
copies it to its own disk once (needs gcsfs). Neither statmt.org nor a real bucket could be reached where this was
tested, on archives of the same layout and size.

`--config.model.dtype=bfloat16` computes in half the memory on a TPU or a recent GPU, and `--config.model.unroll=True`
makes a step on TPUs faster and its compilation slower. "big-pod" is the big model with both, for a slice of 16 TPU v5e:
200,000 tokens of each side in a batch (Ott et al. used 400,000) and twice the learning rate, as in "Scaling Neural
Machine Translation" (Ott et al., 2018); it sees the examples of "big" in an eighth of the steps. The variant is "base",
"big", "big-pod", "test" (seconds, on the built-in grammar) or a row of Table 3, whose figures are of newstest2013 (the
validation split) and of one checkpoint, without averaging:

    variant          perplexity   BLEU   parameters in millions
    base                   4.92   25.8    65
    A-h1                   5.29   24.9    as base, like all that name none
    A-h4                   5.00   25.5
    A-h16                  4.91   25.8
    A-h32                  5.01   25.4
    B-dk16                 5.16   25.1    58
    B-dk32                 5.01   25.4    60
    C-n2                   6.11   23.7    36
    C-n4                   5.19   25.3    50
    C-n8                   4.88   25.5    80
    C-d256                 5.75   24.5    28
    C-d1024                4.66   26.0   168
    C-dff1024              5.12   25.4    53
    C-dff4096              4.75   26.2    90
    D-dropout0             5.77   24.6
    D-dropout0.2           4.95   25.5
    D-smoothing0           4.67   25.3
    D-smoothing0.2         5.47   25.7
    E-learned              4.92   25.7
    big                    4.33   26.4   213

With 37,000 subwords base has 63.1 million; the paper does not give its exact vocabulary. Perplexity is per subword, so
it compares within one vocabulary only.

Measured here: not yet run.
"""

import operator
from typing import Any

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant

# What each row changes in the base model. d_k and d_v follow the number of heads and d_model, as they do in the paper.
TABLE_3: dict[str, dict[str, Any]] = {
    "A-h1": {"model.num_heads": 1},
    "A-h4": {"model.num_heads": 4},
    "A-h16": {"model.num_heads": 16},
    "A-h32": {"model.num_heads": 32},
    "B-dk16": {"model.d_k": 16},
    "B-dk32": {"model.d_k": 32},
    "C-n2": {"model.num_layers": 2},
    "C-n4": {"model.num_layers": 4},
    "C-n8": {"model.num_layers": 8},
    "C-d256": {"model.d_model": 256},
    "C-d1024": {"model.d_model": 1024},
    "C-dff1024": {"model.d_ff": 1024},
    "C-dff4096": {"model.d_ff": 4096},
    "D-dropout0": {"model.dropout_rate": 0.0},
    "D-dropout0.2": {"model.dropout_rate": 0.2},
    "D-smoothing0": {"task.label_smoothing": 0.0},
    "D-smoothing0.2": {"task.label_smoothing": 0.2},
    # Positions for the longest source, 256 tokens, and a translation 50 tokens longer.
    "E-learned": {"model.learned_positions": 306},
    "big": {
        "model.d_model": 1024,
        "model.num_heads": 16,
        "model.d_ff": 4096,
        "model.dropout_rate": 0.3,
        "num_steps": 300_000,
        "checkpoint_every": 600,
        "keep_last": 20,
    },
}


def get_config(variant: str = "base") -> ExperimentConfig:
    if variant not in ("base", "big-pod", "test", *TABLE_3):
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(('base', *TABLE_3, 'big-pod', 'test'))}")
    model, task = TransformerConfig(vocab_size=37_000), TranslationConfig()  # their defaults are the paper's
    config, data = ExperimentConfig(model, task), task.data
    data.dataset = "wmt14_translate/de-en"
    data.source_language, data.target_language = "en", "de"
    config.num_steps = 100_000
    config.checkpoint_every = 1_500
    config.keep_last = 5
    for name, value in TABLE_3.get(variant.removesuffix("-pod"), {}).items():
        section, _, field = name.rpartition(".")
        setattr(operator.attrgetter(section)(config) if section else config, field, value)
    if variant == "big-pod":
        config.optimizer.peak_learning_rate = 1e-3
        return accelerator_variant(config, batch_factor=8)  # a slice of 16 chips gets 48 rows of 256 tokens on each
    return tiny_variant(config) if variant == "test" else config
