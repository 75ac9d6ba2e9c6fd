"""Configurations: what is refused, what a workdir remembers, and what may change in it."""

import dataclasses
import json

import pytest
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig
from tfx_jax.training.config import (
    ExperimentConfig,
    LabelledData,
    MeshConfig,
    QuestionData,
    TaggedData,
    TextData,
    flat,
    load_config,
    save_config,
    tiny_variant,
    unknown_field,
)
from tfx_jax.training.validation import validate


def changed(**values):
    """The default configuration with some leaves replaced: changed(**{"model.d_ff": 3})."""
    config = ExperimentConfig()
    for name, value in values.items():
        *path, leaf = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, leaf)
        setattr(owner, leaf, value)
    return config


def test_defaults_are_the_base_model_and_valid():
    config = ExperimentConfig()
    assert validate(config) is config
    assert (config.model.num_layers, config.model.d_model, config.model.d_ff) == (6, 512, 2048)
    assert (config.optimizer.b1, config.optimizer.b2, config.optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (config.task.decoding.beam_size, config.task.decoding.alpha, config.task.decoding.extra_length) == (4, 0.6, 50)
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
            'model.activation must be "relu" or "gelu" or "gelu_tanh" or "swish", got \'tanh\'',
        ),
        ("model.pad_id", 1, "model.pad_id must be 0, which it is for the tokenizers, got 1"),
        ("model.start_id", 0, "model.start_id must be 1, which it is for the tokenizers, got 0"),
        ("model.eos_id", 0, "model.eos_id must be 2, which it is for the tokenizers, got 0"),
        ("num_steps", 0, "num_steps must be at least 1, got 0"),
        ("log_every", 0, "log_every must be at least 1, got 0"),
        ("checkpoint_every", 0, "checkpoint_every must be at least 1, got 0"),
        ("keep_last", 0, "keep_last must be at least 1, got 0"),
        ("optimizer.warmup_steps", 0, "optimizer.warmup_steps must be at least 1, got 0"),
        ("decoding.beam_size", 0, "decoding.beam_size must be at least 1, got 0"),
        ("decoding.alpha", -0.1, "decoding.alpha must be at least 0, got -0.1"),
        ("decoding.alpha", float("nan"), "decoding.alpha must be at least 0, got nan"),
        ("decoding.extra_length", -1, "decoding.extra_length must be at least 0, got -1"),
        ("eval_every", -1, "eval_every must be at least 0, got -1"),
        ("patience", -1, "patience must be at least 0, got -1"),
        ("keep_best", -1, "keep_best must be at least 0, got -1"),
        ("model.dropout_rate", 1.0, r"model.dropout_rate must be in \[0, 1\), got 1.0"),
        ("model.attention_dropout_rate", -0.1, r"model.attention_dropout_rate must be in \[0, 1\), got -0.1"),
        ("label_smoothing", 1.5, r"label_smoothing must be in \[0, 1\), got 1.5"),
        ("optimizer.b2", 1.0, r"optimizer.b2 must be in \[0, 1\), got 1.0"),
        ("model.d_model", 511, "model.d_model must be even for sinusoidal positions, got 511"),
        ("model.num_heads", 7, "model.d_model=512 is not divisible by num_heads=7"),
        ("model.dtype", "float61", 'model.dtype must be "float32" or "bfloat16", got \'float61\''),
        ("model.remat", "some", 'model.remat must be "none" or "full" or "dots", got \'some\''),
        ("optimizer.name", "sgd", 'optimizer.name must be "adam" or "adamw" or "adafactor", got \'sgd\''),
        ("optimizer.weight_decay", -0.1, "optimizer.weight_decay must be at least 0, got -0.1"),
        (
            "optimizer.weight_decay",
            0.1,
            'optimizer.weight_decay is not for "adam": choose config.optimizer.name="adamw"',
        ),
        ("optimizer.clip_norm", -1.0, "optimizer.clip_norm must be at least 0, got -1.0"),
        ("z_loss", -1.0, "z_loss must be at least 0, got -1.0"),
        ("accumulate", 0, "accumulate must be at least 1, got 0"),
        ("bad_steps", "ignore", 'bad_steps must be "stop" or "skip", got \'ignore\''),
        ("spike_factor", 0.5, "spike_factor must be 0 or above 1, got 0.5"),
        ("spike_factor", float("nan"), "spike_factor must be 0 or above 1, got nan"),
        ("model.dtype", "int32", 'model.dtype must be "float32" or "bfloat16", got \'int32\''),
        ("data.tokenizer", "bytes", 'data.tokenizer must be "sentencepiece" or "words", got \'bytes\''),
        ("data.validation_pairs", -1, "data.validation_pairs must be at least 0, got -1"),
        (
            "data.target_language",
            "de",
            'data.dataset="grammar" is English to Japanese, not en to de: leave its languages out, or .*',
        ),
        ("data.tokens_per_batch", 255, "data.tokens_per_batch=255 holds no sentence of max_length=256"),
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
        {"data.tokens_per_batch": 256},
        {"optimizer.name": "adafactor", "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0},
        {"model.remat": "dots", "accumulate": 4, "z_loss": 1e-4, "bad_steps": "skip", "spike_factor": 2.0},
        {"label_smoothing": 0.0, "model.dropout_rate": 0.0, "keep_best": 0, "decoding.alpha": 0.0},
    ],
)
def test_unusual_settings_that_work(values):
    validate(changed(**values))


FILES = {"data.dataset": "files", "data.source_language": "en", "data.target_language": "de"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"data.source_language": ""},
            r'data.source_language must be the code of a language, such as "en" or "de": it',
        ),
        (
            {"data.target_language": ""},
            r'data.target_language must be the code of a language, such as "en" or "de": it',
        ),
        ({"data.target_language": "German"}, r"data.target_language must be the code .*, got 'German': it says what"),
        ({"data.train_source": "my.de"}, "data.train_source=my.de looks like the target side, whose language is de"),
        ({"data.test_target": "a/b.en.gz"}, "data.test_target=a/b.en.gz looks like the source side, whose language is"),
    ],
)
def test_languages_of_files_are_said_and_contradict_nothing(values, message):
    with pytest.raises(UserError, match=f"^config.{message}"):
        validate(changed(**FILES | values))


@pytest.mark.parametrize(
    "values",
    [
        {"data.train_source": "my.en", "data.train_target": "my.de.gz", "data.validation_source": "de.txt"},
        {"data.source_language": "pt_BR", "data.target_language": "zh-Hans", "data.train_source": "both.tsv"},
        {"data.source_language": "de", "data.train_source": "hard.de", "data.train_target": "easy.de"},
    ],
)
def test_languages_of_files_that_fit(values):
    validate(changed(**FILES | values))


def test_vocabulary_may_be_left_to_the_text_where_one_translates():
    validate(changed(**{"model.vocab_size": 0}))
    with pytest.raises(UserError, match=r"^config.model.vocab_size must be at least 1, got 0$"):
        validate(of(GPTConfig(), TextData(), model__vocab_size=0))


def test_flat_names_every_leaf():
    leaves = flat(changed(**{"model.d_ff": 3, "seed": 5}))
    assert (leaves["model.d_ff"], leaves["seed"], leaves["decoding.alpha"]) == (3, 5, 0.6)
    assert "model" not in leaves
    config = ExperimentConfig()
    assert leaves["model.attention.options.window"] is None
    nested = (config.model, config.task.data, config.optimizer, config.task.decoding, config.mesh)
    nested += (config.model.attention, config.model.attention.options)
    expected = sum(len(dataclasses.fields(part)) for part in nested)
    assert len(leaves) == expected + len(dataclasses.fields(config)) - len(nested)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.num_layer", "; did you mean config.model.num_layers?"),
        ("num_layers", "; did you mean config.model.num_layers?"),
        ("label_smothing", "; did you mean config.task.label_smoothing?"),
        ("xyzzy", ""),
    ],
)
def test_unknown_field_names_the_nearest(name, hint):
    error = unknown_field(name, ExperimentConfig())
    assert isinstance(error, UserError)
    assert str(error) == f"config has no field {name}{hint}"


@pytest.fixture
def workdir(tmp_path):
    return epath.Path(tmp_path)


def test_saved_and_loaded(workdir):
    config = changed(**{"model.d_k": 64, "optimizer.peak_learning_rate": 1e-3, "data.train_source": "a/ä.txt"})
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
    new |= {"keep_best": 9, "decoding.beam_size": 9, "decoding.alpha": 0.9, "decoding.extra_length": 9, "mesh.data": 9}
    new |= {"model.remat": "full", "accumulate": 9, "bad_steps": "skip", "spike_factor": 9.0}
    save_config(changed(**new), workdir)
    assert load_config(workdir) == changed(**new)
    assert load_config(workdir).mesh == MeshConfig(data=9)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", 1, "seed=0, not 1"),
        ("model.d_ff", 1024, "model.d_ff=2048, not 1024"),
        ("data.target_language", "de", "data.target_language='', not 'de'"),
        ("optimizer.peak_learning_rate", 0.1, "optimizer.peak_learning_rate=None, not 0.1"),
    ],
)
def test_workdir_of_another_experiment_is_refused(workdir, field, value, message):
    save_config(changed(num_steps=7), workdir)
    with pytest.raises(UserError, match=f"was made with {message}: take another --workdir$"):
        save_config(changed(**{field: value, "num_steps": 8}), workdir)
    assert load_config(workdir).num_steps == 7  # nothing of the refused one was written


def test_all_differences_are_named(workdir):
    save_config(ExperimentConfig(), workdir)
    with pytest.raises(UserError, match=r"model.d_ff=2048, not 3; seed=0, not 4: take"):
        save_config(changed(**{"model.d_ff": 3, "seed": 4}), workdir)


def test_workdir_without_config(workdir):
    with pytest.raises(UserError, match=r"has no config\.json: it is not the --workdir of a training"):
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


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_is_noticed(workdir, bit):
    """Another beam, another dropout rate: valid JSON, and nobody would know."""
    save_config(ExperimentConfig(), workdir)
    path = workdir / "config.json"
    intact = path.read_bytes()
    for place in range(bit, len(intact) - 1, 11):  # the last is a line break
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << bit]) + intact[place + 1 :])
        with pytest.raises(UserError, match=r"config.json is damaged .* put back a copy, or delete it and run the"):
            load_config(workdir)


def test_a_config_that_was_changed_on_purpose_loses_its_checksum(workdir):
    save_config(ExperimentConfig(), workdir)
    path = workdir / "config.json"
    values = json.loads(path.read_text()) | {"seed": 7}
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="its sha256 is that of other values; whoever changed them on purpose removes"):
        load_config(workdir)
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert load_config(workdir) == changed(seed=7)


def test_config_of_before_a_field_existed(workdir):
    """Fields that an older version did not write have their defaults."""
    save_config(ExperimentConfig(), workdir)
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    del values["sha256"], values["patience"], values["decoding"]["alpha"], values["mesh"]
    path.write_text(json.dumps(values))
    assert load_config(workdir) == ExperimentConfig()


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (GPTConfig(d_ff=7), TextData(documents="lines")),
        (BertConfig(labels=("a", "b", "c")), QuestionData(stride=3)),
        (T5Config(num_decoder_layers=2), LabelledData(train_file="ä.tsv")),
        (BertConfig(head_dropout_rate=0.5), TaggedData()),
    ],
)
def test_classes_of_model_and_data_are_kept(workdir, model, data):
    config = ExperimentConfig(model=model, data=data)
    save_config(config, workdir)
    assert load_config(workdir) == config
    save_config(config, workdir)
    with pytest.raises(UserError, match=rf"was made with .*model='{type(model).__name__}', not 'TransformerConfig'"):
        save_config(ExperimentConfig(), workdir)


def test_config_of_before_there_were_classes(workdir):
    """Then, all trainings were of translation."""
    save_config(changed(**{"model.d_ff": 3}), workdir)
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    assert (values["model"].pop("class"), values["data"].pop("class")) == ("TransformerConfig", "PairData")
    del values["sha256"]  # nor was there this
    path.write_text(json.dumps(values))
    assert load_config(workdir) == changed(**{"model.d_ff": 3})


def test_a_schedule_that_ends_fixes_the_number_of_steps(workdir):
    cosine = {"optimizer.schedule": "cosine", "optimizer.peak_learning_rate": 1e-3}
    save_config(changed(num_steps=7, **cosine), workdir)
    with pytest.raises(UserError, match="was made with num_steps=7, not 8: take another"):
        save_config(changed(num_steps=8, **cosine), workdir)


def of(model, data, **values):
    config = tiny_variant(ExperimentConfig(model=model, data=data))
    for name, value in values.items():
        owner, _, leaf = name.rpartition("__")
        setattr(getattr(config, owner) if owner else config, leaf, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            of(GPTConfig(), TextData(), model__max_length=63),
            "data.max_length=64 is more than config.model.max_length=63",
        ),
        (
            of(GPTConfig(), TextData(), data__documents="words"),
            'data.documents must be "file" or "lines" or "articles"',
        ),
        (of(GPTConfig(), TextData(), data__validation_share=1.0), r"data.validation_share must be in \[0, 1\)"),
        (
            of(GPTConfig(), TextData(), data__validation_share=0.1, data__validation_file="x"),
            "data.validation_file and validation_share exclude each other: set one",
        ),
        (of(BertConfig(), TextData(), model__init="x"), 'model.init must be "paper" or "matching", got \'x\''),
        (of(BertConfig(), TextData(), data__is_packed=True), "data.is_packed is for a GPT only"),
        (
            of(BertConfig(), LabelledData(), data__first_column="a"),
            "data.first_column, second_column and label_column go",
        ),
        (of(BertConfig(), QuestionData(), data__scoring="bytes"), 'data.scoring must be "words" or "characters"'),
        (of(BertConfig(), TaggedData(), model__num_heads=5), "model.d_model=32 is not divisible by num_heads=5"),
        (of(T5Config(), TextData(), mesh=MeshConfig(sequence=2)), "mesh.sequence=2 is for translation only"),
        (
            of(GPTConfig(), TextData(), mesh=MeshConfig(tensor=3)),
            "mesh.tensor=3 does not divide config.model.num_heads=2",
        ),
        (
            of(GPTConfig(), TextData(), data__tokens_per_batch=63),
            "data.tokens_per_batch=63 holds no row of max_length=64",
        ),
        (
            of(GPTConfig(), TextData(), optimizer__schedule="cosine"),
            'optimizer.schedule="cosine" needs config.optimizer.peak',
        ),
    ],
)
def test_impossible_settings_of_other_models(config, message):
    with pytest.raises(UserError, match=f"^config.{message}"):
        validate(config)


@pytest.mark.parametrize("model", [GPTConfig(d_ff=None), BertConfig(d_ff=None), T5Config(num_heads=5)])
def test_sizes_of_other_models(model):
    data = TextData(max_length=128)
    validate(ExperimentConfig(model=model, data=data))
