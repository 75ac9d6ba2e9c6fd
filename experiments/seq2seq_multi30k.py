r"""Recurrent networks with and without attention on Multi30k English-German, of which they are the old baselines.

Result: not yet run

The data are those of `transformer_tiny_multi30k`, whose Transformer reaches 40.06 BLEU on validation: 29,000 captions
with joint BPE applied. Variants: `luong` (LSTM, general score, input feeding; the default), `bahdanau` (GRU) and
`fixed` (GRU, no attention), each from English to German, and with `_deen` behind it from German to English. Sizes are
those of `seq2seq_enja`.

    tfx-jax train --config=seq2seq_multi30k:luong --workdir=runs/luong --config.task.data.data_dir=DIR
    tfx-jax average --workdir=runs/luong
    tfx-jax evaluate --workdir=runs/luong --step=average

DIR holds train.en.gz, train.de.gz, valid.en and valid.de, BPE applied. Measured here: not yet run.
"""

from tfx_jax.models.seq2seq import Seq2SeqConfig
from tfx_jax.tasks.translation import TranslationConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant

CELLS = {"luong": "lstm", "bahdanau": "gru", "fixed": "gru"}


def get_config(variant: str = "luong") -> ExperimentConfig:
    model, task = Seq2SeqConfig(), TranslationConfig()
    config, data = ExperimentConfig(model, task), task.data
    model.num_layers = 1
    model.d_model = 256
    model.dropout_rate = 0.3
    model.vocab_size = 20_000  # more than there are: every token of the joint BPE is kept
    data.dataset = "files"
    data.is_tokenised = True
    data.tokenizer = "words"
    data.max_length = 64
    data.tokens_per_batch = 1_024
    task.decoding.beam_size = 5
    config.optimizer.schedule = "linear"
    config.optimizer.peak_learning_rate = 0.002
    config.optimizer.warmup_steps = 400
    config.optimizer.clip_norm = 1.0  # recurrent gradients explode now and then (Pascanu et al., 2013)
    config.num_steps = 8_000
    config.eval_every = 2_000
    config.checkpoint_every = 200
    if variant == "test":
        return tiny_variant(config)
    attention, _, direction = variant.partition("_")
    if attention not in CELLS or direction not in ("", "deen"):
        names = ", ".join(f"{name}, {name}_deen" for name in CELLS)
        raise ValueError(f"unknown variant {variant!r}; there are {names}, test")
    model.variant, model.cell = attention, CELLS[attention]
    data.source_language, data.target_language = ("de", "en") if direction else ("en", "de")
    for side in ("source", "target"):
        language = getattr(data, f"{side}_language")
        setattr(data, f"train_{side}", f"train.{language}.gz")
        setattr(data, f"validation_{side}", f"valid.{language}")
    return config
