"""Attention on a mesh whose axes are explicit, the default of `jax.make_mesh`."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tfx_jax.functional.empty import EXTRA_OUTPUTS, bind_inputs

Arguments = ParamSpec("Arguments")
R = TypeVar("R")


def _canonical(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype in (np.float64, np.complex128):
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return x


def divided_as_queries(attention: Callable[Arguments, R]) -> Callable[Arguments, R]:
    """Lets an attention take arrays of a mesh with explicit axes.

    There every operation has to know how its result is divided, which those that cut a sequence into blocks or sort it
    cannot. Of an attention it is known as a whole: its results are divided as its queries are, and the compiler
    decides inside, as ever on axes of the kind Auto.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and its options.

    Returns:
      The same function. Where a mesh has explicit axes, batch, queries and heads of what it returns are divided as
      those of `query`, and the rest is whole.
    """

    @functools.wraps(attention)
    def attend(*args: Arguments.args, **kwargs: Arguments.kwargs) -> R:
        # float64 of NumPy becomes float32 unless jax_enable_x64 is set; once here, instead of with a warning per use.
        args, kwargs = jax.tree.map(_canonical, (args, kwargs), is_leaf=lambda x: x is None)
        sharding = jax.typeof(bind_inputs(args, kwargs)[0]).sharding
        axes = sharding.mesh.explicit_axes
        if not axes:
            return attention(*args, **kwargs)
        b, t, n, _ = (*sharding.spec, None, None, None, None)[:4]
        specs = [P(b, t, n), *(P(b, n, t) for option in EXTRA_OUTPUTS if kwargs.get(option))]
        shardings = [NamedSharding(sharding.mesh, spec) for spec in specs]
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def attend_to(*arrays: Any) -> R:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            given = jax.tree.unflatten(structure, filled.values())
            return cast(Callable[..., R], attention)(*given[0], **given[1])

        out_sharding = tuple(shardings) if len(shardings) > 1 else shardings[0]
        divided: Any = jax.sharding.auto_axes(attend_to, axes=axes, out_sharding=out_sharding)
        return divided(*(leaves[place] for place in places))

    return attend
