r"""Recurrent networks with and without attention on Multi30k English-German, of which they are the old baselines.

Result: validation BLEU En-De 38.39 with Luong's attention, 28.40 with a fixed context; the others not yet run

The data are those of `transformer_tiny_multi30k`, whose Transformer reaches 40.06 BLEU on validation: 29,000 captions
with joint BPE applied. Variants: `luong` (LSTM, general score, input feeding; the default), `bahdanau` (GRU) and
`fixed` (GRU, no attention), each from English to German, and with `_deen` behind it from German to English. Sizes are
those of `seq2seq_enja`.

    tfx-jax train --config=seq2seq_multi30k:luong --workdir=runs/luong --config.task.data.data_dir=DIR
    tfx-jax average --workdir=runs/luong
    tfx-jax evaluate --workdir=runs/luong --step=average
    python benchmarks/bleu_by_length.py --output=runs/bleu_by_length.png --step=average \
        --workdirs fixed=runs/fixed Luong=runs/luong

DIR holds train.en.gz, train.de.gz, valid.en and valid.de, BPE applied.

Measured: English to German, seed 0, 8,000 steps, of `luong` 0.27 seconds of CPU each, 36 minutes of a core. BLEU of the
1,014 validation pairs, beam 5, tokenized and by sacreBLEU; loss in nats of the training, smoothed by labels. `luong` is
of LSTMs and `fixed` of GRUs.

              step 4,000   8,000   sacreBLEU   exact match   loss   mean of the last five checkpoints
    luong          36.36   38.39       38.37         6.0 %   2.53                               38.27
    fixed          25.71   28.39       28.38         3.0 %   2.72                               28.40

    words of the source     4 to 10   11 to 12   13 to 14   15 to 17   18 to 43
    sentences                   232        200        186        213        183
    luong                     47.42      45.31      36.85      37.12      30.98
    fixed                     41.85      33.43      28.30      26.66      19.55

Attention is 10 ahead; of the means, by 5.6 in the shortest sentences and by 11.4 in the longest. On `seq2seq_enja`, of
shorter sentences and fewer words, it was 2. The Transformer of `transformer_tiny_multi30k` has 1.7 more.
"""

from tfx_jax.models.seq2seq import Seq2SeqConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, tiny_variant

CELLS = {"luong": "lstm", "bahdanau": "gru", "fixed": "gru"}


def get_config(variant: str = "luong") -> ExperimentConfig:
    model, task = Seq2SeqConfig(), TranslationConfig()
    config, data = ExperimentConfig(model, task), task.data
    model.num_layers = 1
    model.d_model = 256
    model.dropout_rate = 0.3
    model.vocab_size = 20_000  # more than there are: every token of the joint BPE is kept
    data.dataset = "files"
    data.is_tokenized = True
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
