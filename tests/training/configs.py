"""Configurations: of all that can be trained, and with other values."""

from tfx_jax.models import (
    BertConfig,
    CaptionerConfig,
    ConformerConfig,
    DecomposableConfig,
    ElmoConfig,
    EsimConfig,
    GPTConfig,
    LongEncoderConfig,
    ReformerConfig,
    SanCTCConfig,
    Seq2SeqConfig,
    Seq2VecConfig,
    T5Config,
    TransformerConfig,
    TransformerXLConfig,
    ViTConfig,
)
from tfx_jax.tasks.bert_pretraining import BertPretrainingConfig
from tfx_jax.tasks.bidirectional_language_modeling import BidirectionalLanguageModelConfig
from tfx_jax.tasks.caption_data import CaptionData
from tfx_jax.tasks.captioning import CaptioningConfig
from tfx_jax.tasks.classification import ClassificationConfig, LabelledData
from tfx_jax.tasks.duplication import DuplicationConfig, DuplicationData
from tfx_jax.tasks.event_classification import EventClassificationConfig
from tfx_jax.tasks.event_data import EventData
from tfx_jax.tasks.image_classification import ImageClassificationConfig
from tfx_jax.tasks.image_data import ImageData
from tfx_jax.tasks.language_modeling import LanguageModelConfig
from tfx_jax.tasks.long_range import LongRangeConfig
from tfx_jax.tasks.long_range_data import ListOpsData, PassagePairData, SectionData
from tfx_jax.tasks.pair_data import PairData
from tfx_jax.tasks.parsing import ParsingConfig, TreeData
from tfx_jax.tasks.question_answering import QuestionAnsweringConfig, QuestionData
from tfx_jax.tasks.recorded_speech import RecordedSpeech
from tfx_jax.tasks.recurrent_language_modeling import RecurrentLanguageModelConfig
from tfx_jax.tasks.sentence_pairs import SentencePairConfig
from tfx_jax.tasks.span_corruption import SpanCorruptionConfig
from tfx_jax.tasks.speech_data import SpeechData
from tfx_jax.tasks.speech_recognition import SpeechRecognitionConfig
from tfx_jax.tasks.tagging import TaggedData, TaggingConfig
from tfx_jax.tasks.text_data import TextData
from tfx_jax.tasks.text_to_text import TextToTextConfig
from tfx_jax.tasks.translation import TranslationConfig
from tfx_jax.training.config import ExperimentConfig

TRAININGS = [
    (TransformerConfig, TranslationConfig, PairData),
    (Seq2SeqConfig, TranslationConfig, PairData),
    (GPTConfig, LanguageModelConfig, TextData),
    (GPTConfig, DuplicationConfig, DuplicationData),
    (ReformerConfig, LanguageModelConfig, TextData),
    (TransformerXLConfig, RecurrentLanguageModelConfig, TextData),
    (BertConfig, BertPretrainingConfig, TextData),
    (BertConfig, ClassificationConfig, LabelledData),
    (BertConfig, TaggingConfig, TaggedData),
    (ElmoConfig, TaggingConfig, TaggedData),
    (ElmoConfig, BidirectionalLanguageModelConfig, TextData),
    (BertConfig, QuestionAnsweringConfig, QuestionData),
    (T5Config, SpanCorruptionConfig, TextData),
    (T5Config, TextToTextConfig, LabelledData),
    (T5Config, TextToTextConfig, TaggedData),
    (T5Config, TextToTextConfig, QuestionData),
    (SanCTCConfig, SpeechRecognitionConfig, SpeechData),
    (ConformerConfig, SpeechRecognitionConfig, RecordedSpeech),
    (TransformerConfig, ParsingConfig, TreeData),
    (CaptionerConfig, CaptioningConfig, CaptionData),
    (ViTConfig, ImageClassificationConfig, ImageData),
    (Seq2VecConfig, EventClassificationConfig, EventData),
    (DecomposableConfig, SentencePairConfig, LabelledData),
    (EsimConfig, SentencePairConfig, LabelledData),
    (LongEncoderConfig, LongRangeConfig, ListOpsData),
    (LongEncoderConfig, LongRangeConfig, SectionData),
    (LongEncoderConfig, LongRangeConfig, PassagePairData),
]
"""Every task with each of its data, and every model with a task: classes of configurations of model, task and data.

`test_config.py` sees that no task is missing, and `test_run.py` that no model is.
"""


def default_config(classes):
    """The configuration of one of TRAININGS, all of its fields as they are unless somebody says otherwise."""
    model, task, data = classes
    return ExperimentConfig(model=model(), task=task(data=data()))


def title(classes):
    """What the case of a test is called."""
    return "-".join(part.__name__ for part in classes)


def with_values(config, values):
    """The configuration, some of its leaves replaced: with_values(config, {"model.d_ff": 3})."""
    for name, value in values.items():
        *path, leaf = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, leaf)
        setattr(owner, leaf, value)
    return config


def changed(**values):
    """The default configuration with some leaves replaced: changed(**{"model.d_ff": 3})."""
    return with_values(ExperimentConfig(), values)
