r"""Decomposable attention tells whether one sentence follows from another, word by word: SICK.

Result: not yet run
"""

from tfx_jax.models.decomposable import DecomposableConfig
from tfx_jax.tasks.classification import LabelledData
from tfx_jax.tasks.sentence_pairs import SentencePairConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "small") -> ExperimentConfig:
    data = LabelledData(dataset="files", train_file="train.tsv", validation_file="dev.tsv", tokenizer="words")
    data.first_column, data.second_column = "sentence_A", "sentence_B"
    data.label_column = "entailment_judgment"
    data.max_length, data.tokens_per_batch = 32, 512  # words of each sentence; some 30 pairs
    model = DecomposableConfig(d_embedding=100, d_model=100, d_ff=100, init="matching")
    task = SentencePairConfig(data, lowercase=True, swapped_labels="NEUTRAL,CONTRADICTION")
    config = ExperimentConfig(model, task)
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule, optimizer.clip_norm = "adamw", "cosine", 1.0
    optimizer.peak_learning_rate, optimizer.warmup_steps = 2e-3, 200
    config.num_steps, config.eval_every, config.checkpoint_every = 1_500, 150, 500
    if variant == "test":
        return tiny_variant(config)
    if variant == "grammar":
        data.dataset, task.swapped_labels = "grammar_pairs", ""
    elif variant == "paper":
        config.model = DecomposableConfig()
    elif variant != "small":
        raise ValueError(f"unknown variant {variant!r}; there are small, grammar, paper, test")
    return config
