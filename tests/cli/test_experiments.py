"""`tfx-jax experiments`, and experiments by name wherever one stands."""

import pathlib
import shutil

import pytest

import tfx_jax
from tfx_jax.cli import experiments, main
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.models import hf
from tfx_jax.models.hf.folder import Fields

FOLDER = pathlib.Path(__file__).parents[2] / "experiments"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)


def fails_with(capsys, *arguments):
    assert main(["experiments", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_all_are_listed_with_their_results(capsys):
    assert main(["experiments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    for name, line in zip(NAMES, lines, strict=True):
        assert f"\nResult: {line.removeprefix(name).strip()}\n" in (FOLDER / f"{name}.py").read_text()


def test_the_page_of_models_is_what_is_printed(capsys):
    """And what is printed names every architecture once, with what its class can do."""
    assert main(["experiments", "--models"]) == 0
    printed = capsys.readouterr().out
    assert printed == (FOLDER.parent / "docs" / "hugging_face.md").read_text(), (
        "run tfx-jax experiments --models > docs/hugging_face.md"
    )
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    assert {name: columns for name, *columns in rows} == {
        name: [family.model.__name__, saved_as(name, family), "yes" if has_decoder(family.model) else "no"]
        for name, family in hf.FAMILIES.items()
    }
    assert len(rows) == len(hf.FAMILIES)
    generating = {name for name, *_, generates in rows if generates == "yes"}
    assert {"GPT2LMHeadModel", "MarianMTModel", "UMT5ForConditionalGeneration"} <= generating
    assert not {"BertModel", "T5EncoderModel", "ViTForImageClassification"} & generating


def saved_as(name, family):
    """What its own `write_config` says, for sizes as they are by default."""
    values = {"pad_token_id": 1, "decoder_start_token_id": 1} if "Marian" in name else {}
    config = family.read_config(Fields(values, pathlib.Path(name)))
    return family.write_config(config)["architectures"][0]


def has_decoder(model):
    return callable(getattr(model, "decoder", None))


def test_a_lab_note_is_printed(capsys):
    assert main(["experiments", "transformer_demo"]) == 0
    note = capsys.readouterr().out
    assert note.startswith("A small Transformer learns the built-in English-Japanese grammar")
    assert "import" not in note


def test_a_copy_is_the_same_and_overwrites_nothing(capsys):
    assert main(["experiments", "--copy", "transformer_demo"]) == 0
    assert "--config=transformer_demo.py" in capsys.readouterr().out
    copy = pathlib.Path("transformer_demo.py")
    assert copy.read_bytes() == (FOLDER / copy).read_bytes()
    copy.write_text("# edited\n")
    assert "transformer_demo.py already exists" in fails_with(capsys, "--copy=transformer_demo")
    assert copy.read_text() == "# edited\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transformer_dmeo"], "there is no experiment 'transformer_dmeo': did you mean transformer_demo or "),
        (["--models", "transformer_demo"], "--models lists Hugging Face models: omit NAME and --copy"),
        (["--copy=wmt14"], "'wmt14': did you mean transformer_wmt14_ende or transformer_wmt14_enfr?"),
        (["xyzzy"], "there is no experiment 'xyzzy': run tfx-jax experiments to list the names"),
        ([""], "there is no experiment '': run tfx-jax experiments to list the names"),
        (["gone/mine.py"], "gone/mine.py does not exist\n"),
        (["transformer_demo", "--copy=transformer_demo"], "give either NAME, to print its lab note, or --copy=NAME"),
    ],
)
def test_mistakes_cost_one_line(capsys, arguments, message):
    assert message in fails_with(capsys, *arguments)


@pytest.mark.parametrize("variant", ["", ":test"])
def test_name_and_path_are_the_same_experiment(variant):
    by_name = load_config_file(f"transformer_demo{variant}")
    assert by_name == load_config_file(f"{FOLDER}/transformer_demo.py{variant}")
    assert load_config_file(f"transformer_demo{variant}", ["--config.seed=3"]).seed == 3


def test_path_that_is_not_here_names_the_one_that_is_installed():
    with pytest.raises(UserError, match=r"^experiments/transformer_demo.py does not exist; write transformer_demo for"):
        load_config_file("experiments/transformer_demo.py:test")
    shutil.copytree(FOLDER, "experiments")
    assert load_config_file("experiments/transformer_demo.py:test") == load_config_file("transformer_demo:test")


def test_a_file_of_ones_own_is_taken_by_its_path(tmp_path):
    pathlib.Path("mine.py").write_text((FOLDER / "transformer_demo.py").read_text().replace("1_500", "77"))
    assert load_config_file("mine.py").num_steps == load_config_file(f"{tmp_path}/mine.py").num_steps == 77
    pathlib.Path("transformer_demo").write_text("of another kind")
    assert load_config_file("transformer_demo").num_steps == 1_500


def test_those_of_a_wheel_come_before_what_lies_beside_it(tmp_path, monkeypatch):
    """Where the package is installed, a folder `experiments` beside it is somebody else's."""
    package = tmp_path / "site" / "tfx_jax"
    for folder, name in ((package / "_experiments", "shipped"), (tmp_path / "site" / "experiments", "foreign")):
        folder.mkdir(parents=True)
        (folder / f"{name}.py").touch()
    monkeypatch.setattr(tfx_jax, "__file__", str(package / "__init__.py"))
    assert list(experiments.experiment_files()) == ["shipped"]


def test_help_says_what_is_copied_and_how_it_is_trained(capsys):
    with pytest.raises(SystemExit):
        main(["experiments", "--help"])
    text = "".join(capsys.readouterr().out.split())  # lines are also broken at hyphens
    assert "Pythonfile,itsconfigurationwithoutdataorcheckpoints,to./NAME.py;editit" in text
    assert "tfx-jaxtrain--config=NAME.py--workdir=DIR" in text
