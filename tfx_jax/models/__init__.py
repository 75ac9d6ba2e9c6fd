"""Models, one file for each paper; a file defines the configuration first and then the model."""

from tfx_jax.models.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertMaskedLM,
    BertMultipleChoice,
    BertNextSentence,
    BertPretraining,
    BertQuestionAnswering,
    BertReplacedTokens,
    BertTagger,
)
from tfx_jax.models.captioning import Captioner, CaptionerConfig
from tfx_jax.models.clip import Clip, ClipConfig
from tfx_jax.models.conformer import Conformer, ConformerConfig
from tfx_jax.models.decomposable import DecomposableAttention, DecomposableConfig
from tfx_jax.models.elmo import Elmo, ElmoConfig, ElmoLanguageModel, ElmoTagger
from tfx_jax.models.esim import Esim, EsimConfig
from tfx_jax.models.gpt import GPT, GPTConfig
from tfx_jax.models.llama import Llama, LlamaBody, LlamaClassifier, LlamaConfig
from tfx_jax.models.long_encoder import LongEncoder, LongEncoderConfig
from tfx_jax.models.patch_pooling import PatchPooling, PatchPoolingConfig
from tfx_jax.models.reformer import Reformer, ReformerConfig
from tfx_jax.models.san_ctc import SanCTC, SanCTCConfig
from tfx_jax.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tfx_jax.models.seq2vec import Seq2Vec, Seq2VecConfig
from tfx_jax.models.t5 import T5, T5Classifier, T5Config, T5Encoder, T5Tagger
from tfx_jax.models.transformer import Transformer, TransformerClassifier, TransformerConfig
from tfx_jax.models.transformer_xl import TransformerXL, TransformerXLConfig
from tfx_jax.models.vit import ViT, ViTClassifier, ViTConfig
from tfx_jax.models.whisper import Whisper, WhisperConfig

__all__ = [
    "GPT",
    "T5",
    "Bert",
    "BertClassifier",
    "BertConfig",
    "BertMaskedLM",
    "BertMultipleChoice",
    "BertNextSentence",
    "BertPretraining",
    "BertQuestionAnswering",
    "BertReplacedTokens",
    "BertTagger",
    "Captioner",
    "CaptionerConfig",
    "Clip",
    "ClipConfig",
    "Conformer",
    "ConformerConfig",
    "DecomposableAttention",
    "DecomposableConfig",
    "Elmo",
    "ElmoConfig",
    "ElmoLanguageModel",
    "ElmoTagger",
    "Esim",
    "EsimConfig",
    "GPTConfig",
    "Llama",
    "LlamaBody",
    "LlamaClassifier",
    "LlamaConfig",
    "LongEncoder",
    "LongEncoderConfig",
    "PatchPooling",
    "PatchPoolingConfig",
    "Reformer",
    "ReformerConfig",
    "SanCTC",
    "SanCTCConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Seq2Vec",
    "Seq2VecConfig",
    "T5Classifier",
    "T5Config",
    "T5Encoder",
    "T5Tagger",
    "Transformer",
    "TransformerClassifier",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "ViT",
    "ViTClassifier",
    "ViTConfig",
    "Whisper",
    "WhisperConfig",
]
