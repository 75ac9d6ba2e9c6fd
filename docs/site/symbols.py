"""Public symbols of tfx_jax and their sources, found by parsing the files, without importing them."""

import ast
import dataclasses
import functools
import inspect
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
REPOSITORY = "https://github.com/tfx-jax/tfx-jax"
PACKAGES = {
    "functional": "tfx_jax.functional",
    "nn": "tfx_jax.nn",
    "models": "tfx_jax.models",
    "generation": "tfx_jax.generation",
    "tasks": "tfx_jax.tasks",
    "training": "tfx_jax.training",
    "metrics": "tfx_jax.metrics",
    "testing": "tfx_jax.testing",
    "data.sources": "tfx_jax.data.sources",
    "data.tokenizers": "tfx_jax.data.tokenizers",
    "data.objectives": "tfx_jax.data.objectives",
    "data.batching": "tfx_jax.data.batching",
}
"""The packages whose `__all__` is the public interface, by the names of their folders in the reference."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
"""Syntax tree that defines a name."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A public name, the syntax tree that defines it, and the documentation beside it.

    Attributes:
      package: the package that exports it, such as "tfx_jax.functional".
      name: its name there.
      module: the module that defines it.
      node: its definition.
      doc: its docstring or, for a constant, the string below it; empty if there is none.
    """

    package: str
    name: str
    module: str
    node: Definition
    doc: str

    @property
    def page(self) -> str:
        """The path of its page, without a suffix."""
        return f"api/{self.package.removeprefix('tfx_jax.')}/{self.name}"

    @property
    def source(self) -> str:
        """The address of its source."""
        path = path_of(self.module).relative_to(ROOT).as_posix()
        return f"{REPOSITORY}/blob/main/{path}#L{self.node.lineno}"


def path_of(module: str) -> pathlib.Path:
    """Returns the file of a module or package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def tree(module: str) -> ast.Module:
    """Parses a module."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def docstring(node: ast.AST) -> str:
    """Returns the docstring of a module, class or function without indentation; empty if there is none."""
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    return inspect.cleandoc(ast.get_docstring(node) or "") if documented else ""


def exported(package: str) -> list[str]:
    """Returns the names in the `__all__` of a package, sorted."""
    names: set[str] = set()
    for node in tree(package).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            continue
        names |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
        has_subpackage = any(
            isinstance(item, ast.Attribute) and item.attr == "__all__" for item in ast.walk(node.value)
        )
        if has_subpackage:  # `__all__ += attention.__all__`
            names |= set(exported(f"{package}.attention"))
    return sorted(names, key=str.lower)


def find(module: str, name: str) -> tuple[str, Definition, str]:
    """Follows imports to the definition of a name.

    Returns:
      (defining module, definition, documentation).

    Raises:
      LookupError: if a module neither defines nor imports the name.
    """
    body = tree(module).body
    for index, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node, docstring(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                below = body[index + 1] if index + 1 < len(body) else None
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                return module, node, inspect.cleandoc(str(below.value.value)) if is_text else ""
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tfx_jax"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
                if alias.name == "*" and name in exported(node.module):
                    return find(node.module, name)
    raise LookupError(f"{module} does not define {name}")


@functools.cache
def symbols(package: str) -> list[Symbol]:
    """Returns all public symbols of a package."""
    return [Symbol(package, name, *find(package, name)) for name in exported(package)]


@functools.cache
def public() -> dict[str, Symbol]:
    """Returns all public symbols by name; if two packages export a name, the symbol of the first one in `PACKAGES`."""
    result: dict[str, Symbol] = {}
    for package in PACKAGES.values():
        for symbol in symbols(package):
            result.setdefault(symbol.name, symbol)
    return result


def bases(symbol: Symbol) -> list[Symbol]:
    """Returns the base classes of a class that tfx_jax defines, nearest first."""
    result: list[Symbol] = []
    for base in getattr(symbol.node, "bases", []):
        if isinstance(base, ast.Name):
            try:
                base_symbol = Symbol(symbol.package, base.id, *find(symbol.module, base.id))
            except LookupError:  # a class of another library
                continue
            result += [base_symbol, *bases(base_symbol)]
    return result
