"""What a line of the user's says, by its text: Python keeps nothing else of it.

A file that is not there, or no Python, says nothing.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache

# Folders of libraries.
INSTALLED = ("site-packages", "dist-packages")
_BOUNDS = ("min", "max", "range")
# Functions that call what they are given, or ask what is one of it.
_TAKE_CLASSES = {"isinstance", "issubclass", "map", "filter", "defaultdict"}
# What functions are called that note a number and decide nothing by it.
_NOTES = {
    *(
        "append",
        "log",
        "log_dict",
        "log_metrics",
        "print",
        "write",
        "debug",
        "info",
        "warning",
        "add_scalar",
        "add_scalars",
    ),
    *("set_postfix", "set_postfix_str", "set_description"),
}


def multiplies_by_zero(file: str, line: int) -> bool:
    """Return whether a zero stands in a product of that line itself: no other number will ever be there, `loss + 0.0 * unused.sum()`."""
    return line in _lines_with_zero(file)


@lru_cache(maxsize=64)
def _lines_with_zero(file: str) -> frozenset[int]:
    products = (each for each in _nodes(file) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult))
    return _lines_of(
        each
        for each in products
        if any(isinstance(side, ast.Constant) and side.value == 0 for side in (each.left, each.right))
    )


def raises(file: str, line: int) -> bool:
    """Return whether a line raises by itself: `raise`, or `assert`."""
    return line in _raising_lines(file)


@lru_cache(maxsize=64)
def _raising_lines(file: str) -> frozenset[int]:
    return _lines_of(each for each in _nodes(file) if isinstance(each, (ast.Raise, ast.Assert)))


def compares_products(file: str, line: int) -> bool:
    """Return whether the function around a line compares a number of elements, or a product, as rows times tokens are: by its text."""
    return any(first <= line <= last for first, last in _functions_with_products(file))


@lru_cache(maxsize=64)
def _functions_with_products(file: str) -> tuple[tuple[int, int], ...]:
    if any(folder in file for folder in INSTALLED):
        return ()
    functions = (each for each in _nodes(file) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return tuple((each.lineno, each.end_lineno or each.lineno) for each in functions if _compares_product(each))


def _compares_product(function: ast.AST) -> bool:
    products: set[str] = set()
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and _multiplies(each.value):
            products |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return any(
        _multiplies(each) or any(isinstance(part, ast.Name) and part.id in products for part in ast.walk(each))
        for each in ast.walk(function)
        if isinstance(each, ast.Compare)
    )


def bounds_a_size(file: str, line: int) -> bool:
    """Return whether a line asks for a size of which the smaller or larger, or a range to it, of a number is made: by its text.

    `n = min(self.length(), ids.shape[1])`, `for i in range(self.length(), tokens)`: of a part's size it is another than of the whole's.
    """
    return line in _lines_of_bounds(file)


@lru_cache(maxsize=64)
def _lines_of_bounds(file: str) -> frozenset[int]:
    if any(folder in file for folder in INSTALLED):
        return frozenset()
    functions = [each for each in _nodes(file) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return frozenset().union(*(_lines_of(_bounded_sizes(each)) for each in functions))


def _bounded_sizes(function: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the calls of a function that bound a size, and where the names in them are given sizes."""
    sizes: dict[str, list[ast.stmt]] = {}

    def is_size(node: ast.AST) -> bool:
        return any(
            (isinstance(each, ast.Attribute) and each.attr in ("shape", "size"))
            or (isinstance(each, ast.Name) and each.id in sizes)
            for each in ast.walk(node)
        )

    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and is_size(each.value):
            for part in (part for target in each.targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                sizes.setdefault(part.id, []).append(each)
    for each in ast.walk(function):
        if not (isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in _BOUNDS):
            continue
        constant = any(isinstance(part, ast.Constant) for part in each.args)
        if len(each.args) == 2 and not constant and sum(map(is_size, each.args)) == 1:
            yield each
            names = {part.id for part in ast.walk(each) if isinstance(part, ast.Name)}
            yield from (one for name in names for one in sizes.get(name, ()))


def ends_a_loop(file: str, line: int) -> bool:
    """Return whether a line asks whether a loop goes on: that of a `while`, or an `if` that breaks one off. By its text."""
    return line in _lines_that_end_loops(file)


@lru_cache(maxsize=64)
def _lines_that_end_loops(file: str) -> frozenset[int]:
    if any(folder in file for folder in INSTALLED):
        return frozenset()
    loops = [each for each in _nodes(file) if isinstance(each, (ast.While, ast.For))]
    within = (each for loop in loops for each in ast.walk(loop) if isinstance(each, ast.If))
    ends = (each.test for each in within if any(isinstance(part, ast.Break) for part in each.body))
    return _lines_of([*(each.test for each in loops if isinstance(each, ast.While)), *ends])


@lru_cache(maxsize=4096)
def only_calls(file: str, name: str) -> bool:
    """Return whether functions of a file only call what Python has by a name, or have others call it, or ask `isinstance` by it: by its text.

    What stands in its place is no dtype, `torch.zeros(3, dtype=int)`, and not the type of a number, `type(x) is int`.
    """
    found: set[ast.AST] = set()
    allowed: set[ast.AST] = set()
    functions = (each for each in _nodes(file) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))
    for each in (part for function in functions for part in ast.walk(function)):
        match each:
            case ast.Name(id=own) if own == name:
                found.add(each)
            case ast.Call(func=called, args=args):
                by = called.id if isinstance(called, ast.Name) else ""
                allowed |= {called, *(part for value in args if by in _TAKE_CLASSES for part in ast.walk(value))}
            case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation) if annotation is not None:
                allowed |= {*ast.walk(annotation)}
            case ast.FunctionDef(returns=returns) if returns is not None:
                allowed |= {*ast.walk(returns)}
            case ast.keyword(arg="key" | "type" | "default_factory", value=value):
                allowed.add(value)
    return found <= allowed


def only_notes(file: str, line: int) -> bool:
    """Return whether a line only notes what it is given, `self.losses.append(float(loss))`, `self.log("loss", loss.item())`: by its text."""
    return line in _lines_that_note(file)


@lru_cache(maxsize=64)
def _lines_that_note(file: str) -> frozenset[int]:
    nodes = [*_nodes(file)]
    calls = (each for each in nodes if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call))
    decisions = (each for each in nodes if isinstance(each, (ast.Compare, ast.IfExp, ast.BoolOp)))
    return _lines_of(each for each in calls if _is_note(each.value)) - _lines_of(decisions)


def _is_note(call: ast.expr) -> bool:
    function = call.func if isinstance(call, ast.Call) else None
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)) in _NOTES


def _multiplies(node: ast.AST) -> bool:
    """Return whether an expression has a product, or asks for one."""
    names = {"numel", "nelement", "prod"}
    return any(
        (isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult))
        or (isinstance(each, ast.Attribute) and each.attr in names)
        for each in ast.walk(node)
    )


def _nodes(file: str) -> Iterator[ast.AST]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return iter(())
    return ast.walk(tree)


def _lines_of(nodes: Iterable[ast.expr | ast.stmt]) -> frozenset[int]:
    return frozenset(line for each in nodes for line in range(each.lineno, (each.end_lineno or each.lineno) + 1))
