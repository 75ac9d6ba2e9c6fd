"""Tasks on text: language modeling, pretraining, classification, tagging, question answering, translation, parsing.

`language_modeling` is the shortest task; start there to write another.
"""

from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig, BertPretrainingTask, pretraining_loss
from tfx_jax.tasks.text.bidirectional_language_modeling import (
    BidirectionalLanguageModelConfig,
    BidirectionalLanguageModelTask,
    bidirectional_language_model_loss,
)
from tfx_jax.tasks.text.classification import (
    ClassificationConfig,
    ClassificationTask,
    LabeledData,
    classification_loss,
)
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig, LanguageModelTask, language_model_loss
from tfx_jax.tasks.text.parsing import ParsingConfig, ParsingTask, TreeData
from tfx_jax.tasks.text.question_answering import (
    QuestionAnsweringConfig,
    QuestionAnsweringTask,
    QuestionData,
    span_loss,
)
from tfx_jax.tasks.text.recurrent_language_modeling import (
    RecurrentLanguageModelConfig,
    RecurrentLanguageModelTask,
    recurrent_language_model_loss,
)
from tfx_jax.tasks.text.sentence_pairs import SentencePairConfig, SentencePairTask, sentence_pair_loss
from tfx_jax.tasks.text.span_corruption import SpanCorruptionConfig, SpanCorruptionTask
from tfx_jax.tasks.text.tagging import TaggedData, TaggingConfig, TaggingTask, tagging_loss
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig, TextToTextTask
from tfx_jax.tasks.text.translation import PairData, TranslationConfig, TranslationTask, translation_loss

__all__ = [
    "BertPretrainingConfig",
    "BertPretrainingTask",
    "BidirectionalLanguageModelConfig",
    "BidirectionalLanguageModelTask",
    "ClassificationConfig",
    "ClassificationTask",
    "LabeledData",
    "LanguageModelConfig",
    "LanguageModelTask",
    "PairData",
    "ParsingConfig",
    "ParsingTask",
    "QuestionAnsweringConfig",
    "QuestionAnsweringTask",
    "QuestionData",
    "RecurrentLanguageModelConfig",
    "RecurrentLanguageModelTask",
    "SentencePairConfig",
    "SentencePairTask",
    "SpanCorruptionConfig",
    "SpanCorruptionTask",
    "TaggedData",
    "TaggingConfig",
    "TaggingTask",
    "TextData",
    "TextToTextConfig",
    "TextToTextTask",
    "TranslationConfig",
    "TranslationTask",
    "TreeData",
    "bidirectional_language_model_loss",
    "classification_loss",
    "language_model_loss",
    "pretraining_loss",
    "recurrent_language_model_loss",
    "sentence_pair_loss",
    "span_loss",
    "tagging_loss",
    "translation_loss",
]
