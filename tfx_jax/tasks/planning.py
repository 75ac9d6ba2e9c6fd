"""What a task would train on, without its data: for programs that are compiled before there is anything to read."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from tfx_jax.data.batching.batches import LoaderOptions, training_buckets

NO_DATA: Any = None
"""Stands where a planned task would have its splits or its tokenizer, which its loss does not ask for."""


def planned_batch(
    data: Any,
    options: LoaderOptions,
    *,
    lengths: Mapping[str, int] | None = None,
    dtypes: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    length: int | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes the batch of the longest examples.

    Args:
      data: has `max_length` and `tokens_per_batch`.
      options: how the trainer wants its batches.
      lengths: of arrays that are not as long as the examples.
      dtypes: of arrays [rows, length], by name.
      sizes: of the last axis of arrays [rows, length, size].
      scalars: dtypes of arrays [rows].
      length: of the examples; None means `data.max_length`.

    Raises:
      UserError: as `tfx_jax.data.batching.batches.training_buckets` does.
    """
    length = -(-(length or cast(int, data.max_length)) // options.length_multiple) * options.length_multiple
    (bucket,) = training_buckets((length,), data.tokens_per_batch, options.batch_multiple, options.shard)
    shapes = {
        name: (bucket.rows, (lengths or {}).get(name, length), *([sizes[name]] if sizes and name in sizes else []))
        for name in dtypes
    }
    arrays = {name: jax.ShapeDtypeStruct(shapes[name], np.dtype(dtype)) for name, dtype in dtypes.items()}
    rows = {name: jax.ShapeDtypeStruct((bucket.rows,), np.dtype(dtype)) for name, dtype in (scalars or {}).items()}
    return arrays | rows
