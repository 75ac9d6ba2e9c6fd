"""Faults whose outcome is known, for the tests of the campaign; it imports no JAX, as each worker begins with it."""

import os
import pathlib
import signal

from benchmarks.faults.campaign import Trial, doing

OUTCOMES = ("same", "line", "dies", "burns", "grows", "raises")


def prepare(folder: pathlib.Path):
    """Each number has its outcome; the folder keeps what was tried."""
    numbers = iter(range(len(OUTCOMES) * 9))
    kept: list[bytearray] = []

    def attempt(random):
        with (folder / "tried").open("a") as file:
            file.write(f"{random.integers(1_000)}\n")
        outcome = OUTCOMES[len((folder / "tried").read_text().splitlines()) - 1]
        doing(outcome)
        if outcome == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if outcome == "raises":
            raise ValueError("a mistake of the tool")
        while outcome == "burns":
            next(numbers, None)
        while outcome == "grows":
            kept.append(bytearray(b"x" * (8 << 20)))
        return Trial(f"what is {outcome}", outcome)

    return attempt
