"""What the input pipeline of a training gives: tokens a second, padding, shapes."""

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
    """Takes batches from the trainer's own iterator as fast as it gives them.

    Rates are over all the seconds, those of the first batch included: it waits for the first buffer to be read,
    tokenized and sorted, and later buffers come between later batches. Few steps therefore show less than many do.

    Args:
      config: the experiment.
      workdir: of a training, whose tokenizer is taken; in an empty folder one is trained, which is timed apart.
      steps: batches to take.

    Returns:
      What `tfx-jax bench data` says, by names that end in their unit.

    Raises:
      UserError: if the configuration or its data do not allow it.
    """
    validate(config)
    started = time.perf_counter()
    splits = config.task.splits()
    splits["train"]
    opened = time.perf_counter()
    run = make_run(config, workdir, splits=splits)
    ready = time.perf_counter()
    iterator = iter(run.train_data(make_mesh(**dataclasses.asdict(config.mesh))))
    pad_id = getattr(run.task.model_config, "pad_id", None)
    sums = dict.fromkeys(("source", "target"), 0)
    positions, shapes, arrivals = dict(sums), set(), []
    try:
        for _ in range(steps):
            batch = next(iterator)
            arrivals.append(time.perf_counter())
            if not sums.keys() <= batch.keys():
                raise UserError("bench data measures pairs of texts: name an experiment that translates")
            for side in sums:
                sums[side] += int(np.count_nonzero(batch[side] != pad_id))
                positions[side] += batch[side].size
            shapes.add(batch["target"].shape)
    finally:
        iterator.close()
    seconds = arrivals[-1] - ready
    waits = np.diff([ready, *arrivals]).tolist()
    return {
        "open_seconds": opened - started,
        "tokenizer_seconds": ready - opened,
        "first_step_seconds": waits[0],
        "steps": steps,
        "median_step_seconds": statistics.median(waits),
        "slowest_step_seconds": max(waits),
        "total_seconds": seconds,
        "target_tokens": sums["target"],
        "target_tokens_per_second": sums["target"] / seconds,
        "source_tokens_per_second": sums["source"] / seconds,
        "padding_share": 1 - sum(sums.values()) / sum(positions.values()),
        "target_padding_share": 1 - sums["target"] / positions["target"],
        "shapes": len(shapes),
        "largest_batch_positions": max(math.prod(shape) for shape in shapes),
    }
