r"""A Transformer on parallel text of your own: two files with one sentence a line, or a .tsv with both.

Result: not yet run

    tfx-jax train --config=transformer_files --workdir=runs/mine --config.task.data.data_dir=DIR \
        --config.task.data.train_source=my.en --config.task.data.train_target=my.de \
        --config.task.data.source_language=en --config.task.data.target_language=de
    echo "A man is sleeping." | tfx-jax translate --workdir=runs/mine
    tfx-jax evaluate --workdir=runs/mine
    tfx-jax plan --config=transformer_files:base --topology=v5e:2x2 --config.model.vocab_size=32000 \
        --config.task.data.source_language=en --config.task.data.target_language=de

DIR holds my.en and my.de, UTF-8, plain or .gz, whose lines i translate each other. Both languages must be set, as the
target's decides how translations are tokenized and scored. Plain text is expected; of tokens with spaces between them
say `--config.task.data.is_tokenized=true`. Without `--config.task.data.validation_source` and `validation_target`, 500
pairs, or a tenth if that is less, are set aside for evaluation. The vocabulary goes by the size of the text
(`tfx_jax.data.tokenizers.train`), from some thousand subwords for a thousand pairs to 32,000 for a million, unless
`--config.model.vocab_size` is given.

Variants: `small`, for up to some hundred thousand pairs and two CPU cores: Transformer-tiny (Wu et al., 2021, "Good for
Misconceived Reasons": 4 + 4 layers, d_model 128, dropout 0.3), which ends early when three evaluations in a row are not
better; `base`, the base model of "Attention Is All You Need" (Vaswani et al., 2017) with its batches, for millions of
pairs and an accelerator; `test`, in seconds on the built-in grammar.

Measured: not yet run. `small` has the sizes and the schedule of `transformer_tiny_multi30k:hour`, which was.
"""

from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.tasks import TranslationConfig
from tfx_jax.training import ExperimentConfig, accelerator_variant, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model, task = TransformerConfig(), TranslationConfig()  # their defaults are the paper's
    config, data = ExperimentConfig(model, task), task.data
    data.dataset = "files"
    data.validation_pairs = 500
    model.vocab_size = 0
    config.eval_every, config.patience = 5_000, 3
    if variant == "small":
        model.num_layers = 4
        model.d_model = 128
        model.num_heads = 4
        model.d_ff = 256
        model.dropout_rate = 0.3
        data.max_length = 128
        data.tokens_per_batch = 2_048
        config.optimizer.peak_learning_rate = 0.0035
        config.optimizer.warmup_steps = 1_000
        config.num_steps = 20_000
        config.checkpoint_every = 500
        config.eval_every = 1_000
    elif variant == "test":
        return tiny_variant(config)
    elif variant == "base":
        return accelerator_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are small, base, test")
    return config
