"""`--config=FILE` with the fields of a configuration instead of an experiment."""

import json

import pytest

from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.models import GPTConfig
from tfx_jax.tasks import LanguageModelConfig
from tfx_jax.training import ExperimentConfig
from tfx_jax.training.config import save_config

OVERRIDES = ["--config.num_steps=9", "--config.model.num_layers=3"]


def test_the_configuration_of_a_run_repeats_it(tmp_path):
    config = ExperimentConfig(GPTConfig(num_layers=7), LanguageModelConfig(), seed=5, init_from="gpt2")
    save_config(config, tmp_path)
    file = str(tmp_path / "config.json")
    assert load_config_file(file) == config
    changed = load_config_file(file, OVERRIDES)
    assert (changed.num_steps, changed.model.num_layers, changed.seed) == (9, 3, 5)
    values = json.loads((tmp_path / "config.json").read_text())
    values["seed"] = 6  # an edit; the checksum is not that of these values
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config_file(file).seed == 6


FIELDS = {
    "a.toml": """
experiment = "gpt_wikitext2:test"
num_steps = 9
init_from = "a=b c"
[model]
num_layers = 3
[optimizer]
peak_learning_rate = 0.5
[model.attention]
name = "dense"
""",
    "a.yaml": """
experiment: gpt_wikitext2:test
num_steps: 9
init_from: "a=b c"
model:
  num_layers: 3
  attention: {name: dense}
optimizer: {peak_learning_rate: 0.5}
""",
    "a.json": json.dumps(
        {
            "experiment": "gpt_wikitext2:test",
            "num_steps": 9,
            "init_from": "a=b c",
            "model": {"num_layers": 3, "attention": {"name": "dense"}},
            "optimizer": {"peak_learning_rate": 0.5},
        }
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_differ_from_an_experiment(tmp_path, name):
    file = tmp_path / name
    file.write_text(FIELDS[name])
    overrides = [*OVERRIDES, "--config.init_from=a=b c", "--config.optimizer.peak_learning_rate=0.5"]
    expected = load_config_file("gpt_wikitext2:test", overrides)
    assert expected.init_from == "a=b c"
    assert load_config_file(str(file)) == expected
    assert load_config_file(str(file), ["--config.num_steps=4"]).num_steps == 4


@pytest.mark.parametrize("named_in_file", ["train_file", "validation_file"])
def test_a_file_and_the_command_line_name_the_two_files_together(tmp_path, caplog, named_in_file):
    """Of these two, neither stands alone: nothing is held out, and no file is dropped."""
    (other,) = {"train_file", "validation_file"} - {named_in_file}
    file = tmp_path / "a.toml"
    file.write_text(f'experiment = "bert_banking77"\n[task.data]\n{named_in_file} = "in_file"\n')
    data = load_config_file(str(file), [f"--config.task.data.{other}=typed"]).task.data
    assert (getattr(data, named_in_file), getattr(data, other), data.validation_share) == ("in_file", "typed", 0)
    assert "holds out" not in caplog.text


def test_a_mistake_of_the_command_line_does_not_name_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("experiment: gpt_wikitext2\nnum_steps: 3")
    with pytest.raises(UserError, match=r"^config has no field num_step; did you mean"):
        load_config_file(str(tmp_path / "a.yaml"), ["--config.num_step=3"])


def test_values_that_are_not_text_or_numbers(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("experiment: transformer_files\noptimizer: {peak_learning_rate: null}\n"
                    "task: {data: {is_tokenized: true}}\n")  # fmt: skip
    config = load_config_file(str(file))
    assert config.optimizer.peak_learning_rate is None
    assert config.task.data.is_tokenized is True


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json: Expecting property name"),
        ("a.toml", "a = ", "a.toml: Invalid value"),
        ("a.yaml", "a: [", "a.yaml: while parsing"),
        ("a.yml", "just text", "a.yml: it holds a str, not fields"),
        ("a.json", '{"num_step": 3}', "a.json: config has no field num_step"),
        (
            "a.json",
            '{"model": {"class": "os.system"}}',
            "a.json: config.model.class=.* must name a configuration in tfx_jax.models",
        ),
        ("a.yaml", "experiment: gpt_wikitext", "a.yaml: there is no experiment 'gpt_wikitext': did you mean"),
        ("a.yaml", "experiment: gpt_wikitext2\nnum_step: 3", "a.yaml: config has no field num_step; did you mean"),
        ("a.yaml", "!!python/object/apply:os.system [true]", "a.yaml: could not determine a constructor"),
        ("a.txt", "print(1)", "a.txt is not a .py file: experiments are Python files, which are executed"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_config_file(str(tmp_path / name))


@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
def test_a_file_of_fields_executes_no_python_file(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('executed', 'w')")
    for name in ("evil.py", "./evil.py", f"{tmp_path}/evil.py:test"):
        field = {"json": f'{{"experiment": "{name}"}}', "toml": f'experiment = "{name}"', "yaml": f"experiment: {name}"}
        (tmp_path / f"a.{form}").write_text(field[form])
        with pytest.raises(UserError, match=r"evil.py\S* is a Python file, which a file of fields does not execute"):
            load_config_file(f"a.{form}")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UserError, match=r"evil\.py defines no get_config"):
        load_config_file("evil.py")
    assert (tmp_path / "executed").exists()  # by the other form


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file or directory"):
        load_config_file(str(tmp_path / "none.json"))
