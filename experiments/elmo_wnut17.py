r"""ELMo on WNUT-17."""

from tfx_jax.models.elmo import ElmoConfig, ElmoTaggerConfig
from tfx_jax.tasks.tagging import TaggedData, TaggingConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


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
