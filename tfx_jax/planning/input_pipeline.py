"""Measures the input pipeline of an experiment: tokens per second, padding, shapes."""

import dataclasses
import math
import statistics
import time
from typing import Any

import numpy as np
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import make_run
from tfx_jax.training.sharding.strategies import make_mesh


def data(config: ExperimentConfig, workdir: epath.PathLike, *, steps: int) -> dict[str, Any]:
    """Measures how fast the trainer's own iterator yields batches.

    Rates are averages over the whole time, including the wait for the first batch, for which the first sort buffer is
    read, tokenized and sorted. Later buffers delay later batches. Few steps therefore give lower rates than many.

    Args:
      config: configuration of the experiment.
      workdir: folder of a run whose tokenizer is used; in an empty folder a tokenizer is trained, which is timed apart.
      steps: number of batches.

    Returns:
      The result of `tfx-jax bench data`, by names that end with the unit.

    Raises:
      UserError: if the configuration or its data are invalid, or the task is not translation.
    """
    validate(config)
    started_at = time.perf_counter()
    splits = config.task.splits()
    splits["train"]  # opens the training data
    opened_at = time.perf_counter()
    run = make_run(config, workdir, splits=splits)
    ready_at = time.perf_counter()
    iterator = iter(run.train_data(make_mesh(**dataclasses.asdict(config.mesh))))
    pad_id = getattr(run.task.model_config, "pad_id", None)
    num_tokens = dict.fromkeys(("source", "target"), 0)  # without padding
    num_positions = dict(num_tokens)  # including padding
    shapes, arrivals = set(), []  # shapes of target batches, and the time at which each batch arrived
    try:
        for _ in range(steps):
            batch = next(iterator)
            arrivals.append(time.perf_counter())
            if not num_tokens.keys() <= batch.keys():
                raise UserError("bench data needs pairs of texts: name a translation experiment")
            for side in num_tokens:
                num_tokens[side] += int(np.count_nonzero(batch[side] != pad_id))
                num_positions[side] += batch[side].size
            shapes.add(batch["target"].shape)
    finally:
        iterator.close()
    seconds = arrivals[-1] - ready_at
    waits = np.diff([ready_at, *arrivals]).tolist()  # seconds before each batch
    return {
        "open_seconds": opened_at - started_at,
        "tokenizer_seconds": ready_at - opened_at,
        "first_step_seconds": waits[0],
        "steps": steps,
        "median_step_seconds": statistics.median(waits),
        "slowest_step_seconds": max(waits),
        "total_seconds": seconds,
        "target_tokens": num_tokens["target"],
        "target_tokens_per_second": num_tokens["target"] / seconds,
        "source_tokens_per_second": num_tokens["source"] / seconds,
        "padding_share": 1 - sum(num_tokens.values()) / sum(num_positions.values()),
        "target_padding_share": 1 - num_tokens["target"] / num_positions["target"],
        "shapes": len(shapes),
        "largest_batch_positions": max(math.prod(shape) for shape in shapes),
    }
