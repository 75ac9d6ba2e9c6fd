"""What can be learned: an experiment for each pair of a model and a kind of data."""

from typing import TypeVar

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.models.gpt import GPTConfig
from tfx_jax.models.t5 import T5Config
from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.training.config import (
    DataConfig,
    ExperimentConfig,
    LabelledConfig,
    QuestionsConfig,
    TaggedConfig,
    TextConfig,
    load_config,
)
from tfx_jax.training.experiment import Experiment
from tfx_jax.training.experiments.classification import ClassificationExperiment
from tfx_jax.training.experiments.language_model import LanguageModelExperiment
from tfx_jax.training.experiments.pretraining import PretrainingExperiment
from tfx_jax.training.experiments.question_answering import QuestionAnsweringExperiment
from tfx_jax.training.experiments.span_corruption import SpanCorruptionExperiment
from tfx_jax.training.experiments.tagging import TaggingExperiment
from tfx_jax.training.experiments.text_to_text import (
    AnsweringAsTextExperiment,
    ClassificationAsTextExperiment,
    TaggingAsTextExperiment,
)
from tfx_jax.training.experiments.translation import TranslationExperiment

EXPERIMENTS: dict[tuple[type, type], type[Experiment]] = {
    (TransformerConfig, DataConfig): TranslationExperiment,
    (GPTConfig, TextConfig): LanguageModelExperiment,
    (BertConfig, TextConfig): PretrainingExperiment,
    (BertConfig, LabelledConfig): ClassificationExperiment,
    (BertConfig, TaggedConfig): TaggingExperiment,
    (BertConfig, QuestionsConfig): QuestionAnsweringExperiment,
    (T5Config, TextConfig): SpanCorruptionExperiment,
    (T5Config, LabelledConfig): ClassificationAsTextExperiment,
    (T5Config, TaggedConfig): TaggingAsTextExperiment,
    (T5Config, QuestionsConfig): AnsweringAsTextExperiment,
}
"""By the classes of `config.model` and `config.data`."""

Kind = TypeVar("Kind", bound=Experiment)


def make_experiment(config: ExperimentConfig) -> Experiment:
    """Brings a configuration to life.

    Raises:
      UserError: if such a model learns nothing from such data.
    """
    model, data = type(config.model), type(config.data)
    if (model, data) not in EXPERIMENTS:
        there = ", ".join(f"{kinds[0].__name__} with {kinds[1].__name__}" for kinds in EXPERIMENTS)
        raise UserError(f"there is no training of a {model.__name__} with a {data.__name__}, only of {there}")
    return EXPERIMENTS[model, data](config)


def load_experiment(workdir: epath.PathLike, kind: type[Kind] = Experiment) -> Kind:
    """Opens the experiment that was trained in `workdir`, where nothing is written.

    Raises:
      UserError: if there is none, or one of another kind, or a file that it needs is missing or damaged.
    """
    experiment = make_experiment(load_config(epath.Path(workdir)))
    if not isinstance(experiment, kind):
        raise UserError(f"{workdir} holds a {_name(type(experiment))}, and this is for a {_name(kind)}")
    experiment.open(workdir, can_make=False)
    return experiment


def _name(kind: type[Experiment]) -> str:
    """What a class is called in a sentence: "translation experiment"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip()
