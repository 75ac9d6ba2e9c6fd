"""Every experiment file is a lab note that parses, in each of its variants."""

import pathlib

import pytest

from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.training.config import validate

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("*.py"))
NEEDED = {"transformer_files": ["--config.task.data.source_language=en", "--config.task.data.target_language=de"]}


def variants(path):
    """The variants that the file's own error message names."""
    with pytest.raises(UserError, match="unknown variant 'no-such-variant'") as raised:
        load_config_file(f"{path}:no-such-variant")
    return str(raised.value).partition("there are ")[2].split(", ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_variant_is_valid(path):
    found = variants(path)
    assert "test" in found
    for variant in found:
        validate(load_config_file(f"{path}:{variant}", [] if variant == "test" else NEEDED.get(path.stem, [])))
    validate(load_config_file(str(path), NEEDED.get(path.stem, [])))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_test_variant_is_small_and_needs_no_data(path):
    config = load_config_file(f"{path}:test")
    assert getattr(config.task.data, "dataset", "drawn") in (
        "grammar",
        "grammar_pairs",
        "synthetic",
        "shapes",
        "drawn",
        "tones",
    )
    assert config.num_steps <= 20
    assert config.checkpoint_every < config.num_steps  # so that interruption can be tested on it
    assert config.model.d_model <= 64


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_lab_note_says_how_to_run_it(path):
    note = path.read_text().split('"""')[1]
    assert f"tfx-jax train --config={path.stem}" in note.replace("\\\n        ", "")
    assert "Measured" in note


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_result_is_one_line_of_the_note_and_that_of_the_table(path):
    lines = path.read_text().split('"""')[1].splitlines()
    (result,) = [line.removeprefix("Result: ") for line in lines if line.startswith("Result: ")]
    assert lines[2] == f"Result: {result}"  # behind the title
    assert 0 < len(result) <= 110
    (row,) = [
        row
        for row in (ROOT / "docs" / "results.md").read_text().splitlines()
        if row.startswith(f"| [{path.stem}](../experiments/")
    ]
    assert row.endswith(f" | {result} |")


BUILT_IN = (
    "captioning_shapes",
    "patch_pooling_shapes",
    "seq2seq_demo",
    "seq2vec_cohort",
    "transformer_demo",
    "vit_digits",
)


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in BUILT_IN], ids=lambda path: path.stem)
def test_data_in_a_store_whose_client_is_missing(path):
    """s3fs is none of our packages, and no test installs it."""
    config = load_config_file(str(path), NEEDED.get(path.stem, []))
    data = config.task.data
    if not hasattr(data, "data_dir"):
        pytest.skip("drawn while it is trained on")
    data.data_dir = "s3://bucket/data"
    if path.stem == "transformer_files":  # the names of the files are its user's
        data.train_source, data.train_target = "train.en", "train.de"
    with pytest.raises(UserError, match=r"s3fs.*install the missing package"):
        config.task.splits()["train"]
