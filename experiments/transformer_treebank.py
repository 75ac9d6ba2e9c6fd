r"""The Transformer as a constituency parser: 4 layers that write trees (variants `wsj`, the paper's, and `craft`).

Result: `craft` dev F1 15.2 % greedily, of 199 trees after 1,410 of 12,000 steps; `wsj` not yet run

"Attention Is All You Need" (Vaswani et al., 2017), section 6.3, after "Grammar as a Foreign Language" (Vinyals et al.,
2015): sentences in, linearised trees out, beam 21 with length penalty 0.3, outputs of up to 300 tokens more than the
input. Table 4: 91.3 F1 on section 23 of the Wall Street Journal from its 40,000 training sentences alone (88.3 for the
LSTM of Vinyals et al., 90.4 for the Berkeley parser), 92.7 with 17 million sentences that parsers had labelled.

    tfx-jax train --config=transformer_treebank:wsj --workdir=gs://BUCKET/RUN --config.task.data.data_dir=DIR
    tfx-jax plan --config=transformer_treebank:wsj --topology=v5e:2x2
    tfx-jax train --config=transformer_treebank:craft --workdir=runs/craft --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/craft --step=latest --config.task.decoding.beam_size=21
    echo "BMPs have been implicated in early limb patterning ." | tfx-jax translate --workdir=runs/craft --step=latest

DIR holds train.ptb.gz and dev.ptb.gz, one tree a line, without traces and function tags. The Penn treebank has to be
bought; of `wsj` the paper gives the 4 layers, d_model 1024 and 16,000 tokens. It chose dropout and learning rate on
section 22 and does not say them: they are those of its big model here, and the number of steps is a guess.

`craft` is for one core of a laptop and the trees of CRAFT (97 articles on mice, of which 67 are here: 18,951 training
trees, 2,780 of dev). It differs in more than its size: the tree has the tags of its words, where the papers write XX,
so that there is something to learn of each word before the brackets are right (`task.write_tags`; whether that helps is
not measured); and it is searched greedily while it is trained. Trees of which a side has more than 128 tokens, 1,295 or
7 %, are not trained on. In evaluation every sentence counts: of those that have more than 128 tokens, 23 of dev, the
tree is flat. By the same count one S over all words has an F1 of 8.2 %, and NP within NP, each a word less, 9.9 %.

Measured of `craft`: the first 1,410 of its 12,000 steps alone, seed 0, a million target tokens in half an hour
on a quarter of a core that other work had the rest of (the gradient of 10 rows of 96 costs 0.4 s of CPU time). The loss
is smoothed, in nats, the mean of 50 steps. The last of these models has 15.2 % F1 (precision 16.2 %, recall 14.3 %,
90 % of trees repaired, 5.0 % exact) on every 14th tree of dev, 199 of them, searched greedily. Labels and tags are
plausible by then, but a tree loses a word on its way or has one too many, and what follows is off by one.

Ten of these trees, F1: 13.3 % greedily, 15.2 % with beam 4, 3.7 % with beam 21, for which a tree that ends too early is
likelier than one that is whole (60 tokens more than the input change nothing of that, and 300 cost twice the time: 4.7
s of CPU time a sentence, compiling included). A model that has learned more should be asked again.

    step             200   400   600   800  1,000  1,200  1,400
    training loss   2.65  2.34  2.23  2.06   1.96   1.91   1.84
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks.parsing import ParsingConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "craft") -> ExperimentConfig:
    if variant not in ("craft", "wsj", "test"):
        raise ValueError(f"unknown variant {variant!r}; there are craft, wsj, test")
    model, task = TransformerConfig.big(num_layers=4, vocab_size=16_000), ParsingConfig()
    config, data = ExperimentConfig(model, task), task.data
    data.dataset = "files"
    data.train_file, data.validation_file = "train.ptb.gz", "dev.ptb.gz"
    data.tokens_per_batch = 25_000
    config.num_steps = 50_000
    if variant != "wsj":
        model.d_model, model.num_heads, model.d_ff, model.vocab_size = 128, 4, 512, 4_000
        model.pre_norm, model.dropout_rate = True, 0.1
        data.max_length, data.tokens_per_batch = 128, 1_024
        task.write_tags = True
        task.decoding.beam_size = 1
        config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.002, 500
        config.num_steps, config.eval_every, config.checkpoint_every = 12_000, 2_000, 500
    return tiny_variant(config) if variant == "test" else config
