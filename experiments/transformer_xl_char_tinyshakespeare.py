r"""A character Transformer-XL on the plays of Shakespeare, beside the GPT of `gpt_char_tinyshakespeare`.

Result: small 1.62 nats after 16 minutes of a busy core, the GPT of its size 1.82; full not yet run

None is published for this model on this text. The model is Dai et al.'s (2019, https://arxiv.org/abs/1901.02860), the
text, its division and the budget those of nanoGPT's character models: first 90 % of the characters for training, the
rest for validation, of which every character counts.

    tfx-jax train --config=transformer_xl_char_tinyshakespeare --workdir=runs/xl --config.task.data.data_dir=DIR
    echo "ROMEO:" | tfx-jax generate --workdir=runs/xl --max-new-tokens=500 --temperature=0.8 --stream
    tfx-jax plan --config=transformer_xl_char_tinyshakespeare:full --topology=v5e:1x1

DIR holds `input.txt` (https://github.com/karpathy/char-rnn, data/tinyshakespeare). Variants: `full`, 6 layers of 384,
segments and memories of 256 characters, 5,000 steps of 64 rows, for an accelerator; `small`, 4 layers of 128, segments
and memories of 64, 2,000 steps of 12 rows, for two CPU cores; `test`. Evaluation remembers twice as much as training.
What to compare with: the GPT has 1.82 nats in `small`, which sees up to 64 characters.

Measured of `small`, seed 0, on one core of a small cloud machine that others used too: all 2,000 steps in 16 minutes,
the best of eight evaluations, every 250 steps, being the last. Nats a character of the last tenth of the text:

    step                      250     500     750   1,000   1,250   1,500   1,750   2,000
    validation loss         2.135   1.980   1.920   1.771   1.674   1.644   1.625   1.623

    characters remembered       0      16      64     128     256
    validation loss         1.761   1.645   1.622   1.623   1.626

The last line has the same parameters with another `--config.model.eval_memory_length`. The GPT of the same size, which
sees as many characters as a segment has, ends at 1.82: a fifth of a nat more. Three quarters of what the memory is
worth are in its first 16 characters; beyond the 64 that were trained with it gains nothing. `full`: not yet run.
"""

from tfx_jax.models.transformer_xl import TransformerXLConfig
from tfx_jax.tasks import RecurrentLanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = TransformerXLConfig(
        vocab_size=256,  # more than there are
        memory_length=256,
        eval_memory_length=512,
        num_layers=6,
        d_model=384,
        num_heads=6,
        d_ff=None,
        dropout_rate=0.2,
        attention_dropout_rate=0.2,
    )
    data = TextData(
        dataset="files",
        train_file="input.txt",
        validation_share=0.1,
        tokenizer="characters",
        max_length=256,
        tokens_per_batch=64 * 256,
    )
    config = ExperimentConfig(model, RecurrentLanguageModelConfig(data))
    optimizer = config.optimizer
    optimizer.schedule, optimizer.peak_learning_rate = "cosine", 1e-3
    optimizer.warmup_steps, optimizer.clip_norm = 200, 0.25  # the paper's code clips at 0.25
    optimizer.b1, optimizer.b2, optimizer.epsilon = 0.9, 0.99, 1e-8
    config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 5_000, 250, 250, 50
    if variant == "small":
        data.max_length, model.memory_length, model.eval_memory_length = 64, 64, 128
        model.num_layers, model.d_model, model.num_heads = 4, 128, 4
        model.dropout_rate = model.attention_dropout_rate = 0.0
        data.tokens_per_batch = 12 * 64
        config.num_steps = 2_000
    elif variant == "test":
        return tiny_variant(config)
    elif variant == "full":
        return accelerator_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are full, small, test")
    return config
