"""`python -m benchmarks.faults`: see the package."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.faults import (
    commands,
    configurations,
    damage,
    environments,
    folders,
    kills,
    lines,
    texts,
    trainings,
    workdirs,
)
from benchmarks.faults.campaign import BAD, WAITING, Campaign, Prepare, Record, failures, table

KINDS: dict[str, Prepare] = {
    "kills": kills.prepare,
    "damage": damage.prepare,
    "commands": commands.prepare,
    "folders": folders.prepare,
    "lines": lines.prepare,
    "configurations": configurations.prepare,
    "workdirs": workdirs.prepare,
    "environments": environments.prepare,
    "texts": texts.prepare,
    "trainings": trainings.prepare,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns the exit status: 1 if there was a bad outcome, otherwise 0."""
    parser = argparse.ArgumentParser(description="Makes faults, and counts what comes of them.")
    parser.add_argument(
        "--kinds", default=",".join(kind for kind in KINDS if kind != "trainings"), help="of faults, commas in between"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--count", type=int, default=100, help="trials of each kind")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for everything; it goes on there")
    arguments = parser.parse_args(argv)
    kinds = arguments.kinds.split(",")
    if unknown := sorted(set(kinds) - KINDS.keys()):
        parser.error(f"there are the kinds {', '.join(KINDS)}, and no {', '.join(unknown)}")
    records: list[Record] = []
    for kind in kinds:
        # These kinds start processes of their own, which takes longer.
        waiting = 10 * WAITING if kind in ("kills", "environments", "trainings") else WAITING
        campaign = Campaign(kind, KINDS[kind], arguments.output, waiting=waiting)
        numbers = range(arguments.first, arguments.first + arguments.count)
        records += campaign.run(arguments.seed, numbers, _report)
        (arguments.output / "faults.md").write_text(table(records) + "\n" + failures(records, arguments.output))
    print(table(records))
    print(failures(records, arguments.output), end="")
    return int(any(record.outcome in BAD for record in records))


def _report(record: Record) -> None:
    """Prints a bad trial and every 50th trial."""
    if record.outcome in BAD or record.number % 50 == 0:
        details = f"{record.what[:300]}: {record.detail[-300:]!r}" if record.outcome in BAD else ""
        line = f"{record.kind} {record.number}: {record.outcome} {record.seconds} s {details}"
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
