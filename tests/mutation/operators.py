"""Mutants of a Python file: small mistakes, made on its syntax tree.

Each operator replaces one node. The text of every other node stays as it is, comments included, because some of our
code reads its own comments. Operators leave alone what no test should notice or what only a crash would show:
docstrings, annotations, assertions, error messages, f-strings, match patterns, and very small or large floats.
"""

import ast
import collections
import copy
import itertools
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS = {
    ast.Lt: {"boundary": ast.LtE, "negate": ast.GtE},
    ast.LtE: {"boundary": ast.Lt, "negate": ast.Gt},
    ast.Gt: {"boundary": ast.GtE, "negate": ast.LtE},
    ast.GtE: {"boundary": ast.Gt, "negate": ast.Lt},
    ast.Eq: {"negate": ast.NotEq},
    ast.NotEq: {"negate": ast.Eq},
    ast.Is: {"negate": ast.IsNot},
    ast.IsNot: {"negate": ast.Is},
    ast.In: {"negate": ast.NotIn},
    ast.NotIn: {"negate": ast.In},
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("cummin", "cummax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("logical_and", "logical_or"),
    ("sum", "mean"),
    ("sin", "cos"),
    ("tril", "triu"),
)
_SWAPPED = dict(_PAIRS) | {b: a for a, b in _PAIRS}
_ORDER_IS_FREE = {
    "min",
    "max",
    "minimum",
    "maximum",
    "logical_and",
    "logical_or",
    "add",
    "multiply",
    "isinstance",
    "cast",
}
# Without these a program computes the same (perhaps more slowly), or does not start.
_DECORATORS_KEPT = {
    "abstractmethod",
    "cache",
    "cached_property",
    "checkpoint",
    "classmethod",
    "contextmanager",
    "custom_vjp",
    "dataclass",
    "jit",
    "lru_cache",
    "overload",
    "property",
    "runtime_checkable",
    "staticmethod",
    "weights_on_request",
    "wraps",
}
_PARENTHESIZED = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda, ast.UnaryOp)


class Mutant(NamedTuple):
    """One mistake in one file.

    The id has no file and no line in it, so a function keeps its ids when it moves to another file.
    """

    file: str
    """Path below the package."""
    id: str
    """Qualified name of the function, class or variable; operator; count of the operator's sites in there."""
    operator: str
    line: int
    start: int
    """Where the replaced text begins, in bytes of the file."""
    end: int
    text: str
    """What replaces it."""

    def apply(self, source: str) -> str:
        """Returns the file's text with the mistake in it."""
        encoded = source.encode()
        return (encoded[: self.start] + self.text.encode() + encoded[self.end :]).decode()


class _Site(NamedTuple):
    name: str
    operator: str
    node: ast.AST
    text: str
    """What replaces the node's text."""


def find_mutants(source: str, file: str) -> Iterator[Mutant]:
    """Generates all mutants of a file, in the order of its syntax tree."""
    lines = source.encode().split(b"\n")
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    counts = collections.Counter()
    for site in _sites(ast.parse(source), file.rpartition("/")[2].removesuffix(".py"), ""):
        node = site.node
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        counts[site.name, site.operator] += 1
        mutant_id = f"{site.name}:{site.operator}:{counts[site.name, site.operator]}"
        yield Mutant(file, mutant_id, site.operator, node.lineno, start, end, site.text)


def _sites(node: ast.AST, module: str, name: str) -> Iterator[_Site]:
    """Generates the sites below a node; `name` is that of the definition around it."""
    for child in _children(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        elif isinstance(node, ast.Module | ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            inner = f"{name}.{ast.unparse(target)}".lstrip(".")
        for operator, old, text in _mutations(child, node):
            yield _Site(inner or module, operator, old, text)
        yield from _sites(child, module, inner)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Generates the parts of a node that may be mutated."""
    if isinstance(node, ast.Raise) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "bases", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr | ast.pattern):
                continue
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            is_error = isinstance(child, ast.Call) and ast.unparse(child.func).endswith("Error")
            is_alias = isinstance(node, ast.Module) and isinstance(child, ast.Assign) and _is_type(child.value)
            is_type_checking = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            if not (is_docstring or is_error or is_alias or is_type_checking):
                yield child


def _is_type(node: ast.AST) -> bool:
    """Whether a value at module level is a type alias, such as `int | None` or `Float[Array, "T D"]`."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr)
    return isinstance(node, ast.Subscript) or (isinstance(node, ast.Call) and "TypeVar" in ast.unparse(node.func))


def _mutations(node: ast.AST, parent: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Generates (operator, node to replace, its new text); the node is this one or a decorator or body of it."""
    match node:
        case ast.Compare(ops=[op]):
            for operator, other in _COMPARISONS[type(op)].items():
                yield operator, node, _text(node, ops=[other()])
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic", node, _text(node, op=_ARITHMETIC[type(op)]())
        case ast.BinOp(op=ast.MatMult()):
            yield "swap-operands", node, _text(node, left=node.right, right=node.left)
        case ast.BoolOp():
            yield "and-or", node, _text(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, _text(node.operand)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if _other_constant(value) is not None:
            yield _constant_operator(parent), node, f"-{_other_constant(value)!r}"
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield "sign", node, _text(node.operand)
        case ast.Constant(value=value) if _other_constant(value) is not None:
            yield _constant_operator(parent), node, repr(_other_constant(value))
        case ast.Call():
            yield from _call_mutations(node)
        case ast.Raise():
            yield "drop-raise", node, "pass"
        case ast.Expr(value=ast.Call()):
            yield "drop-call", node, "pass"
        case ast.AugAssign(op=op):
            yield "drop-assignment", node, "pass"
            if type(op) in _ARITHMETIC:
                yield "arithmetic", node, _text(node, op=_ARITHMETIC[type(op)]())
        case ast.Break():
            yield "break-continue", node, "continue"
        case ast.Continue():
            yield "break-continue", node, "break"
        case ast.If() | ast.While() | ast.IfExp():
            if not isinstance(node.test, ast.Compare):  # its own operators do that
                yield "negate", node.test, f"not ({ast.unparse(node.test)})"
        case ast.FunctionDef() | ast.ClassDef():
            yield from _definition_mutations(node)


def _call_mutations(node: ast.Call) -> Iterator[tuple[str, ast.AST, str]]:
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in _SWAPPED:
        function = copy.copy(node.func)
        setattr(function, "attr" if isinstance(function, ast.Attribute) else "id", _SWAPPED[name])
        yield "swap-function", node.func, ast.unparse(function)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield "drop-keyword", node, _text(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])
    for i, (a, b) in enumerate(zip(node.args, node.args[1:], strict=False)):
        is_starred = isinstance(a, ast.Starred) or isinstance(b, ast.Starred)
        if not is_starred and name not in _ORDER_IS_FREE and ast.dump(a) != ast.dump(b):
            yield "swap-arguments", node, _text(node, args=[*node.args[:i], b, a, *node.args[i + 2 :]])


def _definition_mutations(node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, ast.AST, str]]:
    for decorator in node.decorator_list:
        if not _DECORATORS_KEPT & {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(decorator)}:
            yield "drop-decorator", decorator, "(lambda decorated: decorated)"
    if isinstance(node, ast.FunctionDef) and node.name != "__init__":  # without it, everything crashes
        inside = [part for part in ast.walk(node) if isinstance(part, ast.Return | ast.Yield | ast.YieldFrom)]
        body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
        if body and not inside:
            indent = " " * body[0].col_offset
            yield "return-early", body[0], f"return\n{indent}{ast.unparse(body[0]).replace(chr(10), chr(10) + indent)}"


def _constant_operator(parent: ast.AST) -> str:
    return "axis" if isinstance(parent, ast.keyword) and parent.arg in ("axis", "axes") else "constant"


def _other_constant(value: object) -> object:
    """Returns what a mistake makes of a constant; None: leave it alone."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float) and (value == 0 or 1e-3 <= value <= 1e6):
        return 2 * value or 1.0
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _text(node: ast.AST, **fields: object) -> str:
    """The text of a node with other values of some fields."""
    node = copy.copy(node)
    for field, value in fields.items():
        setattr(node, field, value)
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, _PARENTHESIZED) else text
