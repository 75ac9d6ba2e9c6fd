r"""The Transformer as a constituency parser: 4 layers that write trees (variants `wsj`, the paper's, and `craft`).

Result: `craft` dev F1 62.2 % with beam 4, 58.9 greedily, after 2 h 11 min of a core; `wsj` not yet run

"Attention Is All You Need" (Vaswani et al., 2017), section 6.3, after "Grammar as a Foreign Language" (Vinyals et al.,
2015): sentences in, linearized trees out, beam 21 with length penalty 0.3, outputs of up to 300 tokens more than the
input. Table 4: 91.3 F1 on section 23 of the Wall Street Journal from its 40,000 training sentences alone (88.3 for the
LSTM of Vinyals et al., 90.4 for the Berkeley parser), 92.7 with 17 million sentences that parsers had labeled.

    tfx-jax train --config=transformer_treebank:wsj --workdir=gs://BUCKET/RUN --config.task.data.data_dir=DIR
    tfx-jax plan --config=transformer_treebank:wsj --topology=v5e:2x2
    tfx-jax train --config=transformer_treebank:craft --workdir=runs/craft --config.task.data.data_dir=DIR
    tfx-jax average --workdir=runs/craft
    tfx-jax evaluate --workdir=runs/craft --step=average
    echo "BMPs have been implicated in early limb patterning ." | tfx-jax translate --workdir=runs/craft --step=average

DIR holds train.ptb.gz and dev.ptb.gz, one tree a line, without traces and function tags. The Penn treebank has to be
bought; of `wsj` the paper gives the 4 layers, d_model 1024 and 16,000 tokens. It chose dropout and learning rate on
section 22 and does not say them: they are those of its big model here, and the number of steps is a guess.

`craft` is for one core of a laptop and the trees of CRAFT (97 articles on mice, of which 67 are here: 18,951 training
trees, 2,780 of dev). It differs in more than its size: the tree has the tags of its words, where the papers write XX,
so that there is something to learn of each word before the brackets are right (`task.write_tags`; whether that helps is
not measured); words are tokens, and those beyond the 8,000 most frequent are one; labels are not smoothed; and it is
searched greedily. Trees of which a side has more than 128 tokens, 1,295 or 7 %, are not trained on. In evaluation every
sentence counts: of those that have more than 128 tokens the tree is flat. By the same count one S over all words has an
F1 of 8.2 %, and NP within NP, each a word less, 9.9 %.

Measured of `craft`, seed 0, 24,000 steps in 1 h 54 min of one core (0.28 s a step, 2,900 target tokens a second); the
loss is in nats, the mean of 50 steps. Searched greedily, in percent of all of dev; "average" is of five checkpoints,
each 1,000 steps apart, and step 12,000 was 57 minutes after the start.

                              F1   precision   recall   exact match   repaired
    step 12,000            50.59       51.16    50.04          22.0       45.5
    average up to it       51.31       52.47    50.19          22.9       43.4
    step 24,000            55.06       56.50    53.70          23.8       40.3
    average up to it       58.83       60.09    57.62          24.7       35.5

    step           1,000   2,000   4,000   6,000   8,000  10,000  12,000  16,000  20,000  22,000
    training loss   0.84    0.57    0.36    0.30    0.24    0.22    0.19    0.16    0.15    0.13

Of every 14th tree of dev, 199 of them, the last average has 59.9 % greedily, 62.8 % with beam 4 and 63.8 % with the
paper's beam 21 (60 tokens more than the input): `--config.task.decoding.beam_size=21`. After 1,200 steps F1 was 10.5 %
with 4,000 subwords and 12.7 % with words. What is wrong is mostly the number of words: 136 of these 199 sentences have
a tree with as many as they have, whose F1 is 75.9 %; 36 have too few and 27 too many, with 40.4 %, and are twice as
long (36 words, not 18). The loss still falls.

A learning rate that falls to zero (`--config.optimizer.schedule=linear --config.num_steps=20000`, seed 0) does what
averaging does above, in fewer steps: 2 h 11 min of a core of an Intel Xeon beside other work, the first 2,214 steps
with the schedule of 24,000. In percent of all of dev:

                              F1   precision   recall   exact match   repaired
    greedily                58.93       59.89    57.99          24.6       34.9
    greedily, average       58.33       59.29    57.41          24.2       35.9
    beam 4                  62.15       63.28    61.05          25.8       30.4

Its training loss was 0.10 at last, below that of above: what is missing is not in the loss of the next symbol.
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import ParsingConfig
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "craft") -> ExperimentConfig:
    if variant not in ("craft", "wsj", "test"):
        raise ValueError(f"unknown variant {variant!r}; there are craft, wsj, test")
    model, task = TransformerConfig.big(num_layers=4, vocab_size=16_000), ParsingConfig()
    config, data = ExperimentConfig(model, task), task.data
    data.dataset = "files"
    data.train_file, data.validation_file = "train.ptb.gz", "dev.ptb.gz"
    data.tokens_per_batch = 25_000
    config.num_steps = 50_000
    if variant == "wsj":
        return accelerator_variant(config)
    model.d_model, model.num_heads, model.d_ff, model.vocab_size = 128, 4, 512, 8_000
    model.pre_norm, model.dropout_rate = True, 0.1
    data.tokenizer, data.max_length, data.tokens_per_batch = "words", 128, 1_024
    task.write_tags, task.label_smoothing = True, 0.0
    task.decoding.beam_size = 1
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.002, 500
    config.num_steps, config.eval_every, config.checkpoint_every = 24_000, 0, 1_000
    return tiny_variant(config) if variant == "test" else config
