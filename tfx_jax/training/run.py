"""A run: a configuration with its task, as the trainer and the command line work with it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

import grain
import jax
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from tfx_jax.arrays import to_host
from tfx_jax.data.batching.batches import Batch, LoaderOptions, ProcessShard
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError, one_line
from tfx_jax.models.config import SelfAttentionConfig
from tfx_jax.nn.lora import adapt
from tfx_jax.tasks.prediction import OnBatch, TrainedModel
from tfx_jax.tasks.task import EvalResult, Task
from tfx_jax.training.checkpoint.artifacts import WorkdirArtifacts
from tfx_jax.training.config import ExperimentConfig, load_valid_config, validate
from tfx_jax.training.init_from import tokenizer_folder
from tfx_jax.training.sharding.attention import computable
from tfx_jax.training.sharding.distributed import gather_lists
from tfx_jax.training.sharding.strategies import num_batch_shards, process_shard, spread_rows
from tfx_jax.training.step import Params

AnyTask = TypeVar("AnyTask", bound=Task)


class Run(Generic[AnyTask]):
    """A task that is ready, and the configuration that it was made from.

    Attributes:
      config: of the whole run.
      task: what is learned.
    """

    def __init__(self, config: ExperimentConfig, task: AnyTask):
        self.config, self.task = config, task
        self._on_mesh: dict[Mesh, TrainedModel] = {}

    def make_model(self) -> Any:
        """Makes the model, its parameters drawn by the seed of the configuration.

        Raises:
          UserError: for sizes and tokens that do not fit together, which the tokenizer may decide.
        """
        return make_model(self.config, self.task)

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[Any]:
        """The model without its parameters."""
        return nnx.graphdef(self._abstract_model)

    def check_params(self, params: Params) -> None:
        """Compares parameters, and the model state, with those of the model that the configuration describes.

        Raises:
          UserError: if a name or a shape differs, as after `num_layers` was edited in `config.json`.
        """
        expected, given = (
            {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
            for leaves in map(
                jax.tree_util.tree_leaves_with_path, (nnx.to_pure_dict(nnx.state(self._abstract_model)), params)
            )
        )
        for name in sorted(expected.keys() | given.keys()):
            if expected.get(name) != given.get(name):
                raise UserError(
                    f"the configuration describes a parameter {name} of shape {expected.get(name, 'none')}, but the "
                    f"checkpoint has {given.get(name, 'none')}: config.json or an override changes a size of the model"
                )

    @property
    def make_carry(self) -> Callable[[], Any]:
        """Makes what the first batch begins with: None where examples do not go on from one batch to the next."""
        return getattr(self.task, "make_carry", lambda: None)

    def train_data(self, mesh: Mesh) -> grain.IterDataset[Batch]:
        """Returns what this process reads of the training split when it trains on a mesh."""
        return self.task.train_data(
            LoaderOptions(
                seed=self.config.seed,
                batch_multiple=num_batch_shards(mesh) * self.config.accumulate,
                length_multiple=mesh.shape["sequence"],
                shard=process_shard(mesh),
            )
        )

    def trained(self, params: Params, on_batch: OnBatch | None = None) -> TrainedModel:
        """Returns the model with these parameters; all that were made here share what they compile.

        Raises:
          UserError: as `check_params`.
        """
        self.check_params(params)
        return self._trained.replace(params, on_batch)

    def evaluate(self, params: Params, split: Split = "validation", *, on_batch: OnBatch | None = None) -> EvalResult:
        """Measures parameters on a split; processes share the work, as `placed` has it.

        `on_batch` is told how far it is, but where the task translates.

        Raises:
          UserError: if there is no such split.
        """
        return self.task.evaluate(self.placed(params, on_batch), split)

    def placed(self, params: Params, on_batch: OnBatch | None = None) -> TrainedModel:
        """Returns the model with these parameters for all processes, each of which calls this.

        Where a mesh divides the parameters, no device may have room for all of them: there all devices compute each
        batch together. Otherwise each process works through examples of its own.
        """
        divided = [leaf for leaf in jax.tree.leaves(params) if not getattr(leaf, "is_fully_replicated", True)]
        if not divided:
            return self.trained(to_host(params), on_batch)
        mesh = divided[0].sharding.mesh
        if mesh not in self._on_mesh:  # what one evaluation compiles serves the next
            self._on_mesh[mesh] = TrainedModel(self.graphdef, None, place=functools.partial(spread_rows, mesh))
        return self._on_mesh[mesh].replace(params, on_batch)

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Returns by how much one evaluation is better than others: the first metric, higher being better.

        What is NaN or infinite is worse than all else: a model that makes such numbers is broken, however it got there.
        """
        first = self.task.metrics[0]
        rank = -metrics[first.name] if first.is_loss else metrics[first.name]
        return rank if math.isfinite(rank) else -math.inf

    @functools.cached_property
    def _abstract_model(self) -> Any:
        return nnx.eval_shape(self.make_model)

    @functools.cached_property
    def _trained(self) -> TrainedModel:
        shard = ProcessShard(jax.process_index(), jax.process_count())
        return TrainedModel(self.graphdef, None, shard=shard, gather=gather_lists)


def make_model(config: ExperimentConfig, task: Task) -> Any:
    """Makes the model that a task trains, with the adapters and frozen parameters of the configuration.

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
    """Sets the task of a configuration up.

    Args:
      config: what `validate` has passed.
      workdir: of the training, where the task keeps what a model needs beside its parameters.
      splits: of the task's data, if they have been read before.
      can_make: whether what is missing may be made, because this is a training.

    Raises:
      UserError: as `tfx_jax.tasks.task.TaskConfig.setup`.
    """
    artifacts = WorkdirArtifacts(
        workdir,
        can_make=can_make,
        find_tokenizer=functools.partial(tokenizer_folder, config.init_from) if config.init_from else None,
    )
    splits = config.task.splits() if splits is None else splits
    return Run(config, config.task.setup(config.model, splits, artifacts))


def load_run(
    workdir: epath.PathLike,
    kind: type[AnyTask] | tuple[type[AnyTask], ...] | None = None,
    *,
    config: ExperimentConfig | None = None,
) -> Run[AnyTask]:
    """Opens what was trained in `workdir`, where nothing is written.

    An attention kernel that this platform has not is its formula.

    Args:
      workdir: of the training.
      kind: the class of the task that it must be, or several, of which it must be one; None takes any.
      config: in place of that of the training, such as one with another attention for the same parameters.

    Raises:
      UserError: if there is none, or one of another kind, a file that it needs is missing or damaged, or `validate`
        refuses the configuration.
    """
    config = load_valid_config(workdir) if config is None else validate(config)
    if isinstance(config.model, SelfAttentionConfig):
        attention = computable(config.model.attention, jax.default_backend())
        config = dataclasses.replace(config, model=dataclasses.replace(cast(Any, config.model), attention=attention))
    run = make_run(config, workdir, can_make=False)
    if kind is not None and not isinstance(run.task, kind):
        wanted = " or a ".join(map(_name, kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"{workdir} holds a {_name(type(run.task))}, and this is for a {wanted}")
    return run


def _name(kind: type) -> str:
    """Returns what a class is called in a sentence: "translation task"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip()
