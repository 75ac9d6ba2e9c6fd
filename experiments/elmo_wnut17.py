r"""A tagger of names with ELMo's vectors and without them, on WNUT-17: posts with new and rare names of six kinds.

Result: dev F1 26.8, 24.9 and 25.5 with ELMo, 16.7, 16.3 and 19.0 without, three seeds

Peters et al. (2018, https://arxiv.org/abs/1802.05365, sections 3.2, 3.3 and 4): ELMo is frozen, each word has a
weighted sum of its layers beside a vector of its own, and the weights are learned with the tagger. On CoNLL-2003 the
authors' tagger gains 2.06 points of F1 from it, to 92.22. Theirs has a CRF above the LSTM and vectors of words from
elsewhere, which this one has not. For WNUT-17 itself see bert_wnut17.py: the best of the shared task has 41.86 % entity
F1 on the test split.

    tfx-jax train --config=elmo_wnut17 --workdir=runs/elmo_wnut17 --config.task.data.data_dir=DIR \
        --config.init_from=runs/elmo_wikitext2
    tfx-jax train --config=elmo_wnut17:without --workdir=runs/without --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/elmo_wnut17

DIR holds train.conll and dev.conll: a word, a TAB and its tag on each line. `init_from` is the workdir of
elmo_wikitext2.py, whose sizes and parameters the frozen part takes; without it, that part would be as it was drawn.

Variants: `small`, with ELMo, for a CPU core and some minutes; `without`, the same tagger and the same steps, with
nothing but its own vector of each word's characters; `test`.

Measured: from `elmo_wikitext2` (small, perplexity 43.07), 900 steps, about a minute of one core each; entity F1 of the
836 entities of dev.conll in percent, of the best of six evaluations, which `evaluate` takes, and of the last.

                    with ELMo                     without
    seed 0          26.77, last 23.18             16.70, last 16.68
    seed 1          24.86, last 24.86             16.28, last 16.28
    seed 2          25.48, last 24.51             18.99, last 18.96

So vectors of a text that has no post gain 8.4 points as a mean, in recall and in precision: 18.3
for 10.4 %, and 49.8 for 42.2 %, of seed 0. `bert_wnut17` has 20.6, pre-trained on the same text.
"""

from tfx_jax.models.elmo import ElmoConfig, ElmoTaggerConfig
from tfx_jax.tasks import TaggedData, TaggingConfig
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = ElmoConfig()
    data = TaggedData(dataset="files", train_file="train.conll", validation_file="dev.conll")
    config = ExperimentConfig(model, TaggingConfig(data))
    data.max_length, data.tokens_per_batch = 64, 1_024
    config.optimizer.name, config.optimizer.weight_decay, config.optimizer.clip_norm = "adamw", 0.01, 1.0
    config.optimizer.b2, config.optimizer.epsilon = 0.999, 1e-8
    config.optimizer.schedule = "linear"
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 3e-3, 50
    config.num_steps, config.eval_every, config.keep_last = 900, 150, 1
    if variant in ("small", "without"):
        model.word_length = 20
        model.tagger = ElmoTaggerConfig(d_word=64, d_hidden=64)
        model.tagger.use_elmo = variant == "small"
    elif variant == "test":
        return tiny_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are small, without, test")
    return config
