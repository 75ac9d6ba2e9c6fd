"""Breaks the library on purpose, one mistake at a time, and reports which of them the tests do not notice.

`make mutants` runs it; `make mutants ARGS="--only lsh --jobs 1"` a part of it.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import sys
import tempfile

from tests.compilation import compile_quickly
from tests.mutants import data, functional, models, nn, tasks, training
from tests.mutants.mutant import Mutant, mutated
from tests.mutants.runner import Outcome, Runner, as_json

ROOT = pathlib.Path(__file__).parents[2]
MUTANTS = (*functional.MUTANTS, *nn.MUTANTS, *models.MUTANTS, *data.MUTANTS, *tasks.MUTANTS, *training.MUTANTS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="of a file or a name, such as lsh or functional/[a-c]"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="how many run at once (2)")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=300, help="for the tests of a mutant (300)")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write every outcome there")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if re.search(arguments.only, mutant.title)]
    if not chosen:
        sys.exit(f"no mutant is called {arguments.only!r}")
    for mutant in chosen:  # before any runs: one that does not apply must not be found after an hour
        mutated(ROOT, mutant)

    compile_quickly(os.environ)
    # Mutants' programs would crowd out those of ordinary tests.
    os.environ.setdefault("TFX_JAX_TEST_CACHE", str(pathlib.Path.home() / ".cache" / "tfx_jax" / "mutants"))
    outcomes: dict[Mutant, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="tfx_jax-mutants-", ignore_cleanup_errors=True) as folder:
        runner = Runner(ROOT, pathlib.Path(folder).resolve(), arguments.jobs)
        for mutant, outcome in runner.run(chosen, arguments.limit):
            outcomes[mutant] = outcome
            by = " ".join(outcome.failed)
            print(f"{outcome.status:9} {outcome.seconds:6.1f} s  {mutant.title}  {by}".rstrip(), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(as_json(outcomes), indent=1) + "\n")
        killers = {name for outcome in outcomes.values() for name in outcome.failed if ".py" in name}
        print(f"\nand without a mutant the {len(killers)} tests that killed them", flush=True)
        broken = runner.failing(killers, arguments.limit)
    print_table(outcomes)
    if broken:
        sys.exit("\n".join(["\nthese fail without a mutant too, so what they killed does not count:", *sorted(broken)]))


def print_table(outcomes: dict[Mutant, Outcome]) -> None:
    """Counts by folder, and names what survived."""
    folders = collections.defaultdict(list)
    for mutant, outcome in outcomes.items():
        folders[mutant.file.partition("/")[0]].append(outcome.status != "survived")
    print(f"\n{'folder':12} mutants  killed  share")
    for folder, killed in [*folders.items(), ("all", [is_killed for part in folders.values() for is_killed in part])]:
        print(f"{folder:12} {len(killed):7} {sum(killed):7} {sum(killed) / len(killed):6.0%}")
    for status in ("timed out", "survived"):
        titles = [mutant.title for mutant, outcome in outcomes.items() if outcome.status == status]
        if titles:
            print(f"\n{status}{' (counted as killed)' if status == 'timed out' else ''}:", *titles, sep="\n  ")


if __name__ == "__main__":
    main()
