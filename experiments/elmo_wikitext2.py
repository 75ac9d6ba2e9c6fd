r"""ELMo, pre-trained on WikiText-2: two million words, where the paper had a corpus of 800 million, ten times.

Result: validation perplexity 43.07 of 3,000 words after 4,000 steps of a busy core

Peters et al. (2018, https://arxiv.org/abs/1802.05365, section 3): words as characters, two layers of LSTMs in either
direction, which share the words and the softmax; the sum of both log likelihoods (section 3.1). The authors' model has
93.6 million parameters below its softmax, and a forward and backward perplexity of 39.7 on average after ten epochs of
the One Billion Word Benchmark, whose vocabulary of 793,471 words they sampled; here all of a smaller one is summed.

    tfx-jax train --config=elmo_wikitext2 --workdir=runs/elmo_wikitext2 --config.task.data.data_dir=DIR
    tfx-jax evaluate --workdir=runs/elmo_wikitext2
    tfx-jax plan --config=elmo_wikitext2:base --topology=v5e:1x1

DIR holds `train.txt.gz` and `valid.txt.gz` of WikiText-2, word level. Each line with text is a sentence, and one mark
stands between two of them; rows are cut from the stream, and a direction begins each with no memory. What is rarer than
the vocabulary is `<unk>` when it is predicted and its own characters when it is read, so that perplexities compare
among models of one `vocab_size` alone. What comes out is for others to start from: see elmo_wnut17.py.

Variants: `small`, for a CPU core and less than half an hour: words of 96 numbers, LSTMs of 192 units projected to 96,
the 3,000 most frequent words, rows of 24 words, 4,000 steps, which are one and a half times the text; `base`, the sizes
of the paper, all 33,278 words and rows of 64, for an accelerator; `test`.

Measured: `small`, seed 0, beside many other programs; mean of both directions on valid.txt.gz, 216,346 tokens.

    step                     1,000    2,000    3,000    4,000
    loss, nats              4.0796   3.8958   3.8086   3.7629
    perplexity               59.12    49.20    45.09    43.07

`base`: not yet run.
"""

from tfx_jax.models.elmo import CharacterConfig, ElmoConfig
from tfx_jax.tasks import BidirectionalLanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = ElmoConfig(vocab_size=33_278)
    data = TextData(
        dataset="files",
        train_file="train.txt.gz",
        validation_file="valid.txt.gz",
        documents="lines",
        tokenizer="words",
        max_length=64,
        tokens_per_batch=64 * 64,
    )
    config = ExperimentConfig(model, BidirectionalLanguageModelConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule, optimizer.clip_norm = "adam", "cosine", 1.0
    optimizer.peak_learning_rate, optimizer.final_fraction, optimizer.warmup_steps = 1e-3, 0.1, 500
    optimizer.b2, optimizer.epsilon = 0.999, 1e-8
    config.num_steps, config.eval_every, config.keep_last = 10_000, 1_000, 1
    if variant == "small":
        model.vocab_size, model.word_length = 3_000, 20
        model.characters = CharacterConfig(16, (1, 2, 3, 4), (32, 32, 64, 64), 1)
        model.d_hidden, model.d_model, model.dropout_rate = 192, 96, 0.0
        data.max_length, data.tokens_per_batch = 24, 32 * 24
        optimizer.peak_learning_rate, optimizer.warmup_steps = 3e-3, 100
        config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 4_000, 1_000, 250, 50
    elif variant == "base":
        model.dtype = "bfloat16"
    elif variant == "test":
        return tiny_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are small, base, test")
    return config
