"""Where arrays live: one mesh, one table of rules for each strategy, no sharding inside layers."""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tfx_jax.errors import UserError

Rules = tuple[tuple[str, P], ...]

# Every device holds the whole state; only the batch is split.
DATA_PARALLEL: Rules = ((".*", P()),)

BATCH = P("data")


def make_mesh(data: int = -1) -> Mesh:
    """Arranges the devices as a mesh with the axis "data"; -1 takes all of them.

    Raises:
      UserError: if there are fewer devices.
    """
    count = jax.device_count()
    data = count if data == -1 else data
    if not 1 <= data <= count:
        raise UserError(f"config.mesh.data={data}, but there are {count} devices; -1 takes all")
    return jax.make_mesh((data,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:data])


def state_shardings(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """Gives each leaf the sharding of the first rule whose pattern matches its whole path.

    Optimizer moments have the paths of their parameters at the end, so one table serves the whole state.
    """

    def of(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next(spec for pattern, spec in rules if re.fullmatch(pattern, name))
        return NamedSharding(mesh, spec if len(spec) <= np.ndim(leaf) else P())

    return jax.tree_util.tree_map_with_path(of, tree)


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Spreads the rows of a batch over the mesh; every process passes the rows that are its own."""
    sharding = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
