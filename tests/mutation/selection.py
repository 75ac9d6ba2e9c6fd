"""Which mutants a run samples, and which tests are most likely to notice each of them."""

import ast
import collections
import hashlib
import importlib.util
import math
import pathlib
import re
from collections.abc import Iterable

from tests.mutation.operators import Mutant


def package_of(mutant: Mutant) -> str:
    """Returns the mutant's top-level package; files beside the packages count as one."""
    return mutant.file.partition("/")[0] if "/" in mutant.file else "(files)"


def sample(mutants: Iterable[Mutant], seed: int, count: int) -> list[Mutant]:
    """Chooses `count` mutants of each package, as evenly as possible over the operators.

    The choice depends on the hash of each id alone. So the same seed samples the same mutants after a refactoring, as
    far as their functions still have their names.
    """
    queues = collections.defaultdict(list)
    for mutant in mutants:
        queues[package_of(mutant), mutant.operator].append(mutant)
    for queue in queues.values():
        queue.sort(key=lambda mutant: _hash(seed, mutant.id))
    chosen = []
    for package in sorted({package for package, _ in queues}):
        operators = sorted((operator for p, operator in queues if p == package), key=lambda o: _hash(seed, package + o))
        rounds = [queues[package, operator][n : n + 1] for n in range(count) for operator in operators]
        chosen += [mutant for few in rounds for mutant in few][:count]
    return chosen


def _hash(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


class NearestTests:
    """Ranks test files by how likely they are to notice a mutant, from names and imports.

    Args:
      root: the checkout.
    """

    def __init__(self, root: pathlib.Path):
        paths = [path for folder in ("tfx_jax", "tests") for path in sorted((root / folder).rglob("*.py"))]
        self._texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        modules = {_module(file): file for file in self._texts}
        self._imports = {
            file: {modules[name] for name in _imported(file, text) if name in modules}
            for file, text in self._texts.items()
        }
        self._words = {file: collections.Counter(re.findall(r"\w+", text)) for file, text in self._texts.items()}
        self._definitions = {
            file: {
                node.name: set(re.findall(r"\w+", ast.get_source_segment(text, node) or ""))
                for node in ast.parse(text).body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
            for file, text in self._texts.items()
            if file.startswith("tfx_jax/")
        }
        self._library_names = {name for definitions in self._definitions.values() for name in definitions}
        self._tests = [file for file in self._texts if file.rpartition("/")[2].startswith("test_")]

    def of(self, mutant: Mutant, count: int) -> list[str]:
        """Returns the `count` nearest files of tests, the nearest first; a file with doctests comes before them.

        Near is the mirror of the file, a test that mentions the function, its callers or what the mistake removes, and
        a test that imports the file.
        """
        file = f"tfx_jax/{mutant.file}"
        folder, _, name = mutant.file.removesuffix(".py").rpartition("/")
        distances = self._distances_to(file)
        replaced = self._texts[file].encode()[mutant.start : mutant.end].decode()
        uses = dict.fromkeys(self._library_names.intersection(re.findall(r"\w+", replaced)), 2.0)
        names = uses | self._names_around(file, mutant.id.partition(":")[0].split("."))
        mentions = {name: sum(name in self._words[test] for test in self._tests) for name in names}

        def score(test: str) -> tuple[float, int]:
            words = self._words[test]
            points = 20.0 * (test == f"tests/{folder}/test_{name}.py")
            points += 10.0 * test.startswith(f"tests/{folder}/test_{name}_")
            # A name says more if this file mentions it often and few others do.
            points += sum(
                weight * (1 + 3 / mentions[n]) * math.log1p(words[n]) for n, weight in names.items() if n in words
            )
            points += 4.0 / distances.get(test, 99)
            points += 3.0 * test.startswith(f"tests/{folder}/")
            return -points, len(self._texts[test])

        doctests = [file] if ">>>" in self._texts[file] else []
        return [*doctests, *sorted(self._tests, key=score)[:count]]

    def _names_around(self, file: str, names: list[str]) -> dict[str, float]:
        """Returns the names of a mutated definition, of its callers and of their callers, with weights."""
        weights = {name: 1.0 for name in names if not name.startswith("__")}
        nearer = {(file, names[0])}
        for weight in (0.5, 0.25):
            nearer = {
                (caller_file, caller)
                for caller_file, definitions in self._definitions.items()
                for callee_file, callee in nearer
                if caller_file == callee_file or callee_file in self._imports[caller_file]
                for caller, words in definitions.items()
                if callee in words
            }
            weights = {name: weight for _, name in nearer} | weights
        return weights

    def _distances_to(self, file: str) -> dict[str, int]:
        """Returns how many imports lead from each file to this one."""
        importers = collections.defaultdict(set)
        for source, targets in self._imports.items():
            for target in targets:
                importers[target].add(source)
        distances, waiting = {file: 0}, collections.deque([file])
        while waiting:
            nearer = waiting.popleft()
            for importer in importers[nearer] - distances.keys():
                distances[importer] = distances[nearer] + 1
                waiting.append(importer)
        return distances


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(file: str, text: str) -> Iterable[str]:
    package = file.rpartition("/")[0].replace("/", ".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
