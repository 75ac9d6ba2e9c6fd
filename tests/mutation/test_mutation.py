"""The mutation tool itself, without running it on the library."""

import ast
import json
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.mutation.operators import find_mutants
from tests.mutation.selection import NearestTests, sample

ROOT = pathlib.Path(__file__).parents[2]


def changes(source):
    """Returns (operator, changed line) of each mutant."""
    source = textwrap.dedent(source).lstrip()
    found = []
    for mutant in find_mutants(source, "a.py"):
        lines = mutant.apply(source).splitlines()
        (line,) = [line for line, old in zip(lines, [*source.splitlines(), ""], strict=False) if line != old][:1]
        found.append((mutant.operator, line.strip()))
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f(a < b)", [("drop-call", "pass"), ("boundary", "f((a <= b))"), ("negate", "f((a >= b))")]),
        ("a = b is None", [("negate", "a = (b is not None)")]),
        ("a = b + c", [("arithmetic", "a = (b - c)")]),
        ("a = b @ c", [("swap-operands", "a = (c @ b)")]),
        ("a = 3  # why", [("constant", "a = 4  # why")]),
        ("a = 0.5", [("constant", "a = 1.0")]),
        ("a = True", [("constant", "a = False")]),
        ("a = b or c", [("and-or", "a = (b and c)")]),
        ("a = not b", [("not", "a = b")]),
        ("a = -b", [("sign", "a = b")]),
        ("a = b if c else d", [("negate", "a = b if not (c) else d")]),
        ("a = f(b, axis=-1)", [("drop-keyword", "a = f(b)"), ("axis", "a = f(b, axis=-2)")]),
        ("a += b[-1]", [("drop-assignment", "pass"), ("arithmetic", "a -= b[-1]"), ("constant", "a += b[-2]")]),
        ("a = f(b, c)", [("swap-arguments", "a = f(c, b)")]),
        ("a = jnp.minimum(b, c)", [("swap-function", "a = jnp.maximum(b, c)")]),
        ("a += b", [("drop-assignment", "pass"), ("arithmetic", "a -= b")]),
        ('if a: raise ValueError(f"{1 + 2}" + b)', [("negate", 'if not (a): raise ValueError(f"{1 + 2}" + b)')]
         + [("drop-raise", "if a: pass")]),
        ("for a in b: break", [("break-continue", "for a in b: continue")]),
        ("@d\ndef f(): return a", [("drop-decorator", "@(lambda decorated: decorated)")]),
        ("def f():\n    x.y = a", [("return-early", "return")]),
        ("a = 'é' < b", [("boundary", "a = ('é' <= b)"), ("negate", "a = ('é' >= b)")]),
    ],
)  # fmt: skip
def test_operators(source, expected):
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring < 3."""',
        'def f(a: Literal[3] = b, *, c: "1 + 2") -> Float[Array, 4]: return a',
        "Alias = int | None",
        'Shape = Float[Array, "B T"]',
        "assert a < 3",
        'a = f"{b + 1:>3}"',
        "if TYPE_CHECKING: f(3)",
        "match a:\n    case -1: b = c",
        "a = 1e-6",
        "a = -1e-6",
        "a = f(b, b)",
        "@functools.cache\ndef f(): return a",
        "a = UserError(b < 3)",
    ],
)
def test_what_is_never_mutated(source):
    assert changes(source) == []


def test_mutants_of_the_library_compile_and_differ():
    texts = {path.name: path.read_text() for path in (ROOT / "tfx_jax/nn").glob("*.py")}
    mutants = [mutant for name, text in texts.items() for mutant in find_mutants(text, f"nn/{name}")]
    assert len(mutants) > 300
    for mutant in sample(mutants, seed=0, count=60):
        text = texts[mutant.file.removeprefix("nn/")]
        mutated = mutant.apply(text)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text)), mutant
        compile(mutated, mutant.file, "exec")


def test_a_moved_function_keeps_its_mutants_in_the_sample():
    functions = [f"def f{n}(a, b):\n    return a < b + {n}\n" for n in range(50)]
    before = list(find_mutants("\n".join(functions), "nn/a.py"))
    after = [
        *find_mutants("\n".join(functions[40::-1]), "nn/b/c.py"),
        *find_mutants("\n".join(functions[41:]), "nn/d.py"),
    ]
    chosen = [mutant.id for mutant in sample(before, seed=0, count=12)]
    assert len(chosen) == len({*chosen}) == 12
    assert chosen == [mutant.id for mutant in sample(after, seed=0, count=12)]
    assert chosen != [mutant.id for mutant in sample(before, seed=1, count=12)]
    operators = [mutant_id.split(":")[1] for mutant_id in chosen]
    assert {operator: operators.count(operator) for operator in operators} == dict.fromkeys(operators, 3)


def test_nearest_tests_are_found_by_names_and_imports(tmp_path):
    files = {
        "tfx_jax/nn/a.py": "def walk(): return 1 < 2",
        "tfx_jax/nn/b.py": "from tfx_jax.nn import a",
        "tfx_jax/nn/c.py": "",
        "tests/nn/test_a.py": "",
        "tests/nn/test_c.py": "from tfx_jax.nn import c",
        "tests/tasks/test_b.py": "from tfx_jax.nn import b",
        "tests/cli/test_far.py": "import tfx_jax.nn.b\nwalk()",
        "tests/cli/test_other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    mutant = next(find_mutants(files["tfx_jax/nn/a.py"], "nn/a.py"))
    nearest = NearestTests(tmp_path).of(mutant, 4)
    assert nearest == ["tests/nn/test_a.py", "tests/cli/test_far.py", "tests/nn/test_c.py", "tests/tasks/test_b.py"]


_PROGRAM = """
import json, pathlib, sys
from tests.mutation.operators import find_mutants
from tests.mutation.runner import Limits, Runner, Task

root, folder = map(pathlib.Path, sys.argv[1:])
source = (root / "tfx_jax/clip.py").read_text()
mutants = {mutant.id: mutant.apply(source) for mutant in find_mutants(source, "clip.py")}
tasks = {
    f"{mutant}, {tests}": Task((f"tests/{tests}.py",), "tfx_jax/clip.py", mutants[mutant])
    for mutant, tests in [
        ("clip:boundary:1", "test_weak"), ("clip:boundary:1", "test_strong"), ("clip:drop-assignment:1", "test_weak"),
        ("LIMIT:constant:1", "test_imports"), ("LIMIT:constant:1", "beside/test_conftest"),
    ]
}
tasks["none, test_strong"] = Task(("tests/test_strong.py", "tests/test_broken.py"))
runner = Runner(root, folder, jobs=2, limits=Limits(test_seconds=4), imports=())
outcomes = {list(tasks)[index]: outcome for index, outcome in runner.run(list(tasks.values()))}
print(json.dumps({name: [outcome.status, *outcome.failed] for name, outcome in outcomes.items()}))
"""


@pytest.mark.slow
def test_a_strong_test_kills_a_mutant_that_a_weak_one_lets_survive(tmp_path):
    clip = "LIMIT = 3\n\n\ndef clip(x):\n    while x > LIMIT:\n        x -= 1\n    return x\n"
    files = {
        "tfx_jax/__init__.py": "",
        "tfx_jax/clip.py": clip,
        "tests/test_weak.py": "from tfx_jax.clip import clip\n\ndef test_large():\n    assert clip(9) < 9\n",
        "tests/test_strong.py": "from tfx_jax.clip import clip\n\ndef test_3():\n    assert clip(3) == 3 == clip(9)\n",
        "tests/test_imports.py": "from tfx_jax import clip\n\nassert clip.LIMIT == 3\n\ndef test(): pass\n",
        "tests/beside/conftest.py": "from tfx_jax import clip\n\nassert clip.LIMIT == 3\n",
        "tests/beside/test_conftest.py": "def test(): pass\n",
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    }
    root, folder = tmp_path / "root", tmp_path / "folder"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    command = [sys.executable, "-c", _PROGRAM, root, folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "clip:boundary:1, test_weak": ["survived"],
        "clip:boundary:1, test_strong": ["killed", "tests/test_strong.py::test_3"],
        "clip:drop-assignment:1, test_weak": ["timed out", "tests/test_weak.py::test_large"],
        "LIMIT:constant:1, test_imports": ["killed", "tests/test_imports.py"],
        "LIMIT:constant:1, beside/test_conftest": ["killed", "tests/beside/test_conftest.py"],
        "none, test_strong": ["killed", "tests/test_broken.py::test_broken"],
    }
    assert (root / "tfx_jax/clip.py").read_text() == clip
