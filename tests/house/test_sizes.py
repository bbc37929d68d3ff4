"""The package keeps its sizes: a file is read on a few screens, a function on one."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_sp"
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MEDIAN_LINES = 400, 60, 140
FILES = {file.relative_to(PACKAGE): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}


def test_no_file_is_too_long():
    lengths = {str(name): len(text.splitlines()) for name, text in FILES.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
    # Files that only re-export or name a folder say nothing of the others.
    assert (
        statistics.median(length for name, length in lengths.items() if not name.endswith("__init__.py")) < MEDIAN_LINES
    )


def test_no_function_is_too_long():
    lengths = {
        f"{name}:{node.name}": node.end_lineno - node.lineno + 1
        for name, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION} == {}
