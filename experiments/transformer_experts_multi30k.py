r"""One model to German and to French, with mixtures of experts and without, at equal FLOPs and at equal time.

Result: validation BLEU, both languages: 42.14 with eight experts, 41.59 without, in the same time

    pairs() { paste <(tr '\t' ' ' <$1) <(tr '\t' ' ' <$2) | sed "s/^/>>$3<< /"; }
    for l in de fr; do pairs <(zcat train.en.gz) <(zcat train.$l.gz) $l; done > train.tsv
    for l in de fr; do pairs val.en val.$l $l > val.$l.tsv; done
    cat val.de.tsv val.fr.tsv > val.tsv
    tfx-jax train --config=transformer_experts_multi30k:sparse --workdir=runs/sparse --config.task.data.data_dir=DIR
    tfx-jax train --config=transformer_experts_multi30k:dense --workdir=runs/dense --config.task.data.data_dir=DIR
    python benchmarks/expert_shares.py --workdir=runs/sparse

The first four lines, in bash, in a folder with the files of Multi30k (github.com/multi30k/dataset, data/task1/raw),
make DIR: a source begins with the language that it is to be translated to (Johnson et al., 2017,
https://arxiv.org/abs/1611.04558),
so that every English sentence is there twice. Both models are Transformers of 2 + 2 layers, d_model 128; in `sparse`
every other feed-forward network is a mixture of eight of them, of which a token meets one (Switch, Fedus et al., 2021,
https://arxiv.org/abs/2101.03961), with the capacity factor, the losses of the router and the dropout of that paper's
layer. So a token costs both as many FLOPs, and `sparse` has 1.8 M more parameters. The paper's claim is a lower loss at
equal FLOPs, and at equal time where experts lie on devices of their own; on one device a step of `sparse` also moves
tokens to experts and back.

Variants: `sparse`, `dense`, `test`.

Measured here on one core, seed 0, 4,000 steps of up to 2,048 tokens, some 21 minutes each; tokenized BLEU of all 2,028
validation pairs, beam 4; the loss of the last 500 steps, label smoothing included.

              parameters   step 1,000   2,000   3,000   4,000   German   French   loss   target tokens a second
    sparse         3.8 M        28.22   36.82   39.90   42.14    32.57    49.79   2.901                  4,448
    dense          1.9 M        27.28   36.46   39.66   41.59    32.61    48.76   2.925                  4,463

So experts are ahead at equal FLOPs, by half a point, all of it French, and on one core equal FLOPs are equal time. Some
2 % of tokens were dropped in training. The share of each expert, in percent, by `expert_shares.py`:

    decoder, German     8    7   15   15   22    4    6   25
    decoder, French    12    3   10   11    1   22   26   17
    encoder, German    16    5   14   17   20    8    9   11
    encoder, French    16    7   13   10   22   10   12   10

In the decoder experts part by language, though none has one alone (distance 41 of 100); in the encoder, which reads
English in either case, they hardly do (10).
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "sparse") -> ExperimentConfig:
    model, task = TransformerConfig(), TranslationConfig()
    config, data = ExperimentConfig(model, task), task.data
    model.num_layers, model.d_model, model.num_heads, model.d_ff = 2, 128, 4, 512
    model.dropout_rate = 0.2
    model.vocab_size = 8_000
    data.dataset = "files"
    data.train_source, data.validation_source = "train.tsv", "val.tsv"
    data.source_language, data.target_language = "en", "de"  # French is scored alike: by the tokens of "13a"
    data.max_length = 64
    data.tokens_per_batch = 2_048
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.0035, 800
    task.decoding.beam_size = 4
    config.num_steps, config.eval_every, config.checkpoint_every = 4_000, 1_000, 200
    if variant == "test":
        model.experts.num_experts, model.experts.every = 2, 1  # of one layer
        return tiny_variant(config)
    if variant not in ("sparse", "dense"):
        raise ValueError(f"unknown variant {variant!r}; there are sparse, dense, test")
    if variant == "sparse":
        model.experts.num_experts = 8
    return config
