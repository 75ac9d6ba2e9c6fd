"""Configurations: what a workdir remembers, what may change in it, and what no file can name."""

import dataclasses
import importlib
import json
import pkgutil
import re
import sys

import pytest
from etils import epath

from tests.training.configs import TRAININGS, changed, default_config, title
from tfx_jax import tasks
from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, T5Config
from tfx_jax.tasks.text.classification import LabeledData
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.question_answering import QuestionAnsweringConfig
from tfx_jax.tasks.text.tagging import TaggedData, TaggingConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.training.config import ExperimentConfig, MeshConfig, flat, load_config, save_config, unknown_field


def test_flat_names_every_leaf():
    leaves = flat(changed(**{"model.d_ff": 3, "seed": 5}))
    assert (leaves["model.d_ff"], leaves["seed"], leaves["task.decoding.length_penalty"]) == (3, 5, 0.6)
    assert "model" not in leaves
    config = ExperimentConfig()
    assert leaves["model.attention.options.window"] is None
    nested = (config.model, config.task, config.task.data, config.optimizer, config.task.decoding, config.mesh)
    nested += (config.model.attention, config.model.attention.options, config.model.experts, config.lora)
    expected = sum(len(dataclasses.fields(part)) for part in nested)
    assert len(leaves) == expected + len(dataclasses.fields(config)) - len(nested)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.num_layer", "; did you mean config.model.num_layers?"),
        ("num_layers", "; did you mean config.model.num_layers?"),
        ("label_smothing", "; did you mean config.task.label_smoothing?"),
        ("model.learning_rate", "; did you mean config.optimizer.peak_learning_rate?"),
        ("task.data.vocab_size", "; did you mean config.model.vocab_size?"),
        ("batch_size", "; --print-config prints all fields"),
        ("model.window_length", "; --print-config prints all fields"),
        ("xyzzy", "; --print-config prints all fields"),
    ],
)
def test_unknown_field_names_the_nearest(name, hint):
    error = unknown_field(name, ExperimentConfig())
    assert isinstance(error, UserError)
    assert str(error) == f"config has no field {name}{hint}"


def _parts(config):
    """A configuration and all configurations in it."""
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _parts(value)


@pytest.mark.parametrize("classes", TRAININGS, ids=title)
def test_no_configuration_takes_an_attribute_that_is_no_field(classes):
    for part in _parts(default_config(classes)):
        for name in [field.name for field in dataclasses.fields(part)]:
            with pytest.raises(
                UserError, match=rf"^{type(part).__name__} has no field {name}_; did you mean {name}\?$"
            ):
                setattr(part, f"{name}_", 1)


@pytest.fixture
def workdir(tmp_path):
    return epath.Path(tmp_path)


def test_saved_and_loaded(workdir):
    config = changed(**{"model.d_k": 64, "optimizer.peak_learning_rate": 1e-3, "task.data.train_source": "a/ä.txt"})
    save_config(config, workdir)
    assert load_config(workdir) == config
    assert [path.name for path in workdir.iterdir()] == ["config.json"]


def test_same_experiment_again(workdir):
    save_config(ExperimentConfig(), workdir)
    save_config(ExperimentConfig(), workdir)
    assert load_config(workdir) == ExperimentConfig()


def test_what_may_change_is_changed(workdir):
    save_config(ExperimentConfig(), workdir)
    new = {"num_steps": 9, "log_every": 9, "checkpoint_every": 9, "eval_every": 9, "patience": 9, "keep_last": 9}
    new |= {
        "keep_best": 9,
        "task.decoding.beam_size": 9,
        "task.decoding.length_penalty": 0.9,
        "task.decoding.extra_length": 9,
        "mesh.data": 9,
    }
    new |= {"model.remat": "full", "model.unroll": True, "accumulate": 9, "bad_steps": "skip", "spike_factor": 9.0}
    save_config(changed(**new), workdir)
    assert load_config(workdir) == changed(**new)
    assert load_config(workdir).mesh == MeshConfig(data=9)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", 1, "seed=0, not 1"),
        ("model.d_ff", 1024, "model.d_ff=2048, not 1024"),
        ("task.data.target_language", "de", "task.data.target_language='', not 'de'"),
        ("optimizer.peak_learning_rate", 0.1, "optimizer.peak_learning_rate=None, not 0.1"),
    ],
)
def test_workdir_of_another_experiment_is_refused(workdir, field, value, message):
    save_config(changed(num_steps=7), workdir)
    with pytest.raises(UserError, match=f"was made with {message}: restore these values, or use another workdir$"):
        save_config(changed(**{field: value, "num_steps": 8}), workdir)
    assert load_config(workdir).num_steps == 7  # nothing of the refused one was written


def test_all_differences_are_named(workdir):
    save_config(ExperimentConfig(), workdir)
    with pytest.raises(UserError, match=r"model.d_ff=2048, not 3; seed=0, not 4: restore"):
        save_config(changed(**{"model.d_ff": 3, "seed": 4}), workdir)


def test_workdir_without_config(workdir):
    with pytest.raises(UserError, match=r"has no config\.json: it is not the --workdir of a run"):
        load_config(workdir)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"model": {"d_mod',
        b"[]",
        b"7",
        b'{"model": null}',
        b'{"model": {"depth": 3}}',
        b'{"depth": 3}',
        b"\xff\xfe",
    ],
)
def test_damaged_config(workdir, damage):
    save_config(ExperimentConfig(), workdir)
    (workdir / "config.json").write_bytes(damage)
    for use in (lambda: load_config(workdir), lambda: save_config(ExperimentConfig(), workdir)):
        with pytest.raises(UserError, match=r"config.json is damaged or from another version \(") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("depth", 3, "config has no field depth"),
        ("model.depth", 3, "config.model has no field depth"),
        ("model.names", 3, "config.model has no field names"),
        ("model.attention.names", ["dense"], "config.model.attention has no field names"),  # a property
        ("model.attention.\x1b[2J", 3, r"config.model.attention has no field \x1b[2J"),
        ("task", 3, "config.task must be an object with fields, got 3"),
        ("task.data", [[1]], "config.task.data must be an object with fields, got [[1]]"),
        ("mesh", None, "config.mesh must be an object with fields, got None"),
        ("model.attention.options", True, "config.model.attention.options must be an object with fields, got True"),
        ("task.data.class", 7, "config.task.data.class=7 must name a configuration in tfx_jax.models or tfx_jax.tasks"),
        ("optimizer", {"class": "x"}, "config.optimizer.class='x' must name a configuration in tfx_jax.models or "),
    ],
)
def test_a_part_that_is_none_is_named(workdir, name, value, message):
    save_config(ExperimentConfig(), workdir)
    values = json.loads((workdir / "config.json").read_text())
    del values["sha256"]
    *path, leaf = name.split(".")
    owner = values
    for part in path:
        owner = owner[part]
    owner[leaf] = value
    (workdir / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=re.escape(f"damaged or from another version ({message}")) as caught:
        load_config(workdir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_is_noticed(workdir, bit):
    """Another beam, another dropout rate: valid JSON, and no one would know."""
    save_config(ExperimentConfig(), workdir)
    path = workdir / "config.json"
    intact = path.read_bytes()
    for place in range(bit, len(intact) - 1, 11):  # the last is a line break
        flipped = intact[:place] + bytes([intact[place] ^ 1 << bit]) + intact[place + 1 :]
        if b"1E-09" in flipped and flipped.lower() == intact.lower():
            continue  # JSON says the same by it
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"config.json is damaged .* restore a copy, or delete it and rerun the"):
            load_config(workdir)


def test_a_config_that_was_changed_on_purpose_loses_its_checksum(workdir):
    save_config(ExperimentConfig(), workdir)
    path = workdir / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    with pytest.raises(
        UserError, match='its values do not match its checksum; after an intended edit, delete its line "sha256"'
    ):
        load_config(workdir)
    lines = path.read_text().replace('"seed": 0', '"seed": 7').splitlines()
    path.write_text("\n".join(line for line in lines if '"sha256"' not in line))
    assert load_config(workdir) == changed(seed=7)


def test_config_of_before_a_field_existed(workdir):
    """Fields that an older version did not write have their defaults."""
    save_config(ExperimentConfig(), workdir)
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    del values["sha256"], values["patience"], values["task"]["decoding"]["length_penalty"], values["mesh"]
    path.write_text(json.dumps(values))
    assert load_config(workdir) == ExperimentConfig()


def test_no_task_is_missing_here():
    modules = [
        importlib.import_module(f"{tasks.__name__}.{module.name}") for module in pkgutil.iter_modules(tasks.__path__)
    ]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and hasattr(value, "setup")
    }
    assert found == {task for _, task, _ in TRAININGS}


@pytest.mark.parametrize("classes", TRAININGS, ids=title)
def test_every_training_is_saved_and_loaded(workdir, classes):
    config = default_config(classes)
    save_config(config, workdir)
    loaded = load_config(workdir)
    assert loaded == config
    assert (type(loaded.model), type(loaded.task), type(loaded.task.data)) == classes
    save_config(config, workdir)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (GPTConfig(d_ff=7), LanguageModelConfig(data=TextData(documents="lines"))),
        (BertConfig(labels=("a", "b", "c")), QuestionAnsweringConfig(stride=3)),
        (T5Config(num_decoder_layers=2), TextToTextConfig(data=LabeledData(train_file="ä.tsv"))),
        (BertConfig(head_dropout_rate=0.5), TaggingConfig()),
    ],
)
def test_classes_of_model_and_task_are_kept(workdir, model, task):
    config = ExperimentConfig(model=model, task=task)
    save_config(config, workdir)
    assert load_config(workdir) == config
    save_config(config, workdir)
    for part, default in ((model, "TransformerConfig"), (task, "TranslationConfig")):
        with pytest.raises(UserError, match=rf"was made with .*='{type(part).__name__}', not '{default}'") as caught:
            save_config(ExperimentConfig(), workdir)
        assert "config." not in str(caught.value).replace(str(workdir), "")
        assert str(caught.value).count(", not ") <= 3  # classes only, not the sixty fields that differ


def test_other_data_with_the_same_fields_are_another_training(workdir):
    """All that tagged data have, labeled ones have too."""
    save_config(ExperimentConfig(model=T5Config(), task=TextToTextConfig(data=LabeledData())), workdir)
    with pytest.raises(
        UserError,
        match=r"was made with task\.data='LabeledData', not 'TaggedData': restore these values, or use another",
    ):
        save_config(ExperimentConfig(model=T5Config(), task=TextToTextConfig(data=TaggedData())), workdir)


def test_what_does_not_say_its_class_is_a_translation(workdir):
    save_config(changed(**{"model.d_ff": 3}), workdir)
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    classes = values["model"].pop("class"), values["task"].pop("class")
    assert classes == ("tfx_jax.models.TransformerConfig", "tfx_jax.tasks.TranslationConfig")
    assert "class" not in values["task"]["data"]  # a translation has no others
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert load_config(workdir) == changed(**{"model.d_ff": 3})


@pytest.mark.parametrize("part", ["model", "task", "task.data", "optimizer"])
@pytest.mark.parametrize(
    "path",
    [
        "os.path",
        "antigravity",
        "antigravity.Config",
        "tfx_jax.cli.main",
        "tfx_jax.cli.bench.Config",
        "tfx_jax.tasks.text",
        "tfx_jax.tasks.translation_loss",
        "tfx_jax.tasks.TranslationTask",
        "tfx_jax.tasks.NoSuch",
        "tfx_jax.tasks.text.TranslationConfig",
        "tfx_jax.tasks..TranslationConfig",
        "tfx_jax.models.__init__.Any\n",
        "../tfx_jax.tasks.TranslationConfig",
        "",
        None,
        ["tfx_jax.tasks.TranslationConfig"],
        {"class": "antigravity.Config"},
    ],
)
def test_a_file_names_configurations_of_models_and_tasks_alone(workdir, monkeypatch, part, path):
    """It may be anyone's: nothing else is imported for it, or called."""
    save_config(ExperimentConfig(), workdir)
    load_config(workdir)  # the first file that a process reads imports a codec
    values = json.loads((workdir / "config.json").read_text())
    del values["sha256"]
    owner = values
    for name in part.split("."):
        owner = owner[name]
    owner["class"] = path
    (workdir / "config.json").write_text(json.dumps(values))
    monkeypatch.delitem(sys.modules, "tfx_jax.cli.bench", raising=False)
    before = set(sys.modules)
    with pytest.raises(UserError, match=r"config\.json is damaged or from another version \(") as caught:
        load_config(workdir)
    assert "\n" not in str(caught.value)
    assert set(sys.modules) == before


def test_a_schedule_that_ends_fixes_the_number_of_steps(workdir):
    cosine = {"optimizer.schedule": "cosine", "optimizer.peak_learning_rate": 1e-3}
    save_config(changed(num_steps=7, **cosine), workdir)
    with pytest.raises(UserError, match="was made with num_steps=7, not 8: restore these values"):
        save_config(changed(num_steps=8, **cosine), workdir)
