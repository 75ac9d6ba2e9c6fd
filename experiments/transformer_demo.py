r"""A small Transformer learns the built-in English-Japanese grammar in a few minutes on a laptop.

    tfx-jax train --config=experiments/transformer_demo.py --workdir=runs/demo

is what `make demo` runs first. There is no paper behind it: the grammar (`tfx_jax.data.grammar`) exists to have
something real to translate without downloading anything, with word order that crosses from one language to the other.
"""

from tfx_jax.training.config import ExperimentConfig


def get_config(variant: str = "demo") -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.num_layers = 2
    config.model.d_model = 128
    config.model.num_heads = 4
    config.model.d_ff = 512
    config.model.vocab_size = 1_000
    config.data.dataset = "grammar"
    config.data.source_language, config.data.target_language = "en", "ja"
    config.data.is_tokenised = True
    config.data.max_length = 64
    config.data.tokens_per_batch = 2_048
    config.optimizer.peak_learning_rate = 0.002
    config.optimizer.warmup_steps = 200
    config.num_steps = 1_500
    config.checkpoint_every = 250
    config.log_every = 50
    if variant == "test":  # seconds, not a model that knows anything
        config.model.num_layers, config.model.d_model, config.model.d_ff = 1, 32, 64
        config.data.tokens_per_batch = 256
        config.data.window = 256
        config.decoding.extra_length = 4
        config.num_steps, config.checkpoint_every, config.log_every = 12, 2, 2
    elif variant != "demo":
        raise ValueError(f'unknown variant {variant!r}; there are "demo" and "test"')
    return config
