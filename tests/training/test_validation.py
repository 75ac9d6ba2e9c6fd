"""Settings that are refused, each with the name of its field, and unusual ones that are not."""

import dataclasses

import pytest

from tests.training.configs import TRAININGS, changed, default_config, title, with_values
from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, LlamaConfig, Seq2SeqConfig, T5Config, TransformerConfig
from tfx_jax.nn.attention import RotaryConfig
from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig
from tfx_jax.tasks.text.classification import ClassificationConfig
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.question_answering import QuestionAnsweringConfig
from tfx_jax.tasks.text.span_corruption import SpanCorruptionConfig
from tfx_jax.tasks.text.tagging import TaggingConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate


def of(model, task, **values):
    """The tiny variant of another training, some of its leaves replaced."""
    return with_values(tiny_variant(ExperimentConfig(model=model, task=task)), values)


def test_defaults_are_the_base_model_and_valid():
    config = ExperimentConfig()
    assert validate(config) is config
    assert (config.model.num_layers, config.model.d_model, config.model.d_ff) == (6, 512, 2048)
    assert (config.optimizer.b1, config.optimizer.b2, config.optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (config.task.decoding.beam_size, config.task.decoding.length_penalty, config.task.decoding.extra_length) == (
        4,
        0.6,
        50,
    )
    validate(ExperimentConfig(model=TransformerConfig.big()))
    validate(ExperimentConfig(model=TransformerConfig.marian(num_decoder_layers=1)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.num_layers", 0, "model.num_layers must be at least 1, got 0"),
        ("model.d_model", -4, "model.d_model must be at least 1, got -4"),
        ("model.num_decoder_layers", 0, "model.num_decoder_layers must be at least 1, got 0"),
        ("model.activation_dropout_rate", 1.0, r"model.activation_dropout_rate must be in \[0, 1\), got 1.0"),
        (
            "model.activation",
            "tanh",
            'model.activation must be "relu" or "gelu" or "gelu_tanh" or "swish" or "quick_gelu", got \'tanh\'',
        ),
        ("num_steps", 0, "num_steps must be at least 1, got 0"),
        ("log_every", 0, "log_every must be at least 1, got 0"),
        ("checkpoint_every", 0, "checkpoint_every must be at least 1, got 0"),
        ("keep_last", 0, "keep_last must be at least 1, got 0"),
        ("optimizer.warmup_steps", 0, "optimizer.warmup_steps must be at least 1, got 0"),
        ("task.decoding.beam_size", 0, "task.decoding.beam_size must be at least 1, got 0"),
        ("task.decoding.length_penalty", -0.1, "task.decoding.length_penalty must be at least 0, got -0.1"),
        ("task.decoding.length_penalty", float("nan"), "task.decoding.length_penalty must be at least 0, got nan"),
        ("task.decoding.extra_length", -1, "task.decoding.extra_length must be at least 0, got -1"),
        ("eval_every", -1, "eval_every must be at least 0, got -1"),
        ("patience", -1, "patience must be at least 0, got -1"),
        ("lora.targets", "up", "lora has options of adapters, but config.lora.rank=0 makes none: set it to 8, say"),
        ("lora.use_dora", True, "lora has options of adapters, but config.lora.rank=0 makes none: set it to 8, say"),
        ("keep_best", -1, "keep_best must be at least 0, got -1"),
        ("model.dropout_rate", 1.0, r"model.dropout_rate must be in \[0, 1\), got 1.0"),
        ("model.attention_dropout_rate", -0.1, r"model.attention_dropout_rate must be in \[0, 1\), got -0.1"),
        ("task.label_smoothing", 1.5, r"task.label_smoothing must be in \[0, 1\), got 1.5"),
        ("optimizer.b2", 1.0, r"optimizer.b2 must be in \[0, 1\), got 1.0"),
        ("model.d_model", 511, "model.d_model must be even for sinusoidal positions, got 511"),
        ("model.num_heads", 7, "model.d_model=512 is not divisible by num_heads=7: set d_k and d_v"),
        ("model.dtype", "float61", 'model.dtype must be "float32" or "bfloat16", got \'float61\''),
        ("model.remat", "some", 'model.remat must be "none" or "full" or "dots", got \'some\''),
        (
            "optimizer.name",
            "x",
            'optimizer.name must be "adam" or "adamw" or "adafactor" or "lion" or "sgd" or "muon" or "schedule_free", '
            "got 'x'",
        ),
        ("optimizer.weight_decay", -0.1, "optimizer.weight_decay must be at least 0, got -0.1"),
        (
            "optimizer.weight_decay",
            0.1,
            'optimizer.weight_decay must be 0 for "adam": use config.optimizer.name="adamw" for weight decay',
        ),
        ("optimizer.clip_norm", -1.0, "optimizer.clip_norm must be at least 0, got -1.0"),
        ("task.z_loss", -1.0, "task.z_loss must be at least 0, got -1.0"),
        ("accumulate", 0, "accumulate must be at least 1, got 0"),
        ("bad_steps", "ignore", 'bad_steps must be "stop" or "skip", got \'ignore\''),
        ("spike_factor", 0.5, "spike_factor must be 0 or above 1, got 0.5"),
        ("spike_factor", float("nan"), "spike_factor must be finite, got nan"),
        ("model.dtype", "int32", 'model.dtype must be "float32" or "bfloat16", got \'int32\''),
        (
            "task.data.tokenizer",
            "bytes",
            'task.data.tokenizer must be "sentencepiece" or "words" or "characters", got \'bytes\'',
        ),
        ("task.data.validation_pairs", -1, "task.data.validation_pairs must be at least 0, got -1"),
        (
            "task.data.target_language",
            "de",
            'task.data.dataset="grammar" is English to Japanese, not en to de: leave its languages out, or .*',
        ),
        (
            "task.data.dataset",
            "gramar",
            'task.data.dataset="gramar" is unknown: did you mean "grammar"\\? A TFDS name .*',
        ),
        ("task.data.dataset", "file", 'task.data.dataset="file" is unknown: did you mean "files"\\? A TFDS name .*'),
        (
            "task.data.tokens_per_batch",
            255,
            "task.data.tokens_per_batch=255 must be at least max_length=256, the size of one sentence",
        ),
        (
            "model.learned_positions",
            300,
            r"model.learned_positions=300 is less than .*= 306: a translation may be that long",
        ),
    ],
)
def test_impossible_settings_are_refused(field, value, message):
    with pytest.raises(UserError, match=f"^config.{message}$"):
        validate(changed(**{field: value}))


@pytest.mark.parametrize(
    "values",
    [
        {"model.d_model": 511, "model.num_heads": 1, "model.learned_positions": 306},
        {"model.num_heads": 7, "model.d_k": 64, "model.d_v": 64},
        {"model.dtype": "bfloat16"},
        {"task.data.tokens_per_batch": 256},
        {"optimizer.name": "adafactor", "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0},
        {"model.remat": "dots", "accumulate": 4, "task.z_loss": 1e-4, "bad_steps": "skip", "spike_factor": 2.0},
        {"task.label_smoothing": 0.0, "model.dropout_rate": 0.0, "keep_best": 0, "task.decoding.length_penalty": 0.0},
    ],
)
def test_unusual_settings_that_work(values):
    validate(changed(**values))


FILES = {"task.data.dataset": "files", "task.data.source_language": "en", "task.data.target_language": "de"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"task.data.source_language": ""},
            r'task.data.source_language must be the code of a language, such as "en" or "de": it',
        ),
        (
            {"task.data.target_language": ""},
            r'task.data.target_language must be the code of a language, such as "en" or "de": it',
        ),
        (
            {"task.data.target_language": "German"},
            r"task.data.target_language must be the code .*, got 'German': it is the",
        ),
        (
            {"task.data.train_source": "my.de"},
            "task.data.train_source=my.de looks like the target side, whose language is de",
        ),
        (
            {"task.data.test_target": "a/b.en.gz"},
            "task.data.test_target=a/b.en.gz looks like the source side, whose language is",
        ),
    ],
)
def test_languages_of_files_are_said_and_contradict_nothing(values, message):
    with pytest.raises(UserError, match=f"^config.{message}"):
        validate(changed(**FILES | values))


@pytest.mark.parametrize(
    "values",
    [
        {
            "task.data.train_source": "my.en",
            "task.data.train_target": "my.de.gz",
            "task.data.validation_source": "de.txt",
        },
        {
            "task.data.source_language": "pt_BR",
            "task.data.target_language": "zh-Hans",
            "task.data.train_source": "both.tsv",
        },
        {"task.data.source_language": "de", "task.data.train_source": "hard.de", "task.data.train_target": "easy.de"},
    ],
)
def test_languages_of_files_that_fit(values):
    validate(changed(**FILES | values))


def test_vocabulary_may_be_left_to_the_text_where_one_translates():
    validate(changed(**{"model.vocab_size": 0}))
    with pytest.raises(UserError, match=r"^config.model.vocab_size must be at least 1, got 0$"):
        validate(of(GPTConfig(), LanguageModelConfig(), **{"model.vocab_size": 0}))


def of_text(**values):
    return of(GPTConfig(), LanguageModelConfig(), **values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            of_text(**{"model.max_length": 63}),
            r"task.data.max_length=64 is more than config.model.max_length=63: set --config\.task.* or less",
        ),
        (
            of_text(**{"task.data.documents": "words"}),
            'task.data.documents must be "file" or "lines" or "articles"',
        ),
        (of_text(**{"task.data.dataset": "x"}), 'task.data.dataset must be "grammar" or "files", got \'x\''),
        (of_text(**{"task.data.validation_share": 1.0}), r"task.data.validation_share must be in \[0, 1\)"),
        (
            of_text(**{"task.data.validation_share": 0.1, "task.data.validation_file": "x"}),
            "task.data.validation_file and validation_share must not both be set",
        ),
        (
            of(BertConfig(), BertPretrainingConfig(), **{"model.init": "x"}),
            'model.init must be "paper" or "matching", got \'x\'',
        ),
        (
            of(BertConfig(), BertPretrainingConfig(), **{"task.data.max_length": 7}),
            "task.data.max_length=7 must be at least 8, for pairs of segments",
        ),
        (
            of(BertConfig(), ClassificationConfig(), **{"task.data.first_column": "a"}),
            "task.data.first_column, second_column and label_column must",
        ),
        (
            of(BertConfig(), ClassificationConfig(), **{"task.data.dataset": "x"}),
            'task.data.dataset must be "grammar" or "grammar_pairs" or "files"',
        ),
        (
            of(BertConfig(), QuestionAnsweringConfig(), **{"task.data.scoring": "bytes"}),
            'task.data.scoring must be "words" or "characters"',
        ),
        (
            of(BertConfig(), QuestionAnsweringConfig(), **{"task.max_question_length": 61}),
            "task.data.max_length=64 leaves no token for the context beside a question of max_question_length=61 and 3",
        ),
        (of(BertConfig(), QuestionAnsweringConfig(), **{"task.stride": 0}), "task.stride must be at least 1, got 0"),
        (
            of(BertConfig(), TaggingConfig(), **{"model.num_heads": 5}),
            "model.d_model=32 is not divisible by num_heads=5",
        ),
        (
            of(T5Config(), SpanCorruptionConfig(), **{"mesh.sequence": 2}),
            "mesh.sequence=2 shards positions, which SpanCorruptionConfig does not support: leave it at 1",
        ),
        (
            of(Seq2SeqConfig(variant="bahdanau"), TranslationConfig(), **{"model.alignment": "local-p"}),
            'model.alignment="local-p" needs variant="luong", got variant="bahdanau"',
        ),
        (
            of(Seq2SeqConfig(), TranslationConfig(), **{"model.alignment": "local"}),
            'model.alignment must be "global" or "local-m" or "local-p", got \'local\'',
        ),
        (of(Seq2SeqConfig(), TranslationConfig(), **{"model.window": 0}), "model.window must be at least 1, got 0"),
        (
            of(Seq2SeqConfig(), TranslationConfig(), **{"model.coverage": -1.0}),
            "model.coverage must be at least 0, got -1",
        ),
        (
            of(Seq2SeqConfig(score="dot"), TranslationConfig(), **{"model.coverage": 1.0}),
            'model.coverage=1.0 needs an additive score, variant="bahdanau" or variant="luong" with score="concat"',
        ),
        (of_text(**{"mesh.tensor": 3}), "mesh.tensor=3 does not divide config.model.num_heads=2"),
        (
            of_text(**{"task.data.tokens_per_batch": 63}),
            "task.data.tokens_per_batch=63 must be at least max_length=64, the size of one row",
        ),
        (of_text(**{"optimizer.schedule": "cosine"}), 'optimizer.schedule="cosine" needs config.optimizer.peak'),
    ],
)
def test_impossible_settings_of_other_models(config, message):
    with pytest.raises(UserError, match=f"^config.{message}"):
        validate(config)


@pytest.mark.parametrize("classes", TRAININGS, ids=title)
def test_a_task_takes_models_of_its_kind_alone(classes):
    """That packed texts are for a GPT only, for one: they are a matter of language modeling."""
    config = default_config(classes)
    tiny_variant(config)
    validate(config)
    kinds = list(dict.fromkeys(model.kind for model, task, _ in TRAININGS if task is classes[1]))
    for model in (TransformerConfig(), GPTConfig(), BertConfig(), T5Config()):
        if model.kind not in kinds:
            config.model = model
            name = type(model).__name__
            listed = " or ".join(map(repr, kinds))
            with pytest.raises(
                UserError, match=f" needs a model of the kind {listed}, but a {name} is '{model.kind}'$"
            ):
                validate(config)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (GPTConfig(d_ff=None), LanguageModelConfig(data=TextData(max_length=128), is_packed=True)),
        (BertConfig(d_ff=None), BertPretrainingConfig(data=TextData(max_length=128))),
        (T5Config(num_heads=5), SpanCorruptionConfig(data=TextData(max_length=128))),
        (T5Config(), TextToTextConfig()),
    ],
)
def test_sizes_of_other_models(model, task):
    validate(ExperimentConfig(model=model, task=task))


def test_schedule_free_needs_a_momentum():
    values = {"optimizer.name": "schedule_free", "optimizer.schedule": "constant", "optimizer.b1": 0.0}
    config = with_values(default_config((GPTConfig, LanguageModelConfig, TextData)), values)
    message = r'^config\.optimizer\.b1 must be above 0 for "schedule_free", which divides by it: set it to 0\.9$'
    with pytest.raises(UserError, match=message):
        validate(tiny_variant(config))


def test_packed_texts_have_no_rotary_frequencies_that_depend_on_a_length():
    task = LanguageModelConfig(data=TextData(max_length=128), is_packed=True)
    model = LlamaConfig(rotary=RotaryConfig(scaling="dynamic"))
    with pytest.raises(UserError, match=r"config\.model\.rotary\.scaling='dynamic' depends on the length of a text"):
        validate(ExperimentConfig(model=model, task=task))
    validate(ExperimentConfig(model=model, task=dataclasses.replace(task, is_packed=False)))
