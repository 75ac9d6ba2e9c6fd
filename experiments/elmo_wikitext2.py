r"""ELMo, pre-trained on WikiText-2."""

from tfx_jax.models.elmo import CharacterConfig, ElmoConfig
from tfx_jax.tasks.bidirectional_language_modeling import BidirectionalLanguageModelConfig
from tfx_jax.tasks.text_data import TextData
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    model = ElmoConfig(vocab_size=33_278)
    data = TextData(
        dataset="files",
        train_file="train.txt.gz",
        validation_file="valid.txt.gz",
        documents="lines",
        tokenizer="words",
        max_length=64,
        tokens_per_batch=128 * 64,
    )
    config = ExperimentConfig(model, BidirectionalLanguageModelConfig(data))
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule, optimizer.clip_norm = "adam", "cosine", 1.0
    optimizer.peak_learning_rate, optimizer.final_fraction, optimizer.warmup_steps = 1e-3, 0.1, 500
    optimizer.b2, optimizer.epsilon = 0.999, 1e-8
    config.num_steps, config.eval_every, config.keep_last = 10_000, 1_000, 1
    if variant == "small":
        model.vocab_size, model.word_length = 2_000, 20
        model.characters = CharacterConfig(16, (1, 2, 3, 4), (32, 32, 64, 64), 1)
        model.d_hidden, model.d_model, model.dropout_rate = 192, 96, 0.0
        data.max_length, data.tokens_per_batch = 24, 32 * 24
        optimizer.peak_learning_rate, optimizer.warmup_steps = 3e-3, 100
        config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 2_400, 800, 200, 50
    elif variant == "base":
        model.dtype = "bfloat16"
    elif variant == "test":
        return tiny_variant(config)
    else:
        raise ValueError(f"unknown variant {variant!r}; there are small, base, test")
    return config
