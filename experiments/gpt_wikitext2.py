r"""A word-level GPT on WikiText-2, in perplexity.

Result: validation perplexity 237 after one epoch on two cores

WikiText-2 (Merity et al., 2017) has two million words of Wikipedia; rare ones are `<unk>` in the text itself, and each
line has an end, so that the vocabulary has 33,278 types. Perplexities of words compare with those of other models of
these words only. The reference is the best LSTM of its day without further tricks: AWD-LSTM, 68.6 on the validation
split (Merity et al., 2018, https://arxiv.org/abs/1708.02182, table 1).

    tfx-jax train --config=gpt_wikitext2 --workdir=runs/gpt_wikitext2 --config.task.data.data_dir=DIR
    tfx-jax plan --config=gpt_wikitext2:base --topology=v5e:1x1

DIR holds `train.txt.gz` and `valid.txt.gz`. Variants: `small`, 4 layers of 128 over 64 words, for two CPU cores;
`base`, 6 layers of 512 over 256 words, for an accelerator; `test`. Every word of the validation split is scored once,
in rows whose first word is predicted from one other word alone: longer rows would give lower perplexities.

Measured: `small`, seed 0, 2,500 steps, which is a little more than once through the text: validation perplexity
**237.4**, in 39 min 37 s on two cores of a cloud machine beside another training (1,100 to 1,400 words a second, six
minutes of it evaluation). Most of the work is the matrix of 33,278 outputs.

    step                      500   1,000   1,500   2,000   2,500
    training loss, nats      6.26    5.98    5.80    5.69    5.56
    validation loss, nats    6.01    5.76    5.60    5.50    5.47
    perplexity              406.1   317.4   271.7   245.9   237.4

What limits it is time: the loss still falls, and the reference's own program trains for 750 epochs. `base`: not yet
run.
"""

from tfx_jax.models.gpt import GPTConfig
from tfx_jax.tasks import LanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = GPTConfig(
        vocab_size=33_278, max_length=256, num_layers=6, d_model=512, num_heads=8, dropout_rate=0.3, use_bias=False
    )
    data = TextData(
        dataset="files",
        train_file="train.txt.gz",
        validation_file="valid.txt.gz",
        documents="lines",
        tokenizer="words",
        max_length=256,
        tokens_per_batch=32 * 256,
    )
    config = ExperimentConfig(model, LanguageModelConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule = "adamw", "cosine"
    optimizer.peak_learning_rate, optimizer.final_fraction, optimizer.warmup_steps = 1e-3, 0.1, 400
    optimizer.b1, optimizer.b2, optimizer.epsilon = 0.9, 0.98, 1e-8
    optimizer.weight_decay, optimizer.clip_norm = 0.1, 1.0
    config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 10_000, 500, 500, 100
    if variant == "small":
        model.max_length = data.max_length = 64
        model.num_layers, model.d_model, model.num_heads = 4, 128, 4
        model.dropout_rate = model.attention_dropout_rate = 0.1
        data.tokens_per_batch = 16 * 64
        optimizer.peak_learning_rate, optimizer.warmup_steps = 2e-3, 200
        config.num_steps, config.eval_every = 2_500, 500
    elif variant == "test":
        return tiny_variant(config)
    elif variant == "base":
        return accelerator_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are base, small, test")
    return config
