"""Loggers besides TensorBoard: Weights & Biases and MLflow get the same scalars, fields and pictures."""

import importlib
import io
import json
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import PIL.Image
from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.errors import UserError, install_command, one_line
from tfx_jax.files import is_local, parse_json, read_small_file

Outcome = Literal["finished", "stopped", "failed"]
"""How a process ends: all steps were done, a signal stopped it and it can be resumed, or it raised an error."""

_IDS_NAME = "loggers.json"  # in the workdir: the id that each logger knows the run by
_MLFLOW_BATCH = 100  # most parameters in one request of MLflow
_MLFLOW_VALUE = 6_000  # most characters of the value of a parameter


class Sink:
    """Receives what a run measures. This one discards everything; subclasses override what they can show.

    Each method may raise `errors`: `Progress` reports the first and does not use the sink again.
    """

    title: ClassVar[str] = ""
    errors: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    place = ""
    """Where the user finds the run, for one line at the start; "" says nothing."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds a point to each named curve."""

    def hparams(self, step: int, fields: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Sets the fields of the configuration, by name, beside the named scalars."""

    def text(self, step: int, name: str, markdown: str) -> None:
        """Adds a text."""

    def image(self, step: int, name: str, png: bytes) -> None:
        """Adds an image."""

    def close(self, outcome: Outcome) -> None:
        """Ends the use of the sink by this process."""


class WeightsAndBiases(Sink):
    """A run of Weights & Biases, which W&B's environment variables configure, such as WANDB_MODE=offline.

    Its axis is the field "step", not the counter of W&B, which does not go back: a resumed run repeats the steps since
    its last checkpoint.
    """

    title = "Weights & Biases"

    def __init__(self, workdir: epath.Path):
        """Starts the run, or continues the one of an earlier process of this workdir."""
        wandb = _import("wandb")
        run_id = os.environ.get("WANDB_RUN_ID") or _read_ids(workdir).get("wandb") or uuid.uuid4().hex[:8]
        self._make_image = wandb.Image
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "tfx_jax",
            name=os.environ.get("WANDB_NAME") or workdir.name,
            id=run_id,
            resume="allow",
            dir=os.fspath(workdir) if is_local(workdir) else None,
            # The progress line stays whole, and a dead network delays the end by less than the grace of a preempted
            # job; what is left is uploaded by `wandb sync`.
            settings=wandb.Settings(console="off", silent=True, finish_timeout=60),
        )
        _write_id(workdir, "wandb", run_id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        folder = os.path.dirname(self._run.dir)
        self.place = f"offline, upload with: wandb sync {folder}" if self._run.offline else self._run.url or ""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def hparams(self, step: int, fields: Mapping[str, Any], metrics: Sequence[str]) -> None:
        self._run.config.update(dict(fields), allow_val_change=True)

    def image(self, step: int, name: str, png: bytes) -> None:
        self._run.log({"step": step, name: self._make_image(PIL.Image.open(io.BytesIO(png)))})

    def close(self, outcome: Outcome) -> None:
        if outcome == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


class MLflow(Sink):
    """A run of MLflow, at MLFLOW_TRACKING_URI and in the experiment MLFLOW_EXPERIMENT_NAME."""

    title = "MLflow"

    def __init__(self, workdir: epath.Path):
        """Starts the run, or continues the one of an earlier process of this workdir."""
        # By default, MLflow tries for a quarter of an hour to reach its server, and the training would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._mlflow = mlflow = _import("mlflow")
        self._client = client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "tfx_jax"
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        self._run_id = _read_ids(workdir).get("mlflow", "")
        try:
            client.update_run(self._run_id, status="RUNNING")
        except mlflow.exceptions.MlflowException:  # there is none, or it was deleted, or is on another server
            self._run_id = client.create_run(experiment_id, run_name=workdir.name).info.run_id
            _write_id(workdir, "mlflow", self._run_id)
        self.place = f"run {self._run_id} at {without_credentials(mlflow.get_tracking_uri())}"

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        now = round(time.time() * 1_000)
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def hparams(self, step: int, fields: Mapping[str, Any], metrics: Sequence[str]) -> None:
        # MLflow does not let a parameter change: those of the first process stay.
        known = self._client.get_run(self._run_id).data.params
        params = [
            self._mlflow.entities.Param(name, str(value)[:_MLFLOW_VALUE])
            for name, value in fields.items()
            if name not in known
        ]
        for first in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, params=params[first : first + _MLFLOW_BATCH])

    def image(self, step: int, name: str, png: bytes) -> None:
        picture = PIL.Image.open(io.BytesIO(png))
        self._client.log_image(self._run_id, picture, artifact_file=f"{name}/{step}.png")

    def close(self, outcome: Outcome) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self._run_id, status)


LOGGERS: dict[str, type[WeightsAndBiases] | type[MLflow]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}
"""Loggers by the name of their package, which is also that of the extra that installs it."""


def check_logger(name: str) -> None:
    """Checks that a logger exists and its package is installed.

    Raises:
      UserError: if not; the message has the command that installs the package.
    """
    if name not in LOGGERS:
        raise UserError(f"logger={name!r} must be one of {', '.join(LOGGERS)}")
    try:
        # A folder of this name in the current directory, where wandb writes by default, passes for a package.
        _import(name).__version__  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise UserError(f"logger={name!r} needs {name} ({one_line(error)}): {install_command(name)}") from None


def without_credentials(text: str) -> str:
    """Returns a text without the users and passwords of its addresses, which errors of clients quote."""
    return re.sub(r"//[^/\s]*@", "//", text)


def _import(name: str) -> Any:
    """Imports a package that need not be installed."""
    return importlib.import_module(name)


def _read_ids(workdir: epath.Path) -> dict[str, str]:
    """Returns the ids of the run by logger; {} if there are none, or the file is damaged."""
    try:
        ids = parse_json(read_small_file(workdir / _IDS_NAME))
    except (OSError, ValueError):
        return {}
    return {name: run_id for name, run_id in ids.items() if isinstance(run_id, str)} if isinstance(ids, dict) else {}


def _write_id(workdir: epath.Path, logger: str, run_id: str) -> None:
    """Keeps the id of the run, so that the next process of this workdir continues it."""
    ids = _read_ids(workdir) | {logger: run_id}
    write_file(workdir / _IDS_NAME, (json.dumps(ids, indent=2) + "\n").encode())
