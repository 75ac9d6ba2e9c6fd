"""Configurations: of all that can be trained, and with other values."""

from tfx_jax.models import (
    BertConfig,
    CaptionerConfig,
    ConformerConfig,
    DecomposableConfig,
    ElmoConfig,
    EsimConfig,
    GPTConfig,
    LlamaConfig,
    LongEncoderConfig,
    PatchPoolingConfig,
    ReformerConfig,
    SanCTCConfig,
    Seq2SeqConfig,
    Seq2VecConfig,
    T5Config,
    TransformerConfig,
    TransformerXLConfig,
    ViTConfig,
)
from tfx_jax.tasks import (
    BertPretrainingConfig,
    BidirectionalLanguageModelConfig,
    CaptionData,
    CaptioningConfig,
    ClassificationConfig,
    DuplicationConfig,
    DuplicationData,
    EventClassificationConfig,
    EventData,
    ImageClassificationConfig,
    ImageData,
    LabeledData,
    LanguageModelConfig,
    ListOpsData,
    LongRangeConfig,
    PairData,
    ParsingConfig,
    PassagePairData,
    QuestionAnsweringConfig,
    QuestionData,
    RecallConfig,
    RecallData,
    RecordedSpeech,
    RecurrentLanguageModelConfig,
    SectionData,
    SentencePairConfig,
    SpanCorruptionConfig,
    SpeechData,
    SpeechRecognitionConfig,
    TaggedData,
    TaggingConfig,
    TextData,
    TextToTextConfig,
    TranslationConfig,
    TreeData,
)
from tfx_jax.training import ExperimentConfig

TRAININGS = [
    (TransformerConfig, TranslationConfig, PairData),
    (Seq2SeqConfig, TranslationConfig, PairData),
    (GPTConfig, LanguageModelConfig, TextData),
    (LlamaConfig, LanguageModelConfig, TextData),
    (GPTConfig, DuplicationConfig, DuplicationData),
    (LlamaConfig, RecallConfig, RecallData),
    (ReformerConfig, LanguageModelConfig, TextData),
    (TransformerXLConfig, RecurrentLanguageModelConfig, TextData),
    (BertConfig, BertPretrainingConfig, TextData),
    (BertConfig, ClassificationConfig, LabeledData),
    (BertConfig, TaggingConfig, TaggedData),
    (ElmoConfig, TaggingConfig, TaggedData),
    (ElmoConfig, BidirectionalLanguageModelConfig, TextData),
    (BertConfig, QuestionAnsweringConfig, QuestionData),
    (T5Config, SpanCorruptionConfig, TextData),
    (T5Config, TextToTextConfig, LabeledData),
    (T5Config, TextToTextConfig, TaggedData),
    (T5Config, TextToTextConfig, QuestionData),
    (SanCTCConfig, SpeechRecognitionConfig, SpeechData),
    (ConformerConfig, SpeechRecognitionConfig, RecordedSpeech),
    (TransformerConfig, ParsingConfig, TreeData),
    (CaptionerConfig, CaptioningConfig, CaptionData),
    (ViTConfig, ImageClassificationConfig, ImageData),
    (PatchPoolingConfig, ImageClassificationConfig, ImageData),
    (Seq2VecConfig, EventClassificationConfig, EventData),
    (DecomposableConfig, SentencePairConfig, LabeledData),
    (EsimConfig, SentencePairConfig, LabeledData),
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
