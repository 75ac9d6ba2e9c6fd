"""Shapes of a task's batches without its data, for programs that are compiled before any data is read."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from tfx_jax.data.batching.batches import LoaderOptions, training_buckets

NO_DATA: Any = None
"""Placeholder for the splits or the tokenizer of a planned task, whose loss does not use them."""


LENGTH = None
"""Axis of an array that is as long as the examples."""


def planned_batch(
    data: Any, options: LoaderOptions, arrays: Mapping[str, tuple[Any, ...]], *, length: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the batch of the longest examples.

    Args:
      data: configuration with `max_length` and `tokens_per_batch`.
      options: options of the trainer's batches.
      arrays: dtype and axes of an example's arrays by name, such as {"boxes": (np.int32, LENGTH, 4)}.
      length: length of the examples; None means `data.max_length`.

    Raises:
      UserError: as `tfx_jax.data.batching.batches.training_buckets`.
    """
    length = length or cast(int, data.max_length)
    length = -(-length // options.length_multiple) * options.length_multiple  # rounded up to a multiple
    # The batch shape for examples of this length.
    (bucket,) = training_buckets((length,), data.tokens_per_batch, options.batch_multiple, options.shard)
    batch = {}
    for name, (dtype, *axes) in arrays.items():
        sizes = [length if size is LENGTH else size for size in axes]
        batch[name] = jax.ShapeDtypeStruct((bucket.rows, *sizes), np.dtype(dtype))
    return batch
