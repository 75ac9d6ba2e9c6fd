"""A run: a configuration with its task, as the trainer and the command line use it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import grain
import jax
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from tfx_jax.arrays import leaves_by_path, to_host
from tfx_jax.data.batching.batches import Batch, LoaderOptions, ProcessShard
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError, one_line
from tfx_jax.hub import local_folder
from tfx_jax.models.config import SelfAttentionConfig
from tfx_jax.nn.lora import Frozen, adapt
from tfx_jax.tasks.prediction import OnBatch, TrainedModel
from tfx_jax.tasks.task import EvalResult, MetricInfo, Task
from tfx_jax.training.checkpoint.artifacts import WorkdirArtifacts, check_artifact
from tfx_jax.training.config import ExperimentConfig, load_valid_config, validate
from tfx_jax.training.sharding.distributed import gather_lists
from tfx_jax.training.sharding.layers import with_supported_kernels
from tfx_jax.training.sharding.strategies import num_batch_shards, process_shard, shard_whole_batch
from tfx_jax.training.step import Params
from tfx_jax.training.workdir import is_workdir

AnyTask = TypeVar("AnyTask", bound=Task)


class Run(Generic[AnyTask]):
    """A configuration and the task that was set up from it.

    Attributes:
      config: configuration of the whole run.
      task: task with its tokenizer, labels and data.
      best_metric: metric that decides which checkpoint is best: `config.best_metric`, by default the task's first.
    """

    def __init__(self, config: ExperimentConfig, task: AnyTask):
        self.config, self.task = config, task
        self.best_metric = _best_metric(config.best_metric, task.metrics)
        self._models_by_mesh: dict[Mesh, TrainedModel] = {}  # without parameters; they keep compiled programs

    def make_model(self) -> Any:
        """Builds the model, with parameters initialized from the seed of the configuration.

        Raises:
          UserError: if sizes and tokens do not fit together, which may depend on the tokenizer.
        """
        return make_model(self.config, self.task)

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[Any]:
        """Static definition of the model, without its parameters."""
        return nnx.graphdef(self._abstract_model)

    @property
    def frozen_paths(self) -> set[str]:
        """Paths of the parameters that are not trained, such as "decoder_layers/feed_forward/up"."""
        return frozen_paths(self._abstract_model)

    def check_params(self, params: Params) -> None:
        """Checks that parameters and model state have the names and shapes of the configured model.

        Raises:
          UserError: if a name or a shape differs, as after `num_layers` was edited in `config.json`.
        """

        def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
            return {name: tuple(leaf.shape) for name, leaf in leaves_by_path(tree).items()}

        expected = shapes(nnx.to_pure_dict(nnx.state(self._abstract_model)))
        actual = shapes(params)
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise UserError(
                    f"the configuration describes a parameter {name} of shape {expected.get(name, 'none')}, but the "
                    f"checkpoint has {actual.get(name, 'none')}: restore the model sizes in config.json, or drop the "
                    "override that changes them"
                )

    @property
    def make_carry(self) -> Callable[[], Any]:
        """Function that returns the carry of the first batch: None for tasks without state between batches."""
        return getattr(self.task, "make_carry", lambda: None)

    def train_data(self, mesh: Mesh) -> grain.IterDataset[Batch]:
        """Returns this process's part of the training data for a mesh."""
        return self.task.train_data(
            LoaderOptions(
                seed=self.config.seed,
                batch_multiple=num_batch_shards(mesh) * self.config.accumulate,
                length_multiple=mesh.shape["sequence"],
                shard=process_shard(mesh),
            )
        )

    def trained(self, params: Params, on_batch: OnBatch | None = None) -> TrainedModel:
        """Returns the model with these parameters; all models of this run share compiled programs.

        Raises:
          UserError: as `check_params`.
        """
        self.check_params(params)
        return self._trained.replace(params, on_batch)

    def evaluate(self, params: Params, split: Split = "validation", *, on_batch: OnBatch | None = None) -> EvalResult:
        """Computes the metrics of parameters on a split; the processes share the work as described in `placed`.

        `on_batch` is called with the progress, except by translation tasks.

        Raises:
          UserError: if the data have no such split.
        """
        return self.task.evaluate(self.placed(params, on_batch), split)

    def placed(self, params: Params, on_batch: OnBatch | None = None) -> TrainedModel:
        """Returns the model with these parameters for evaluation by all processes, each of which must call this.

        If the parameters are sharded over a mesh, all devices compute each batch together, because a single device may
        not hold them all. Otherwise each process evaluates its own share of the examples.
        """
        # NumPy arrays have no such attribute, and count as replicated.
        sharded = [leaf for leaf in jax.tree.leaves(params) if not getattr(leaf, "is_fully_replicated", True)]
        if not sharded:
            return self.trained(to_host(params), on_batch)
        mesh = sharded[0].sharding.mesh
        if mesh not in self._models_by_mesh:
            self._models_by_mesh[mesh] = TrainedModel(
                self.graphdef, None, place=functools.partial(shard_whole_batch, mesh=mesh)
            )
        return self._models_by_mesh[mesh].replace(params, on_batch)

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Returns a value that is higher for better evaluations: the `best_metric`, negated if it is a loss.

        NaN and infinity rank lowest (-inf), because a model that produces them is broken.
        """
        best_metric = self.best_metric
        value = metrics[best_metric.name]
        rank = -value if best_metric.is_loss else value
        return rank if math.isfinite(rank) else -math.inf

    @functools.cached_property
    def _abstract_model(self) -> Any:
        return nnx.eval_shape(self.make_model)

    @functools.cached_property
    def _trained(self) -> TrainedModel:
        """The model without parameters, which `replace` adds; it keeps the compiled programs."""
        shard = ProcessShard(jax.process_index(), jax.process_count())
        return TrainedModel(self.graphdef, None, shard=shard, gather=gather_lists)


def _best_metric(name: str, metrics: Sequence[MetricInfo]) -> MetricInfo:
    """Returns the metric of a name, for "" the first one.

    Raises:
      UserError: if there is no metric of that name.
    """
    named = {metric.name: metric for metric in metrics}
    if name and name not in named:
        raise UserError(f"config.best_metric must be one of {', '.join(named)}, or empty, got {name!r}")
    return named[name] if name else metrics[0]


def frozen_paths(model: nnx.Module) -> set[str]:
    """Returns the paths of the parameters that are not trained, such as "decoder_layers/feed_forward/up"."""
    return {*leaves_by_path(nnx.to_pure_dict(nnx.state(model, Frozen)))}


def make_model(config: ExperimentConfig, task: Task) -> Any:
    """Builds the model that a task trains, with the adapters and frozen parameters of the configuration.

    Raises:
      UserError: as `Run.make_model`, and if adapters or frozen parameters fit no part of the model.
    """
    try:
        model = task.make_model(rngs=nnx.Rngs(params=config.seed))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"config.model: {one_line(error)}") from None
    try:
        adapt(model, config.lora, frozen=config.frozen, seed=config.seed)
    except ValueError as error:
        raise UserError(f"config.{one_line(error)}") from None
    return model


def make_run(
    config: ExperimentConfig, workdir: epath.PathLike, *, splits: Splits[Any] | None = None, can_make: bool = True
) -> Run[Any]:
    """Sets up the task of a configuration.

    Args:
      config: configuration that `validate` has accepted.
      workdir: folder of the run, where the task keeps tokenizer and labels.
      splits: the task's data, if they have been read already.
      can_make: whether missing files may be created, as in training; else they are an error.

    Raises:
      UserError: as `tfx_jax.tasks.task.TaskConfig.setup`, and if the task has no metric `config.best_metric`.
    """
    artifacts = WorkdirArtifacts(
        workdir,
        can_make=can_make,
        find_tokenizer=functools.partial(tokenizer_folder, config.init_from) if config.init_from else None,
    )
    splits = config.task.splits() if splits is None else splits
    return Run(config, config.task.setup(config.model, splits, artifacts))


def tokenizer_folder(init_from: epath.PathLike) -> epath.Path:
    """Returns the folder of the initial model's tokenizer.

    Raises:
      UserError: if there is no model at `init_from`, or its tokenizer is missing or damaged.
    """
    folder = local_folder(init_from)
    if not is_workdir(folder):
        return folder
    check_artifact(folder, "tokenizer")
    return folder / "tokenizer"


def load_run(
    workdir: epath.PathLike,
    kind: type[AnyTask] | tuple[type[AnyTask], ...] | None = None,
    *,
    config: ExperimentConfig | None = None,
) -> Run[AnyTask]:
    """Loads the run in `workdir` for use; nothing is written.

    If this platform lacks the configured attention kernel, the plain implementation is used.

    Args:
      workdir: folder of the run.
      kind: class or classes that the task must be an instance of; None accepts any.
      config: replaces the saved configuration, such as one with another attention for the same parameters.

    Raises:
      UserError: if there is no run, its task is of another kind, a file is missing or damaged, or `validate` rejects
        the configuration.
    """
    config = load_valid_config(workdir) if config is None else validate(config)
    if isinstance(config.model, SelfAttentionConfig):
        attention = with_supported_kernels(config.model.attention, jax.default_backend())
        config = dataclasses.replace(config, model=dataclasses.replace(cast(Any, config.model), attention=attention))
    run = make_run(config, workdir, can_make=False)
    if kind is not None and not isinstance(run.task, kind):
        expected = " or a ".join(map(_name, kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"{workdir} holds a {_name(type(run.task))}, but a {expected} is required: name another run")
    return run


def _name(kind: type) -> str:
    """Returns the name of a class in words, such as "translation task"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip()
