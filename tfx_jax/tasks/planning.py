"""Shapes of a task's batches without its data, for programs that are compiled before any data is read."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from tfx_jax.data.batching.batches import LoaderOptions, training_buckets

NO_DATA: Any = None
"""Placeholder for the splits or the tokenizer of a planned task, whose loss does not use them."""


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
    """Returns the shapes and dtypes of the batch of the longest examples.

    Args:
      data: configuration with `max_length` and `tokens_per_batch`.
      options: options of the trainer's batches.
      lengths: lengths of arrays that differ from the length of the examples, by name.
      dtypes: dtypes of arrays [B, length], by name.
      sizes: sizes of the last axis of arrays [B, length, size], by name.
      scalars: dtypes of arrays [B], by name.
      length: length of the examples; None means `data.max_length`.

    Raises:
      UserError: as `tfx_jax.data.batching.batches.training_buckets`.
    """
    length = length or cast(int, data.max_length)
    length = -(-length // options.length_multiple) * options.length_multiple  # rounded up to a multiple
    # The batch shape for examples of this length.
    (bucket,) = training_buckets((length,), data.tokens_per_batch, options.batch_multiple, options.shard)
    shapes = {
        name: (bucket.rows, (lengths or {}).get(name, length), *([sizes[name]] if sizes and name in sizes else []))
        for name in dtypes
    }
    arrays = {name: jax.ShapeDtypeStruct(shapes[name], np.dtype(dtype)) for name, dtype in dtypes.items()}
    rows = {name: jax.ShapeDtypeStruct((bucket.rows,), np.dtype(dtype)) for name, dtype in (scalars or {}).items()}
    return arrays | rows
