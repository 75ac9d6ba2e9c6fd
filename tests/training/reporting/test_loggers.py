"""What Weights & Biases and MLflow get of a run: stand-ins for their packages first, then the packages themselves."""

import io
import json
import struct
import sys
import types

import jax
import numpy as np
import PIL.Image
import pytest

from tests.training.tiny import tiny_config, train, write_text
from tfx_jax.cli import main
from tfx_jax.errors import UserError, install_command
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.reporting.loggers import LOGGERS
from tfx_jax.training.reporting.progress import Progress, read_history

FIELDS = {"seed": 7, "rates": (1, 2), "peak": None} | {f"field{number}": number for number in range(150)}


class Service:
    """Stands for both services: runs by id, each with its points, fields, pictures and how it ended."""

    def __init__(self):
        self.runs, self.fails = {}, ""

    def run(self, run_id):
        return self.runs.setdefault(run_id, {"points": [], "fields": {}, "images": [], "outcomes": []})

    def check(self, method):
        if method == self.fails:
            raise RuntimeError(f"made to fail at https://user:secret@example.net:\n{method}")

    def wandb(self):
        def init(*, project, name, id, resume, dir, settings):
            self.check("open")
            assert (project, name, resume, dir.endswith(name)) == ("tfx_jax", "mine", "allow", True)
            found = self.run(id)

            def log(values):
                self.check("scalars")
                step = values.pop("step")
                images = [name for name, value in values.items() if not isinstance(value, float)]
                found["images"] += [(step, name, values.pop(name).size) for name in images]
                found["points"] += [(step, name, value) for name, value in values.items()]

            def finish(exit_code):
                self.check("close")
                found["outcomes"].append(exit_code)

            return types.SimpleNamespace(
                offline=False,
                dir="files",
                url="https://example.org/run",
                config=types.SimpleNamespace(update=lambda fields, allow_val_change: found["fields"].update(fields)),
                define_metric=lambda name, step_metric=None: None,
                log=log,
                mark_preempting=lambda: found["outcomes"].append("preempting"),
                finish=finish,
            )

        return package("wandb", init=init, Settings=dict, Image=lambda image: image)

    def mlflow(self):
        class MlflowException(Exception):  # noqa: N818
            pass

        def update_run(run_id, status):
            if run_id not in self.runs:
                raise MlflowException("no such run")

        def create_run(experiment_id, run_name):
            self.check("open")
            assert (experiment_id, run_name) == ("tfx_jax", "mine")
            self.run(f"run {len(self.runs)}")
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run {len(self.runs) - 1}"))

        def log_batch(run_id, metrics=(), params=()):
            self.check("scalars")
            assert len(params) <= 100  # as the service demands
            assert not {name for name, _ in params} & self.run(run_id)["fields"].keys()
            self.run(run_id)["points"] += [(step, name, value) for name, value, _, step in metrics]
            self.run(run_id)["fields"].update(params)

        def log_image(run_id, image, artifact_file):
            self.run(run_id)["images"].append((artifact_file, image.size))

        def set_terminated(run_id, status):
            self.check("close")
            self.run(run_id)["outcomes"].append(status)

        client = types.SimpleNamespace(
            get_experiment_by_name=lambda name: None,
            create_experiment=lambda name: name,
            update_run=update_run,
            create_run=create_run,
            get_run=lambda run_id: types.SimpleNamespace(data=types.SimpleNamespace(params=self.run(run_id)["fields"])),
            log_batch=log_batch,
            log_image=log_image,
            set_terminated=set_terminated,
        )
        return package(
            "mlflow",
            MlflowClient=lambda: client,
            entities=types.SimpleNamespace(Metric=lambda *fields: fields, Param=lambda *fields: fields),
            exceptions=types.SimpleNamespace(MlflowException=MlflowException),
            get_tracking_uri=lambda: "https://example.org",
        )


def package(name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents, __version__="1")
    return module


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """What the environment of the tests says of either service is not for these tests."""
    for name in ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name in LOGGERS:
        monkeypatch.setitem(sys.modules, name, getattr(service, name)())
    return service


def log(workdir, logger, *, last_done_step=0, outcome="finished"):
    """Logs as a run does, and returns what was shown."""
    stream = io.StringIO()
    shown = Progress(workdir, last_done_step=last_done_step, num_steps=10, logger=logger, stream=stream)
    shown.text("config", "| field | value |")
    shown.hparams(FIELDS, ["validation/bleu"])
    for step in range(last_done_step + 1, last_done_step + 4):
        shown.scalars(step, {"train/loss": 1.0 / step, "train/grad_norm": 2.0})
    PIL.Image.new("RGB", (3, 2)).save(png := io.BytesIO(), "png")
    shown.image(last_done_step + 3, "validation/attention", png.getvalue())
    shown.close(outcome)
    return stream.getvalue().splitlines()


OUTCOMES = {"wandb": ["preempting", 1, 0], "mlflow": ["KILLED", "FINISHED"]}


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_resumed_run_goes_on_in_the_same_place(tmp_path, service, logger):
    workdir = tmp_path / "mine"
    workdir.mkdir()
    (line,) = log(workdir, logger, outcome="stopped")
    assert "https://example.org" in line
    log(workdir, logger, last_done_step=2)
    ((run_id, run),) = service.runs.items()
    assert json.loads((workdir / "loggers.json").read_text()) == {logger: run_id}
    assert run["points"] == [
        (step, name, value)
        for step in (1, 2, 3, 3, 4, 5)
        for name, value in (("train/loss", 1 / step), ("train/grad_norm", 2.0))
    ]
    assert {name: str(value) for name, value in run["fields"].items()} == {k: str(v) for k, v in FIELDS.items()}
    assert [image[-1] for image in run["images"]] == [(3, 2), (3, 2)]
    assert run["outcomes"] == OUTCOMES[logger]
    # TensorBoard has the same points, of which the repeated step counts once.
    assert [point.step for point in read_history(workdir).points] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["[", "[]", '{"wandb": 3, "mlflow": ["run 0"]}'])
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_damaged_file_of_ids_begins_a_new_run(tmp_path, service, logger, damage):
    workdir = tmp_path / "mine"
    workdir.mkdir()
    (workdir / "loggers.json").write_text(damage)
    log(workdir, logger)
    assert json.loads((workdir / "loggers.json").read_text()) == {logger: next(iter(service.runs))}


@pytest.mark.parametrize("method", ["open", "scalars", "close"])
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_logger_that_fails_is_reported_once_and_stops_nothing(tmp_path, service, logger, method):
    workdir = tmp_path / "mine"
    workdir.mkdir()
    service.fails = method
    lines = [line for line in log(workdir, logger) if "example.org" not in line]
    title = LOGGERS[logger].title
    assert lines == [
        f"no {'' if method == 'open' else 'more '}scalars for {title}: made to fail at https://example.net: {method}"
    ]
    assert len(read_history(workdir).points) == 3


def test_other_processes_than_the_first_have_no_logger(service):
    assert log(None, "wandb") == log(None, "mlflow") == []
    assert service.runs == {}


@pytest.mark.parametrize("logger", LOGGERS)
@pytest.mark.parametrize("found", [None, types.ModuleType("a folder of that name")])
def test_without_its_package_a_training_does_not_start(tmp_path, monkeypatch, logger, found):
    monkeypatch.setitem(sys.modules, logger, found)
    with pytest.raises(UserError, match=rf"^logger='{logger}' needs {logger} \(.*\): pip install ") as caught:
        train(tiny_config(tmp_path), tmp_path / "run", logger=logger)
    assert str(caught.value).endswith(install_command(logger))
    assert not (tmp_path / "run").exists()


def test_there_is_no_third_logger(tmp_path, capsys):
    with pytest.raises(UserError, match="logger='neptune' must be one of wandb, mlflow"):
        train(tiny_config(tmp_path), tmp_path / "run", logger="neptune")
    assert main(["train", "--config=transformer_demo:test", f"--workdir={tmp_path / 'run'}", "--logger=neptune"]) == 2
    assert "--logger" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def read_wandb(path):
    """Records of an offline run: LevelDB's log format, whose blocks of 32 KiB hold checksum, length, type and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record = path.read_bytes(), 7, b""  # behind W&B's header
    while place < len(data):
        if (left := -place % 32_768) < 7:  # padding
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def points_of_wandb(workdir):
    """Points and fields of all processes of a run, each of which writes a folder."""
    points, fields = [], {}
    for path in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
        for record in read_wandb(path):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [(items["step"], name, value) for name, value in items.items() if name.startswith("train/")]
            fields |= {item.key: json.loads(item.value_json) for item in record.config.update}
    assert len({path.name for path in workdir.glob("wandb/offline-run-*/*.wandb")}) == 1  # one run
    return points, fields


def points_of_mlflow(workdir):
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = [found for found in client.search_experiments() if found.name == "tfx_jax"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (workdir.name, "FINISHED")
    points = [
        (metric.step, metric.key, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    return points, run.data.params


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the packages
@pytest.mark.parametrize(("logger", "read"), [("wandb", points_of_wandb), ("mlflow", points_of_mlflow)])
def test_the_packages_themselves_log_a_training_and_its_continuation(tmp_path, monkeypatch, logger, read):
    pytest.importorskip(logger, reason=f"{logger} is no dependency")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)
    write_text(tmp_path)
    workdir = tmp_path / "run"
    train(tiny_config(tmp_path, num_steps=3), workdir, logger=logger)
    train(tiny_config(tmp_path, num_steps=5), workdir, logger=logger)
    points, fields = read(workdir)
    assert {"train/loss", "train/grad_norm", "train/param_norm", "train/learning_rate"} <= {
        name for _, name, _ in points
    }
    expected = {
        (point.step, name): value for point in read_history(workdir).points for name, value in point.scalars.items()
    }
    assert {(step, name): pytest.approx(value, rel=1e-6) for step, name, value in points if name == "train/loss"} == {
        key: value for key, value in expected.items() if key[1] == "train/loss"
    }
    assert sorted(step for step, name, _ in points if name == "train/loss") == [1, 2, 3, 4, 5]
    assert (str(fields["model.d_model"]), str(fields["task.data.train_source"])) == ("16", "train.tsv")


@pytest.mark.slow
def test_a_training_outlives_its_logger(tmp_path, service):
    """And the norms of gradients and parameters are among what it logs."""
    write_text(tmp_path)
    workdir = tmp_path / "mine"
    train(tiny_config(tmp_path, num_steps=2), workdir, logger="mlflow")
    service.fails = "scalars"
    assert train(tiny_config(tmp_path, num_steps=4), workdir, logger="mlflow").step == 4
    (run,) = service.runs.values()
    assert {step for step, _, _ in run["points"]} == {1, 2}
    assert run["outcomes"] == ["FINISHED", "FAILED"]
    norm = np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in jax.tree.leaves(load_params(workdir))))
    assert read_history(workdir).curve("train/param_norm")[1][-1] == pytest.approx(norm, rel=1e-6)
