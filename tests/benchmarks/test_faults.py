"""The fault campaign itself, and a small seeded part of it; whole it is `python -m benchmarks.faults`."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest

from benchmarks import faults
from benchmarks.faults import (
    campaign,
    commands,
    configurations,
    damage,
    environments,
    folders,
    kills,
    lines,
    texts,
    trainings,
    workdirs,
)
from benchmarks.faults.__main__ import KINDS
from benchmarks.faults.campaign import BAD, Campaign, Record, draw, failures, table
from benchmarks.faults.command import Ended, call, judge
from tests.benchmarks import faults_made_here
from tests.training.tiny import tiny_config, train, write_text
from tfx_jax import cli
from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint.checkpoints import average_checkpoints, load_params
from tfx_jax.training.config import load_config, validate


def test_whoever_hangs_grows_or_dies_is_found_and_the_campaign_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "SECONDS", 0.3)
    monkeypatch.setattr(campaign, "MAX_BYTES", 64 << 20)
    told = []
    made = Campaign("made", faults_made_here.prepare, tmp_path)
    records = made.run(3, range(6), told.append)
    outcomes = [(record.outcome, record.what) for record in records]
    assert outcomes[:2] == [("same", "what is same"), ("line", "what is line")]
    assert outcomes[2:] == [("traceback", "dies"), ("hang", "burns"), ("memory", "grows"), ("traceback", "the tool")]
    assert "the process died, status -9" in records[2].detail
    assert "a mistake of the tool" in records[5].detail
    assert 64 <= records[4].mib < 512
    assert told == records
    # It resumes where it was, and draws the same for the same number.
    tried = (tmp_path / "made/tried").read_text()
    assert tried == "".join(f"{draw('made', 3, number).integers(1_000)}\n" for number in range(6))
    with (tmp_path / "made/trials.jsonl").open("a") as file:
        file.write('{"what": "cut o')
    assert made.run(3, range(6), told.append) == records
    assert len(told) == 6


def test_every_kind_is_described():
    rows = [line.split(" | ") for line in (faults.__doc__ or "").splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows] == ["kind", *KINDS]
    assert {len(row) for row in rows} == {4}


def test_table_counts_and_failures_can_be_repeated(tmp_path):
    records = [
        Record("a", "same", kind="kills", mib=3),
        Record("b", "same", kind="kills", mib=70),
        Record("train x", "silent", "other words", kind="damage", seed=4, number=17),
    ]
    assert table(records).splitlines() == [
        "| kind | tried | same | line | loss | silent | traceback | raw | hang | memory | MiB at most |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| kills | 2 | 2 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 70 |",
        "| damage | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 |",
    ]
    told = failures(records, tmp_path)
    assert told.startswith("silent: train x\n")
    assert "--kinds=damage --seed=4 --first=17 --count=1" in told
    assert set(BAD) <= set(table(records).splitlines()[0].replace("|", " ").split())


@pytest.mark.parametrize(
    ("ended", "is_same", "outcome"),
    [
        (Ended(0, b"x\n", ""), True, "same"),
        (Ended(0, b"x\n", ""), False, "silent"),
        (Ended(2, b"", "tfx-jax train: config.seed must be at least 0\n"), True, "line"),
        (Ended(2, b"", "tfx-jax train: \n"), True, "raw"),
        (Ended(2, b"", ""), True, "raw"),
        (Ended(1, b"", "tfx-jax train: config.seed must be at least 0\n"), True, "raw"),
        (Ended(2, b"", "tfx-jax train: config.\x1b[2J must be at least 0\n"), True, "raw"),
        (Ended(2, b"", f"tfx-jax attend: {cli.__path__[0]}/x.html: No such file or directory\n"), True, "raw"),
        (Ended(None, b"", "", "Traceback (most recent call last):\n"), True, "traceback"),
        (Ended(0, b"", "Traceback (most recent call last):\n  of a thread\n"), True, "traceback"),
    ],
)
def test_verdicts(ended, is_same, outcome):
    assert judge(ended, "", lambda: is_same).outcome == outcome


def test_a_command_is_caught_whole():
    assert call(["experiments", "no_such"]).status == 2
    assert b"usage: tfx-jax VERB" in call(["--help"]).out
    with mock.patch("tfx_jax.cli.experiments.run", side_effect=ZeroDivisionError):
        assert "ZeroDivisionError" in call(["experiments"]).traceback


def _checked(config, workdir, **_):
    validate(config)
    raise UserError("a training would begin here, and the test is over")


def test_command_lines(tmp_path, monkeypatch):
    """Of folders that are not there, so that next to nothing runs; a training ends before its first step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfx_jax.cli.train.train", _checked)
    grammar = commands.Grammar({"a": str(tmp_path / "no-training")}, str(tmp_path / "no-model"))
    bad, number = [], 0
    for number in range(300):
        arguments = grammar.command(draw("commands", 0, number))
        if arguments[0] in ("bench", "plan", "average", "prepare"):  # these compute, or look for servers
            continue
        trial = judge(call(arguments), repr(arguments))
        bad += [trial] if trial.outcome in BAD else []
    assert not bad
    assert {"train", "generate", "translate"} <= {action[0] for action in grammar.commands}


def test_a_grammar_finds_what_fails(monkeypatch, tmp_path):
    """The instrument itself: a flag whose values are not checked comes out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfx_jax.cli.generate._check", lambda arguments: 1 // (arguments.temperature != 0.5))
    assert judge(call(["generate", "--model=x", "--temperature=0.5"]), "").outcome == "traceback"


@pytest.mark.compiles(40, "reads folders, which puts each of their arrays on the device")
@pytest.mark.slow
def test_folders(tmp_path):
    (tmp_path / "folders").mkdir()
    attempt = folders.prepare(tmp_path / "folders")
    trials = [attempt(draw("folders", 0, number)) for number in range(40)]
    assert not [trial for trial in trials if trial.outcome in BAD]
    assert {trial.outcome for trial in trials} == {"same", "line"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of a training, and its parameters."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    train(tiny_config(folder), folder / "workdir")
    average_checkpoints(folder / "workdir", 2)
    return folder / "workdir"


def _read(workdir, step):
    """The configuration, and the parameters of a checkpoint."""
    return load_config(workdir), np.asarray(load_params(workdir, step)["table"])


@pytest.mark.slow
def test_damage(trained, tmp_path):
    """What is read is what was saved, or a line says that it is not."""
    wanted = {step: _read(trained, step) for step in (6, 9, "average")}
    said = []
    for number in range(30):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(trained, tmp_path / "copy")
        what = damage.harm(tmp_path / "copy", draw("damage", 0, number))
        for step, (config, parameters) in wanted.items():
            try:
                found = _read(tmp_path / "copy", step)
            except UserError as error:
                said.append(str(error))
            else:
                assert found[0] == config, what
                np.testing.assert_array_equal(found[1], parameters, what)
    assert 3 <= len(said) < 90
    assert all(line.isprintable() and len(line) > 20 for line in said)


@pytest.mark.slow
def test_hostile_workdirs(trained, tmp_path, monkeypatch):
    """What is read is what was saved, or a line says that it is not; nothing outside is touched."""
    expected, said = _read(trained, 9), []
    for number in range(30):
        here = tmp_path / str(number)
        shutil.copytree(trained, here / "workdir")
        (here / "outside" / "7").mkdir(parents=True)
        (here / "outside" / "secret").write_text("of somebody")
        monkeypatch.chdir(here)
        what = workdirs.harm(here / "workdir", here / "outside", draw("workdirs", 0, number))
        try:
            found = _read(here / "workdir", 9)
        except UserError as error:
            said.append(str(error))
        else:
            assert found[0] == expected[0], what
            np.testing.assert_array_equal(found[1], expected[1], what)
        assert workdirs.contents(here / "outside") == {"7": "", "secret": "of somebody"}
    assert 3 <= len(said) < 30
    assert all(line.isprintable() and len(line) > 20 for line in said)


def test_edits_of_a_configuration(trained, tmp_path):
    """Each is valid JSON that differs from what was saved in one field."""
    saved, refusable = json.loads((trained / "config.json").read_text()), 0
    del saved["sha256"]
    for number in range(50):
        shutil.copy(trained / "config.json", tmp_path / "config.json")
        what, must_refuse = configurations.edit(tmp_path / "config.json", draw("configurations", 0, number))
        edited = json.loads((tmp_path / "config.json").read_text())
        is_same = json.dumps(edited) == json.dumps(saved)
        assert not (is_same and must_refuse), what
        refusable += must_refuse
    assert 10 < refusable < 45


def test_text_forms_of_files(tmp_path, monkeypatch):
    """The forms, and files without any."""
    monkeypatch.chdir(tmp_path)
    for name, (write, read) in texts.FILES.items():
        (tmp_path / name).write_bytes(write(list(texts.LINES)))
        assert read(name)
    kinds = set()
    for number in range(60):
        plain, data, _, is_same = texts.form(draw("texts", 0, number), texts.FILES["a.en"][0])
        kinds.add(is_same)
        if is_same is None:
            with pytest.raises(UnicodeDecodeError):
                data.decode()
        else:
            assert (
                data.decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n") == plain.decode().rstrip("\n")
                or not is_same
            )
    assert kinds == {True, False, None}


def test_an_environment_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert environments.run(["experiments", "no_such"], {"LC_ALL": "C"}).status == 2
    assert environments.run(["--help"], {}, ">/dev/full").status == 2
    assert b"usage: tfx-jax VERB" in environments.run(["--help"], {"PYTHONIOENCODING": "utf-16"}, "2>&-").out
    monkeypatch.setattr(environments, "SECONDS", 0.01)
    assert "no end after" in environments.run(["--help"], {}).traceback


def test_lines_are_any_characters():
    made = [lines.line(draw("lines", 0, number)) for number in range(400)]
    assert "" in made
    assert not any("\n" in line for line in made)
    text = "".join(made)
    text.encode()  # no half of a pair
    assert {"\x1b", "\r", "\u2028", "\x85", "\0"} <= set(text)


@pytest.mark.slow
def test_kills(tmp_path):
    records = Campaign("kills", kills.prepare, tmp_path).run(0, range(4), lambda record: None)
    assert [record.outcome for record in records] == ["same"] * 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return trainings.Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", trainings.FAULTS, ids=lambda fault: fault.__name__)
def test_training_survives(bench, fault):
    trials = (trainings.suffer(bench, fault, (0, number)) for number in range(5))
    trial = next((trial for trial in trials if trial is not None), None)
    assert trial is not None, "the moment for the fault never came"
    assert trial.outcome in ("same", "line"), trial


@pytest.mark.slow
def test_a_difference_is_noticed(bench, tmp_path):
    """The instrument itself: another seed, and a checkpoint that is gone, are failures."""
    reference = bench.reference()
    with pytest.raises(trainings.Failed, match=r"checkpoints \[5, .*40\] are gone"):
        bench.check(tmp_path, set(), 1)
    other = tmp_path / "other"
    training = trainings.Training(trainings.Bench(bench.output, {"seed": 1}), other)
    assert training.statuses() == [0]
    with pytest.raises(trainings.Failed, match="step 5 differs from that of the uninterrupted run"):
        bench.check(other, set(), 1)
    bench.check(reference, set(), 1)


@pytest.mark.parametrize("fault", [trainings.truncate, trainings.flip_bit])
def test_damage_is_to_the_newest_checkpoint_and_to_nothing_else(fault, tmp_path):
    class Bench(trainings.Bench):
        def __init__(self):
            pass

        def reference(self, processes=1):
            for step in (10, trainings.RESUMED, trainings.STEPS):
                (tmp_path / "reference/checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
                (tmp_path / "reference/checkpoints" / str(step) / "values").write_bytes(b"0123456789")
            return tmp_path / "reference"

    fault(Bench(), tmp_path / "damaged", np.random.default_rng(0))
    folder = tmp_path / "damaged/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["10", str(trainings.RESUMED)]
    assert (folder / "10/values").read_bytes() == b"0123456789"
    assert (folder / str(trainings.RESUMED) / "values").read_bytes() != b"0123456789"
