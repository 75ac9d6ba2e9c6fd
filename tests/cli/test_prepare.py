"""`tfx-jax prepare` and a training on what it made."""

import json
import pathlib

import pytest

from tests.data.statmt import NEWS, archives, checksums_of, path_of, serve
from tfx_jax.cli import main
from tfx_jax.data.sources import prepare
from tfx_jax.training.checkpoint.checkpoints import load_params

pytest.importorskip("tensorflow_datasets")

EXPERIMENT = pathlib.Path(__file__).parents[2] / "experiments" / "transformer_wmt14_ende.py"
PAIRS = {"train": 122, "validation": 9, "test": 7}


@pytest.fixture
def server(monkeypatch):
    found = archives()
    monkeypatch.setattr(prepare, "registered_checksums", lambda: checksums_of(found))
    with serve({path_of(url): body for url, body in found.items()}) as server:
        yield server


def arguments(server, folder, *more):
    return ["prepare", "wmt14_translate/de-en", f"--data-dir={folder}", f"--base-url={server.url}", *more]


def test_says_what_there_is_and_how_to_train_on_it(server, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments(server, "my data")) == 0
    flags = f"--config.task.data.dataset=wmt14_translate/de-en --config.task.data.data_dir='{tmp_path}/my data'"
    out, err = capfd.readouterr()
    assert out == f"wmt14_translate/de-en: 122 train, 9 validation, 7 test pairs; train with {flags}\n"
    assert "training-parallel-nc-v9.tgz" in err
    assert main(arguments(server, "my data", "--json")) == 0
    found = {"dataset": "wmt14_translate/de-en", "data_dir": f"{tmp_path}/my data", "pairs": PAIRS}
    assert json.loads(capfd.readouterr().out) == found


@pytest.mark.compiles(70, "a training in the test's own process, with its evaluation")
@pytest.mark.slow
def test_trains_on_what_it_made(server, tmp_path, capfd):
    assert main(arguments(server, tmp_path)) == 0
    flags = capfd.readouterr().out.split()[-2:]
    size = [
        "--config.task.data.source_language=en",
        "--config.task.data.target_language=de",
        "--config.task.data.tokenizer=words",
    ]
    command = ["train", f"--config={EXPERIMENT}:test", f"--workdir={tmp_path}/run", *flags, *size]
    assert main(command) == 0
    assert {"embedding", "encoder_layers"} <= set(load_params(tmp_path / "run"))


def test_training_names_the_command(tmp_path, capfd):
    flags = ["--config.task.data.dataset=wmt14_translate/de-en", f"--config.task.data.data_dir={tmp_path}"]
    assert main(["train", f"--config={EXPERIMENT}:test", f"--workdir={tmp_path}/run", *flags]) == 2
    assert "run `tfx-jax prepare wmt14_translate/de-en --data-dir=DIR`, then train with" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data-dir=gs://bucket/data"], "array records can only be written to a local disk, not to gs://bucket/data"),
        (["--base-url=here"], "--base-url=here should begin with http"),
        (["--speed=9"], "unrecognized arguments: --speed=9; see tfx-jax prepare --help"),
    ],
)
def test_mistakes_cost_one_line(server, tmp_path, capfd, extra, message):
    assert main(arguments(server, tmp_path, *extra)) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_corrupt_archive_costs_one_line(server, tmp_path, capfd):
    server.files[path_of(NEWS)] = bytes(len(server.files[path_of(NEWS)]))
    assert main(arguments(server, tmp_path)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].endswith("and was deleted: run the same command again to fetch it again")
    assert "Traceback" not in err
