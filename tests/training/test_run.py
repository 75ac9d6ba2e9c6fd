"""Runs: a task is asked whether it can train a model, and a workdir gives back the task that was trained there."""

import dataclasses
import importlib
import inspect
import pkgutil
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx

import tfx_jax.models
import tfx_jax.tasks
from tests.training.configs import TRAININGS
from tfx_jax.errors import UserError
from tfx_jax.models import GPTConfig
from tfx_jax.tasks.events import EventClassificationConfig
from tfx_jax.tasks.sequence.duplication import DuplicationConfig
from tfx_jax.tasks.sequence.long_range import LongRangeConfig
from tfx_jax.tasks.sequence.recall import RecallConfig
from tfx_jax.tasks.speech.speech_recognition import SpeechRecognitionConfig
from tfx_jax.tasks.task import MetricInfo
from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig
from tfx_jax.tasks.text.bidirectional_language_modeling import BidirectionalLanguageModelConfig
from tfx_jax.tasks.text.classification import ClassificationConfig
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig, LanguageModelTask
from tfx_jax.tasks.text.parsing import ParsingConfig, ParsingTask
from tfx_jax.tasks.text.question_answering import QuestionAnsweringConfig
from tfx_jax.tasks.text.recurrent_language_modeling import RecurrentLanguageModelConfig
from tfx_jax.tasks.text.sentence_pairs import SentencePairConfig
from tfx_jax.tasks.text.span_corruption import SpanCorruptionConfig
from tfx_jax.tasks.text.tagging import TaggingConfig
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.tasks.text.translation import TranslationConfig, TranslationTask
from tfx_jax.tasks.vision.captioning import CaptioningConfig
from tfx_jax.tasks.vision.image_classification import ImageClassificationConfig
from tfx_jax.training.config import ExperimentConfig, save_config, tiny_variant, validate
from tfx_jax.training.run import Run, load_run, make_run

KINDS = {
    TranslationConfig: "encoder_decoder",
    TextToTextConfig: "encoder_decoder",
    SpanCorruptionConfig: "encoder_decoder",
    ParsingConfig: "encoder_decoder",
    LanguageModelConfig: "decoder",
    DuplicationConfig: "decoder",
    RecallConfig: "decoder",
    RecurrentLanguageModelConfig: "recurrent_decoder",
    SpeechRecognitionConfig: "ctc",
    CaptioningConfig: "captioner",
    ImageClassificationConfig: "image_classifier",
    EventClassificationConfig: "events",
    SentencePairConfig: "sentence_pair",
    LongRangeConfig: "long_sequence",
    BertPretrainingConfig: "bert",
    ClassificationConfig: "bert",
    TaggingConfig: ("bert", "elmo"),
    BidirectionalLanguageModelConfig: "elmo",
    QuestionAnsweringConfig: "bert",
}
MODELS = tuple(dict.fromkeys(model for model, _, _ in TRAININGS))


def kinds_of(task):
    """The kinds of models that a task takes, of which most take one."""
    return (KINDS[task],) if isinstance(KINDS[task], str) else KINDS[task]


def pairs(*, fit):
    """All tasks and models that fit, or that do not."""
    return [
        pytest.param(task, model, id=f"{task.__name__}-{model.__name__}")
        for task in KINDS
        for model in MODELS
        if (model.kind in kinds_of(task)) == fit
    ]


def classes_of(package):
    """The dataclasses of all files of a package."""
    found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    return {kind for module in modules for _, kind in inspect.getmembers(module, dataclasses.is_dataclass)}


def test_all_tasks_and_models_are_tested_here():
    assert {kind for kind in classes_of(tfx_jax.tasks) if hasattr(kind, "setup")} == set(KINDS)
    models = {kind for kind in classes_of(tfx_jax.models) if hasattr(kind, "kind")}
    assert models == set(MODELS) == {getattr(tfx_jax.models, model.__name__) for model in MODELS}
    assert {model.kind for model in MODELS} == {kind for task in KINDS for kind in kinds_of(task)}


@pytest.mark.parametrize(("task", "model"), pairs(fit=True))
def test_a_task_takes_every_model_of_its_kind(task, model):
    config = tiny_variant(ExperimentConfig(model(), task()))
    assert validate(config) is config


@pytest.mark.parametrize(("task", "model"), pairs(fit=False))
def test_a_model_of_another_kind_is_refused_in_one_line(task, model):
    kinds = " or ".join(map(repr, kinds_of(task)))
    wanted = rf"^[\w' -]+ needs a model of the kind {kinds}, but a {model.__name__} is '{model.kind}'$"
    with pytest.raises(UserError, match=wanted) as caught:
        validate(tiny_variant(ExperimentConfig(model(), task())))
    assert "\n" not in str(caught.value)


def tiny_language_model():
    config = tiny_variant(ExperimentConfig(GPTConfig(), LanguageModelConfig()))
    config.task.data.tokenizer = "characters"
    return config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A workdir as a training of a language model makes it before its first step."""
    workdir = tmp_path_factory.mktemp("workdir")
    config = tiny_language_model()
    save_config(config, epath.Path(workdir))
    make_run(config, workdir)
    return workdir


def test_a_workdir_gives_back_its_run_and_nothing_is_written(workdir):
    def contents():
        return {path: path.read_bytes() for path in workdir.glob("**/*") if path.is_file()}

    before = contents()
    for run in (load_run(workdir), load_run(workdir, LanguageModelTask)):
        assert run.config == tiny_language_model()
        assert type(run.task) is LanguageModelTask
        assert run.task.model_config.vocab_size == run.task.tokenizer.vocab_size < run.config.model.vocab_size
    assert contents() == before


def test_a_task_of_the_wrong_kind_is_refused(workdir):
    with pytest.raises(UserError) as caught:
        load_run(workdir, TranslationTask)
    assert (
        str(caught.value)
        == f"{workdir} holds a language model task, but a translation task is required: name another run"
    )
    with pytest.raises(UserError, match=r", but a translation task or a parsing task is required: name another run$"):
        load_run(workdir, (TranslationTask, ParsingTask))


def test_what_is_no_workdir_or_lacks_a_file_is_refused(workdir, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json: it is not the --workdir of a run$"):
        load_run(tmp_path, TranslationTask)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"tokenizer is missing: run tfx-jax train with this --workdir first$"):
        load_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_configuration_is_of_translation_unless_it_says_otherwise(tmp_path):
    assert type(make_run(tiny_variant(ExperimentConfig()), tmp_path).task) is TranslationTask


def test_models_of_a_run_share_programs(workdir):
    run, traced = load_run(workdir), []

    def total(model, batch):
        traced.append(batch["x"].shape)
        return batch["x"] + sum(leaf.sum() for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))))

    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(run.make_model)))
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    for value in (1, 2):
        params = jax.tree.map(lambda leaf, value=value: np.full(leaf.shape, value, leaf.dtype), shapes)
        (found,) = run.trained(params).map_batches(total, [{"x": np.zeros(2, np.float32)}])
        assert found.tolist() == [value * size] * 2
    assert traced == [(2,)]


def test_the_first_metric_ranks_evaluations_and_a_loss_the_other_way(workdir):
    run = load_run(workdir)
    assert run.rank({"loss": 2.0, "perplexity": 7.4}) > run.rank({"loss": 3.0, "perplexity": 1.0})

    class Scored:
        metrics = (MetricInfo("f1", "F1"), MetricInfo("loss", "loss", is_loss=True))

    run = Run(run.config, Scored())
    assert run.rank({"f1": 2.0, "loss": 7.0}) > run.rank({"f1": 1.0, "loss": 1.0})
    run = Run(dataclasses.replace(run.config, best_metric="loss"), Scored())
    assert run.rank({"f1": 2.0, "loss": 7.0}) < run.rank({"f1": 1.0, "loss": 1.0})
    with pytest.raises(UserError, match=r"^config\.best_metric must be one of f1, loss, or empty, got 'f2'$"):
        Run(dataclasses.replace(run.config, best_metric="f2"), Scored())


def test_examples_that_do_not_go_on_have_no_carry(workdir):
    run = load_run(workdir)
    assert run.make_carry() is None
    run.task.make_carry = lambda: {"memory": np.zeros((4, 2))}
    assert run.make_carry()["memory"].shape == (4, 2)
