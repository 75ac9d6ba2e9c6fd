r"""The Transformer on WMT14 English-French: 38.1 BLEU (base) and 41.8 (big) on newstest2014.

Result: not yet run

"Attention Is All You Need" (Vaswani et al., 2017), Table 2; section 6.1 of its text gives 41.0 for the big model, its
abstract 41.8 as the table does. 36 million pairs, one vocabulary of 32,000 word pieces, everything else as for
English-German (`transformer_wmt14_ende.py`) but the dropout of the big model, 0.1. On 8 NVIDIA P100: base 100,000 steps
of 0.4 s (12 hours), big 300,000 steps of 1.0 s (3.5 days). The last 5 (base) or 20 (big) checkpoints are averaged;
they are 10 minutes of the paper's hardware apart, 1,500 and 600 steps. The subwords are byte pairs
learned by SentencePiece.

    tfx-jax prepare wmt14_translate/fr-en --data-dir=DIR
    tfx-jax train --config=transformer_wmt14_enfr:big --workdir=gs://BUCKET/RUN \
        --config.task.data.data_dir=DIR
    tfx-jax average --workdir=gs://BUCKET/RUN
    tfx-jax evaluate --workdir=gs://BUCKET/RUN --step=average
    tfx-jax plan --config=transformer_wmt14_enfr:big-pod --topology=v5e:4x4

The first command downloads 6.7 GB and builds the data set in DIR; `transformer_wmt14_ende.py` says more about it. TFDS
reads the largest text, the 10^9 word corpus, whole: it takes more than 20 GB of memory (estimated, not measured).

The variant is "base", "big", "big-pod" or "test" (seconds, on the built-in grammar). "big-pod" is for a slice of 16 TPU
v5e, in bfloat16, with eight times the tokens in a batch: see `transformer_wmt14_ende.py`.

Measured here: not yet run.
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "base") -> ExperimentConfig:
    if variant not in ("base", "big", "big-pod", "test"):
        raise ValueError(f"unknown variant {variant!r}; there are base, big, big-pod, test")
    model, task = TransformerConfig(vocab_size=32_000), TranslationConfig()  # their defaults are the paper's
    config, data = ExperimentConfig(model, task), task.data
    data.dataset = "wmt14_translate/fr-en"
    data.source_language, data.target_language = "en", "fr"
    config.num_steps = 100_000
    config.checkpoint_every = 1_500
    config.keep_last = 5
    if variant in ("big", "big-pod"):
        config.model = TransformerConfig.big(vocab_size=32_000, dropout_rate=0.1)
        config.num_steps = 300_000
        config.checkpoint_every = 600
        config.keep_last = 20
    if variant == "big-pod":
        config.optimizer.peak_learning_rate = 1e-3
        return accelerator_variant(config, batch_factor=8)
    return tiny_variant(config) if variant == "test" else config
