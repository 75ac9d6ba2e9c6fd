"""What a configuration must fulfil, checked once, after the command line has changed it."""

import re
from typing import Any

from tfx_jax.data.next_sentence import NUM_PAIR_SPECIALS
from tfx_jax.data.span_corruption import NUM_SENTINELS, longest_text, num_sentinels
from tfx_jax.errors import UserError
from tfx_jax.models.bert import INITS, BertConfig
from tfx_jax.models.gpt import GPTConfig
from tfx_jax.models.t5 import T5Config
from tfx_jax.models.transformer import BOS_ID, EOS_ID, PAD_ID, TransformerConfig
from tfx_jax.nn.feed_forward import ACTIVATIONS
from tfx_jax.training.config import DataConfig, ExperimentConfig, LabelledConfig, QuestionsConfig, TextConfig, flat

# Names of fields; models and data have only some of them, and None means something of its own.
_AT_LEAST_ONE = (
    "model.num_layers",
    "model.num_decoder_layers",
    "model.num_heads",
    "model.d_model",
    "model.d_k",
    "model.d_ff",
    "model.max_distance",
    "model.max_length",
    "data.max_length",
    "data.sort_buffer",
    "data.stride",
    "data.max_question_length",
    "data.max_answer_length",
    "optimizer.warmup_steps",
    "accumulate",
    "decoding.beam_size",
    "num_steps",
    "log_every",
    "checkpoint_every",
    "keep_last",
)
_AT_LEAST_ZERO = (
    "model.vocab_size",
    "model.learned_positions",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "data.validation_pairs",
    "z_loss",
    "decoding.alpha",
    "decoding.extra_length",
    "eval_every",
    "patience",
    "keep_best",
    "keep_every",
    "hang_seconds",
)
_BELOW_ONE = (
    "model.dropout_rate",
    "model.attention_dropout_rate",
    "model.activation_dropout_rate",
    "model.head_dropout_rate",
    "data.validation_share",
    "optimizer.final_fraction",
    "optimizer.b1",
    "optimizer.b2",
    "label_smoothing",
)
_CHOICES = {
    "model.activation": tuple(ACTIVATIONS),
    "model.init": INITS,
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots"),
    "data.documents": ("file", "lines", "articles"),
    "data.scoring": ("words", "characters"),
    "optimizer.name": ("adam", "adamw", "adafactor"),
    "optimizer.schedule": ("inverse_sqrt", "cosine", "linear"),
    "bad_steps": ("stop", "skip"),
}
_TOKENS = {"model.pad_id": PAD_ID, "model.start_id": BOS_ID, "model.eos_id": EOS_ID}


def validate(config: ExperimentConfig) -> ExperimentConfig:
    """Raises UserError for impossible settings; call it after command-line overrides."""
    _check_values(flat(config))
    _check_sizes(config)
    _check_attention(config)
    if isinstance(config.data, DataConfig):
        _check_pairs(config)
    else:
        _check_rows(config)
    optimizer, every = config.optimizer, config.keep_every
    if optimizer.name == "adam" and optimizer.weight_decay:
        raise UserError('config.optimizer.weight_decay is not for "adam": choose config.optimizer.name="adamw"')
    if optimizer.schedule != "inverse_sqrt" and optimizer.peak_learning_rate is None:
        raise UserError(f'config.optimizer.schedule="{optimizer.schedule}" needs config.optimizer.peak_learning_rate')
    if config.spike_factor and not config.spike_factor > 1:
        raise UserError(f"config.spike_factor must be 0 or above 1, got {config.spike_factor}")
    if config.data.tokens_per_batch < config.data.max_length:
        raise UserError(
            f"config.data.tokens_per_batch={config.data.tokens_per_batch} holds no {_row_name(config)} of "
            f"max_length={config.data.max_length}"
        )
    if every % config.checkpoint_every and (not config.eval_every or every % config.eval_every):
        raise UserError(
            f"config.keep_every={every} must be a multiple of checkpoint_every={config.checkpoint_every} or of "
            "eval_every: other steps are not saved"
        )
    return config


def _row_name(config: ExperimentConfig) -> str:
    return "sentence" if isinstance(config.data, DataConfig) else "row"


def _check_values(values: dict[str, Any]) -> None:
    """Bounds and choices of single fields."""
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            if values.get(name) is not None and not values[name] >= least:
                raise UserError(f"config.{name} must be at least {least}, got {values[name]}")
    for name in _BELOW_ONE:
        if values.get(name) is not None and not 0.0 <= values[name] < 1.0:
            raise UserError(f"config.{name} must be in [0, 1), got {values[name]}")
    for name, choices in _CHOICES.items():
        if name in values and values[name] not in choices:
            listed = " or ".join(f'"{choice}"' for choice in choices)
            raise UserError(f"config.{name} must be {listed}, got {values[name]!r}")


def _check_sizes(config: ExperimentConfig) -> None:
    """What the sizes of a model must divide."""
    model = config.model
    if isinstance(model, TransformerConfig) and model.d_model % 2 and not model.learned_positions:
        raise UserError(f"config.model.d_model must be even for sinusoidal positions, got {model.d_model}")
    sizes = (model.d_k, model.d_v) if isinstance(model, TransformerConfig) else (getattr(model, "d_k", None),)
    if None in sizes and model.d_model % model.num_heads:
        raise UserError(f"config.model.d_model={model.d_model} is not divisible by num_heads={model.num_heads}")
    for axis, names in (("tensor", ("num_heads", "d_ff")), ("fsdp", ("d_model",))):
        for name in names:
            if (getattr(model, name) or 4 * model.d_model) % max(getattr(config.mesh, axis), 1):
                raise UserError(
                    f"config.mesh.{axis}={getattr(config.mesh, axis)} does not divide "
                    f"config.model.{name}={getattr(model, name)}"
                )


def _check_attention(config: ExperimentConfig) -> None:
    """Whether there is such an attention, and the model, the data and the mesh can have it."""
    model, attention = config.model, config.model.attention
    is_causal, has_bias = isinstance(model, TransformerConfig | GPTConfig | T5Config), isinstance(model, T5Config)
    try:
        attention.check(is_causal=is_causal, has_bias=has_bias, is_packed=getattr(config.data, "is_packed", False))
    except ValueError as error:
        raise UserError(f"config.model: {error}") from None
    if config.mesh.sequence > 1 and attention.name != "dense":
        raise UserError(
            f"config.mesh.sequence={config.mesh.sequence} divides positions, which {attention.name} attention does not "
            "allow: leave it at 1"
        )


def _check_pairs(config: ExperimentConfig) -> None:
    """Of pairs of sentences, for the Transformer."""
    model, data, values = config.model, config.data, flat(config)
    for name, token in _TOKENS.items():
        if isinstance(model, TransformerConfig) and values[name] != token:
            raise UserError(f"config.{name} must be {token}, which it is for the tokenizers, got {values[name]}")
    _check_languages(data)
    if data.tokenizer not in ("sentencepiece", "words"):
        raise UserError(f'config.data.tokenizer must be "sentencepiece" or "words", got {data.tokenizer!r}')
    if not isinstance(model, TransformerConfig):
        return
    longest = data.max_length + config.decoding.extra_length
    if model.learned_positions and model.learned_positions < longest:
        raise UserError(
            f"config.model.learned_positions={model.learned_positions} is less than data.max_length + "
            f"decoding.extra_length = {longest}: a translation may be that long"
        )


def _check_languages(data: DataConfig) -> None:
    """What a target is in decides how it is tokenised and scored, so it is said, and nothing contradicts it."""
    languages = {"source": data.source_language, "target": data.target_language}
    said = data.source_language or "en", data.target_language or "ja"
    if data.dataset == "grammar" and said != ("en", "ja"):
        raise UserError(
            f'config.data.dataset="grammar" is English to Japanese, not {said[0]} to {said[1]}: '
            "leave its languages out, or name another dataset"
        )
    if data.dataset != "files":  # TFDS knows what languages a data set has
        return
    for side, language in languages.items():
        if not re.fullmatch("[a-z]{2,3}([-_][A-Za-z0-9]+)*", language):
            given = f", got {language!r}" if language else ""
            raise UserError(
                f'config.data.{side}_language must be the code of a language, such as "en" or "de"{given}: it says '
                f"what the {side} side of the files is"
            )
    if languages["source"] != languages["target"]:
        for side, other in (("source", "target"), ("target", "source")):
            for split in ("train", "validation", "test"):
                file = getattr(data, f"{split}_{side}")
                if file.removesuffix(".gz").endswith(f".{languages[other]}"):
                    raise UserError(
                        f"config.data.{split}_{side}={file} looks like the {other} side, whose language is "
                        f"{languages[other]}: exchange files or languages"
                    )


def _check_rows(config: ExperimentConfig) -> None:
    """Of everything else."""
    model, data = config.model, config.data
    if model.vocab_size < 1:  # 0, for the size of the text to decide, is of translation alone
        raise UserError(f"config.model.vocab_size must be at least 1, got {model.vocab_size}")
    if isinstance(model, GPTConfig | BertConfig) and model.max_length < data.max_length:
        raise UserError(
            f"config.data.max_length={data.max_length} is more than config.model.max_length={model.max_length}"
        )
    if config.mesh.sequence > 1:
        raise UserError(f"config.mesh.sequence={config.mesh.sequence} is for translation only: leave it at 1")
    datasets = ("grammar", "grammar_pairs", "files") if isinstance(data, LabelledConfig) else ("grammar", "files")
    if data.dataset not in datasets:
        listed = " or ".join(f'"{dataset}"' for dataset in datasets)
        raise UserError(f"config.data.dataset must be {listed}, got {data.dataset!r}")
    if isinstance(data, QuestionsConfig) and data.max_length < data.max_question_length + NUM_PAIR_SPECIALS + 1:
        raise UserError(
            f"config.data.max_length={data.max_length} leaves no token for the context beside a question of "
            f"max_question_length={data.max_question_length} and {NUM_PAIR_SPECIALS} special ones"
        )
    if isinstance(data, TextConfig) and data.is_packed and not isinstance(model, GPTConfig):
        raise UserError("config.data.is_packed is for a GPT only")
    if isinstance(data, TextConfig) and data.validation_file and data.validation_share:
        raise UserError("config.data.validation_file and validation_share exclude each other: set one")
    if isinstance(data, LabelledConfig) and len({bool(getattr(data, f"{name}_column")) for name in _COLUMNS}) > 1:
        raise UserError("config.data.first_column, second_column and label_column go together, or all are empty")
    if isinstance(model, T5Config):
        _check_t5(model, data)


def _check_t5(model: T5Config, data: Any) -> None:
    """Of a T5 and what it reads."""
    if not 4 <= model.num_buckets // 2 * 2 < 2 * model.max_distance:
        raise UserError(
            f"config.model.num_buckets={model.num_buckets} must be at least 4 and less than twice max_distance="
            f"{model.max_distance}"
        )
    if not isinstance(data, TextConfig):
        return
    if data.max_length < 3:
        raise UserError(f"config.data.max_length={data.max_length} has no room for a span, its surroundings and an end")
    needed = num_sentinels(longest_text(data.max_length))
    if needed > NUM_SENTINELS:
        raise UserError(
            f"config.data.max_length={data.max_length} means {needed} sentinels in a target, but T5's tokenizers have "
            f"{NUM_SENTINELS}: lower it"
        )


_COLUMNS = ("first", "second", "label")
