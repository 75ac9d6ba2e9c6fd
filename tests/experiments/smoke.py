"""Trains the test variant of every experiment through the command line, in one process: `make smoke`."""

import pathlib
import sys
import time
import traceback
from collections.abc import Sequence

from tfx_jax import cli

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"


def train_all(paths: Sequence[pathlib.Path], output: pathlib.Path) -> list[str]:
    """Trains each experiment into a folder of its own, whatever becomes of the others; names those that failed."""
    failed = []
    for path in paths:
        print(f"== {path.stem}", flush=True)
        started = time.monotonic()
        try:
            status = cli.main(["train", f"--config={path}:test", f"--workdir={output / path.stem}"])
        except Exception:
            traceback.print_exc()
            status = 1
        print(f"== {path.stem}: {'FAILED' if status else 'trained'}, {time.monotonic() - started:.0f} s", flush=True)
        failed += [path.stem] * bool(status)
    return failed


def main(argv: Sequence[str]) -> int:
    """`smoke.py OUTPUT [EXPERIMENT.py ...]`: all experiments unless some are named."""
    output, *some = map(pathlib.Path, argv)
    failed = train_all(some or sorted(EXPERIMENTS.glob("*.py")), output)
    print(f"failed: {', '.join(failed)}" if failed else "all trained")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
