"""Breaks the library in small ways, and reports which mistakes the tests do not notice. See tests/README.md."""

import argparse
import collections
import difflib
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
from collections.abc import Sequence

from tests.compilation import compile_quickly

compile_quickly(os.environ)

from tests.mutation.operators import Mutant, find_mutants  # noqa: E402
from tests.mutation.runner import Limits, Outcome, Runner, Task  # noqa: E402
from tests.mutation.selection import NearestTests, package_of, sample  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]


def main() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that running tests are stopped too
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--count", type=int, default=10, help="mutants of each package (10)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression for files, such as ^nn/")
    parser.add_argument("--id", default="", metavar="PATTERN", help="all mutants with such ids instead of a sample")
    parser.add_argument("--files", type=int, default=10, help="how many of the nearest test files run (10)")
    parser.add_argument("--seconds", type=float, default=60, help="CPU time after which no further test starts (60)")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants run at once (1)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args()

    library = ROOT / "tfx_jax"
    files = [path.relative_to(library).as_posix() for path in sorted(library.rglob("*.py"))]
    mutants = [
        m for file in files if re.search(options.only, file) for m in find_mutants((library / file).read_text(), file)
    ]
    mutants = (
        [m for m in mutants if re.search(options.id, m.id)]
        if options.id
        else sample(mutants, options.seed, options.count)
    )
    if not mutants:
        sys.exit("no mutant matches --only and --id")
    if options.list:
        print(*map(describe, mutants), sep="\n")
        return
    results = run(mutants, options)
    print_table(results)


def run(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[tuple[Mutant, Outcome]]:
    """Runs the nearest tests on each mutant, then confirms the mutants that were killed."""
    nearest = NearestTests(ROOT)
    tasks = [Task(tuple(nearest.of(m, options.files)), f"tfx_jax/{m.file}", mutated(m)) for m in mutants]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        limits = Limits(seconds=options.seconds)
        runner = Runner(ROOT, pathlib.Path(folder).resolve(), options.jobs, limits)
        for index, outcome in runner.run(tasks):
            results.append((mutants[index], outcome))
            by = f"  by {outcome.failed[0]}" if outcome.failed else f"  {outcome.passed} tests passed"
            print(
                f"{outcome.status:9} {outcome.seconds:5.0f} s  {mutants[index].file} {mutants[index].id}{by}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps([as_json(*result) for result in results], indent=1) + "\n")
        results = confirm(results, runner)
    if options.json:
        options.json.write_text(json.dumps([as_json(*result) for result in results], indent=1) + "\n")
    return results


def confirm(results: Sequence[tuple[Mutant, Outcome]], runner: Runner) -> list[tuple[Mutant, Outcome]]:
    """Runs the tests that failed again, with the mutant and without one.

    A test that passes with the mutant, or fails without one, has not noticed the mistake. So the mutant survived.
    """
    killed = [(mutant, outcome) for mutant, outcome in results if outcome.failed]
    print(f"again, with and without a mutant: {len(killed)} tests that failed", flush=True)
    with_mutant = [Task(outcome.failed[:1], f"tfx_jax/{mutant.file}", mutated(mutant)) for mutant, outcome in killed]
    tests = collections.defaultdict(set)
    for _, outcome in killed:
        tests[outcome.failed[0].partition("::")[0]].add(outcome.failed[0])
    without = [Task(tuple(sorted(names))) for names in tests.values()]
    again = dict(runner.run([*with_mutant, *without]))
    broken = {test for i in range(len(with_mutant), len(again)) for test in again[i].failed}
    flaky = {mutant for i, (mutant, _) in enumerate(killed) if again[i].status == "survived"}
    for test in sorted(broken | {outcome.failed[0] for mutant, outcome in killed if mutant in flaky}):
        print(f"not counted, because it fails without a mutant or passes with it: {test}")
    return [(m, o._replace(status="survived") if m in flaky or broken & {*o.failed} else o) for m, o in results]


def mutated(mutant: Mutant) -> str:
    """Returns the text of the mutant's file with the mistake in it."""
    return mutant.apply((ROOT / "tfx_jax" / mutant.file).read_text())


def describe(mutant: Mutant) -> str:
    """Returns the place and id of a mutant, and its change as a diff."""
    original = (ROOT / "tfx_jax" / mutant.file).read_text()
    diff = list(difflib.unified_diff(original.splitlines(), mutated(mutant).splitlines(), lineterm="", n=0))
    return "\n    ".join([f"tfx_jax/{mutant.file}:{mutant.line}  {mutant.id}", *diff[3:]])


def as_json(mutant: Mutant, outcome: Outcome) -> dict[str, object]:
    """Returns one result; runs before and after a change are compared by `id`."""
    fields = {"id": mutant.id, "package": package_of(mutant), "operator": mutant.operator}
    return fields | {"change": describe(mutant)} | outcome._asdict()


def print_table(results: Sequence[tuple[Mutant, Outcome]]) -> None:
    """Prints the survivors, and the share of killed mutants of each package."""
    packages = collections.defaultdict(list)
    for mutant, outcome in results:
        packages[package_of(mutant)].append(outcome.status != "survived")
        packages["all"].append(outcome.status != "survived")
    survivors = [mutant for mutant, outcome in results if outcome.status == "survived"]
    print("\nsurvived:", *(describe(mutant) for mutant in survivors), sep="\n\n")
    print(f"\n{'package':12} sampled  killed  survived  share killed")
    for package, killed in sorted(packages.items(), key=lambda item: (item[0] == "all", item[0])):
        total, number = len(killed), sum(killed)
        print(f"{package:12} {total:7} {number:7} {total - number:9} {number / total:13.0%}")


if __name__ == "__main__":
    main()
